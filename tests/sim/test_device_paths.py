"""Every way from a device's pages to segments and back, on the stand-in for the driver.

The kernels that are launched are the real ones, in the simulator; streams are late, at random.
"""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_cuda import Call, FakeCuda, Setting
from fake_nvrtc import FakeNvrtc
from layouts import LAYOUTS, Bytes, Paged, Shape, allocator

from kvtier._core import CudaDevice, DeviceJob, DevicePlan, cubin_architectures
from kvtier.types import Region, RegionKind

FORWARD = [name for name in LAYOUTS if name != "backward"]  # strides of plans are not negative
CHUNKS = ((2, 0, -1, 5), (4,), (), (1, 3))
SHAPE = Shape(layers=3, pages=6, tokens=4, heads=3, run_bytes=48)
WAYS = [("dma", False), ("staged", False), ("direct", False), ("staged", True), ("direct", True)]
STAGING_BYTES = 4 * 2048
_KEPT: list[Bench] = []
"""Registered memory must live as long as its device."""


@pytest.fixture(scope="module")
def library() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def cuda(library: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    library.install(monkeypatch)
    library.reset()
    library.mistake_words()
    yield library
    _KEPT.clear()
    held = library.held_now()
    words = library.mistake_words()
    library.reset()
    assert not any(held), held
    assert not words


class Bench:
    """An engine's pages, segments in page-locked memory, and a plan."""

    def __init__(
        self,
        cuda: FakeCuda,
        device: CudaDevice,
        layout: str,
        shape: Shape,
        seed: int,
        wave: int,
        offset: int = 0,
    ) -> None:
        _KEPT.append(self)
        self.rng = np.random.default_rng(seed)
        self.cuda, self.device = cuda, device
        self._offset = offset
        self.paged: Paged = LAYOUTS[layout](shape, allocator(self.rng, 0))
        for memory in self.paged.memories:
            cuda.own(Region(RegionKind.DRAM, memory.ctypes.data, memory.nbytes), 0)
        plane = self.paged.planes[0]
        _, rows, cols, run = plane.shape
        self.plan = DevicePlan(
            device,
            np.array([each.ctypes.data for each in self.paged.planes], np.uint64),
            plane.shape[0],
            plane.strides[0],
            rows,
            plane.strides[1],
            cols,
            plane.strides[2],
            run,
        )
        self.stream = device.create_stream()
        count = len(self.paged.planes)
        wave = wave or count
        self.waves = [(first, min(wave, count - first)) for first in range(0, count, wave)]
        self.segments = [
            [self._segment(len(chunk), planes) for chunk in CHUNKS] for _, planes in self.waves
        ]

    def _segment(self, pages: int, planes: int) -> Bytes:
        """[page, plane, row, col, byte] of garbage, page-locked."""
        shape = (pages, planes, *self.paged.planes[0].shape[1:])
        # Pages of its own, as slabs have.
        memory = mmap.mmap(-1, max(1, int(np.prod(shape))) + self._offset)
        segment = np.ndarray(shape, np.uint8, memory, self._offset)
        segment[...] = self.rng.integers(0, 256, shape, dtype=np.uint8)
        if segment.nbytes:
            self.device.register_host(segment.ctypes.data, segment.nbytes)
        return segment

    def copy(self, verb: str, path: str, is_bulk: bool = False, **options: Any) -> DeviceJob:
        job: DeviceJob = getattr(self.plan, verb)(
            np.array(sum(CHUNKS, ()), np.int64),
            np.cumsum([0, *map(len, CHUNKS)]).astype(np.uint32),
            np.array([[s.ctypes.data for s in wave] for wave in self.segments], np.uint64),
            np.array(self.waves, np.uint64),
            self.stream,
            path,
            is_bulk,
            **options,
        )
        return job

    def check(self, verb: str, path: str, is_bulk: bool = False, **options: Any) -> None:
        """Every byte of both sides is numpy's."""
        everything = [*self.paged.memories, *itertools.chain.from_iterable(self.segments)]
        before = [memory.copy() for memory in everything]
        job = self.copy(verb, path, is_bulk, **options)
        assert job.wait(10.0)
        assert job.wave_count == len(self.waves)
        found = [memory.copy() for memory in everything]
        for memory, was in zip(everything, before, strict=True):
            memory[...] = was
        self._copy_by_numpy(verb)
        for expected, now in zip(everything, found, strict=True):
            assert np.array_equal(expected, now)

    def _copy_by_numpy(self, verb: str) -> None:
        for (first, count), wave in zip(self.waves, self.segments, strict=True):
            for chunk, segment in zip(CHUNKS, wave, strict=True):
                for (b, page), p in itertools.product(enumerate(chunk), range(count)):
                    if page < 0:
                        continue
                    if verb == "gather":
                        segment[b, p] = self.paged.planes[first + p][page]
                    else:
                        self.paged.planes[first + p][page] = segment[b, p]


def opened(**options: Any) -> CudaDevice:
    device = CudaDevice(0, staging_bytes=STAGING_BYTES, **options)
    assert device.kernels, device.no_kernels
    return device


@pytest.mark.parametrize("verb", ["gather", "scatter"])
@pytest.mark.parametrize("wave", [0, 2, 1])
@pytest.mark.parametrize("layout", FORWARD)
def test_every_way_moves_the_same_bytes(cuda: FakeCuda, layout: str, wave: int, verb: str) -> None:
    device = opened()
    for seed, (path, is_bulk) in enumerate(WAYS):
        cuda.set(Setting.SEED, seed)
        Bench(cuda, device, layout, SHAPE, seed, wave).check(verb, path, is_bulk)
    device.close()


@pytest.mark.parametrize("run_bytes", [1, 2, 20, 40, 7, 112])
def test_odd_sizes_go_in_the_widest_vectors_that_fit(cuda: FakeCuda, run_bytes: int) -> None:
    device = opened()
    shape = Shape(layers=1, pages=6, tokens=3, heads=2, run_bytes=run_bytes)
    for verb, path in itertools.product(("gather", "scatter"), ("staged", "direct")):
        bench = Bench(cuda, device, "padded", shape, run_bytes, 0)
        assert bench.plan.vector_bytes == min(16, run_bytes & -run_bytes)
        bench.check(verb, path)
        bench.check(verb, path, ctas=1)
    device.close()


@pytest.mark.parametrize("verb", ["gather", "scatter"])
def test_segments_may_lie_on_the_device(cuda: FakeCuda, verb: str) -> None:
    device = opened()
    bench = Bench(cuda, device, "kv_first", SHAPE, 1, 2)
    for number, segment in enumerate(itertools.chain.from_iterable(bench.segments)):
        if segment.nbytes:
            device.unregister_host(segment.ctypes.data)
            cuda.own(Region(RegionKind.DRAM, segment.ctypes.data, segment.nbytes), 0)
        assert number < 12
    for path, is_bulk in [("dma", False), ("direct", False), ("direct", True)]:
        bench.check(verb, path, is_bulk)
    with pytest.raises(ValueError, match="need no staging"):
        bench.copy(verb, "staged")
    device.close()


def test_registered_memory_may_have_another_address_for_kernels(cuda: FakeCuda) -> None:
    cuda.set(Setting.IS_ALIASING, 1)
    device = opened()
    for verb in ("gather", "scatter"):
        bench = Bench(cuda, device, "page_first", SHAPE, 3, 2)
        bench.check(verb, "direct")
        bench.check(verb, "staged")
    device.close()


@pytest.mark.parametrize("items_max", [40, 80, 150])
def test_a_copy_of_more_than_a_launch_takes_goes_in_several(cuda: FakeCuda, items_max: int) -> None:
    """In launches of few planes of few pages, and of less than all planes of one page."""
    device = opened(launch_items_max=items_max)
    for verb, path in itertools.product(("gather", "scatter"), ("staged", "direct")):
        bench = Bench(cuda, device, "head_major", SHAPE, items_max, 4)
        before = cuda.counters().launches
        bench.check(verb, path)
        assert cuda.counters().launches - before > 2 * len(bench.waves)
        bench.check(verb, path, is_bulk=True)
    device.close()


@pytest.mark.parametrize("offset", [1, 2, 4, 8, 16])
def test_segments_lie_anywhere(cuda: FakeCuda, offset: int) -> None:
    device = opened()
    for verb, path in itertools.product(("gather", "scatter"), ("dma", "staged", "direct")):
        Bench(cuda, device, "kv_first", SHAPE, offset, 2, offset).check(verb, path)
    with pytest.raises(ValueError, match="bulk copies need") if offset < 16 else nullcontext():
        Bench(cuda, device, "kv_first", SHAPE, 1, 2, offset).check("gather", "direct", True)
    device.close()


@pytest.mark.parametrize("path", ["dma", "staged", "direct"])
def test_the_driver_is_not_asked_about_each_segment(cuda: FakeCuda, path: str) -> None:
    """The memory tier's are known, and a load has thousands of them, on the engine's thread."""
    device = opened()
    bench = Bench(cuda, device, "kv_first", SHAPE, 1, 2)
    asked = (Call.POINTER_GET_ATTRIBUTE, Call.HOST_GET_DEVICE_POINTER)
    before = [cuda.calls(each) for each in asked]
    bench.check("gather", path)
    assert [cuda.calls(each) for each in asked] == before
    device.close()


@pytest.mark.parametrize("path", ["dma", "staged", "direct"])
def test_a_segment_that_ends_beyond_what_is_registered_is_refused(
    cuda: FakeCuda, path: str
) -> None:
    device = opened()
    bench = Bench(cuda, device, "kv_first", SHAPE, 1, 0)
    segment = bench.segments[0][0]
    device.unregister_host(segment.ctypes.data)
    device.register_host(segment.ctypes.data, segment.nbytes - 4096)
    with pytest.raises(ValueError, match=r"not of one kind|neither page-locked"):
        bench.copy("gather", path)
    device.close()


# Order -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["dma", "staged", "direct"])
@pytest.mark.parametrize("seed", range(4))
def test_pages_are_read_after_the_engine_wrote_them_and_before_it_writes_them_again(
    cuda: FakeCuda, seed: int, path: str
) -> None:
    """Compute, gather, compute: the gather has what the first made, in every part of every wave."""
    cuda.set(Setting.SEED, seed)
    cuda.set(Setting.DELAY_MAX_US, 400)
    device = opened()
    bench = Bench(cuda, device, "kv_first", SHAPE, seed, 2)
    contents = [np.full_like(memory, 7) for memory in bench.paged.memories]
    later = [np.full_like(memory, 9) for memory in bench.paged.memories]
    for each in (*contents, *later):
        cuda.own(Region(RegionKind.DRAM, each.ctypes.data, each.nbytes), 0)
    for memory, content in zip(bench.paged.memories, contents, strict=True):
        cuda.copy_on(bench.stream, memory.ctypes.data, content)
    job = bench.copy("gather", path)
    job.order_after(bench.stream)
    for memory, content in zip(bench.paged.memories, later, strict=True):
        cuda.copy_on(bench.stream, memory.ctypes.data, content)
    assert job.wait(10.0)
    device.synchronize(bench.stream)
    for wave in bench.segments:
        for chunk, segment in zip(CHUNKS, wave, strict=True):
            for b, page in enumerate(chunk):
                assert page < 0 or (segment[b] == 7).all()
    device.close()


@pytest.mark.parametrize("path", ["dma", "staged", "direct"])
@pytest.mark.parametrize("seed", range(4))
def test_a_layer_is_there_when_the_stream_that_waited_for_it_goes_on(
    cuda: FakeCuda, seed: int, path: str
) -> None:
    cuda.set(Setting.SEED, seed)
    cuda.set(Setting.DELAY_MAX_US, 400)
    device = opened()
    bench = Bench(cuda, device, "separate", SHAPE, seed, 2)
    last = [np.full_like(memory, 5) for memory in bench.paged.memories]
    for each in last:
        cuda.own(Region(RegionKind.DRAM, each.ctypes.data, each.nbytes), 0)
    for memory, content in zip(bench.paged.memories, last, strict=True):
        cuda.copy_on(bench.stream, memory.ctypes.data, content)  # before the load: it must lose
    job = bench.copy("scatter", path)
    seen = [np.empty_like(memory) for memory in bench.paged.memories]
    for wave in range(len(bench.waves)):
        job.order_after(bench.stream, wave)
        for plane in (2 * wave, 2 * wave + 1):
            cuda.copy_from(bench.stream, seen[plane], bench.paged.memories[plane].ctypes.data)
    device.synchronize(bench.stream)
    for memory, content in zip(bench.paged.memories, last, strict=True):
        memory[...] = content
    bench._copy_by_numpy("scatter")
    for memory, now in zip(bench.paged.memories, seen, strict=True):
        assert np.array_equal(memory, now)
    assert job.wait(10.0)
    device.close()


@pytest.mark.parametrize("path", ["staged", "direct"])
def test_many_copies_at_once_keep_their_tables_and_slots(cuda: FakeCuda, path: str) -> None:
    """More are under way than there are slots, both ways at once."""
    device = opened()
    benches = [Bench(cuda, device, "joined", SHAPE, seed, 2) for seed in range(6)]
    wanted = []
    for number, bench in enumerate(benches):
        verb = "gather" if number % 2 else "scatter"
        everything = [*bench.paged.memories, *itertools.chain.from_iterable(bench.segments)]
        before = [each.copy() for each in everything]
        bench._copy_by_numpy(verb)
        wanted.append((bench, verb, everything, [each.copy() for each in everything]))
        for memory, was in zip(everything, before, strict=True):
            memory[...] = was
    jobs = [bench.copy(verb, path) for bench, verb, _, _ in wanted]
    assert all(job.wait(10.0) for job in jobs)
    for _, _, everything, expected in wanted:
        for now, want in zip(everything, expected, strict=True):
            assert np.array_equal(now, want)
    device.close()


# Bad input ---------------------------------------------------------------------------------------


def test_what_a_way_cannot_do_is_said_before_anything_begins(cuda: FakeCuda) -> None:
    device = opened()
    odd = Shape(layers=1, pages=6, tokens=4, heads=3, run_bytes=20)
    bench = Bench(cuda, device, "padded", odd, 1, 0)
    for words, arguments in {
        "bulk copies need": ("gather", "staged", True),
        "copy engines have no bulk copies": ("gather", "dma", True),
        "expected dma, staged or direct": ("gather", "magic", False),
    }.items():
        with pytest.raises(ValueError, match=words):
            bench.copy(*arguments)
    for path, _ in WAYS[:3]:
        loose = Bench(cuda, device, "kv_first", SHAPE, 1, 0)
        device.unregister_host(loose.segments[0][1].ctypes.data)
        for verb in ("gather", "scatter"):
            with pytest.raises(ValueError, match="segment 1 is neither page-locked nor"):
                loose.copy(verb, path)
    large = Shape(layers=1, pages=6, tokens=64, heads=3, run_bytes=48)
    with pytest.raises(ValueError, match="too large for a kernel here"):
        Bench(cuda, device, "kv_first", large, 1, 0).copy("scatter", "staged")
    assert (cuda.counters().launches, cuda.counters().copies, cuda.counters().batches) == (0, 0, 0)
    device.close()


def test_pages_that_overlap_a_segment_on_the_device_are_refused(cuda: FakeCuda) -> None:
    device = opened()
    bench = Bench(cuda, device, "kv_first", SHAPE, 1, 0)
    at = bench.paged.memories[0].ctypes.data + 64
    bench.segments[0][1] = np.ndarray(
        bench.segments[0][1].shape, np.uint8, bench.paged.memories[0].reshape(-1)[64:].data
    )
    assert bench.segments[0][1].ctypes.data == at
    for path in ("dma", "direct"):
        with pytest.raises(ValueError, match="segment 1 overlaps the pages"):
            bench.copy("gather", path)
    device.close()


def test_staging_that_the_device_has_not_is_said_and_the_other_ways_go_on(cuda: FakeCuda) -> None:
    device = opened()
    bench = Bench(cuda, device, "kv_first", SHAPE, 1, 0)
    cuda.fail(Call.MEMORY_ALLOCATE, 2, count=2)
    with pytest.raises(OSError, match="for staging"):
        device.reserve_staging()
    with pytest.raises(OSError, match="for staging"):
        bench.copy("gather", "staged")
    bench.check("gather", "direct")
    bench.check("gather", "staged")
    device.close()


@pytest.mark.parametrize("call", [Call.KERNEL_RUN, Call.LAUNCH, Call.COPY_RUN])
def test_a_lost_context_ends_every_way(cuda: FakeCuda, call: Call) -> None:
    device = opened()
    bench = Bench(cuda, device, "kv_first", SHAPE, 1, 0)
    cuda.fail(call, 700)
    with pytest.raises(OSError, match="CUDA 700"):
        assert bench.copy("scatter", "staged").wait(10.0)
    assert "700" in device.failure
    for path, _ in WAYS[:3]:
        with pytest.raises(OSError, match="failed"):
            bench.copy("gather", path)
    device.close()


def test_without_kernels_only_copy_engines_are_left(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda.set(Setting.CAPABILITY, 75)
    monkeypatch.setenv("KVTIER_NVRTC_LIBRARY", "/nonexistent")
    device = CudaDevice(0)
    assert device.kernels == ""
    assert "capability 7.5" in device.no_kernels
    bench = Bench(cuda, device, "kv_first", SHAPE, 1, 0)
    bench.check("gather", "dma")
    with pytest.raises(ValueError, match="no kernel kvtier_gather_v16"):
        bench.copy("gather", "direct")
    device.close()


# Where kernels come from -------------------------------------------------------------------------


@pytest.fixture
def nvrtc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeNvrtc:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    FakeNvrtc.install(monkeypatch)
    nvrtc = FakeNvrtc()
    nvrtc.serve_fake_cuda()
    return nvrtc


def copies_by(device: CudaDevice, cuda: FakeCuda) -> str:
    """Which kernels it has, after they copied."""
    Bench(cuda, device, "kv_first", SHAPE, 1, 0).check("gather", "staged")
    kernels = device.kernels
    device.close()
    return kernels


@pytest.mark.skipif(90 not in cubin_architectures(), reason="this build has no cubin for sm_90")
def test_built_in_kernels_are_taken_unless_told_otherwise(cuda: FakeCuda, nvrtc: FakeNvrtc) -> None:
    assert copies_by(CudaDevice(0), cuda) == "cubin sm_90"
    assert nvrtc.compiles == 0
    assert copies_by(CudaDevice(0, "jit"), cuda) == "jit sm_90"
    assert copies_by(CudaDevice(0, "jit"), cuda) == "jit sm_90"
    assert nvrtc.compiles == 1


def test_an_unknown_device_gets_kernels_compiled_here(cuda: FakeCuda, nvrtc: FakeNvrtc) -> None:
    cuda.set(Setting.CAPABILITY, 130)
    assert copies_by(CudaDevice(0), cuda) == "jit sm_130"
    assert nvrtc.compiles == 1


def test_a_cubin_that_the_driver_refuses_is_compiled_anew(cuda: FakeCuda, nvrtc: FakeNvrtc) -> None:
    cuda.fail(Call.MODULE_LOAD, 209)
    assert copies_by(CudaDevice(0), cuda) == "jit sm_90"


def test_why_there_are_no_kernels_is_said(cuda: FakeCuda, nvrtc: FakeNvrtc) -> None:
    nvrtc.fail()
    device = CudaDevice(0, "jit")
    assert device.kernels == ""
    assert "KVTIER_CUDA=jit" in device.no_kernels
    assert "planted" in device.no_kernels
    device.close()
    cuda.fail(Call.MODULE_LOAD, 209, count=2)
    device = CudaDevice(0)
    assert "209" in device.no_kernels
    device.close()
