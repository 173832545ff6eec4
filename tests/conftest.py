from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvtier.testing.seaweedfs import SeaweedFS


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedFS]:
    """One object store for all tests, and this process as its user."""
    with (
        SeaweedFS(tmp_path_factory.mktemp("seaweedfs")) as server,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in server.environ.items():
            patch.setenv(name, value)
        yield server
