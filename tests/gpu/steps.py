"""The steps of a GPU's validation, what each must reach, and one of them run in this process.

A step that raises has failed; one that returns ``"wrong"`` with anything in it found wrong bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import measures
import measures_beside
import measures_computing
import plan_checks
from gpu_machine import GpuMachine
from kernel_checks import ALL, COMPUTING, COPIES, needs_bulk, some
from measures import Figures
from rig import Rig, Sizes, TimeBox, tell

from kvtier._core import CudaDevice, cubin_architectures
from kvtier.backends import cuda_paths

Run = Callable[[Sizes, TimeBox], Figures]
HOPPER = (9, 0)
WRONG_MAX = 20
"""Failures that are told; the rest are counted."""


@dataclass(frozen=True)
class Step:
    """One part of the validation, run in a process of its own."""

    run: Run
    seconds: float
    """Its share of the whole, when that is about nine minutes."""
    headline: Callable[[Figures], str]


@dataclass(frozen=True)
class Goal:
    """A figure that a GPU must reach."""

    step: str
    limit: float
    is_at_least: bool
    of: str
    """What the ratio is of what."""

    def is_reached(self, value: float) -> bool:
        """Whether a ratio is good enough."""
        return value >= self.limit if self.is_at_least else value <= self.limit


GOALS: Mapping[str, Goal] = {
    "d2h": Goal("blocks to host", measures.BLOCKS_GOAL, True, "plain copy, blocks of 2 MiB"),
    "h2d": Goal("blocks to device", measures.BLOCKS_GOAL, True, "plain copy, blocks of 2 MiB"),
    "small_d2h": Goal("small pages to host", measures.SMALL_PAGES_GOAL, True, "plain copy, 2 KiB"),
    "small_h2d": Goal(
        "small pages to device", measures.SMALL_PAGES_GOAL, True, "plain copy, 2 KiB"
    ),
    "gather": Goal("gather within", measures.WITHIN_GOAL, True, "plain copy within the device"),
    "scatter": Goal("scatter within", measures.WITHIN_GOAL, True, "plain copy within the device"),
    "duplex": Goal("duplex", measures_beside.DUPLEX_GOAL, True, "slower plain copy alone"),
    "interference": Goal(
        "interference", measures_beside.SLOWED_GOAL, False, "decode-like loop alone"
    ),
    "pipeline_exposed": Goal(
        "pipeline", measures_beside.EXPOSED_GOAL, False, "the transfer by itself"
    ),
    "quantise_int4": Goal(
        "quantise", measures_computing.QUANTISE_GOAL, True, "plain copy of what is read"
    ),
}


def environment(sizes: Sizes, box: TimeBox) -> Figures:
    """What the device is, and which kernels it runs: built-in, then compiled on the spot."""
    device = CudaDevice(0)
    found: Figures = {
        "device": device.name,
        "compute_capability": list(device.compute_capability),
        "sm_count": device.sm_count,
        "driver_version": device.driver_version,
        "has_batch_copy": device.has_batch_copy,
        "cubins": cubin_architectures(),
        "kernels": device.kernels,
        "no_kernels": device.no_kernels,
    }
    begin_s = time.monotonic()
    costs = cuda_paths.measure(device, sizes.calibration_bytes)
    found |= {
        "calibration_s": round(time.monotonic() - begin_s, 3),
        "calibration_run_bytes": cuda_paths.RUN_SIZES,
        "calibration_gb_s": {
            direction: {
                way: [round(1e-9 / each, 3) for each in rates] for way, rates in ways.items()
            }
            for direction, ways in (("gather", costs.gather), ("scatter", costs.scatter))
        },
    }
    device.close()
    begin_s = time.monotonic()
    compiled = CudaDevice(0, mode="jit")
    found |= {
        "jit": compiled.kernels,
        "no_jit": compiled.no_kernels,
        "jit_s": round(time.monotonic() - begin_s, 2),
    }
    if compiled.kernels:
        found |= {f"jit_{key}": value for key, value in _check(compiled, some(2), box).items()}
    compiled.close()
    return found


def correctness(kinds: Iterable[str], sizes: Sizes, box: TimeBox) -> Figures:
    """Every kernel of these kinds as the simulator has it."""
    device = CudaDevice(0)
    names = some(sizes.checks_per_kind) if sizes.checks_per_kind else list(ALL)
    found = _check(device, [name for name in names if name.split("/")[0] in set(kinds)], box)
    device.close()
    return found


def plans(sizes: Sizes, box: TimeBox, *, reach_far: bool = False) -> Figures:
    """Plans on every path; or only those that reach far, which the others leave out."""
    device = CudaDevice(0, staging_bytes=plan_checks.STAGING_BYTES)
    has_bulk = device.compute_capability >= HOPPER
    cases = [
        case
        for case in plan_checks.cases(has_kernels=bool(device.kernels), has_bulk=has_bulk)
        if case.way.reaches_far(on_device=case.on_device) == reach_far
    ]
    cases.sort(key=lambda case: case.way.is_bulk)  # last what may lose the device
    if sizes.checks_per_kind:
        cases = plan_checks.some(cases, 16 * sizes.checks_per_kind)
    found = _passed(
        device, {str(case): partial(plan_checks.check, device, case) for case in cases}, box
    )
    device.close()
    return found


def direct_bulk(sizes: Sizes, box: TimeBox) -> Figures:
    """Bulk copies of host memory: right bytes, then GB/s."""
    device = CudaDevice(0)
    is_there = bool(device.kernels) and device.compute_capability >= HOPPER
    device.close()
    if not is_there:
        return {"not measured": "the device has no bulk copies"}
    checked = plans(sizes, box.part(2), reach_far=True)
    if checked["wrong_count"]:
        return checked
    return checked | measured(measures.direct_bulk, sizes, box)


def sanitized(sizes: Sizes, box: TimeBox) -> Figures:
    """A few checks of each kind; whoever runs this runs it under a tool that watches addresses."""
    device = CudaDevice(0, staging_bytes=plan_checks.STAGING_BYTES)
    found = _check(device, some(2), box)
    device.close()
    return found


def _check(device: CudaDevice, names: Iterable[str], box: TimeBox) -> Figures:
    if not device.kernels:
        raise ValueError(f"no kernels: {device.no_kernels}")
    has_bulk = device.compute_capability >= HOPPER

    def run(name: str) -> None:
        machine = GpuMachine(device)
        try:
            ALL[name](machine)
        finally:
            machine.close()

    chosen = [name for name in names if has_bulk or not needs_bulk(name)]
    return _passed(device, {name: partial(run, name) for name in chosen}, box)


def _passed(device: CudaDevice, checks: Mapping[str, Callable[[], None]], box: TimeBox) -> Figures:
    """One after the other, whatever became of those before, until the device is lost."""
    passed, wrong, ran = 0, {}, 0
    for name, check in checks.items():
        if box.left_s <= 0 or device.failure:
            break
        ran += 1
        tell(name)
        try:
            check()
            passed += 1
        except (AssertionError, OSError, RuntimeError, ValueError) as error:
            wrong[name] = f"{type(error).__name__}: {error}"[:300]
    return {
        "passed": passed,
        "wrong": dict(list(wrong.items())[:WRONG_MAX]),
        "wrong_count": len(wrong),
        "not_run": len(checks) - ran,
        "device_failure": device.failure,
    }


def measured(measure: Callable[[Rig, TimeBox], Figures], sizes: Sizes, box: TimeBox) -> Figures:
    """A measurement on a device of its own."""
    device = CudaDevice(0)
    try:
        with Rig(device, sizes) as rig:
            found = measure(rig, box)
        return {"device": device.name, "kernels": device.kernels, "rounds": box.rounds, **found}
    finally:
        device.close()


def _table(rig: Rig, box: TimeBox) -> Figures:
    return {"rows": measures.table(rig, box, rounds=max(3, rig.sizes.rounds // 4))}


def _checked(found: Figures) -> str:
    words = f"{found['passed']} passed, {found['wrong_count']} wrong"
    return words + (f", {found['not_run']} not run" if found["not_run"] else "")


def _ceilings(found: Figures) -> str:
    names = [name for name in found if name.endswith("_gb_s")]
    return ", ".join(f"{name.removesuffix('_gb_s')} {found[name]} GB/s" for name in names)


def _compared(found: Figures) -> str:
    return f"{found['best_gb_s']} GB/s ({found['best']}), plain {found['plain_gb_s']}" + (
        f"; by itself {found['chosen']}" if "chosen" in found else ""
    )


def _each(found: Figures) -> str:
    return ", ".join(f"{name} {value}" for name, value in found.items())


def _swept(found: Figures) -> str:
    thresholds = [found[f"{direction}_threshold_bytes"] for direction in ("d2h", "h2d")]
    return "copy engines from runs of {} B out, {} B in".format(*thresholds)


STEPS: Mapping[str, Step] = {
    "environment": Step(
        environment,
        30,
        lambda found: f"{found['kernels'] or 'no kernels'}; {found['jit'] or 'no JIT'}",
    ),
    "copy kernels": Step(partial(correctness, tuple(COPIES)), 40, _checked),
    "computing kernels": Step(partial(correctness, tuple(COMPUTING)), 40, _checked),
    "plans": Step(plans, 30, _checked),
    "sanitized": Step(sanitized, 30, _checked),
    "ceilings": Step(partial(measured, measures.ceilings), 15, _ceilings),
    "blocks to host": Step(
        partial(measured, partial(measures.against_plain, is_gather=True)), 15, _compared
    ),
    "blocks to device": Step(
        partial(measured, partial(measures.against_plain, is_gather=False)), 15, _compared
    ),
    "small pages to host": Step(
        partial(measured, partial(measures.against_plain, is_gather=True, is_small=True)),
        15,
        _compared,
    ),
    "small pages to device": Step(
        partial(measured, partial(measures.against_plain, is_gather=False, is_small=True)),
        15,
        _compared,
    ),
    "gather within": Step(
        partial(measured, partial(measures.within, is_gather=True)), 12, _compared
    ),
    "scatter within": Step(
        partial(measured, partial(measures.within, is_gather=False)), 12, _compared
    ),
    "duplex": Step(
        partial(measured, measures_beside.duplex),
        15,
        lambda found: f"{found['chosen']}: " + _each(found["of_ideal"]),
    ),
    "interference": Step(
        partial(measured, measures_beside.interference),
        45,
        lambda found: f"{found['chosen']}: " + _each(found["slowed"]),
    ),
    "pipeline": Step(
        partial(measured, measures_beside.pipeline),
        25,
        lambda found: f"{found['chosen']}: exposed " + _each(found["exposed"]),
    ),
    "quantise": Step(
        partial(measured, measures_computing.quantise),
        20,
        lambda found: f"int4 {found['value_gb_s']} GB/s, plain {found['plain_gb_s']}",
    ),
    "rope": Step(
        partial(measured, measures_computing.rope),
        10,
        lambda found: _each(found["payload_gb_s"]) + " GB/s",
    ),
    "hot": Step(
        partial(measured, measures_computing.hot),
        20,
        lambda found: f"resolve {found['resolve_us']} us, fetch {found['fetch_gb_s']} GB/s",
    ),
    "direct bulk": Step(
        direct_bulk,
        20,
        lambda found: (
            found.get("not measured")
            or (_checked(found) + "; " + _each(found.get("d2h_gb_s", {})) + " GB/s out")
        ),
    ),
    "sweep": Step(partial(measured, measures.sweep), 60, _swept),
    "table": Step(
        partial(measured, _table), 80, lambda found: f"{len(found['rows'])} rows, in the JSON"
    ),
}
"""In this order: what matters most first, should the time not do."""
