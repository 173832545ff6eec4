"""Two processes with a region each, between which a benchmark's subject moves pieces, on command.

A program here gives `main` its two sides. Standard input has ``read``, ``write``, ``clear``,
``check read`` or ``check write``, each answered by one JSON line: whether all is right, the seconds
of wall time, and those of processor time of both processes together.
"""

from __future__ import annotations

import json
import mmap
import os
import resource
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

WORKLOADS = {"paged": (4096, 64 << 10), "large": (64, 32 << 20)}
"""Pieces and bytes of each; those of `large` lie eight in a region of the same size, in turn."""
REGION_BYTES = 256 << 20


class Target(Protocol):
    """The side that is read and written; it works by itself."""

    offer: Any
    """What the other side needs to know, as JSON."""

    def poll(self) -> None:
        """Called again and again while the other side works."""


class Initiator(Protocol):
    """The side that reads and writes."""

    version: str

    def run(self, op: str) -> None:
        """Move all pieces."""


class Work:
    """What moves where: `local[i]` in this region belongs to `remote[i]` in the other."""

    def __init__(self, workload: str, address: int) -> None:
        self.count, self.nbytes = WORKLOADS[workload]
        self.slots = REGION_BYTES // self.nbytes
        order = np.random.default_rng(7).permutation(self.slots)
        slot = np.arange(self.count) % self.slots
        self.address = address
        self.local = slot.astype(np.uint64) * np.uint64(self.nbytes)
        self.remote = order[slot].astype(np.uint64) * np.uint64(self.nbytes)
        self.order = order


def main(
    make_target: Callable[[Work], Target], make_initiator: Callable[[Work, Any], Initiator]
) -> None:
    """Be both processes, one after the fork that makes the other."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes to standard error
    workload = sys.argv[1]
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        _be_target(workload, make_target, theirs)
        os._exit(0)
    theirs.close()
    lines = ours.makefile("rw")

    def ask(command: str) -> Any:
        lines.write(command + "\n")
        lines.flush()
        return json.loads(lines.readline())

    memory = _memory()
    work = Work(workload, memory.ctypes.data)
    initiator = make_initiator(work, json.loads(lines.readline()))
    _answer(answers, {"version": initiator.version})
    for line in sys.stdin:
        command = line.strip()
        right = True
        before_s, begin_s = _cpu_s() + ask("cpu"), time.perf_counter()
        if command in ("read", "write"):
            ask("work")
            begin_s = time.perf_counter()
            initiator.run(command)
        wall_s = time.perf_counter() - begin_s
        cpu_s = _cpu_s() + ask("cpu") - before_s
        if command == "clear":
            _fill(memory, work, 1)
            ask("fill")
        elif command == "check read":
            right = _holds(memory, work, work.order, 2)
        elif command == "check write":
            right = ask("check")
        _answer(answers, {"right": right, "wall_s": wall_s, "cpu_s": cpu_s})
    os._exit(0)


def _be_target(workload: str, make: Callable[[Work], Target], other: socket.socket) -> None:
    memory = _memory()
    work = Work(workload, memory.ctypes.data)
    target = make(work)
    lines = other.makefile("rw")
    _answer(lines, target.offer)
    other.setblocking(True)
    for line in lines:
        command = line.strip()
        if command == "work":
            _answer(lines, True)
            other.setblocking(False)
            while True:  # until the next command
                try:
                    if other.recv(1, socket.MSG_PEEK) is not None:
                        break
                except BlockingIOError:
                    target.poll()
            other.setblocking(True)
        elif command == "cpu":
            _answer(lines, _cpu_s())
        elif command == "fill":
            _fill(memory, work, 2)
            _answer(lines, True)
        elif command == "check":
            _answer(lines, _holds(memory, work, np.argsort(work.order), 1))


def _memory() -> np.ndarray:
    memory = np.frombuffer(
        mmap.mmap(-1, REGION_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8
    )
    memory[:: mmap.PAGESIZE] = 1
    return memory


def _fill(memory: np.ndarray, work: Work, seed: int) -> None:
    """Each slot its own words."""
    rows = memory.view(np.uint64).reshape(work.slots, -1)
    for slot in range(work.slots):
        rows[slot] = np.arange(rows.shape[1], dtype=np.uint64) * np.uint64(seed) + np.uint64(
            (slot << 32) + seed
        )


def _holds(memory: np.ndarray, work: Work, source: np.ndarray, seed: int) -> bool:
    """Whether slot i has what slot `source[i]` of a region filled with `seed` has."""
    rows = memory.view(np.uint64).reshape(work.slots, -1)
    words = np.arange(rows.shape[1], dtype=np.uint64) * np.uint64(seed)
    return all(
        bool((rows[slot] == words + np.uint64((int(source[slot]) << 32) + seed)).all())
        for slot in range(work.slots)
    )


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _answer(file: Any, value: Any) -> None:
    file.write(json.dumps(value) + "\n")
    file.flush()
