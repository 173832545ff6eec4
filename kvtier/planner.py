"""Decides what a store or load will move; `agent` and `writeback` then do it without branches.

A plan is chunks with their page lists, cut into waves of layers. Page lists are as the native copy
plan takes them: one entry a page of the chunk, -1 where the caller has no page for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.device import Batch, PageIds
from kvtier.manifest import Head, RecordShape
from kvtier.policy import ChunkNumbers
from kvtier.space import Space
from kvtier.types import Descriptor


@dataclass(frozen=True, slots=True)
class ChunkMove:
    """One chunk of a plan."""

    number: int
    """In the index; meaningless for a chunk that is yet to be stored."""
    head: Head
    shape: RecordShape
    pages: PageIds


@dataclass(frozen=True, slots=True, eq=False)
class LoadPlan:
    """Chunks to bring into engine pages, in prefix order, all from one hit."""

    space: Space
    run: ChunkNumbers
    """The hit's whole run, for leases and recency."""
    chunks: tuple[ChunkMove, ...]
    first_token: int
    """Where the first planned chunk begins."""
    wave_count: int


def page_array(pages: Sequence[int] | npt.NDArray[np.integer]) -> PageIds:
    """Page numbers as the native side takes them.

    Raises:
        ValueError: they are not one-dimensional integers.
    """
    array = np.asarray(pages)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(
            f"pages: expected a flat list of page numbers, got {array.dtype} "
            f"of {array.ndim} dimensions"
        )
    return array.astype(np.int64, copy=False)


def chunk_pages(space: Space, pages: PageIds, first_token: int, start: int, tokens: int) -> PageIds:
    """The caller's pages of the chunk of tokens `[start, start + tokens)`, -1 where it has none."""
    count = tokens // space.page_tokens
    skip = (start - first_token) // space.page_tokens
    if skip >= 0 and skip + count <= len(pages):
        return pages[skip : skip + count]
    result = np.full(count, -1, dtype=np.int64)
    low, high = max(0, -skip), min(count, len(pages) - skip)
    if low < high:
        result[low:high] = pages[skip + low : skip + high]
    return result


def plan_load(
    space: Space,
    run: ChunkNumbers,
    heads: Sequence[Head],
    pages: PageIds,
    first_token: int,
) -> LoadPlan:
    """Chunks of `run` that fall into the caller's `pages`, which begin at `first_token`."""
    stop = first_token + len(pages) * space.page_tokens
    moves, begin, start = [], None, 0
    for number, head in zip(run.tolist(), heads, strict=True):
        if start + head.tokens > first_token and start < stop:
            begin = start if begin is None else begin
            moves.append(
                ChunkMove(
                    number,
                    head,
                    space.shape(head.pages),
                    chunk_pages(space, pages, first_token, start, head.tokens),
                )
            )
        start += head.tokens
    return LoadPlan(
        space,
        run,
        tuple(moves),
        first_token if begin is None else begin,
        len(space.shape(1).segment_offsets),
    )


def batch_of(space: Space, moves: Sequence[ChunkMove], records: Sequence[Descriptor]) -> Batch:
    """The native call's arrays for `moves`, whose records lie at `records`."""
    offsets = np.zeros(len(moves) + 1, dtype=np.uint32)
    np.cumsum([len(move.pages) for move in moves], out=offsets[1:])
    bases = np.array([record.address for record in records], dtype=np.uint64)
    inner = np.array([move.shape.segment_offsets for move in moves], dtype=np.uint64)
    shape = moves[0].shape
    planes = space.layout.planes
    return Batch(
        np.concatenate([move.pages for move in moves]),
        offsets,
        np.ascontiguousarray((inner + bases[:, None]).T),
        tuple(
            (first * planes, count * planes)
            for first, count in zip(shape.first_layers, shape.layer_counts, strict=True)
        ),
    )
