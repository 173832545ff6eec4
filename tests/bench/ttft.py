"""Time to first token under vLLM: cold, from memory, from disk after a restart, and beside others.

The times are vLLM's own (`first_token_latency`), of one request at a time. Every answer's text and
number of cached tokens is checked.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from engines import (
    ANSWER_TOKENS,
    KV_BYTES_PER_TOKEN,
    Engine,
    cached_of,
    open_engine,
    prompt_of,
    scratch,
    tiers,
)
from peers.lmcache_daemon import open_daemon
from result import Result, Setting, progress

LONG_TOKENS = 6980
LONG_BEGINNINGS = (0, 1000)
HITS = 5
"""Of each long prompt."""
HALF_TOKENS = 3567
"""The last 256-token chunk is half full: 3,456 tokens in pages of 128, 3,328 in whole chunks."""
ROUNDS = 11


class WrongAnswer(Exception):
    """An engine's text, or the number of its cached tokens, is not what it must be."""


def ask(engine: Engine, prompt: list[int], cached: int, text: list[int] | None = None) -> Any:
    """One request; its result, which has `ttft_s` and `tokens`.

    Raises:
        WrongAnswer: it took another number of tokens from a cache than `cached`, or does not
            say `text`.
    """
    (result,) = engine.generate(prompt, max_tokens=ANSWER_TOKENS)
    if result["cached"] != cached:
        raise WrongAnswer(f"{result['cached']} tokens cached, expected {cached}")
    if text is not None and result["tokens"][0] != text:
        raise WrongAnswer(f"tokens {result['tokens'][0]}, expected {text}")
    return result


# Cold, host and disk ------------------------------------------------------------------------------


def run_restart(wanted: set[str], setting: Setting) -> Iterator[Result]:
    """`ttft_host` and `ttft_disk`: two long prompts, cold, again, and once after a restart."""
    prompts = [prompt_of(LONG_TOKENS, begin) for begin in LONG_BEGINNINGS]
    held = cached_of(LONG_TOKENS)
    with scratch(setting) as folder:
        with open_engine(folder, "first", tiers(folder)) as engine:
            cold = [ask(engine, prompt, 0) for prompt in prompts]
            texts = [result["tokens"][0] for result in cold]
            progress(f"  cold: {_seconds(cold)}")
            host = [
                ask(engine, prompt, held, text)
                for _ in range(HITS)
                for prompt, text in zip(prompts, texts, strict=True)
            ]
            progress(f"  host: {_seconds(host)}")
            _say_load(engine)
            if engine.ask("stat")["metrics"].get("read_bytes_disk"):
                raise WrongAnswer("a hit that should come from memory was read from disk")
        with open_engine(folder, "second", tiers(folder)) as engine:
            disk = []
            for prompt, text in zip(prompts, texts, strict=True):
                before = engine.ask("stat")["metrics"].get("read_bytes_disk", 0)
                disk.append(ask(engine, prompt, held, text))
                read = engine.ask("stat")["metrics"].get("read_bytes_disk", 0) - before
                if read < held * KV_BYTES_PER_TOKEN:
                    raise WrongAnswer(f"{read} bytes read from disk for {held} tokens")
            progress(f"  disk: {_seconds(disk)}")
            _say_load(engine)
    for name, hits, limit, place in (
        ("ttft_host", host, 20.0, "in host memory"),
        ("ttft_disk", disk, 15.0, "on disk, the engine restarted"),
    ):
        if name in wanted:
            yield Result(
                bench=name,
                value=_median_s(cold) / _median_s(hits),
                unit="x",
                higher_is_better=True,
                limit=limit,
                limit_is=f"goal; cold TTFT over TTFT with the KV {place}",
                rounds=len(hits),
                more={
                    "cold_s": _rounded(_median_s(cold)),
                    "hit_s": _rounded(_median_s(hits)),
                    "prompt_tokens": LONG_TOKENS,
                    "cached_tokens": held,
                },
            )


# Side by side -------------------------------------------------------------------------------------


def run_side_by_side(wanted: set[str], setting: Setting) -> Iterator[Result]:
    """`ttft_vs_own` and `ttft_vs_lmcache`: live engines with the same prompt, asked in turn."""
    prompt = prompt_of(HALF_TOKENS, 0)
    held = cached_of(HALF_TOKENS)
    python = setting.lmcache_engine_python if "ttft_vs_lmcache" in wanted else None
    with scratch(setting) as folder, ExitStack() as stack:
        engines = {
            "vLLM's own": stack.enter_context(
                open_engine(folder, "own", None, enable_prefix_caching=True)
            ),
            "kvtier": stack.enter_context(open_engine(folder, "kvtier", tiers(folder))),
        }
        if python is not None:
            engines["LMCache"] = stack.enter_context(_open_lmcache(stack, folder, python))
        texts = {name: ask(engine, prompt, 0)["tokens"][0] for name, engine in engines.items()}
        if any(text != texts["vLLM's own"] for text in texts.values()):
            raise WrongAnswer(f"cold texts differ: {texts}")
        if python is not None:
            # It stores whole chunks, and not always before the answer: its count is not checked.
            _wait_for_hit(engines["LMCache"], prompt)
        hits: dict[str, list[Any]] = {name: [] for name in engines}
        names = list(engines)
        for turn in range(ROUNDS + 1):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                if name == "LMCache":
                    (result,) = engines[name].generate(prompt, max_tokens=ANSWER_TOKENS)
                else:
                    result = ask(engines[name], prompt, held, texts[name])
                if turn:
                    hits[name].append(result)
        for name, results in hits.items():
            progress(f"  {name}: {_seconds(results)}; {_cached(results)} tokens cached")
        _say_load(engines["kvtier"])
    ours_s = _median_s(hits["kvtier"])
    for name, peer, limit in (
        ("ttft_vs_own", "vLLM's own", 1.10),
        ("ttft_vs_lmcache", "LMCache", 0.60),
    ):
        if name not in wanted:
            continue
        if peer not in hits:
            yield Result(
                bench=name,
                value=None,
                unit="x",
                higher_is_better=False,
                limit=limit,
                limit_is="peer not given (--lmcache-engine-python)",
                rounds=0,
            )
            continue
        yield Result(
            bench=name,
            value=ours_s / _median_s(hits[peer]),
            unit="x",
            higher_is_better=False,
            limit=limit,
            limit_is=f"goal, at most; TTFT of a host hit over that of a hit of {peer}",
            rounds=ROUNDS,
            more={
                "hit_s": _rounded(ours_s),
                "peer_hit_s": _rounded(_median_s(hits[peer])),
                "prompt_tokens": HALF_TOKENS,
                "cached_tokens": held,
                "peer_cached_tokens": _cached(hits[peer]),
            },
        )


def _open_lmcache(stack: ExitStack, folder: Path, python: Path) -> Engine:
    daemon = stack.enter_context(open_daemon(python, folder / "daemon.log"))
    return open_engine(
        folder,
        "lmcache",
        None,
        python=python,
        environment=daemon.environment,
        kv_transfer_config=daemon.connector,
    )


def _wait_for_hit(engine: Engine, prompt: list[int]) -> None:
    """Ask until the peer has stored the prompt: it stores after it has answered."""
    for _ in range(5):
        (result,) = engine.generate(prompt, max_tokens=ANSWER_TOKENS)
        if result["cached"]:
            return
    raise WrongAnswer("LMCache never hits")


# What is said -------------------------------------------------------------------------------------


def _say_load(engine: Engine) -> None:
    """How long kvtier's loads took on their own threads."""
    metrics = engine.ask("stat")["metrics"]
    count = metrics.get("load_seconds_count", 0)
    if count:
        mean_s = metrics["load_seconds_sum"] / count
        progress(f"  kvtier's loads: {count:.0f}, on average {mean_s * 1e3:.0f} ms")


def _cached(results: list[Any]) -> int:
    return min(result["cached"] for result in results)


def _median_s(results: list[Any]) -> float:
    return statistics.median(result["ttft_s"] for result in results)


def _seconds(results: list[Any]) -> str:
    return " ".join(f"{result['ttft_s']:.3f}" for result in results) + " s"


def _rounded(seconds: float) -> float:
    return round(seconds, 4)
