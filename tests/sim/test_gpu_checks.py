"""The checks that GPUs get, on a device whose driver is the stand-in: they pass, and they can fail."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import plan_checks
import pytest
from fake_cuda import FakeCuda
from gpu_machine import GpuMachine, wait
from kernel_checks import ALL, some

from kvtier._core import CudaDevice, DeviceJob, DevicePlan


@pytest.fixture(scope="module")
def device() -> Iterator[CudaDevice]:
    fake = FakeCuda()
    with pytest.MonkeyPatch.context() as patch:
        fake.install(patch)
        fake.reset()
        mistakes = fake.mistakes()
        opened = CudaDevice(0, staging_bytes=plan_checks.STAGING_BYTES)
        yield opened
        opened.close()
        words = fake.mistake_words()
        assert fake.mistakes() == mistakes, words
        assert not any(fake.held_now())


@pytest.fixture
def machine(device: CudaDevice) -> Iterator[GpuMachine]:
    opened = GpuMachine(device)
    yield opened
    opened.close()


CASES = list(plan_checks.cases(has_kernels=True, has_bulk=True))


@pytest.mark.parametrize("name", some(3))
def test_kernels_pass_on_a_device(machine: GpuMachine, name: str) -> None:
    ALL[name](machine)


@pytest.mark.parametrize("case", plan_checks.some(CASES, 100), ids=str)
def test_plans_pass_on_a_device(device: CudaDevice, case: plan_checks.PlanCase) -> None:
    plan_checks.check(device, case)


def test_a_machine_gives_back_what_was_put(machine: GpuMachine) -> None:
    arrays: list[np.ndarray[Any, Any]] = [
        np.arange(7, dtype=np.uint8),
        np.arange(1000, dtype=np.int64),
        np.empty(0, np.uint8),
    ]
    places = [machine.put(array) for array in arrays]
    for place, array in zip(places, arrays, strict=True):
        assert machine.get(place).tobytes() == array.tobytes()
    machine.clear()


@pytest.mark.parametrize("offset", [-1, 16])
def test_a_write_beside_an_array_is_seen(
    device: CudaDevice, machine: GpuMachine, offset: int
) -> None:
    place = machine.put(np.zeros(16, np.uint8))
    other = machine.put(np.zeros(1, np.uint8))
    machine.flush()
    target, source, length = (np.array([v], np.uint64) for v in (place + offset, other, 1))
    wait(device.copy(target, source, length))
    with pytest.raises(AssertionError, match="beside an array of 16"):
        machine.clear()


class _Shifted(plan_checks.Way):
    """Copies other pages than it is told."""

    def gather(self, plan: DevicePlan, table: plan_checks.Table, *rest: object) -> DeviceJob:
        pages = np.where(table.page_ids > 0, table.page_ids - 1, table.page_ids)
        return super().gather(plan, replace(table, page_ids=pages), *rest)  # type: ignore[arg-type]


def test_a_copy_of_other_pages_is_seen(device: CudaDevice) -> None:
    with pytest.raises(AssertionError, match="the segments"):
        plan_checks.check(device, replace(CASES[0], way=_Shifted("dma")))
