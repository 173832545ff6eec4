"""What the build put into the core: cubins for the architectures that it knows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import cubins
import pytest

from kvtier import _core

WIDTHS = (16, 8, 4, 2, 1)
BITS = (8, 4, 2)
DIRECTIONS = ("quantise", "dequantise")
# Of the sources that kernels.cu includes.
KERNELS = {
    "copy.cu": [f"kvtier_{way}_v{width}" for way in ("gather", "scatter") for width in WIDTHS],
    "bulk.cu": ["kvtier_bulk_gather", "kvtier_bulk_scatter"],
    "quantise.cu": [
        f"kvtier_{way}_{kind}_b{bits}"
        for way in DIRECTIONS
        for kind in ("v_per_token", "k_per_channel")
        for bits in BITS
    ],
    "boosted.cu": [f"kvtier_{way}_k2x2" for way in DIRECTIONS],
    "rope.cu": ["kvtier_rope_shift_neox", "kvtier_rope_shift_interleaved"],
    "hot.cu": ["kvtier_hot_resolve", *(f"kvtier_hot_copy_v{width}" for width in (16, 8, 4))],
}
BULK_FROM = 90  # cp.async.bulk


def kernels_for(architecture: int) -> set[str]:
    main = (cubins.SOURCES / "kernels.cu").read_text()
    names: set[str] = set()
    for source in re.findall(r'^#include "(\w+\.cu)"', main, re.MULTILINE):
        if source != "bulk.cu" or architecture >= BULK_FROM:
            names.update(KERNELS[source])
    return names


@pytest.fixture(params=(80, 86, 89, 90, 100, 120))
def architecture(request: pytest.FixtureRequest) -> int:
    number = int(request.param)
    if number not in _core.cubin_architectures():
        pytest.skip(f"this build has no cubin for sm_{number}")
    return number


def test_a_cubin_is_of_its_architecture_and_has_every_kernel(architecture: int) -> None:
    cubin = cubins.Cubin(_core.find_cubin(*divmod(architecture, 10)))
    assert cubin.architecture == architecture
    assert set(cubin.threads) == kernels_for(architecture)


def test_every_kernel_has_launch_bounds(architecture: int) -> None:
    threads = cubins.Cubin(_core.find_cubin(*divmod(architecture, 10))).threads
    assert all(threads.values())
    assert threads["kvtier_gather_v16"] == 512


def test_a_device_runs_the_newest_cubin_of_its_major_number_up_to_its_own() -> None:
    if _core.cubin_architectures() != [80, 86, 89, 90, 100, 120]:
        pytest.skip("this build has not all cubins")
    for device, cubin in {(8, 0): 80, (8, 6): 86, (9, 0): 90, (10, 3): 100, (12, 1): 120}.items():
        assert cubins.Cubin(_core.find_cubin(*device)).architecture == cubin


def test_a_system_on_chip_and_unknown_devices_have_no_cubin() -> None:
    for device in [(7, 5), (8, 7), (10, 1), (11, 0), (13, 0), (0, 0), (-1, 0)]:
        assert _core.find_cubin(*device) == b""


def compile_with(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(cubins.SOURCES / "compile.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize(
    ("body", "words"),
    [("int unused = 3;", "declared but never referenced"), ("undeclared();", "is undefined")],
)
def test_a_build_stops_at_warnings_and_errors(tmp_path: Path, body: str, words: str) -> None:
    source, target = tmp_path / "kernels.cu", tmp_path / "out.cubin"
    source.write_text(f'extern "C" __global__ void kernel() {{ {body} }}')
    run = compile_with("--architecture", 90, "--output", target, source)
    assert run.returncode == 1
    assert words in run.stderr
    assert list(tmp_path.iterdir()) == [source]


def test_a_build_without_nvrtc_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_NVRTC_LIBRARY", "/nowhere/libnvrtc.so.12")
    run = compile_with("--version")
    assert run.returncode == 1
    assert "/nowhere/libnvrtc.so.12: cannot open shared object file" in run.stderr
    assert "Traceback" not in run.stderr
