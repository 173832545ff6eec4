"""vLLM with its pages on a device whose copies come late: the text is what it is without kvtier."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Reference
from engine import Engine

PAGE, CHUNK = 128, 256


@pytest.fixture(scope="module", params=["auto", "before", "async"])
def engine(
    request: pytest.FixtureRequest,
    model: Path,
    logs: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Engine]:
    config = {
        "tiers": [
            {"kind": "memory", "capacity": "1 GiB"},
            {"kind": "posix", "path": str(tmp_path_factory.mktemp("kv")), "capacity": "4 GiB"},
        ],
        "vllm": {"load": request.param},
    }
    log = logs / f"device-{request.param}"
    with Engine(model, config, log=log, connector=("ToyGpuConnector", "toy_gpu")) as engine:
        yield engine


def test_hits_misses_and_later_turns_give_the_text_that_vllm_gives(
    engine: Engine, reference: Reference, text: list[int]
) -> None:
    def ask(*prompts: list[int]) -> list[int]:
        results = engine.generate(*prompts)
        assert [result["tokens"][0] for result in results] == reference(*prompts)
        return [result["cached"] for result in results]

    first, second = text[:660], text[100:900]
    assert ask(first) == [0]
    assert ask(first) == [5 * PAGE]
    assert ask(second, first[:600] + text[2000:2100]) == [0, 2 * CHUNK]
    assert ask(first, second) == [5 * PAGE, 6 * PAGE]
    assert engine.ask("flush")
    assert engine.ask("move_to_disk", tokens=first) == 5 * PAGE
    assert ask(first) == [5 * PAGE]
    metrics = engine.ask("stat")["metrics"]
    assert not [name for name in metrics if name.startswith("vllm_faults")]
    assert not metrics.get("loads_failed", 0)
    assert not metrics.get("stores_failed", 0)
