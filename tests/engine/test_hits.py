"""One engine with memory and disk: what hits, what does not, and that no text ever changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Reference
from engine import Engine

PAGE = 128  # vLLM's block on its CPU backend
CHUNK = 256


@pytest.fixture(scope="module")
def engine(model: Path, logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("hits")
    config = {
        "tiers": [
            {"kind": "memory", "capacity": "2 GiB"},
            {"kind": "posix", "path": str(folder), "capacity": "4 GiB"},
        ]
    }
    with Engine(model, config, log=logs / "hits") as engine:
        yield engine


def ask(engine: Engine, reference: Reference, *prompts: list[int]) -> list[int]:
    """How many tokens of each prompt came from a cache; the text must be the reference's."""
    results = engine.generate(*prompts)
    assert [result["tokens"][0] for result in results] == reference(*prompts)
    return [result["cached"] for result in results]


def test_a_repeated_prompt_comes_from_memory(
    engine: Engine, reference: Reference, text: list[int]
) -> None:
    prompt = text[:660]
    assert ask(engine, reference, prompt) == [0]
    assert ask(engine, reference, prompt) == [5 * PAGE]
    assert ask(engine, reference, prompt[:600] + text[2000:2100]) == [2 * CHUNK]


def test_chunks_that_are_only_on_disk_come_back(
    engine: Engine, reference: Reference, text: list[int]
) -> None:
    prompt = text[10:670]
    assert ask(engine, reference, prompt) == [0]
    assert engine.ask("flush")
    assert engine.ask("move_to_disk", tokens=prompt) == 5 * PAGE
    before = engine.ask("stat")["metrics"].get("read_bytes_posix", 0)
    assert ask(engine, reference, prompt) == [5 * PAGE]
    assert engine.ask("stat")["metrics"]["read_bytes_posix"] - before >= 5 * 30 * 196608


@pytest.mark.parametrize(
    ("length", "cached"),
    [
        (1, 0),
        (50, 0),
        (PAGE, 0),  # all of it would leave nothing to compute
        (PAGE + 1, PAGE),
        (CHUNK - 1, PAGE),
        (CHUNK, PAGE),
        (CHUNK + 1, CHUNK),
        (2 * CHUNK - PAGE, CHUNK),
        (2 * CHUNK, CHUNK + PAGE),
        (2 * CHUNK + 1, 2 * CHUNK),
    ],
)
def test_a_hit_leaves_a_token_to_compute_at_every_length(
    engine: Engine, reference: Reference, text: list[int], length: int, cached: int
) -> None:
    prompt = text[20 + length : 20 + 2 * length]  # a beginning of its own
    assert ask(engine, reference, prompt) == [0]
    assert ask(engine, reference, prompt) == [cached]


def test_a_whole_prompt_that_is_held_serves_a_longer_one(
    engine: Engine, reference: Reference, text: list[int]
) -> None:
    prompt = text[30 : 30 + 2 * CHUNK]
    assert ask(engine, reference, prompt) == [0]
    assert ask(engine, reference, prompt + text[40:60]) == [2 * CHUNK]


def test_generated_tokens_serve_the_next_turn(
    engine: Engine, reference: Reference, text: list[int]
) -> None:
    prompt = text[50 : 50 + 2 * CHUNK - 20]
    answer = reference(prompt, max_tokens=22)[0]
    assert engine.generate(prompt, max_tokens=22)[0]["tokens"][0] == answer
    # KV of 492 + 21 tokens: two chunks full; the last token was never computed on.
    assert ask(engine, reference, prompt + answer + text[70:100]) == [2 * CHUNK]


def test_the_tail_of_an_answer_is_kept_in_whole_pages(
    engine: Engine, reference: Reference, text: list[int]
) -> None:
    prompt = text[80 : 80 + CHUNK + PAGE - 4]
    answer = reference(prompt)[0]
    assert ask(engine, reference, prompt) == [0]
    assert ask(engine, reference, text[1500:1510]) == [0]  # its first step takes the tail along
    assert ask(engine, reference, prompt + answer + text[70:100]) == [CHUNK + PAGE]
    assert ask(engine, reference, prompt) == [CHUNK]


def test_requests_that_hit_and_miss_share_a_batch(
    engine: Engine, reference: Reference, text: list[int]
) -> None:
    held, fresh, low = text[90:700], text[100:800], text[110:900]
    ask(engine, reference, held)
    ask(engine, reference, low)
    engine.ask("move_to_disk", tokens=low)
    assert ask(engine, reference, held, fresh, low) == [4 * PAGE, 0, 6 * PAGE]
    assert ask(engine, reference, low, fresh, held) == [6 * PAGE, 5 * PAGE, 4 * PAGE]


def test_several_completions_of_one_prompt_agree(
    engine: Engine, reference: Reference, text: list[int]
) -> None:
    prompt = text[120:720]
    for _ in range(2):
        # Greedy by another name: vLLM takes no temperature of 0 for more than one completion.
        result = engine.generate(prompt, n=2, temperature=1.0, top_k=1)[0]
        assert result["tokens"] == reference(prompt) * 2


def test_equal_prompts_under_different_salts_share_nothing(
    engine: Engine, reference: Reference, text: list[int]
) -> None:
    prompt = text[130:530]

    def cached(salt: str) -> int:
        result = engine.ask("generate_salted", prompt=prompt, max_tokens=8, salt=salt)
        assert result["tokens"] == reference(prompt)
        return int(result["cached"])

    assert [cached("one"), cached("two"), cached("one"), cached("two")] == [0, 0, 384, 384]
    assert ask(engine, reference, prompt) == [0]


def test_prompt_log_probabilities_are_computed_and_never_taken_from_a_cache(
    engine: Engine, reference: Reference, text: list[int]
) -> None:
    prompt = text[140:280]
    ask(engine, reference, prompt)
    result = engine.generate(prompt, prompt_logprobs=1)[0]
    assert result["tokens"] == reference(prompt)
    assert result["cached"] == 0


@pytest.mark.parametrize("mode", ["before", "layerwise", "async"])
def test_every_way_of_loading_gives_the_same_text(
    engine: Engine, reference: Reference, text: list[int], mode: str
) -> None:
    prompt = text[150:810]
    ask(engine, reference, prompt)
    with using(engine, mode):
        assert ask(engine, reference, prompt) == [5 * PAGE]
        engine.ask("move_to_disk", tokens=prompt)
        assert ask(engine, reference, prompt) == [5 * PAGE]


def test_an_abort_during_a_load_gives_every_page_back(
    engine: Engine, reference: Reference, text: list[int]
) -> None:
    prompt = text[160:820]
    ask(engine, reference, prompt)
    engine.ask("move_to_disk", tokens=prompt)
    result = engine.ask("abort_while_loading", prompt=prompt)
    assert result == {
        "loading": 1,
        "free_blocks": engine.ready["blocks"] - 1,  # vLLM keeps one for itself
        "left": 0,
    }
    assert engine.ask("stat")["leases"] == 0
    assert ask(engine, reference, prompt) == [5 * PAGE]


def test_kv_that_is_zeroed_changes_the_text(
    engine: Engine, reference: Reference, text: list[int]
) -> None:
    """The negative control: were loaded KV not read, no other test here could fail."""
    prompt = text[170:830]
    ask(engine, reference, prompt)
    with using(engine, "before"):
        engine.ask("sabotage_loads", zero=True)
        spoiled = engine.generate(prompt)[0]
        engine.ask("sabotage_loads", zero=False)
        assert spoiled["cached"] == 5 * PAGE
        assert spoiled["tokens"] != reference(prompt)
        assert ask(engine, reference, prompt) == [5 * PAGE]


def test_nothing_went_wrong_unseen(engine: Engine) -> None:
    stat = engine.ask("stat")
    assert [name for name in stat["metrics"] if name.startswith("vllm_faults")] == []
    assert stat["leases"] == 0


class using:
    """`with using(engine, mode)`: hits are loaded that way."""

    def __init__(self, engine: Engine, mode: str) -> None:
        self._engine, self._mode = engine, mode

    def __enter__(self) -> None:
        self._engine.ask("use_load_mode", mode=self._mode)

    def __exit__(self, *exc: object) -> None:
        if exc[0] is None:
            self._engine.ask("use_load_mode", mode="auto")
