"""ChunkIndex against plain dicts, over random histories of a few short prompts."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtier._core import ChunkIndex

CHUNK_TOKENS = 4
TIER_COUNT = 3
ROOTS = (b"a" * 32, b"b" * 32)
NO_KEY = bytes(32)
NONE = ChunkIndex.NONE

# Two token ids and four tokens a chunk: random prompts then share prefixes all the time.
PROMPTS = st.tuples(st.sampled_from(ROOTS), st.lists(st.integers(0, 1), max_size=11))
TIERS = st.integers(0, TIER_COUNT - 1)
Prompt = tuple[bytes, list[int]]


@dataclass(frozen=True)
class Link:
    """One chunk of a prompt as its caller describes it."""

    key: bytes
    parent_key: bytes
    tokens: int


@dataclass
class Record:
    """What the index should know of one chunk."""

    key: bytes
    tokens: int
    nbytes: int
    parent: int = NONE
    tiers: set[int] = field(default_factory=set)
    leases: int = 0


def key_of(parent_key: bytes, tokens: Sequence[int]) -> bytes:
    return hashlib.sha256(parent_key + struct.pack(f"<{len(tokens)}I", *tokens)).digest()


def links_of(prompt: Prompt) -> list[Link]:
    """Every whole chunk and the partial last one; the first has `NO_KEY` as its parent's key."""
    root, tokens = prompt
    links: list[Link] = []
    parent_key = root
    for first in range(0, len(tokens), CHUNK_TOKENS):
        piece = tokens[first : first + CHUNK_TOKENS]
        key = key_of(parent_key, piece)
        links.append(Link(key, parent_key if links else NO_KEY, len(piece)))
        parent_key = key
    return links


def numbers_of(chunks: Sequence[int]) -> npt.NDArray[np.uint32]:
    return np.array(chunks, dtype=np.uint32)


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = ChunkIndex(TIER_COUNT)
        self.records: dict[int, Record] = {}
        self.numbers: dict[bytes, int] = {}
        self.nbytes = 1000

    # ---- the model

    def describe(self, links: Sequence[Link]) -> tuple[Any, Any, Any]:
        sizes = np.arange(self.nbytes, self.nbytes + len(links), dtype=np.uint64)
        self.nbytes += len(links)
        keys = b"".join(link.key for link in links)
        return keys, numbers_of([link.tokens for link in links]), sizes

    def note_added(
        self, links: Sequence[Link], sizes: npt.NDArray[np.uint64], chunks: npt.NDArray[np.uint32]
    ) -> None:
        assert len(chunks) == len(links)
        for link, size, chunk in zip(links, sizes.tolist(), chunks.tolist(), strict=True):
            if link.key in self.numbers:
                assert chunk == self.numbers[link.key]
            else:
                assert chunk not in self.records
                assert chunk != NONE
                self.numbers[link.key] = chunk
                self.records[chunk] = Record(link.key, link.tokens, size)

    def note_parent(self, link: Link, parent: int) -> None:
        record = self.records[self.numbers[link.key]]
        if record.parent == NONE:
            record.parent = parent

    def let_go_of_unkept(self, chunks: Sequence[int]) -> None:
        for chunk in chunks:
            record = self.records.get(chunk)
            if record is None or record.tiers or record.leases:
                continue
            del self.records[chunk]
            del self.numbers[record.key]
            for other in self.records.values():
                if other.parent == chunk:
                    other.parent = NONE

    def held(self, key: bytes) -> int | None:
        chunk = self.numbers.get(key)
        return chunk if chunk is not None and self.records[chunk].tiers else None

    def longest(self, prompt: Prompt, page_tokens: int) -> list[int]:
        key, tokens = prompt
        run: list[int] = []
        first = 0
        while len(tokens) - first >= CHUNK_TOKENS:
            next_key = key_of(key, tokens[first : first + CHUNK_TOKENS])
            chunk = self.held(next_key)
            if chunk is None:
                break
            run.append(chunk)
            key = next_key
            first += CHUNK_TOKENS
        room = min(len(tokens) - first, CHUNK_TOKENS - 1)
        for count in range(room // page_tokens * page_tokens, 0, -page_tokens):
            chunk = self.held(key_of(key, tokens[first : first + count]))
            if chunk is not None:
                return [*run, chunk]
        return run

    def below(self, chunk: int) -> set[int]:
        children = {n for n, record in self.records.items() if record.parent == chunk}
        return children.union(*(self.below(child) for child in children))

    def some(self, data: st.DataObject, max_size: int = 8) -> list[int]:
        chunks = st.lists(st.sampled_from(sorted(self.records)), max_size=max_size)
        return data.draw(chunks, label="chunks")

    # ---- what is done to both

    @rule(prompt=PROMPTS, data=st.data())
    def add(self, prompt: Prompt, data: st.DataObject) -> None:
        links = links_of(prompt)
        starts = [i for i, link in enumerate(links) if i == 0 or link.parent_key in self.numbers]
        first = data.draw(st.sampled_from([*starts, len(links)]), label="first")
        run = links[first:]
        parent = NONE
        if run and run[0].parent_key != NO_KEY:
            parent = self.numbers[run[0].parent_key]
        keys, tokens, sizes = self.describe(run)
        self.note_added(run, sizes, self.index.add(parent, keys, tokens, sizes))
        for link in run:
            self.note_parent(link, parent)
            parent = self.numbers[link.key]

    @rule(prompts=st.lists(PROMPTS, max_size=3), data=st.data())
    def add_linked(self, prompts: list[Prompt], data: st.DataObject) -> None:
        everything = [link for prompt in prompts for link in links_of(prompt)]
        order = data.draw(st.permutations(everything), label="order")
        links = order[: data.draw(st.integers(0, len(order)), label="count")]
        keys, tokens, sizes = self.describe(links)
        parent_keys = b"".join(link.parent_key for link in links)
        self.note_added(links, sizes, self.index.add_linked(keys, parent_keys, tokens, sizes))
        for link in links:
            if link.parent_key in self.numbers:
                self.note_parent(link, self.numbers[link.parent_key])

    @rule(prompt=PROMPTS, tier=TIERS)
    def store(self, prompt: Prompt, tier: int) -> None:
        """What the library does for one request; the other rules reach the rest."""
        links = links_of(prompt)
        keys, tokens, sizes = self.describe(links)
        chunks = self.index.add(NONE, keys, tokens, sizes)
        self.note_added(links, sizes, chunks)
        parent = NONE
        for link in links:
            self.note_parent(link, parent)
            parent = self.numbers[link.key]
        self.index.publish(chunks, tier)
        for chunk in chunks.tolist():
            self.records[chunk].tiers.add(tier)

    @precondition(lambda self: self.records)
    @rule(tier=TIERS, data=st.data())
    def publish(self, tier: int, data: st.DataObject) -> None:
        chunks = self.some(data)
        self.index.publish(numbers_of(chunks), tier)
        for chunk in chunks:
            self.records[chunk].tiers.add(tier)

    @precondition(lambda self: self.records)
    @rule(tier=TIERS, with_suffix=st.booleans(), data=st.data())
    def withdraw(self, tier: int, with_suffix: bool, data: st.DataObject) -> None:
        chunks = self.some(data)
        if with_suffix and chunks:
            chunks += self.index.suffix(chunks[0]).tolist()
        unheld = self.index.withdraw(numbers_of(chunks), tier).tolist()
        for chunk in chunks:
            self.records[chunk].tiers.discard(tier)
        expected = [chunk for chunk in dict.fromkeys(chunks) if not self.records[chunk].tiers]
        assert unheld == expected
        self.let_go_of_unkept(expected)

    @precondition(lambda self: self.records)
    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        chunks = self.some(data)
        self.index.lease(numbers_of(chunks))
        for chunk in chunks:
            self.records[chunk].leases += 1

    @precondition(lambda self: self.records)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        chunks = self.some(data, max_size=3)
        if any(chunks.count(chunk) > self.records[chunk].leases for chunk in chunks):
            with pytest.raises(ValueError, match="more often than it is leased"):
                self.index.release(numbers_of(chunks))
            return
        self.index.release(numbers_of(chunks))
        for chunk in chunks:
            self.records[chunk].leases -= 1
        self.let_go_of_unkept(chunks)

    @rule(stranger=st.integers(0, 40) | st.just(NONE), data=st.data())
    def name_a_stranger(self, stranger: int, data: st.DataObject) -> None:
        """Refused by every call; that nothing changed is seen by the invariants."""
        if stranger in self.records:
            return
        known = self.some(data) if self.records else []
        chunks = numbers_of([*known, stranger, *known])
        calls: list[Callable[[], Any]] = [
            lambda: self.index.publish(chunks, 0),
            lambda: self.index.withdraw(chunks, 0),
            lambda: self.index.lease(chunks),
            lambda: self.index.release(chunks),
            lambda: self.index.tiers(chunks),
            lambda: self.index.suffix(stranger),
            lambda: self.index.parent(stranger),
        ]
        if stranger != NONE:  # for `add`, that is the root
            one = numbers_of([1])
            calls.append(lambda: self.index.add(stranger, b"k" * 32, one, one.astype(np.uint64)))
        for call in calls:
            with pytest.raises(ValueError, match=f"chunk {stranger} is not known"):
                call()

    # ---- what must agree

    @rule(
        prompt=PROMPTS,
        page_tokens=st.integers(1, CHUNK_TOKENS + 1),
        form=st.sampled_from([list, tuple, np.uint32, np.int32, np.int64, np.uint64]),
    )
    def look_up(self, prompt: Prompt, page_tokens: int, form: Any) -> None:
        root, tokens = prompt
        argument = form(tokens) if form in (list, tuple) else np.array(tokens, dtype=form)
        found = self.index.lookup(root, argument, CHUNK_TOKENS, page_tokens)
        assert found.dtype == np.uint32
        assert found.tolist() == self.longest(prompt, page_tokens)

    @rule(prompt=PROMPTS)
    def find(self, prompt: Prompt) -> None:
        keys = [link.key for link in links_of(prompt)]
        expected = [self.numbers.get(key, NONE) for key in keys]
        assert self.index.find(b"".join(keys)).tolist() == expected

    @invariant()
    def each_chunk_is_described_as_it_should(self) -> None:
        assert len(self.index) == len(self.records)
        chunks = numbers_of(sorted(self.records))
        records = [self.records[chunk] for chunk in chunks.tolist()]
        assert self.index.keys(chunks) == b"".join(record.key for record in records)
        assert self.index.tokens(chunks).tolist() == [record.tokens for record in records]
        assert self.index.nbytes(chunks).tolist() == [record.nbytes for record in records]
        assert self.index.leases(chunks).tolist() == [record.leases for record in records]
        masks = [sum(1 << tier for tier in record.tiers) for record in records]
        assert self.index.tiers(chunks).tolist() == masks
        for tier in range(TIER_COUNT):
            held = [n for n in sorted(self.records) if tier in self.records[n].tiers]
            assert self.index.held(tier).tolist() == held

    @invariant()
    def the_tree_is_as_it_should(self) -> None:
        for chunk, record in self.records.items():
            assert self.index.parent(chunk) == record.parent
            children = sorted(n for n, other in self.records.items() if other.parent == chunk)
            assert sorted(self.index.children(chunk).tolist()) == children
            suffix = self.index.suffix(chunk).tolist()
            assert len(suffix) == len(set(suffix))
            assert set(suffix) == self.below(chunk)
            for position, below in enumerate(suffix):
                assert self.records[below].parent in [chunk, *suffix[:position]]


TestChunkIndexFollowsPlainDicts = Machine.TestCase
TestChunkIndexFollowsPlainDicts.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None
)
