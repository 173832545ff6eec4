"""What is on disk after an engine ends, in order or not, and what the next engine makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import Reference
from engine import Engine, EngineError

PAGE = 128


def config(folder: Path) -> dict[str, object]:
    return {
        "tiers": [
            {"kind": "memory", "capacity": "1 GiB"},
            {"kind": "posix", "path": str(folder), "capacity": "4 GiB"},
        ]
    }


def records(folder: Path) -> list[Path]:
    """The files that hold chunks, oldest first."""
    files = [path for path in folder.glob("??/*") if path.suffix != ".tmp"]
    return sorted(files, key=lambda path: path.stat().st_mtime_ns)


def test_a_restarted_engine_hits_what_the_last_one_stored_and_survives_damage(
    model: Path, logs: Path, tmp_path: Path, reference: Reference, text: list[int]
) -> None:
    kept, flipped, cut = text[:660], text[700:1360], text[1400:2060]
    expected = reference(kept, flipped, cut)
    files: dict[str, list[Path]] = {}
    with Engine(model, config(tmp_path), log=logs / "restart-1") as engine:
        for name, prompt in (("kept", kept), ("flipped", flipped), ("cut", cut)):
            known = set(records(tmp_path))
            assert engine.generate(prompt)[0]["cached"] == 0
            assert engine.ask("flush")
            files[name] = [path for path in records(tmp_path) if path not in known]
            assert len(files[name]) == 3  # two chunks and a page
        first_pid = engine.ready["pid"]
        # Only one process at a time may have the folder.
        with pytest.raises(EngineError, match=str(first_pid)):
            Engine(model, config(tmp_path), log=logs / "restart-refused")
        assert engine.generate(kept)[0]["cached"] == 5 * PAGE

    for path in files["flipped"]:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    for path in files["cut"]:
        with path.open("r+b") as stream:
            stream.truncate(path.stat().st_size // 2)

    with Engine(model, config(tmp_path), log=logs / "restart-2") as engine:
        result = engine.generate(kept)[0]
        assert result["tokens"][0] == expected[0]
        assert result["cached"] == 5 * PAGE
        # A load that fails is recomputed: the same text, and never offered again.
        for prompt, text_of in ((flipped, expected[1]), (cut, expected[2])):
            assert engine.generate(prompt)[0]["tokens"][0] == text_of
        stat = engine.ask("stat")
        assert stat["metrics"]["load_failed_pages"] >= 2 * 5
        assert stat["leases"] == 0
        # What was recomputed is stored anew, and hits from then on.
        results = engine.generate(flipped, cut)
        assert [result["cached"] for result in results] == [5 * PAGE] * 2
        assert [result["tokens"][0] for result in results] == expected[1:]
        assert [name for name in stat["metrics"] if name.startswith("vllm_faults")] == []


def test_damage_found_in_the_middle_of_a_forward_pass_is_recomputed(
    model: Path, logs: Path, tmp_path: Path, reference: Reference, text: list[int]
) -> None:
    """Loaded layer by layer from disk, the load fails while vLLM already computes on its pages."""
    prompt = text[:660]
    settings = {**config(tmp_path), "vllm": {"load": "layerwise"}}
    with Engine(model, settings, log=logs / "sync", enable_prefix_caching=True) as engine:
        assert engine.generate(prompt)[0]["cached"] == 0
        assert engine.ask("move_to_disk", tokens=prompt) == 5 * PAGE
        assert engine.ask("reset_prefix_cache")
        second = records(tmp_path)[1]
        content = bytearray(second.read_bytes())
        content[-1] ^= 1
        second.write_bytes(content)
        # Both requests want the damaged pages, the second one through vLLM's own prefix cache.
        results = engine.generate(prompt, prompt + text[700:720])
        assert [r["tokens"][0] for r in results] == reference(prompt, prompt + text[700:720])
        assert engine.ask("reset_prefix_cache")
        result = engine.generate(prompt)[0]
        assert (result["cached"], result["tokens"][0]) == (5 * PAGE, reference(prompt)[0])
        assert engine.ask("stat")["leases"] == 0


def test_a_killed_engine_leaves_only_whole_chunks(
    model: Path, logs: Path, tmp_path: Path, reference: Reference, text: list[int]
) -> None:
    prompts = [text[start : start + 660] for start in (0, 700, 1400)]
    engine = Engine(model, config(tmp_path), log=logs / "killed")
    try:
        engine.generate(prompts[0])
        assert engine.ask("flush")
        engine.tell("generate", prompts=prompts[1:], max_tokens=8)
        while len(records(tmp_path)) < 4:  # the kill falls among the stores of the second prompt
            assert engine.process.poll() is None
    finally:
        engine.kill()
    with Engine(model, config(tmp_path), log=logs / "after-kill") as engine:
        results = [engine.generate(prompt)[0] for prompt in prompts]
        assert [result["tokens"][0] for result in results] == reference(*prompts)
        assert results[0]["cached"] == 5 * PAGE
        stat = json.dumps(engine.ask("stat"))
        assert "read_corrupt" not in stat, stat
