"""Reads the machine code of cubins, and finds what a kernel must not do.

An instruction has 128 bits, the upper of which say how it is scheduled: it may count one of six
counters up until its result is there, and wait until some are at rest.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

LOADS_IN_FLIGHT = 4
REGISTERS = 65536  # of an SM, on every architecture
WARP_REGISTERS = 256  # are given out at once: 8 a thread

_FUNCTION = re.compile(r"Function : (\w+)")
_INSTRUCTION = re.compile(
    r"/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+ )?([\w.]+)(.*);\s+/\* 0x[0-9a-f]{16} \*/"
)
_CONTROL = re.compile(r"^\s+/\* (0x[0-9a-f]{16}) \*/$")
_USAGE = re.compile(r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")
_LOAD_128 = re.compile(r"LDG\.E\..*\b128$")
_STORE_128 = re.compile(r"STG\.E\..*\b128$")


class Instruction(NamedTuple):
    """One instruction of 128 bits: its name with what follows it, and how it is scheduled."""

    name: str
    operands: str
    barrier: int
    """Which of six counters tells that its result is there; 7: none."""
    awaited: int
    """A mask of the counters that must be at rest before it begins."""


class Usage(NamedTuple):
    """What a kernel takes of the device."""

    registers: int
    stack_bytes: int
    local_bytes: int


@functools.cache
def tool(name: str) -> str:
    """cuobjdump or nvdisasm, of the Python packages or on PATH; skips the test without them."""
    try:
        spec = importlib.util.find_spec("nvidia")
    except ModuleNotFoundError:
        spec = None
    for folder in (spec and spec.submodule_search_locations) or ():
        for path in sorted(Path(folder).glob(f"*/bin/{name}")):
            return str(path)
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"the package nvidia-cuda-{name} is not installed")
    return found


def disassemble(cubin: Path, names: Iterable[str]) -> dict[str, list[Instruction]]:
    """The instructions of those kernels by their names."""
    tool("nvdisasm")  # cuobjdump calls it
    kernels: dict[str, list[Instruction]] = {}
    code: list[Instruction] = []
    half: tuple[str, str] | None = None  # the control bits are on the line after it
    for line in _run(cubin, "-sass", "-fun", ",".join(names)).splitlines():
        if found := _FUNCTION.search(line):
            code = kernels[found[1]] = []
        elif found := _INSTRUCTION.search(line):
            half = found[1], found[2].strip()
        elif half and (found := _CONTROL.match(line)):
            bits = int(found[1], 16)
            code.append(Instruction(*half, barrier=bits >> 46 & 7, awaited=bits >> 52 & 0x3F))
            half = None
    return kernels


def usage(cubin: Path) -> dict[str, Usage]:
    """What every kernel takes, by its name."""
    found = _USAGE.findall(_run(cubin, "-res-usage"))
    return {name: Usage(*map(int, figures)) for name, *figures in found}


def faults_of_copy(code: list[Instruction]) -> list[str]:
    """What keeps a copy kernel of 16 B vectors from having four loads of a thread in flight."""
    loads = [at for at, one in enumerate(code) if _LOAD_128.match(one.name)]
    stores = [at for at, one in enumerate(code) if _STORE_128.match(one.name)]
    if len(loads) != LOADS_IN_FLIGHT or len(stores) != LOADS_IN_FLIGHT:
        return [f"{len(loads)} loads and {len(stores)} stores of 128 bits, not {LOADS_IN_FLIGHT}"]
    if loads[-1] > stores[0]:
        return ["a store comes before the last load"]
    faults = []
    counters = 0
    for one in code[loads[0] : loads[-1] + 1]:
        if one.awaited & counters:
            faults.append(f"{one.name} {one.operands} waits for a load before the last one")
        if one.name.startswith(("BRA", "BSYNC", "CALL", "RET", "BAR", "WARPSYNC", "ST")):
            faults.append(f"{one.name} stands between the loads")
        if _LOAD_128.match(one.name):
            counters |= 1 << one.barrier
    # Also the proof that waits are read rightly: without one the stores would write old registers.
    waited = 0
    for one in code[loads[-1] + 1 : stores[-1] + 1]:
        waited |= one.awaited
    if counters & ~waited or counters >> 6:
        faults.append("the stores do not wait for the loads")
    return faults


def faults_of_usage(used: Usage, threads: int) -> list[str]:
    """Spilled registers, and more registers than a block of `threads` can have."""
    faults = []
    if used.stack_bytes or used.local_bytes:  # all that LDL and STL, its instructions, can reach
        faults.append(f"{used.stack_bytes + used.local_bytes} B of local memory a thread")
    warp_registers = -(-32 * used.registers // WARP_REGISTERS) * WARP_REGISTERS
    if warp_registers * -(-threads // 32) > REGISTERS:
        faults.append(f"{used.registers} registers a thread, {threads} threads a block")
    return faults


def _run(cubin: Path, *options: str) -> str:
    command = [tool("cuobjdump"), *options, str(cubin)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
