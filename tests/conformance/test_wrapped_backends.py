from __future__ import annotations

from pathlib import Path

from kvtier.backend import Backend
from kvtier.backends.memory import MemoryBackend, MemoryOptions
from kvtier.testing.backend_suite import BackendSuite
from kvtier.wrappers import Checksummed, Counted, Throttled


def memory() -> MemoryBackend:
    return MemoryBackend(MemoryOptions(capacity=32 << 20, prefault=False))


class TestThrottled(BackendSuite):
    def make(self, root: Path) -> Backend:
        return Throttled(memory(), bytes_per_s=50e9, latency_s=1e-6)


class TestCounted(BackendSuite):
    def make(self, root: Path) -> Backend:
        return Counted(memory())


class TestChecksummed(BackendSuite):
    def make(self, root: Path) -> Backend:
        return Checksummed(memory())
