"""Least recently used, prefix-aware: of chunks of one age, the deepest leaves first."""

from __future__ import annotations

from kvtier._core import LruOrder
from kvtier.policy import ChunkNumbers, Policy


class LruPolicy(Policy):
    """Admits all; evicts whatever was unused for longest.

    A run counts as used from its tail to its root, so a prefix is always more recent than its
    continuations and outlives them. 8 bytes a chunk.
    """

    def __init__(self) -> None:
        self._order = LruOrder()

    def insert(self, chunks: ChunkNumbers) -> None:
        self._order.touch(chunks, True)

    def touch(self, chunks: ChunkNumbers) -> None:
        self._order.touch(chunks, False)

    def forget(self, chunks: ChunkNumbers) -> None:
        self._order.remove(chunks)

    def victims(self, count: int) -> ChunkNumbers:
        return self._order.oldest(count)

    def __len__(self) -> int:
        return len(self._order)
