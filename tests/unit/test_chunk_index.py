"""ChunkIndex at its edges; random histories are in tests/model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvtier._core import ChunkIndex, chain_key, chain_keys

ROOT = b"r" * 32
CHUNK_TOKENS = 8
PAGE_TOKENS = 2
NONE = ChunkIndex.NONE
EMPTY = np.empty(0, dtype=np.uint32)


def numbers(*chunks: int) -> npt.NDArray[np.uint32]:
    return np.array(chunks, dtype=np.uint32)


def add(
    index: ChunkIndex, keys: bytes, tokens: int = CHUNK_TOKENS, parent: int = NONE
) -> npt.NDArray[np.uint32]:
    """Make the run known, in tier 0."""
    count = len(keys) // 32
    chunks = index.add(
        parent,
        keys,
        np.full(count, tokens, dtype=np.uint32),
        np.full(count, 100, dtype=np.uint64),
    )
    index.publish(chunks, 0)
    return chunks


def lookup(index: ChunkIndex, tokens: Any) -> list[int]:
    found: list[int] = index.lookup(ROOT, tokens, CHUNK_TOKENS, PAGE_TOKENS).tolist()
    return found


@pytest.fixture
def index() -> ChunkIndex:
    return ChunkIndex(2)


class TestLookup:
    def test_an_empty_index_finds_nothing(self, index: ChunkIndex) -> None:
        assert lookup(index, list(range(20))) == []

    def test_an_empty_prompt_finds_nothing(self, index: ChunkIndex) -> None:
        add(index, chain_keys(ROOT, list(range(8)), CHUNK_TOKENS))
        assert lookup(index, []) == []
        assert lookup(index, EMPTY) == []

    def test_a_prompt_of_exactly_one_chunk_finds_it(self, index: ChunkIndex) -> None:
        chunks = add(index, chain_keys(ROOT, list(range(8)), CHUNK_TOKENS))
        assert lookup(index, list(range(8))) == chunks.tolist()
        assert lookup(index, list(range(7))) == []

    def test_a_prompt_shorter_than_a_chunk_finds_its_longest_whole_pages(
        self, index: ChunkIndex
    ) -> None:
        (two,) = add(index, chain_key(ROOT, [0, 1]), 2)
        (six,) = add(index, chain_key(ROOT, list(range(6))), 6)
        assert lookup(index, [0]) == []
        assert lookup(index, list(range(2))) == [two]
        assert lookup(index, list(range(5))) == [two]
        assert lookup(index, list(range(6))) == [six]
        assert lookup(index, list(range(7))) == [six]

    def test_a_missing_whole_chunk_gives_way_to_its_own_beginning(self, index: ChunkIndex) -> None:
        tokens = list(range(24))
        (first,) = add(index, chain_keys(ROOT, tokens[:8], CHUNK_TOKENS))
        (part,) = add(index, chain_key(index.keys(numbers(first)), tokens[8:12]), 4, int(first))
        assert lookup(index, tokens) == [first, part]

    def test_a_whole_chunk_wins_over_a_partial_one_of_the_same_start(
        self, index: ChunkIndex
    ) -> None:
        add(index, chain_key(ROOT, list(range(6))), 6)
        (whole,) = add(index, chain_keys(ROOT, list(range(8)), CHUNK_TOKENS))
        assert lookup(index, list(range(9))) == [whole]

    def test_partial_chunks_off_the_page_grid_are_passed_over(self, index: ChunkIndex) -> None:
        add(index, chain_key(ROOT, [0, 1, 2]), 3)
        assert lookup(index, [0, 1, 2]) == []

    def test_pages_longer_than_a_chunk_have_no_partial_chunks(self, index: ChunkIndex) -> None:
        add(index, chain_key(ROOT, [0, 1]), 2)
        assert index.lookup(ROOT, [0, 1, 2], CHUNK_TOKENS, 9).tolist() == []

    def test_a_partial_chunk_is_found_again_after_its_prefix_was_lost_and_returned(
        self, index: ChunkIndex
    ) -> None:
        tokens = list(range(12))
        whole_key = chain_keys(ROOT, tokens, CHUNK_TOKENS)
        (first,) = add(index, whole_key)
        (part,) = add(index, chain_key(whole_key, tokens[8:]), 4, int(first))
        index.withdraw(numbers(int(first)), 0)
        assert index.parent(int(part)) == NONE
        (again,) = add(index, whole_key)
        assert lookup(index, tokens) == [again, part]

    def test_chunks_in_no_tier_end_the_run(self, index: ChunkIndex) -> None:
        tokens = list(range(24))
        chunks = add(index, chain_keys(ROOT, tokens, CHUNK_TOKENS))
        index.lease(chunks)
        index.withdraw(chunks[1:2], 0)
        assert lookup(index, tokens) == [chunks[0]]

    def test_tokens_far_behind_a_miss_are_not_even_read(self, index: ChunkIndex) -> None:
        tokens: list[Any] = list(range(40))
        tokens[20] = "not a token"
        assert lookup(index, tokens) == []
        add(index, chain_keys(ROOT, tokens[:16], CHUNK_TOKENS))
        with pytest.raises(TypeError, match="position 20"):
            lookup(index, tokens)

    def test_a_remainder_is_read_only_where_a_partial_chunk_may_match(
        self, index: ChunkIndex
    ) -> None:
        tokens: list[Any] = [*range(10), "not a token", 11]
        whole_key = chain_keys(ROOT, tokens[:8], CHUNK_TOKENS)
        (whole,) = add(index, whole_key)
        assert lookup(index, tokens) == [whole]
        part = add(index, chain_key(whole_key, tokens[8:10]), 2, int(whole))
        with pytest.raises(TypeError, match="position 10"):
            lookup(index, tokens)
        index.withdraw(part, 0)
        assert lookup(index, tokens) == [whole]

    @pytest.mark.parametrize(
        ("root", "chunk_tokens", "page_tokens"),
        [(b"r" * 31, 8, 2), (ROOT, 0, 2), (ROOT, 8, 0)],
    )
    def test_senseless_arguments_are_refused(
        self, index: ChunkIndex, root: bytes, chunk_tokens: int, page_tokens: int
    ) -> None:
        with pytest.raises(ValueError, match=r"must be"):
            index.lookup(root, [1, 2, 3], chunk_tokens, page_tokens)

    def test_namespaces_do_not_see_each_other(self, index: ChunkIndex) -> None:
        tokens = list(range(8))
        add(index, chain_keys(b"s" * 32, tokens, CHUNK_TOKENS))
        assert lookup(index, tokens) == []


class TestLifetime:
    def test_the_number_of_a_chunk_let_go_is_used_again(self, index: ChunkIndex) -> None:
        (chunk,) = add(index, b"a" * 32)
        assert index.withdraw(numbers(int(chunk)), 0).tolist() == [chunk]
        assert len(index) == 0
        assert add(index, b"b" * 32).tolist() == [chunk]
        assert index.leases(numbers(int(chunk))).tolist() == [0]

    def test_a_lease_keeps_a_chunk_that_no_tier_holds(self, index: ChunkIndex) -> None:
        chunks = add(index, b"a" * 32)
        index.lease(chunks)
        assert index.withdraw(chunks, 0).tolist() == chunks.tolist()
        assert index.tiers(chunks).tolist() == [0]
        index.release(chunks)
        assert index.find(b"a" * 32).tolist() == [NONE]

    def test_a_chunk_in_two_tiers_is_let_go_by_the_second(self, index: ChunkIndex) -> None:
        chunks = add(index, b"a" * 32)
        index.publish(chunks, 1)
        assert index.withdraw(chunks, 0).tolist() == []
        assert index.withdraw(chunks, 1).tolist() == chunks.tolist()

    def test_one_that_never_reached_a_tier_is_let_go_by_withdraw(self, index: ChunkIndex) -> None:
        one = numbers(1)
        chunks = index.add(NONE, b"a" * 32, one, one.astype(np.uint64))
        assert index.withdraw(chunks, 0).tolist() == chunks.tolist()
        assert len(index) == 0

    def test_a_chunk_named_twice_is_withdrawn_once(self, index: ChunkIndex) -> None:
        chunks = add(index, b"a" * 32 + b"b" * 32)
        index.lease(chunks[1:])
        twice = np.concatenate([chunks, chunks])
        assert index.withdraw(twice, 0).tolist() == chunks.tolist()
        assert index.withdraw(chunks[1:], 0).tolist() == chunks[1:].tolist()

    def test_more_releases_than_leases_are_refused_and_nothing_is_released(
        self, index: ChunkIndex
    ) -> None:
        chunks = add(index, b"a" * 32 + b"b" * 32)
        index.lease(chunks)
        with pytest.raises(ValueError, match="more often than it is leased"):
            index.release(np.concatenate([chunks, chunks]))
        assert index.leases(chunks).tolist() == [1, 1]


class TestRefusals:
    @pytest.mark.parametrize("tier_count", [-1, 0, 9])
    def test_a_tier_count_beyond_one_to_eight(self, tier_count: int) -> None:
        with pytest.raises(ValueError, match=f"{tier_count} tiers, must be 1 to 8"):
            ChunkIndex(tier_count)

    def test_eight_tiers_are_told_apart(self) -> None:
        index = ChunkIndex(8)
        chunks = add(index, b"a" * 32)
        index.publish(chunks, 7)
        assert index.tiers(chunks).tolist() == [0b1000_0001]
        assert index.held(7).tolist() == chunks.tolist()
        assert index.held(6).tolist() == []

    @pytest.mark.parametrize("tier", [-1, 2])
    def test_a_tier_that_is_not_there(self, index: ChunkIndex, tier: int) -> None:
        chunks = add(index, b"a" * 32)
        calls: list[Callable[[], Any]] = [
            lambda: index.publish(chunks, tier),
            lambda: index.withdraw(chunks, tier),
            lambda: index.held(tier),
        ]
        for call in calls:
            with pytest.raises(ValueError, match=f"tier {tier}, must be 0 to 1"):
                call()

    @pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint64, np.float64])
    def test_chunk_numbers_of_another_type(self, index: ChunkIndex, dtype: type) -> None:
        """2**32 as uint32 would be chunk 0."""
        chunks: Any = add(index, b"a" * 32).astype(dtype)
        with pytest.raises(TypeError):
            index.publish(chunks, 1)

    def test_a_run_on_an_unknown_parent_adds_nothing(self, index: ChunkIndex) -> None:
        with pytest.raises(ValueError, match="chunk 7 is not known"):
            add(index, b"a" * 32, parent=7)
        assert len(index) == 0

    @pytest.mark.parametrize(
        ("keys", "tokens", "nbytes", "message"),
        [
            (b"k" * 33, 1, 1, "33 bytes of keys"),
            (b"k" * 32, 2, 1, "2 token counts and 1 sizes for 1 keys"),
            (b"k" * 32, 1, 0, "1 token counts and 0 sizes for 1 keys"),
        ],
    )
    def test_ragged_arguments_add_nothing(
        self, index: ChunkIndex, keys: bytes, tokens: int, nbytes: int, message: str
    ) -> None:
        counts = np.ones(tokens, dtype=np.uint32)
        sizes = np.ones(nbytes, dtype=np.uint64)
        with pytest.raises(ValueError, match=message):
            index.add(NONE, keys, counts, sizes)
        with pytest.raises(ValueError, match=message):
            index.add_linked(keys, keys, counts, sizes)
        assert len(index) == 0

    def test_keys_without_their_parents_add_nothing(self, index: ChunkIndex) -> None:
        one = numbers(1)
        with pytest.raises(ValueError, match="0 parent keys for 1 keys"):
            index.add_linked(b"k" * 32, b"", one, one.astype(np.uint64))
        assert len(index) == 0

    def test_a_chunk_of_no_tokens_spoils_its_whole_run(self, index: ChunkIndex) -> None:
        with pytest.raises(ValueError, match="position 1 covers 0 tokens"):
            index.add(NONE, b"a" * 32 + b"b" * 32, numbers(1, 0), np.ones(2, dtype=np.uint64))
        assert len(index) == 0


class TestSizes:
    def test_strided_views_are_as_good_as_copies(self, index: ChunkIndex) -> None:
        chunks = add(index, b"a" * 32 + b"b" * 32 + b"c" * 32)
        assert index.keys(chunks[::-1]) == b"c" * 32 + b"b" * 32 + b"a" * 32
        index.publish(chunks[::2], 1)
        assert index.tiers(chunks).tolist() == [3, 1, 3]

    def test_empty_arrays_are_welcome_everywhere(self, index: ChunkIndex) -> None:
        sizes = np.empty(0, dtype=np.uint64)
        assert index.add(NONE, b"", EMPTY, sizes).tolist() == []
        assert index.add_linked(b"", b"", EMPTY, sizes).tolist() == []
        assert index.find(b"").tolist() == []
        assert index.withdraw(EMPTY, 0).tolist() == []
        assert index.keys(EMPTY) == b""
        assert index.tiers(EMPTY).tolist() == []
        index.publish(EMPTY, 0)
        index.lease(EMPTY)
        index.release(EMPTY)
        assert len(index) == 0

    def test_growth_keeps_every_number_and_every_prefix(self, index: ChunkIndex) -> None:
        tokens = np.arange(CHUNK_TOKENS * 3000, dtype=np.uint32)
        keys = chain_keys(ROOT, tokens, CHUNK_TOKENS)
        chunks: list[int] = []
        parent = NONE
        for first in range(0, len(keys), 32 * 100):
            chunks += add(index, keys[first : first + 32 * 100], parent=parent).tolist()
            parent = chunks[-1]
        assert index.find(keys).tolist() == chunks
        assert lookup(index, tokens) == chunks
        assert index.suffix(chunks[0]).tolist() == chunks[1:]

    def test_a_rebuild_in_any_order_gives_the_same_tree(self, index: ChunkIndex) -> None:
        tokens = np.arange(CHUNK_TOKENS * 1000, dtype=np.uint32)
        keys = chain_keys(ROOT, tokens, CHUNK_TOKENS)
        parents = bytes(32) + keys[:-32]
        order = np.random.default_rng(5).permutation(1000)

        def shuffled(packed: bytes) -> bytes:
            return b"".join(packed[32 * i : 32 * i + 32] for i in order)

        chunks = index.add_linked(
            shuffled(keys),
            shuffled(parents),
            np.full(1000, CHUNK_TOKENS, dtype=np.uint32),
            np.full(1000, 100, dtype=np.uint64),
        )
        index.publish(chunks, 1)
        run = lookup(index, tokens)
        assert index.keys(numbers(*run)) == keys
        assert index.suffix(run[0]).tolist() == run[1:]

    def test_a_hundred_thousand_chunks_take_150_bytes_each_at_most(self, index: ChunkIndex) -> None:
        keys = np.random.default_rng(6).bytes(32 * 100_000)
        before = index.memory_bytes
        add(index, keys)
        assert 72 * 100_000 < index.memory_bytes - before <= 150 * 100_000

    def test_room_of_chunks_let_go_is_used_again(self, index: ChunkIndex) -> None:
        random = np.random.default_rng(7)
        add(index, random.bytes(32 * 10_000))
        full = index.memory_bytes
        for _ in range(5):
            index.withdraw(index.held(0), 0)
            assert len(index) == 0
            add(index, random.bytes(32 * 10_000))
        assert index.memory_bytes == full
