"""What no kernel could do is refused by the calls, before anything is launched."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from fake_cuda import FakeCuda
from kernel_world import SHAPE, World

from kvtier.backends.cuda_kernels import Axis, Element, KvPages, QuantForm

FORM = QuantForm(8, Axis.CHANNEL, 16)
BOOSTING = QuantForm(2, Axis.CHANNEL, 16, boosted=8)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    cuda = FakeCuda()
    cuda.install(monkeypatch)
    cuda.reset()
    world = World(cuda)
    yield world
    world.close()
    cuda.reset()


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
    frozen = stored[:]
    frozen.flags.writeable = False
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
            "are not of one kind all over",
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
        "planes beyond": (paging_with(world, page_count=5), "beyond the end of their allocation"),
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
    memory = world.pinned(4096)
    world.parts[:] = memory.ctypes.data
    return memory


def test_what_no_kernel_could_do_is_refused(world: World, subtests: pytest.Subtests) -> None:
    before = world.cuda.counters()
    cases = refusals(world)
    for what, (call, words) in cases.items():
        with subtests.test(what), pytest.raises(ValueError, match=words):
            call()
    assert len(cases) > 60
    assert world.cuda.counters() == before
