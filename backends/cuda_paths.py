"""Which way copies take between a device's pages and host memory, by what each costs on this machine.

Three ways lead from pages to a segment and back. ``dma``: the copy engines take each contiguous run,
at no cost to the processors of the device, but slowly where runs are short. ``staged``: a kernel
gathers into memory of the device, from where whole segments go. ``direct``: a kernel reads or writes
host memory itself. Both kernels have a variant of bulk copies. What all cost is measured once for
each model of device and driver, in a tenth of a second, and kept in a file.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import statistics
import tempfile
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kvtier._core import CudaDevice, DevicePlan
from kvtier.errors import BackendUnavailable

Direction = Literal["gather", "scatter"]
DIRECTIONS: tuple[Direction, ...] = ("gather", "scatter")

VERSION = 1  # of the file
RUN_SIZES = (2 << 10, 8 << 10, 32 << 10, 128 << 10, 2 << 20)
SAMPLE_BYTES = 8 << 20  # of one measurement: 160 us at 50 GB/s
ROUNDS = 3
WAIT_S = 10.0  # for one measurement; a device that takes longer is not one to measure
DMA_WORTH = 1.15
"""Copy engines leave the processors to the engine: kernels have to be faster by more than this."""
BULK_RUN_BYTES = 512
BULK_UNIT_BYTES = 16
BULK_CAPABILITY = (9, 0)


class Way(NamedTuple):
    """What `DevicePlan.gather` and `scatter` take."""

    path: str
    is_bulk: bool

    @property
    def name(self) -> str:
        """As the file has it."""
        return f"{self.path}_bulk" if self.is_bulk else self.path


DMA = Way("dma", False)
WAYS = {
    way.name: way
    for way in (
        DMA,
        Way("staged", False),
        Way("direct", False),
        Way("staged", True),
        Way("direct", True),
    )
}


class Costs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds per byte, by direction, way and run size (`RUN_SIZES`)."""

    version: int
    gather: dict[str, tuple[float, ...]]
    scatter: dict[str, tuple[float, ...]]

    def ways(self, direction: Direction, run_bytes: int, vector_bytes: int) -> list[Way]:
        """The ways for runs of that size, the best first, ``dma`` always among them.

        Costs are those of the largest measured size not above it. `vector_bytes` is what all
        addresses and strides are a multiple of, up to 16.
        """
        at = max(0, sum(size <= run_bytes for size in RUN_SIZES) - 1)
        measured = self.gather if direction == "gather" else self.scatter
        costs = {WAYS[name]: measured[name][at] for name in measured}
        costs[DMA] /= DMA_WORTH
        is_bulk_open = vector_bytes == BULK_UNIT_BYTES and run_bytes >= BULK_RUN_BYTES
        open_ways = [way for way in costs if is_bulk_open or not way.is_bulk]
        return sorted(open_ways, key=lambda way: costs[way])


def ways_of(
    device: CudaDevice, direction: Direction, plan: DevicePlan, wave_planes: int
) -> list[Way]:
    """The ways that a plan's copies of so many planes a wave may take, the best first.

    Planes that lie one behind the other are one run to the copy engines.

    `KVTIER_CUDA_PATH` names one instead of ``auto``.

    Raises:
        BackendUnavailable: it names none, or one that is not open here.
        OSError: the device fails.
    """
    wanted = os.environ.get("KVTIER_CUDA_PATH", "auto")
    if wanted == "auto":
        if not device.kernels:
            return [DMA]
        run_bytes = plan.run_bytes * min(plan.joined_planes, wave_planes)
        return costs_of(device).ways(direction, run_bytes, plan.vector_bytes)
    if wanted not in WAYS:
        raise BackendUnavailable(
            f"KVTIER_CUDA_PATH is {wanted!r}, expected auto or one of {', '.join(WAYS)}"
        )
    way = WAYS[wanted]
    if way is not DMA and not device.kernels:
        raise BackendUnavailable(f"KVTIER_CUDA_PATH is {wanted!r}, but {device.no_kernels}")
    return [way]


def costs_of(device: CudaDevice) -> Costs:
    """What the ways cost on this device, from the file or measured now.

    Raises:
        OSError: the device fails.
    """
    path = _file_of(device)
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        costs = msgspec.json.decode(path.read_bytes(), type=Costs)
        if costs.version == VERSION and _is_complete(costs):
            return costs
    costs = measure(device)
    device.release_staging()  # the engine may want the memory, and the copies another way
    if len(costs.gather) == len(ways_open(device)):  # else something was in the way this time
        with contextlib.suppress(OSError):  # measured again next time
            write(path, costs)
    return costs


def ways_open(device: CudaDevice) -> list[Way]:
    """The ways among which is chosen on a device.

    Bulk copies of host memory are not among them, only to be had by their name: on some machine
    they may be an error, which would take the engine's context with it.
    """
    if not device.kernels:
        return [DMA]
    has_bulk = device.compute_capability >= BULK_CAPABILITY
    return [way for way in WAYS.values() if not way.is_bulk or (has_bulk and way.path != "direct")]


def measure(device: CudaDevice, sample_bytes: int = SAMPLE_BYTES) -> Costs:
    """Copies of `sample_bytes` in runs of each size, each way, in both directions.

    Ways for which the device has no memory are left out.

    Raises:
        OSError: the device fails.
    """
    with contextlib.ExitStack() as stack:
        pages = device.allocate(sample_bytes)
        stack.callback(device.free, pages)
        host = device.allocate_host(sample_bytes)
        stack.callback(device.free_host, host)
        stream = device.create_stream()
        stack.callback(device.destroy_stream, stream)
        bench = _Bench(device, pages, host, stream, sample_bytes)
        return Costs(VERSION, bench.costs("gather"), bench.costs("scatter"))


class _Bench(NamedTuple):
    device: CudaDevice
    pages: int
    host: int
    stream: int
    nbytes: int

    def costs(self, direction: Direction) -> dict[str, tuple[float, ...]]:
        costs = {}
        for way in ways_open(self.device):
            try:
                costs[way.name] = tuple(self._cost(direction, way, size) for size in RUN_SIZES)
            except OSError as error:
                if error.errno != errno.ENOMEM or way is DMA:
                    raise
        return costs

    def _cost(self, direction: Direction, way: Way, run_bytes: int) -> float:
        count = max(2, self.nbytes // run_bytes)
        run_bytes = min(run_bytes, self.nbytes // count)
        plan = DevicePlan(
            self.device,
            np.array([self.pages], np.uint64),
            count,
            run_bytes,
            1,
            run_bytes,
            1,
            run_bytes,
            run_bytes,
        )
        copy = plan.gather if direction == "gather" else plan.scatter
        times = []
        for _ in range(1 + ROUNDS):
            job = copy(
                _apart(count),
                np.array([0, count], np.uint32),
                np.array([[self.host]], np.uint64),
                np.array([[0, 1]], np.uint64),
                self.stream,
                way.path,
                way.is_bulk,
            )
            if not job.wait(WAIT_S):
                raise OSError(errno.ETIMEDOUT, f"a copy of {job.nbytes} bytes took {WAIT_S} s")
            times.append(job.elapsed_s() / job.nbytes)
        return statistics.median(times[1:])


def _apart(count: int) -> npt.NDArray[np.int64]:
    """All pages, in an order in which no two neighbours follow each other: they would be joined."""
    return np.concatenate([np.arange(0, count, 2), np.arange(1, count, 2)]).astype(np.int64)


def _is_complete(costs: Costs) -> bool:
    return all(
        DMA.name in ways
        and ways.keys() <= WAYS.keys()
        and all(len(each) == len(RUN_SIZES) and min(each) > 0 for each in ways.values())
        for ways in (costs.gather, costs.scatter)
    )


def _file_of(device: CudaDevice) -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    what = f"{device.name}|{device.driver_version}|{device.kernels}|{device.sm_budget}"
    name = hashlib.sha256(what.encode()).hexdigest()[:16]
    return Path(home) / "kvtier" / f"cuda-paths-{name}.json"


def write(path: Path, costs: Costs) -> None:
    """Keep them in a file, which others see whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, partial = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(costs))
        os.replace(partial, path)
    except OSError:
        os.unlink(partial)
        raise
