"""Small tables of numbers on a CUDA device, for as long as the work that reads them is under way.

Memory for them is kept and used again: giving it back to the driver would wait for the device.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from kvtier._core import CudaDevice, DeviceJob

_PART_ALIGN_BYTES = 64  # tables in one buffer: 64 for the units of RoPE, read 16 bytes at a time
_BUFFER_BYTES_MIN = 4096
_WAIT_S = 30.0  # for the work of a device at close; longer, and its memory is left to the process

Table = npt.NDArray[Any]


@dataclass(slots=True, eq=False)
class TableBuffer:
    """Page-locked memory to write tables into, and the device's copy of it."""

    host: int
    device: int
    nbytes: int
    copied: DeviceJob | None = None
    """The upload that fills the device's copy."""


class DeviceTables:
    """Uploads tables on a stream and lends their memory until a job is done. Any thread."""

    def __init__(self, device: CudaDevice, stream: int) -> None:
        self._device = device
        self._stream = stream
        self._lock = threading.Lock()
        self._free: list[TableBuffer] = []
        self._lent: deque[tuple[DeviceJob, TableBuffer]] = deque()

    def upload(self, tables: list[Table]) -> tuple[list[int], TableBuffer]:
        """Device addresses of copies that later work on the stream finds; 0 for an empty table.

        The buffer is the caller's until `lend` or `give_back`.

        Raises:
            OSError: the device has no memory for it, or has failed.
        """
        offsets, end = [], 0
        for table in tables:
            offsets.append(end)
            end += -(-table.nbytes // _PART_ALIGN_BYTES) * _PART_ALIGN_BYTES
        buffer = self._take(end)
        try:
            for table, offset in zip(tables, offsets, strict=True):
                dense = np.ascontiguousarray(table)
                ctypes.memmove(buffer.host + offset, dense.ctypes.data, dense.nbytes)
            if end:
                target, source, size = np.array([[buffer.device], [buffer.host], [end]], np.uint64)
                buffer.copied = self._device.copy(target, source, size)
                buffer.copied.order_after(self._stream)
        except OSError:
            self.give_back(buffer)
            raise
        addresses = [
            buffer.device + offset if table.size else 0
            for table, offset in zip(tables, offsets, strict=True)
        ]
        return addresses, buffer

    def lend(self, buffer: TableBuffer, job: DeviceJob) -> None:
        """The buffer is free again when the job is done."""
        with self._lock:
            self._lent.append((job, buffer))

    def give_back(self, buffer: TableBuffer) -> None:
        """Nothing but its upload reads the buffer."""
        with self._lock:
            if buffer.copied is not None:
                self._lent.append((buffer.copied, buffer))
            else:
                self._free.append(buffer)

    def close(self) -> None:
        """Wait for what is under way and free everything."""
        with self._lock:
            lent, self._lent = self._lent, deque()
            free, self._free = self._free, []
        for job, buffer in lent:
            with contextlib.suppress(OSError):  # a device that failed reads nothing any more
                if not job.wait(_WAIT_S):
                    continue
            free.append(buffer)
        for buffer in free:
            with contextlib.suppress(OSError):
                self._device.free(buffer.device)
                self._device.free_host(buffer.host)

    def _take(self, nbytes: int) -> TableBuffer:
        with self._lock:
            self._reclaim()
            for index, buffer in enumerate(self._free):
                if buffer.nbytes >= nbytes:
                    buffer.copied = None
                    return self._free.pop(index)
        size = max(_BUFFER_BYTES_MIN, 1 << max(0, nbytes - 1).bit_length())
        device = self._device.allocate(size)
        try:
            return TableBuffer(self._device.allocate_host(size), device, size)
        except OSError:
            self._device.free(device)
            raise

    def _reclaim(self) -> None:
        while self._lent:
            job, buffer = self._lent[0]
            try:
                if not job.is_done():
                    return
            except OSError:  # whoever waits for the job is told
                pass
            self._lent.popleft()
            self._free.append(buffer)
