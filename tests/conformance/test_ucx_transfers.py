from __future__ import annotations

from pathlib import Path

from kvtier._core import Completions
from kvtier.backends.ucx import UcxTransfers
from kvtier.testing.transfer_scene import Place, dram
from kvtier.testing.transfer_suite import TransferSuite


class TestUcxOnOneHost(TransferSuite):
    """The transports between processes, which UCX prefers where it may."""

    is_peer = True

    def make(self, completions: Completions, root: Path) -> UcxTransfers:
        return UcxTransfers(completions)

    def remote(self, nbytes: int, root: Path) -> Place:
        return dram(nbytes)


class TestUcxAcrossANetwork(TestUcxOnOneHost):
    """As with a peer elsewhere: the transports that report a lost peer, here TCP."""

    def host_pid(self) -> int | None:
        return None
