from __future__ import annotations

from pathlib import Path

from kvtier.backends.posix import PosixBackend, PosixOptions
from kvtier.testing.backend_suite import BackendSuite


class TestPosixBackend(BackendSuite):
    def make(self, root: Path) -> PosixBackend:
        return PosixBackend(PosixOptions(path=str(root)))
