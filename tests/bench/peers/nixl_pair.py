"""NIXL's UCX backend between two processes: ``nixl_pair.py WORKLOAD SETTINGS``; see `pair`.

Runs in NIXL's environment. `SETTINGS` is ``default``, or ``polled``: no progress thread, both sides
poll instead. Where UCX copies between processes, its errors are not handled, as that needs.
"""

from __future__ import annotations

import os
import sys
import time
from importlib.metadata import version
from typing import Any

os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
from nixl_cu12._api import nixl_agent, nixl_agent_config
from pair import REGION_BYTES, Work, main

POLLED = sys.argv[2] == "polled"
DEADLINE_S = 60.0
CHECK_S = 0.0 if POLLED else 100e-6


def _agent(name: str) -> nixl_agent:
    agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=not POLLED, backends=[]))
    mode = "none" if "cma" in os.environ["UCX_TLS"] else "peer"
    agent.create_backend("UCX", {"ucx_error_handling_mode": mode})
    return agent


class Target:
    def __init__(self, work: Work) -> None:
        self.agent = _agent("target")
        self.agent.register_memory([(work.address, REGION_BYTES, 0, "")], "DRAM")
        self.offer = {"metadata": self.agent.get_agent_metadata().hex(), "at": work.address}

    def poll(self) -> None:
        if POLLED:
            self.agent.get_new_notifs()
        else:
            time.sleep(0.001)


class Initiator:
    def __init__(self, work: Work, offer: Any) -> None:
        self.version = version("nixl-cu12")
        agent = self.agent = _agent("initiator")
        agent.register_memory([(work.address, REGION_BYTES, 0, "")], "DRAM")
        peer = agent.add_remote_agent(bytes.fromhex(offer["metadata"]))
        local = [(work.address + int(at), work.nbytes, 0) for at in work.local]
        remote = [(offer["at"] + int(at), work.nbytes, 0) for at in work.remote]
        ours = agent.prep_xfer_dlist("NIXL_INIT_AGENT", local, "DRAM")
        theirs = agent.prep_xfer_dlist(peer, remote, "DRAM")
        every = list(range(work.count))
        self.prepared = {
            op: agent.make_prepped_xfer(op.upper(), ours, every, theirs, every, b"")
            for op in ("read", "write")
        }

    def run(self, op: str) -> None:
        transfer = self.prepared[op]
        ends_s = time.monotonic() + DEADLINE_S
        state = self.agent.transfer(transfer)
        while state == "PROC":
            if CHECK_S:
                time.sleep(CHECK_S)
            state = self.agent.check_xfer_state(transfer)
            if time.monotonic() > ends_s:
                state = "overdue"
        if state != "DONE":
            raise RuntimeError(state)


if __name__ == "__main__":
    main(Target, Initiator)
