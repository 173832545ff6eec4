"""Tokens per second of a decoding vLLM that stores what it fills, against one that stores nothing.

One engine decodes the same number of requests of the same lengths with its stores on and off in
turn; a second live engine, without kvtier, takes its turn as well. Every request fills a chunk
while it decodes, one after the other, so that each is copied into memory and written to disk within
what is measured: twice as many chunks as so many tokens fill on average.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from engines import CHUNK, KV_BYTES_PER_TOKEN, PAGE, Engine, open_engine, prompt_of, scratch, tiers
from result import Result, Setting, progress

REQUESTS = 8
TOKENS = 128  # of each answer
LENGTHS = [CHUNK - TOKENS // REQUESTS * (i + 1) + 2 for i in range(REQUESTS)]
"""Of the prompts: more than a page, and each fills its first chunk 16 tokens after the one before."""
STORED_BYTES = REQUESTS * (PAGE + CHUNK) * KV_BYTES_PER_TOKEN
"""A turn's: of each prompt a page, as it ends there, and later the chunk that its answer fills."""
ROUNDS = 9
GOAL = 0.97
WITH, OFF, PLAIN = "kvtier storing", "kvtier, stores off", "no kvtier"


def run(wanted: set[str], setting: Setting) -> Iterator[Result]:
    with (
        scratch(setting) as folder,
        open_engine(folder, "plain", None) as plain,
        open_engine(folder, "kvtier", tiers(folder)) as engine,
    ):
        rates: dict[str, list[float]] = {WITH: [], OFF: [], PLAIN: []}
        names = list(rates)
        for turn in range(ROUNDS + 1):
            first = turn % len(names)
            for place, name in enumerate(names[first:] + names[:first]):
                # A beginning of its own: nothing is held, so all that is filled is stored.
                rate = _decode(plain if name == PLAIN else engine, name, 3 * turn + place)
                if turn:
                    rates[name].append(rate)
            progress("  " + ", ".join(f"{n}: {r[-1]:.1f}" for n, r in rates.items() if r))
        written = engine.ask("stat")["metrics"].get("written_bytes_disk", 0)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    yield Result(
        bench="decode_overhead",
        value=_of_rounds(rates[WITH], rates[OFF]),
        unit="x",
        higher_is_better=True,
        limit=GOAL,
        limit_is="goal; tokens/s of decoding with stores over without, in one engine, by round",
        rounds=ROUNDS,
        more={
            "storing_tokens_per_s": round(medians[WITH], 2),
            "stores_off_tokens_per_s": round(medians[OFF], 2),
            "no_kvtier_tokens_per_s": round(medians[PLAIN], 2),
            "vs_no_kvtier": round(_of_rounds(rates[WITH], rates[PLAIN]), 4),
            "requests": REQUESTS,
            "answer_tokens": TOKENS,
            "written_bytes": int(written),
        },
    )


def _decode(engine: Engine, name: str, beginning: int) -> float:
    """Tokens per second from the last request's first token to the last token of all.

    Raises:
        RuntimeError: the stores that are on did not happen, or those that are off did.
    """
    prompts = [prompt_of(length, beginning * 211 + i * 17 + 1) for i, length in enumerate(LENGTHS)]
    before = 0.0
    if name != PLAIN:
        engine.ask("use_stores", on=name == WITH)
        engine.ask("flush")  # the write-back of the turn before is not this one's
        before = engine.ask("stat")["metrics"].get("stored_bytes", 0)
    results = engine.generate(*prompts, max_tokens=TOKENS)
    if any(result["cached"] for result in results):
        raise RuntimeError("a prompt was held already: nothing of it is stored")
    if name != PLAIN:
        stored = engine.ask("stat")["metrics"].get("stored_bytes", 0) - before
        least = STORED_BYTES if name == WITH else 0
        if stored < least or (stored and not least):
            raise RuntimeError(f"{name}: {stored} bytes stored, expected {least} or more")
    begin_s = max(result["first_token_s"] for result in results)
    end_s = max(result["last_token_s"] for result in results)
    return REQUESTS * (TOKENS - 1) / (end_s - begin_s)


def _of_rounds(subject: list[float], other: list[float]) -> float:
    """Median of each round's ratio: what disturbs the machine for longer disturbs both."""
    return statistics.median(a / b for a, b in zip(subject, other, strict=True))
