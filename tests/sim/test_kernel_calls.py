"""The kernels as Python calls them, on a device whose streams are late: what arrives, and when.

The device is the real one over the stand-in for libcuda, which runs the kernels in the simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

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
def test_keys_are_shifted_by_each_pages_difference(
    world: World, cuda: FakeCuda, seed: int
) -> None:
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
