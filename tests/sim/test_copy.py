"""The copy kernels move every byte as numpy does, in every layout, and no other byte."""

from __future__ import annotations

import itertools

import pytest
from copies import Case, check
from layouts import LAYOUTS, Shape
from machine import Machine, SimMachine

RUNS = {16: 48, 8: 40, 4: 20, 2: 14, 1: 7}
"""Bytes of a head whose widest vector is the key."""
CHUNKS = ((2, 0, -1, 5), (4,), (-1, -1))
"""Ragged, with pages that are skipped, and a chunk of which nothing is left."""


@pytest.fixture
def machine() -> Machine:
    return SimMachine()


@pytest.mark.parametrize("form", ["blocks", "layers", "spaced"])
@pytest.mark.parametrize("vector_bytes", RUNS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_become_blocks_and_blocks_pages(
    machine: Machine, layout: str, vector_bytes: int, form: str
) -> None:
    shape = Shape(layers=2, pages=6, tokens=4, heads=3, run_bytes=RUNS[vector_bytes])
    for is_collapsed, seed in itertools.product((True, False), (1, 2)):
        check(
            machine,
            Case(layout, form, shape, CHUNKS, vector_bytes, is_collapsed=is_collapsed, seed=seed),
        )


@pytest.mark.parametrize("form", ["blocks", "layers", "spaced"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bulk_copies_do_the_same(machine: Machine, layout: str, form: str) -> None:
    shape = Shape(layers=2, pages=6, tokens=4, heads=3, run_bytes=528)
    for seed in range(4):
        check(machine, Case(layout, form, shape, CHUNKS, 0, grid=2, block=64, seed=seed))


@pytest.mark.parametrize("rings", [1, 2, 16])
@pytest.mark.parametrize("slot_bytes", [128, 256, 1024])
def test_bulk_copies_of_any_length_go_through_any_slots(
    machine: Machine, slot_bytes: int, rings: int
) -> None:
    for run_bytes, seed in itertools.product((16, 112, 512, 1040, 4096), range(3)):
        shape = Shape(layers=1, pages=4, tokens=3, heads=1, run_bytes=run_bytes)
        case = Case("padded", "spaced", shape, ((3, 1, 0),), 0, block=32 * rings, grid=2)
        check(machine, Case(**{**vars(case), "slot_bytes": slot_bytes, "seed": seed}))


@pytest.mark.parametrize("block", [32, 96, 512])
@pytest.mark.parametrize("grid", [1, 7])
def test_any_launch_shape_does(machine: Machine, grid: int, block: int) -> None:
    """From one vector up to several tiles: tails, whole tiles, more CTAs than tiles."""
    for tokens in (1, 15, 64, 129):
        shape = Shape(layers=1, pages=3, tokens=tokens, heads=1, run_bytes=16)
        check(machine, Case("kv_first", "blocks", shape, ((1, 2),), 16, grid, block))


@pytest.mark.parametrize("vector_bytes", [8, 4, 2, 1])
def test_narrow_vectors_need_no_wider_alignment(machine: Machine, vector_bytes: int) -> None:
    shape = Shape(layers=2, pages=6, tokens=3, heads=2, run_bytes=32)
    for layout in ("kv_first", "cross_layer", "backward"):
        check(machine, Case(layout, "layers", shape, CHUNKS[:1], vector_bytes, offset=vector_bytes))
