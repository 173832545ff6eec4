"""Which way copies take between a device's pages and host memory, by what each costs on this machine.

Three ways lead from pages to a segment and back. ``dma``: the copy engine takes each contiguous run,
at no cost to the processors of the device, but slowly where runs are short. ``staged``: a kernel
gathers into memory of the device, from where whole segments go. ``zero_copy``: a kernel reads or
writes host memory itself. What they cost is measured once for each model of device and driver, in
less than a tenth of a second, and kept in a file.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import statistics
import tempfile
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from kvtier._core import CudaDevice, DevicePlan

Direction = Literal["gather", "scatter"]

VERSION = 1  # of the file
RUN_SIZES = (2 << 10, 8 << 10, 32 << 10, 128 << 10, 2 << 20)
SAMPLE_BYTES = 8 << 20  # of one measurement: 160 us at 50 GB/s
ROUNDS = 3


class Costs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds per byte, by direction, way and run size (`RUN_SIZES`)."""

    version: int
    gather: dict[str, tuple[float, ...]]
    scatter: dict[str, tuple[float, ...]]

    def choose(self, direction: Direction, run_bytes: int) -> str:
        """The cheapest way for runs of that size: as measured for the largest size not above it."""
        at = max(0, sum(size <= run_bytes for size in RUN_SIZES) - 1)
        ways = self.gather if direction == "gather" else self.scatter
        return min(ways, key=lambda way: ways[way][at])


def costs_of(device: CudaDevice) -> Costs:
    """What the ways cost on this device, from the file or measured now.

    Raises:
        OSError: the device fails.
    """
    if not device.kernels:
        only = {"dma": (0.0,) * len(RUN_SIZES)}
        return Costs(VERSION, only, only)
    path = _file_of(device)
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        costs = msgspec.json.decode(path.read_bytes(), type=Costs)
        if costs.version == VERSION and _is_complete(costs):
            return costs
    costs = _measure(device)
    with contextlib.suppress(OSError):  # measured again next time
        _write(path, msgspec.json.encode(costs))
    return costs


def _is_complete(costs: Costs) -> bool:
    return all(
        ways and all(len(each) == len(RUN_SIZES) for each in ways.values())
        for ways in (costs.gather, costs.scatter)
    )


def _file_of(device: CudaDevice) -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    what = f"{device.name}|{device.driver_version}|{device.kernels}|{device.compute_capability}"
    name = hashlib.sha256(what.encode()).hexdigest()[:16]
    return Path(home) / "kvtier" / f"cuda-paths-{name}.json"


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
    os.replace(file.name, path)


def _measure(device: CudaDevice) -> Costs:
    pages = device.allocate(SAMPLE_BYTES)
    try:
        host = device.allocate_host(SAMPLE_BYTES)
        try:
            stream = device.create_stream()
            try:
                gather = _measure_ways(device, pages, host, stream, "gather")
                scatter = _measure_ways(device, pages, host, stream, "scatter")
            finally:
                device.destroy_stream(stream)
        finally:
            device.free_host(host)
    finally:
        device.free(pages)
    return Costs(VERSION, gather, scatter)


def _measure_ways(
    device: CudaDevice, pages: int, host: int, stream: int, direction: Direction
) -> dict[str, tuple[float, ...]]:
    ways: dict[str, list[float]] = {"dma": [], "staged": [], "zero_copy": []}
    for run_bytes in RUN_SIZES:
        count = SAMPLE_BYTES // run_bytes
        plan = DevicePlan(
            device,
            np.array([pages], np.uint64),
            count,
            run_bytes,
            1,
            run_bytes,
            1,
            run_bytes,
            run_bytes,
        )
        # Every second page, then the others: neighbours would be joined into longer runs.
        ids = np.concatenate([np.arange(0, count, 2), np.arange(1, count, 2)]).astype(np.int64)
        arguments = (
            ids,
            np.array([0, count], np.uint32),
            np.array([[host]], np.uint64),
            np.array([[0, 1]], np.uint64),
        )
        copy = plan.gather if direction == "gather" else plan.scatter
        for way, costs in ways.items():
            times = []
            for _ in range(ROUNDS + 1):
                job = copy(*arguments, way, stream)
                job.wait(10.0)
                times.append(job.elapsed_s())
            costs.append(statistics.median(times[1:]) / SAMPLE_BYTES)
    return {way: tuple(costs) for way, costs in ways.items()}
