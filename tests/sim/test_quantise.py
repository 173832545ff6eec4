"""The quantising kernels on the simulator, byte for byte as the reference in numpy."""

from __future__ import annotations

import numpy as np
import pytest
from machine import SimMachine
from quantised import CASES, Bench, Case, check_tiles, check_values

from kvtier.backends.cuda_arguments import Element
from kvtier.backends.cuda_launches import Axis, QuantForm


@pytest.mark.parametrize("element", Element)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_tiles_are_those_of_the_reference(case: Case, element: Element) -> None:
    for seed in (1, 2):
        check_tiles(SimMachine(seed=seed), case, element, seed)


@pytest.mark.parametrize("element", Element)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_come_back_as_the_reference_has_them(case: Case, element: Element) -> None:
    check_values(SimMachine(), case, element, 3)


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("axis", Axis)
def test_a_value_comes_back_within_half_a_step(axis: Axis, bits: int) -> None:
    """What quantisation is for; the reference could be wrong together with the kernel."""
    case = Case(QuantForm(bits, axis, 32), (32, 2, 64))
    bench = Bench(SimMachine(), case, Element.FLOAT32, 7)
    shape = (case.planes, max(case.page_ids) + 2, *case.shape)
    values = np.random.default_rng(9).standard_normal(shape, np.float32) * 8
    bench.kv.put(values)
    bench.launch("quantise")
    for plane in range(case.planes):
        bench.kv.view(plane)[...] = 0
    bench.launch("dequantise")
    along = 0 if axis is Axis.CHANNEL else 3
    grouped = (32, 2, 64) if axis is Axis.CHANNEL else (32, 2, 2, 32)
    for plane in range(case.planes):
        for page in case.page_ids:
            groups = values[plane, page].reshape(grouped)
            found = bench.kv.floats(plane, page).reshape(grouped)
            span = groups.max(along, keepdims=True) - groups.min(along, keepdims=True)
            # Half a step, and what fp16 parameters lose.
            bound = span / (2**bits - 1) / 2 + span * 2**-10 + 2**-6
            assert (np.abs(found - groups) <= bound).all()
