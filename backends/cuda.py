"""Pieces between memory of a CUDA device and host memory, and within one device: the copy engines.

Host memory is page-locked when a transfer first needs it, since only then can the device copy by
itself. Pages of an engine go by `kvtier.backends.cuda_pages`, which gathers them.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from kvtier._core import Completions, CudaDevice, DeviceJob
from kvtier.backends.cuda_device import give_back, take_device
from kvtier.copying import BATCH_BYTES, addresses_of, batch_ends, check_overlap, map_region
from kvtier.errors import BackendUnavailable
from kvtier.transfer import BlockingTransfers, Op, Pieces, Reach, Results, Route, Stop, Unsuitable
from kvtier.types import Region, RegionKind

_REACH = Reach(
    routes=frozenset(
        {
            Route(RegionKind.VRAM, RegionKind.DRAM),
            Route(RegionKind.DRAM, RegionKind.VRAM),
            Route(RegionKind.VRAM, RegionKind.VRAM),
        }
    ),
    piece_bytes_max=BATCH_BYTES,
    latency_s=5e-5,
    bytes_per_s=25e9,
)
_AHEAD = 2  # batches on the device's streams at a time: it never idles between them
_LOOK_S = 0.5  # between two looks at a device that does not answer

Addresses = npt.NDArray[np.uint64]


@dataclass(slots=True, eq=False)
class Memory:
    """A handle: a region, and for host memory whether each device has been told of it."""

    kind: RegionKind
    address: int
    nbytes: int
    device: int
    is_writable: bool
    locked: dict[int, int] = field(default_factory=dict)
    """Device -> number of the registration; none where somebody else page-locked it."""


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """A prepared transfer: absolute addresses, cut into batches, and the device that does it."""

    device: CudaDevice
    targets: Addresses
    sources: Addresses
    lengths: Addresses
    batch_ends: list[int]
    kept: tuple[Any, ...]


class CudaTransfers(BlockingTransfers):
    """Copies of at most one device; a batch of 64 MiB is the unit of cancelling."""

    name: ClassVar[str] = "cuda"
    threads: ClassVar[int] = 4

    def __init__(self, completions: Completions) -> None:
        """Look for a driver; devices are opened when memory of theirs is registered.

        Raises:
            Unsuitable: there is no CUDA driver or device here.
        """
        if not CudaDevice.count():
            raise Unsuitable(CudaDevice.missing())
        self._lock = threading.Lock()
        self._devices: dict[int, CudaDevice] = {}
        super().__init__(completions)

    @property
    def reach(self) -> Reach:
        return _REACH

    def register(self, region: Region, source: Any) -> Memory:
        if region.kind is RegionKind.DRAM:
            mapped = map_region(region, source)
            return Memory(region.kind, mapped.address, mapped.nbytes, -1, mapped.is_writable)
        if region.kind is not RegionKind.VRAM:
            raise Unsuitable(f"cuda moves between VRAM and DRAM, not {region.kind.value}")
        device = self._device(region.device)
        try:
            kind = device.memory_kind(region.address, region.nbytes)
        except (OSError, ValueError) as error:
            raise Unsuitable(str(error)) from error
        if kind not in ("device", "managed"):
            raise Unsuitable(
                f"{region.nbytes} bytes at {region.address:#x} are no memory of CUDA device "
                f"{region.device}"
            )
        is_writable = not _is_readonly(source)
        return Memory(region.kind, region.address, region.nbytes, region.device, is_writable)

    def deregister(self, handle: Memory) -> None:
        with self._lock:
            for ordinal, number in handle.locked.items():
                if (device := self._devices.get(ordinal)) is not None:
                    with contextlib.suppress(OSError):  # it has failed: nothing is locked any more
                        device.unregister_host(number)
            handle.locked.clear()

    def prepare(self, pieces: Pieces, link: Any) -> Copies:
        handles: tuple[Memory, ...] = (*pieces.local.handles, *pieces.remote.handles)
        ordinals = {each.device for each in handles if each.kind is RegionKind.VRAM}
        if len(ordinals) != 1:
            raise Unsuitable(f"memory of {len(ordinals)} devices in one transfer, cuda serves one")
        (ordinal,) = ordinals
        device = self._device(ordinal)
        self._lock_pages(device, handles)
        local, remote = addresses_of(pieces.local), addresses_of(pieces.remote)
        targets, sources, target_side = local, remote, pieces.local
        if pieces.op is Op.WRITE:
            targets, sources, target_side = remote, local, pieces.remote
        for number in np.unique(target_side.which).tolist():
            if not target_side.handles[number].is_writable:
                raise Unsuitable("the target region is read-only")
        lengths = np.ascontiguousarray(pieces.lengths, np.uint64)
        check_overlap(targets, sources, lengths)
        return Copies(device, targets, sources, lengths, batch_ends(lengths), handles)

    def piece_count(self, prepared: Copies) -> int:
        return len(prepared.lengths)

    def move(self, prepared: Copies, results: Results, stop: Stop) -> str:
        under_way: deque[tuple[slice, DeviceJob]] = deque()
        first = 0
        try:
            for end in prepared.batch_ends:
                if stop.is_set():
                    break
                part = slice(first, end)
                job = prepared.device.copy(
                    prepared.targets[part], prepared.sources[part], prepared.lengths[part]
                )
                under_way.append((part, job))
                first = end
                if len(under_way) >= _AHEAD:
                    _finish(*under_way.popleft(), prepared, results)
        finally:  # nothing is on the device any more when this returns
            failure: OSError | None = None
            while under_way:
                try:
                    _finish(*under_way.popleft(), prepared, results)
                except OSError as error:
                    failure = failure or error
        if failure is not None:
            raise failure
        return "" if first == len(prepared.lengths) else "stopped"

    def close(self) -> None:
        super().close()
        with self._lock:
            devices = list(self._devices.values())
            self._devices.clear()
        if not self.is_stuck():  # else the memory that a thread copies would go away under it
            for device in devices:
                give_back(device)

    def _device(self, ordinal: int) -> CudaDevice:
        with self._lock:
            if ordinal not in self._devices:
                try:
                    self._devices[ordinal] = take_device(ordinal)
                except BackendUnavailable as error:
                    raise Unsuitable(str(error)) from error
            return self._devices[ordinal]

    def _lock_pages(self, device: CudaDevice, handles: tuple[Memory, ...]) -> None:
        with self._lock:
            for each in handles:
                if each.kind is RegionKind.VRAM or device.ordinal in each.locked:
                    continue
                try:
                    if device.memory_kind(each.address, each.nbytes) == "unpinned":
                        number = device.register_host(each.address, each.nbytes)
                        each.locked[device.ordinal] = number
                except (OSError, ValueError) as error:
                    raise Unsuitable(f"host memory cannot be page-locked: {error}") from error


def _finish(part: slice, job: DeviceJob, prepared: Copies, results: Results) -> None:
    while not job.wait(_LOOK_S):  # a device that hangs: the transfer ends without this thread
        pass
    results[part] = prepared.lengths[part]


def _is_readonly(source: Any) -> bool:
    interface = getattr(source, "__cuda_array_interface__", None)
    return interface is not None and bool(interface["data"][1])
