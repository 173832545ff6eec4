from __future__ import annotations

from pathlib import Path

from kvtier.backends.memory import MemoryBackend, MemoryOptions
from kvtier.testing.backend_suite import AddressableSuite


class TestMemoryBackend(AddressableSuite):
    def make(self, root: Path) -> MemoryBackend:
        return MemoryBackend(MemoryOptions(capacity=32 << 20))
