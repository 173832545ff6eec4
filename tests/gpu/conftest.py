"""A real device for the tests here, which are marked `gpu`: `python -m pytest -m gpu`.

Unless that marker is asked for they are left out: a device that is there may be in use.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier._core import CudaDevice

HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    own = [item for item in items if HERE in item.path.parents]
    for item in own:
        item.add_marker(pytest.mark.gpu)
    if own and "gpu" not in str(config.getoption("markexpr")):
        items[:] = [item for item in items if item not in own]
        config.hook.pytest_deselected(items=own)


@pytest.fixture(scope="session", params=["auto", "jit"])
def device(request: pytest.FixtureRequest) -> Iterator[CudaDevice]:
    """The first device, with built-in kernels and with ones compiled on the spot."""
    if not CudaDevice.count():
        pytest.skip(CudaDevice.missing())
    from plan_checks import STAGING_BYTES

    opened = CudaDevice(0, mode=request.param, staging_bytes=STAGING_BYTES)
    yield opened
    opened.close()
