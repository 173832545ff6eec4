"""Quantised pages on a machine, compared with the reference; the machine may be a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from machine import Machine
from paged import GAP, Bytes, PagedKv, aligned, get_block, page_table, put_block, put_table
from reference_elements import Floats, same_but_nans, to_elements
from reference_quantise import dequantise, quantise

from kvtier.backends.cuda_arguments import Element
from kvtier.backends.cuda_launches import (
    Axis,
    QuantForm,
    Tables,
    boost_tables,
    quantise_launch,
)

TOKEN, CHANNEL = Axis.TOKEN, Axis.CHANNEL


@dataclass(frozen=True)
class Case:
    """What is quantised."""

    form: QuantForm
    shape: tuple[int, int, int]
    """Tokens of a page, heads, elements."""
    planes: int = 2
    page_ids: tuple[int, ...] = (3, 0, 2)
    blocks: int = 2
    heads_first: bool = False
    gap_bytes: int = 0

    def __str__(self) -> str:
        boost = f"+{self.form.boosted}" if self.form.boosted else ""
        shape = "x".join(map(str, self.shape))
        return f"{self.form.axis}{self.form.group}-b{self.form.bits}{boost}-{shape}"


CASES = [
    Case(QuantForm(4, TOKEN, 32), (16, 2, 128)),
    Case(QuantForm(8, TOKEN, 64), (5, 3, 64), gap_bytes=16),
    Case(QuantForm(2, TOKEN, 128), (7, 1, 128), heads_first=True),
    Case(QuantForm(4, TOKEN, 256), (3, 2, 512), page_ids=(1,)),
    Case(QuantForm(4, TOKEN, 32), (3, 3, 80), heads_first=True, gap_bytes=32),  # a short group
    Case(QuantForm(2, TOKEN, 64), (1, 1, 8), planes=1, page_ids=(0,)),
    Case(QuantForm(8, TOKEN, 32), (33, 5, 40), blocks=1),
    Case(QuantForm(4, CHANNEL, 16), (16, 2, 128)),
    Case(QuantForm(8, CHANNEL, 16), (12, 3, 40), heads_first=True, gap_bytes=16),
    Case(QuantForm(2, CHANNEL, 32), (33, 2, 64)),  # more rows than are held, and a group of one
    Case(QuantForm(4, CHANNEL, 32), (40, 1, 8), planes=1, page_ids=(0,)),
    Case(QuantForm(2, CHANNEL, 5), (17, 3, 24), planes=3, blocks=1),
    Case(QuantForm(2, CHANNEL, 16, boosted=16), (16, 8, 128)),
    Case(QuantForm(2, CHANNEL, 32, boosted=64), (40, 3, 128), gap_bytes=16),
    Case(QuantForm(2, CHANNEL, 7, boosted=20), (16, 5, 80), heads_first=True, planes=3),
    Case(QuantForm(2, CHANNEL, 16, boosted=128), (3, 2, 256), page_ids=(2,)),
    Case(QuantForm(2, CHANNEL, 16, boosted=4), (9, 33, 8), blocks=1),
]


def values_of(case: Case, seed: int) -> Floats:
    """KV with outliers, constant groups, zeros of both signs, NaNs, infinities and tiny numbers."""
    rng = np.random.default_rng(seed)
    shape = (case.planes, max(case.page_ids) + 2, *case.shape)
    values = rng.standard_normal(shape, np.float32) * rng.choice([1e-3, 1.0, 30.0], shape)
    odd = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 7e4, -1e6, 6e-8, -1e-30], np.float32)
    where = rng.random(shape) < 0.02
    values[where] = rng.choice(odd, int(where.sum()))
    same = [np.nan, 1.25, -0.0, np.inf, 1.0009766, -2e-9]
    values[:, 0, :, 0] = rng.choice(same, (case.planes, 1, 1))  # of a page's first head
    finished: Floats = values.astype(np.float32)
    return finished


class Bench:
    """A case's memory on both sides, and its launches."""

    def __init__(self, machine: Machine, case: Case, element: Element, seed: int) -> None:
        self.machine = machine
        self.case = case
        self.kv = PagedKv.make(
            element,
            case.planes,
            max(case.page_ids) + 2,
            case.shape,
            case.heads_first,
            case.gap_bytes,
        )
        self.kv.put(values_of(case, seed))
        self.tile_bytes = case.form.tile(*case.shape).nbytes
        self.stored = [aligned(self.tile_bytes * case.planes) for _ in case.page_ids]
        self.channels: npt.NDArray[np.uint8] | None = None
        self._boost: list[npt.NDArray[np.generic]] = []
        if case.form.boosted:
            rng = np.random.default_rng(seed + 1)
            _, heads, width = case.shape
            order = rng.random((case.planes, heads, width)).argsort(axis=2)
            self.channels = np.sort(order[:, :, : case.form.boosted], axis=2).astype(np.uint8)
            self._boost = list(boost_tables(self.channels, width))

    def launch(self, verb: str) -> None:
        """On the machine, from and to this process's memory."""
        machine, case = self.machine, self.case
        paging = self.kv.put_on(machine)
        stored = [put_block(machine, each) for each in self.stored]
        launch = quantise_launch(
            verb,
            case.form,
            paging,
            self.kv.element,
            len(case.page_ids),
            case.planes,
            Tables(
                put_table(machine, paging.plane_addresses),
                put_table(machine, page_table(paging, list(case.page_ids), stored)),
                *[put_table(machine, each) for each in self._boost],
            ),
        )
        machine.launch(launch.name, case.blocks, launch.threads, 0, launch.arguments)
        self.kv.take_from(machine)
        for each, address in zip(self.stored, stored, strict=True):
            each[:] = get_block(machine, address)
        machine.clear()

    def tile(self, page: int, plane: int) -> Bytes:
        return self.stored[page][plane * self.tile_bytes :][: self.tile_bytes]

    def expected_tile(self, page: int, plane: int) -> Bytes:
        form = self.case.form
        values = self.kv.floats(plane, self.case.page_ids[page])
        channels = None if self.channels is None else self.channels[plane]
        return quantise(values, form.bits, form.axis, form.group, channels, gap=GAP)

    def expected_values(self, page: int, plane: int) -> Floats:
        form = self.case.form
        channels = None if self.channels is None else self.channels[plane]
        tile = self.tile(page, plane)
        return dequantise(tile, self.case.shape, form.bits, form.axis, form.group, channels)


def check_tiles(machine: Machine, case: Case, element: Element, seed: int) -> None:
    """Quantised pages are the reference's, byte for byte, and so is what lies between."""
    bench = Bench(machine, case, element, seed)
    before = [each.copy() for each in bench.kv.memory]
    bench.launch("quantise")
    for page in range(len(case.page_ids)):
        for plane in range(case.planes):
            expected = bench.expected_tile(page, plane)
            assert np.array_equal(bench.tile(page, plane), expected), (page, plane, seed)
    for memory, was in zip(bench.kv.memory, before, strict=True):
        assert np.array_equal(memory, was)


def check_values(machine: Machine, case: Case, element: Element, seed: int) -> None:
    """Values of stored tiles are the reference's, bit for bit; nothing else is written."""
    bench = Bench(machine, case, element, seed)
    for page, each in enumerate(bench.stored):
        each[:] = np.concatenate([bench.expected_tile(page, p) for p in range(case.planes)])
    before = [bench.kv.view(plane).copy() for plane in range(case.planes)]
    for plane in range(case.planes):
        bench.kv.view(plane)[list(case.page_ids)] = 0x5A5A
    bench.launch("dequantise")
    for plane in range(case.planes):
        for page, page_id in enumerate(case.page_ids):
            floats = bench.expected_values(page, plane)
            expected = to_elements(floats, element).reshape(case.shape)
            found = np.ascontiguousarray(bench.kv.view(plane)[page_id])
            assert same_but_nans(found, expected, element), (page, plane, seed)
        others = [i for i in range(len(before[plane])) if i not in case.page_ids]
        assert np.array_equal(bench.kv.view(plane)[others], before[plane][others])
    assert bench.kv.is_gap_intact()
