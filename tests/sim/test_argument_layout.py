"""Arguments as Python packs them lie where the C++ headers have them."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import copies
import fake_build
import pytest

from kvtier.backends import cuda_arguments
from kvtier.backends.cuda_arguments import (
    CopyArgs,
    Element,
    FastDiv,
    HotArgs,
    HotCopyArgs,
    QuantiseArgs,
    RopeArgs,
    hot_shared_bytes,
)

STRUCTURES: list[type[ctypes.Structure]] = [
    FastDiv,
    CopyArgs,
    QuantiseArgs,
    RopeArgs,
    HotArgs,
    HotCopyArgs,
]


def checks() -> list[str]:
    """What a compiler has to find true."""
    found = []
    for structure in STRUCTURES:
        name = structure.__name__
        found.append(f"sizeof({name}) == {ctypes.sizeof(structure)}")
        for field, *_ in structure._fields_:
            place = getattr(structure, field)
            found.append(f"offsetof({name}, {field}) == {place.offset}")
            found.append(f"sizeof({name}::{field}) == {place.size}")
    for element, word in zip(Element, ("kBfloat16", "kFloat16", "kFloat32"), strict=True):
        found.append(f"static_cast<int>(ElementType::{word}) == {element.value}")
    found.append(f"kQuantiseThreads == {cuda_arguments.QUANTISE_THREADS}")
    found.append(f"kRopeThreads == {cuda_arguments.ROPE_THREADS}")
    found.append(f"kHotCopyThreads == {cuda_arguments.HOT_COPY_THREADS}")
    found.append(f"hot_shared_bytes(64, 33, 512) == {hot_shared_bytes(64, 33, 512)}")
    found.append(f"bulk_shared_bytes(3, 256) == {copies.bulk_shared_bytes(3, 256)}")
    return found


def compile_checks(folder: Path, conditions: list[str]) -> subprocess.CompletedProcess[str]:
    source = folder / "checks.cpp"
    headers = ["bulk_shape.h", "quantise_args.h", "rope_args.h", "hot_args.h"]
    lines = [f'#include "{fake_build.ROOT / "csrc" / "cuda" / name}"' for name in headers]
    lines += ["#include <cstddef>", "using namespace kvtier::device;"]
    lines += [f'static_assert({each}, "{each}");' for each in conditions]
    source.write_text("\n".join(lines))
    command = [fake_build.compiler(), "-std=c++20", "-fsyntax-only", str(source)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_every_field_lies_where_the_kernels_look_for_it(tmp_path: Path) -> None:
    result = compile_checks(tmp_path, checks())
    assert result.returncode == 0, result.stderr


def test_a_field_elsewhere_would_be_noticed(tmp_path: Path) -> None:
    assert compile_checks(tmp_path, ["offsetof(RopeArgs, pages) == 0"]).returncode != 0


def test_every_field_is_checked() -> None:
    """Sizes leave no room for a field that Python does not have."""
    for structure in STRUCTURES:
        sizes = [getattr(structure, field).size for field, *_ in structure._fields_]
        assert ctypes.sizeof(structure) - sum(sizes) < 8


@pytest.mark.parametrize("divisor", [1, 2, 3, 7, 10, 16, 1000, (1 << 31) - 1])
def test_quotients_are_exact(divisor: int) -> None:
    fast = FastDiv(divisor)
    edges = {0, 1, divisor - 1, divisor, divisor + 1, (1 << 31) - 1, (1 << 31) - 2}
    for number in sorted(each for each in edges if each < 1 << 31):
        high = number * fast.multiplier >> 32
        quotient = number if divisor == 1 else high >> fast.shift
        assert quotient == number // divisor
