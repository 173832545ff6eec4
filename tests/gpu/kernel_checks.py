"""All checks of kernels that take a machine, by name: what the simulator passes, a GPU must pass.

A further kernel's checks go into `ALL`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping

import copy_cases
import hot_buffers
import quantised
import shifted
from copies import check
from machine import Machine

from kvtier.backends.cuda_arguments import Element

Check = Callable[[Machine], None]
"""AssertionError where the machine is wrong."""
Checks = Mapping[str, Check]


def _copies(cases: copy_cases.Cases) -> Checks:
    def run(name: str) -> Check:
        def all_of_it(machine: Machine) -> None:
            for case in cases[name]:
                check(machine, case)

        return all_of_it

    return {name: run(name) for name in cases}


def _quantise() -> Iterator[tuple[str, Check]]:
    for case, element in itertools.product(quantised.CASES, Element):

        def both(machine: Machine, case: quantised.Case = case, element: Element = element) -> None:
            quantised.check_tiles(machine, case, element, 1)
            quantised.check_values(machine, case, element, 3)

        yield f"{case}-{element.name.lower()}", both


def _rope() -> Iterator[tuple[str, Check]]:
    for case, element in itertools.product(shifted.CASES, Element):

        def all_ways(
            machine: Machine, case: shifted.Case = case, element: Element = element
        ) -> None:
            for is_neox, is_stored in itertools.product((False, True), repeat=2):
                shifted.check_shift(machine, case, element, is_neox, is_stored)

        yield f"{case}-{element.name.lower()}", all_ways


def _hot() -> Iterator[tuple[str, Check]]:
    for case, seed in itertools.product(hot_buffers.CASES, range(2)):

        def steps(machine: Machine, case: hot_buffers.Case = case, seed: int = seed) -> None:
            hot_buffers.check_steps(machine, case, seed)

        yield f"{case}-{seed}", steps
    for (vector_bytes, row_bytes), blocks in itertools.product(hot_buffers.ROWS, (1, 3)):

        def rows(
            machine: Machine,
            vector_bytes: int = vector_bytes,
            row_bytes: int = row_bytes,
            blocks: int = blocks,
        ) -> None:
            hot_buffers.check_rows(machine, vector_bytes, row_bytes, blocks)

        yield f"rows-{vector_bytes}-{row_bytes}-{blocks}", rows


BULK_KINDS = ("bulk", "bulk_slots")
"""These need compute capability 9.0, and come last: should one lose the device, the others ran."""
COPIES: Mapping[str, Checks] = {
    name: _copies(copy_cases.ALL[name])
    for name in (*(name for name in copy_cases.ALL if name not in BULK_KINDS), *BULK_KINDS)
}
COMPUTING: Mapping[str, Checks] = {
    "quantise": dict(_quantise()),
    "rope": dict(_rope()),
    "hot": dict(_hot()),
}
ALL: Mapping[str, Check] = {
    f"{kind}/{name}": each
    for kind, checks in {**COPIES, **COMPUTING}.items()
    for name, each in checks.items()
}


def needs_bulk(name: str) -> bool:
    """Whether a check of `ALL` needs what devices before compute capability 9.0 lack."""
    return name.split("/")[0] in BULK_KINDS


def some(count_per_kind: int) -> list[str]:
    """The names of a few of each kind, spread over it."""
    names = []
    for kind in (*COPIES, *COMPUTING):
        own = [name for name in ALL if name.startswith(kind + "/")]
        step = max(1, len(own) // count_per_kind)
        names += own[::step][:count_per_kind]
    return names
