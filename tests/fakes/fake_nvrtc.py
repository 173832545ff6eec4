"""Builds the stand-in for NVRTC, and has it fail and tell what it was asked."""

from __future__ import annotations

import ctypes
from pathlib import Path

import fake_build
import pytest


def build() -> Path:
    """The library."""
    return fake_build.build("fakenvrtc", (Path(__file__).with_suffix(".cpp"),))


class FakeNvrtc:
    """Its state in this process; knows sm_80, sm_90 and sm_121. Its images are readable text."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(build()))
        self._library.fake_nvrtc_reset()

    @staticmethod
    def install(patch: pytest.MonkeyPatch) -> None:
        """Have kvtier find it."""
        patch.setenv("KVTIER_NVRTC_LIBRARY", str(build()))

    def set_minor(self, version: int) -> None:
        """Be NVRTC 12.`version`."""
        self._library.fake_nvrtc_set_minor(version)

    def serve_fake_cuda(self) -> None:
        """Make images that the stand-in for libcuda loads."""
        self._library.fake_nvrtc_serve_fake_cuda()

    def fail(self) -> None:
        """Find an error in every source."""
        self._library.fake_nvrtc_fail()

    @property
    def compiles(self) -> int:
        """How often it compiled."""
        return int(self._library.fake_nvrtc_compiles())
