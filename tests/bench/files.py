"""Pieces between memory and a file by the `posix` transfer backend, against raw direct I/O.

The same pieces of the same file, so many requests of the same size in flight, a moment before or
after: what differs is everything between `start` and a completion. NIXL's POSIX backend takes its
turns in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from result import GB, Result, Sample, Setting, Work, bandwidth, fastest, progress, take_turns

from kvtier._core import Completions, FileEngine, Slab
from kvtier.backends.posix_transfers import DEPTH, SEGMENT_BYTES, PosixTransfers
from kvtier.errors import KvtierError
from kvtier.transfer import Op, Pieces, Side
from kvtier.types import Region, RegionKind

ROUNDS = 9
TRIAL_ROUNDS = 2
WAIT_S = 60.0
SLOTS_BYTES = 512 << 20  # of memory: the large pieces of a transfer share it, four to a place
SCRIPT = Path(__file__).parent / "peers" / "nixl_file.py"
QUEUES = ("default", "aio", "uring", "posix_aio")
"""How NIXL may be told to make its requests; which of them work depends on how it was built."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Pieces of one size that cover a file, in an order of their own."""

    name: str
    count: int
    piece_bytes: int
    is_shuffled: bool

    @property
    def nbytes(self) -> int:
        """Of all pieces, and of the file."""
        return self.count * self.piece_bytes

    @property
    def file_at(self) -> np.ndarray:
        """Where each piece lies in the file."""
        order = np.arange(self.count, dtype=np.uint64)
        if self.is_shuffled:
            np.random.default_rng(7).shuffle(order)
        return order * np.uint64(self.piece_bytes)

    @property
    def memory_at(self) -> np.ndarray:
        """Where each piece lies in memory."""
        slots = min(self.count, SLOTS_BYTES // self.piece_bytes)
        return np.arange(self.count, dtype=np.uint64) % slots * np.uint64(self.piece_bytes)


WORKLOADS = (
    Workload("64 x 32 MiB", 64, 32 << 20, False),
    Workload("4096 x 64 KiB, in no order", 4096, 64 << 10, True),
)


class Ours:
    """The backend with one region of memory and one of a file."""

    def __init__(self, path: Path, memory: Slab, workload: Workload, durable: bool) -> None:
        self._completions = Completions()
        self._backend = PosixTransfers(self._completions, durable=durable)
        self._handles = (
            self._backend.register(
                Region(RegionKind.DRAM, memory.address, memory.capacity_bytes), memory
            ),
            self._backend.register(Region(RegionKind.FILE, 0, workload.nbytes), path),
        )
        self.prepare_ms = float("inf")
        self._prepared = {op: self._prepare(workload, op) for op in (*Op, *Op)}
        self._nbytes = workload.nbytes
        self._ticket = 0

    def move(self, op: Op, prepared: Any = None) -> None:
        """One transfer of everything, until its completion is here."""
        self._ticket += 1
        seen = self._completions.generation
        self._backend.start(prepared or self._prepared[op], self._ticket, WAIT_S)
        self._completions.wait(seen, WAIT_S)
        ((_, results, _, _, detail),), _ = self._completions.drain()
        if detail or (prepared is None and int(results.sum()) != self._nbytes):
            raise KvtierError(f"not all moved: {detail}")

    def move_some(self, op: Op, workload: Workload, which: slice) -> None:
        """A transfer of some pieces, outside of any timing."""
        self.move(op, self._prepare(workload, op, which))

    def close(self) -> None:
        for handle in self._handles:
            self._backend.deregister(handle)
        self._backend.close()

    def _prepare(self, workload: Workload, op: Op, which: slice = slice(None)) -> Any:
        memory_at, file_at = workload.memory_at[which], workload.file_at[which]
        zeros = np.zeros(len(memory_at), np.uint32)
        lengths = np.full(len(memory_at), workload.piece_bytes, np.uint64)
        memory, file = self._handles
        sides = Side((memory,), zeros, memory_at), Side((file,), zeros, file_at)
        pieces = Pieces(op, *sides, lengths)
        begin_s = time.perf_counter()
        prepared = self._backend.prepare(pieces, None)
        self.prepare_ms = min(self.prepare_ms, (time.perf_counter() - begin_s) * 1e3)
        return prepared


class Raw:
    """Direct I/O on the same pieces, with as little around it as can be."""

    def __init__(self, path: Path, memory: Slab, workload: Workload) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_DIRECT)
        self._engine = FileEngine(DEPTH, SEGMENT_BYTES)
        order = np.argsort(workload.file_at)  # as a disk likes it
        self._arrays = (
            np.full(workload.count, self._fd, np.int32),
            workload.file_at[order],
            workload.memory_at[order] + np.uint64(memory.address),
            np.full(workload.count, workload.piece_bytes, np.uint64),
        )
        self._nbytes = workload.nbytes

    def move(self, op: Op, durable: bool) -> None:
        run = self._engine.read if op is Op.READ else self._engine.write
        if int(run(*self._arrays).sum()) != self._nbytes:
            raise KvtierError("raw transfer: not all moved")
        if op is Op.WRITE and durable:
            os.fdatasync(self._fd)

    def close(self) -> None:
        self._engine.close()
        os.close(self._fd)


class Nixl:
    """NIXL's agent in its process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        started = self._answer()
        self.version: str = started["version"]
        self.queues: list[str] = started["queues"]

    def move(self, queue: str, op: Op) -> Sample:
        """What one transfer of everything cost there; a write is synced."""
        return self._do(f"{queue} {op.value}")

    def fill(self) -> None:
        """Give its memory other bytes, so that a later check means something."""
        self._do("fill")

    def check(self) -> None:
        """Raise unless the last transfer moved all bytes."""
        self._do("check")

    def _do(self, command: str) -> Sample:
        assert self._process.stdin is not None, "opened with pipes"
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        if not answer["right"]:
            raise KvtierError(f"NIXL: {command} went wrong")
        return Sample(answer["wall_s"], answer["cpu_s"])

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None, "opened with pipes"
        line = self._process.stdout.readline()
        if not line:
            raise KvtierError("NIXL's process ended; its words are above")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def start_nixl(python: Path, path: Path, workload: Workload) -> Iterator[Nixl]:
    """NIXL in `python`'s environment, with the same pieces of the same file."""
    with tempfile.NamedTemporaryFile(suffix=".npz") as arrays:
        np.savez(
            arrays,
            memory_at=workload.memory_at,
            file_at=workload.file_at,
            piece_bytes=workload.piece_bytes,
        )
        arrays.flush()
        with subprocess.Popen(
            [python, SCRIPT, path, arrays.name, ",".join(QUEUES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                yield Nixl(process)
            finally:
                process.kill()


def run(wanted: set[str], setting: Setting) -> Iterator[Result]:
    ops = [op for op in Op if f"file_{op.value}" in wanted or "file_vs_nixl" in wanted]
    for workload in WORKLOADS:
        with tempfile.TemporaryDirectory(dir=setting.folder) as scratch:
            yield from _measure(Path(scratch) / "file", workload, ops, wanted, setting)


def _measure(
    path: Path, workload: Workload, ops: list[Op], wanted: set[str], setting: Setting
) -> Iterator[Result]:
    memory = Slab(min(workload.nbytes, SLOTS_BYTES))
    while memory.prefaulted_bytes < memory.capacity_bytes:
        time.sleep(0.01)
    memory.allocate(memory.capacity_bytes)
    at = np.frombuffer(memory.memory(0, memory.capacity_bytes), np.uint64)
    ours, cached = (Ours(path, memory, workload, durable) for durable in (True, False))
    raw = Raw(path, memory, workload)
    try:
        _stamp(at, 1)
        raw.move(Op.WRITE, durable=True)  # from here on all of the file is real
        for op in ops:
            progress(f"  {op.value}, {workload.name}")
            if f"file_{op.value}" in wanted:
                yield _against_raw(workload, op, ours, cached, raw)
            if "file_vs_nixl" in wanted:
                yield _against_nixl(workload, op, ours, path, setting.nixl_python)
            _verify(ours, at, workload)
    finally:
        raw.close()
        ours.close()
        cached.close()
        del at
        memory.close()


def _against_raw(workload: Workload, op: Op, ours: Ours, cached: Ours, raw: Raw) -> Result:
    times = take_turns(
        {"ours": Work(lambda: ours.move(op)), "raw": Work(lambda: raw.move(op, durable=True))},
        ROUNDS,
    )
    more: dict[str, Any] = {"pieces": workload.name, "prepare_ms": round(ours.prepare_ms, 3)}
    if op is Op.WRITE:
        volatile = take_turns(
            {
                "ours, not durable": Work(lambda: cached.move(op)),
                "raw, not durable": Work(lambda: raw.move(op, durable=False)),
            },
            ROUNDS,
        )
        our_s, raw_s = (cost.wall_s for cost in volatile.values())
        more["not_durable"] = float(f"{workload.nbytes / our_s / GB:.4g}")
        more["ratio_not_durable"] = round(raw_s / our_s, 3)
    return bandwidth(
        f"file_{op.value}",
        workload.nbytes,
        times["ours"],
        times["raw"].wall_s,
        f"raw O_DIRECT of the same pieces, {DEPTH} requests of up to {SEGMENT_BYTES >> 20} MiB in "
        f"flight{', fdatasync' * (op is Op.WRITE)}",
        ROUNDS,
        more,
    )


def _against_nixl(
    workload: Workload, op: Op, ours: Ours, path: Path, python: Path | None
) -> Result:
    if python is None:
        return Result(
            bench="file_vs_nixl",
            value=None,
            unit="GB/s",
            higher_is_better=True,
            limit=None,
            limit_is="peer not given (--nixl-python)",
            rounds=0,
        )
    with start_nixl(python, path, workload) as nixl:
        theirs = {queue: Work(lambda q=queue: nixl.move(q, op)) for queue in nixl.queues}
        progress("  trying NIXL's queues")
        queue, _ = fastest(take_turns(theirs, TRIAL_ROUNDS))
        times = take_turns({"ours": Work(lambda: ours.move(op)), "NIXL": theirs[queue]}, ROUNDS)
        nixl.fill()
        nixl.move(queue, op)
        nixl.check()
        return bandwidth(
            "file_vs_nixl",
            workload.nbytes,
            times["ours"],
            times["NIXL"].wall_s,
            f"NIXL {nixl.version}, POSIX backend, the best of its queues ({queue}), O_DIRECT"
            f"{', fdatasync' * (op is Op.WRITE)}",
            ROUNDS,
            {
                "op": op.value,
                "pieces": workload.name,
                "peer_cpu_s_per_gb": round(times["NIXL"].cpu_s / workload.nbytes * GB, 4),
            },
        )


def _stamp(words: np.ndarray, seed: int) -> None:
    """Each page of memory has words of its own."""
    pages = words.reshape(-1, 512)
    pages[:] = (np.arange(len(pages), dtype=np.uint64) * np.uint64(seed))[:, None]


def _verify(ours: Ours, words: np.ndarray, workload: Workload) -> None:
    """Write known bytes over each part of the file that memory can hold, and read them back."""
    step = len(np.unique(workload.memory_at))
    for start in range(0, workload.count, step):
        which = slice(start, start + step)
        _stamp(words, start + 3)
        ours.move_some(Op.WRITE, workload, which)
        words[:] = 0
        ours.move_some(Op.READ, workload, which)
        pages = words.reshape(-1, 512)
        want = np.arange(len(pages), dtype=np.uint64) * np.uint64(start + 3)
        if (pages != want[:, None]).any():
            raise KvtierError("wrong bytes came back")
