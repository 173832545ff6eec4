"""What every `kvtier.policy.Policy` must do; a policy's tests inherit `PolicySuite`.

class TestMyPolicy(PolicySuite):
    def make(self) -> MyPolicy:
        return MyPolicy()
"""

from __future__ import annotations

import abc
import random
from collections.abc import Sequence

import numpy as np
import pytest

from kvtier.policy import ChunkNumbers, Policy


def numbers(*chunks: int) -> ChunkNumbers:
    """These chunk numbers as policies take them."""
    return np.array(chunks, dtype=np.uint32)


class PolicySuite(abc.ABC):
    """Conformance of one policy: bookkeeping, and a prefix never before its continuation."""

    @abc.abstractmethod
    def make(self) -> Policy:
        """A new, empty policy."""

    def test_a_new_policy_is_empty_and_names_no_victims(self) -> None:
        policy = self.make()
        assert len(policy) == 0
        assert victims(policy, 10) == []

    def test_inserted_chunks_are_counted_once(self) -> None:
        policy = self.make()
        policy.insert(numbers(3, 1, 2))
        policy.insert(numbers(3, 1, 2, 4))
        assert len(policy) == 4
        assert sorted(victims(policy, 10)) == [1, 2, 3, 4]

    def test_a_forgotten_chunk_is_no_victim(self) -> None:
        policy = self.make()
        policy.insert(numbers(1, 2, 3))
        policy.forget(numbers(2))
        assert len(policy) == 2
        assert sorted(victims(policy, 10)) == [1, 3]

    def test_a_number_can_come_back_for_another_chunk(self) -> None:
        policy = self.make()
        policy.insert(numbers(1, 2, 3))
        policy.forget(numbers(3, 2, 1))
        policy.insert(numbers(2, 1))
        assert len(policy) == 2
        assert victims(policy, 10) == [1, 2]

    def test_unknown_chunks_are_ignored_by_touch_and_forget(self) -> None:
        policy = self.make()
        policy.insert(numbers(1, 2))
        policy.touch(numbers(1, 9, 2, 100_000))
        policy.forget(numbers(9, 100_000))
        assert len(policy) == 2
        assert sorted(victims(policy, 10)) == [1, 2]

    def test_empty_batches_change_nothing(self) -> None:
        policy = self.make()
        policy.insert(numbers(1, 2))
        for call in (policy.insert, policy.touch, policy.forget):
            call(numbers())
        assert sorted(victims(policy, 10)) == [1, 2]

    def test_strided_views_are_as_good_as_copies(self) -> None:
        policy = self.make()
        policy.insert(numbers(3, 0, 2, 0, 1)[::-2])
        policy.touch(numbers(1, 9, 2, 9, 3)[::2])
        assert victims(policy, 10) == [3, 2, 1]
        policy.forget(numbers(3, 9, 2)[::-2])
        assert victims(policy, 10) == [1]

    def test_admission_answers_for_every_chunk_or_admits_all(self) -> None:
        policy = self.make()
        for chunks in (numbers(), numbers(1), numbers(1, 2, 3)):
            admitted = policy.admit(chunks)
            assert admitted is None or len(admitted) == len(chunks)
        assert len(policy) == 0, "asking is not inserting"

    @pytest.mark.parametrize("count", [0, 1, 3, 4, 5])
    def test_there_are_as_many_victims_as_asked_for_or_as_there_are_chunks(
        self, count: int
    ) -> None:
        """A hierarchy that may not evict some of them (they are leased) must be able to go on."""
        policy = self.make()
        policy.insert(numbers(1, 2, 3, 4))
        found = policy.victims(count)
        assert found.dtype == np.uint32
        assert len(set(found.tolist())) == len(found) == min(count, 4)

    def test_asking_for_victims_changes_nothing(self) -> None:
        policy = self.make()
        policy.insert(numbers(1, 2, 3, 4))
        policy.touch(numbers(1, 2))
        first = victims(policy, 3)
        assert victims(policy, 3) == first
        assert len(policy) == 4

    def test_a_run_leaves_from_its_tail(self) -> None:
        policy = self.make()
        policy.insert(numbers(10, 11, 12, 13))
        assert victims(policy, 10) == [13, 12, 11, 10]

    def test_a_touched_run_leaves_from_its_tail(self) -> None:
        policy = self.make()
        policy.insert(numbers(10, 11, 12, 13))
        policy.touch(numbers(10, 11, 12, 13))
        assert victims(policy, 10) == [13, 12, 11, 10]

    def test_use_of_a_mere_prefix_keeps_it_before_its_continuation(self) -> None:
        policy = self.make()
        policy.insert(numbers(10, 11, 12, 13))
        policy.touch(numbers(10, 11))
        check_prefixes_last(policy, [[10, 11, 12, 13]])

    def test_a_shared_prefix_outlives_both_of_its_continuations(self) -> None:
        policy = self.make()
        policy.insert(numbers(1, 2, 10, 11))
        policy.insert(numbers(1, 2, 20, 21))
        check_prefixes_last(policy, [[1, 2, 10, 11], [1, 2, 20, 21]])
        policy.touch(numbers(1, 2, 10, 11))
        check_prefixes_last(policy, [[1, 2, 10, 11], [1, 2, 20, 21]])

    def test_a_continuation_inserted_alone_and_touched_as_a_run_leaves_first(self) -> None:
        policy = self.make()
        policy.insert(numbers(1, 2))
        policy.insert(numbers(3, 4))
        policy.touch(numbers(1, 2, 3, 4))
        assert victims(policy, 10) == [4, 3, 2, 1]

    @pytest.mark.parametrize("seed", range(5))
    def test_in_random_histories_no_prefix_leaves_before_its_continuation(self, seed: int) -> None:
        """Runs come and are used as a tier sees them; evictions follow the policy's own advice."""
        random_ = random.Random(seed)
        policy = self.make()
        parents = {chunk: random_.randrange(-1, chunk) for chunk in range(60)}  # -1: a root
        runs = [run_to(chunk, parents) for chunk in parents]
        held: set[int] = set()
        for _ in range(300):
            run = random_.choice(runs)
            action = random_.random()
            if action < 0.4:
                policy.insert(numbers(*run))
                held.update(run)
            elif action < 0.7:
                policy.touch(numbers(*run))
            else:
                evicted = victims(policy, random_.randrange(4))
                policy.forget(numbers(*evicted))
                held.difference_update(evicted)
            assert len(policy) == len(held), f"seed {seed}"
            assert set(victims(policy, 100)) == held, f"seed {seed}"
            check_prefixes_last(policy, runs)


def victims(policy: Policy, count: int) -> list[int]:
    """`policy.victims` as a list, which compares and prints better."""
    return [int(chunk) for chunk in policy.victims(count)]


def run_to(chunk: int, parents: dict[int, int]) -> list[int]:
    """The run from its root down to `chunk`."""
    run: list[int] = []
    while chunk >= 0:
        run.insert(0, chunk)
        chunk = parents[chunk]
    return run


def check_prefixes_last(policy: Policy, runs: Sequence[Sequence[int]]) -> None:
    """Fail if the victims have any chunk of a run before one that continues it."""
    order = {chunk: place for place, chunk in enumerate(victims(policy, 1_000_000))}
    for run in runs:
        places = [order[chunk] for chunk in run if chunk in order]
        assert places == sorted(places, reverse=True), f"run {run} leaves in order {places}"
