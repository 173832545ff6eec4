"""A device for tests whose memory is numpy's and whose kernels run on the simulator, at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from machine import SimMachine


class SimJob:
    """Work that was over when it was begun."""

    def order_after(self, stream: int, wave: int = -1) -> None:
        """Nothing to wait for."""

    def is_done(self, wave: int = -1) -> bool:
        """It is."""
        return True

    def wait(self, timeout_s: float) -> bool:
        """It did."""
        return True


class SimDevice:
    """What the kernels' doors use of a `CudaDevice`."""

    ordinal = 0
    kernels = "simulator"
    no_kernels = ""

    def __init__(self, machine: SimMachine) -> None:
        self._machine = machine
        self._memory: dict[int, npt.NDArray[np.uint8]] = {}
        self._known: list[tuple[int, int, str]] = []
        self.launches: list[tuple[str, int]] = []
        self.streams = 0

    def own(self, array: npt.NDArray[Any], kind: str = "device") -> npt.NDArray[Any]:
        """Declares an array's memory to be the device's, or page-locked; gives it back."""
        self._known.append((array.ctypes.data, array.nbytes, kind))
        return array

    def memory_kind(self, address: int, nbytes: int) -> str:
        for first, size, kind in self._known:
            if first <= address < first + size:
                if address + nbytes > first + size:
                    raise ValueError(f"{nbytes} bytes at {address:#x} end behind their allocation")
                return kind
        return "unpinned"

    def allocate(self, nbytes: int) -> int:
        memory = np.full(nbytes + 256, 0xA5, np.uint8)
        offset = -memory.ctypes.data % 256
        address = int(memory.ctypes.data) + offset
        self._memory[address] = memory
        return address

    allocate_host = allocate

    def free(self, address: int) -> None:
        del self._memory[address]

    free_host = free

    @property
    def allocation_count(self) -> int:
        return len(self._memory)

    def create_stream(self) -> int:
        self.streams += 1
        return 7

    def destroy_stream(self, stream: int) -> None:
        self.streams -= 1

    def copy(self, targets: Any, sources: Any, lengths: Any, after: int | None = None) -> SimJob:
        import ctypes

        for target, source, length in zip(targets, sources, lengths, strict=True):
            ctypes.memmove(int(target), int(source), int(length))
        return SimJob()

    def launch(
        self,
        name: str,
        grid: int,
        block: int,
        shared_bytes: int,
        arguments: bytes,
        after: int | None = None,
        stream: int | None = None,
    ) -> SimJob:
        self._machine.launch(name, grid, block, shared_bytes, arguments)
        self.launches.append((name, grid))
        return SimJob()
