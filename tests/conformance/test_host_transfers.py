from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvtier._core import Completions
from kvtier.backends.host import HostTransfers
from kvtier.testing.transfer_scene import Place, Scene, dram
from kvtier.testing.transfer_suite import TransferSuite
from kvtier.transfer import Op, Pieces, Side, Unsuitable


class TestHostTransfers(TransferSuite):
    def make(self, completions: Completions, root: Path) -> HostTransfers:
        return HostTransfers(completions)

    def remote(self, nbytes: int, root: Path) -> Place:
        return dram(nbytes)

    def test_a_read_only_target_is_refused(self, stage: Scene) -> None:
        region, memory = dram(4096)
        handle = stage.backend.register(region, memory.toreadonly())
        side = Side((handle,), np.zeros(1, np.uint32), np.zeros(1, np.uint64))
        other = Side((stage.local.handles[0],), side.which, side.offsets)
        stage.backend.prepare(Pieces(Op.READ, other, side, np.array([8], np.uint64)), None)
        with pytest.raises(Unsuitable, match="read-only"):
            stage.backend.prepare(Pieces(Op.WRITE, other, side, np.array([8], np.uint64)), None)

    def test_a_piece_that_overlaps_its_target_is_refused(self, stage: Scene) -> None:
        handles = (stage.local.handles[0],)
        which = np.zeros(2, np.uint32)
        local = Side(handles, which, np.array([0, 100], np.uint64))
        remote = Side(handles, which, np.array([50, 149], np.uint64))
        with pytest.raises(Unsuitable, match="piece 1 overlap"):
            stage.backend.prepare(Pieces(Op.READ, local, remote, np.array([50, 50], np.uint64)), 0)
