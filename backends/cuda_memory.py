"""Memory that a caller names, as a kernel may use it: found, and checked before anything is launched."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvtier.arrays import view_of

if TYPE_CHECKING:
    from kvtier._core import CudaDevice

Memory = Any
"""An array on the device or in page-locked host memory (`kvtier.arrays.view_of`), or the pair of its
address and size in bytes."""

_PAIR = 2


@dataclass(frozen=True, slots=True, eq=False)
class Extent:
    """A range of memory that the device reaches."""

    name: str
    address: int
    """Where kernels find it."""
    nbytes: int
    owner: Any

    def require(self, nbytes: int, align_bytes: int) -> Extent:
        """Itself.

        Raises:
            ValueError: it is smaller, or not aligned.
        """
        if self.nbytes < nbytes:
            raise ValueError(f"{self.name} has {self.nbytes} bytes, {nbytes} are needed")
        if self.address % align_bytes:
            raise ValueError(
                f"{self.name} at {self.address:#x} is not a multiple of {align_bytes} bytes"
            )
        return self


def extent_of(
    device: CudaDevice,
    name: str,
    memory: Memory,
    *,
    dtype: str = "",
    shape: tuple[int, ...] | None = None,
    is_target: bool = False,
) -> Extent:
    """Where `memory` lies; of an array also its type and shape are compared, unless not given.

    Raises:
        ValueError: the device cannot use it, or it is not what is expected.
    """
    if isinstance(memory, tuple) and len(memory) == _PAIR:
        address, nbytes = memory
        extent = Extent(name, int(address), int(nbytes), None)
    else:
        view = view_of(memory)
        if view.device not in (None, device.ordinal):
            raise ValueError(
                f"{name} lies on CUDA device {view.device}, the kernels run on {device.ordinal}"
            )
        if not view.is_dense:
            raise ValueError(f"{name} has gaps between its elements")
        if is_target and not view.is_writable:
            raise ValueError(f"{name} is read-only")
        if dtype and view.dtype != dtype:
            raise ValueError(f"{name} is of {view.dtype}, expected {dtype}")
        if shape is not None and view.shape != shape:
            raise ValueError(f"{name} has the shape {view.shape}, expected {shape}")
        extent = Extent(name, view.address, view.nbytes, view.owner)
    if shape is not None and dtype:
        extent.require(int(np.prod(shape)) * np.dtype(dtype).itemsize, np.dtype(dtype).itemsize)
    if extent.nbytes < 1:
        raise ValueError(f"{name} is empty")
    address = reach(device, name, extent.address, extent.nbytes)
    return replace(extent, address=address)


def reach(device: CudaDevice, name: str, address: int, nbytes: int) -> int:
    """Where kernels find a range: page-locked memory may lie elsewhere for them.

    Raises:
        ValueError: they do not reach all of it.
    """
    try:
        return device.device_address(address, nbytes)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def check_apart(ranges: list[tuple[str, int, int]], others: list[tuple[str, int, int]]) -> None:
    """Whether no range (name, address, bytes) of the one side overlaps one of the other.

    Raises:
        ValueError: two do.
    """
    if not ranges or not others:
        return
    sides = [
        (np.array([each[1] for each in side], np.uint64), np.array([each[2] for each in side]))
        for side in (ranges, others)
    ]
    order = np.argsort(sides[1][0])
    starts = sides[1][0][order]
    ends = np.maximum.accumulate(starts + sides[1][1][order].astype(np.uint64))
    first_ends: npt.NDArray[np.uint64] = sides[0][0] + sides[0][1].astype(np.uint64)
    # The last of the others that begins before each range's end must have ended before its start.
    before = np.searchsorted(starts, first_ends, side="left")
    for index in np.flatnonzero(before):
        if ends[before[index] - 1] > sides[0][0][index]:
            raise ValueError(f"{ranges[index][0]} and {others[0][0]} overlap")
