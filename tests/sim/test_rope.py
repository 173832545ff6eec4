"""The RoPE shift on the simulator, bit for bit as the reference in numpy."""

from __future__ import annotations

import numpy as np
import pytest
from machine import SimMachine
from paged import PagedKv, page_table, put_table
from reference_rope import shift
from shifted import CASES, Case, check_shift, units_of

from kvtier.backends.cuda_arguments import Element
from kvtier.backends.cuda_launches import Tables, rope_launch


@pytest.mark.parametrize("is_stored", [False, True], ids=["in_place", "from_stored"])
@pytest.mark.parametrize("is_neox", [False, True], ids=["interleaved", "neox"])
@pytest.mark.parametrize("element", Element)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_keys_are_shifted_as_in_the_reference(
    case: Case, element: Element, is_neox: bool, is_stored: bool
) -> None:
    check_shift(SimMachine(), case, element, is_neox, is_stored)


@pytest.mark.parametrize("is_neox", [False, True], ids=["interleaved", "neox"])
def test_a_shift_by_a_difference_is_a_rotation_at_the_later_position(is_neox: bool) -> None:
    """RoPE itself: keys of position 40 shifted by 83 are those of position 123."""
    machine = SimMachine()
    k = np.random.default_rng(5).standard_normal((1, 4, 2, 64), np.float32)
    at_40, at_123, by_83 = (units_of(64, [position])[0] for position in (40, 123, 83))
    kv = PagedKv.make(Element.FLOAT32, 1, 1, (4, 2, 64), False, 0)
    kv.put(shift(k, at_40, is_neox)[None])
    paging = kv.put_on(machine)
    tables = Tables(
        put_table(machine, paging.plane_addresses),
        put_table(machine, page_table(paging, [0], [0])),
        units=put_table(machine, by_83),
    )
    launch = rope_launch(paging, Element.FLOAT32, 64, is_neox, 1, 1, tables, None)
    machine.launch(launch.name, 1, launch.threads, 0, launch.arguments)
    kv.take_from(machine)
    assert np.allclose(kv.floats(0, 0), shift(k, at_123, is_neox)[0], atol=1e-5)
