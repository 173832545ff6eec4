"""The copy kernels move every byte as numpy does, in every layout, and no other byte."""

from __future__ import annotations

import pytest
from copies import check
from copy_cases import BULK, BULK_SLOTS, LAUNCH_SHAPES, NARROW, VECTORS
from machine import Machine, SimMachine


@pytest.fixture
def machine() -> Machine:
    return SimMachine()


@pytest.mark.parametrize("name", VECTORS)
def test_pages_become_blocks_and_blocks_pages(machine: Machine, name: str) -> None:
    for case in VECTORS[name]:
        check(machine, case)


@pytest.mark.parametrize("name", BULK)
def test_bulk_copies_do_the_same(machine: Machine, name: str) -> None:
    for case in BULK[name]:
        check(machine, case)


@pytest.mark.parametrize("name", BULK_SLOTS)
def test_bulk_copies_of_any_length_go_through_any_slots(machine: Machine, name: str) -> None:
    for case in BULK_SLOTS[name]:
        check(machine, case)


@pytest.mark.parametrize("name", LAUNCH_SHAPES)
def test_any_launch_shape_does(machine: Machine, name: str) -> None:
    """From one vector up to several tiles: tails, whole tiles, more CTAs than tiles."""
    for case in LAUNCH_SHAPES[name]:
        check(machine, case)


@pytest.mark.parametrize("name", NARROW)
def test_narrow_vectors_need_no_wider_alignment(machine: Machine, name: str) -> None:
    for case in NARROW[name]:
        check(machine, case)
