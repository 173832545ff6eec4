"""How every benchmark here measures, and the one form in which it says what it found.

A machine that others use too gives no repeatable seconds, but what runs side by side suffers alike:
so a subject and its limits take turns, in an order that moves on by one each round, and medians are
compared. Processor time is that of all threads of this process.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GB = 1e9


@dataclass(frozen=True, slots=True)
class Setting:
    """What a run of benchmarks was asked for."""

    folder: Path
    """Scratch space on the disk that is measured."""
    threads: int
    """Copy threads, of the subject and of what it is held against."""
    lmcache_python: Path | None = None
    """Interpreter of an environment that has LMCache."""
    lmcache_engine_python: Path | None = None
    """Interpreter of an environment that has vLLM and LMCache."""
    nixl_python: Path | None = None
    """Interpreter of an environment that has NIXL."""
    gpu_scale: str = "full"
    """One of the scales of `tests/gpu/rig.py`."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Cost of one run."""

    wall_s: float
    cpu_s: float


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Work:
    """What takes a turn; `before` prepares it outside the timing."""

    run: Callable[[], Sample | None]
    """Returns a sample only if the work times itself, as another process does."""
    before: Callable[[], object] = _nothing


def take_turns(
    works: Mapping[str, Work], rounds: int, *, in_order: bool = False
) -> dict[str, Sample]:
    """Median cost of each work over `rounds` rounds, after one that does not count.

    `in_order` keeps them in the order given, for works of which one needs the one before.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in works}
    names = list(works)
    for turn in range(rounds + 1):
        first = 0 if in_order else turn % len(names)
        for name in names[first:] + names[:first]:
            works[name].before()
            cpu_s, wall_s = time.process_time(), time.perf_counter()
            own = works[name].run()
            sample = own or Sample(time.perf_counter() - wall_s, time.process_time() - cpu_s)
            if turn:
                samples[name].append(sample)
    costs = {name: median(each) for name, each in samples.items()}
    for name, cost in costs.items():
        quickest_s = min(sample.wall_s for sample in samples[name])
        progress(
            f"  {name}: {cost.wall_s * 1e3:.2f} ms (at best {quickest_s * 1e3:.2f}), "
            f"{cost.cpu_s * 1e3:.2f} ms of CPU"
        )
    return costs


def median(samples: list[Sample]) -> Sample:
    """Wall and processor time, each by its own median."""
    return Sample(
        statistics.median(sample.wall_s for sample in samples),
        statistics.median(sample.cpu_s for sample in samples),
    )


def fastest(times: Mapping[str, Sample]) -> tuple[str, float]:
    """Name and seconds of the quickest."""
    name = min(times, key=lambda each: times[each].wall_s)
    return name, times[name].wall_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One line of output."""

    bench: str
    value: float | None
    """None where the peer is not there to be measured."""
    unit: str
    higher_is_better: bool
    limit: float | None
    """What `value` is held against, in the same unit, measured in the same run if it can be."""
    limit_is: str
    rounds: int
    ratio: float | None = None
    """`value` / `limit` unless the benchmark's name means the inverse."""
    cpu_s_per_gb: float | None = None
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the line."""

    def line(self) -> str:
        ratio = self.ratio
        if ratio is None and self.limit and self.value is not None:
            ratio = self.value / self.limit
        fields: dict[str, Any] = {
            "bench": self.bench,
            "value": _short(self.value),
            "unit": self.unit,
            "higher_is_better": self.higher_is_better,
            "limit": _short(self.limit),
            "limit_is": self.limit_is,
            "ratio": _short(ratio),
            "cpu_s_per_gb": _short(self.cpu_s_per_gb),
            "rounds": self.rounds,
            "load": round(os.getloadavg()[0], 2),
        }
        return json.dumps({**fields, **self.more})


def bandwidth(
    bench: str,
    nbytes: int,
    cost: Sample,
    limit_s: float,
    limit_is: str,
    rounds: int,
    more: Mapping[str, Any] | None = None,
) -> Result:
    """The result of moving `nbytes`, in GB/s of 10^9 bytes."""
    return Result(
        bench=bench,
        value=nbytes / cost.wall_s / GB,
        unit="GB/s",
        higher_is_better=True,
        limit=nbytes / limit_s / GB,
        limit_is=limit_is,
        cpu_s_per_gb=cost.cpu_s / nbytes * GB,
        rounds=rounds,
        more=more or {},
    )


def progress(message: str) -> None:
    """Tell whoever waits."""
    print(message, file=sys.stderr, flush=True)


def _short(number: float | None) -> float | None:
    return None if number is None else float(f"{number:.4g}")
