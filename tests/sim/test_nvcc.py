"""Where nvcc is installed it compiles the kernels too, and finds nothing to warn of.

One architecture, as it takes ten seconds each; KVTIER_NVCC=all has it do all of them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from cubins import SOURCES

ARCHITECTURES = (80, 86, 89, 90, 100, 120)
DEFAULT = 90  # the first with everything, bulk copies too
WARNINGS = ["-Werror", "all-warnings", "-Xcompiler", "-Wall,-Wextra,-Werror"]


def compile_source(source: Path, architecture: int, folder: Path) -> str:
    """What nvcc says; "" if it compiles."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not installed")
    known = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, check=True)
    if f"sm_{architecture}" not in known.stdout.split():
        pytest.skip(f"this nvcc does not know sm_{architecture}")
    target = f"-gencode=arch=compute_{architecture},code=sm_{architecture}"
    command = [nvcc, "-std=c++20", *WARNINGS, "-allow-unsupported-compiler", target]
    run = subprocess.run(
        [*command, "-c", str(source), "-o", str(folder / "kernels.o")],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    return run.stdout + run.stderr if run.returncode else ""


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_nvcc_compiles_the_kernels_without_a_warning(architecture: int, tmp_path: Path) -> None:
    if architecture != DEFAULT and os.environ.get("KVTIER_NVCC") != "all":
        pytest.skip("KVTIER_NVCC=all compiles for this one, too")
    assert compile_source(SOURCES / "kernels.cu", architecture, tmp_path) == ""


def test_a_warning_of_nvcc_s_is_found(tmp_path: Path) -> None:
    source = tmp_path / "kernel.cu"
    source.write_text('extern "C" __global__ void kernel() { int unused = 3; }')
    assert "declared but never referenced" in compile_source(source, DEFAULT, tmp_path)
