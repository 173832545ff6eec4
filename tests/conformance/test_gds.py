from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from fake_gds import FakeCufile

from kvtier._core import Completions
from kvtier.backends.gds import GdsTransfers
from kvtier.testing.transfer_scene import Place
from kvtier.testing.transfer_suite import TransferSuite
from kvtier.transfer import TransferBackend
from kvtier.types import Region, RegionKind


class TestGds(TransferSuite):
    """With a stand-in for cuFile, whose GPU memory is host memory."""

    numbers: ClassVar[itertools.count[int]] = itertools.count()

    @pytest.fixture(autouse=True)
    def _libraries(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        FakeCufile.install(monkeypatch)
        fake = FakeCufile()
        before = fake.held_now(), fake.mistakes()
        yield
        fake.reset()
        assert (fake.held_now(), fake.mistakes()) == before

    def make(self, completions: Completions, root: Path) -> TransferBackend:
        return GdsTransfers(completions)

    def remote(self, nbytes: int, root: Path) -> Place:
        path = root / f"file{next(self.numbers)}"
        path.write_bytes(bytes(nbytes))
        return Place(Region(RegionKind.FILE, 0, nbytes), path)

    def read_remote(self, place: Place, offset: int, nbytes: int) -> bytes:
        with open(place.source, "rb") as file:
            file.seek(offset)
            return file.read(nbytes)

    def write_remote(self, place: Place, offset: int, data: bytes) -> None:
        with open(place.source, "r+b") as file:
            file.seek(offset)
            file.write(data)


class TestVram(TestGds):
    """Regions of two GPUs in turn."""

    devices: ClassVar[itertools.cycle[int]] = itertools.cycle((0, 1))

    def local(self, nbytes: int) -> Place:
        place = super().local(nbytes)
        return Place(FakeCufile().own(place.region, next(self.devices)), place.source)


class TestStreams(TestVram):
    def make(self, completions: Completions, root: Path) -> TransferBackend:
        return GdsTransfers(completions, mode="async")


class TestFallback(TestGds):
    """Host memory where there is no cuFile."""

    @pytest.fixture(autouse=True)
    def _no_library(self, _libraries: None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("KVTIER_CUFILE_LIBRARY", "/nonexistent/libcufile.so")

    def make(self, completions: Completions, root: Path) -> TransferBackend:
        return GdsTransfers(completions, fallback=True)
