"""A GPU's copies and kernels against plain copies of the same run; a step of the GPU's validation each.

The steps are those of `tests/gpu/validate.py`, each in a process of its own, as there.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from result import Result, Setting

from kvtier._core import CudaDevice
from kvtier.errors import KvtierError

VALIDATE = Path(__file__).resolve().parents[1] / "gpu" / "validate.py"
SECONDS = 60.0
"""For the measuring of one line."""


@dataclass(frozen=True)
class Line:
    """What one line of output says, and where its figures are."""

    step: str
    unit: str
    value: str
    """Its name among the figures; a dot leads into a table of them."""
    limit: str
    limit_is: str
    is_more_better: bool = True
    ratio: str = "ratio"


LINES: dict[str, tuple[Line, ...]] = {
    "gpu_d2h": (
        Line("blocks to host", "GB/s", "chosen_gb_s", "plain_gb_s", "plain copy; blocks of 2 MiB"),
        Line("small pages to host", "GB/s", "chosen_gb_s", "plain_gb_s", "plain copy; 2 KiB runs"),
    ),
    "gpu_h2d": (
        Line(
            "blocks to device", "GB/s", "chosen_gb_s", "plain_gb_s", "plain copy; blocks of 2 MiB"
        ),
        Line(
            "small pages to device", "GB/s", "chosen_gb_s", "plain_gb_s", "plain copy; 2 KiB runs"
        ),
    ),
    "gpu_duplex": (
        Line(
            "duplex",
            "GB/s",
            "gb_s.chosen",
            "ideal_gb_s",
            "both directions in the time of the slower plain copy alone",
        ),
    ),
    "gpu_gather": (
        Line("gather within", "GB/s", "best_gb_s", "plain_gb_s", "plain copy within the device"),
    ),
    "gpu_scatter": (
        Line("scatter within", "GB/s", "best_gb_s", "plain_gb_s", "plain copy within the device"),
    ),
    "gpu_pipeline_exposed": (
        Line(
            "pipeline",
            "of the transfer",
            "exposed.chosen",
            "",
            "the transfer by itself; the ratio must be at most 0.1",
            is_more_better=False,
        ),
    ),
    "gpu_interference": (
        Line(
            "interference",
            "times",
            "slowed.chosen",
            "",
            "the decode-like loop alone; the ratio must be at most 1.05",
            is_more_better=False,
        ),
    ),
    "gpu_quant": (
        Line(
            "quantise",
            "GB/s",
            "value_gb_s",
            "plain_gb_s",
            "plain copy within the device of what is read",
        ),
    ),
    "gpu_hot": (Line("hot", "GB/s", "fetch_gb_s", "plain_gb_s", "plain copy of as many bytes"),),
}


def run(wanted: set[str], setting: Setting) -> Iterator[Result]:
    has_device = bool(CudaDevice.count())
    for name, lines in LINES.items():
        if name not in wanted:
            continue
        for line in lines:
            figures = _figures(line.step, setting.gpu_scale) if has_device else None
            yield _result(name, line, figures)


def _figures(step: str, scale: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "figures.json"
        options = ["--run-step", step, "--scale", scale]
        options += ["--seconds", str(SECONDS), "--figures", str(target)]
        done = subprocess.run(
            [sys.executable, str(VALIDATE), *options],
            check=False,
            stdout=sys.stderr,
            timeout=2 * SECONDS,
        )
        if done.returncode:
            raise KvtierError(f"{step}: exit status {done.returncode}")
        found: dict[str, Any] = json.loads(target.read_text())
    if found.get("wrong"):
        raise KvtierError(f"{step}: wrong bytes: {found['wrong']}")
    return found


def _result(name: str, line: Line, figures: dict[str, Any] | None) -> Result:
    """The line; without figures one that says that there is no device."""

    def number(path: str) -> float | None:
        found: Any = figures
        for part in path.split(".") if path else ():
            found = found.get(part)
        return found if path else 1.0

    return Result(
        bench=name,
        value=number(line.value) if figures else None,
        unit=line.unit,
        higher_is_better=line.is_more_better,
        limit=number(line.limit) if figures else None,
        limit_is=line.limit_is if figures else "no device",
        rounds=figures["rounds"] if figures else 0,
        ratio=figures[line.ratio] if figures else None,
        more={"case": line.step, **({"figures": figures} if figures else {})},
    )
