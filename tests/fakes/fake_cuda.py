"""Builds the stand-in for libcuda, and has it fail, be slow and tell what it saw."""

from __future__ import annotations

import ctypes
import enum
import functools
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import fake_build
import numpy as np
import pytest

from kvtier.types import Region, RegionKind

SOURCES = tuple(sorted(fake_build.SIMULATOR.glob("*.cpp")))
SANITIZE = ("-O0", "-fsanitize=address", "-fno-omit-frame-pointer")
"""Options for a library in which a write beyond memory ends the process; it needs libasan loaded
first."""
STICKY = {4, 214, 220, 226, 700, 702, 709, 710, *range(714, 720), 721, 810, 911}


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
    """When a stream comes to a copy or a fill: the context is lost."""
    KERNEL_RUN = 40
    """When a stream comes to a kernel: the context is lost."""


class Setting(enum.IntEnum):
    """What the driver and its devices are; as given here until set, and after a reset."""

    DEVICE_COUNT = 0
    """2. 0: cuInit finds no device."""
    DRIVER_VERSION = 1
    """12080. Below, there is no cuMemcpyBatchAsync."""
    CAPABILITY = 2
    """90: ten times the major and the minor compute capability."""
    SM_COUNT = 3
    """132."""
    MEMORY_BYTES = 4
    """1 GiB: of each device."""
    PINNED_BYTES = 5
    """1 GiB: what may be page-locked in all."""
    DELAY_MAX_US = 6
    """200: what a stream waits at most before each piece of work."""
    SEED = 7
    """1: of delays of streams made from now on, and of the order in which a kernel's threads run."""
    IS_ALIASING = 8
    """0. 1: memory registered from now on is at another address for devices."""


class Held(NamedTuple):
    """What is open now."""

    contexts: int
    current_contexts: int
    """On all threads."""
    streams: int
    events: int
    modules: int
    allocations: int
    """Of device memory."""
    pinned: int
    registered: int


class Counters(NamedTuple):
    """What was done since the last reset."""

    pageable_copies: int
    copies: int
    """Calls, as `batches`, `fills` and `launches` are."""
    batches: int
    batch_copies: int
    """Copies in batches."""
    early_reads: int
    """Sources that were read before the stream came to the copy, as the caller had allowed."""
    fills: int
    launches: int
    copied_bytes: int


@functools.cache
def build(options: tuple[str, ...] = fake_build.FAST, *, with_kernels: bool = True) -> Path:
    """The library of the driver, with the kernels of the simulator or with its own two only."""
    if with_kernels:
        return fake_build.build("fakecuda", SOURCES, options)
    sources = tuple(path for path in SOURCES if path.name.startswith("fake_"))
    # fake_kernels.cpp is what looks for the others, so it is the one to be told.
    ordered = tuple(sorted(sources, key=lambda path: path.name == "fake_kernels.cpp"))
    return fake_build.build("fakedriver", ordered, (*options, "-DFAKE_WITHOUT_KERNELS"))


class FakeDriver:
    """What a test can do with a library that has the driver in it."""

    lasting: Collection[int] = STICKY
    """Codes with which a context is lost, unless told otherwise."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))

    def fail(
        self,
        call: Call,
        code: int,
        count: int = 1,
        skip: int = 0,
        *,
        is_lasting: bool | None = None,
    ) -> None:
        """After `skip` calls that go well, `count` fail with a CUresult.

        After a lasting one all that is done in the context fails with it, and its work is dropped.
        """
        lasts = code in self.lasting if is_lasting is None else is_lasting
        self._library.fake_fail(int(call), skip, count, code, int(lasts))

    @contextmanager
    def held(self, after: int = 0) -> Iterator[None]:
        """Meanwhile copies, fills and kernels wait when their stream comes to them, `after` so many
        have passed."""
        self._library.fake_hold(1, after)
        try:
            yield
        finally:
            self._library.fake_hold(0, 0)

    def wait_held(self, count: int = 1) -> None:
        """Return when so many wait."""
        assert self._library.fake_wait_held(count), "no call came"

    def set(self, setting: Setting, value: int) -> None:
        """Change what the driver or its devices are."""
        self._library.fake_set(int(setting), ctypes.c_int64(value))

    def set_name(self, name: str) -> None:
        """Of all devices."""
        self._library.fake_set_name(name.encode())

    def own(self, region: Region, device: int) -> Region:
        """The memory is that GPU's from now on; the region as such."""
        self._library.fake_own(
            ctypes.c_size_t(region.address), ctypes.c_size_t(region.nbytes), device
        )
        return Region(RegionKind.VRAM, region.address, region.nbytes, device)

    def manage(self, region: Region, device: int) -> None:
        """The memory is managed by that GPU's driver from now on."""
        self._library.fake_manage(
            ctypes.c_size_t(region.address), ctypes.c_size_t(region.nbytes), device
        )

    def counters(self) -> Counters:
        """What was done since the last reset."""
        found = (ctypes.c_int64 * len(Counters._fields))()
        self._library.fake_counters(found)
        return Counters(*found)

    def mistakes(self) -> int:
        """How often a caller did what the real library would not forgive."""
        self.counters()  # looks for writes to freed memory
        return self._counts()[0]

    def mistake_words(self) -> list[str]:
        """What mistakes there were since this was last asked: the first 64."""
        self.counters()
        words = ctypes.create_string_buffer(16384)
        self._library.fake_mistakes(words, ctypes.c_size_t(len(words)))
        return words.value.decode().splitlines()

    def calls(self, call: Call) -> int:
        """How often it was made."""
        return self._counts()[1 + call]

    def _counts(self) -> list[int]:
        found = (ctypes.c_int64 * (1 + len(Call)))()
        self._library.fake_count_calls(found)
        return list(found)

    def reset(self) -> None:
        """No faults, no memory of GPUs that was said to be theirs, settings as at first, no lost
        context and nothing of one. Waits until no stream has work."""
        for call in Call:
            self.fail(call, 0, 0)
        self._library.fake_reset_cuda()
        self._library.fake_disown()

    def driver(self) -> Any:
        """The driver's own functions, by their names, as foreign functions."""
        return self._library


class FakeCuda(FakeDriver):
    """The driver's state in this process; one for all who load the same library."""

    def __init__(self, library: Path | None = None) -> None:
        super().__init__(library or build())

    @staticmethod
    def install(patch: pytest.MonkeyPatch, library: Path | None = None) -> None:
        """Have kvtier find it. Ways of copies are not measured: it has no speed."""
        patch.setenv("KVTIER_CUDA_LIBRARY", str(library or build()))
        patch.setenv("KVTIER_CUDA_PATH", "dma")

    def held_now(self) -> Held:
        """What has been taken and not given back."""
        found = (ctypes.c_int64 * len(Held._fields))()
        self._library.fake_count_cuda(found)
        return Held(*found)

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
