"""The hot buffer's kernels on the simulator: step after step as the reference in Python."""

from __future__ import annotations

import pytest
from hot_buffers import CASES, ROWS, Case, check_rows, check_steps
from machine import SimMachine


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_steps_resolve_as_in_the_reference(case: Case, seed: int) -> None:
    check_steps(SimMachine(seed=17 * seed), case, seed)


@pytest.mark.parametrize(("vector_bytes", "row_bytes"), ROWS)
@pytest.mark.parametrize("blocks", [1, 3])
def test_missing_rows_come_to_their_slots(vector_bytes: int, row_bytes: int, blocks: int) -> None:
    check_rows(SimMachine(), vector_bytes, row_bytes, blocks)
