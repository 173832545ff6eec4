"""The RoPE shift on a machine, compared with the reference; the machine may be a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from machine import Machine
from paged import PagedKv, aligned, page_table, put_block, put_table
from reference_elements import Floats, Raw, same_but_nans, to_elements, to_floats
from reference_rope import shift

from kvtier.backends.cuda_arguments import Element
from kvtier.backends.cuda_launches import StoredStrides, Tables, rope_launch


@dataclass(frozen=True)
class Case:
    """What is shifted."""

    shape: tuple[int, int, int]
    """Tokens of a page, heads, elements."""
    rotary: int
    page_ids: tuple[int, ...] = (3, 0, 2)
    unit_of_page: tuple[int, ...] = ()
    planes: int = 2
    blocks: int = 2
    heads_first: bool = False
    gap_bytes: int = 0

    def __str__(self) -> str:
        return f"{self.rotary}-of-{'x'.join(map(str, self.shape))}"


CASES = [
    Case((16, 2, 128), 128),
    Case((5, 3, 80), 64, unit_of_page=(2, 0, 1), gap_bytes=16),
    Case((7, 1, 72), 32, heads_first=True, gap_bytes=32),
    Case((1, 1, 16), 16, page_ids=(1,), planes=1),
    Case((33, 5, 24), 16, blocks=1, unit_of_page=(1, 1, 0), heads_first=True),
]


def units_of(rotary: int, differences: list[int]) -> Floats:
    """[difference, pair, 2]."""
    inverse = 10000.0 ** (-np.arange(0, rotary, 2) / rotary)
    angles = np.array(differences)[:, None] * inverse
    units: Floats = np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)
    return units


def values_of(case: Case, seed: int) -> Floats:
    """Keys of all sizes, NaNs and infinities among them."""
    rng = np.random.default_rng(seed)
    shape = (case.planes, max(case.page_ids) + 2, *case.shape)
    values = rng.standard_normal(shape, np.float32) * rng.choice([1e-6, 1.0, 300.0], shape)
    odd = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, 6e4, 1e-40, 3e38], np.float32)
    where = rng.random(shape) < 0.02
    values[where] = rng.choice(odd, int(where.sum()))
    finished: Floats = values.astype(np.float32)
    return finished


def check_shift(
    machine: Machine, case: Case, element: Element, is_neox: bool, is_stored: bool
) -> None:
    """Shifted keys are the reference's, bit for bit but for NaNs; nothing else is written."""
    kv = PagedKv.make(
        element,
        case.planes,
        max(case.page_ids) + 2,
        case.shape,
        case.heads_first,
        case.gap_bytes,
    )
    kv.put(values_of(case, 1))
    before = [kv.view(plane).copy() for plane in range(case.planes)]
    tokens, heads, width = case.shape
    run = width * element.nbytes
    ids = list(case.page_ids)
    stored = [aligned(case.planes * tokens * heads * run) for _ in ids]
    sources: list[Raw] = [each[ids] for each in before]
    if is_stored:
        blocks = to_elements(values_of(case, 2)[:, ids], element)
        for page, block in enumerate(stored):
            block[:] = np.ascontiguousarray(blocks[:, page]).reshape(-1).view(np.uint8)
        sources = list(blocks)
    units = units_of(case.rotary, [17, -4000, 131071])
    which = np.array(case.unit_of_page, np.uint32)

    paging = kv.put_on(machine)
    blocks_at = [put_block(machine, each) for each in stored]
    launch = rope_launch(
        paging,
        element,
        case.rotary,
        is_neox,
        len(ids),
        case.planes,
        Tables(
            put_table(machine, paging.plane_addresses),
            put_table(machine, page_table(paging, ids, blocks_at)),
            units=put_table(machine, units),
            page_units=put_table(machine, which),
        ),
        StoredStrides(tokens * heads * run, heads * run, run) if is_stored else None,
    )
    machine.launch(launch.name, case.blocks, launch.threads, 0, launch.arguments)
    kv.take_from(machine)
    machine.clear()

    for plane in range(case.planes):
        for page, page_id in enumerate(ids):
            source = np.ascontiguousarray(sources[plane][page])
            unit = int(which[page]) if which.size else 0
            turned = shift(to_floats(source, element), units[unit], is_neox)
            expected = to_elements(turned, element).reshape(case.shape)
            expected[..., case.rotary :] = source[..., case.rotary :]
            found = np.ascontiguousarray(kv.view(plane)[page_id])
            assert same_but_nans(found, expected, element), (plane, page)
        others = [i for i in range(len(before[plane])) if i not in ids]
        assert np.array_equal(kv.view(plane)[others], before[plane][others])
    assert kv.is_gap_intact()
