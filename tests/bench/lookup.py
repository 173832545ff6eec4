"""Lookup of a prompt of 128k tokens, hashing included, in milliseconds of processor time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import numpy as np
from result import Result, Setting

from kvtier import Hit, KvLayout, KVTier, Namespace, PagedKv
from kvtier.errors import KvtierError
from kvtier.keys import Tokens

TOKENS, PAGE_TOKENS = 131072, 16
LIMITS_MS = {"lookup_hit_array": 0.8, "lookup_hit_list": 1.6, "lookup_miss": 0.02}
ROUNDS = 201


def run(wanted: set[str], setting: Setting) -> Iterator[Result]:
    pages = TOKENS // PAGE_TOKENS
    # KV of a few bytes a page: a lookup touches none of it.
    layout = KvLayout.opaque(
        layers=1, page_tokens=PAGE_TOKENS, page_bytes=64, dtype="bytes", packing="bench"
    )
    memory = np.zeros(pages * layout.page_bytes, dtype=np.uint8)
    kv = PagedKv(
        plane_addresses=np.array([memory.ctypes.data], dtype=np.uint64),
        page_count=pages,
        page_stride=layout.page_bytes,
        owner=memory,
    )
    array = np.random.default_rng(3).integers(0, 128000, TOKENS, dtype=np.uint32)
    as_list = array.tolist()
    other = [as_list[0] + 1, *as_list[1:]]
    with KVTier.open({"tiers": [{"kind": "memory", "capacity": "16 MiB"}]}) as tier:
        space = tier.attach(Namespace(model="lookup", waves=1), layout, kv)
        tier.store(space, array, np.arange(pages))

        def cpu_ms(tokens: Tokens, expected: int) -> float:
            samples = []
            for _ in range(ROUNDS):
                begin_s = time.thread_time()
                hit: Hit = tier.lookup(space, tokens)
                samples.append(time.thread_time() - begin_s)
                if hit.tokens != expected:
                    raise KvtierError(f"{hit.tokens} tokens found, expected {expected}")
                tier.release(hit)
            return statistics.median(samples) * 1e3

        prompts: dict[str, tuple[Tokens, int]] = {
            "lookup_hit_array": (array, TOKENS),
            "lookup_hit_list": (as_list, TOKENS),
            "lookup_miss": (other, 0),
        }
        for name, (tokens, expected) in prompts.items():
            if name in wanted:
                cpu_ms(tokens, expected)
                yield Result(
                    bench=name,
                    value=cpu_ms(tokens, expected),
                    unit="ms of CPU",
                    higher_is_better=False,
                    limit=LIMITS_MS[name],
                    limit_is="fixed budget; 512 chunks of 256 tokens",
                    rounds=ROUNDS,
                )
