"""The copy plan against plain copies of as many bytes, and against torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

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
from result import Result, Setting, Work, bandwidth, fastest, take_turns

from kvtier._core import CopyPool
from kvtier.connectors.torch import TorchPages
from kvtier.errors import KvtierError

CHUNKS = 16  # 512 MiB: far beyond any last-level cache
ROUNDS = 21


def run(wanted: set[str], setting: Setting) -> Iterator[Result]:
    paged = PagedLlama(CHUNKS)
    stored = as_array(huge_memory(paged.nbytes), paged.nbytes)
    move = _mover(paged.pages, paged.order, stored, setting.threads)
    move("gather")
    _check_stored(stored, paged)
    for direction in ("gather", "scatter"):
        if f"copy_{direction}" not in wanted:
            continue
        ends = (stored, paged.bytes) if direction == "gather" else (paged.bytes, stored)
        with plain_copies(*ends, setting.threads) as plain:
            times = take_turns({"ours": Work(lambda d=direction: move(d)), **plain}, ROUNDS)
        limit_is, limit_s = best_plain_copy(times)
        yield bandwidth(
            f"copy_{direction}",
            paged.nbytes,
            times["ours"],
            limit_s,
            limit_is,
            ROUNDS,
            {"threads": setting.threads},
        )
        paged.fill()
        move("gather")
        paged.wipe()
        move("scatter")
        paged.check()
    if "copy_vs_torch" in wanted:
        yield _against_torch(paged, stored, setting.threads)


def _mover(
    pages: TorchPages, order: np.ndarray, stored: np.ndarray, threads: int
) -> Callable[[str], None]:
    """Copies all planes of all pages between the engine's tensors and `stored`."""
    plan = pages.kv.copy_plan(pages.layout)
    pool = CopyPool(threads)
    page_ids = order.astype(np.int64)
    page_offsets = np.arange(0, len(order) + 1, CHUNK_PAGES, dtype=np.uint32)
    segments = np.arange(0, stored.nbytes, CHUNK_BYTES, dtype=np.uint64)
    segments += np.uint64(stored.ctypes.data)

    def move(direction: str) -> None:
        getattr(plan, direction)(pool, page_ids, page_offsets, segments, 0, plan.plane_count)

    return move


def _against_torch(paged: PagedLlama, stored: np.ndarray, threads: int) -> Result:
    """Both read the same tensors, which torch has allocated as an engine's are.

    Each writes to memory of its own that is there already. torch's result lies layer by layer, the
    most that index_select does in one pass; ours lies page by page.
    """
    torch.set_num_threads(threads)
    tensors = [tensor.clone() for tensor in paged.tensors]
    move = _mover(TorchPages(tensors, "KNTHD", LAYERS), paged.order, stored, threads)
    ids = torch.from_numpy(paged.order)
    ways = {}
    for word in (torch.bfloat16, torch.int64):
        sources = [tensor.view(2, paged.page_count, -1).view(word) for tensor in tensors]
        targets = [torch.zeros_like(source) for source in sources]

        def by_layer(sources=sources, targets=targets) -> None:
            for source, target in zip(sources, targets, strict=True):
                torch.index_select(source, 1, ids, out=target)

        def by_plane(sources=sources, targets=targets) -> None:
            for source, target in zip(sources, targets, strict=True):
                for plane in (0, 1):
                    torch.index_select(source[plane], 0, ids, out=target[plane])

        name = str(word).removeprefix("torch.")
        ways[f"index_select of a layer's pages ({name})"] = Work(by_layer)
        ways[f"index_select of K and of V apart ({name})"] = Work(by_plane)
    times = take_turns({"ours": Work(lambda: move("gather")), **ways}, ROUNDS)
    whole, seconds = fastest({way: times[way] for way in ways if "layer" in way})
    _, apart_s = fastest({way: times[way] for way in ways if "apart" in way})
    return bandwidth(
        "copy_vs_torch",
        paged.nbytes,
        times["ours"],
        seconds,
        f"torch {torch.__version__} {whole}, as many threads",
        ROUNDS,
        {"threads": threads, "ratio_k_v_apart": round(apart_s / times["ours"].wall_s, 3)},
    )


def _check_stored(stored: np.ndarray, paged: PagedLlama) -> None:
    """Every block as torch's own indexing gives it."""
    blocks = stored.reshape(paged.page_count, -1)
    for position in range(0, paged.page_count, 37):
        if blocks[position].tobytes() != paged.pages.read_page(int(paged.order[position])):
            raise KvtierError(f"block {position} was gathered wrongly")
