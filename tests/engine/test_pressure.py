"""Too few pages, prompts cut into pieces, vLLM's own prefix cache beside kvtier: the same text."""

from __future__ import annotations

from pathlib import Path

from conftest import Reference
from engine import Engine

PAGE = 128


def test_preemption_and_chunked_prefill_beside_vllms_own_prefix_cache(
    model: Path, logs: Path, tmp_path: Path, reference: Reference, text: list[int]
) -> None:
    """Three requests need 21 pages and there are 12, so vLLM takes pages back in mid-answer."""
    prompts = [text[start : start + 660] for start in (0, 700, 1400)]
    expected = reference(*prompts, max_tokens=120)
    tiers = [
        {"kind": "memory", "capacity": "1 GiB"},
        {"kind": "posix", "path": str(tmp_path), "capacity": "4 GiB"},
    ]
    with Engine(
        model,
        {"tiers": tiers},
        log=logs / "pressure",
        enable_prefix_caching=True,
        max_num_batched_tokens=320,
        num_gpu_blocks_override=13,
        max_model_len=1500,
    ) as engine:
        preemptions = 0
        for mode, cached in (("auto", 0), ("before", 5 * PAGE), ("layerwise", 5 * PAGE)):
            engine.ask("use_load_mode", mode=mode)
            results = engine.generate(*prompts, max_tokens=120)
            assert [result["tokens"][0] for result in results] == expected
            assert [result["cached"] for result in results] == [cached] * 3
            stat = engine.ask("stat")
            assert stat["preemptions"] > preemptions, "the test puts on no pressure"
            preemptions = stat["preemptions"]
        for prompt in prompts:
            engine.ask("move_to_disk", tokens=prompt)
        engine.ask("use_load_mode", mode="async")
        results = engine.generate(*prompts, max_tokens=120)
        assert [result["tokens"][0] for result in results] == expected

        # What vLLM has itself is not loaded again: only the pages beyond it.
        assert engine.ask("reset_prefix_cache")
        engine.ask("use_load_mode", mode="auto")
        engine.generate(prompts[0][: 2 * PAGE + 1])
        before = engine.ask("stat")["metrics"]["loaded_tokens"]
        assert engine.generate(prompts[0])[0]["cached"] == 5 * PAGE
        stat = engine.ask("stat")
        assert stat["metrics"]["loaded_tokens"] - before == 3 * PAGE
        assert stat["leases"] == 0
        assert [name for name in stat["metrics"] if name.startswith("vllm_faults")] == []
