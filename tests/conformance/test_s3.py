from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.backends.s3 import S3Backend, S3Options
from kvtier.testing.backend_suite import BackendSuite
from kvtier.testing.seaweedfs import SeaweedFS


class TestS3Backend(BackendSuite):
    knows_use_order = False
    model_examples = 4

    @pytest.fixture(autouse=True)
    def _server(self, seaweedfs: SeaweedFS) -> None:
        self.server = seaweedfs

    def make(self, root: Path) -> S3Backend:
        url = f"s3://{self.server.bucket}{root}"
        return S3Backend(S3Options(url=url, endpoint=self.server.endpoint, timeout_s=60.0))
