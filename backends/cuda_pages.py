"""Engine pages on a CUDA device, to and from the memory tier: the device that `KVTier.attach` opens."""

from __future__ import annotations

import contextlib
import errno

import numpy as np
import numpy.typing as npt

from kvtier._core import CudaDevice, DeviceJob, DevicePlan
from kvtier.backends.cuda_device import give_back, take_device
from kvtier.backends.cuda_paths import DIRECTIONS, Direction, Way, ways_of
from kvtier.device import Batch, Device, DeviceCopies, PageIds, Paging
from kvtier.errors import BackendUnavailable
from kvtier.types import Region

_U32 = npt.NDArray[np.uint32]
_U64 = npt.NDArray[np.uint64]


class CudaPages(Device):
    """Copies on streams of its own, in both directions at once, after and before the engine's."""

    def __init__(self, ordinal: int) -> None:
        """Open the device.

        Raises:
            BackendUnavailable: it cannot work here; says why.
        """
        self._device: CudaDevice | None = take_device(ordinal)
        self._registered: list[int] = []

    @property
    def failure(self) -> str:
        return self._device.failure if self._device is not None else "closed"

    def register(self, memory: Region) -> None:
        device = self._open()
        try:
            self._registered.append(device.register_host(memory.address, memory.nbytes))
        except OSError as error:
            raise BackendUnavailable(
                f"the memory tier of {memory.nbytes} bytes cannot be page-locked for CUDA: "
                f"{error.strerror}"
            ) from error

    def copies(self, paging: Paging) -> CudaCopies:
        return CudaCopies(self._open(), paging)

    def close(self) -> None:
        device, self._device = self._device, None
        if device is None:
            return
        for number in self._registered:
            with contextlib.suppress(OSError):  # it has failed: nothing is page-locked any more
                device.unregister_host(number)
        give_back(device)

    def _open(self) -> CudaDevice:
        if self._device is None:
            raise BackendUnavailable("this CUDA device is closed")
        return self._device


class CudaCopies(DeviceCopies):
    """Copies of one engine's pages, each direction by the way that is cheapest for its runs."""

    def __init__(self, device: CudaDevice, paging: Paging) -> None:
        self._paging = paging  # keeps the engine's memory
        self._plan = DevicePlan(
            device,
            paging.plane_addresses,
            paging.page_count,
            paging.page_stride,
            paging.rows,
            paging.row_stride,
            paging.cols,
            paging.col_stride,
            paging.run_bytes,
        )
        self._device = device
        self._ways: dict[tuple[Direction, int], Way] = {}
        for direction in DIRECTIONS:  # here, where a device that cannot do it may still refuse
            for planes in (1, self._plan.plane_count):
                self.way(direction, planes)

    def way(self, direction: Direction, wave_planes: int) -> Way:
        """Which way copies of so many planes a wave take.

        Raises:
            BackendUnavailable: none is open; says why.
        """
        # By what runs are to the copy engines: layouts that do not join planes have one way.
        joined = min(wave_planes, self._plan.joined_planes)
        way = self._ways.get((direction, joined))
        if way is None:
            way = _open_way(self._device, direction, self._plan, joined)
            self._ways[direction, joined] = way
        return way

    def gather(self, batch: Batch, stream: int) -> DeviceJob:
        way = self.way("gather", batch.waves[0][1])
        return self._plan.gather(*_arguments(batch), stream, *way)

    def scatter(self, batch: Batch, stream: int) -> DeviceJob:
        way = self.way("scatter", batch.waves[0][1])
        return self._plan.scatter(*_arguments(batch), stream, *way)


def _open_way(device: CudaDevice, direction: Direction, plan: DevicePlan, wave_planes: int) -> Way:
    """The best way for which the device has memory.

    Raises:
        BackendUnavailable: there is none; says why.
    """
    reason = ""
    try:
        for way in ways_of(device, direction, plan, wave_planes):
            if way.path != "dma" and plan.plane_bytes > device.slot_bytes:
                reason = f"a page has {plan.plane_bytes} bytes in each plane"
                continue
            if way.path != "staged":
                return way
            try:
                device.reserve_staging()
                return way
            except OSError as error:
                if error.errno != errno.ENOMEM:
                    raise
                reason = str(error.strerror)
    except OSError as error:
        reason = str(error.strerror)
    raise BackendUnavailable(f"CUDA device {device.ordinal}: {reason}")


def _arguments(batch: Batch) -> tuple[PageIds, _U32, _U64, _U64]:
    waves = np.array(batch.waves, dtype=np.uint64).reshape(-1, 2)
    return batch.page_ids, batch.page_offsets, batch.segments, waves
