"""kvtier's UCX backend between two processes: ``ucx_pair.py WORKLOAD``; see `pair`."""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

import numpy as np
from pair import REGION_BYTES, Work, main

from kvtier._core import Completions
from kvtier.backends.ucx import UcxTransfers
from kvtier.transfer import Op, Pieces, Side
from kvtier.types import Region, RegionKind

DEADLINE_S = 60.0


def _register(backend: UcxTransfers, address: int) -> Any:
    source = (ctypes.c_uint8 * REGION_BYTES).from_address(address)
    return backend.register(Region(RegionKind.DRAM, address, REGION_BYTES), source)


class Target:
    def __init__(self, work: Work) -> None:
        self.backend = UcxTransfers(Completions())
        handle = _register(self.backend, work.address)
        self.offer = {
            "pid": os.getpid(),
            "address": self.backend.address().hex(),
            "export": self.backend.export(handle).hex(),
            "at": work.address,
        }

    def poll(self) -> None:
        time.sleep(0.001)


class Initiator:
    def __init__(self, work: Work, offer: Any) -> None:
        options = os.environ.get("KVTIER_UCX_OPTIONS", "")
        given = {n: int(v) for n, v in (each.split("=") for each in options.split(",") if each)}
        self.completions = Completions()
        backend = self.backend = UcxTransfers(self.completions, **given)
        self.version = backend.describe().split(" (")[0]
        handle = _register(backend, work.address)
        host_pid = offer["pid"] if "cma" in os.environ["UCX_TLS"] else None
        link = backend.connect(bytes.fromhex(offer["address"]), host_pid)
        region = Region(RegionKind.DRAM, offer["at"], REGION_BYTES)
        remote = backend.import_region(link, region, bytes.fromhex(offer["export"]))
        which = np.zeros(work.count, np.uint32)
        lengths = np.full(work.count, work.nbytes, np.uint64)
        self.prepared = {
            op: backend.prepare(
                Pieces(
                    Op(op),
                    Side((handle,), which, work.local),
                    Side((remote,), which, work.remote),
                    lengths,
                ),
                link,
            )
            for op in ("read", "write")
        }
        self.ticket = 0

    def run(self, op: str) -> None:
        self.ticket += 1
        seen = self.completions.generation
        self.backend.start(self.prepared[op], self.ticket, DEADLINE_S)
        self.completions.wait(seen, DEADLINE_S)
        ((_, results, _, _, detail),), _ = self.completions.drain()
        if (results < 0).any():
            raise RuntimeError(detail)


if __name__ == "__main__":
    main(Target, Initiator)
