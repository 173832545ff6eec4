"""The one statement of what an eviction policy is; `kvtier.policies` implements it per tier.

A policy orders the chunks of one tier by worth. It knows chunks by their index number only, keeps
no bytes, reads no clock but the one it is given, and owns no thread. The hierarchy calls it under
its lock, so methods are quick and never block.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

ChunkNumbers = npt.NDArray[np.uint32]
"""Index numbers of chunks; where they form a run of one prefix, in order from the root down."""


class Policy(abc.ABC):
    """Whom to admit to a tier, and whom to evict first."""

    def admit(self, chunks: ChunkNumbers) -> Sequence[bool] | None:
        """Which of these new chunks deserve room; None admits all."""
        return None

    @abc.abstractmethod
    def insert(self, chunks: ChunkNumbers) -> None:
        """These chunks, a run of one prefix from the root down, now live in the tier."""

    @abc.abstractmethod
    def touch(self, chunks: ChunkNumbers) -> None:
        """These chunks, a run of one prefix from the root down, were used. Unknown ones are ignored."""

    @abc.abstractmethod
    def forget(self, chunks: ChunkNumbers) -> None:
        """These chunks left the tier. Unknown ones are ignored."""

    @abc.abstractmethod
    def victims(self, count: int) -> ChunkNumbers:
        """Up to `count` chunks, least worth first, a prefix never before its continuation.

        Nothing changes: the hierarchy calls `forget` for those it does evict.
        """

    @abc.abstractmethod
    def __len__(self) -> int: ...
