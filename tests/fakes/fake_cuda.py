"""Builds the stand-in for libcuda, and has it fail, be slow and tell what it saw."""

from __future__ import annotations

import atexit
import ctypes
import enum
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from kvtier.types import Region, RegionKind

SOURCES = Path(__file__).parents[2] / "csrc" / "sim"
CUDA = tuple(
    SOURCES / f"fake_{part}.cpp"
    for part in ("calls", "contexts", "copies", "memory", "modules", "streams")
)


class Call(enum.IntEnum):
    """Which calls a fault is for; as in fake_calls.hpp."""

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
    DRIVER_GET_VERSION = 13
    DEVICE_GET_COUNT = 14
    DEVICE_GET_ATTRIBUTE = 15
    STREAM_QUERY = 16
    STREAM_WAIT_EVENT = 17
    STREAM_DESTROY = 18
    EVENT_CREATE = 19
    EVENT_RECORD = 20
    EVENT_QUERY = 21
    EVENT_SYNCHRONIZE = 22
    EVENT_ELAPSED_TIME = 23
    MEMORY_ALLOCATE = 24
    MEMORY_FREE = 25
    MEMORY_GET_INFO = 26
    HOST_ALLOCATE = 27
    HOST_REGISTER = 28
    HOST_UNREGISTER = 29
    HOST_GET_DEVICE_POINTER = 30
    POINTER_GET_ATTRIBUTE = 31
    COPY = 32
    BATCH_COPY = 33
    FILL = 34
    MODULE_LOAD = 35
    MODULE_GET_FUNCTION = 36
    FUNCTION_SET_ATTRIBUTE = 37
    LAUNCH = 38
    COPY_RUN = 39
    """When a stream comes to a copy or a fill."""
    KERNEL_RUN = 40


class Setting(enum.IntEnum):
    """What a test sets; as in fake_state.hpp."""

    DEVICE_COUNT = 0
    DRIVER_VERSION = 1
    CAPABILITY = 2
    SM_COUNT = 3
    MEMORY_BYTES = 4
    PINNED_BYTES = 5
    DELAY_MAX_US = 6
    SEED = 7


class HeldByCuda(NamedTuple):
    """What of CUDA has been taken and not given back."""

    contexts: int
    current_contexts: int
    """On all threads."""
    streams: int
    events: int
    modules: int
    allocations: int
    host_allocations: int
    registrations: int


class Counters(NamedTuple):
    """What was done."""

    pageable_copies: int
    copies: int
    batches: int
    batch_copies: int
    early_reads: int
    fills: int
    launches: int
    copied_bytes: int


@functools.cache
def compile_library(sources: Sequence[Path], options: tuple[str, ...] = ()) -> Path:
    """A library of these sources, compiled once for each process of tests."""
    folder = tempfile.mkdtemp(prefix="kvtier-fake-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    library = Path(folder) / "libfake.so"
    always = ["-std=c++20", "-O0", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]
    compiler = os.environ.get("CXX", "c++")
    include = f"-I{SOURCES}"
    subprocess.run(
        [compiler, *always, *options, include, *map(str, sources), "-o", str(library)], check=True
    )
    return library


class FakeCuda:
    """The library's state in this process; one for all who load it."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or compile_library(CUDA)
        self._library = ctypes.CDLL(str(self.path))

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Have kvtier find it."""
        patch.setenv("KVTIER_CUDA_LIBRARY", str(self.path))

    def fail(
        self, call: Call, code: int, count: int = 1, skip: int = 0, *, is_lasting: bool = False
    ) -> None:
        """After `skip` calls that go well, `count` fail; with a lasting one the context is lost."""
        self._library.fake_fail(int(call), skip, count, code, int(is_lasting))

    def set(self, setting: Setting, value: int) -> None:
        """Change what the driver or its devices are."""
        self._library.fake_set(int(setting), ctypes.c_int64(value))

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

    def copy_on(self, stream: int, target: int, source: np.ndarray[Any, Any]) -> None:
        """Have a stream of device 0 copy host memory, which must live until it has."""
        self._copy(target, source.ctypes.data, source.nbytes, stream)

    def copy_from(self, stream: int, target: np.ndarray[Any, Any], source: int) -> None:
        """The other way."""
        self._copy(target.ctypes.data, source, target.nbytes, stream)

    def _copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        context, library = ctypes.c_void_p(), self._library
        codes = [
            library.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0),
            library.cuCtxPushCurrent_v2(context),
            library.cuMemcpyAsync(*map(ctypes.c_size_t, (target, source, nbytes, stream))),
            library.cuCtxPopCurrent_v2(ctypes.byref(context)),
            library.cuDevicePrimaryCtxRelease_v2(0),
        ]
        assert not any(codes), codes

    def held_by_cuda(self) -> HeldByCuda:
        """What has been taken and not given back."""
        counts = (ctypes.c_int64 * len(HeldByCuda._fields))()
        self._library.fake_count_cuda(counts)
        return HeldByCuda(*counts)

    def counters(self) -> Counters:
        """What was done since the last reset."""
        counts = (ctypes.c_int64 * len(Counters._fields))()
        self._library.fake_counters(counts)
        return Counters(*counts)

    def mistakes(self) -> int:
        """How often a caller did what the real libraries would not forgive."""
        return self._counts()[0]

    def mistake_words(self) -> str:
        """The first mistakes since the last call, a line each."""
        words = ctypes.create_string_buffer(1 << 14)
        self._library.fake_mistakes(words, ctypes.c_size_t(len(words)))
        return words.value.decode()

    def calls(self, call: Call) -> int:
        """How often it was made."""
        return self._counts()[1 + call]

    def _counts(self) -> list[int]:
        found = (ctypes.c_int64 * (1 + len(Call)))()
        self._library.fake_count_calls(found)
        return list(found)

    def reset(self) -> None:
        """No faults, settings as at first, and no memory of GPUs."""
        for call in Call:
            self.fail(call, 0, 0)
        self._library.fake_reset_cuda()
        self._library.fake_disown()
