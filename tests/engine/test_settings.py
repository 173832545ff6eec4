"""The same folder under engines that are set otherwise: a hit where KV is equal, else a miss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import Reference
from engine import Engine, EngineError

PAGE = 128


@pytest.fixture(scope="module")
def folder(
    model: Path, logs: Path, text: list[int], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A cache folder in which another engine left the prompt."""
    folder = tmp_path_factory.mktemp("settings")
    with Engine(model, config(folder), log=logs / "settings") as engine:
        assert engine.generate(text[:660])[0]["cached"] == 0
    return folder


def config(folder: Path, memory: str = "1 GiB", **vllm: Any) -> dict[str, Any]:
    return {
        "tiers": [
            {"kind": "memory", "capacity": memory},
            {"kind": "posix", "path": str(folder), "capacity": "4 GiB"},
        ],
        "vllm": vllm,
    }


def test_the_same_settings_hit(
    model: Path, logs: Path, folder: Path, reference: Reference, text: list[int]
) -> None:
    """The control of those that follow."""
    with Engine(model, config(folder), log=logs / "same") as engine:
        result = engine.generate(text[:660])[0]
        assert (result["cached"], result["tokens"]) == (5 * PAGE, reference(text[:660]))


def test_another_dtype_misses(model: Path, logs: Path, folder: Path, text: list[int]) -> None:
    with Engine(model, config(folder), log=logs / "dtype", dtype="bfloat16") as engine:
        assert engine.generate(text[:660])[0]["cached"] == 0
        assert engine.generate(text[:660])[0]["cached"] == 5 * PAGE


def test_memory_of_less_than_a_chunk_loses_stores_and_hits_but_no_text(
    model: Path, logs: Path, folder: Path, reference: Reference, text: list[int]
) -> None:
    with Engine(model, config(folder, memory="4 MiB"), log=logs / "small") as engine:
        for prompt in (text[:660], text[700:1400]):
            result = engine.generate(prompt)[0]
            assert (result["cached"], result["tokens"]) == (0, reference(prompt))
        stat = engine.ask("stat")
        assert stat["metrics"]["store_dropped_tokens"] > 0
        assert stat["leases"] == 0


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"vllm": {"laod": "before"}}, "vllm.laod.*'load'"),
        ({"vllm": {"chunk_tokens": 100}}, "100"),
        ({"teirs": []}, "teirs.*'tiers'"),
    ],
)
def test_wrong_settings_stop_the_start_and_say_why(
    model: Path, logs: Path, tmp_path: Path, change: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(EngineError, match=complaint):
        Engine(model, {**config(tmp_path), **change}, log=logs / "wrong")
