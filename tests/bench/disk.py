"""Durable store to and cold load from the disk tier, against raw direct I/O of as many bytes.

Both sides pass the page cache; a virtual disk may still be cached by its host, which is why only
the ratio to raw access to the same disk, a moment before or after, means something.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from host import load, store
from llama import CHUNK_BYTES, RECORD_BYTES, PagedLlama, as_array, huge_memory, wait_until_real
from result import Result, Setting, Work, bandwidth, fastest, progress, take_turns

from kvtier import KVTier
from kvtier._core import FileEngine
from kvtier.errors import KvtierError

CHUNKS = 24  # 768 MiB: as much again in the memory tier keeps this below 2 GiB
ROUNDS = 11
TRIAL_ROUNDS = 2
WAYS = [(depth, segment) for segment in (1 << 20, 4 << 20, 32 << 20) for depth in (4, 8, 16, 32)]
"""Queue depths and request sizes that raw access tries; the better ones then take turns with us."""


class Raw:
    """Direct reads and writes of one file of the prompt's size."""

    def __init__(self, folder: Path, memory: np.ndarray) -> None:
        self._path = folder / "raw"
        self._memory = memory
        self._engines = {way: FileEngine(way[0], way[1]) for way in WAYS}
        self.write_new(WAYS[0])

    def write_new(self, way: tuple[int, int]) -> None:
        """A new file, its room given before the writes, until it is durable."""
        self._write(way, os.O_CREAT | os.O_EXCL)

    def write_over(self, way: tuple[int, int]) -> None:
        """The file that is there, in place, until it is durable."""
        self._write(way, 0)

    def read(self, way: tuple[int, int]) -> None:
        """The whole file from its start."""
        self._move(self._engines[way].read, os.O_RDONLY)

    def unlink(self) -> None:
        """Make way for `write_new`, and let the file system get over it."""
        self._path.unlink(missing_ok=True)
        os.sync()

    def _write(self, way: tuple[int, int], flags: int) -> None:
        engine = self._engines[way]

        def write(fds, offsets, addresses, lengths) -> np.ndarray:
            if flags:
                engine.allocate(fds[:1], np.array([self._memory.nbytes], dtype=np.uint64))
            written = engine.write(fds, offsets, addresses, lengths)
            os.fsync(int(fds[0]))
            return written

        self._move(write, os.O_WRONLY | flags)

    def _move(self, move: Callable[..., np.ndarray], flags: int) -> None:
        fd = os.open(self._path, flags | os.O_DIRECT, 0o600)
        try:
            starts = np.arange(0, self._memory.nbytes, CHUNK_BYTES, dtype=np.uint64)
            moved = move(
                np.full(len(starts), fd, dtype=np.int32),
                starts,
                starts + np.uint64(self._memory.ctypes.data),
                np.full(len(starts), CHUNK_BYTES, dtype=np.uint64),
            )
        finally:
            os.close(fd)
        if int(moved.sum()) != self._memory.nbytes:
            raise KvtierError(f"raw transfer: {moved.min()} bytes of one piece")


def run(wanted: set[str], setting: Setting) -> Iterator[Result]:
    paged = PagedLlama(CHUNKS)
    with tempfile.TemporaryDirectory(dir=setting.folder) as scratch:
        raw = Raw(Path(scratch), paged.bytes)
        tiers = [
            {"kind": "memory", "capacity": (CHUNKS + 1) * RECORD_BYTES},
            {"kind": "posix", "capacity": "4 GiB", "path": f"{scratch}/tier"},
        ]
        with KVTier.open({"tiers": tiers}) as tier:
            wait_until_real(tier.hierarchy.memory, (CHUNKS + 1) * RECORD_BYTES)
            space = paged.attach(tier)

            def forget() -> None:
                tier.cleanup()
                os.sync()

            def store_durably() -> None:
                store(tier, space, paged)
                if not tier.flush():
                    raise KvtierError("not written within a minute")

            if "disk_store" in wanted:
                yield _against_raw(
                    "disk_store",
                    Work(store_durably, before=forget),
                    _ways("to a new file", raw.write_new, raw.unlink),
                    paged.nbytes,
                    _ways("over a file that is there", raw.write_over),
                )
            if "disk_load" in wanted:
                forget()
                store_durably()
                # Raw reads must not overwrite the pages that are checked: memory of their own.
                del raw._memory
                raw._memory = as_array(huge_memory(paged.nbytes), paged.nbytes)
                ours = Work(
                    lambda: load(tier, space, paged),
                    before=lambda: tier.cleanup(tier="memory"),
                )
                ways = _ways("of the same file", raw.read)
                yield _against_raw("disk_load", ours, ways, paged.nbytes)
                tier.cleanup(tier="memory")
                paged.wipe()
                load(tier, space, paged)
                paged.check()
            lost = {
                n: v for n, v in tier.stat()["metrics"].items() if "refused" in n or "room" in n
            }
            if lost:
                raise KvtierError(f"not all went to disk: {lost}")


def _ways(
    what: str, move: Callable[[tuple[int, int]], None], before: Callable[[], None] = lambda: None
) -> dict[str, Work]:
    return {
        f"{what}, depth {depth}, requests of {segment >> 20} MiB": Work(
            lambda w=(depth, segment): move(w), before
        )
        for depth, segment in WAYS
    }


def _against_raw(
    name: str,
    ours: Work,
    ways: dict[str, Work],
    nbytes: int,
    other_ways: dict[str, Work] | None = None,
) -> Result:
    """`ours` against the best of `ways`; of `other_ways` only the ratio is told."""
    progress("  trying queue depths")
    trial = take_turns(ways | (other_ways or {}), TRIAL_ROUNDS)

    def best(of: dict[str, Work], count: int) -> list[str]:
        return sorted(of, key=lambda way: trial[way].wall_s)[:count]

    better, others = best(ways, 3), best(other_ways or {}, 1)
    progress("  taking turns")
    works = {"ours": ours, **{way: (ways | (other_ways or {}))[way] for way in better + others}}
    times = take_turns(works, ROUNDS)
    way, seconds = fastest({way: times[way] for way in better})
    verb = "write and fsync" if name == "disk_store" else "sequential read"
    more = {}
    if others:
        more["ratio_over_same_file"] = round(times[others[0]].wall_s / times["ours"].wall_s, 3)
    return bandwidth(
        name, nbytes, times["ours"], seconds, f"raw O_DIRECT {verb} {way}", ROUNDS, more
    )
