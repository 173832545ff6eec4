"""The kernels as Python calls them, on a device whose streams are late: what arrives, and when.

The device is the real one over the stand-in for libcuda, which runs the kernels in the simulator.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import numpy as np
import pytest
from fake_cuda import Call, FakeCuda, Setting
from kernel_world import CAPACITY, SHAPE, TOP, World
from paged import GAP, PagedKv
from reference_elements import same_but_nans, to_elements
from reference_hot import resolve
from reference_quantise import dequantise, quantise
from reference_rope import shift

from kvtier._core import CudaDevice, DeviceJob
from kvtier.backends.cuda_kernels import Axis, CudaKernels, Element, QuantForm

FORM = QuantForm(8, Axis.CHANNEL, 16)
BOOSTING = QuantForm(2, Axis.CHANNEL, 16, boosted=8)
FORMS = [FORM, QuantForm(4, Axis.TOKEN, 32), BOOSTING]
CHANNELS = np.tile(np.arange(1, 64, 8, dtype=np.uint8), (2, 2, 1))
LATE_US = 20_000
"""More than calls take, so that work without an order comes in any."""


@pytest.fixture(scope="module")
def library() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def cuda(library: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    library.install(monkeypatch)
    library.reset()
    library.mistake_words()
    yield library
    held = library.held_now()
    words = library.mistake_words()
    library.reset()
    assert not any(held), held
    assert not words


@pytest.fixture
def world(cuda: FakeCuda) -> Iterator[World]:
    world = World(cuda)
    yield world
    world.close()


def done(job: DeviceJob) -> None:
    assert job.wait(10.0)


def check_tiles(world: World, form: QuantForm, ids: list[int], kv: PagedKv) -> None:
    """What lies in `stored` are the reference's tiles of these pages."""
    size = form.tile(*SHAPE).nbytes
    for number, (page, plane) in enumerate((page, plane) for page in ids for plane in (0, 1)):
        channels = CHANNELS[plane] if form.boosted else None
        expected = quantise(
            kv.floats(plane, page), form.bits, form.axis, form.group, channels, gap=GAP
        )
        assert np.array_equal(world.stored[number * size :][:size], expected), (page, plane)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_tiles_and_values_are_the_references(
    world: World, cuda: FakeCuda, form: QuantForm, seed: int
) -> None:
    cuda.set(Setting.SEED, seed)
    boosted = CHANNELS if form.boosted else None
    done(world.kernels.quantise(world.pages, [2, 0], form, world.stored, boosted=boosted))
    check_tiles(world, form, [2, 0], world.kv)
    done(world.kernels.dequantise(world.pages, [1, 3], form, world.stored, boosted=boosted))
    size = form.tile(*SHAPE).nbytes
    for number, (page, plane) in enumerate((page, plane) for page in (1, 3) for plane in (0, 1)):
        tile = world.stored[number * size :][:size]
        channels = CHANNELS[plane] if form.boosted else None
        floats = dequantise(tile, SHAPE, form.bits, form.axis, form.group, channels)
        expected = to_elements(floats, Element.FLOAT16).reshape(SHAPE)
        assert np.array_equal(world.kv.view(plane)[page], expected)


def test_planes_are_those_that_are_named(world: World) -> None:
    done(world.kernels.quantise(world.pages, [2], FORM, world.stored, planes=(1, 1)))
    done(world.kernels.dequantise(world.pages, [1], FORM, world.stored, planes=(1, 1)))
    given = to_elements(world.values[0, 1], Element.FLOAT16).reshape(SHAPE)
    assert np.array_equal(world.kv.view(0)[1], given)
    assert np.abs(world.kv.floats(1, 1) - world.kv.floats(1, 2)).max() < 0.02


def test_boosted_channels_come_back_more_exactly(world: World) -> None:
    for verb, page in ((world.kernels.quantise, 0), (world.kernels.dequantise, 1)):
        done(verb(world.pages, [page], BOOSTING, world.stored, boosted=CHANNELS))
    error = np.abs(world.kv.floats(0, 1) - world.kv.floats(0, 0)).max(axis=(0, 1))
    is_boosted = np.isin(np.arange(64), CHANNELS[0, 0])
    assert error[is_boosted].max() < error[~is_boosted].min()


def test_an_array_without_pages_is_one_page_of_all_its_tokens(world: World) -> None:
    values = np.random.default_rng(2).standard_normal((1, 1, 100, 3, 32), np.float32)
    plain = PagedKv.make(Element.FLOAT32, 1, 1, (100, 3, 32), False, 0)
    plain.put(values)
    world.own(plain.memory[0])
    kv = world.kernels.pages(plain.paging, Element.FLOAT32)
    form = QuantForm(8, Axis.CHANNEL, 32)
    done(world.kernels.quantise(kv, [0], form, world.stored))
    plain.put(np.zeros_like(values))
    done(world.kernels.dequantise(kv, [0], form, world.stored))
    assert np.abs(plain.floats(0, 0) - values[0, 0]).max() < 0.03


@pytest.mark.parametrize("seed", range(3))
def test_keys_are_shifted_by_each_pages_difference(world: World, cuda: FakeCuda, seed: int) -> None:
    cuda.set(Setting.SEED, seed)
    done(
        world.kernels.rope_shift(
            world.pages, [3, 0], world.units, is_neox=True, unit_of_page=[1, 0], planes=(0, 1)
        )
    )
    for page, unit in ((3, 1), (0, 0)):
        before = to_elements(world.values[0, page], Element.FLOAT16).view(np.float16)
        turned = shift(before.astype(np.float32), world.units[unit], True)
        expected = to_elements(turned, Element.FLOAT16).reshape(SHAPE)
        found = np.ascontiguousarray(world.kv.view(0)[page])
        assert same_but_nans(found, expected, Element.FLOAT16)
    given = to_elements(world.values[1], Element.FLOAT16)
    assert np.array_equal(world.kv.view(1), given.reshape(world.kv.view(1).shape))


@pytest.mark.parametrize("seed", range(3))
def test_missing_rows_are_found_and_fetched(world: World, cuda: FakeCuda, seed: int) -> None:
    """The second waits for the first on the device alone: nobody waits between them."""
    cuda.set(Setting.SEED, seed)
    world.top[:] = [[0, 7, 7, 3, -1, 1], [2, 2, 2, 9, 2, 2]]
    slots, order = world.slot_tokens.copy(), world.order.copy()
    world.resolve()
    done(world.fetch())
    rows = world.rows.reshape(8, 32)
    buffer = world.hot.reshape(2, CAPACITY, 32)
    for request in range(TOP[0]):
        expected = resolve(
            world.top[request].tolist(), slots[request].tolist(), order[request].tolist(), 8
        )
        assert world.plan.top_slots[request].tolist() == expected.top_slots
        assert world.plan.missing_counts[request] == len(expected.missing)
        assert world.order[request].tolist() == expected.order
        assert world.slot_tokens[request].tolist() == expected.slot_tokens
        for token, slot in expected.missing:
            assert np.array_equal(buffer[request, slot], rows[token])


class Engine:
    """An engine that fills pages, has them quantised, and at once fills them with something else."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.stream = world.device.create_stream()
        rng = np.random.default_rng(seed)
        self.first, self.second = PagedKv.like(world.kv), PagedKv.like(world.kv)
        for kv in (self.first, self.second):
            kv.put(rng.standard_normal((2, 4, *SHAPE), np.float32))
            for memory in kv.memory:
                world.own(memory)

    def fill(self, kv: PagedKv) -> None:
        for target, source in zip(self.world.kv.memory, kv.memory, strict=True):
            self.world.cuda.copy_on(self.stream, target.ctypes.data, source)

    def is_first_stored(self, *, is_after: bool, is_before: bool) -> bool:
        """Whether what was stored is what the engine's order says."""
        world = self.world
        for kv in (self.second, self.second, self.second, self.first):  # long enough to be late
            self.fill(kv)
        after = self.stream if is_after else None
        job = world.kernels.quantise(world.pages, [2, 0], FORM, world.stored, after=after)
        if is_before:
            job.order_after(self.stream)
        self.fill(self.second)
        done(job)
        world.device.synchronize(self.stream)
        try:
            check_tiles(world, FORM, [2, 0], self.first)
        except AssertionError:
            return False
        return True


@pytest.mark.parametrize("seed", range(6))
def test_a_kernel_has_its_place_in_the_engines_order(
    world: World, cuda: FakeCuda, seed: int
) -> None:
    cuda.set(Setting.SEED, seed)
    cuda.set(Setting.DELAY_MAX_US, LATE_US)
    assert Engine(world, seed).is_first_stored(is_after=True, is_before=True)


@pytest.mark.parametrize("missing", ["after", "order_after"])
def test_without_either_order_something_else_is_stored(
    world: World, cuda: FakeCuda, missing: str
) -> None:
    """For some seed: what the test above sees is no accident."""
    cuda.set(Setting.DELAY_MAX_US, LATE_US)
    found = []
    for seed in range(4):
        cuda.set(Setting.SEED, seed)
        found.append(
            Engine(world, seed).is_first_stored(
                is_after=missing != "after", is_before=missing != "order_after"
            )
        )
    assert not all(found)


def test_calls_of_one_object_follow_each_other(world: World, cuda: FakeCuda) -> None:
    """Out, shifted, and back: each sees what the one before it did."""
    cuda.set(Setting.DELAY_MAX_US, LATE_US)
    form = QuantForm(8, Axis.CHANNEL, 16)
    world.kernels.rope_shift(world.pages, [2], world.units, is_neox=False)
    world.kernels.quantise(world.pages, [2], form, world.stored)
    done(world.kernels.dequantise(world.pages, [1], form, world.stored))
    check_tiles(world, form, [2], world.kv)
    before = to_elements(world.values[1, 2], Element.FLOAT16).view(np.float16)
    turned = shift(before.astype(np.float32), world.units[0], False)
    assert np.abs(world.kv.floats(1, 1) - turned.reshape(SHAPE)).max() < 0.03


def test_tables_are_kept_for_the_next_launch(world: World, cuda: FakeCuda) -> None:
    for _ in range(5):
        done(world.kernels.quantise(world.pages, [2, 0], FORM, world.stored))
    allocations = cuda.held_now().allocations
    for _ in range(5):
        done(world.kernels.quantise(world.pages, [2, 0], FORM, world.stored))
    assert cuda.held_now().allocations == allocations


def test_tables_of_work_under_way_are_left_alone(world: World, cuda: FakeCuda) -> None:
    """Ten launches at once, each of other pages: none reads the tables of another."""
    cuda.set(Setting.DELAY_MAX_US, LATE_US // 4)
    size = 2 * FORM.tile(*SHAPE).nbytes
    pages = [0, 1, 2, 3, 2, 1, 0, 3, 1, 2]
    jobs = [
        world.kernels.quantise(world.pages, [page], FORM, world.stored[number * size :])
        for number, page in enumerate(pages)
    ]
    for job in jobs:
        done(job)
    check_tiles(world, FORM, pages, world.kv)


def test_registered_memory_may_lie_elsewhere_for_kernels(world: World, cuda: FakeCuda) -> None:
    """The stand-in fails a kernel that goes to the host's address."""
    cuda.set(Setting.IS_ALIASING, 1)
    stored = np.frombuffer(mmap.mmap(-1, 1 << 16), np.uint8)
    stored[:] = GAP
    number = world.device.register_host(stored.ctypes.data, stored.nbytes)
    assert world.device.device_address(stored.ctypes.data, stored.nbytes) != stored.ctypes.data
    done(world.kernels.quantise(world.pages, [2, 0], FORM, stored))
    world.stored[:] = stored
    check_tiles(world, FORM, [2, 0], world.kv)
    stored[: 2 * 8 * 32] = np.arange(2 * 8 * 32) % 251
    world.parts[:] = [[stored.ctypes.data], [stored.ctypes.data + 8 * 32]]
    world.resolve()
    done(world.fetch())
    slot = int(world.plan.missing_slots[1, 0])
    token = int(world.plan.missing_tokens[1, 0])
    row = world.hot.reshape(2, CAPACITY, 32)[1, slot]
    assert np.array_equal(row, stored[8 * 32 + 32 * token :][:32])
    world.device.unregister_host(number)


@pytest.mark.parametrize("blocks", [1, 2, 1000])
def test_any_number_of_ctas_does(world: World, blocks: int) -> None:
    done(world.kernels.quantise(world.pages, [2, 0], FORM, world.stored, blocks=blocks))
    check_tiles(world, FORM, [2, 0], world.kv)


def test_close_waits_for_what_is_under_way(world: World, cuda: FakeCuda) -> None:
    """Nothing reads tables that are gone; the fixture sees what is not given back."""
    cuda.set(Setting.DELAY_MAX_US, LATE_US)
    job = world.kernels.quantise(world.pages, [2, 0], FORM, world.stored)
    world.kernels.close()
    world.kernels.close()
    done(job)
    check_tiles(world, FORM, [2, 0], world.kv)
    with pytest.raises(ValueError, match="closed"):
        world.kernels.quantise(world.pages, [0], FORM, world.stored)


@pytest.mark.parametrize(
    "call", [Call.LAUNCH, Call.BATCH_COPY, Call.MEMORY_ALLOCATE, Call.HOST_ALLOCATE]
)
def test_a_call_that_fails_says_so_and_the_next_one_does_it(
    world: World, cuda: FakeCuda, call: Call
) -> None:
    cuda.fail(call, 2)
    with pytest.raises(OSError, match="CUDA"):
        world.kernels.quantise(world.pages, [2, 0], FORM, world.stored)
    done(world.kernels.quantise(world.pages, [2, 0], FORM, world.stored))
    check_tiles(world, FORM, [2, 0], world.kv)


def test_a_kernel_that_fails_ends_the_device(world: World, cuda: FakeCuda) -> None:
    cuda.fail(Call.KERNEL_RUN, 719)
    job = world.kernels.quantise(world.pages, [0], FORM, world.stored)
    with pytest.raises(OSError, match="719"):
        job.wait(10.0)
    with pytest.raises(OSError, match="719"):
        world.kernels.quantise(world.pages, [0], FORM, world.stored)


def test_a_device_without_kernels_is_refused(cuda: FakeCuda) -> None:
    cuda.fail(Call.MODULE_LOAD, 209, count=8)
    device = CudaDevice(0)
    with pytest.raises(ValueError, match="no kernels: "):
        CudaKernels(device)
    device.close()
