from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from kvtier._core import Completions
from kvtier.backends.posix_transfers import PosixTransfers
from kvtier.testing.transfer_scene import Place
from kvtier.testing.transfer_suite import TransferSuite
from kvtier.transfer import TransferBackend
from kvtier.types import Region, RegionKind


class TestFiles(TransferSuite):
    kind: ClassVar[RegionKind] = RegionKind.FILE
    numbers: ClassVar[itertools.count[int]] = itertools.count()

    def make(self, completions: Completions, root: Path) -> PosixTransfers:
        return PosixTransfers(completions)

    def remote(self, nbytes: int, root: Path) -> Place:
        path = root / f"file{next(self.numbers)}"
        path.write_bytes(bytes(nbytes))
        return Place(Region(self.kind, 0, nbytes), path)

    def read_remote(self, place: Place, offset: int, nbytes: int) -> bytes:
        with open(place.source, "rb") as file:
            file.seek(offset)
            return file.read(nbytes)

    def write_remote(self, place: Place, offset: int, data: bytes) -> None:
        with open(place.source, "r+b") as file:
            file.seek(offset)
            file.write(data)

    def unsuitable(self, backend: TransferBackend, root: Path) -> Sequence[Place]:
        folder = Place(Region(self.kind, 0, 4096), root)
        return [*super().unsuitable(backend, root), folder]


class TestBlockDevices(TestFiles):
    """A file of fixed size, as a device is."""

    kind = RegionKind.BLK


class TestThreads(TestFiles):
    """What runs where the kernel allows no io_uring; without syncs, which take most of the time."""

    def make(self, completions: Completions, root: Path) -> PosixTransfers:
        return PosixTransfers(completions, method="threads", durable=False)
