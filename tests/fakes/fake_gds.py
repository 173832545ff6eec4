"""Builds the stand-ins for libcufile and libcuda, both in one library; see `fake_cuda`."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import NamedTuple

import pytest
from fake_cuda import CUDA, Call, FakeCuda, compile_library

__all__ = ["Call", "FakeCufile", "Held", "build"]

CUFILE = Path(__file__).parent / "fake_cufile.cpp"


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


def build(*, with_streams: bool = True) -> Path:
    """The library, compiled once for each process of tests."""
    options = () if with_streams else ("-DFAKE_WITHOUT_STREAMS",)
    return compile_library((*CUDA, CUFILE), options)


class FakeCufile(FakeCuda):
    """The libraries' state in this process; one for all who load them."""

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
        cufile = (ctypes.c_int64 * 4)()
        self._library.fake_count_cufile(cufile)
        cuda = self.held_by_cuda()
        drivers, handles, buffers, streams = cufile
        return Held(
            drivers, handles, buffers, streams, cuda.contexts, cuda.current_contexts, cuda.streams
        )

    def reset(self) -> None:
        """No faults, and no memory of GPUs."""
        super().reset()
        self.move_at_most(0)
