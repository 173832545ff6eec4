from __future__ import annotations

from pathlib import Path

from kvtier._core import Completions
from kvtier.backends.host import HostTransfers
from kvtier.testing.faulty_transfers import FaultyTransfers
from kvtier.testing.transfer_scene import Place, dram
from kvtier.testing.transfer_suite import TransferSuite
from kvtier.transfer import TransferBackend
from kvtier.transfer_wrappers import (
    ChecksummedTransfers,
    CountedTransfers,
    ThrottledTransfers,
    WrappedTransfers,
)


class OverMemory(TransferSuite):
    model_examples = 10

    def remote(self, nbytes: int, root: Path) -> Place:
        return dram(nbytes)


class TestThrottledTransfers(OverMemory):
    def make(self, completions: Completions, root: Path) -> TransferBackend:
        return ThrottledTransfers(completions, HostTransfers, bytes_per_s=5e9, latency_s=1e-4)


class TestCountedTransfers(OverMemory):
    def make(self, completions: Completions, root: Path) -> TransferBackend:
        return CountedTransfers(completions, HostTransfers)


class TestChecksummedTransfers(OverMemory):
    def make(self, completions: Completions, root: Path) -> TransferBackend:
        return ChecksummedTransfers(completions, HostTransfers)


class TestFaultyTransfersThatAreToldNothing(OverMemory):
    def make(self, completions: Completions, root: Path) -> TransferBackend:
        return FaultyTransfers(completions, HostTransfers)


class TestOneAroundTheOther(OverMemory):
    def make(self, completions: Completions, root: Path) -> WrappedTransfers:
        return CountedTransfers(
            completions,
            lambda inner: ChecksummedTransfers(inner, HostTransfers),
        )
