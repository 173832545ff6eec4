"""The computing kernels as Python calls them: what arrives, and what is refused before a launch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from machine import SimMachine
from paged import PagedKv, aligned
from reference_elements import to_elements
from reference_rope import shift
from sim_device import SimDevice

from kvtier.backends.cuda_kernels import (
    Axis,
    CudaKernels,
    Element,
    HotPlan,
    KvPages,
    QuantForm,
    rope_units,
)

SHAPE = (16, 2, 64)
FORM = QuantForm(8, Axis.CHANNEL, 16)
BOOSTING = QuantForm(2, Axis.CHANNEL, 16, boosted=8)
TOP = (2, 6)
CAPACITY = 10


class World:
    """A device, an engine's pages on it, and what the calls need."""

    def __init__(self) -> None:
        self.device = SimDevice(SimMachine())
        self.kernels = CudaKernels(self.device)  # type: ignore[arg-type]
        self.kv = PagedKv.make(Element.FLOAT16, 2, 4, SHAPE, False, 0)
        rng = np.random.default_rng(1)
        self.values = rng.standard_normal((2, 4, *SHAPE), np.float32)
        self.kv.put(self.values)
        for memory in self.kv.memory:
            self.device.own(memory)
        self.pages = self.kernels.pages(self.kv.paging, Element.FLOAT16)
        self.stored = self.device.own(aligned(1 << 16), "host")
        self.host_only = aligned(1 << 16)
        self.units = rope_units(10000.0 ** (-np.arange(0, 64, 2) / 64), [5, -3])
        self.top = self.ints(TOP, 3)
        self.slot_tokens = self.ints((2, CAPACITY), -1)
        order = np.tile(np.arange(CAPACITY, dtype=np.uint16), (2, 1))
        self.order = self.device.own(order)
        self.plan = HotPlan(self.ints(TOP), self.ints(TOP), self.ints(TOP), self.ints((2,)))
        self.rows = self.device.own(aligned(8 * 32), "host")
        self.rows[:] = np.arange(self.rows.size)
        self.parts = np.full((2, 1), self.rows.ctypes.data, np.uint64)
        self.hot = self.device.own(aligned(2 * CAPACITY * 32))

    def ints(self, shape: tuple[int, ...], fill: int = 0) -> npt.NDArray[np.int32]:
        array: npt.NDArray[np.int32] = self.device.own(np.full(shape, fill, np.int32))
        return array

    def resolve(self, **changes: Any) -> None:
        self.kernels.hot_resolve(
            **{
                "top_tokens": self.top,
                "slot_tokens": self.slot_tokens,
                "order": self.order,
                "plan": self.plan,
                "shape": TOP,
                "capacity": CAPACITY,
                "token_end": 8,
                **changes,
            }
        )

    def fetch(self, **changes: Any) -> None:
        self.kernels.hot_copy(
            **{
                "plan": self.plan,
                "sources": self.kernels.hot_sources(self.parts, 8, 8 * 32),
                "target": self.hot,
                "shape": TOP,
                "capacity": CAPACITY,
                "row_bytes": 32,
                **changes,
            }
        )


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.kernels.close()
    assert world.device.allocation_count == 0
    assert world.device.streams == 0


def test_pages_go_out_quantised_and_come_back_elsewhere(world: World) -> None:
    world.kernels.quantise(world.pages, [2, 0], FORM, world.stored, planes=(1, 1))
    world.kernels.dequantise(world.pages, [1, 3], FORM, world.stored, planes=(1, 1))
    for source, target in ((2, 1), (0, 3)):
        found, given = world.kv.floats(1, target), world.kv.floats(1, source)
        assert np.abs(found - given).max() < 0.02
        assert np.array_equal(
            world.kv.view(0)[target], to_elements(world.values[0, target], Element.FLOAT16)
        )


def test_boosted_channels_come_back_more_exactly(world: World) -> None:
    boosted = np.tile(np.arange(1, 64, 8, dtype=np.uint8), (2, 2, 1))
    world.kernels.quantise(world.pages, [0], BOOSTING, world.stored, boosted=boosted)
    world.kernels.dequantise(world.pages, [1], BOOSTING, world.stored, boosted=boosted)
    error = np.abs(world.kv.floats(0, 1) - world.kv.floats(0, 0)).max(axis=(0, 1))
    is_boosted = np.isin(np.arange(64), boosted[0, 0])
    assert error[is_boosted].max() < error[~is_boosted].min()


def test_an_array_without_pages_is_one_page_of_all_its_tokens(world: World) -> None:
    values = np.random.default_rng(2).standard_normal((1, 1, 100, 3, 32), np.float32)
    plain = PagedKv.make(Element.FLOAT32, 1, 1, (100, 3, 32), False, 0)
    plain.put(values)
    world.device.own(plain.memory[0])
    kv = world.kernels.pages(plain.paging, Element.FLOAT32)
    form = QuantForm(8, Axis.CHANNEL, 32)
    world.kernels.quantise(kv, [0], form, world.stored)
    plain.put(np.zeros_like(values))
    world.kernels.dequantise(kv, [0], form, world.stored)
    assert np.abs(plain.floats(0, 0) - values[0, 0]).max() < 0.03


def test_keys_are_shifted_by_each_pages_difference(world: World) -> None:
    world.kernels.rope_shift(
        world.pages, [3, 0], world.units, is_neox=True, unit_of_page=[1, 0], planes=(0, 1)
    )
    for page, unit in ((3, 1), (0, 0)):
        before = to_elements(world.values[0, page], Element.FLOAT16).view(np.float16)
        expected = shift(before.astype(np.float32), world.units[unit], True)
        assert np.array_equal(world.kv.view(0)[page], to_elements(expected, Element.FLOAT16))
    assert np.array_equal(world.kv.view(1), to_elements(world.values[1], Element.FLOAT16))


def test_missing_rows_are_found_and_fetched(world: World) -> None:
    world.top[:] = [[0, 7, 7, 3, -1, 1], [2, 2, 2, 9, 2, 2]]
    world.resolve()
    world.fetch()
    assert world.plan.missing_counts.tolist() == [4, 1]
    rows = world.rows.reshape(8, 32)
    slots = world.hot.reshape(2, CAPACITY, 32)
    for request in range(2):
        for token, slot in zip(world.top[request], world.plan.top_slots[request], strict=True):
            if 0 <= token < 8:
                assert np.array_equal(slots[request, slot], rows[token])
            else:
                assert slot == -1


def test_tables_are_kept_for_the_next_launch(world: World) -> None:
    for _ in range(5):
        world.kernels.quantise(world.pages, [2, 0], FORM, world.stored)
    assert world.device.allocation_count == 2


def test_fewer_ctas_may_be_asked_for(world: World) -> None:
    world.kernels.quantise(world.pages, [2, 0], FORM, world.stored, blocks=1)
    assert world.device.launches[-1][1] == 1


class Elsewhere:
    """An array on another device."""

    def __init__(self, memory: npt.NDArray[np.uint8]) -> None:
        self.device = type("Device", (), {"index": 1})
        self.__cuda_array_interface__ = {
            "shape": memory.shape,
            "typestr": "|u1",
            "data": (memory.ctypes.data, False),
            "version": 3,
        }


def paging_with(world: World, **changes: Any) -> Callable[[], KvPages]:
    return lambda: world.kernels.pages(
        dataclasses.replace(world.kv.paging, **changes), Element.FLOAT16
    )


def refusals(world: World) -> dict[str, tuple[Callable[[], Any], str]]:
    kernels, pages, stored, units = world.kernels, world.pages, world.stored, world.units
    channels = np.tile(np.arange(8, dtype=np.uint8), (2, 2, 1))
    frozen = stored.copy()
    world.device.own(frozen).flags.writeable = False
    addresses = world.kv.paging.plane_addresses

    def quantise(memory: Any = stored, ids: Any = (0,), form: QuantForm = FORM, **more: Any) -> Any:
        return lambda: kernels.quantise(pages, ids, form, memory, **more)

    def rope(table: Any = units, ids: Any = (0,), **more: Any) -> Any:
        return lambda: kernels.rope_shift(pages, ids, table, **{"is_neox": True, **more})

    def hot(**changes: Any) -> Any:
        return lambda: world.resolve(**changes)

    def fetch(**changes: Any) -> Any:
        return lambda: world.fetch(**changes)

    return {
        "no page": (quantise(ids=[]), "at least one"),
        "a page below the first": (quantise(ids=[-1]), "there are 4 pages"),
        "a page beyond the last": (quantise(ids=[4]), "there are 4 pages"),
        "planes beyond the last": (quantise(planes=(1, 2)), "planes 1 to 2 of 2"),
        "no plane": (quantise(planes=(0, 0)), "of 2"),
        "too small": (quantise(stored[: 1 << 12]), "are needed"),
        "misaligned": (quantise(stored[8:]), "multiple of 16 bytes"),
        "read-only": (quantise(frozen), "read-only"),
        "gaps": (quantise(stored[::2]), "gaps"),
        "not page-locked": (quantise(world.host_only), "not page-locked"),
        "another device": (quantise(Elsewhere(stored)), "lies on CUDA device 1"),
        "beyond its allocation": (
            quantise((stored.ctypes.data, stored.nbytes + 16)),
            "behind their allocation",
        ),
        "no array": (quantise("stored"), "no array"),
        "onto its source": (quantise((int(addresses[0]), 1 << 14)), "overlap"),
        "boosted without channels": (quantise(form=BOOSTING), "boosted channels"),
        "channels without boost": (quantise(boosted=channels), "boosted channels"),
        "channels of another shape": (
            quantise(form=BOOSTING, boosted=channels[:, :1]),
            "expected uint8",
        ),
        "channels that do not ascend": (
            quantise(form=BOOSTING, boosted=channels[:, :, ::-1]),
            "ascend",
        ),
        "channels beyond the head": (
            quantise(form=BOOSTING, boosted=channels + np.uint8(60)),
            "below 64",
        ),
        "negative CTAs": (quantise(blocks=-1), "-1 CTAs"),
        "3 bits": (lambda: QuantForm(3, Axis.TOKEN, 32), "3 bits"),
        "groups of 16 of a token": (lambda: QuantForm(4, Axis.TOKEN, 16), "groups of 16"),
        "groups of nothing": (lambda: QuantForm(4, Axis.CHANNEL, 0), "groups of 0"),
        "boost of 4 bits": (lambda: QuantForm(4, Axis.CHANNEL, 16, 8), "only 2 bits"),
        "boost of 6 channels": (lambda: QuantForm(2, Axis.CHANNEL, 16, 6), "multiple of 4"),
        "boost of most channels": (
            lambda: QuantForm(2, Axis.CHANNEL, 16, 40).tile(*SHAPE),
            "at most half",
        ),
        "heads of 12": (lambda: FORM.tile(16, 2, 12), "heads of 12"),
        "tiles of 2 GiB": (lambda: FORM.tile(1 << 20, 16, 128), "2 GiB"),
        "a page twice": (
            lambda: kernels.dequantise(pages, [1, 2, 1], FORM, stored),
            "twice",
        ),
        "a page shifted twice": (rope(ids=[0, 0]), "twice"),
        "units of doubles": (rope(units.astype(np.float64)), "float32"),
        "units of one number": (rope(units[..., :1]), "expected float32"),
        "24 rotated elements": (rope(units[:, :12]), "multiple of 16"),
        "more than a head rotated": (rope(np.tile(units, (1, 2, 1))), "128 rotated"),
        "a unit that is not there": (rope(unit_of_page=[2]), "units of pages"),
        "units of other pages": (rope(unit_of_page=[0, 1]), "units of pages"),
        "stored too small": (rope(stored=stored[:16]), "are needed"),
        "stride of 8": (paging_with(world, row_stride=8), "multiple of 16"),
        "stride of 0": (paging_with(world, page_stride=0), "multiple of 16"),
        "no tokens": (paging_with(world, rows=0), "0 tokens"),
        "runs of 8 bytes": (paging_with(world, run_bytes=8), "runs of 8"),
        "plane at 8": (paging_with(world, plane_addresses=addresses + np.uint64(8)), "plane 0"),
        "planes beyond": (paging_with(world, page_count=5), "behind their allocation"),
        "planes elsewhere": (
            paging_with(world, plane_addresses=np.array([world.host_only.ctypes.data], np.uint64)),
            "not page-locked",
        ),
        "more tokens than slots": (hot(capacity=5), "at most as many as slots"),
        "65,536 slots": (hot(capacity=1 << 16), "65535"),
        "no request": (hot(shape=(0, 6)), "0 requests"),
        "tokens up to 0": (hot(token_end=0), "tokens up to 0"),
        "tokens of 64 bits": (hot(top_tokens=world.top.astype(np.int64)), "of int64"),
        "tokens of another shape": (hot(top_tokens=world.top[:1]), "shape"),
        "order of 32 bits": (hot(order=world.slot_tokens), "expected uint16"),
        "outputs on each other": (
            hot(plan=dataclasses.replace(world.plan, missing_slots=world.plan.missing_tokens)),
            "overlap",
        ),
        "rows of nothing": (fetch(row_bytes=0), "rows of 0"),
        "rows of 2 bytes": (fetch(row_bytes=2), "multiples of 4"),
        "rows that overlap": (fetch(target_stride=16), "16 apart"),
        "rows before the part": (fetch(source_offset=-4), "from -4"),
        "rows beyond the part": (fetch(source_offset=4), "of parts that have 256"),
        "a small buffer": (fetch(target=world.hot[:-1]), "are needed"),
        "other requests' sources": (
            fetch(sources=kernels.hot_sources(world.parts[:1], 8, 256)),
            "sources of 1 requests",
        ),
        "a buffer on its sources": (fetch(target=stored_of(world)), "overlap"),
        "parts of 32 bits": (
            lambda: kernels.hot_sources(world.parts.astype(np.uint32), 8, 256),
            "expected uint64",
        ),
        "parts not page-locked": (
            lambda: kernels.hot_sources(
                np.array([[world.host_only.ctypes.data]], np.uint64), 8, 256
            ),
            "not page-locked",
        ),
        "parts of no tokens": (
            lambda: kernels.hot_sources(world.parts, 0, 256),
            "parts of 0 tokens",
        ),
    }


def stored_of(world: World) -> npt.NDArray[np.uint8]:
    """Memory that a part of the sources lies in, with room for the buffer."""
    memory: npt.NDArray[np.uint8] = world.device.own(aligned(4096), "host")
    world.parts[:] = memory.ctypes.data
    return memory


@pytest.mark.parametrize("what", list(refusals(World())))
def test_what_no_kernel_could_do_is_refused_before_a_launch(world: World, what: str) -> None:
    call, words = refusals(world)[what]
    with pytest.raises(ValueError, match=words):
        call()
    assert not world.device.launches


def test_a_device_without_kernels_is_refused(world: World) -> None:
    world.device.kernels, world.device.no_kernels = "", "switched off"
    with pytest.raises(ValueError, match="no kernels: switched off"):
        CudaKernels(world.device)  # type: ignore[arg-type]


def test_nothing_is_launched_after_close(world: World) -> None:
    world.kernels.close()
    with pytest.raises(ValueError, match="closed"):
        world.kernels.quantise(world.pages, [0], FORM, world.stored)
