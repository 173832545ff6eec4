"""Which chunks are held, where, and who leases them.

The table itself is native (`_core.ChunkIndex`: keys, prefix tree, tiers, lease counts); this module
adds what needs a clock or a name: leases that expire, and which chunks begin a namespace. Nothing
here does I/O. `lock` guards the index and the hierarchy's books alike; every method expects the
caller to hold it.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from dataclasses import dataclass, field

import numpy as np

from kvtier import _core
from kvtier.clock import Clock
from kvtier.policy import ChunkNumbers

NONE: int = _core.ChunkIndex.NONE
"""The chunk number of no chunk."""


@dataclass(slots=True, eq=False)
class Lease:
    """A counted hold on chunks: they are not evicted until it is released or expires."""

    chunks: ChunkNumbers
    expires_s: float
    """On the index's clock."""
    owner: str = ""
    active: bool = True

    def __repr__(self) -> str:
        state = "active" if self.active else "ended"
        return f"<Lease of {len(self.chunks)} chunks, {state}, owner {self.owner!r}>"


@dataclass(slots=True)
class _Roots:
    """Which chunks have no parent, per namespace."""

    by_namespace: dict[bytes, set[int]] = field(default_factory=dict)
    namespace_of: dict[int, bytes] = field(default_factory=dict)

    def add(self, namespace: bytes, chunk: int) -> None:
        self.by_namespace.setdefault(namespace, set()).add(chunk)
        self.namespace_of[chunk] = namespace

    def discard(self, chunk: int) -> None:
        namespace = self.namespace_of.pop(chunk, None)
        if namespace is not None:
            members = self.by_namespace[namespace]
            members.discard(chunk)
            if not members:
                del self.by_namespace[namespace]


class Index:
    """The table, its lock, its leases and its namespaces."""

    def __init__(self, tier_count: int, clock: Clock) -> None:
        self.lock = threading.RLock()
        self.table = _core.ChunkIndex(tier_count)
        self._clock = clock
        self._expiries: list[tuple[float, int, Lease]] = []
        self._serial = itertools.count()
        self._roots = _Roots()
        self.lease_count = 0

    # Leases -------------------------------------------------------------------------------------

    def lease(self, chunks: ChunkNumbers, ttl_s: float, owner: str = "") -> Lease:
        """Hold `chunks` for `ttl_s` seconds at most."""
        self.expire()
        lease = Lease(chunks, self._clock.now_s() + ttl_s, owner)
        self.table.lease(chunks)
        self.lease_count += 1
        heapq.heappush(self._expiries, (lease.expires_s, next(self._serial), lease))
        return lease

    def release(self, lease: Lease) -> bool:
        """End `lease`; False if it had ended already, which is no error: owners may race expiry."""
        if not lease.active:
            return False
        lease.active = False
        self.lease_count -= 1
        self.table.release(lease.chunks)
        if len(self._expiries) > 64 and len(self._expiries) > 2 * self.lease_count:
            self._expiries = [entry for entry in self._expiries if entry[2].active]
            heapq.heapify(self._expiries)
        return True

    def expire(self) -> int:
        """End every lease whose time is over; how many there were."""
        now_s, ended = self._clock.now_s(), 0
        while self._expiries and self._expiries[0][0] <= now_s:
            ended += self.release(heapq.heappop(self._expiries)[2])
        return ended

    # Namespaces ---------------------------------------------------------------------------------

    def add_root(self, namespace: bytes, chunk: int) -> None:
        """`chunk` has no parent and belongs to `namespace`."""
        self._roots.add(namespace, chunk)

    def forget_root(self, chunk: int) -> None:
        """`chunk` is not held any more; its number may be used again."""
        self._roots.discard(chunk)

    def namespace_of(self, root: int) -> bytes | None:
        """The namespace that begins with `root`, None if none does."""
        return self._roots.namespace_of.get(root)

    def namespace_chunks(self, namespace: bytes) -> ChunkNumbers:
        """All chunks of a namespace, parents before children."""
        numbers: list[int] = []
        for root in self._roots.by_namespace.get(namespace, ()):
            numbers.append(root)
            numbers.extend(self.table.suffix(root).tolist())
        return np.array(list(dict.fromkeys(numbers)), dtype=np.uint32)

    def namespaces(self) -> dict[bytes, int]:
        """Namespace ids and how many prompts begin in each."""
        return {name: len(members) for name, members in self._roots.by_namespace.items()}
