"""Plants a fault into a kernel's source, builds the simulator with it, and has a check look for it."""

from __future__ import annotations

import enum
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import fake_build
from machine import SANITIZE, SOURCES

CUDA = fake_build.ROOT / "csrc" / "cuda"
CPU_S = 5
"""Of a check, which needs a tenth of it: a fault may have a kernel run for ever."""
_TIMEOUT_S = 120.0  # however busy the machine is
CAUGHT_EXIT = 3
"""Of a process whose check has failed."""
# Slow code is fast to compile, and a fault may leave what a warning is for.
_MUTANT = ("-O0", "-w")


@dataclass(frozen=True)
class Fault:
    """One change of the source."""

    file: str
    """Of csrc/cuda."""
    before: str
    """Words that stand there once."""
    after: str
    """What stands there in their place."""
    check: str
    """Which of `mutant.CHECKS` has to fail."""
    is_sanitized: bool = False
    """AddressSanitizer sees it, bytes do not: a read beyond memory whose result is not used."""

    def __str__(self) -> str:
        words = " ".join(f"{self.before} -> {self.after or 'nothing'}".split())
        return f"{self.file}: {words}"


class End(enum.Enum):
    """How a check on a mutant came out."""

    SURVIVED = "survived"
    FAILED = "the check failed"
    CRASHED = "the process crashed"
    ENDLESS = "it would not end"


def planted(fault: Fault, folder: Path) -> Path:
    """The simulator with a fault, built in an empty folder.

    Raises:
        AssertionError: the words are not there once, or it does not compile.
    """
    for name in ("cuda", "sim"):
        shutil.copytree(CUDA.parent / name, folder / name)
    source = folder / "cuda" / fault.file
    text = source.read_text()
    assert text.count(fault.before) == 1, f"{text.count(fault.before)} times in the source: {fault}"
    source.write_text(text.replace(fault.before, fault.after))
    options = (*SANITIZE, "-O0") if fault.is_sanitized else fake_build.FAST
    kept, made = [], []
    for unit, built in zip(SOURCES, fake_build.objects(SOURCES, options), strict=True):
        if source in _included(folder / "sim" / unit.name):
            made.append(folder / "sim" / unit.name)
        else:
            kept.append(built)
    assert made, f"nothing includes {fault.file}"
    library = folder / "libsim.so"
    _compile([*fake_build.OPTIONS, *options, *_MUTANT, "-shared", *made, *kept, "-o", library])
    return library


def check(library: Path, name: str, *, is_sanitized: bool = False) -> tuple[End, str]:
    """Run one of `mutant.CHECKS` on a simulator in a process of its own; the words are its last."""
    script = str(Path(__file__).with_name("mutant.py"))
    command = [sys.executable, script, name, str(library)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        env=sanitizer_environment() if is_sanitized else None,
        check=False,
    )
    words = done.stderr[-2000:]
    if done.returncode == 0:
        return End.SURVIVED, words
    if done.returncode == CAUGHT_EXIT:
        return End.FAILED, words
    if done.returncode == -signal.SIGXCPU:
        return End.ENDLESS, words
    # A signal, as of a wild address, or what a sanitizer ends a process with.
    assert done.returncode < 0 or "Sanitizer" in done.stderr, f"{done.returncode}: {words}"
    return End.CRASHED, words


def sanitizer_environment() -> dict[str, str]:
    """For a process that loads a library built with AddressSanitizer."""

    runtime = [
        subprocess.run(
            [fake_build.compiler(), f"-print-file-name={name}"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for name in ("libasan.so", "libstdc++.so")  # the latter: libasan has to find __cxa_throw
    ]
    return {
        **os.environ,
        "LD_PRELOAD": " ".join(runtime),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python itself leaks
    }


def _included(source: Path) -> set[Path]:
    """All that it includes, itself too."""
    found: set[Path] = set()
    left = [source]
    while left:
        path = left.pop()
        if path in found or not path.exists():
            continue
        found.add(path)
        for name in re.findall(r'^#include "(.*)"', path.read_text(), re.MULTILINE):
            left += [(path.parent / name).resolve(), (source.parent.parent / "cuda" / name)]
    return found


def _compile(arguments: list[str | Path]) -> None:
    command = [fake_build.compiler(), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
