"""LRU against the suite that every policy inherits, and in its own order."""

from __future__ import annotations

from kvtier.policies.lru import LruPolicy
from kvtier.testing.policy_suite import PolicySuite, numbers, victims


class TestLruPolicy(PolicySuite):
    def make(self) -> LruPolicy:
        return LruPolicy()

    def test_the_least_recently_used_run_leaves_first(self) -> None:
        policy = self.make()
        policy.insert(numbers(1, 2))
        policy.insert(numbers(3, 4))
        policy.touch(numbers(1, 2))
        assert victims(policy, 10) == [4, 3, 2, 1]

    def test_an_insert_counts_as_a_use(self) -> None:
        policy = self.make()
        policy.insert(numbers(1))
        policy.insert(numbers(2))
        policy.insert(numbers(1))
        assert victims(policy, 10) == [2, 1]

    def test_it_admits_all(self) -> None:
        assert self.make().admit(numbers(1, 2)) is None
