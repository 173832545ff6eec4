"""Arrays of any library are seen as what they are: address, shape, strides, dtype, place."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvtier.arrays import ArrayView, is_array, stream_of, view_of
from kvtier.memory_regions import describe
from kvtier.types import RegionKind


class OnDevice:
    """What a library with `__cuda_array_interface__` gives, over host memory."""

    def __init__(
        self, array: np.ndarray[Any, Any], device: int = 1, stream: int | None = 7
    ) -> None:
        self.device = SimpleNamespace(id=device)
        self.array = array
        self.__cuda_array_interface__ = {
            "data": (array.ctypes.data, False),
            "shape": array.shape,
            "strides": None if array.flags.c_contiguous else array.strides,
            "typestr": array.dtype.str,
            "version": 3,
            "stream": stream,
        }


class ByDlpack:
    """What a library that speaks DLPack alone gives; of any device, over host memory."""

    def __init__(self, array: Any, device: tuple[int, int] = (1, 0)) -> None:
        self.array, self.device_type = array, device
        self.streams: list[object] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device_type

    def __dlpack__(self, *, stream: object = None) -> object:
        self.streams.append(stream)
        return self.array.__dlpack__()


ARRAY = np.arange(4 * 6 * 5, dtype=np.float32).reshape(4, 6, 5)


@pytest.mark.parametrize("part", [ARRAY, ARRAY[1:, ::2], ARRAY.transpose(2, 0, 1)])
@pytest.mark.parametrize(
    "wrap",
    [lambda a: a, torch.from_numpy, OnDevice, ByDlpack],
    ids=["numpy", "torch", "cuda", "dlpack"],
)
def test_every_protocol_tells_the_same(part: np.ndarray[Any, Any], wrap: Any) -> None:
    source = wrap(part)
    view = view_of(source)
    assert is_array(source)
    assert (view.address, view.shape, view.strides) == (part.ctypes.data, part.shape, part.strides)
    assert (view.itemsize, view.dtype, view.is_writable) == (4, "float32", True)
    assert view.nbytes == part.nbytes
    assert view.is_dense == part.flags.c_contiguous
    assert view.device == (1 if wrap is OnDevice else None)


def test_a_torch_dtype_that_numpy_lacks_keeps_its_name() -> None:
    tensor = torch.zeros(3, 4, dtype=torch.bfloat16)
    assert view_of(tensor).dtype == "bfloat16"
    assert view_of(ByDlpack(tensor)).dtype == "bfloat16"


def test_dlpack_of_a_device_is_asked_not_to_wait() -> None:
    """Order between streams is kept where copies are made; a wait here would stop the host."""
    source = ByDlpack(ARRAY, (2, 3))
    assert view_of(source).device == 3
    assert source.streams == [-1]


def test_a_read_only_array_says_so() -> None:
    array = ARRAY.copy()
    array.flags.writeable = False
    assert not view_of(array).is_writable


@pytest.mark.parametrize(
    "source", [b"bytes", 3, ByDlpack(ARRAY, (10, 0)), torch.zeros(1, device="meta")]
)
def test_what_is_no_array_of_host_or_cuda_is_refused(source: object) -> None:
    with pytest.raises(ValueError, match=r"is no array|neither host memory nor CUDA"):
        view_of(source)


@pytest.mark.parametrize(("stream", "expected"), [(7, 7), (None, 1)])
def test_an_array_knows_its_stream(stream: int | None, expected: int) -> None:
    """Where none is named it is the default stream, which waits for the others."""
    assert stream_of(OnDevice(ARRAY, stream=stream))() == expected


@pytest.mark.parametrize("source", [OnDevice(ARRAY), ByDlpack(ARRAY, (2, 1))])
def test_memory_of_a_device_is_registered_as_such(source: object) -> None:
    found = describe(source, None, None)
    assert (found.kind, found.address, found.nbytes, found.device) == (
        RegionKind.VRAM,
        ARRAY.ctypes.data,
        ARRAY.nbytes,
        1,
    )


@pytest.mark.parametrize("wrap", [OnDevice, ByDlpack, torch.from_numpy])
def test_an_array_with_gaps_is_no_region(wrap: Any) -> None:
    with pytest.raises(ValueError, match="gaps"):
        describe(wrap(ARRAY[:, ::2]), None, None)


def test_a_view_keeps_what_it_looks_at() -> None:
    view = view_of(ByDlpack(np.full(1000, 7, np.int16)))
    assert isinstance(view, ArrayView)
    assert (ctypes.c_int16 * 1000).from_address(view.address)[999] == 7
