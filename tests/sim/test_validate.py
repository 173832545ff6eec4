"""The validation of a GPU as a program: without a device, and on the stand-in for its driver.

Figures of the stand-in mean nothing; that every step comes to its end and finds right bytes does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fake_cuda
from steps import STEPS

ROOT = Path(__file__).resolve().parents[2]
VALIDATE = ROOT / "tests" / "gpu" / "validate.py"
BENCHES = ROOT / "tests" / "bench" / "run.py"
CHECKS = ("copy kernels", "computing kernels", "plans")


def run(
    library: Path | str, *arguments: str, program: Path = VALIDATE, path: str = os.environ["PATH"]
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(program), *arguments],
        env={**os.environ, "KVTIER_CUDA_LIBRARY": str(library), "PATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def validate(
    library: Path | str, folder: Path, *arguments: str, path: str = os.environ["PATH"]
) -> tuple[int, str, dict[str, Any]]:
    """Exit status, last line of the output, and the JSON."""
    target = folder / "report.json"
    done = run(library, "--json", str(target), *arguments, path=path)
    assert done.stdout, done.stderr
    return done.returncode, done.stdout.splitlines()[-1], json.loads(target.read_text())


def test_without_a_device_it_says_so(tmp_path: Path) -> None:
    status, last, report = validate("/nonexistent", tmp_path)
    assert status == 0
    assert last.startswith("There is no device: no CUDA driver")
    assert report["device"] == "no device"
    assert not report["steps"]
    assert {ratio["is_reached"] for ratio in report["ratios"].values()} == {None}


def test_every_step_comes_to_its_end_on_the_stand_in(tmp_path: Path) -> None:
    names = [name for name in STEPS if name != "sanitized"]  # the tool would want a real device
    status, _, report = validate(
        fake_cuda.build(), tmp_path, "--scale", "smallest", "--only", ",".join(names)
    )
    steps = report["steps"]
    assert list(steps) == names
    assert {step["status"] for step in steps.values()} == {"ok"}, steps
    assert status == 0
    assert report["device"] == "Fake GPU"
    assert steps["environment"]["figures"]["device"] == "Fake GPU"
    for name in CHECKS:
        figures = steps[name]["figures"]
        assert figures["passed"] > 0, name
        assert figures["wrong_count"] == figures["not_run"] == 0, name
    for name, ratio in report["ratios"].items():
        assert isinstance(ratio["value"], float), name
        assert ratio["is_reached"] is None, name  # not a word about speed at this scale


def test_a_step_that_fails_costs_no_other(tmp_path: Path) -> None:
    """A driver that knows none of the kernels: what needs none is measured all the same."""
    library = fake_cuda.build(with_kernels=False)
    names = "copy kernels,pipeline,ceilings"
    status, _, report = validate(library, tmp_path, "--scale", "smallest", "--only", names)
    steps = report["steps"]
    assert status == 1
    assert [steps[name]["status"] for name in names.split(",")] == ["wrong", "failed", "ok"]
    assert steps["copy kernels"]["figures"]["wrong_count"] > 0
    assert report["ratios"]["pipeline_exposed"]["value"] is None


def test_the_sanitizer_runs_a_step_where_there_is_one(tmp_path: Path) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text('#!/bin/sh\necho "$@" >"$0.said"\nshift 4\nexec "$@"\n')
    tool.chmod(0o755)
    status, _, report = validate(
        fake_cuda.build(),
        tmp_path,
        "--scale",
        "smallest",
        "--only",
        "sanitized",
        path=f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
    )
    assert status == 0
    assert report["steps"]["sanitized"]["status"] == "ok"
    assert (tmp_path / "compute-sanitizer.said").read_text().startswith("--tool memcheck")


def test_benchmarks_without_a_device_say_so() -> None:
    names = [
        f"gpu_{name}" for name in ("d2h", "h2d", "duplex", "gather", "scatter", "quant", "hot")
    ]
    names += ["gpu_pipeline_exposed", "gpu_interference"]
    done = run("/nonexistent", "--only", ",".join(names), program=BENCHES)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert {line["bench"] for line in lines} == set(names)
    assert {(line["value"], line["limit_is"]) for line in lines} == {(None, "no device")}


def test_a_benchmark_is_a_step_of_the_validation() -> None:
    done = run(
        fake_cuda.build(), "--gpu-scale", "smallest", "--only", "gpu_gather", program=BENCHES
    )
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout)
    assert line["figures"]["device"] == "Fake GPU"
    assert line["rounds"] == 3
    assert line["ratio"] == line["figures"]["ratio"]
