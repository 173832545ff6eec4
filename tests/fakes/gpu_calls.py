"""The driver's calls as a test makes them: with Python's numbers, and raising what goes wrong."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from fake_cuda import FakeCuda

Bytes = npt.NDArray[np.uint8]

U64, SIZE, POINTER, INT = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
UNSIGNED = ctypes.c_uint

ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "cuInit": (UNSIGNED,),
    "cuDevicePrimaryCtxRetain": (POINTER, INT),
    "cuDevicePrimaryCtxRelease_v2": (INT,),
    "cuCtxPushCurrent_v2": (POINTER,),
    "cuCtxPopCurrent_v2": (POINTER,),
    "cuStreamCreate": (POINTER, UNSIGNED),
    "cuStreamDestroy_v2": (POINTER,),
    "cuStreamSynchronize": (POINTER,),
    "cuStreamQuery": (POINTER,),
    "cuStreamWaitEvent": (POINTER, POINTER, UNSIGNED),
    "cuEventCreate": (POINTER, UNSIGNED),
    "cuEventDestroy_v2": (POINTER,),
    "cuEventRecord": (POINTER, POINTER),
    "cuEventQuery": (POINTER,),
    "cuEventSynchronize": (POINTER,),
    "cuEventElapsedTime": (POINTER, POINTER, POINTER),
    "cuMemAlloc_v2": (POINTER, SIZE),
    "cuMemFree_v2": (U64,),
    "cuMemGetInfo_v2": (POINTER, POINTER),
    "cuMemGetAddressRange_v2": (POINTER, POINTER, U64),
    "cuMemHostAlloc": (POINTER, SIZE, UNSIGNED),
    "cuMemFreeHost": (POINTER,),
    "cuMemHostRegister_v2": (POINTER, SIZE, UNSIGNED),
    "cuMemHostUnregister": (POINTER,),
    "cuMemHostGetDevicePointer_v2": (POINTER, POINTER, UNSIGNED),
    "cuPointerGetAttribute": (POINTER, INT, U64),
    "cuMemcpyAsync": (U64, U64, SIZE, POINTER),
    "cuMemsetD8Async": (U64, ctypes.c_ubyte, SIZE, POINTER),
    "cuModuleLoadData": (POINTER, ctypes.c_char_p),
    "cuModuleUnload": (POINTER,),
    "cuModuleGetFunction": (POINTER, POINTER, ctypes.c_char_p),
    "cuFuncSetAttribute": (POINTER, INT, INT),
    "cuLaunchKernel": (POINTER, *[UNSIGNED] * 7, POINTER, POINTER, POINTER),
    "cuGetProcAddress_v2": (ctypes.c_char_p, POINTER, INT, U64, POINTER),
}


class CopyAttributes(ctypes.Structure):
    """Of a batch: no hints."""

    _fields_ = (("order", INT), ("hints", INT * 4), ("flags", UNSIGNED))


class DriverError(Exception):
    """A call failed; the argument is its CUresult."""


class Gpu:
    """One device's context, current on this thread until the end."""

    def __init__(self, fake: FakeCuda, ordinal: int = 0) -> None:
        self.fake = fake
        self._driver = fake.driver()
        for name, types in ARGUMENTS.items():
            getattr(self._driver, name).argtypes = types
        self._ordinal = ordinal
        self.call("cuInit", 0)
        self.context = self.made("cuDevicePrimaryCtxRetain", ordinal)
        self.call("cuCtxPushCurrent_v2", self.context)

    def close(self) -> None:
        popped = U64()
        self.call("cuCtxPopCurrent_v2", ctypes.byref(popped))
        self.call("cuDevicePrimaryCtxRelease_v2", self._ordinal)

    def call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._driver, name)(*arguments)
        if code != 0:
            raise DriverError(code)

    def made(self, name: str, *arguments: Any) -> int:
        """What a call writes to its first argument, a number of 64 bits or fewer."""
        made = U64(0)
        self.call(name, ctypes.byref(made), *arguments)
        return made.value

    def allocate(self, nbytes: int) -> int:
        return self.made("cuMemAlloc_v2", nbytes)

    def pinned(self, nbytes: int) -> Bytes:
        """Memory of cuMemHostAlloc, zeroed; freed with the context at the latest."""
        address = self.made("cuMemHostAlloc", nbytes, 3)
        bytes_ = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
        bytes_[:] = 0
        return bytes_

    def stream(self) -> int:
        return self.made("cuStreamCreate", 1)

    def event(self, flags: int = 2) -> int:
        return self.made("cuEventCreate", flags)

    def record(self, event: int, stream: int) -> None:
        self.call("cuEventRecord", event, stream)

    def wait(self, stream: int, event: int) -> None:
        self.call("cuStreamWaitEvent", stream, event, 0)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self.call("cuMemcpyAsync", target, source, nbytes, stream)

    def batch(self, copies: Sequence[tuple[int, int, int]], stream: int, order: int = 1) -> int:
        """Copies as (target, source, nbytes) by cuMemcpyBatchAsync; the copy at fault, or -1."""
        function = self.batch_function(12080)
        prototype = ctypes.CFUNCTYPE(
            INT, *[POINTER] * 3, SIZE, *[POINTER] * 2, SIZE, *[POINTER] * 2
        )
        columns = [(U64 * len(copies))(*column) for column in zip(*copies, strict=True)]
        attributes, first = CopyAttributes(order=order), SIZE(0)
        failed = SIZE(2**64 - 1)
        code = prototype(function)(
            *columns,
            len(copies),
            ctypes.addressof(attributes),
            ctypes.addressof(first),
            1,
            ctypes.addressof(failed),
            stream,
        )
        if code != 0 and failed.value == 2**64 - 1:
            raise DriverError(code)
        return -1 if code == 0 else failed.value

    def batch_function(self, version: int) -> int:
        """The address of cuMemcpyBatchAsync with the signature of that CUDA; 0 where there is none."""
        found = U64(0)
        name = b"cuMemcpyBatchAsync"
        self.call("cuGetProcAddress_v2", name, ctypes.byref(found), version, 0, None)
        return found.value

    def function(self, name: str, module: int | None = None) -> int:
        if module is None:
            module = self.made("cuModuleLoadData", b"kvtier-sim")
        return self.made("cuModuleGetFunction", module, name.encode())

    def launch(
        self,
        function: int,
        arguments: bytes | ctypes.Array[ctypes.c_char],
        stream: int,
        *,
        grid: int = 1,
        block: int = 1,
        shared_bytes: int = 0,
    ) -> None:
        """A kernel with one argument."""
        if isinstance(arguments, bytes):
            arguments = ctypes.create_string_buffer(arguments, len(arguments))
        places = (POINTER * 1)(ctypes.addressof(arguments))
        self.call(
            "cuLaunchKernel", function, grid, 1, 1, block, 1, 1, shared_bytes, stream, places, None
        )

    def synchronize(self, stream: int) -> None:
        self.call("cuStreamSynchronize", stream)

    def attribute(self, attribute: int, address: int) -> int:
        return self.made("cuPointerGetAttribute", attribute, address)
