"""Small checks of kernels that look for a planted fault: `python mutant.py CHECK LIBRARY`.

Each is a part of what the tests check on the whole kernels, chosen to see every fault in seconds.
"""

from __future__ import annotations

import itertools
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path

_HERE = Path(__file__).resolve().parent
if __name__ == "__main__":
    sys.path[:0] = [str(_HERE), str(_HERE.parent / "fakes")]

import copies
import far_copies
import hot_buffers
import mutations
import pytest
import quantised
import shifted
from layouts import Shape
from machine import LaunchFailed, SimMachine

from kvtier.backends.cuda_arguments import Element

SANITIZED = "libasan" in os.environ.get("LD_PRELOAD", "")
CHUNKS = ((2, 0, -1, 5), (4,))
CASES_OF_COPIES = [
    copies.Case("padded", "spaced", Shape(2, 6, 4, 3, 48), CHUNKS, 16),
    copies.Case("backward", "layers", Shape(2, 6, 4, 3, 14), CHUNKS, 2, offset=2),
    copies.Case("head_major", "blocks", Shape(2, 6, 4, 3, 40), CHUNKS, 8, is_collapsed=False),
    copies.Case("kv_first", "blocks", Shape(1, 3, 129, 1, 16), ((1, 2),), 16, 2, 32),
    copies.Case("page_first", "blocks", Shape(2, 6, 5, 3, 7), CHUNKS, 1, 5, 96, offset=1),
    copies.Case("joined", "spaced", Shape(1, 6, 4, 3, 20), CHUNKS, 4, offset=4),
]
CASES_OF_BULK_COPIES = [
    copies.Case("padded", "spaced", Shape(2, 6, 4, 3, 528), CHUNKS, 0, 2, 64, 128),
    copies.Case("kv_first", "blocks", Shape(1, 4, 3, 1, 1040), ((3, 1, 0),), 0, 1, 32, 224),
    copies.Case("padded", "layers", Shape(1, 4, 5, 2, 112), ((3, 1, 0),), 0, 2, 96, 136),
    copies.Case("kv_first", "blocks", Shape(1, 2, 1, 1, 64), ((1,),), 0, 4, 32),
]


def _machine(library: Path, seed: int = 1) -> SimMachine:
    # AddressSanitizer's own guard begins at an array's very end.
    return SimMachine(library, seed=seed, **({"guard_bytes": 0} if SANITIZED else {}))


def check_copies(library: Path) -> None:
    """Gathers and scatters of every width."""
    for case in CASES_OF_COPIES:
        copies.check(_machine(library), case)


def check_large_grid(library: Path) -> None:
    """A step from tile to tile that has more than 32 bits."""
    far_copies.check_large_grid(_machine(library))


def check_far(library: Path) -> None:
    """Offsets of more than 32 bits, of each stride."""
    far_copies.check_far(_machine(library), "v16")
    far_copies.check_far(_machine(library), "bulk")


def check_bulk_copies(library: Path) -> None:
    """Gathers and scatters through shared memory, in many orders of events."""
    for case, seed in itertools.product(CASES_OF_BULK_COPIES, range(8)):
        copies.check(_machine(library, seed=100 * seed), case)


def check_bulk_refusals(library: Path) -> None:
    """Launches that would never end, end themselves."""
    for block, shared_bytes in ((48, 4096), (64, 256), (64, 64)):
        shape = Shape(1, 2, 2, 1, 64)
        case = copies.Case("kv_first", "blocks", shape, ((1,),), 0, block=block)
        with pytest.raises(LaunchFailed, match="the kernel stopped itself"):
            copies.check(_machine(library), case, shared_bytes=shared_bytes)


def check_hot_steps(library: Path) -> None:
    """Resolving, in many orders of events."""
    for case, seed in itertools.product(hot_buffers.CASES[:5], range(4)):
        hot_buffers.check_steps(_machine(library, seed=100 * seed), case, seed)


def check_hot_rows(library: Path) -> None:
    """Fetching."""
    for (vector_bytes, row_bytes), blocks in itertools.product(hot_buffers.ROWS, (1, 3)):
        hot_buffers.check_rows(_machine(library), vector_bytes, row_bytes, blocks)


def check_rope(library: Path) -> None:
    """Shifts of both kinds, in place and from stored blocks."""
    for case, is_neox, is_stored in itertools.product(shifted.CASES, (0, 1), (0, 1)):
        element = Element.FLOAT32 if is_neox else Element.BFLOAT16
        shifted.check_shift(_machine(library), case, element, bool(is_neox), bool(is_stored))


def check_quantise(library: Path) -> None:
    """Quantising and back."""
    for number, case in enumerate(quantised.CASES):
        element = list(Element)[number % 3]
        quantised.check_tiles(_machine(library), case, element, 1)
        quantised.check_values(_machine(library), case, element, 1)


CHECKS: dict[str, Callable[[Path], None]] = {
    "copies": check_copies,
    "large_grid": check_large_grid,
    "far": check_far,
    "bulk_copies": check_bulk_copies,
    "bulk_refusals": check_bulk_refusals,
    "hot_steps": check_hot_steps,
    "hot_rows": check_hot_rows,
    "rope": check_rope,
    "quantise": check_quantise,
}


def main() -> int:
    """0: the check passes."""
    _, name, library = sys.argv
    resource.setrlimit(resource.RLIMIT_CPU, (mutations.CPU_S, mutations.CPU_S + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        CHECKS[name](Path(library))
    except (AssertionError, LaunchFailed, pytest.fail.Exception) as error:
        print(error, file=sys.stderr)
        return mutations.CAUGHT_EXIT
    return 0


if __name__ == "__main__":
    sys.exit(main())
