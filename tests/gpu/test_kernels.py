"""What the simulator passes, a GPU passes: every case of every kernel, and plans on every path."""

from __future__ import annotations

from collections.abc import Iterator

import plan_checks
import pytest
from gpu_machine import GpuMachine
from kernel_checks import ALL, needs_bulk

from kvtier._core import CudaDevice

HOPPER = (9, 0)
CASES = sorted(
    plan_checks.cases(has_kernels=True, has_bulk=True),
    key=lambda case: case.way.reaches_far(on_device=case.on_device),
)
"""Last those that a device may be lost by."""


@pytest.fixture
def machine(device: CudaDevice) -> Iterator[GpuMachine]:
    if not device.kernels:
        pytest.skip(device.no_kernels)
    opened = GpuMachine(device)
    yield opened
    opened.close()


@pytest.mark.parametrize("name", ALL)
def test_kernels_do_on_a_gpu_what_they_do_on_the_simulator(
    device: CudaDevice, machine: GpuMachine, name: str
) -> None:
    if needs_bulk(name) and device.compute_capability < HOPPER:
        pytest.skip("bulk copies need compute capability 9.0")
    ALL[name](machine)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_plans_copy_as_numpy_does(device: CudaDevice, case: plan_checks.PlanCase) -> None:
    if case.way.path != "dma" and not device.kernels:
        pytest.skip(device.no_kernels)
    if case.way.is_bulk and device.compute_capability < HOPPER:
        pytest.skip("bulk copies need compute capability 9.0")
    plan_checks.check(device, case)
