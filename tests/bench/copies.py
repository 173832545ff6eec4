"""The copy plan against plain copies of as many bytes, and against torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from llama import (
    CHUNK_BYTES,
    CHUNK_PAGES,
    LAYERS,
    PagedLlama,
    as_array,
    best_plain_copy,
    huge_memory,
    plain_copies,
)
from result import Result, Work, bandwidth, fastest, take_turns

from kvtier._core import CopyPool
from kvtier.errors import KvtierError

CHUNKS = 16  # 512 MiB: far beyond any last-level cache
ROUNDS = 9


def run(wanted: set[str], folder: Path) -> Iterator[Result]:
    paged = PagedLlama(CHUNKS)
    stored = as_array(huge_memory(paged.nbytes), paged.nbytes)
    plan = paged.pages.kv.copy_plan(paged.pages.layout)
    page_ids = paged.order.astype(np.int64)
    page_offsets = np.arange(0, paged.page_count + 1, CHUNK_PAGES, dtype=np.uint32)
    segments = np.arange(0, paged.nbytes, CHUNK_BYTES, dtype=np.uint64)
    segments += np.uint64(stored.ctypes.data)

    def move(direction: str, pool: CopyPool) -> None:
        getattr(plan, direction)(pool, page_ids, page_offsets, segments, 0, plan.plane_count)

    for threads in (1, 2):
        pool = CopyPool(threads)
        move("gather", pool)
        _check_stored(stored, paged)
        for direction in ("gather", "scatter"):
            if f"copy_{direction}" not in wanted:
                continue
            ends = (stored, paged.bytes) if direction == "gather" else (paged.bytes, stored)
            with plain_copies(*ends, threads) as plain:
                ours = Work(lambda d=direction, p=pool: move(d, p))
                times = take_turns({"ours": ours, **plain}, ROUNDS)
            limit_is, limit_s = best_plain_copy(times, threads)
            yield bandwidth(
                f"copy_{direction}",
                paged.nbytes,
                times["ours"],
                limit_s,
                limit_is,
                ROUNDS,
                threads,
            )
            paged.fill()
            move("gather", pool)
            paged.wipe()
            move("scatter", pool)
            paged.check()
        if "copy_vs_torch" in wanted:
            torch.set_num_threads(threads)
            ways = _index_selects(paged, stored)
            ours = Work(lambda p=pool: move("gather", p))
            times = take_turns({"ours": ours, **ways}, ROUNDS)
            name, seconds = fastest({way: times[way] for way in ways})
            yield bandwidth(
                "copy_vs_torch",
                paged.nbytes,
                times["ours"],
                seconds,
                f"torch {torch.__version__} {name}, {threads} thread{'s' * (threads > 1)}",
                ROUNDS,
                threads,
            )


def _check_stored(stored: np.ndarray, paged: PagedLlama) -> None:
    """Every block as torch's own indexing gives it."""
    blocks = stored.reshape(paged.page_count, -1)
    for position in range(0, paged.page_count, 37):
        if blocks[position].tobytes() != paged.pages.read_page(int(paged.order[position])):
            raise KvtierError(f"block {position} was gathered wrongly")


def _index_selects(paged: PagedLlama, stored: np.ndarray) -> dict[str, Work]:
    """index_select into memory that is there already, by layer or by plane, as 2 or 8-byte words.

    Its result is layer by layer, which is the most that index_select can do in one pass.
    """
    ids = torch.from_numpy(paged.order)
    ways = {}
    for word in (torch.bfloat16, torch.int64):
        sources = [tensor.view(2, paged.page_count, -1).view(word) for tensor in paged.tensors]
        targets = torch.from_numpy(stored).view(word).view(LAYERS, *sources[0].shape)

        def by_layer(sources=sources, targets=targets) -> None:
            for source, target in zip(sources, targets, strict=True):
                torch.index_select(source, 1, ids, out=target)

        def by_plane(sources=sources, targets=targets) -> None:
            for source, target in zip(sources, targets, strict=True):
                for plane in (0, 1):
                    torch.index_select(source[plane], 0, ids, out=target[plane])

        name = str(word).removeprefix("torch.")
        ways[f"index_select by layer ({name})"] = Work(by_layer)
        ways[f"index_select by plane ({name})"] = Work(by_plane)
    return ways
