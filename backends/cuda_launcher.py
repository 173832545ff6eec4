"""Launches in order on a stream of their own, each with its tables; what the kernels' doors share."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from kvtier.backends.cuda_launches import Launch
from kvtier.backends.cuda_tables import DeviceTables

if TYPE_CHECKING:
    from kvtier._core import CudaDevice, DeviceJob

_BLOCKS_MAX = 1 << 16  # beyond it more CTAs only wait for each other


class Launcher:
    """One device, one stream. Any thread."""

    def __init__(self, device: CudaDevice) -> None:
        """Use a device that stays open until this is closed.

        Raises:
            ValueError: it has no kernels; says why.
        """
        if not device.kernels:
            raise ValueError(f"CUDA device {device.ordinal} has no kernels: {device.no_kernels}")
        self._device = device
        self._stream = device.create_stream()
        self._tables = DeviceTables(device, self._stream)
        self._lock = threading.Lock()  # tables and the kernel that reads them, in this order

    def close(self) -> None:
        """Wait for what is under way and free the tables; again: nothing."""
        with self._lock:
            stream, self._stream = self._stream, 0
            if stream:
                self._tables.close()
                with contextlib.suppress(OSError):  # of a device that failed it ends with it
                    self._device.destroy_stream(stream)

    def _launch(
        self,
        tables: list[npt.NDArray[Any]],
        launch_of: Callable[[list[int]], Launch],
        after: int | None,
        blocks: int,
    ) -> DeviceJob:
        if blocks < 0:
            raise ValueError(f"{blocks} CTAs")
        launch_of([0] * len(tables))  # whatever it refuses, before anything is under way
        with self._lock:
            if not self._stream:
                raise ValueError("these kernels are closed")
            addresses, buffer = self._tables.upload(tables)
            try:
                launch: Launch = launch_of(addresses)
                grid = min(launch.blocks, blocks or _BLOCKS_MAX)
                if launch.shared_bytes:
                    grid = launch.blocks  # a CTA each: no fewer can do it
                job = self._device.launch(
                    launch.name,
                    grid,
                    launch.threads,
                    launch.shared_bytes,
                    launch.arguments,
                    after,
                    self._stream,
                )
            except (OSError, ValueError):
                self._tables.give_back(buffer)
                raise
            self._tables.lend(buffer, job)
        return job
