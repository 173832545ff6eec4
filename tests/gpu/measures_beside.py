"""What copies and compute cost each other: interference, both directions at once, layered loads.

Wall seconds between two waits for the device where several things run at once, else its own.
"""

from __future__ import annotations

import importlib.util
import math
import statistics
import time
from typing import Any

import numpy as np
from gpu_machine import copy_bytes, wait
from layouts import Shape
from measures import Figures, chosen_ways, layouts, rate, sound
from plan_checks import Way
from rig import OutOfTime, PagedOnDevice, Rig, TimeBox, Work, take_turns, wall_s

from kvtier._core import DeviceJob
from kvtier.backends.cuda_arguments import CopyArgs, FastDiv

DUPLEX_GOAL = 0.94
"""Of the time in which the slower direction alone does its part by a plain copy."""
SLOWED_GOAL = 1.05
"""What a decode-like loop takes beside copies, of what it takes alone."""
EXPOSED_GOAL = 0.10
"""Of the transfer, in a load by layers whose compute takes longer."""
COMPUTE_PER_TRANSFER = 1.5
"""A layer's compute, in times of its share of the transfer."""
LAUNCHES_MAX = 256
GEMM_MIN = 1024
COPY_TIMES = 2
COVERED_PART = 0.5
"""Of the copies' time: they have begun while the host still puts more on the streams."""
_VECTOR_BYTES = 16
_BLOCK = 512


class MemoryBound:
    """A stand-in for decode: a kernel on every multiprocessor that only moves device memory."""

    def __init__(self, rig: Rig, nbytes: int) -> None:
        page_bytes = 4096
        pages = max(1, nbytes // page_bytes)
        source, target = rig.memory(pages * page_bytes), rig.memory(pages * page_bytes)
        entries = np.empty((pages, 2), np.int64)
        entries[:, 0] = rig.rng.permutation(pages) * page_bytes
        entries[:, 1] = target + np.arange(pages) * page_bytes
        vectors = page_bytes // _VECTOR_BYTES
        self._arguments = bytes(
            CopyArgs(
                planes=rig.upload(np.array([source], np.uint64)),
                pages=rig.upload(entries),
                row_stride=page_bytes,
                col_stride=page_bytes,
                stored_plane_stride=page_bytes,
                stored_row_stride=page_bytes,
                stored_col_stride=page_bytes,
                total=pages * vectors,
                run_bytes=page_bytes,
                vectors=FastDiv(vectors),
                cols=FastDiv(1),
                rows=FastDiv(1),
                plane_count=FastDiv(1),
            )
        )
        self._device = rig.device
        self._grid = 4 * rig.device.sm_count

    def launch(self, stream: int) -> DeviceJob:
        """Once, on that stream."""
        return self._device.launch(
            "kvtier_gather_v16", self._grid, _BLOCK, 0, self._arguments, None, stream
        )


def own_ways(rig: Rig, kv: PagedOnDevice, found: Figures) -> dict[str, tuple[Way, Way]]:
    """Ways out and in that copy right: each path as it is used without being asked for more, and
    ``chosen``, what the library takes by itself. What is wrong with the others goes into `found`."""
    paths = ("dma", "staged", "direct") if rig.device.kernels else ("dma",)
    ways = {path: (Way(path), Way(path)) for path in paths} | {"chosen": chosen_ways(rig, kv)}
    found["chosen"] = " out, ".join(map(str, ways["chosen"])) + " in"
    return {
        name: (out, into)
        for name, (out, into) in ways.items()
        if sound(kv, True, [out], found, 8) and sound(kv, False, [into], found, 8)
    }


def duplex(rig: Rig, box: TimeBox) -> Figures:
    """Pages out and pages in at the same time.

    `ratio` is that of the ways that the library takes by itself, to the slower plain copy alone.
    """
    layout, shape = layouts(rig)["blocks of all layers"]
    half = Shape(shape.layers, max(2, shape.pages // 2), shape.tokens, shape.heads, shape.run_bytes)
    out, into = PagedOnDevice(rig, layout, half), PagedOnDevice(rig, layout, half)
    nbytes, device = out.nbytes, rig.device
    host, memory = [rig.host(nbytes) for _ in range(2)], [rig.memory(nbytes) for _ in range(2)]

    def plain_out() -> DeviceJob:
        return copy_bytes(device, host[0], memory[0], nbytes)

    def plain_into() -> DeviceJob:
        return copy_bytes(device, memory[1], host[1], nbytes)

    works: dict[str, Work] = {
        "plain d2h": lambda turn: wall_s(lambda: [plain_out()]),
        "plain h2d": lambda turn: wall_s(lambda: [plain_into()]),
        "plain both": lambda turn: wall_s(lambda: [plain_out(), plain_into()]),
    }
    found: Figures = {}
    ways = own_ways(rig, out, found)
    for name, (there, back) in ways.items():
        works[name] = lambda turn, there=there, back=back: wall_s(  # type: ignore[misc]
            lambda: [out.gather(there, turn), into.scatter(back, turn)]
        )
    times = take_turns(works, rig.sizes.rounds, box)
    ideal_s = max(times.pop("plain d2h"), times.pop("plain h2d"))
    plain_s = times.pop("plain both")
    of_ideal = {name: round(ideal_s / seconds, 4) for name, seconds in times.items()}
    return found | {
        "nbytes_each_way": nbytes,
        "ideal_gb_s": rate(2 * nbytes, ideal_s),
        "plain_both_of_ideal": round(ideal_s / plain_s, 4),
        "gb_s": {name: rate(2 * nbytes, seconds) for name, seconds in times.items()},
        "ratio": of_ideal.get("chosen"),
        "of_ideal": of_ideal,
    }


def interference(rig: Rig, box: TimeBox) -> Figures:
    """How much longer a decode-like loop takes beside copies in both directions.

    `ratio` is that of the ways that the library takes by itself; `covered` says in which part of
    the rounds the copies outlasted the loop.
    """
    if not rig.device.kernels:
        raise ValueError(f"no kernels: {rig.device.no_kernels}")
    layout, shape = layouts(rig)["page by layer"]
    half = Shape(shape.layers, max(2, shape.pages // 2), shape.tokens, shape.heads, shape.run_bytes)
    out, into = PagedOnDevice(rig, layout, half), PagedOnDevice(rig, layout, half)
    stream, loop = rig.stream(), MemoryBound(rig, rig.sizes.copy_bytes)
    covered: dict[str, list[bool]] = {}

    def run_loop(count: int) -> float:
        jobs = [loop.launch(stream) for _ in range(count)]
        wait(jobs[-1])
        return statistics.median(job.elapsed_s() for job in jobs)

    loop_s = take_turns({"loop": lambda turn: run_loop(3)}, 5, box.part(4))["loop"]
    works: dict[str, Work] = {}
    found: Figures = {}
    ways = own_ways(rig, out, found)
    for name, (there, back) in ways.items():

        def begin(turn: int, there: Way = there, back: Way = back) -> list[DeviceJob]:
            copies = [
                (out.gather(there, turn), into.scatter(back, turn)) for _ in range(COPY_TIMES)
            ]
            return [job for both in copies for job in both]

        copy_s = take_turns(
            {"copy": lambda turn, begin=begin: wall_s(lambda: begin(turn))},  # type: ignore[misc]
            3,
            box.part(4),
        )["copy"]
        count = min(LAUNCHES_MAX, max(1, int(COVERED_PART * copy_s / loop_s)))
        covered[name] = []

        def beside(turn: int, name: str = name, count: int = count, begin: Any = begin) -> float:
            copies = begin(turn)
            seconds = run_loop(count)
            covered[name].append(not all(job.is_done() for job in copies))
            for job in copies:
                wait(job)
            return seconds

        works[f"{name} alone"] = lambda turn, count=count: run_loop(count)  # type: ignore[misc]
        works[name] = beside
    times = take_turns(works, rig.sizes.rounds, box)
    slowed = {name: round(times[name] / times[f"{name} alone"], 4) for name in ways}
    try:
        gemm = _gemm(rig, box, out, into, ways)
    except (OutOfTime, RuntimeError) as error:  # torch's own troubles are not ours
        gemm = {"not measured": str(error)}
    return found | {
        "loop_ms": round(loop_s * 1e3, 4),
        "slowed": slowed,
        "covered": {name: round(sum(each) / len(each), 2) for name, each in covered.items()},
        "ratio": slowed.get("chosen"),
        "gemm": gemm,
    }


def _gemm(
    rig: Rig,
    box: TimeBox,
    out: PagedOnDevice,
    into: PagedOnDevice,
    ways: dict[str, tuple[Way, Way]],
) -> Figures:
    """The same beside a matrix product, where torch has CUDA."""
    if box.left_s <= 0:
        return {"not measured": "the time was over"}
    if rig.sizes.gemm < GEMM_MIN or importlib.util.find_spec("torch") is None:
        return {"not measured": "no torch, or too small"}
    import torch

    if not torch.cuda.is_available():
        return {"not measured": "torch has no CUDA"}
    side = rig.sizes.gemm
    left, right = (torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    result = torch.empty_like(left)

    def products(turn: int, both: tuple[Way, Way] | None) -> float:
        copies = [out.gather(both[0], turn), into.scatter(both[1], turn)] if both else []
        begin, end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        begin.record()
        for _ in range(8):
            torch.mm(left, right, out=result)
        end.record()
        end.synchronize()
        for job in copies:
            wait(job)
        return float(begin.elapsed_time(end)) / 1e3

    works: dict[str, Work] = {"alone": lambda turn: products(turn, None)}
    for name, both in ways.items():
        works[name] = lambda turn, both=both: products(turn, both)  # type: ignore[misc]
    times = take_turns(works, rig.sizes.rounds, box)
    alone_s = times.pop("alone")
    tflops = 8 * 2 * side**3 / alone_s / 1e12
    slowed = {name: round(seconds / alone_s, 4) for name, seconds in times.items()}
    return {"tflops_alone": round(tflops, 1), "slowed": slowed}


def pipeline(rig: Rig, box: TimeBox) -> Figures:
    """A load by layers, each layer's compute behind its event; `ratio` is exposed over transfer
    of the way that the library takes by itself.

    Exposed is what the whole takes longer than its compute alone; the transfer is timed alone. Both
    include the host's part.
    """
    if not rig.device.kernels:
        raise ValueError(f"no kernels: {rig.device.no_kernels}")
    layout, shape = layouts(rig)["page by layer"]
    kv = PagedOnDevice(rig, layout, shape, is_by_layer=True)
    layers, stream = shape.layers, kv.stream
    loop = MemoryBound(rig, min(kv.nbytes, rig.sizes.copy_bytes))
    found: Figures = {}
    ways = {name: back for name, (_, back) in own_ways(rig, kv, found).items()}
    loads = take_turns(
        {
            name: lambda turn, way=way: wall_s(  # type: ignore[misc]
                lambda: [kv.scatter(way, turn)]
            )
            for name, way in ways.items()
        },
        rig.sizes.rounds,
        box.part(3),
    )

    def compute(count: int, job: DeviceJob | None = None) -> None:
        for layer in range(layers):
            if job is not None:
                job.order_after(stream, layer)
            for _ in range(count):
                loop.launch(stream)
        rig.device.synchronize(stream)

    def timed(count: int, way: Way | None, turn: int) -> float:
        begin_s = time.perf_counter()
        job = kv.scatter(way, turn) if way else None
        compute(count, job)
        seconds = time.perf_counter() - begin_s
        if job is not None:
            wait(job)
        return seconds

    once_s = (
        take_turns({"once": lambda turn: timed(1, None, turn)}, 5, box.part(3))["once"] / layers
    )
    slowest_s = max(loads.values()) / layers
    count = min(
        LAUNCHES_MAX // layers or 1, max(1, math.ceil(COMPUTE_PER_TRANSFER * slowest_s / once_s))
    )
    works: dict[str, Work] = {"compute": lambda turn: timed(count, None, turn)}
    for name, way in ways.items():
        works[name] = lambda turn, way=way: timed(count, way, turn)  # type: ignore[misc]
    times = take_turns(works, rig.sizes.rounds, box)
    compute_s = times.pop("compute")
    exposed = {
        name: round(max(0.0, seconds - compute_s) / loads[name], 4)
        for name, seconds in times.items()
    }
    return found | {
        "layers": layers,
        "nbytes": kv.nbytes,
        "launches_per_layer": count,
        "compute_per_transfer": round(compute_s / max(loads.values()), 3),
        "load_gb_s": {name: rate(kv.nbytes, seconds) for name, seconds in loads.items()},
        "transfer_ms": {name: round(seconds * 1e3, 4) for name, seconds in loads.items()},
        "ratio": exposed.get("chosen"),
        "exposed": exposed,
    }
