"""Builds the stand-in for libcufile, and has it fail, be slow and tell what it saw."""

from __future__ import annotations

import atexit
import ctypes
import enum
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).with_suffix(".cpp")


class Call(enum.IntEnum):
    """Which calls a fault is for."""

    DRIVER_OPEN = 0
    HANDLE_REGISTER = 1
    BUFFER_REGISTER = 2
    READ = 3
    WRITE = 4


class Counts(NamedTuple):
    """What is open now, what the caller did wrong, and how often each call was made."""

    drivers: int
    handles: int
    buffers: int
    mistakes: int
    calls: tuple[int, ...]


@functools.cache
def build() -> Path:
    """The library, compiled once for each process of tests."""
    folder = tempfile.mkdtemp(prefix="kvtier-fake-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    library = Path(folder) / "libfakecufile.so"
    compiler = os.environ.get("CXX", "c++")
    subprocess.run(
        [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", SOURCE, "-o", library],
        check=True,
    )
    return library


class FakeCufile:
    """The library's state in this process; one for all who load it."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(build()))

    def fail(self, call: Call, code: int, count: int = 1, skip: int = 0) -> None:
        """After `skip` calls that go well, `count` fail with an errno or one of cuFile's codes."""
        self._library.fake_fail(int(call), skip, count, code)

    def move_at_most(self, nbytes: int) -> None:
        """Bytes of each call; 0 takes the bound away."""
        self._library.fake_short(ctypes.c_size_t(nbytes))

    @contextmanager
    def held(self) -> Iterator[None]:
        """Meanwhile calls that move bytes wait."""
        self._library.fake_hold(1)
        try:
            yield
        finally:
            self._library.fake_hold(0)

    def wait_held(self, count: int = 1) -> None:
        """Return when so many calls wait."""
        assert self._library.fake_wait_held(count), "no call came"

    def counts(self) -> Counts:
        """What it has seen."""
        found = (ctypes.c_int64 * (4 + len(Call)))()
        self._library.fake_counts(found)
        drivers, handles, buffers, mistakes, *calls = found
        return Counts(drivers, handles, buffers, mistakes, tuple(calls))

    def reset(self) -> None:
        """No faults."""
        for call in Call:
            self.fail(call, 0, 0)
        self.move_at_most(0)
