"""The ordered tiers and their books: who is where, what must go, what each tier still has room for.

Tier 0 is memory whose records are filled and read in place; the tiers below are any backends.
Books change only under the index's lock, and only after the bytes are where the books will say.
The one exception to "no I/O here" is memory itself: freeing a slab record is a dictionary's work.
For the tiers below, methods return what is to be removed and the write-back thread removes it, so
one thread alone changes a tier's files.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from kvtier.backend import AddressableBackend, Backend
from kvtier.clock import Clock
from kvtier.errors import ConfigError, CorruptChunk
from kvtier.events import EventKind, EventLog
from kvtier.index import NONE, Index
from kvtier.manifest import NO_PARENT, Head, decode_head
from kvtier.metrics import Metrics
from kvtier.policy import ChunkNumbers, Policy
from kvtier.types import KEY_BYTES, ChunkKey, Descriptor

log = logging.getLogger("kvtier")

MEMORY = 0
"""Number of the memory tier."""

FOUND_MAX = (
    1 << 18
)  # per shared tier; 25 MB of index. Beyond it the least recently used are forgotten
_OF_THE_BOOKS = {"unreachable", "forgotten"}
"""Reasons for which a shared tier's records leave the books only: others may reach them."""


@dataclass(slots=True)
class Tier:
    """One level: a backend, a capacity, a policy, and what it holds."""

    number: int
    name: str
    backend: Backend
    policy: Policy
    capacity_bytes: int
    used_bytes: int = 0
    """Bytes of the records it holds; memory counts its own, reservations included. Of a shared tier
    only those that this process stored."""
    found: dict[int, None] = field(default_factory=dict)
    """Of a shared tier: chunks that others stored, oldest use first. They are neither in `used_bytes`
    nor in the policy, so that no eviction here removes them."""

    @property
    def is_shared(self) -> bool:
        """Whether others store in its place too."""
        return self.backend.capabilities.shared

    def touch(self, run: ChunkNumbers) -> None:
        """A run of one prefix was used; what is not here is ignored."""
        self.policy.touch(run)
        if self.found:
            for chunk in reversed(run.tolist()):  # the root side outlives its leaves
                if chunk in self.found:
                    del self.found[chunk]
                    self.found[chunk] = None


@dataclass(slots=True)
class Removals:
    """Records that the books no longer have and a tier below still stores."""

    keys_by_tier: dict[int, list[ChunkKey]] = field(default_factory=dict)

    def add(self, tier: int, keys: Iterable[ChunkKey]) -> None:
        """`keys` are to be removed from tier number `tier`."""
        self.keys_by_tier.setdefault(tier, []).extend(keys)

    def __bool__(self) -> bool:
        return any(self.keys_by_tier.values())


@dataclass(frozen=True, slots=True)
class Room:
    """Whether a tier below can take a batch, and what has to go for it."""

    granted: bool
    removals: Removals
    bound: str = ""
    """Which limit refused: ``capacity`` or ``free space``."""


def numbers(values: Iterable[int]) -> ChunkNumbers:
    """Chunk numbers as the native side takes them."""
    return np.fromiter(values, dtype=np.uint32)


def split_keys(joined: bytes) -> list[ChunkKey]:
    """Keys from their concatenation."""
    return [ChunkKey(joined[i : i + KEY_BYTES]) for i in range(0, len(joined), KEY_BYTES)]


class Hierarchy:
    """The tiers of one `KVTier`. Methods take the index's lock themselves; any thread."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        clock: Clock,
        events: EventLog,
        metrics: Metrics,
        remove_below: Callable[[Removals], None],
    ) -> None:
        memory = tiers[MEMORY].backend
        if not isinstance(memory, AddressableBackend):
            raise ConfigError(
                f"tiers.0: {tiers[MEMORY].name!r} is no memory; chunks are filled and read in the "
                "first tier, so it must be of kind 'memory'"
            )
        self.tiers = list(tiers)
        self.memory = memory
        self.index = Index(len(tiers), clock)
        self._events = events
        self._metrics = metrics
        self._remove_below = remove_below  # queues removals; called under the lock

    # Memory -------------------------------------------------------------------------------------

    def reserve(self, nbytes: int) -> Descriptor | None:
        """Room for one record in memory, evicting what is worth least; None if all is in use."""
        with self.index.lock:
            record = self.memory.reserve(nbytes)
            if record is not None:
                return record
            self.index.expire()
            tier = self.tiers[MEMORY]
            for victim in self._victims(tier):
                self._remove_below(self._evict(tier, numbers([victim])))
                record = self.memory.reserve(nbytes)
                if record is not None:
                    return record
            return None

    def cancel(self, records: Iterable[Descriptor]) -> None:
        """Give reservations back unused."""
        for record in records:
            self.memory.cancel(record)

    def commit(
        self,
        namespace: bytes,
        parent: int,
        heads: Sequence[Head],
        records: Sequence[Descriptor | None],
    ) -> ChunkNumbers:
        """Publish filled records, a run that continues chunk number `parent`; their numbers.

        None in place of a record stands for a chunk of the run that is held already.

        The chunks come back with one lease count each, which the caller releases: between commit
        and write-back nothing may evict them.
        """
        with self.index.lock:
            table = self.index.table
            chunks = table.add(
                parent,
                b"".join(head.key for head in heads),
                np.array([head.tokens for head in heads], dtype=np.uint32),
                np.array([head.record_bytes for head in heads], dtype=np.uint64),
            )
            table.lease(chunks)
            fresh = []
            for head, record, chunk in zip(heads, records, chunks.tolist(), strict=True):
                if record is None:
                    continue
                if self.memory.commit(head.key, record):
                    fresh.append(chunk)
                else:
                    self._metrics.add("store_raced")  # another thread stored it meanwhile
            for chunk in chunks.tolist():
                self.index.forget_root(chunk)  # one that had lost its parent has it back
            if parent == NONE and len(chunks):
                self.index.add_root(namespace, int(chunks[0]))
            if fresh:
                table.publish(numbers(fresh), MEMORY)
                # With its prefix, which else would be the older one and take all this along.
                run = self._ancestry(int(chunks[-1]))
                self._insert(self.tiers[MEMORY], run)
                for tier in self.tiers[MEMORY + 1 :]:
                    tier.touch(run)
                self._emit(EventKind.STORED, MEMORY, numbers(fresh))
            return chunks

    def promote(self, chunk: int, head: Head, record: Descriptor) -> Descriptor:
        """Publish in memory a leased chunk read from below; where it lies, should another have won."""
        with self.index.lock:
            if self.memory.commit(head.key, record):
                one = numbers([chunk])
                self.index.table.publish(one, MEMORY)
                self.tiers[MEMORY].policy.insert(one)
                if self.index.table.parent(chunk) == NONE:  # it may have been withdrawn meanwhile
                    self.index.add_root(head.namespace_id, chunk)
                self._emit(EventKind.STORED, MEMORY, one)
                return record
            held = self.memory.locate([head.key])[0]
            assert held is not None, "a key that memory refuses is held by it"
            return held

    def touch(self, run: ChunkNumbers) -> None:
        """A run of one prefix was used: tell every tier's policy."""
        with self.index.lock:
            for tier in self.tiers:
                tier.touch(run)

    # Tiers below --------------------------------------------------------------------------------

    def room_below(self, tier: Tier, nbytes: int) -> Room:
        """Make room for `nbytes` in a tier below, within its capacity and its place's free space."""
        free = tier.backend.free_bytes()
        with self.index.lock:
            self.index.expire()
            bound, limit = "capacity", tier.capacity_bytes
            if free is not None and tier.used_bytes + free < limit:
                bound, limit = "free space", tier.used_bytes + free
            removals = Removals()
            if nbytes > limit:
                return Room(False, removals, bound)
            for victim in self._victims(tier):
                if tier.used_bytes + nbytes <= limit:
                    break
                self._merge(removals, self._evict(tier, numbers([victim])))
            return Room(tier.used_bytes + nbytes <= limit, removals, bound)

    def publish_below(
        self, tier: Tier, chunks: ChunkNumbers, found: frozenset[int] = frozenset()
    ) -> None:
        """The tier now holds these leased chunks durably; those in `found` somebody else stored."""
        with self.index.lock:
            table = self.index.table
            # Each once: a chunk that was queued twice may come twice in one batch.
            chunks = numbers(dict.fromkeys(chunks.tolist()))
            fresh = chunks[(table.tiers(chunks) & (1 << tier.number)) == 0]
            table.publish(fresh, tier.number)
            tier.found.update((chunk, None) for chunk in fresh.tolist() if chunk in found)
            tier.used_bytes += int(table.nbytes(_without(fresh, tier.found)).sum())
            runs: list[ChunkNumbers] = []  # whole ones, without those that others contain
            inside: set[int] = set()
            for chunk in reversed(fresh.tolist()):
                if chunk not in inside:
                    runs.append(self._ancestry(chunk))
                    inside.update(runs[-1].tolist())
            for run in reversed(runs):
                self._insert(tier, run)
            self._emit(EventKind.STORED, tier.number, fresh)

    def adopt(self, tier: Tier, heads: Sequence[Head]) -> None:
        """A shared tier was asked and holds these, a run whose beginning is known."""
        with self.index.lock:
            table = self.index.table
            chunks = table.add_linked(
                b"".join(head.key for head in heads),
                b"".join(head.parent for head in heads),
                np.array([head.tokens for head in heads], dtype=np.uint32),
                np.array([head.record_bytes for head in heads], dtype=np.uint64),
            )
            for head, chunk in zip(heads, chunks.tolist(), strict=True):
                if head.parent == NO_PARENT:
                    self.index.add_root(head.namespace_id, chunk)
                else:
                    self.index.forget_root(chunk)  # one that had lost its parent has it back
            fresh = chunks[(table.tiers(chunks) & (1 << tier.number)) == 0]
            table.publish(fresh, tier.number)
            tier.found.update((chunk, None) for chunk in fresh.tolist())
            tier.touch(chunks)
            self._metrics.add(f"found_chunks_{tier.name}", len(fresh))
            self._events.emit(EventKind.STORED, tier.name, split_keys(table.keys(fresh)))
            if len(tier.found) > FOUND_MAX:
                oldest = numbers(islice(tier.found, len(tier.found) - FOUND_MAX))
                free = oldest[table.leases(oldest) == 0]
                self._remove_below(self._withdraw(tier, free, "forgotten"))

    # Leaving ------------------------------------------------------------------------------------

    def withdraw(self, tier: Tier, chunks: ChunkNumbers, reason: str) -> Removals:
        """Take chunks out of one tier, with every continuation that this makes unreachable.

        Leased chunks may be named only for a tier below: their memory is in use.
        """
        with self.index.lock:
            return self._withdraw(tier, chunks, reason)

    def drop(
        self, chunks: ChunkNumbers, reason: str, *, tier: Tier | None = None
    ) -> tuple[int, int, Removals]:
        """Take unleased chunks out of all tiers or one: (chunks dropped, skipped, removals)."""
        with self.index.lock:
            self.index.expire()
            removals = Removals()
            free = chunks[self.index.table.leases(chunks) == 0]
            touched: set[int] = set()
            for each in self.tiers if tier is None else [tier]:
                # Withdrawing may have freed continuations for good: ask again for each tier.
                here = [chunk for chunk in free.tolist() if self._holds(each, chunk)]
                touched.update(here)
                self._merge(removals, self._withdraw(each, numbers(reversed(here)), reason))
            dropped = len(touched)
            return dropped, len(chunks) - len(free), removals

    def _withdraw(self, tier: Tier, chunks: ChunkNumbers, reason: str) -> Removals:
        removals = Removals()
        if not len(chunks):
            return removals
        table = self.index.table
        lone = chunks[table.tiers(chunks) == (1 << tier.number)]
        leaving = set(lone.tolist())
        doomed = {
            child
            for chunk in lone.tolist()
            for child in table.suffix(chunk).tolist()
            if child not in leaving
        }
        if doomed:
            suffix = numbers(sorted(doomed))
            is_leased = table.leases(suffix) != 0
            self._keep_findable(suffix[is_leased], leaving.union(suffix[~is_leased].tolist()))
            suffix = suffix[~is_leased]
            masks = table.tiers(suffix)  # an entry lives until its last tier is taken out
            for other in self.tiers:
                here = suffix[(masks & (1 << other.number)) != 0]
                if other is tier:
                    here = here[~np.isin(here, chunks)]  # they go below, for the caller's reason
                if len(here):
                    self._take_out(other, here, "unreachable", removals)
        self._take_out(tier, chunks, reason, removals)
        return removals

    def _keep_findable(self, chunks: ChunkNumbers, leaving: set[int]) -> None:
        """Leased chunks stay when a parent leaves; their namespace keeps them as beginnings."""
        for chunk in chunks.tolist():
            if self.index.table.parent(chunk) in leaving:
                namespace = self.index.namespace_of(int(self._ancestry(chunk)[0]))
                if namespace is not None:
                    self.index.add_root(namespace, chunk)

    def _take_out(self, tier: Tier, chunks: ChunkNumbers, reason: str, removals: Removals) -> None:
        """Books and memory of one tier; `chunks` are all held by it."""
        table = self.index.table
        keys = split_keys(table.keys(chunks))
        nbytes = int(table.nbytes(_without(chunks, tier.found)).sum())
        tier.policy.forget(chunks)
        for chunk in chunks.tolist() if tier.found else ():
            tier.found.pop(chunk, None)
        gone = table.withdraw(chunks, tier.number)
        for chunk in gone.tolist():
            self.index.forget_root(chunk)
        if tier.number == MEMORY:
            self.memory.remove(keys)
        else:
            tier.used_bytes -= nbytes
            if not (tier.is_shared and reason in _OF_THE_BOOKS):
                removals.add(tier.number, keys)
        self._metrics.add(f"removed_chunks_{tier.name}_{reason}", len(keys))
        self._events.emit(EventKind.REMOVED, tier.name, keys, reason)

    def _evict(self, tier: Tier, chunks: ChunkNumbers) -> Removals:
        lower = len(self.tiers) > tier.number + 1
        if lower:
            mask = self.index.table.tiers(chunks)
            unsaved = int((mask == (1 << tier.number)).sum())
            if unsaved:
                self._metrics.add("evicted_unsaved_chunks", unsaved)
        return self._withdraw(tier, chunks, "evicted")

    def _victims(self, tier: Tier) -> Iterator[int]:
        """Unleased chunks of a tier, least worth first; the caller evicts each before the next."""
        want = 64
        while True:
            order = tier.policy.victims(want)
            free = order[self.index.table.leases(order) == 0] if len(order) else order
            if not len(free):
                if len(order) < want:
                    return
                want *= 4
                continue
            for chunk in free.tolist():
                # An eviction takes unreachable continuations along: they may be in this list.
                if not self._holds(tier, chunk):
                    continue
                yield chunk
                if self._holds(tier, chunk):
                    return  # the caller did not evict it, so it has what it wanted

    def _holds(self, tier: Tier, chunk: int) -> bool:
        try:
            return bool(self.index.table.tiers(numbers([chunk]))[0] & (1 << tier.number))
        except ValueError:
            return False

    def _insert(self, tier: Tier, run: ChunkNumbers) -> None:
        """Tell a tier's policy of a run; of what only other tiers hold it must never hear."""
        here = run[(self.index.table.tiers(run) & (1 << tier.number)) != 0]
        tier.policy.insert(_without(here, tier.found))

    def _ancestry(self, chunk: int) -> ChunkNumbers:
        """The run from the prompt's start to `chunk`."""
        run = []
        while chunk != NONE:
            run.append(chunk)
            chunk = self.index.table.parent(chunk)
        return numbers(reversed(run))

    def _emit(self, kind: EventKind, tier: int, chunks: ChunkNumbers) -> None:
        keys = split_keys(self.index.table.keys(chunks))
        if keys:
            self._metrics.add(f"stored_chunks_{self.tiers[tier].name}", len(keys))
            self._events.emit(kind, self.tiers[tier].name, keys)

    @staticmethod
    def _merge(into: Removals, more: Removals) -> None:
        for tier, keys in more.keys_by_tier.items():
            into.add(tier, keys)

    # Restart ------------------------------------------------------------------------------------

    def rebuild(self, tier: Tier) -> None:
        """Fill the books of a persistent tier from what its backend holds; damaged heads leave.

        A chunk whose prefix is not held can never be hit, so it is removed as well.
        """
        heads: list[Head] = []
        sizes: list[int] = []
        damaged: list[ChunkKey] = []
        for stored in tier.backend.scan():
            try:
                head = decode_head(stored.head)
                if head.key != stored.key:
                    raise CorruptChunk("record of another chunk")
            except CorruptChunk as error:
                log.warning(
                    "kvtier: %s: chunk %s quarantined: %s", tier.name, stored.key.hex()[:16], error
                )
                damaged.append(stored.key)
                continue
            heads.append(head)
            sizes.append(stored.nbytes)
        known = {head.key: head.parent for head in heads}
        reachable = _reachable(known)
        orphans = [head.key for head in heads if head.key not in reachable]
        kept = [
            (head, size) for head, size in zip(heads, sizes, strict=True) if head.key in reachable
        ]
        if damaged:
            tier.backend.quarantine(damaged)
            self._metrics.add(f"damaged_chunks_{tier.name}", len(damaged))
        if orphans:
            tier.backend.remove(orphans)
            self._metrics.add(f"removed_chunks_{tier.name}_unreachable", len(orphans))
        if not kept:
            return
        with self.index.lock:
            table = self.index.table
            chunks = table.add_linked(
                b"".join(head.key for head, _ in kept),
                b"".join(head.parent for head, _ in kept),
                np.array([head.tokens for head, _ in kept], dtype=np.uint32),
                np.array([size for _, size in kept], dtype=np.uint64),
            )
            table.publish(chunks, tier.number)
            tier.used_bytes += sum(size for _, size in kept)
            parents = {head.parent for head, _ in kept}
            for (head, _), chunk in zip(kept, chunks.tolist(), strict=True):
                if head.parent == NO_PARENT:
                    self.index.add_root(head.namespace_id, chunk)
                if head.key not in parents:  # a leaf: its whole run is as recent as it
                    self._insert(tier, self._ancestry(chunk))
        self._metrics.add(f"recovered_chunks_{tier.name}", len(kept))


def _without(chunks: ChunkNumbers, others: dict[int, None]) -> ChunkNumbers:
    if not others:
        return chunks
    return numbers(chunk for chunk in chunks.tolist() if chunk not in others)


def _reachable(parent_of: dict[ChunkKey, bytes]) -> set[bytes]:
    """Keys whose chain of parents is whole."""
    state: dict[bytes, bool] = {NO_PARENT: True}
    for key in parent_of:
        path: list[bytes] = []
        at: bytes = key
        while at not in state:
            path.append(at)
            state[at] = False  # also ends a circle of forged parents
            at = parent_of.get(ChunkKey(at), b"")
            if not at:
                break
        whole = state.get(at, False)
        for step in path:
            state[step] = whole
    return {key for key, whole in state.items() if whole and key != NO_PARENT}
