"""NIXL's POSIX backend between memory and a file, driven line by line by `files`; runs in its
environment.

Standard input has a queue and ``read`` or ``write``, ``fill``, or ``check``; each is answered by
one JSON line: seconds of wall and processor time, and whether all went right.
"""

from __future__ import annotations

import importlib.metadata
import json
import mmap
import os
import sys
import time
from typing import Any

os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # whatever the peer prints goes to standard error

import numpy as np
from nixl_cu12._api import nixl_agent, nixl_agent_config

TIMEOUT_S = 60.0
PAUSE_S = 0.0002
OPTIONS: dict[str, dict[str, str]] = {
    "default": {},
    "aio": {"use_aio": "true"},
    "uring": {"use_uring": "true"},
    "posix_aio": {"use_posix_aio": "true"},
}


class Subject:
    """An agent for each way of making requests that works here, and transfers ready to post."""

    def __init__(self, path: str, arrays: dict[str, Any], queues: list[str]) -> None:
        self.piece_bytes = int(arrays["piece_bytes"])
        self.memory_at = arrays["memory_at"].tolist()
        self.file_at = arrays["file_at"].tolist()
        nbytes = max(self.memory_at) + self.piece_bytes
        self._memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.words = np.frombuffer(self._memory, np.uint64)
        self.words[:] = 1
        self.fd = os.open(path, os.O_RDWR | os.O_DIRECT)
        self.transfers: dict[tuple[str, str], tuple[Any, Any]] = {}
        for queue in queues:
            try:
                self._open(queue)
            except Exception as error:  # noqa: BLE001 - one that was not built in
                print(f"NIXL {queue}: {error!r}", file=sys.stderr)

    def move(self, queue: str, op: str) -> bool:
        """Post, wait, and sync a write."""
        agent, handle = self.transfers[queue, op]
        end_s = time.monotonic() + TIMEOUT_S
        state = agent.transfer(handle)
        while state == "PROC" and time.monotonic() < end_s:
            time.sleep(PAUSE_S)
            state = agent.check_xfer_state(handle)
        if op == "write":
            os.fdatasync(self.fd)
        return bool(state == "DONE")

    def check(self) -> bool:
        """Whether memory and file have the same bytes, where no other piece shares the place."""
        page = np.frombuffer(mmap.mmap(-1, 4096), np.uint64)
        last = dict(zip(self.memory_at, self.file_at, strict=True))
        several = len(last) < len(self.memory_at)
        for memory_at, file_at in zip(self.memory_at, self.file_at, strict=True):
            os.preadv(self.fd, [page], file_at)
            is_same = (self.words[memory_at // 8 : memory_at // 8 + 512] == page).all()
            if not is_same and not several:
                return False
        return True

    def _open(self, queue: str) -> None:
        agent = nixl_agent(f"bench-{queue}", nixl_agent_config(backends=[]))
        agent.create_backend("POSIX", OPTIONS[queue])
        address = self.words.ctypes.data
        file_bytes = max(self.file_at) + self.piece_bytes
        agent.register_memory([(address, self.words.nbytes, 0, "")], "DRAM")
        agent.register_memory([(0, file_bytes, self.fd, "")], "FILE")
        memory = agent.get_xfer_descs(
            [(address + at, self.piece_bytes, 0) for at in self.memory_at], "DRAM"
        )
        file = agent.get_xfer_descs(
            [(at, self.piece_bytes, self.fd) for at in self.file_at], "FILE"
        )
        for op in ("read", "write"):
            handle = agent.initialize_xfer(op.upper(), memory, file, f"bench-{queue}", b"")
            self.transfers[queue, op] = (agent, handle)
        if not self.move(queue, "read"):
            del self.transfers[queue, "read"], self.transfers[queue, "write"]
            raise RuntimeError("a read does not end")


def main() -> None:
    path, arrays, queues = sys.argv[1:]
    with np.load(arrays) as loaded:
        subject = Subject(path, dict(loaded), queues.split(","))
    version = importlib.metadata.version("nixl-cu12")
    answer({"version": version, "queues": sorted({queue for queue, _ in subject.transfers})})
    for line in sys.stdin:
        words = line.split()
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        if words == ["fill"]:
            subject.words[:] = np.arange(len(subject.words), dtype=np.uint64)
            is_right = True
        elif words == ["check"]:
            is_right = subject.check()
        else:
            is_right = subject.move(*words)
        answer(
            {
                "right": is_right,
                "wall_s": time.perf_counter() - wall_s,
                "cpu_s": time.process_time() - cpu_s,
            }
        )
    os._exit(0)  # its threads would hold up the end


def answer(fields: dict[str, Any]) -> None:
    ANSWERS.write(json.dumps(fields) + "\n")
    ANSWERS.flush()


if __name__ == "__main__":
    main()
