"""The hot buffer in Python, after the words of `csrc/cuda/hot_args.h`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Step:
    """What one step of one request resolves to."""

    top_slots: list[int]
    missing: list[tuple[int, int]]
    """Token and slot, in the order of the tokens' first appearance."""
    order: list[int]
    slot_tokens: list[int]


def resolve(
    top_tokens: list[int], slot_tokens: list[int], order: list[int], token_end: int
) -> Step:
    wanted = [token for token in top_tokens if 0 <= token < token_end]
    held = {token: slot for slot, token in enumerate(slot_tokens) if token >= 0}
    found = [slot for slot in order if slot_tokens[slot] in held and slot_tokens[slot] in wanted]
    unused = [slot for slot in order if slot not in found]
    absent = [token for token in dict.fromkeys(wanted) if token not in held]
    missing = list(zip(absent, unused, strict=False))
    tokens = list(slot_tokens)
    for token, slot in missing:
        tokens[slot] = token
    slots = held | dict(missing)
    count = len(missing)
    return Step(
        [slots[token] if 0 <= token < token_end else -1 for token in top_tokens],
        missing,
        unused[count:] + unused[:count] + found,
        tokens,
    )
