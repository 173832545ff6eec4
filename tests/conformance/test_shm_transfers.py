from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier._core import Completions
from kvtier.backends.shm import ShmTransfers
from kvtier.shared_pool import SharedPool
from kvtier.testing.transfer_scene import Place
from kvtier.testing.transfer_suite import TransferSuite
from kvtier.types import Region, RegionKind


class TestShmTransfers(TransferSuite):
    is_peer = True

    @pytest.fixture(autouse=True)
    def pool(self) -> Iterator[None]:
        with SharedPool(64 << 20, prefault=False) as self._pool:
            yield
        del self._pool

    def make(self, completions: Completions, root: Path) -> ShmTransfers:
        return ShmTransfers(completions)

    def remote(self, nbytes: int, root: Path) -> Place:
        offset = self._pool.allocate(nbytes)
        assert offset is not None
        region = Region(RegionKind.DRAM, self._pool.address + offset, nbytes)
        return Place(region, self._pool.view(offset, nbytes))
