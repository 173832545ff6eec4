"""`KVTier.store` and lookup with load through the memory tier, against plain copies of as many bytes."""

from __future__ import annotations

from collections.abc import Iterator

from llama import (
    RECORD_BYTES,
    PagedLlama,
    as_array,
    best_plain_copy,
    huge_memory,
    plain_copies,
    wait_until_real,
)
from result import Result, Setting, Work, bandwidth, take_turns

from kvtier import KVTier, Space
from kvtier.errors import KvtierError

CHUNKS = 16  # 512 MiB of KV, as much in the tier, as much for the plain copies
ROUNDS = 21


def open_host_tier(chunks: int, threads: int) -> KVTier:
    """Memory for `chunks` chunks, all of it real."""
    tier = KVTier.open(
        {
            "tiers": [{"kind": "memory", "capacity": (chunks + 1) * RECORD_BYTES}],
            "copy_threads": threads,
        }
    )
    wait_until_real(tier.hierarchy.memory, (chunks + 1) * RECORD_BYTES)
    return tier


def store(tier: KVTier, space: Space, paged: PagedLlama) -> None:
    """Store the whole prompt."""
    if tier.store(space, paged.tokens, paged.order).nbytes != paged.nbytes:
        raise KvtierError("not all was stored")


def load(tier: KVTier, space: Space, paged: PagedLlama) -> None:
    """Look the whole prompt up, hashing included, and bring it back."""
    hit = tier.lookup(space, paged.tokens)
    result = tier.load(hit, paged.order, timeout_s=60).wait()
    tier.release(hit)
    if result is None or result.nbytes != paged.nbytes:
        raise KvtierError(f"not all was loaded: {result}")


def run(wanted: set[str], setting: Setting) -> Iterator[Result]:
    paged = PagedLlama(CHUNKS)
    other = as_array(huge_memory(paged.nbytes), paged.nbytes)
    with open_host_tier(CHUNKS, setting.threads) as tier:
        space = paged.attach(tier)
        subjects = {
            "host_store": (
                Work(lambda: store(tier, space, paged), before=tier.cleanup),
                (other, paged.bytes),
            ),
            "host_load": (Work(lambda: load(tier, space, paged)), (paged.bytes, other)),
        }
        for name, (ours, ends) in subjects.items():
            if name not in wanted:
                continue
            paged.fill()
            tier.cleanup()
            store(tier, space, paged)
            with plain_copies(*ends, setting.threads) as plain:
                times = take_turns({"ours": ours, **plain}, ROUNDS)
            limit_is, limit_s = best_plain_copy(times)
            yield bandwidth(
                name,
                paged.nbytes,
                times["ours"],
                limit_s,
                limit_is,
                ROUNDS,
                {"threads": setting.threads},
            )
            paged.fill()
            tier.cleanup()
            store(tier, space, paged)
            paged.wipe()
            load(tier, space, paged)
            paged.check()
