"""Cases of the copy kernels: an engine's pages, a stored form, launches, and numpy's answer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from layouts import LAYOUTS, Bytes, Paged, Shape, allocator
from machine import Machine
from numpy.lib.stride_tricks import as_strided

from kvtier.backends.cuda_arguments import CopyArgs, FastDiv

BULK_SLOTS = 4  # as csrc/cuda/bulk_shape.h
BULK_UNIT = 128


@dataclass(frozen=True)
class Case:
    """One copy there and one back."""

    layout: str
    form: str
    """`blocks`: whole blocks, one wave; `layers`: a wave for each layer; `spaced`: blocks whose
    tokens, heads and planes lie apart, heads outside."""
    shape: Shape
    chunks: tuple[tuple[int, ...], ...]
    """Pages of each; -1 is skipped."""
    vector_bytes: int = 16
    """0: the bulk kernels."""
    grid: int = 3
    block: int = 64
    slot_bytes: int = BULK_UNIT
    offset: int = 0
    """Of everything from an aligned address."""
    is_collapsed: bool = True
    seed: int = 0


@dataclass(frozen=True)
class Stored:
    """One segment, seen as [page, plane, token, head, byte]."""

    memory: Bytes
    view: Bytes


def check(machine: Machine, case: Case, *, shared_bytes: int | None = None) -> None:
    """Gather, then scatter, and compare every byte of all memory with numpy's.

    `shared_bytes` are what bulk kernels get, by default what the case needs.
    """
    _Run(machine, case, np.random.default_rng(case.seed), shared_bytes).check()


class _Run:
    def __init__(
        self, machine: Machine, case: Case, rng: np.random.Generator, shared_bytes: int | None
    ) -> None:
        self._machine, self._case, self._rng = machine, case, rng
        self._shared_bytes = shared_bytes

    def check(self) -> None:
        for is_gather in (True, False):
            paged = LAYOUTS[self._case.layout](
                self._case.shape, allocator(self._rng, self._case.offset)
            )
            segments = self._segments(paged)
            self._copy(paged, segments, is_gather)

    def _segments(self, paged: Paged) -> list[list[Stored]]:
        """[wave][chunk], of random bytes."""
        return [
            [self._segment(paged, len(pages), count) for pages in self._case.chunks]
            for _, count in self._waves(paged)
        ]

    def _waves(self, paged: Paged) -> Iterator[tuple[int, int]]:
        """First plane and count."""
        step = paged.planes_per_layer if self._case.form == "layers" else len(paged.planes)
        for first in range(0, len(paged.planes), step):
            yield first, step

    def _segment(self, paged: Paged, page_count: int, plane_count: int) -> Stored:
        _, tokens, heads, run = paged.planes[0].shape
        if self._case.form == "spaced":
            gap = max(16, self._case.vector_bytes)
            col = tokens * (run + gap)  # heads outside
            strides = [0, heads * col + gap, run + gap, col, 1]
        else:
            strides = [0, tokens * heads * run, heads * run, run, 1]
        strides[0] = plane_count * strides[1]
        nbytes = self._case.offset + page_count * strides[0]
        memory = self._rng.integers(0, 256, nbytes, dtype=np.uint8)
        dims = (page_count, plane_count, tokens, heads, run)
        return Stored(memory, as_strided(memory[self._case.offset :], dims, strides))

    def _copy(self, paged: Paged, segments: list[list[Stored]], is_gather: bool) -> None:
        machine = self._machine
        addresses = [machine.put(memory) for memory in paged.memories]
        plane_addresses = [address_of(plane, paged.memories, addresses) for plane in paged.planes]
        stored_addresses = []
        for (first, count), wave in zip(self._waves(paged), segments, strict=True):
            stored = [machine.put(segment.memory) for segment in wave]
            stored_addresses += stored
            self._launch(
                paged.planes[0],
                wave,
                plane_addresses[first : first + count],
                [address + self._case.offset for address in stored],
                is_gather,
            )
            self._expect(paged.planes[first : first + count], wave, is_gather)
        for address, memory in zip(addresses, paged.memories, strict=True):
            same(machine.get(address), memory, "the pages")
        for address, segment in zip(
            stored_addresses, itertools.chain.from_iterable(segments), strict=True
        ):
            same(machine.get(address), segment.memory, "a segment")
        machine.clear()

    def _launch(
        self,
        plane: Bytes,
        wave: list[Stored],
        plane_addresses: list[int],
        segment_addresses: list[int],
        is_gather: bool,
    ) -> None:
        case = self._case
        entries = [
            (page * plane.strides[0], address + i * segment.view.strides[0])
            for pages, segment, address in zip(case.chunks, wave, segment_addresses, strict=True)
            for i, page in enumerate(pages)
            if page >= 0
        ]
        if not entries:
            return  # the host launches nothing for no pages
        planes = np.array(plane_addresses, np.uint64)
        pages = np.array(entries, np.int64)
        stored = wave[0].view
        _, rows, cols, run = plane.shape
        row_stride, col_stride = plane.strides[1:3]
        stored_row, stored_col = stored.strides[2:4]
        if case.is_collapsed and (cols == 1 or col_stride == stored_col == run):
            run, cols = run * cols, 1
        if case.is_collapsed and cols == 1 and (rows == 1 or row_stride == stored_row == run):
            run, rows = run * rows, 1
        vectors = run // case.vector_bytes if case.vector_bytes else 1
        arguments = CopyArgs(
            planes=self._machine.put(planes),
            pages=self._machine.put(pages),
            row_stride=row_stride,
            col_stride=col_stride,
            stored_plane_stride=stored.strides[1],
            stored_row_stride=stored_row,
            stored_col_stride=stored_col,
            total=vectors * cols * rows * len(planes) * len(pages),
            run_bytes=run,
            vectors=FastDiv(vectors),
            cols=FastDiv(cols),
            rows=FastDiv(rows),
            plane_count=FastDiv(len(planes)),
        )
        shared_bytes = 0
        kind = "gather" if is_gather else "scatter"
        name = f"kvtier_{kind}_v{case.vector_bytes}"
        if case.vector_bytes == 0:
            name = f"kvtier_bulk_{kind}"
            shared_bytes = self._shared_bytes or bulk_shared_bytes(
                case.block // 32, case.slot_bytes
            )
        self._machine.launch(name, case.grid, case.block, shared_bytes, bytes(arguments))

    def _expect(self, planes: list[Bytes], wave: list[Stored], is_gather: bool) -> None:
        """What numpy makes of it, in place."""
        for pages, segment in zip(self._case.chunks, wave, strict=True):
            for i, page in enumerate(pages):
                for p, plane in enumerate(planes):
                    if page < 0:
                        continue
                    if is_gather:
                        segment.view[i, p] = plane[page]
                    else:
                        plane[page] = segment.view[i, p]


def bulk_shared_bytes(rings: int, slot_bytes: int) -> int:
    """As csrc/cuda/bulk_shape.h."""
    barriers = -(-rings * BULK_SLOTS * 8 // BULK_UNIT) * BULK_UNIT
    return barriers + rings * BULK_SLOTS * slot_bytes


def address_of(plane: Bytes, memories: list[Bytes], addresses: list[int]) -> int:
    """Where the machine has a view of one of the memories."""
    own = plane.__array_interface__["data"][0]
    for memory, address in zip(memories, addresses, strict=True):
        begin = memory.__array_interface__["data"][0]
        if begin <= own < begin + memory.nbytes:
            return int(address + own - begin)
    raise AssertionError("a plane outside of all memories")


def same(found: Bytes, expected: Bytes, what: str) -> None:
    wrong = np.flatnonzero(found != expected)
    assert not wrong.size, f"{what}: {wrong.size} of {found.size} bytes, the first at {wrong[0]}"
