"""Arrays of other libraries, on the host or on a CUDA device, as address, shape and strides.

Torch tensors are asked directly; all others by the protocols that libraries share:
``__cuda_array_interface__`` (version 3), ``__array_interface__`` and DLPack. None of the libraries
is imported here: what an array is, it says itself.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

LEGACY_STREAM = 1  # CUDA's default stream, in order with all streams that do not opt out of it
_DLPACK_CPU, _DLPACK_CUDA, _DLPACK_CUDA_HOST = 1, 2, 3
_DLPACK_NAMES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}


@dataclass(frozen=True, slots=True, eq=False)
class ArrayView:
    """An array's memory; valid as long as `owner` is kept."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Bytes."""
    itemsize: int
    dtype: str
    """As torch calls it: ``bfloat16``, ``float32``, ``uint8``."""
    device: int | None
    """Ordinal of the CUDA device; None in host memory."""
    is_writable: bool
    owner: Any

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.itemsize * int(np.prod(self.shape, dtype=np.int64))

    @property
    def is_dense(self) -> bool:
        """Whether the elements lie in order, without gaps."""
        step = self.itemsize
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size > 1 and stride != step:
                return False
            step *= size
        return True


def view_of(source: Any) -> ArrayView:
    """The memory of any array.

    Raises:
        ValueError: it speaks none of the protocols, or not about memory of the host or of CUDA.
    """
    if hasattr(source, "data_ptr") and hasattr(source, "element_size"):
        return _of_torch(source)
    for protocol, is_cuda in (("__cuda_array_interface__", True), ("__array_interface__", False)):
        interface = getattr(source, protocol, None)
        if interface is not None:
            return _of_interface(source, interface, _ordinal(source) if is_cuda else None)
    if hasattr(source, "__dlpack__") and hasattr(source, "__dlpack_device__"):
        return _of_dlpack(source)
    raise ValueError(
        f"{type(source).__name__} is no array: it has neither "
        "__cuda_array_interface__, __array_interface__ nor __dlpack__"
    )


def is_array(source: Any) -> bool:
    """Whether `view_of` may know it."""
    names = ("data_ptr", "__cuda_array_interface__", "__array_interface__", "__dlpack__")
    return any(hasattr(source, name) for name in names)


def stream_of(source: Any) -> Callable[[], int]:
    """Tells the stream on which the array's library computes on its device now, on this thread.

    Where a library cannot be asked it is the array's own, as `__cuda_array_interface__` says it,
    else the default stream.
    """
    view = view_of(source)
    assert view.device is not None, "asked of arrays on a device"
    ordinal = view.device
    library = type(source).__module__.partition(".")[0]
    if hasattr(source, "data_ptr"):  # torch's, or a class that an engine made of it
        torch = sys.modules["torch"]
        return lambda: int(torch.cuda.current_stream(ordinal).cuda_stream)
    if library == "cupy":
        cupy = sys.modules["cupy"]
        return lambda: int(cupy.cuda.get_current_stream(ordinal).ptr) or LEGACY_STREAM
    own = getattr(source, "__cuda_array_interface__", {}).get("stream") or LEGACY_STREAM
    return lambda: own


def _of_torch(tensor: Any) -> ArrayView:
    kind = tensor.device.type
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"a tensor on {tensor.device}: neither host memory nor CUDA")
    item = tensor.element_size()
    return ArrayView(
        tensor.data_ptr(),
        tuple(tensor.shape),
        tuple(step * item for step in tensor.stride()),
        item,
        str(tensor.dtype).removeprefix("torch."),
        (tensor.device.index or 0) if kind == "cuda" else None,
        True,
        tensor,
    )


def _of_interface(source: Any, interface: dict[str, Any], device: int | None) -> ArrayView:
    address, readonly = interface["data"]
    dtype = np.dtype(interface["typestr"])
    shape = tuple(interface["shape"])
    strides = interface.get("strides") or _dense(shape, dtype.itemsize)
    return ArrayView(
        int(address or 0),
        shape,
        tuple(strides),
        dtype.itemsize,
        dtype.name,
        device,
        not readonly,
        source,
    )


def _ordinal(source: Any) -> int:
    device = getattr(source, "device", None)
    for name in ("index", "id"):
        if isinstance(number := getattr(device, name, None), int):
            return number
    return 0


class _DlTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)


def _of_dlpack(source: Any) -> ArrayView:
    kind, ordinal = source.__dlpack_device__()
    if kind not in (_DLPACK_CPU, _DLPACK_CUDA, _DLPACK_CUDA_HOST):
        raise ValueError(f"an array on DLPack device {int(kind)}: neither host memory nor CUDA")
    try:
        # On CUDA -1 asks for no waiting between streams: order is kept where copies are made.
        capsule = source.__dlpack__(stream=-1) if kind == _DLPACK_CUDA else source.__dlpack__()
    except (BufferError, RuntimeError, TypeError) as error:
        raise ValueError(f"its memory cannot be shared: {error}") from error
    tensor = _DlTensor.from_address(_capsule_pointer(capsule, b"dltensor"))
    if tensor.bits % 8 or tensor.lanes != 1:
        raise ValueError(f"elements of {tensor.bits} bits and {tensor.lanes} lanes")
    item = tensor.bits // 8
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = _dense(shape, item)
    if tensor.strides:
        strides = tuple(step * item for step in tensor.strides[: tensor.ndim])
    name = _DLPACK_NAMES.get(tensor.code, f"dlpack{tensor.code}_")
    return ArrayView(
        (tensor.data or 0) + tensor.byte_offset,
        shape,
        strides,
        item,
        "bool" if name == "bool" else f"{name}{tensor.bits}",
        int(ordinal) if kind == _DLPACK_CUDA else None,
        True,
        (source, capsule),
    )


def _dense(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides: list[int] = []
    step = itemsize
    for size in reversed(shape):
        strides.insert(0, step)
        step *= size
    return tuple(strides)
