"""The kernels' machine code for each architecture, and that what must not be in it is found."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import sass
from cubins import Cubin, compiler, sources

from kvtier import _core

ARCHITECTURES = (80, 86, 89, 90, 100, 120)
COPIES = ("kvtier_gather_v16", "kvtier_scatter_v16")
BULK = ("kvtier_bulk_gather", "kvtier_bulk_scatter")


@pytest.fixture(scope="module", params=ARCHITECTURES)
def cubin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that is built in."""
    if request.param not in _core.cubin_architectures():
        pytest.skip(f"this build has no cubin for sm_{request.param}")
    path = tmp_path_factory.mktemp("cubins") / f"sm_{request.param}.cubin"
    path.write_bytes(_core.find_cubin(*divmod(request.param, 10)))
    return path


def compiled(tmp_path: Path, old: str, new: str) -> Path:
    """A cubin of the copy kernels with `old` in their source made `new`."""
    texts = sources()
    text, count = re.subn(old, new, texts["copy.cu"].decode())
    assert count == 1, f"{count} times {old}"
    texts |= {"kernels.cu": b'#include "copy.cu"\n', "copy.cu": text.encode()}
    module = compiler()
    nvrtc = module.Nvrtc(module.library_path())
    path = tmp_path / "sm_90.cubin"
    path.write_bytes(nvrtc.compile(texts, "sm_90", ["--std=c++20"]))
    return path


def test_a_thread_of_a_copy_has_four_loads_in_flight(cubin: Path) -> None:
    kernels = sass.disassemble(cubin, COPIES)
    assert {name: sass.faults_of_copy(kernels[name]) for name in COPIES} == {
        name: [] for name in COPIES
    }


def test_no_kernel_spills_and_every_block_has_its_registers(cubin: Path) -> None:
    threads = Cubin(cubin.read_bytes()).threads
    used = sass.usage(cubin)
    assert used.keys() == threads.keys()
    found = {name: sass.faults_of_usage(used[name], threads[name] or 0) for name in used}
    assert not {name: faults for name, faults in found.items() if faults}


def test_bulk_copies_are_the_hardware_s(cubin: Path) -> None:
    image = Cubin(cubin.read_bytes())
    if not image.threads.keys() & set(BULK):
        pytest.skip(f"sm_{image.architecture} has no bulk copies")
    for name, code in sass.disassemble(cubin, BULK).items():
        names = {one.name.partition(".")[0] for one in code}
        assert {"UBLKCP", "SYNCS"} <= names, name


def test_a_copy_as_it_is_has_no_fault(tmp_path: Path) -> None:
    """So what the next tests find is what they planted."""
    cubin = compiled(tmp_path, r"\A", "")
    for code in sass.disassemble(cubin, COPIES).values():
        assert sass.faults_of_copy(code) == []
    assert sass.faults_of_usage(sass.usage(cubin)[COPIES[0]], 512) == []


def test_one_load_in_flight_is_found(tmp_path: Path) -> None:
    cubin = compiled(tmp_path, r"(kVectorsInFlight) = 4", r"\1 = 1")
    for code in sass.disassemble(cubin, COPIES).values():
        assert sass.faults_of_copy(code) == ["1 loads and 1 stores of 128 bits, not 4"]


def test_a_store_between_the_loads_is_found(tmp_path: Path) -> None:
    """One loop loads and stores; it is unrolled, but a store may be of what the next load reads."""
    end_of_loads = r"(\.paged : places\[i\]\.stored\)\);\n)    \}\n    KVTIER_UNROLL[^{]*\{\n"
    cubin = compiled(tmp_path, end_of_loads, r"\1")
    for code in sass.disassemble(cubin, COPIES).values():
        assert sass.faults_of_copy(code) == ["a store comes before the last load"]


def test_a_load_that_waits_for_the_one_before_is_found(tmp_path: Path) -> None:
    """All loads before all stores still, but each address depends on the value before."""
    address = r"(kGather \? places\[i\]\.paged : places\[i\]\.stored)\)\);"
    before = "(i > 0 ? *reinterpret_cast<const unsigned char*>(&values[i - 1]) & 16 : 0)"
    cubin = compiled(tmp_path, address, rf"{before} + (\1)));")
    for code in sass.disassemble(cubin, COPIES).values():
        assert any("waits for a load" in fault for fault in sass.faults_of_copy(code))


def test_spilled_registers_are_found(tmp_path: Path) -> None:
    """Four blocks of 512 on an SM leave a thread half the registers that it needs."""
    bounds = r"__launch_bounds__\(512\)( +\\\n +kvtier_gather)"
    used = sass.usage(compiled(tmp_path, bounds, r"__launch_bounds__(512, 4)\1"))[COPIES[0]]
    assert used.stack_bytes > 0
    assert sass.faults_of_usage(used, 512) == [f"{used.stack_bytes} B of local memory a thread"]


def test_too_many_registers_for_a_block_are_found() -> None:
    assert sass.faults_of_usage(sass.Usage(128, 0, 0), 512) == []
    assert sass.faults_of_usage(sass.Usage(129, 0, 0), 512) == [
        "129 registers a thread, 512 threads a block"
    ]
