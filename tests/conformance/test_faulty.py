from __future__ import annotations

from pathlib import Path

from kvtier.backends.memory import MemoryBackend, MemoryOptions
from kvtier.testing.backend_suite import BackendSuite
from kvtier.testing.faults import FaultyBackend


class TestFaultyBackendThatIsToldNothing(BackendSuite):
    def make(self, root: Path) -> FaultyBackend:
        return FaultyBackend(MemoryBackend(MemoryOptions(capacity=32 << 20)))
