"""What the tests of the kernels' calls work on: a device over the stand-in, and memory of both."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
from fake_cuda import FakeCuda
from paged import GAP, Bytes, PagedKv, aligned

from kvtier._core import CudaDevice, DeviceJob
from kvtier.backends.cuda_kernels import CudaKernels, Element, HotPlan, rope_units
from kvtier.types import Region, RegionKind

SHAPE = (16, 2, 64)
TOP = (2, 6)
CAPACITY = 10


class World:
    """An engine's pages on a device, and what the calls need; numpy's memory plays the device's."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.device = CudaDevice(0)
        self.kernels = CudaKernels(self.device)
        self._owned: list[npt.NDArray[Any]] = []
        self.kv = PagedKv.make(Element.FLOAT16, 2, 4, SHAPE, False, 0)
        rng = np.random.default_rng(1)
        self.values = rng.standard_normal((2, 4, *SHAPE), np.float32)
        self.kv.put(self.values)
        for memory in self.kv.memory:
            self.own(memory)
        self.pages = self.kernels.pages(self.kv.paging, Element.FLOAT16)
        self.stored = self.pinned(1 << 16)
        self.host_only = aligned(1 << 16)
        self.units = rope_units(10000.0 ** (-np.arange(0, 64, 2) / 64), [5, -3])
        self.top = self.ints(TOP, 3)
        self.slot_tokens = self.ints((2, CAPACITY), -1)
        self.order = self.own(np.tile(np.arange(CAPACITY, dtype=np.uint16), (2, 1)))
        self.plan = HotPlan(self.ints(TOP), self.ints(TOP), self.ints(TOP), self.ints((2,)))
        self.rows = self.pinned(8 * 32)
        self.rows[:] = np.arange(self.rows.size) % 251
        self.parts = np.full((2, 1), self.rows.ctypes.data, np.uint64)
        self.hot = self.own(aligned(2 * CAPACITY * 32))

    def close(self) -> None:
        """Let go of everything; again: nothing."""
        self.kernels.close()
        self.device.close()

    def own(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The same, which is the device's from now on."""
        self._owned.append(array)
        self.cuda.own(Region(RegionKind.DRAM, array.ctypes.data, array.nbytes), 0)
        return array

    def pinned(self, nbytes: int) -> Bytes:
        """Page-locked memory, until the device's end."""
        address = self.device.allocate_host(nbytes)
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
        memory.fill(GAP)
        return memory

    def ints(self, shape: tuple[int, ...], fill: int = 0) -> npt.NDArray[np.int32]:
        """On the device."""
        return self.own(np.full(shape, fill, np.int32))

    def resolve(self, **changes: Any) -> DeviceJob:
        return self.kernels.hot_resolve(
            **{
                "top_tokens": self.top,
                "slot_tokens": self.slot_tokens,
                "order": self.order,
                "plan": self.plan,
                "shape": TOP,
                "capacity": CAPACITY,
                "token_end": 8,
                **changes,
            }
        )

    def fetch(self, **changes: Any) -> DeviceJob:
        return self.kernels.hot_copy(
            **{
                "plan": self.plan,
                "sources": self.kernels.hot_sources(self.parts, 8, 8 * 32),
                "target": self.hot,
                "shape": TOP,
                "capacity": CAPACITY,
                "row_bytes": 32,
                **changes,
            }
        )
