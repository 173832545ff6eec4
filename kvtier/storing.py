"""The way in: chunks that are not held are gathered, published in memory and queued for below."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.device_moves import DEVICE_WAIT_S
from kvtier.hierarchy import Hierarchy, numbers
from kvtier.index import NONE
from kvtier.lanes import Lane
from kvtier.loading import Loader
from kvtier.manifest import NO_PARENT
from kvtier.metrics import Metrics
from kvtier.planner import ChunkMove, chunk_pages
from kvtier.policy import ChunkNumbers
from kvtier.space import Space
from kvtier.store import Store, StoreResult
from kvtier.types import ChunkKey, Descriptor
from kvtier.writeback import Pending, WriteBack

log = logging.getLogger("kvtier")

STORE_PART_BYTES = 64 * 1024**2  # gathered in 5 ms: so little does the first write wait
STORES_MAX = 64  # on their way out of a device; what comes beyond is dropped

Ended = Callable[[Store], None]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What one store is about: chunks by key, and which of them are held."""

    keys: list[ChunkKey]
    sizes: list[int]
    held: list[bool]
    leased: ChunkNumbers
    """Those held; they stay until the store has ended."""


class Storer:
    """Stores runs of chunks; any thread, as `KVTier.store`. All `below` get what is stored."""

    def __init__(
        self, hierarchy: Hierarchy, loader: Loader, below: Sequence[WriteBack], metrics: Metrics
    ) -> None:
        self._hierarchy = hierarchy
        self._loader = loader
        self._below = below
        self._metrics = metrics
        self._coming: Counter[ChunkKey] = Counter()  # on their way out of a device; under the lock
        self._lane: Lane | None = None  # waits for devices; none before the first such store

    def begin(
        self,
        space: Space,
        wanted: Wanted,
        page_ids: npt.NDArray[np.int64],
        first_token: int,
        on_end: Ended,
    ) -> Store:
        """Reserve room for every chunk from the first one that is not held on; moves nothing."""
        keys, sizes, held = wanted.keys, wanted.sizes, wanted.held
        first = held.index(False) if False in held else len(held)
        held_tokens = sum(size for size, is_held in zip(sizes, held, strict=True) if is_held)
        missing_tokens = sum(sizes) - held_tokens
        start = first * space.chunk_tokens
        moves: list[ChunkMove] = []
        records: list[Descriptor | None] = []
        if space.copies is not None:
            held = self._or_coming(keys, held)
            first = held.index(False) if False in held else len(held)
            start = first * space.chunk_tokens
        if first < len(keys) and start >= first_token and not space.failure:
            for i in range(first, len(keys)):
                parent = keys[i - 1] if i else NO_PARENT
                head = space.head(keys[i], parent, sizes[i])
                pages = chunk_pages(space, page_ids, first_token, i * space.chunk_tokens, sizes[i])
                record = None if held[i] else self._hierarchy.reserve(head.record_bytes)
                if record is None and not held[i]:
                    break  # what follows could not be reached without this one
                moves.append(ChunkMove(0, head, space.shape(head.pages), pages))
                records.append(record)
        nothing = StoreResult(0, held_tokens, missing_tokens, 0)
        store = Store(space, moves, records, nothing, wanted.leased, self, on_end)
        if space.copies is not None:
            with self._hierarchy.index.lock:
                self._coming.update(store.coming)
        return store

    def finish(self, store: Store) -> None:
        """All pages are filled: gather and publish them, for devices as soon as they have."""
        if not store.moves:
            self.end(store)
        elif store.space.copies is None:
            self._publish(store, self._loader.gather)
        elif not self._device_lane().offer(lambda: self._finish_on_device(store)):
            self._metrics.add("stores_refused")
            self._wait_on_device(store)
            self._give_back(store)

    def give_up(self, store: Store) -> None:
        """End it with nothing stored; what a device is at is waited for."""
        self._wait_on_device(store)
        self._give_back(store)

    def end(self, store: Store) -> None:
        """It has its result, or will have none: let go of what it was leased."""
        with self._hierarchy.index.lock:
            self._hierarchy.index.table.release(store.leased)
            if store.space.copies is not None:
                self._coming -= Counter(store.coming)
        store.end()

    def close(self) -> None:
        """Publish what devices are still copying."""
        if self._lane is not None:
            self._lane.close(DEVICE_WAIT_S)

    # Devices ------------------------------------------------------------------------------------

    def _device_lane(self) -> Lane:
        with self._hierarchy.index.lock:
            if self._lane is None:
                self._lane = Lane("stores", STORES_MAX)
            return self._lane

    def _finish_on_device(self, store: Store) -> None:
        try:
            if self._wait_on_device(store):
                self._publish(store, lambda space, moves, records: _bytes_of(moves))
            else:
                self._give_back(store)
        except Exception:  # outermost frame of the lane: the store is lost, as one without room
            log.exception("kvtier: store failed")
            self._metrics.add("stores_failed")
        finally:
            if not store.done():
                self.end(store)

    def _wait_on_device(self, store: Store) -> bool:
        """Whether all of it has been copied; afterwards no record is written to any more."""
        try:
            store.wait_moves()
        except OSError as error:
            log.warning("kvtier: store from a device failed: %s", str(error))
            self._metrics.add("stores_failed")
            return False
        return True

    def _give_back(self, store: Store) -> None:
        self._hierarchy.cancel([record for record in store.records if record is not None])
        self.end(store)

    def _or_coming(self, keys: Sequence[ChunkKey], held: Sequence[bool]) -> list[bool]:
        """Chunks that an earlier store still waits for are as good as held: it is published first."""
        with self._hierarchy.index.lock:
            return [is_held or key in self._coming for key, is_held in zip(keys, held, strict=True)]

    # Publishing ---------------------------------------------------------------------------------

    def _publish(
        self,
        store: Store,
        fill: Callable[[Space, Sequence[ChunkMove], Sequence[Descriptor]], int],
    ) -> None:
        """Fill and publish a run, part by part: the way down begins while the rest is gathered."""
        space, moves, records = store.space, store.moves, store.records
        stored_tokens, nbytes, at = 0, 0, 0
        done: list[ChunkNumbers] = []  # leased, so that what continues them finds them
        try:
            parent = self._take_hold(store)
            for count in _part_counts(moves):
                part = slice(at, at + count)
                fresh = [
                    (move, record)
                    for move, record in zip(moves[part], records[part], strict=True)
                    if record is not None
                ]
                nbytes += fill(space, [m for m, _ in fresh], [r for _, r in fresh])
                chunks = self._hierarchy.commit(
                    space.id, parent, [move.head for move in moves[part]], records[part]
                )
                at += count
                with self._hierarchy.index.lock:
                    self._hierarchy.index.table.lease(chunks)
                done.append(chunks)
                parent = int(chunks[-1])
                self._after_commit(space, moves[part], records[part], chunks)
                stored_tokens += sum(move.head.tokens for move, _ in fresh)
        finally:
            self._hierarchy.cancel([record for record in records[at:] if record is not None])
            with self._hierarchy.index.lock:
                self._hierarchy.index.table.release(
                    numbers(chunk for run in done for chunk in run.tolist())
                )
            store.stored(stored_tokens, nbytes)
            self.end(store)

    def _take_hold(self, store: Store) -> int:
        """The number of the chunk that the run continues, leased like all of it that is held.

        An earlier store from a device may have failed to bring what this one continues; then what
        cannot be reached is cut off.
        """
        moves, records = store.moves, store.records
        before = moves[0].head.parent
        needed = [] if before == NO_PARENT else [before]
        needed += [m.head.key for m, r in zip(moves, records, strict=True) if r is None]
        table = self._hierarchy.index.table
        with self._hierarchy.index.lock:
            found = table.find(b"".join(needed)) if needed else numbers([])
            here = found != NONE
            here[here] = table.tiers(found[here]) != 0
            table.lease(found[here])
            store.leased = np.concatenate([store.leased, found[here]])
            parent = int(found[0]) if before != NO_PARENT and here[0] else NONE
        if here.all():
            return parent
        lost = {key for key, is_here in zip(needed, here.tolist(), strict=True) if not is_here}
        reach = next(i for i, m in enumerate(moves) if m.head.parent in lost or m.head.key in lost)
        self._hierarchy.cancel(store.cut(reach))
        return parent

    def _after_commit(
        self,
        space: Space,
        moves: Sequence[ChunkMove],
        records: Sequence[Descriptor | None],
        chunks: ChunkNumbers,
    ) -> None:
        """Queue the way down, with a lease for each; those that `commit` took end here."""
        items = [
            Pending(chunk, move.head, move.shape, record)
            for chunk, move, record in zip(chunks.tolist(), moves, records, strict=True)
            if record is not None and self._hierarchy.memory.locate([move.head.key])[0] == record
        ]
        table, lock = self._hierarchy.index.table, self._hierarchy.index.lock
        for writer in self._below:
            with lock:
                table.lease(numbers(item.number for item in items))
            refused = writer.offer(items)
            with lock:
                table.release(numbers(item.number for item in refused))
        with lock:
            table.release(chunks)


def _part_counts(moves: Sequence[ChunkMove]) -> list[int]:
    """How many chunks each part has: enough for `STORE_PART_BYTES`, the last one what is left."""
    counts: list[int] = []
    room = 0
    for move in moves:
        if room <= 0:
            counts.append(0)
            room = STORE_PART_BYTES
        counts[-1] += 1
        room -= move.shape.record_bytes
    return counts


def _bytes_of(moves: Sequence[ChunkMove]) -> int:
    return sum(move.head.payload_bytes for move in moves)
