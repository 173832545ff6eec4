"""What a connector owes kvtier, and the proof that it pays it.

A connector hands over a `KvLayout` (what a page is), a `PagedKv` (where pages lie) and a
`Namespace` (what makes this KV this KV), then tokens and page numbers as requests come. It never
guesses a layout: `prove_layout` writes a pattern through the copy plan and reads it back through
the engine's own view of its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from kvtier import _core
from kvtier.device import Batch, PageIds
from kvtier.device_moves import wait_for
from kvtier.errors import BackendUnavailable, LayoutMismatch
from kvtier.hierarchy import Hierarchy
from kvtier.space import Space

ReadPage = Callable[[int], bytes]
"""The bytes of one page as the engine sees them, in stored order: layer, plane, token, head, dim."""

Blocks = npt.NDArray[np.uint8]


def prove_layout(
    space: Space,
    pool: _core.CopyPool,
    hierarchy: Hierarchy,
    read_page: ReadPage | None = None,
) -> None:
    """Prove on three pages that the space's copies read and write what they should.

    The pages' content is put back afterwards; nothing else may use them meanwhile, so this runs
    before the engine serves. Without `read_page` only overlap and writability are proved. Pages on
    a device go through the memory tier, as they will.

    Raises:
        LayoutMismatch: pages overlap, or the engine sees other bytes than were written.
        BackendUnavailable: the device fails, or the memory tier has no room for the three pages.
    """
    assert space.kv is not None, "asked for spaces with pages"
    pages = np.unique(
        np.array([0, space.kv.page_count // 2, space.kv.page_count - 1], dtype=np.int64)
    )
    try:
        with _mover(space, pool, hierarchy, pages) as (gather, scatter):
            _prove(space, pages, gather, scatter, read_page)
    except OSError as error:
        raise BackendUnavailable(f"the layout could not be proved: {error}") from error


def _prove(
    space: Space,
    pages: PageIds,
    gather: Callable[[], Blocks],
    scatter: Callable[[Blocks], None],
    read_page: ReadPage | None,
) -> None:
    before = gather()
    pattern = np.random.default_rng(0x6B76).integers(0, 256, before.shape, dtype=np.uint8)
    try:
        scatter(pattern)
        if not np.array_equal(gather(), pattern):
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
        scatter(before)


@contextmanager
def _mover(
    space: Space, pool: _core.CopyPool, hierarchy: Hierarchy, pages: PageIds
) -> Iterator[tuple[Callable[[], Blocks], Callable[[Blocks], None]]]:
    """Functions that copy the pages out of the engine, and back into it."""
    shape = (len(pages), space.layout.block_bytes)
    planes = space.layout.layers * space.layout.planes
    offsets = np.array([0, len(pages)], dtype=np.uint32)
    if space.copies is None:
        plan = space.need_plan()

        def gather() -> Blocks:
            blocks = np.empty(shape, dtype=np.uint8)
            segments = np.array([blocks.ctypes.data], dtype=np.uint64)
            plan.gather(pool, pages, offsets, segments, 0, planes)
            return blocks

        def scatter(blocks: Blocks) -> None:
            segments = np.array([blocks.ctypes.data], dtype=np.uint64)
            plan.scatter(pool, pages, offsets, segments, 0, planes)

        yield gather, scatter
        return

    copies = space.copies
    record = hierarchy.reserve(shape[0] * shape[1])
    if record is None:
        raise BackendUnavailable(
            f"the memory tier has no room for {shape[0]} blocks of {shape[1]} bytes"
        )
    staged = np.frombuffer(hierarchy.memory.view(record), np.uint8, shape[0] * shape[1])
    batch = Batch(pages, offsets, np.array([[record.address]], dtype=np.uint64), ((0, planes),))

    def gather_by_device() -> Blocks:
        wait_for(copies.gather(batch, space.stream()))
        return staged.reshape(shape).copy()

    def scatter_by_device(blocks: Blocks) -> None:
        staged[:] = blocks.reshape(-1)
        move = copies.scatter(batch, space.stream())
        wait_for(move)
        move.order_after(space.stream())

    try:
        yield gather_by_device, scatter_by_device
    finally:
        hierarchy.cancel([record])
