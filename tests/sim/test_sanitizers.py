"""The kernels under AddressSanitizer and UndefinedBehaviorSanitizer: not a byte beyond any array."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import machine
import pytest
import sanitized
from mutations import sanitizer_environment

SCRIPT = Path(__file__).with_name("sanitized.py")
WORDS = {
    "read": "heap-buffer-overflow",
    "write": "heap-buffer-overflow",
    "misalign": "an access that is not aligned to its size",  # the simulator sees it first
}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    library = machine.build(machine.SANITIZE)
    return subprocess.run(
        [sys.executable, str(SCRIPT), str(library), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env=sanitizer_environment(),
        check=False,
    )


def test_no_kernel_leaves_its_memory() -> None:
    done = run()
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == "done\n"


@pytest.mark.parametrize("fault", sanitized.FAULTS)
def test_a_launch_that_leaves_its_memory_is_seen(fault: str) -> None:
    """Reads and writes beyond an array, and vectors that are not aligned."""
    done = run(fault)
    assert done.returncode != 0
    assert WORDS[fault] in done.stderr, done.stderr[-4000:]
