"""Conformance suite of connectors, with a toy paged engine whose KV depends on the whole prefix.

A connector's test subclasses `ConnectorSuite` and gives `make`: an engine on a `KVTier`. The toy
engine of `ToyKv` "computes" KV as a hash chain over the tokens, so KV from the wrong place, layer,
token or prefix is never equal to the right one.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pytest

from kvtier import KVTier

Bytes = npt.NDArray[np.uint8]


def toy_kv(tokens: Sequence[int], layers: int, planes: int, row_bytes: int) -> Bytes:
    """KV of `tokens` as [layer, plane, token, byte]; row `i` depends on all tokens up to `i`."""
    state, states = 0x9E3779B9, []
    for token in tokens:
        state = (state * 1000003 + token + 1) & 0xFFFFFFFF
        states.append(state)
    rows = np.array(states, dtype=np.uint32)[None, None, :, None]
    where = np.arange(layers * planes, dtype=np.uint32).reshape(layers, planes, 1, 1)
    words = np.arange(-(-row_bytes // 4), dtype=np.uint32)
    with np.errstate(over="ignore"):
        mixed = (rows ^ (where * np.uint32(0x85EBCA6B))) * (words * np.uint32(2654435761) + 1)
        mixed ^= mixed >> np.uint32(15)
    return np.ascontiguousarray(mixed.astype(np.uint32)).view(np.uint8)[..., :row_bytes]


class PagedEngine(Protocol):
    """What the suite needs of an engine with a connector."""

    page_tokens: int
    page_count: int

    def write(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Compute: put the right KV of `tokens` into `pages`."""

    def read(self, tokens: int, pages: Sequence[int]) -> Bytes:
        """KV of the first `tokens` tokens in `pages`, as [layer, plane, token, byte]."""

    def expected(self, tokens: Sequence[int]) -> Bytes:
        """What `read` gives after `write`."""

    def store(self, tokens: Sequence[int], pages: Sequence[int]) -> int:
        """Offer the pages to kvtier; tokens newly stored."""

    def load(self, tokens: Sequence[int], pages: Sequence[int]) -> int:
        """Fill `pages` with what is held; tokens that are right, from the first."""


class ConnectorSuite(abc.ABC):
    """Every connector passes these."""

    @abc.abstractmethod
    def make(self, tier: KVTier, model: str) -> PagedEngine:
        """An engine of the model `model` whose pages hold noise, connected to `tier`."""

    @staticmethod
    def config(root: Path, **changes: Any) -> dict[str, Any]:
        """A memory tier of 64 MiB above a disk tier in `root`."""
        return {
            "tiers": [
                {"kind": "memory", "capacity": "64 MiB"},
                {"kind": "posix", "capacity": "256 MiB", "path": str(root / "kv")},
            ],
            **changes,
        }

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[KVTier]:
        """An open `KVTier` over an empty folder."""
        with KVTier.open(self.config(tmp_path)) as tier:
            yield tier

    @staticmethod
    def pages(engine: PagedEngine, tokens: int, seed: int = 0) -> list[int]:
        """Enough pages for `tokens`, in a random order."""
        count = -(-tokens // engine.page_tokens)
        order = np.random.default_rng(seed).permutation(engine.page_count)
        return [int(page) for page in order[:count]]

    @staticmethod
    def prompt(length: int, seed: int = 1) -> list[int]:
        """A prompt of `length` tokens."""
        drawn: list[int] = np.random.default_rng(seed).integers(0, 32000, length).tolist()
        return drawn

    def check_load(self, engine: PagedEngine, tokens: Sequence[int], at_least: int) -> int:
        """Load into fresh pages; all that is claimed must be right, and enough be claimed."""
        pages = self.pages(engine, len(tokens), seed=99)
        loaded = engine.load(tokens, pages)
        assert at_least <= loaded <= len(tokens)
        assert np.array_equal(engine.read(loaded, pages), engine.expected(tokens)[:, :, :loaded]), (
            "KV came back wrong"
        )
        return loaded

    def test_kv_comes_back_bit_for_bit_in_other_pages(self, tier: KVTier) -> None:
        engine = self.make(tier, "m")
        tokens = self.prompt(3 * 256 + 2 * engine.page_tokens)
        pages = self.pages(engine, len(tokens))
        engine.write(tokens, pages)
        assert engine.store(tokens, pages) == len(tokens)
        self.check_load(engine, tokens, len(tokens))

    def test_a_prompt_shorter_than_a_chunk_is_kept_in_whole_pages(self, tier: KVTier) -> None:
        engine = self.make(tier, "m")
        tokens = self.prompt(2 * engine.page_tokens + 1)
        pages = self.pages(engine, len(tokens))
        engine.write(tokens, pages)
        assert engine.store(tokens, pages) == 2 * engine.page_tokens
        assert self.check_load(engine, tokens, 2 * engine.page_tokens) == 2 * engine.page_tokens

    @pytest.mark.parametrize("length", [0, 1])
    def test_next_to_nothing_is_neither_stored_nor_hit(self, tier: KVTier, length: int) -> None:
        engine = self.make(tier, "m")
        tokens = self.prompt(length)
        pages = self.pages(engine, length)
        engine.write(tokens, pages)
        assert engine.store(tokens, pages) == 0
        assert self.check_load(engine, tokens, 0) == 0

    def test_only_the_shared_prefix_is_hit(self, tier: KVTier) -> None:
        engine = self.make(tier, "m")
        first = self.prompt(4 * 256)
        pages = self.pages(engine, len(first))
        engine.write(first, pages)
        engine.store(first, pages)
        second = first[: 2 * 256] + self.prompt(2 * 256, seed=2)
        assert self.check_load(engine, second, 2 * 256) == 2 * 256

    def test_equal_tokens_after_another_prefix_are_a_miss(self, tier: KVTier) -> None:
        engine = self.make(tier, "m")
        tokens = self.prompt(2 * 256)
        pages = self.pages(engine, len(tokens))
        engine.write(tokens, pages)
        engine.store(tokens, pages)
        assert self.check_load(engine, tokens[256:], 0) == 0

    def test_another_model_is_a_miss(self, tier: KVTier) -> None:
        engine, other = self.make(tier, "m"), self.make(tier, "n")
        tokens = self.prompt(2 * 256)
        pages = self.pages(engine, len(tokens))
        engine.write(tokens, pages)
        engine.store(tokens, pages)
        assert self.check_load(other, tokens, 0) == 0

    def test_storing_again_stores_nothing(self, tier: KVTier) -> None:
        engine = self.make(tier, "m")
        tokens = self.prompt(2 * 256 + engine.page_tokens)
        pages = self.pages(engine, len(tokens))
        engine.write(tokens, pages)
        engine.store(tokens, pages)
        assert engine.store(tokens, pages) == 0

    def test_pages_not_asked_for_are_left_alone(self, tier: KVTier) -> None:
        engine = self.make(tier, "m")
        tokens = self.prompt(256)
        pages = self.pages(engine, 256)
        engine.write(tokens, pages)
        engine.store(tokens, pages)
        others = [page for page in range(engine.page_count) if page not in set(pages)]
        before = engine.read(len(others) * engine.page_tokens, others).copy()
        engine.load(tokens, pages)
        assert np.array_equal(engine.read(len(others) * engine.page_tokens, others), before)

    def test_a_restart_finds_it_on_disk(self, tmp_path: Path) -> None:
        tokens = self.prompt(3 * 256)
        with KVTier.open(self.config(tmp_path)) as tier:
            engine = self.make(tier, "m")
            pages = self.pages(engine, len(tokens))
            engine.write(tokens, pages)
            engine.store(tokens, pages)
        with KVTier.open(self.config(tmp_path)) as tier:
            self.check_load(self.make(tier, "m"), tokens, len(tokens))

    def test_a_damaged_record_shortens_the_hit_and_is_never_given_out(self, tmp_path: Path) -> None:
        tokens = self.prompt(3 * 256)
        with KVTier.open(self.config(tmp_path)) as tier:
            engine = self.make(tier, "m")
            pages = self.pages(engine, len(tokens))
            engine.write(tokens, pages)
            engine.store(tokens, pages)
        for file in (tmp_path / "kv").rglob("*.kvc"):
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 1
            file.write_bytes(content)
        with KVTier.open(self.config(tmp_path)) as tier:
            engine = self.make(tier, "m")
            assert self.check_load(engine, tokens, 0) == 0
            pages = self.pages(engine, len(tokens))
            engine.write(tokens, pages)
            assert engine.store(tokens, pages) == len(tokens)
            self.check_load(engine, tokens, len(tokens))
