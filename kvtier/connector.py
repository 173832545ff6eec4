"""What a connector owes kvtier, and the proof that it pays it.

A connector hands over a `KvLayout` (what a page is), a `PagedKv` (where pages lie) and a
`Namespace` (what makes this KV this KV), then tokens and page numbers as requests come. It never
guesses a layout: `prove_layout` writes a pattern through the copy plan and reads it back through
the engine's own view of its memory.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvtier import _core
from kvtier.errors import LayoutMismatch
from kvtier.planner import PageIds
from kvtier.space import Space

ReadPage = Callable[[int], bytes]
"""The bytes of one page as the engine sees them, in stored order: layer, plane, token, head, dim."""


def prove_layout(space: Space, pool: _core.CopyPool, read_page: ReadPage | None = None) -> None:
    """Prove on three pages that the space's copy plan reads and writes what it should.

    The pages' content is put back afterwards; nothing else may use them meanwhile, so this runs
    before the engine serves. Without `read_page` only overlap and writability are proved.

    Raises:
        LayoutMismatch: pages overlap, or the engine sees other bytes than were written.
    """
    plan, layout = space.need_plan(), space.layout
    assert space.kv is not None, "a plan comes from kv"
    pages = np.unique(
        np.array([0, space.kv.page_count // 2, space.kv.page_count - 1], dtype=np.int64)
    )
    before = _gather(plan, pool, pages, layout.block_bytes)
    pattern = np.random.default_rng(0x6B76).integers(0, 256, before.shape, dtype=np.uint8)
    try:
        _move(plan.scatter, pool, pages, pattern)
        if not np.array_equal(_gather(plan, pool, pages, layout.block_bytes), pattern):
            raise LayoutMismatch(
                "pages overlap: a pattern written through the declared layout reads back changed"
            )
        for row, page in enumerate(pages.tolist()):
            if read_page is not None and read_page(page) != pattern[row].tobytes():
                raise LayoutMismatch(
                    f"page {page}: the engine's own view has other bytes than were written through "
                    "the declared layout; strides or order are not what they were said to be"
                )
    finally:
        _move(plan.scatter, pool, pages, before)


def _gather(
    plan: _core.CopyPlan, pool: _core.CopyPool, pages: PageIds, block_bytes: int
) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    blocks = np.empty((len(pages), block_bytes), dtype=np.uint8)
    _move(plan.gather, pool, pages, blocks)
    return blocks


def _move(
    copy: Callable[..., int],
    pool: _core.CopyPool,
    pages: PageIds,
    blocks: np.ndarray[tuple[int, int], np.dtype[np.uint8]],
) -> None:
    plane_count = copy.__self__.plane_count  # type: ignore[attr-defined]  # a bound method of a plan
    copy(
        pool,
        pages,
        np.array([0, len(pages)], dtype=np.uint32),
        np.array([blocks.ctypes.data], dtype=np.uint64),
        0,
        plane_count,
    )
