"""The matrix of the copy kernels: what the simulator and a GPU have to get right alike."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace

from copies import Case
from layouts import LAYOUTS, Shape

FORMS = ("blocks", "layers", "spaced")
RUNS = {16: 48, 8: 40, 4: 20, 2: 14, 1: 7}
"""Bytes of a head whose widest vector is the key."""
CHUNKS = ((2, 0, -1, 5), (4,), (-1, -1))
"""Ragged, with pages that are skipped, and a chunk of which nothing is left."""

Cases = Mapping[str, tuple[Case, ...]]
"""By their name."""


def _vectors() -> Iterator[tuple[str, tuple[Case, ...]]]:
    for layout, vector_bytes, form in itertools.product(LAYOUTS, RUNS, FORMS):
        shape = Shape(layers=2, pages=6, tokens=4, heads=3, run_bytes=RUNS[vector_bytes])
        case = Case(layout, form, shape, CHUNKS, vector_bytes)
        yield (
            f"{layout}-{vector_bytes}-{form}",
            tuple(
                replace(case, is_collapsed=is_collapsed, seed=seed)
                for is_collapsed, seed in itertools.product((True, False), (1, 2))
            ),
        )


def _bulk() -> Iterator[tuple[str, tuple[Case, ...]]]:
    shape = Shape(layers=2, pages=6, tokens=4, heads=3, run_bytes=528)
    for layout, form in itertools.product(LAYOUTS, FORMS):
        case = Case(layout, form, shape, CHUNKS, 0, grid=2, block=64)
        yield f"{layout}-{form}", tuple(replace(case, seed=seed) for seed in range(4))


def _bulk_slots() -> Iterator[tuple[str, tuple[Case, ...]]]:
    for slot_bytes, rings in itertools.product((128, 256, 1024), (1, 2, 16)):
        cases = []
        for run_bytes, seed in itertools.product((16, 112, 512, 1040, 4096), range(3)):
            shape = Shape(layers=1, pages=4, tokens=3, heads=1, run_bytes=run_bytes)
            case = Case("padded", "spaced", shape, ((3, 1, 0),), 0, block=32 * rings, grid=2)
            cases.append(replace(case, slot_bytes=slot_bytes, seed=seed))
        yield f"{slot_bytes}-{rings}", tuple(cases)


def _launch_shapes() -> Iterator[tuple[str, tuple[Case, ...]]]:
    """From one vector up to several tiles: tails, whole tiles, more CTAs than tiles."""
    for grid, block in itertools.product((1, 7), (32, 96, 512)):
        shapes = (
            Shape(layers=1, pages=3, tokens=tokens, heads=1, run_bytes=16)
            for tokens in (1, 15, 64, 129)
        )
        yield (
            f"{grid}-{block}",
            tuple(
                Case("kv_first", "blocks", shape, ((1, 2),), 16, grid, block) for shape in shapes
            ),
        )


def _narrow() -> Iterator[tuple[str, tuple[Case, ...]]]:
    """Memory that is aligned to the vector and no more."""
    shape = Shape(layers=2, pages=6, tokens=3, heads=2, run_bytes=32)
    for vector_bytes in (8, 4, 2, 1):
        yield (
            f"{vector_bytes}",
            tuple(
                Case(layout, "layers", shape, CHUNKS[:1], vector_bytes, offset=vector_bytes)
                for layout in ("kv_first", "cross_layer", "backward")
            ),
        )


VECTORS: Cases = dict(_vectors())
BULK: Cases = dict(_bulk())
BULK_SLOTS: Cases = dict(_bulk_slots())
LAUNCH_SHAPES: Cases = dict(_launch_shapes())
NARROW: Cases = dict(_narrow())

SMALL: Cases = {
    "kv_first": VECTORS["kv_first-16-blocks"][:1],
    "head_major": VECTORS["head_major-2-layers"][:1],
    "bulk": BULK["padded-spaced"][:1],
    "narrow": NARROW["1"][:1],
}
"""A few of each kind, where time is dear."""
ALL: Mapping[str, Cases] = {
    "vectors": VECTORS,
    "bulk": BULK,
    "bulk_slots": BULK_SLOTS,
    "launch_shapes": LAUNCH_SHAPES,
    "narrow": NARROW,
}
