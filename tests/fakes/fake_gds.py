"""Builds the stand-ins for libcufile and libcuda, and has them fail, be slow and tell what they saw."""

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

import pytest

from kvtier.types import Region, RegionKind

FOLDER = Path(__file__).parent
SOURCES = [FOLDER / f"fake_{name}.cpp" for name in ("calls", "cuda", "cufile")]


class Call(enum.IntEnum):
    """Which calls a fault is for."""

    DRIVER_OPEN = 0
    HANDLE_REGISTER = 1
    BUFFER_REGISTER = 2
    READ = 3
    """Also when a stream comes to it."""
    WRITE = 4
    STREAM_REGISTER = 5
    READ_ASYNC = 6
    WRITE_ASYNC = 7
    CUDA_INIT = 8
    CONTEXT_RETAIN = 9
    CONTEXT_PUSH = 10
    STREAM_CREATE = 11
    STREAM_SYNCHRONIZE = 12


class Held(NamedTuple):
    """What is open now."""

    drivers: int
    handles: int
    buffers: int
    registered_streams: int
    contexts: int
    current_contexts: int
    """On all threads."""
    streams: int


@functools.cache
def build(*, with_streams: bool = True) -> Path:
    """The library, both in one, compiled once for each process of tests."""
    folder = tempfile.mkdtemp(prefix="kvtier-fake-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    library = Path(folder) / "libfakecufile.so"
    options = ["-std=c++20", "-O0", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]
    if not with_streams:
        options.append("-DFAKE_WITHOUT_STREAMS")
    compiler = os.environ.get("CXX", "c++")
    subprocess.run([compiler, *options, *SOURCES, "-o", library], check=True)
    return library


class FakeCufile:
    """The libraries' state in this process; one for all who load them."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(build()))

    @staticmethod
    def install(patch: pytest.MonkeyPatch, library: Path | None = None) -> None:
        """Have kvtier find them."""
        for name in ("KVTIER_CUFILE_LIBRARY", "KVTIER_CUDA_LIBRARY"):
            patch.setenv(name, str(library or build()))

    def fail(self, call: Call, code: int, count: int = 1, skip: int = 0) -> None:
        """After `skip` calls that go well, `count` fail with an errno or one of cuFile's codes."""
        self._library.fake_fail(int(call), skip, count, code)

    def move_at_most(self, nbytes: int) -> None:
        """Bytes of each call; 0 takes the bound away."""
        self._library.fake_short(ctypes.c_size_t(nbytes))

    @contextmanager
    def held(self, after: int = 0) -> Iterator[None]:
        """Meanwhile calls that move bytes wait, `after` so many have passed."""
        self._library.fake_hold(1, after)
        try:
            yield
        finally:
            self._library.fake_hold(0, 0)

    def wait_held(self, count: int = 1) -> None:
        """Return when so many calls wait."""
        assert self._library.fake_wait_held(count), "no call came"

    def own(self, region: Region, device: int) -> Region:
        """The memory is that GPU's from now on; the region as such."""
        self._library.fake_own(
            ctypes.c_size_t(region.address), ctypes.c_size_t(region.nbytes), device
        )
        return Region(RegionKind.VRAM, region.address, region.nbytes, device)

    def held_now(self) -> Held:
        """What has been taken and not given back."""
        cufile, cuda = (ctypes.c_int64 * 4)(), (ctypes.c_int64 * 3)()
        self._library.fake_count_cufile(cufile)
        self._library.fake_count_cuda(cuda)
        return Held(*cufile, *cuda)

    def mistakes(self) -> int:
        """How often a caller did what the real libraries would not forgive."""
        return self._counts()[0]

    def calls(self, call: Call) -> int:
        """How often it was made."""
        return self._counts()[1 + call]

    def _counts(self) -> list[int]:
        found = (ctypes.c_int64 * (1 + len(Call)))()
        self._library.fake_count_calls(found)
        return list(found)

    def reset(self) -> None:
        """No faults, and no memory of GPUs."""
        for call in Call:
            self.fail(call, 0, 0)
        self._library.fake_disown()
        self.move_at_most(0)
