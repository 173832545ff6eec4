"""A GPU as what runs kernels in tests: `tests/sim/machine.py` says what that is."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from machine import ALIGNMENT, GUARD_FILL, Bytes, LaunchFailed

from kvtier._core import CudaDevice, DeviceJob

PATIENCE_S = 30.0
"""What one small copy or launch may take before the device is taken to hang."""


class DeviceHangs(RuntimeError):
    """Work on the device did not end in time; nothing that follows on it will."""


def wait(job: DeviceJob, timeout_s: float = PATIENCE_S) -> None:
    """Wait for a job to its end.

    Raises:
        DeviceHangs: it took longer.
        OSError: the device failed.
    """
    if not job.wait(timeout_s):
        raise DeviceHangs(f"work of {job.nbytes} bytes was not done within {timeout_s} s")


def host_view(address: int, nbytes: int) -> Bytes:
    """Host memory at an address, as long as whoever owns it keeps it."""
    if nbytes == 0:
        return np.empty(0, np.uint8)
    return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_uint8)), (nbytes,))


def copy_bytes(device: CudaDevice, target: int, source: int, nbytes: int) -> DeviceJob:
    """Begin one plain copy: what a `cudaMemcpyAsync` is."""
    return copy_pieces(device, [target], [source], [nbytes])


def copy_pieces(
    device: CudaDevice,
    targets: list[int] | npt.NDArray[np.uint64],
    sources: list[int] | npt.NDArray[np.uint64],
    lengths: list[int] | npt.NDArray[np.uint64],
) -> DeviceJob:
    """Begin plain copies, all on one stream."""
    to, of, nbytes = (np.asarray(each, np.uint64) for each in (targets, sources, lengths))
    return device.copy(to, of, nbytes)


@dataclass(frozen=True)
class _Placed:
    base: int
    """Of the allocation: `ALIGNMENT` guard bytes lie before the array and as many behind it."""
    nbytes: int


class GpuMachine:
    """Memory of a device, and its kernels. Not thread-safe.

    Arrays are allocations of their own, so that tools that check addresses see where each ends.
    What is put goes to the device when it is needed there, and all comes back at once.
    """

    def __init__(self, device: CudaDevice) -> None:
        """Use a device that stays open as long as this is used."""
        self._device = device
        self._arrays: dict[int, _Placed] = {}
        self._pending: dict[int, Bytes] = {}
        self._seen: dict[int, Bytes] | None = None
        self._pinned = 0
        self._pinned_bytes = 0

    def put(self, array: npt.NDArray[np.generic]) -> int:
        content = np.full(array.nbytes + 2 * ALIGNMENT, GUARD_FILL, np.uint8)
        end = ALIGNMENT + array.nbytes
        content[ALIGNMENT:end] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        base = self._device.allocate(content.nbytes)
        assert base % ALIGNMENT == 0, f"an allocation at {base:#x}"
        address = base + ALIGNMENT
        self._arrays[address] = _Placed(base, array.nbytes)
        self._pending[address] = content
        self._seen = None
        return address

    def get(self, address: int) -> Bytes:
        nbytes = self._arrays[address].nbytes
        return self._contents()[address][ALIGNMENT : ALIGNMENT + nbytes].copy()

    def launch(self, name: str, grid: int, block: int, shared_bytes: int, arguments: bytes) -> None:
        self.flush()
        try:
            wait(self._device.launch(name, grid, block, shared_bytes, arguments))
        except (OSError, ValueError) as error:
            raise LaunchFailed(f"{name}: {error}") from error

    def flush(self) -> None:
        """What was put is on the device, and what is there now may change."""
        self._seen = None
        pending, self._pending = self._pending, {}
        if not pending:
            return
        whole = np.concatenate(list(pending.values()))
        offsets, lengths = _places([content.nbytes for content in pending.values()])
        pinned = self._staging(whole.nbytes)
        host_view(pinned, whole.nbytes)[:] = whole
        targets = [self._arrays[address].base for address in pending]
        wait(copy_pieces(self._device, targets, [pinned + at for at in offsets], lengths))

    def clear(self) -> None:
        contents = self._contents()
        arrays, self._arrays, self._seen = self._arrays, {}, None
        torn = []
        for address, placed in arrays.items():
            self._device.free(placed.base)
            content = contents[address]
            for guard in (content[:ALIGNMENT], content[ALIGNMENT + placed.nbytes :]):
                if not bool((guard == GUARD_FILL).all()):
                    torn.append(f"bytes beside an array of {placed.nbytes} were written")
        assert not torn, torn

    def close(self) -> None:
        """Let go of all memory, whatever is in it."""
        arrays, self._arrays, self._seen, self._pending = self._arrays, {}, None, {}
        for placed in arrays.values():
            self._device.free(placed.base)
        if self._pinned:
            self._device.free_host(self._pinned)
            self._pinned = self._pinned_bytes = 0

    def _contents(self) -> dict[int, Bytes]:
        """Every array with its guards, as it is now."""
        if self._pending:
            self.flush()
        if self._seen is None:
            placed = list(self._arrays.values())
            offsets, lengths = _places([each.nbytes + 2 * ALIGNMENT for each in placed])
            self._seen = {}
            if placed:
                pinned = self._staging(sum(lengths))
                targets, sources = [pinned + at for at in offsets], [each.base for each in placed]
                wait(copy_pieces(self._device, targets, sources, lengths))
                found = host_view(pinned, sum(lengths)).copy()
                for address, at, length in zip(self._arrays, offsets, lengths, strict=True):
                    self._seen[address] = found[at : at + length]
        return self._seen

    def _staging(self, nbytes: int) -> int:
        if nbytes > self._pinned_bytes:
            if self._pinned:
                self._device.free_host(self._pinned)
            self._pinned_bytes = max(nbytes, 1 << 20)
            self._pinned = self._device.allocate_host(self._pinned_bytes)
        return self._pinned


def _places(lengths: list[int]) -> tuple[list[int], list[int]]:
    """Where each lies when all lie one behind the other."""
    ends = np.cumsum([0, *lengths]).tolist()
    return ends[:-1], lengths
