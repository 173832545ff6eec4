"""Reads out of another process's shared pool, against plain copies of as many bytes.

The other process makes and fills the pool and then sleeps; what is measured is `ShmTransfers` from
`start` to its completion. The limits copy the same pieces between two memories of this process:
what a transfer costs beyond them is its price.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
from llama import as_array, huge_memory
from result import GB, Result, Sample, Setting, Work, bandwidth, fastest, progress, take_turns

from kvtier._core import Completions, CopyPool
from kvtier.backends.shm import ShmTransfers
from kvtier.copying import copy_threads
from kvtier.errors import KvtierError
from kvtier.transfer import Op, Pieces, Side
from kvtier.types import Region, RegionKind

ROUNDS = 15
WAIT_S = 60.0
SHAPES = {"large": (64, 32 << 20), "paged": (4096, 64 << 10)}
"""Pieces of one transfer, in any order, and their size."""
POOL_BYTES = 1 << 30  # the large pieces are read twice over: half the memory, as many bytes

CHILD = """
import sys, time
import numpy as np
from kvtier._core import Completions
from kvtier.backends.shm import ShmTransfers
from kvtier.shared_pool import SharedPool
nbytes = int(sys.argv[1])
pool = SharedPool(nbytes)
whole = np.frombuffer(pool.view(0, nbytes), np.uint64)
whole[:] = np.arange(len(whole), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
ends_s = time.monotonic() + 30
while pool.joined_bytes < nbytes and time.monotonic() < ends_s:
    time.sleep(0.01)
backend = ShmTransfers(Completions())
handle = backend.register(pool.region, pool.view(0, nbytes))
pages = pool.pages + (" joined to huge ones" if pool.joined_bytes == nbytes else "")
print(pool.address, backend.address().hex(), backend.export(handle).hex(), pages, flush=True)
sys.stdin.read()
"""


def run(wanted: set[str], setting: Setting) -> Iterator[Result]:
    child = subprocess.Popen(
        [sys.executable, "-P", "-c", CHILD, str(POOL_BYTES)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        said = child.stdout.readline().split(maxsplit=3)
        reader = Reader(child.pid, int(said[0]), bytes.fromhex(said[1]), bytes.fromhex(said[2]))
        for shape in SHAPES:
            yield _measure(shape, reader, said[3].strip())
        reader.close()
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()


class Reader:
    """Our side: the peer's pool mapped, memory to read into, and a plain copy of the pool."""

    def __init__(self, pid: int, address: int, theirs: bytes, exported: bytes) -> None:
        self._completions = Completions()
        self._backend = ShmTransfers(self._completions)
        self._link = self._backend.connect(theirs, pid)
        self._remote = self._backend.import_region(
            self._link, Region(RegionKind.DRAM, address, POOL_BYTES), exported
        )
        self.memory, self.plain = (as_array(huge_memory(POOL_BYTES), POOL_BYTES) for _ in range(2))
        self._local = self._backend.register(
            Region(RegionKind.DRAM, self.memory.ctypes.data, POOL_BYTES), memoryview(self.memory)
        )
        self._tickets = iter(range(1, 1 << 20))
        np.copyto(self.plain, np.frombuffer(self._backend.view(self._remote), np.uint8))

    def prepare(self, targets: np.ndarray, sources: np.ndarray, lengths: np.ndarray) -> Any:
        which = np.zeros(len(lengths), np.uint32)
        local, remote = Side((self._local,), which, targets), Side((self._remote,), which, sources)
        return self._backend.prepare(Pieces(Op.READ, local, remote, lengths), self._link)

    def read(self, prepared: Any) -> None:
        """From start to completion."""
        seen = self._completions.generation
        self._backend.start(prepared, next(self._tickets), WAIT_S)
        ended: list = []
        while not ended:
            if not self._completions.wait(seen, WAIT_S):
                raise KvtierError("no completion")
            ended, _ = self._completions.drain()
        if (ended[0][1] < 0).any():
            raise KvtierError(f"a piece failed: {ended[0][4]}")

    def close(self) -> None:
        self._backend.deregister(self._remote)
        self._backend.close()


def _measure(shape: str, reader: Reader, pages: str) -> Result:
    count, nbytes = SHAPES[shape]
    slots = POOL_BYTES // nbytes
    numbers = np.arange(count) % slots
    order = np.random.default_rng(1).permutation(slots)[numbers]
    lengths = np.full(count, nbytes, np.uint64)
    targets = (numbers * nbytes).astype(np.uint64)
    sources = (order * nbytes).astype(np.uint64)
    prepared = reader.prepare(targets, sources, lengths)
    pool = CopyPool(copy_threads())
    memory, plain = reader.memory, reader.plain
    plain_targets = targets + np.uint64(memory.ctypes.data)
    plain_sources = sources + np.uint64(plain.ctypes.data)

    def numpy_copy() -> None:
        for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
            memory[target : target + nbytes] = plain[source : source + nbytes]

    limits = {"numpy's copy of each piece": Work(numpy_copy)}
    for mode in CopyPool.modes():
        if mode != "auto":
            limits[f"{mode} of each piece"] = Work(
                lambda mode=mode: pool.copy(plain_targets, plain_sources, lengths, mode)
            )
    progress(f"  {shape}: {count} x {nbytes >> 10} KiB")
    memory[:] = 0
    reader.read(prepared)
    for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
        if not np.array_equal(memory[target : target + nbytes], plain[source : source + nbytes]):
            raise KvtierError(f"{shape}: wrong bytes at {target}")
    times = take_turns({"ours": Work(lambda: reader.read(prepared)), **limits}, ROUNDS)
    plainest = ("numpy's copy of each piece", "memcpy of each piece")
    limit_is, limit_s = fastest({limit: times[limit] for limit in plainest})
    best, best_s = fastest({limit: times[limit] for limit in limits})
    return bandwidth(
        "shm_pool",
        count * nbytes,
        times["ours"],
        limit_s,
        f"{limit_is}, within one process, on as many threads if it is memcpy",
        ROUNDS,
        {
            "shape": f"{count} x {nbytes >> 10} KiB",
            "pages": pages,
            "limit_cpu_s_per_gb": _cpu(times[limit_is], count * nbytes),
            "of_best_copy": round(best_s / times["ours"].wall_s, 3),
            "best_copy_is": best,
        },
    )


def _cpu(cost: Sample, nbytes: int) -> float:
    return round(cost.cpu_s / nbytes * GB, 4)
