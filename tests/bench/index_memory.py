"""What a million chunks on disk cost in memory: the index and the disk tier's LRU order.

Measured as growth of the resident set of a process that does nothing else, so that allocators' waste
counts.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from result import Result, Setting

CHUNKS, PROMPT_CHUNKS = 1_000_000, 8
LIMIT_BYTES = 250


def run(wanted: set[str], setting: Setting) -> Iterator[Result]:
    grown = int(
        subprocess.run([sys.executable, __file__], check=True, stdout=subprocess.PIPE).stdout
    )
    yield Result(
        bench="index_bytes",
        value=grown / CHUNKS,
        unit="B/chunk",
        higher_is_better=False,
        limit=LIMIT_BYTES,
        limit_is=f"fixed budget; {CHUNKS} chunks in prompts of {PROMPT_CHUNKS}",
        rounds=1,
    )


def _resident_bytes() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _measure() -> int:
    from kvtier.clock import SystemClock
    from kvtier.index import NONE, Index
    from kvtier.policies.lru import LruPolicy

    disk = 1
    tokens = np.full(PROMPT_CHUNKS, 256, dtype=np.uint32)
    nbytes = np.full(PROMPT_CHUNKS, 1 << 25, dtype=np.uint64)

    def fill(index: Index, order: LruPolicy, count: int) -> None:
        for first in range(0, count, PROMPT_CHUNKS):
            keys = os.urandom(32 * PROMPT_CHUNKS)
            run = index.table.add(NONE, keys, tokens, nbytes)
            index.add_root(bytes(16), int(run[0]))
            index.table.publish(run, disk)
            order.insert(run)
            assert first + len(run) == len(index.table)

    fill(Index(2, SystemClock()), LruPolicy(), 1024)  # modules and allocators' first arenas
    before = _resident_bytes()
    index, order = Index(2, SystemClock()), LruPolicy()
    fill(index, order, CHUNKS)
    return _resident_bytes() - before


if __name__ == "__main__":
    print(_measure())
