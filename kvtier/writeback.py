"""The way down: one thread per lower tier turns filled memory records into stored ones.

It alone writes to and removes from its tier, so removals and stores of one key keep their order.
While one batch waits for its syncs, the next one's bytes are on their way and the checksums of the
one after it are computed. A chunk is published below only when the backend says OK, which for a
persistent one means durable.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvtier import _core
from kvtier.backend import AddressableBackend
from kvtier.hierarchy import Hierarchy, Removals, Tier, numbers
from kvtier.manifest import Head, RecordShape, encode_header
from kvtier.metrics import Metrics
from kvtier.types import ChunkKey, Descriptor, Outcome, Status

log = logging.getLogger("kvtier")

BATCH_BYTES = 256 * 1024**2  # amortises one round of syncs; 60 ms of a fast disk
BATCH_CHUNKS = 64
PUTS_MAX = 2  # batches in the backend at a time
REASONS_MAX = 8  # log lines of one bad time; beyond it the counters have to do

Command = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Pending:
    """A leased memory record on its way down; written-back records give their lease count up."""

    number: int
    head: Head
    shape: RecordShape
    record: Descriptor


@dataclass(frozen=True, slots=True)
class _Sealed:
    """A batch whose records are complete in memory."""

    batch: list[Pending]
    views: list[memoryview]

    @property
    def nbytes(self) -> int:
        return sum(item.head.record_bytes for item in self.batch)


@dataclass(frozen=True, slots=True)
class _Put:
    """A batch that the backend is storing, on a thread of its own."""

    sealed: _Sealed
    outcomes: Future[list[Outcome]]


def seal(
    pool: _core.CopyPool, memory: AddressableBackend, batch: Sequence[Pending]
) -> list[memoryview]:
    """Write each record's header, checksums included, in front of its payload in memory."""
    addresses, lengths = [], []
    for item in batch:
        for offset, nbytes in zip(
            item.shape.segment_offsets, item.shape.segment_bytes, strict=True
        ):
            addresses.append(item.record.address + offset)
            lengths.append(nbytes)
    digests = pool.checksum(
        np.array(addresses, dtype=np.uint64), np.array(lengths, dtype=np.uint64)
    )
    views, at = [], 0
    for item in batch:
        take = 16 * len(item.shape.segment_offsets)
        view = memory.view(item.record)[: item.shape.record_bytes]
        header = encode_header(item.head, item.shape, digests[at : at + take])
        view[: len(header)] = header
        views.append(view)
        at += take
    return views


class _Slot:
    """Room for one thing between the thread that seals and the one that writes."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held: list[_Sealed | Command | None] = []

    def put(self, work: _Sealed | Command | None) -> None:
        """Wait until it is empty, then fill it."""
        with self._changed:
            self._changed.wait_for(lambda: not self._held)
            self._held.append(work)
            self._changed.notify_all()

    def wait(self, otherwise: Callable[[], bool]) -> bool:
        """Wait until it is filled (True), or what `wake` tells of has come about (False)."""
        with self._changed:
            self._changed.wait_for(lambda: self._held or otherwise())
            return bool(self._held)

    def take(self) -> _Sealed | Command | None:
        """What is in it."""
        with self._changed:
            self._changed.notify_all()
            return self._held.pop()

    def wake(self) -> None:
        """Something came about that `wait` may be waiting for."""
        with self._changed:
            self._changed.notify_all()


class WriteBack:
    """Threads, queue and accounts of the way into one lower tier.

    One thread seals (checksums and header), the next one has up to `PUTS_MAX` batches stored and ends
    them in their order; between the two threads waits one batch.
    """

    def __init__(
        self,
        hierarchy: Hierarchy,
        tier: Tier,
        pool: _core.CopyPool,
        metrics: Metrics,
        queue_bytes_max: int,
        remove_elsewhere: Callable[[int, Sequence[ChunkKey]], None],
    ) -> None:
        self._hierarchy = hierarchy
        self._tier = tier
        self._pool = pool
        self._metrics = metrics
        self._queue_bytes_max = queue_bytes_max
        self._remove_elsewhere = remove_elsewhere
        self._changed = threading.Condition()
        self._queue: deque[Pending | Command] = deque()
        self._queued = 0  # items ever queued
        self._finished = 0  # of those, ended one way or another, in about the same order
        self._pending_bytes = 0
        self._closing = False
        self._warned: set[str] = set()
        self._sealed = _Slot()
        self._threads = [
            threading.Thread(target=work, name=f"kvtier-{verb}-{tier.name}", daemon=True)
            for verb, work in (("seal", self._seal_loop), ("write", self._write_loop))
        ]
        for thread in self._threads:
            thread.start()

    # Callers ------------------------------------------------------------------------------------

    def offer(self, items: Sequence[Pending]) -> list[Pending]:
        """Queue leased records; those that found no room come back with their lease still held."""
        refused = []
        with self._changed:
            for item in items:
                nbytes = item.head.record_bytes
                if self._closing or self._pending_bytes + nbytes > self._queue_bytes_max:
                    refused.append(item)
                    continue
                self._queue.append(item)
                self._queued += 1
                self._pending_bytes += nbytes
            self._changed.notify_all()
        if refused:
            self._metrics.add(f"write_back_refused_{self._tier.name}", len(refused))
        return refused

    def remove(self, keys: Sequence[ChunkKey], *, quarantine: bool = False) -> None:
        """Queue the removal of keys that the books no longer have.

        A key that is stored anew after it left the books is queued behind this, never before.
        """
        wanted = list(keys)
        with self._changed:
            if self._closing:
                return
            self._queue.append(lambda: self._remove(wanted, quarantine))
            self._queued += 1
            self._changed.notify_all()

    @property
    def pending_bytes(self) -> int:
        """Bytes queued or being written."""
        return self._pending_bytes

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was queued before this call has ended; False if that took longer."""
        with self._changed:
            target = self._queued
            return self._changed.wait_for(lambda: self._finished >= target, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Flush, then end the threads; False if records were still waiting at the deadline."""
        flushed = self.flush(timeout_s)
        with self._changed:
            self._closing = True
            abandoned = [item for item in self._queue if isinstance(item, Pending)]
            self._queue.clear()
            self._changed.notify_all()
        self._finish(abandoned)
        for thread in self._threads:  # one that is stuck in the place's I/O is left behind
            thread.join(timeout=60.0 if flushed else 1.0)
        return flushed

    # The threads --------------------------------------------------------------------------------

    def _seal_loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    break
                batch = self._take_batch()
                work = None if batch else self._queue.popleft()
            if batch:
                self._seal(batch)
            elif work is not None and not isinstance(work, Pending):
                self._sealed.put(work)
        self._sealed.put(None)

    def _seal(self, batch: list[Pending]) -> None:
        try:
            views = seal(self._pool, self._hierarchy.memory, batch)
        except Exception:  # outermost frame of this thread's work: the batch stays in memory only
            log.exception("kvtier: could not seal %d records for %s", len(batch), self._tier.name)
            self._metrics.add(f"write_back_failed_{self._tier.name}", len(batch))
            self._finish(batch)
            return
        self._sealed.put(_Sealed(batch, views))

    def _write_loop(self) -> None:
        puts: deque[_Put] = deque()
        while True:
            if not self._sealed.wait(lambda: bool(puts) and puts[0].outcomes.done()):
                self._end_oldest(puts, leave=len(puts) - 1)
                continue
            work = self._sealed.take()
            if isinstance(work, _Sealed):
                if not self._guard(partial(self._start_put, work, puts), work.batch):
                    self._finish(work.batch)
                self._end_oldest(puts, leave=PUTS_MAX - 1)
                continue
            self._end_oldest(puts)  # a command finds the tier as all before it have left it
            if work is None:
                return
            self._guard(work, [])
            self._finish([], commands=1)

    def _take_batch(self) -> list[Pending]:
        batch: list[Pending] = []
        nbytes = 0
        while self._queue and len(batch) < BATCH_CHUNKS:
            item = self._queue[0]
            if not isinstance(item, Pending):
                break
            nbytes += item.head.record_bytes
            if batch and nbytes > BATCH_BYTES:
                break
            batch.append(item)
            self._queue.popleft()
        return batch

    def _guard(self, work: Callable[[], object], batch: Sequence[Pending]) -> bool:
        """Whether `work` gives anything but False or an exception, which is counted."""
        try:
            return work() is not False
        except Exception as error:  # noqa: BLE001 - outermost frame of this thread's work
            self._warn(f"write-back failed: {error!r}", with_traceback=True)
            self._metrics.add(f"write_back_failed_{self._tier.name}", max(1, len(batch)))
            return False

    def _start_put(self, sealed: _Sealed, puts: deque[_Put]) -> bool:
        """Make room for a batch on top of what is being stored, and begin; False without room."""
        tier, backend = self._tier, self._tier.backend
        nbytes = sealed.nbytes + sum(put.sealed.nbytes for put in puts)
        free = backend.free_bytes()
        if free is not None and free < nbytes:
            # What is being stored has taken nobody knows how much of the free space already.
            self._end_oldest(puts)
            nbytes = sealed.nbytes
        room = self._hierarchy.room_below(tier, nbytes)
        if not room.granted and puts:
            self._end_oldest(puts)
            self._carry_out(room.removals)
            room = self._hierarchy.room_below(tier, sealed.nbytes)
        self._carry_out(room.removals)
        if not room.granted:
            self._metrics.add(f"write_back_no_room_{tier.name}", len(sealed.batch))
            self._warn(f"no room: bound by {room.bound}")
            return False
        keys = [item.head.key for item in sealed.batch]
        outcomes: Future[list[Outcome]] = Future()

        def put() -> None:
            try:
                outcomes.set_result(backend.put(keys, sealed.views))
            except BaseException as error:  # noqa: BLE001 - raised again by `_publish`
                outcomes.set_exception(error)
            self._sealed.wake()

        # A daemon, as one that is stuck in the place's I/O is left behind.
        threading.Thread(target=put, name=f"kvtier-put-{tier.name}", daemon=True).start()
        puts.append(_Put(sealed, outcomes))
        return True

    def _carry_out(self, removals: Removals) -> None:
        """At once what concerns this tier: the next batch needs the room."""
        for number, keys in removals.keys_by_tier.items():
            if number == self._tier.number:
                self._remove(keys)
            else:
                self._remove_elsewhere(number, keys)

    def _end_oldest(self, puts: deque[_Put], leave: int = 0) -> None:
        """Wait for batches and publish them, in their order, until `leave` are being stored."""
        while len(puts) > leave:
            put = puts.popleft()
            self._guard(partial(self._publish, put), put.sealed.batch)
            self._finish(put.sealed.batch)

    def _publish(self, put: _Put) -> None:
        tier = self._tier
        outcomes = put.outcomes.result()
        stored, found = [], []
        for item, outcome in zip(put.sealed.batch, outcomes, strict=True):
            if outcome.ok:
                stored.append(item.number)
                if tier.is_shared and outcome.nbytes == 0:  # another process was first
                    found.append(item.number)
            else:
                self._metrics.add(f"write_back_{outcome.status.value}_{tier.name}")
                self._warn(f"chunk not stored: {outcome.detail or outcome.status.value}")
        if stored:
            self._hierarchy.publish_below(tier, numbers(stored), frozenset(found))
            self._metrics.add(
                f"written_bytes_{tier.name}", sum(outcome.nbytes for outcome in outcomes)
            )
        if len(stored) == len(put.sealed.batch):
            self._warned.clear()

    def _remove(self, keys: Sequence[ChunkKey], quarantine: bool = False) -> None:
        backend = self._tier.backend
        take_out = backend.quarantine if quarantine else backend.remove
        for start in range(0, len(keys), backend.capabilities.batch_max):
            for outcome in take_out(keys[start : start + backend.capabilities.batch_max]):
                if outcome.status not in (Status.OK, Status.MISSING):
                    self._metrics.add(f"remove_{outcome.status.value}_{self._tier.name}")
                    self._warn(f"chunk not removed: {outcome.detail or outcome.status.value}")

    def _warn(self, reason: str, *, with_traceback: bool = False) -> None:
        """One log line per reason, until a whole batch succeeds again."""
        if reason in self._warned or len(self._warned) >= REASONS_MAX:
            return
        self._warned.add(reason)
        log.warning(
            "kvtier: %s: %s (further ones are counted)",
            self._tier.name,
            reason,
            exc_info=with_traceback,
        )

    def _finish(self, batch: Sequence[Pending], commands: int = 0) -> None:
        """The batch's leases and room are given back, whatever became of it."""
        if batch:
            with self._hierarchy.index.lock:
                self._hierarchy.index.table.release(numbers(item.number for item in batch))
        with self._changed:
            self._finished += len(batch) + commands
            self._pending_bytes -= sum(item.head.record_bytes for item in batch)
            self._changed.notify_all()
