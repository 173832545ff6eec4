"""Validates kvtier on a GPU in one go: ``python tests/gpu/validate.py``; ``--help`` has the options.

Right bytes first, then figures against plain copies of the same run. Each step has a process of its
own and a share of the time, so that one that fails, hangs or loses the device costs no other. What
goes on is told on standard error; the last thing on standard output is a table, and ``--json`` keeps
all figures. Exit status: 1 if a step failed or found wrong bytes, else 0, also without a device.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), *(str(HERE.parent / name) for name in ("sim", "fakes"))]

from rig import SCALES, TOLD, TimeBox
from steps import GOALS, STEPS

from kvtier._core import CudaDevice

NO_DEVICE = "no device"
STAND_IN = "Fake GPU"
"""The name of the driver's stand-in's devices, of whose figures nothing can be said."""
GRACE_S = 12.0
"""What a step may take beyond its share before it is ended."""
STEP_S_MIN = 3.0
"""With less left, a step is not begun."""
SANITIZER = ("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9")
SANITIZER_PATHS = ("/usr/local/cuda/bin",)
STDERR_LINES = 60
Report = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where all figures go")
    parser.add_argument("--budget-s", type=float, default=540.0, help="for all steps together")
    parser.add_argument(
        "--scale",
        choices=SCALES,
        default="full",
        help="smallest only shows that everything runs; its figures mean nothing",
    )
    parser.add_argument("--only", default="", help="steps, comma-separated; all if not given")
    parser.add_argument("--run-step", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--figures", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run_step:
        return _run_step(arguments.run_step, arguments.scale, arguments.seconds, arguments.figures)
    wanted = [name for name in arguments.only.split(",") if name] or list(STEPS)
    if unknown := sorted(set(wanted) - set(STEPS)):
        parser.error(f"no such step: {', '.join(unknown)}; known: {', '.join(STEPS)}")
    report = _validate(wanted, arguments.scale, arguments.budget_s, arguments.json)
    print(_table(report))
    return (
        1 if any(step["status"] in ("failed", "wrong") for step in report["steps"].values()) else 0
    )


def _validate(wanted: list[str], scale: str, budget_s: float, path: Path | None) -> Report:
    report: Report = {"device": NO_DEVICE, "scale": scale, "steps": {}, "ratios": {}}
    if not CudaDevice.count():
        report["why"] = CudaDevice.missing()
        report["ratios"] = _ratios({}, is_real=False)
        _keep(report, path)
        return report
    try:
        device = CudaDevice(0)
        report["device"] = device.name
        device.close()
    except OSError:
        report["device"] = "CUDA device 0"  # the environment step says what is wrong with it
    is_real = scale == "full" and report["device"] != STAND_IN
    box = TimeBox(budget_s)
    for at, name in enumerate(wanted):
        rest_s = sum(STEPS[each].seconds for each in wanted[at:])
        share_s = max(0.0, box.left_s - GRACE_S) * STEPS[name].seconds / rest_s
        report["steps"][name] = _in_process(name, scale, share_s, box)
        report["ratios"] = _ratios(report["steps"], is_real=is_real)
        _keep(report, path)  # should this be cut short, what there is
    return report


def _in_process(name: str, scale: str, share_s: float, box: TimeBox) -> Report:
    """Run a step in a process of its own, ended when it takes too long."""
    if box.left_s < STEP_S_MIN:
        return {"status": "left out", "why": "the time was over", "seconds": 0.0, "figures": None}
    _progress(f"{name}: up to {share_s:.0f} s ...")
    begin_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.json"
        own = [sys.executable, str(Path(__file__).resolve()), "--run-step", name]
        own += ["--scale", scale, "--seconds", str(share_s), "--figures", str(figures)]
        if name == "sanitized":
            tool = shutil.which(SANITIZER[0]) or shutil.which(
                SANITIZER[0], path=os.pathsep.join(SANITIZER_PATHS)
            )
            if tool is None:
                why = f"there is no {SANITIZER[0]}"
                return {"status": "left out", "why": why, "seconds": 0.0, "figures": None}
            own = [tool, *SANITIZER[1:], *own]
        limit_s = max(1.0, min(share_s + GRACE_S, box.left_s))
        try:
            done = subprocess.run(
                own,
                stderr=subprocess.PIPE,
                stdout=sys.stderr,
                text=True,
                timeout=limit_s,
                check=False,
            )
            why, words = f"exit status {done.returncode}", done.stderr
        except subprocess.TimeoutExpired as error:
            why = f"not done within {limit_s:.0f} s"
            words = error.stderr.decode() if isinstance(error.stderr, bytes) else error.stderr or ""
            done = None
        seconds = round(time.monotonic() - begin_s, 1)
        found = json.loads(figures.read_text()) if figures.exists() else None
    step: Report = {"status": "ok", "seconds": seconds, "figures": found}
    lines = words.strip().splitlines()
    if found is None or done is None or done.returncode:
        if done is None:
            told = [line.removeprefix(TOLD) for line in lines if line.startswith(TOLD)]
            why = ", in ".join([why, *told[-1:]])
        elif lines:
            why = lines[-1]
        step |= {"status": "failed", "why": why, "stderr": lines[-STDERR_LINES:]}
    elif _is_wrong(found):
        step["status"] = "wrong"
    _progress(f"{name}: {step['status']}, {seconds} s {step.get('why', '')}")
    return step


def _is_wrong(found: object) -> bool:
    """Whether there is anything under ``wrong``, at whatever depth, or the device was lost."""
    if not isinstance(found, dict):
        return False
    told = (
        found.get(name) for name in ("wrong", "jit_wrong", "device_failure", "jit_device_failure")
    )
    return any(told) or any(_is_wrong(each) for each in found.values())


def _run_step(name: str, scale: str, seconds: float, path: Path) -> int:
    """In the process of the step."""
    faulthandler.dump_traceback_later(seconds + GRACE_S - 2)  # says where it hangs
    found = STEPS[name].run(SCALES[scale], TimeBox(seconds))
    faulthandler.cancel_dump_traceback_later()
    path.write_text(json.dumps(found))
    return 0


def _ratios(steps: Report, *, is_real: bool) -> Report:
    """Each figure that must be reached, and whether it is; None if nothing can be said."""
    ratios: Report = {}
    for name, goal in GOALS.items():
        value = ((steps.get(goal.step) or {}).get("figures") or {}).get("ratio")
        ratios[name] = {
            "value": value,
            "must_be": "at least" if goal.is_at_least else "at most",
            "goal": goal.limit,
            "of": goal.of,
            "is_reached": goal.is_reached(value) if is_real and value is not None else None,
        }
    return ratios


def _table(report: Report) -> str:
    if report["device"] == NO_DEVICE:
        return f"There is no device: {report['why']}"
    lines = ["", f"{report['device']}, scale {report['scale']}", ""]
    for name, step in report["steps"].items():
        words = step.get("why") or STEPS[name].headline(step["figures"])
        lines.append(f"{name:<22} {step['status']:<8} {step['seconds']:>6} s  {words}")
    lines.append("")
    if report["scale"] != "full":
        lines += ["At this scale everything runs and no figure means anything.", ""]
    for name, ratio in report["ratios"].items():
        value = "-" if ratio["value"] is None else f"{ratio['value']:.3f}"
        mark = {True: "reached", False: "MISSED", None: "says nothing"}[ratio["is_reached"]]
        lines.append(
            f"{name:<22} {value:>8} {ratio['must_be']} {ratio['goal']:.2f}  {mark:<12} of {ratio['of']}"
        )
    return "\n".join(lines)


def _keep(report: Report, path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps(report, indent=1) + "\n")


def _progress(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
