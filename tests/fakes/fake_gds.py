"""Builds the stand-ins for libcufile and libcuda, and has them fail, be slow and tell what they saw."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import NamedTuple

import fake_build
import fake_cuda
import pytest
from fake_cuda import Call, FakeDriver

__all__ = ["Call", "FakeCufile", "Held", "build"]

SOURCES = (*fake_cuda.SOURCES, Path(__file__).parent / "fake_cufile.cpp")


class Held(NamedTuple):
    """What is open now."""

    drivers: int
    handles: int
    buffers: int
    registered_streams: int
    contexts: int
    current_contexts: int
    """On all threads."""
    streams: int


@functools.cache
def build(*, with_streams: bool = True) -> Path:
    """The library, both in one."""
    options = fake_build.FAST if with_streams else (*fake_build.FAST, "-DFAKE_WITHOUT_STREAMS")
    return fake_build.build("fakecufile", SOURCES, options)


class FakeCufile(FakeDriver):
    """The libraries' state in this process; one for all who load them."""

    lasting = ()

    def __init__(self) -> None:
        super().__init__(build())

    @staticmethod
    def install(patch: pytest.MonkeyPatch, library: Path | None = None) -> None:
        """Have kvtier find them."""
        for name in ("KVTIER_CUFILE_LIBRARY", "KVTIER_CUDA_LIBRARY"):
            patch.setenv(name, str(library or build()))

    def move_at_most(self, nbytes: int) -> None:
        """Bytes of each call; 0 takes the bound away."""
        self._library.fake_short(ctypes.c_size_t(nbytes))

    def held_now(self) -> Held:
        """What has been taken and not given back."""
        cufile, cuda = (ctypes.c_int64 * 4)(), (ctypes.c_int64 * 8)()
        self._library.fake_count_cufile(cufile)
        self._library.fake_count_cuda(cuda)
        return Held(*cufile, *cuda[:3])

    def reset(self) -> None:
        """As the driver's, and no bound."""
        super().reset()
        self.move_at_most(0)
