"""What `test_sanitizers` runs under AddressSanitizer: `python sanitized.py LIBRARY [FAULT]`.

A representative part of every kernel's cases; or one launch that goes wrong on purpose.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable
from pathlib import Path

_HERE = Path(__file__).resolve().parent
if __name__ == "__main__":
    sys.path[:0] = [str(_HERE), str(_HERE.parent / "fakes")]

import copies
import hot_buffers
import numpy as np
import quantised
import shifted
from layouts import LAYOUTS, Shape
from machine import SimMachine

from kvtier.backends.cuda_arguments import CopyArgs, Element, FastDiv

CHUNKS = ((2, 0, -1, 5), (4,))
RUNS = {16: 48, 8: 40, 4: 20, 2: 14, 1: 7}


def run_all(make: Callable[[], SimMachine]) -> None:
    """Copies of every layout, width and form; every case of the kernels that compute."""
    for number, (layout, form) in enumerate(itertools.product(LAYOUTS, ("layers", "spaced"))):
        width = list(RUNS)[number % len(RUNS)]
        case = copies.Case(layout, form, Shape(2, 6, 4, 3, RUNS[width]), CHUNKS, width)
        copies.check(make(), case)
        shape = Shape(1, 6, 4, 3, 528)
        bulk = dataclasses.replace(case, shape=shape, vector_bytes=0, seed=number)
        copies.check(make(), bulk)
    for number, tiles in enumerate(quantised.CASES):
        element = list(Element)[number % len(Element)]
        quantised.check_tiles(make(), tiles, element, 1)
        quantised.check_values(make(), tiles, element, 1)
    for number, (shift, is_neox) in enumerate(itertools.product(shifted.CASES, (False, True))):
        shifted.check_shift(make(), shift, list(Element)[number % 3], is_neox, number % 2 == 1)
    for number, hot in enumerate(hot_buffers.CASES):
        hot_buffers.check_steps(make(), hot, number, steps=2)
    for vector_bytes, row_bytes in hot_buffers.ROWS:
        hot_buffers.check_rows(make(), vector_bytes, row_bytes, 3)


def read_beyond(machine: SimMachine) -> None:
    """The last 16 bytes of a run lie behind its memory."""
    _gather(machine, source_bytes=32, target_bytes=48, offset=0)


def write_beyond(machine: SimMachine) -> None:
    """The target is too small."""
    _gather(machine, source_bytes=48, target_bytes=32, offset=0)


def misalign(machine: SimMachine) -> None:
    """Vectors of 16 bytes at an address that is a multiple of 8."""
    _gather(machine, source_bytes=64, target_bytes=64, offset=8)


def _gather(machine: SimMachine, source_bytes: int, target_bytes: int, offset: int) -> None:
    source = machine.put(np.zeros(source_bytes, np.uint8)) + offset
    target = machine.put(np.zeros(target_bytes, np.uint8)) + offset
    one = FastDiv(1)
    arguments = CopyArgs(
        planes=machine.put(np.array([source], np.uint64)),
        pages=machine.put(np.array([0, target], np.uint64)),
        total=3,
        run_bytes=48,
        vectors=FastDiv(3),
        cols=one,
        rows=one,
        plane_count=one,
    )
    machine.launch("kvtier_gather_v16", 1, 32, 0, bytes(arguments))


FAULTS = {"read": read_beyond, "write": write_beyond, "misalign": misalign}


def main() -> None:
    """Ends with an error where a sanitizer or a check finds one."""
    library = Path(sys.argv[1])

    def make() -> SimMachine:
        return SimMachine(library, guard_bytes=0)  # its own guard begins at an array's very end

    if len(sys.argv) > 2:
        FAULTS[sys.argv[2]](make())
    else:
        run_all(make)
    print("done")


if __name__ == "__main__":
    main()
