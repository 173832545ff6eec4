"""What measurements on a GPU share: sizes, time boxes, memory of random bytes, turns, paged KV."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
from gpu_machine import PATIENCE_S, DeviceHangs, copy_pieces, host_view, wait
from layouts import LAYOUTS, Bytes, Shape
from numpy.lib.stride_tricks import as_strided
from plan_checks import Table, Way, plan_of, plane_addresses

from kvtier._core import CudaDevice, DeviceJob

GB = 1e9
ROUNDS_MIN = 3
"""Fewer give no median worth the name."""
TOLD = "> "
"""How lines of `tell` begin."""
ORDER_COUNT = 4
"""Input sets that rounds take in turn."""


class OutOfTime(RuntimeError):
    """The time box is over before there is a figure."""


@dataclass(frozen=True)
class Sizes:
    """How large everything is; the smallest only shows that the code runs."""

    copy_bytes: int
    """Of one plain copy, and about what one copy of pages moves."""
    kv: Shape
    """The engine's KV: Llama-3-8B's."""
    latent: Shape
    """The same of a model with MLA."""
    chunk_pages: int
    rounds: int
    pieces_max: int
    """Descriptors of one copy by the copy engines, at most."""
    sweep_bytes: tuple[int, ...]
    """Lengths of runs."""
    sweep_total_bytes: int
    calibration_bytes: int
    """Of one copy by which the library finds the way that it takes by itself."""
    ctas: tuple[int, ...]
    """Of copies from and to the host; 0 is the device's budget."""
    checks_per_kind: int
    """Cases of each kernel; 0: all."""
    gemm: int
    """Rows and columns."""
    hot_requests: int
    hot_capacity: int


FULL = Sizes(
    copy_bytes=256 << 20,
    kv=Shape(layers=32, pages=192, tokens=16, heads=8, run_bytes=256),
    latent=Shape(layers=61, pages=96, tokens=64, heads=1, run_bytes=1152),
    chunk_pages=16,
    rounds=20,
    pieces_max=16384,
    sweep_bytes=tuple(1 << bits for bits in range(11, 22)),
    sweep_total_bytes=32 << 20,
    calibration_bytes=8 << 20,
    ctas=(0, 1, 2, 4, 8, 16),
    checks_per_kind=0,
    gemm=4096,
    hot_requests=32,
    hot_capacity=4096,
)
SMALLEST = Sizes(
    copy_bytes=64 << 10,
    kv=Shape(layers=2, pages=4, tokens=4, heads=2, run_bytes=256),
    latent=Shape(layers=2, pages=3, tokens=4, heads=1, run_bytes=1152),
    chunk_pages=2,
    rounds=3,
    pieces_max=64,
    sweep_bytes=(2048, 8192),
    sweep_total_bytes=16 << 10,
    calibration_bytes=4 << 10,
    ctas=(0,),
    checks_per_kind=1,
    gemm=64,
    hot_requests=2,
    hot_capacity=64,
)
SCALES = {"full": FULL, "smallest": SMALLEST}


class TimeBox:
    """How long a step may take. Not thread-safe."""

    def __init__(self, seconds: float) -> None:
        self._end_s = time.monotonic() + seconds
        self._counts: list[int] = []

    @property
    def left_s(self) -> float:
        """Below 0 once it is over."""
        return self._end_s - time.monotonic()

    def part(self, count_left: int) -> TimeBox:
        """The share of the next of so many things that are still to do."""
        share = TimeBox(max(0.0, self.left_s) / max(1, count_left))
        share._counts = self._counts
        return share

    def count(self, rounds: int) -> None:
        """Say how many rounds some medians are of."""
        self._counts.append(rounds)

    @property
    def rounds(self) -> int:
        """The fewest that any medians so far are of."""
        return min(self._counts, default=0)


Work = Callable[[int], float]
"""Does a round, whose number it gets, and gives its seconds."""


def take_turns(works: Mapping[str, Work], rounds: int, box: TimeBox) -> dict[str, float]:
    """The median seconds of each, in an order that moves on by one each round.

    Two rounds before do not count. Ends early with the time box.

    Raises:
        OutOfTime: there were too few rounds.
    """
    tell(f"turns of {', '.join(works)}")
    warm_ups = 2
    samples: dict[str, list[float]] = {name: [] for name in works}
    names = list(works)
    for turn in range(-warm_ups, rounds):
        counted = max(0, turn)
        if box.left_s <= 0:
            if counted < ROUNDS_MIN:
                raise OutOfTime(f"{counted} rounds of {', '.join(names)}, then the time was over")
            break
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            seconds = works[name](turn)
            if turn >= 0:
                samples[name].append(seconds)
    box.count(min(map(len, samples.values()), default=0))
    return {name: statistics.median(each) for name, each in samples.items()}


def device_s(job: DeviceJob) -> float:
    """The device's own time of a job, when it is done."""
    wait(job)
    return job.elapsed_s()


def wall_s(begin: Callable[[], Sequence[DeviceJob]]) -> float:
    """From the call until the bytes of all its jobs are in place.

    Asks without a pause: `wait` sleeps in between, for longer than some copies take.

    Raises:
        DeviceHangs: it took too long.
    """
    begin_s = time.perf_counter()
    for job in begin():
        while not job.is_done():
            if time.perf_counter() - begin_s > PATIENCE_S:
                raise DeviceHangs(f"work of {job.nbytes} bytes was not done in {PATIENCE_S} s")
    return time.perf_counter() - begin_s


def tell(what: str) -> None:
    """Say what is about to run, should it never end."""
    print(f"{TOLD}{what}", file=sys.stderr, flush=True)


class Rig:
    """A device with memory and streams that all go when this does. Not thread-safe."""

    def __init__(self, device: CudaDevice, sizes: Sizes, seed: int | None = None) -> None:
        """`seed` None: other bytes each time."""
        self.device = device
        self.sizes = sizes
        self.rng = np.random.default_rng(seed)
        self._memory: list[int] = []
        self._host: list[int] = []
        self._streams: list[int] = []
        self._noise: tuple[int, int] | None = None
        self._scratch_memory = (0, 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self._streams:
            self.device.synchronize(stream)
            self.device.destroy_stream(stream)
        for address in self._memory:
            self.device.free(address)
        for address in self._host:
            self.device.free_host(address)

    def host(self, nbytes: int) -> int:
        """Page-locked memory of random bytes."""
        address = self.device.allocate_host(nbytes)
        self._host.append(address)
        host_view(address, nbytes)[:] = self.noise(nbytes)
        return address

    def memory(self, nbytes: int) -> int:
        """Device memory of random bytes; any two parts of it differ."""
        address = self.device.allocate(nbytes)
        self._memory.append(address)
        if self._noise is None:
            # An odd length, so that where it repeats it lies otherwise in pages.
            length = min(nbytes, 48 << 20) | 1
            self._noise = self.host(length), length
        noise, length = self._noise
        starts = np.arange(0, nbytes, length, dtype=np.uint64)
        lengths = np.minimum(np.uint64(nbytes) - starts, np.uint64(length))
        sources = np.full(len(starts), noise, np.uint64)
        wait(copy_pieces(self.device, starts + np.uint64(address), sources, lengths))
        return address

    def stream(self) -> int:
        """Such as an engine has."""
        self._streams.append(self.device.create_stream())
        return self._streams[-1]

    def upload(self, array: npt.NDArray[np.generic]) -> int:
        """Device memory with these bytes."""
        address = self.device.allocate(max(1, array.nbytes))
        self._memory.append(address)
        self.write(address, array)
        return address

    def write(self, address: int, array: npt.NDArray[np.generic]) -> None:
        """Put bytes into device memory."""
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        pinned = self._scratch(flat.nbytes)
        host_view(pinned, flat.nbytes)[:] = flat
        wait(copy_pieces(self.device, [address], [pinned], [flat.nbytes]))

    def read(self, address: int, nbytes: int) -> Bytes:
        """What lies in device memory."""
        pinned = self._scratch(nbytes)
        wait(copy_pieces(self.device, [pinned], [address], [nbytes]))
        return host_view(pinned, nbytes).copy()

    def _scratch(self, nbytes: int) -> int:
        """Page-locked memory until the next call."""
        address, room = self._scratch_memory
        if nbytes > room:
            room = max(nbytes, 1 << 20)
            address = self.device.allocate_host(room)
            self._host.append(address)  # the former goes with the rest
            self._scratch_memory = address, room
        return address

    def noise(self, nbytes: int) -> Bytes:
        """Random bytes."""
        words = self.rng.integers(0, 1 << 63, -(-nbytes // 8), dtype=np.uint64)
        return words.view(np.uint8)[:nbytes]


class PagedOnDevice:
    """Paged KV in device memory, a place for its blocks, and copies of random pages between them."""

    def __init__(
        self,
        rig: Rig,
        layout: str,
        shape: Shape,
        *,
        on_device: bool = False,
        is_by_layer: bool = False,
        page_count: int | None = None,
    ) -> None:
        """Segments lie in device memory or in page-locked memory; `page_count` pages are moved at
        once, by default two of three."""
        self._rig = rig
        self.paged = LAYOUTS[layout](shape, _imagine)
        self._addresses = [rig.memory(memory.nbytes) for memory in self.paged.memories]
        self.plan = plan_of(rig.device, self.paged, self._addresses)
        self.stored_on_device = on_device
        self.page_count = page_count or max(1, shape.pages * 2 // 3)
        planes = len(self.paged.planes)
        self.block_bytes = planes * self.plan.plane_bytes
        self.nbytes = self.page_count * self.block_bytes
        self.stored = rig.memory(self.nbytes) if on_device else rig.host(self.nbytes)
        self.stream = rig.stream()
        step = self.paged.planes_per_layer if is_by_layer else planes
        waves = [(first, step) for first in range(0, planes, step)]
        orders = [rig.rng.permutation(shape.pages)[: self.page_count] for _ in range(ORDER_COUNT)]
        chunk = rig.sizes.chunk_pages
        self._tables = [
            Table.of(
                tuple(tuple(order[at : at + chunk].tolist()) for at in range(0, len(order), chunk)),
                waves,
            )
            for order in orders
        ]
        offsets = self._tables[0].page_offsets[:-1].astype(np.uint64)
        wave_bytes = self.nbytes // len(waves)
        self._segments = np.array(
            [
                self.stored + w * wave_bytes + offsets * (wave_bytes // self.page_count)
                for w in range(len(waves))
            ],
            np.uint64,
        )

    @property
    def plane_addresses(self) -> list[int]:
        """Where each plane begins."""
        return plane_addresses(self.paged, self._addresses)

    def page_ids(self, turn: int) -> npt.NDArray[np.int64]:
        """Which pages that turn moves."""
        return self._table(turn).page_ids

    @property
    def run_bytes(self) -> int:
        """The longest runs that copies have, planes that lie together joined."""
        places = self.plane_addresses
        run, joined = self.plan.run_bytes, 1
        while joined < len(places) and places[joined] == places[joined - 1] + run:
            joined += 1
        return run * joined if run == self.plan.plane_bytes else run

    def gather(self, way: Way, turn: int) -> DeviceJob:
        """Begin to copy that turn's pages into the blocks."""
        return way.gather(self.plan, self._table(turn), self._segments, self.stream)

    def scatter(self, way: Way, turn: int) -> DeviceJob:
        """Begin to copy the blocks into that turn's pages."""
        return way.scatter(self.plan, self._table(turn), self._segments, self.stream)

    def copy(self, is_gather: bool, way: Way, turn: int) -> DeviceJob:
        """Either."""
        return self.gather(way, turn) if is_gather else self.scatter(way, turn)

    def check(self, is_gather: bool, way: Way, turn: int, samples: int = 24) -> None:
        """Turn some bytes of the blocks over, copy once, and look at them and the pages.

        Raises:
            AssertionError: they differ.
        """
        planes, nbytes = len(self.paged.planes), self.plan.plane_bytes
        chosen = self._rig.rng.integers(0, (self.page_count, planes), (samples, 2))
        chosen[0], chosen[1] = (0, 0), (self.page_count - 1, planes - 1)
        places = {(i, p): self._stored_at(turn, i, p) for i, p in chosen.tolist()}
        for place in places.values():
            self._write(place, ~self._read(place, nbytes))
        wait(self.copy(is_gather, way, turn))
        for (position, plane), place in places.items():
            page = self._page(plane, int(self._table(turn).page_ids[position]))
            if not np.array_equal(self._read(place, nbytes).reshape(page.shape), page):
                raise AssertionError(f"{way}: page {position} of plane {plane} was copied wrongly")

    def _stored_at(self, turn: int, position: int, plane: int) -> int:
        """Where the block of a page has a plane."""
        table = self._table(turn)
        step = int(table.waves[0, 1])
        chunk = int(np.searchsorted(table.page_offsets, position, "right")) - 1
        wave, within = divmod(plane, step)
        block = position - int(table.page_offsets[chunk])
        return int(self._segments[wave, chunk]) + (block * step + within) * self.plan.plane_bytes

    def _read(self, place: int, nbytes: int) -> Bytes:
        if self.stored_on_device:
            return self._rig.read(place, nbytes)
        return host_view(place, nbytes).copy()

    def _write(self, place: int, content: Bytes) -> None:
        if self.stored_on_device:
            self._rig.write(place, content)
        else:
            host_view(place, content.nbytes)[:] = content

    def _table(self, turn: int) -> Table:
        return self._tables[turn % ORDER_COUNT]

    def _page(self, plane: int, page: int) -> Bytes:
        """[token, head, byte] of what the device has."""
        view = self.paged.planes[plane]
        _, rows, cols, run = view.shape
        page_stride, row_stride, col_stride, _ = view.strides
        place = self.plane_addresses[plane] + page * page_stride
        extent = (rows - 1) * row_stride + (cols - 1) * col_stride + run
        found = self._rig.read(place, extent)
        return as_strided(found, (rows, cols, run), (row_stride, col_stride, 1))


def _imagine(dims: Sequence[int]) -> tuple[Bytes, Bytes]:
    """An array that stands for device memory; nobody touches its bytes, so it takes none."""
    memory = np.empty(int(np.prod(dims)), np.uint8)
    return memory, memory.reshape(dims)
