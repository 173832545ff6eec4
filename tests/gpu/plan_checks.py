"""Device plans against numpy: every layout, on every path, each byte of both sides."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from copies import address_of, same
from gpu_machine import GpuMachine, host_view, wait
from layouts import LAYOUTS, Bytes, Paged, Shape, allocator

from kvtier._core import CudaDevice, DeviceJob, DevicePlan

GUARD_BYTES = 256
POISON = 0x6B
CHUNKS = ((4, 0, -1, 3), (1,), (-1, -1), ())
"""Ragged, with pages that are skipped, a chunk of which nothing is left, and an empty one."""
STAGING_BYTES = 1 << 18
"""So little that a slot holds two pages of one plane of the largest shape, and slots take turns."""


@dataclass(frozen=True)
class Way:
    """How a plan copies."""

    path: str
    is_bulk: bool = False
    ctas: int = 0

    def __str__(self) -> str:
        return self.path + ("-bulk" if self.is_bulk else "") + (f"-{self.ctas}" * (self.ctas > 0))

    def reaches_far(self, *, on_device: bool) -> bool:
        """Whether it makes bulk copies of host memory, which not every machine may be able to do."""
        return self.is_bulk and self.path == "direct" and not on_device

    def gather(
        self, plan: DevicePlan, table: Table, segments: npt.NDArray[np.uint64], stream: int
    ) -> DeviceJob:
        """Begin to copy pages into segments."""
        return plan.gather(
            *table.arguments(segments), stream, path=self.path, is_bulk=self.is_bulk, ctas=self.ctas
        )

    def scatter(
        self, plan: DevicePlan, table: Table, segments: npt.NDArray[np.uint64], stream: int
    ) -> DeviceJob:
        """Begin to copy segments into pages."""
        return plan.scatter(
            *table.arguments(segments), stream, path=self.path, is_bulk=self.is_bulk, ctas=self.ctas
        )


@dataclass(frozen=True, eq=False)
class Table:
    """What is copied: pages of each chunk, planes of each wave."""

    page_ids: npt.NDArray[np.int64]
    page_offsets: npt.NDArray[np.uint32]
    waves: npt.NDArray[np.uint64]

    @classmethod
    def of(cls, chunks: tuple[tuple[int, ...], ...], waves: list[tuple[int, int]]) -> Table:
        flat = np.array(list(itertools.chain.from_iterable(chunks)), np.int64)
        offsets = np.cumsum([0, *map(len, chunks)]).astype(np.uint32)
        return cls(flat, offsets, np.array(waves, np.uint64))

    def arguments(
        self, segments: npt.NDArray[np.uint64]
    ) -> tuple[
        npt.NDArray[np.int64],
        npt.NDArray[np.uint32],
        npt.NDArray[np.uint64],
        npt.NDArray[np.uint64],
    ]:
        return self.page_ids, self.page_offsets, segments, self.waves


@dataclass(frozen=True)
class PlanCase:
    """One gather and one scatter."""

    layout: str
    shape: Shape
    way: Way
    is_by_layer: bool
    on_device: bool = False
    """Segments are device memory, else page-locked host memory."""
    seed: int = 0
    chunks: tuple[tuple[int, ...], ...] = CHUNKS

    def __str__(self) -> str:
        where = "device" if self.on_device else "host"
        waves = "layers" if self.is_by_layer else "whole"
        return f"{self.layout}-{self.shape.run_bytes}-{self.way}-{waves}-{where}"


def cases(*, has_kernels: bool, has_bulk: bool) -> Iterator[PlanCase]:
    """Every layout with strides that a plan takes, on every path that the device has."""
    narrow = Shape(layers=2, pages=5, tokens=4, heads=3, run_bytes=40)
    wide = Shape(layers=2, pages=5, tokens=4, heads=3, run_bytes=528)
    large = Shape(layers=3, pages=5, tokens=16, heads=2, run_bytes=1024)
    ways = [(Way("dma"), False), (Way("dma"), True)]
    if has_kernels:
        for is_bulk in (False, True) if has_bulk else (False,):
            ways += [(Way("staged", is_bulk), False), (Way("direct", is_bulk, 3), False)]
            ways += [(Way("direct", is_bulk), True)]
    for layout, is_by_layer in itertools.product(LAYOUTS, (False, True)):
        if layout == "backward":
            continue  # plans have no negative strides
        for way, on_device in ways:
            for shape in (wide, large) if way.is_bulk else (narrow, wide, large):
                yield PlanCase(layout, shape, way, is_by_layer, on_device)


def some(all_cases: list[PlanCase], count: int) -> list[PlanCase]:
    """So many of them, the same each time, of all kinds."""
    return random.Random(1).sample(all_cases, min(count, len(all_cases)))


def plan_of(device: CudaDevice, paged: Paged, addresses: list[int]) -> DevicePlan:
    """The plan of pages whose memories lie at these addresses."""
    plane = paged.planes[0]
    _, rows, cols, run_bytes = plane.shape
    page_stride, row_stride, col_stride, _ = plane.strides
    return DevicePlan(
        device,
        np.array(plane_addresses(paged, addresses), np.uint64),
        plane.shape[0],
        page_stride,
        rows,
        row_stride,
        cols,
        col_stride,
        run_bytes,
    )


def plane_addresses(paged: Paged, addresses: list[int]) -> list[int]:
    """Where each plane begins, given where each memory does."""
    return [address_of(plane, paged.memories, addresses) for plane in paged.planes]


def check(device: CudaDevice, case: PlanCase) -> None:
    """Gather, then scatter, each into poisoned memory; compare every byte with numpy's."""
    machine = GpuMachine(device)
    stream = device.create_stream()
    try:
        for is_gather in (True, False):
            _Run(device, machine, case, is_gather).check(stream)
    finally:
        device.synchronize(stream)
        device.destroy_stream(stream)
        machine.close()


class _Run:
    """One copy, one way."""

    def __init__(
        self, device: CudaDevice, machine: GpuMachine, case: PlanCase, is_gather: bool
    ) -> None:
        self._device, self._machine, self._case = device, machine, case
        self._is_gather = is_gather
        rng = np.random.default_rng((case.seed, is_gather))
        self._paged = LAYOUTS[case.layout](case.shape, allocator(rng, 0))
        step = self._paged.planes_per_layer if case.is_by_layer else len(self._paged.planes)
        firsts = range(0, len(self._paged.planes), step)
        self._table = Table.of(case.chunks, [(first, step) for first in firsts])
        _, tokens, heads, run = self._paged.planes[0].shape
        dims = [(len(pages), step, tokens, heads, run) for pages in case.chunks]
        if is_gather:
            self._segments = [[np.full(dim, POISON, np.uint8) for dim in dims] for _ in firsts]
        else:
            self._segments = [
                [rng.integers(0, 256, dim, dtype=np.uint8) for dim in dims] for _ in firsts
            ]

    def check(self, stream: int) -> None:
        machine = self._machine
        places = [machine.put(memory) for memory in self._paged.memories]
        plan = plan_of(self._device, self._paged, places)
        flat = [segment.reshape(-1) for wave in self._segments for segment in wave]
        area, offsets = _lined_up(flat)
        if self._case.on_device:
            begin = machine.put(area)
        else:
            begin = self._device.allocate_host(area.nbytes)
            host_view(begin, area.nbytes)[:] = area
        machine.flush()
        segments = np.array([begin + at for at in offsets], np.uint64)
        segments = segments.reshape(len(self._segments), len(self._case.chunks))
        copy = self._case.way.gather if self._is_gather else self._case.way.scatter
        try:
            wait(copy(plan, self._table, segments, stream))
            found = (
                machine.get(begin) if self._case.on_device else host_view(begin, area.nbytes).copy()
            )
        finally:
            if not self._case.on_device:
                self._device.free_host(begin)
        self._expect()
        expected, _ = _lined_up(
            [segment.reshape(-1) for wave in self._segments for segment in wave]
        )
        same(found, expected, "the segments")
        for place, memory in zip(places, self._paged.memories, strict=True):
            same(machine.get(place), memory, "the pages")
        machine.clear()

    def _expect(self) -> None:
        """What numpy makes of it, in place."""
        step = int(self._table.waves[0, 1])
        for w, wave in enumerate(self._segments):
            planes = self._paged.planes[w * step : (w + 1) * step]
            for pages, segment in zip(self._case.chunks, wave, strict=True):
                for (i, page), (p, plane) in itertools.product(enumerate(pages), enumerate(planes)):
                    if page < 0:
                        continue
                    if self._is_gather:
                        segment[i, p] = plane[page]
                    else:
                        plane[page] = segment[i, p]


def _lined_up(parts: list[Bytes]) -> tuple[Bytes, list[int]]:
    """All in one array with guards between them, and where each begins in it."""
    offsets, end = [], GUARD_BYTES
    for part in parts:
        offsets.append(end)
        end += -(-part.nbytes // GUARD_BYTES) * GUARD_BYTES + GUARD_BYTES
    area = np.full(end, POISON, np.uint8)
    for part, at in zip(parts, offsets, strict=True):
        area[at : at + part.nbytes] = part
    return area, offsets
