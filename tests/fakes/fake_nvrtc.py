"""Builds the stand-in for NVRTC, and has it fail and tell what it was asked."""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest


@functools.cache
def build() -> Path:
    """The library, compiled once for each process of tests."""
    folder = tempfile.mkdtemp(prefix="kvtier-fake-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    library = Path(folder) / "libfakenvrtc.so"
    options = ["-std=c++20", "-O0", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    source = Path(__file__).with_suffix(".cpp")
    compiler = os.environ.get("CXX", "c++")
    subprocess.run([compiler, *options, source, "-o", library], check=True)
    return library


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

    def fail(self) -> None:
        """Find an error in every source."""
        self._library.fake_nvrtc_fail()

    @property
    def compiles(self) -> int:
        """How often it compiled."""
        return int(self._library.fake_nvrtc_compiles())
