"""Moves bytes: gathers engine pages into memory records, brings hits back, and never waits long.

Two lanes, a thread each: hits that lie in memory go layer wave by layer wave, hits that need a tier
below go batch by batch (read, verify, promote, scatter) and cannot hold the first up. A load ends
by its deadline whatever a disk does: bytes from below land in kvtier's own memory first, and only
the scatter touches the engine's pages, under a lock that `Load.cancel` takes.

Pages on a device: what lies in memory is put on the device's streams at once, on the caller's
thread, and the first lane only waits for it to be over. What comes from below is scattered by its
lane as ever, which then waits for the device.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from kvtier import _core
from kvtier.clock import Clock
from kvtier.device_moves import wait_for
from kvtier.errors import CorruptChunk
from kvtier.hierarchy import MEMORY, Hierarchy, Tier, numbers
from kvtier.lanes import Lane
from kvtier.load import Load
from kvtier.manifest import check_header
from kvtier.metrics import Metrics
from kvtier.planner import ChunkMove, batch_of
from kvtier.space import Space
from kvtier.types import ChunkKey, Descriptor, Outcome, Status

log = logging.getLogger("kvtier")

# Two of these in flight: one read, one verified and scattered. With half of it a chunk of 32 MiB would
# come alone, and its waves of 4 MiB would be scattered through the cache, at twice the cost.
READ_BATCH_BYTES = 128 * 1024**2
RESERVE_RETRY_S = 0.002
READS_MAX = 8  # waiting; one load asks for two at a time


class Loader:
    """Owns the copy pool and the lanes. Any thread."""

    def __init__(
        self,
        hierarchy: Hierarchy,
        clock: Clock,
        metrics: Metrics,
        copy_threads: int,
        load_queue_max: int,
        on_damage: Callable[[Tier, Sequence[int], Sequence[ChunkKey]], None],
        on_left: Callable[[Load], None],
    ) -> None:
        self.pool = _core.CopyPool(copy_threads)
        self._hierarchy = hierarchy
        self._clock = clock
        self._metrics = metrics
        self._on_damage = on_damage
        self._on_left = on_left  # the lane is done with a load: its lease may go, then it finishes
        self._lanes = [Lane(name, load_queue_max) for name in ("memory", "below")]
        self._reader = Lane("read", READS_MAX)
        self._closing = threading.Event()

    def gather(
        self, space: Space, moves: Sequence[ChunkMove], records: Sequence[Descriptor]
    ) -> int:
        """Copy engine pages into memory records; returns bytes. The pages are free on return."""
        if not moves:
            return 0
        plan, batch = space.need_plan(), batch_of(space, moves, records)
        return sum(
            plan.gather(
                self.pool, batch.page_ids, batch.page_offsets, batch.segments[wave], first, count
            )
            for wave, (first, count) in enumerate(batch.waves)
        )

    def start(self, load: Load) -> None:
        """Put a load on its lane; one that finds the lane full ends at once."""
        with self._hierarchy.index.lock:
            table = self._hierarchy.index.table
            chunks = numbers(move.number for move in load.plan.chunks)
            below = bool(((table.tiers(chunks) & 1) == 0).any()) if len(chunks) else False
        work = self._load_mixed if below else self._load_from_memory
        if load.plan.space.copies is not None:
            load.stream = load.plan.space.stream()  # here: the lanes do not know the engine's
            if not below and len(chunks):
                self._begin_on_device(load)
                work = self._end_on_device
        if not self._lanes[below].offer(lambda: self._guard(work, load)):
            self._metrics.add("loads_refused")
            self._give_up_move(load)
            load.cancel()
            self._on_left(load)

    def close(self) -> None:
        """End the lanes; loads under way end as cancelled."""
        self._closing.set()
        for lane in self._lanes:
            lane.close()
        self._reader.close()

    # Lanes --------------------------------------------------------------------------------------

    def _guard(self, work: Callable[[Load], None], load: Load) -> None:
        try:
            if load.move is None and load.done():
                return
            if load.move is None and self._closing.is_set():
                load.cancel()
                return
            work(load)
        except Exception as error:  # outermost frame of the lane: the load becomes a recompute
            log.exception("kvtier: load failed")
            self._metrics.add("loads_failed")
            for position in range(len(load.plan.chunks)):
                load.settle(position, Outcome(Status.FAILED, detail=repr(error)))
        finally:
            self._on_left(load)

    def _load_from_memory(self, load: Load) -> None:
        moves = list(enumerate(load.plan.chunks))
        self._scatter(load, moves, self._locate(moves))

    def _begin_on_device(self, load: Load) -> None:
        """Put all waves on the device's streams; settles what cannot be begun."""
        moves = list(enumerate(load.plan.chunks))
        records = self._locate(moves)
        space = load.plan.space
        assert space.copies is not None, "asked for pages on a device only"
        if len(records) < len(moves):
            for position, _ in moves:
                load.settle(position, Outcome(Status.MISSING, detail="no longer held"))
            return
        try:
            batch = batch_of(space, load.plan.chunks, [records[position] for position, _ in moves])
            load.begin_move(space.copies.scatter(batch, load.stream))
        except (OSError, ValueError) as error:
            self._device_failed(load, error)

    def _end_on_device(self, load: Load) -> None:
        """Wait for the waves; the engine has not."""
        move = load.move
        if move is None:  # it could not begin
            return
        try:
            wait_for(move)
        except OSError as error:
            self._device_failed(load, error)
        else:
            for position, chunk in enumerate(load.plan.chunks):
                load.settle(position, Outcome(Status.OK, chunk.head.payload_bytes))
        finally:
            load.end_move()

    def _give_up_move(self, load: Load) -> None:
        """No lane will wait for it: wait here."""
        if load.move is not None:
            self._end_on_device(load)

    def _device_failed(self, load: Load, error: Exception) -> None:
        # In words: a handler that keeps the error would keep its frames, and with them the device.
        log.warning("kvtier: load on a device failed: %s", str(error))
        self._metrics.add("loads_failed")
        for position in range(len(load.plan.chunks)):
            load.settle(position, Outcome(Status.FAILED, detail=str(error)))

    def _locate(self, moves: Sequence[tuple[int, ChunkMove]]) -> dict[int, Descriptor]:
        """Records of the chunks that lie in memory, by position; leased, so they stay."""
        found = self._hierarchy.memory.locate([move.head.key for _, move in moves])
        return {
            position: record
            for (position, _), record in zip(moves, found, strict=True)
            if record is not None
        }

    def _scatter(
        self,
        load: Load,
        moves: Sequence[tuple[int, ChunkMove]],
        records: dict[int, Descriptor],
        *,
        last: bool = True,
    ) -> None:
        """Copy records into engine pages, wave by wave; settles the chunks."""
        present = [(position, move) for position, move in moves if position in records]
        for position, _ in moves:
            if position not in records:
                load.settle(position, Outcome(Status.MISSING, detail="no longer held"))
        if not present:
            return
        space = load.plan.space
        batch = batch_of(
            space, [move for _, move in present], [records[position] for position, _ in present]
        )
        if space.copies is not None:
            copies = space.copies
            if not load.write(lambda: wait_for(copies.scatter(batch, load.stream))):
                return
            for position, move in present:
                load.settle(position, Outcome(Status.OK, move.head.payload_bytes))
            return
        plan = space.need_plan()
        for wave, (first, count) in enumerate(batch.waves):
            copy = partial(
                plan.scatter,
                self.pool,
                batch.page_ids,
                batch.page_offsets,
                batch.segments[wave],
                first,
                count,
            )
            done = load.write(copy)
            if not done:
                return
            if last and len(present) == len(load.plan.chunks):
                load.wave_done(wave)
        for position, move in present:
            load.settle(position, Outcome(Status.OK, move.head.payload_bytes))

    def _load_mixed(self, load: Load) -> None:
        """Chunks below come up in batches: while one is verified and scattered, the next is read."""
        moves = list(enumerate(load.plan.chunks))
        records = self._locate(moves)
        self._scatter(load, [(p, m) for p, m in moves if p in records], records, last=False)
        missing = [(p, m) for p, m in moves if p not in records]
        batches = _cut(missing)
        ahead: tuple[list[tuple[int, ChunkMove]], Future[_Read]] | None = None
        following = None
        try:
            for batch in [*batches, None]:
                following = None
                if batch is not None and not load.done():
                    following = (batch, self._start_read(load, batch))
                if ahead is not None:
                    self._finish_batch(load, *ahead)
                ahead = following
        except BaseException:
            if following is not None:
                following[1].add_done_callback(self._give_back)
            raise
        if load.all_ok():
            load.wave_done(load.plan.wave_count - 1)

    def _start_read(self, load: Load, batch: list[tuple[int, ChunkMove]]) -> Future[_Read]:
        """Not an executor's thread: one stuck in a read would hold up the end of the process."""
        reading: Future[_Read] = Future()

        def read() -> None:
            try:
                reading.set_result(self._read(load, batch))
            except BaseException as error:  # noqa: BLE001 - raised again where the result is wanted
                reading.set_exception(error)

        if not self._reader.offer(read):
            reading.set_exception(OSError("reads are stuck"))
        return reading

    def _read(self, load: Load, batch: list[tuple[int, ChunkMove]]) -> _Read:
        """Reserve memory and read records from the highest tier that holds them."""
        read = _Read()
        try:
            self._read_into(read, load, batch)
        except BaseException:
            self._hierarchy.cancel(read.records.values())
            raise
        return read

    def _give_back(self, reading: Future[_Read]) -> None:
        """Nobody wants what was read: its room is free again."""
        if reading.exception() is None:
            self._hierarchy.cancel(reading.result().records.values())

    def _read_into(self, read: _Read, load: Load, batch: list[tuple[int, ChunkMove]]) -> None:
        with self._hierarchy.index.lock:
            masks = self._hierarchy.index.table.tiers(numbers(m.number for _, m in batch)).tolist()
        by_tier: dict[int, list[tuple[int, ChunkMove]]] = {}
        for (position, move), mask in zip(batch, masks, strict=True):
            below = [t.number for t in self._hierarchy.tiers[MEMORY + 1 :] if mask & 1 << t.number]
            if not below:
                read.outcomes[position] = Outcome(Status.MISSING, detail="no longer held")
                continue
            by_tier.setdefault(below[0], []).append((position, move))
        for number, moves in by_tier.items():
            tier = self._hierarchy.tiers[number]
            targets = []
            for position, move in moves:
                record = self._reserve(load, move.shape.record_bytes)
                if record is None:
                    self._metrics.add("load_no_staging")
                    read.outcomes[position] = Outcome(Status.RETRY, detail="no staging room")
                    continue
                read.records[position] = record
                targets.append((position, move, record))
            if not targets:
                continue
            outcomes = tier.backend.get(
                [move.head.key for _, move, _ in targets],
                [
                    self._hierarchy.memory.view(record)[: move.shape.record_bytes]
                    for _, move, record in targets
                ],
            )
            for (position, move, _), outcome in zip(targets, outcomes, strict=True):
                read.tiers[position] = tier
                if outcome.ok and outcome.nbytes < move.shape.record_bytes:
                    outcome = Outcome(
                        Status.CORRUPT,
                        detail=f"{outcome.nbytes} of {move.shape.record_bytes} bytes",
                    )
                read.outcomes[position] = outcome

    def _reserve(self, load: Load, nbytes: int) -> Descriptor | None:
        """Room for a record, waiting until the load's deadline for somebody's lease to end."""
        while True:
            record = self._hierarchy.reserve(nbytes)
            if record is not None or load.done() or self._closing.is_set():
                return record
            self._closing.wait(RESERVE_RETRY_S)

    def _finish_batch(
        self, load: Load, batch: list[tuple[int, ChunkMove]], reading: Future[_Read]
    ) -> None:
        """Verify what was read, publish it in memory, scatter it."""
        read = reading.result()
        damaged: dict[int, list[ChunkMove]] = {}
        told: dict[tuple[str, str], list[ChunkKey]] = {}
        good: dict[int, Descriptor] = {}
        read_moves = [(p, m) for p, m in batch if p in read.records and read.outcomes[p].ok]
        verdicts = self._verify(read_moves, read.records)
        for position, move in batch:
            outcome = verdicts.get(position, read.outcomes[position])
            if outcome.ok:
                good[position] = self._hierarchy.promote(
                    move.number, move.head, read.records[position]
                )
                self._metrics.add(
                    f"read_bytes_{read.tiers[position].name}", move.shape.record_bytes
                )
                continue
            load.settle(position, outcome)
            if position in read.records:
                self._hierarchy.cancel([read.records[position]])
            if position in read.tiers:
                tier = read.tiers[position]
                self._metrics.add(f"read_{outcome.status.value}_{tier.name}")
                reason = outcome.detail or outcome.status.value
                told.setdefault((tier.name, reason), []).append(move.head.key)
                if outcome.status is not Status.RETRY:
                    damaged.setdefault(tier.number, []).append(move)
        for (name, reason), keys in told.items():
            log.warning(
                "kvtier: %s: chunk %s and %d more not loaded: %s",
                name,
                keys[0].hex()[:16],
                len(keys) - 1,
                reason,
            )
        for number, lost in damaged.items():
            self._on_damage(
                self._hierarchy.tiers[number],
                [move.number for move in lost],
                [move.head.key for move in lost],
            )
        self._scatter(load, [(p, m) for p, m in batch if p in good], good, last=False)

    def _verify(
        self, moves: list[tuple[int, ChunkMove]], records: dict[int, Descriptor]
    ) -> dict[int, Outcome]:
        """CORRUPT for every record whose header or segments are not what they must be."""
        verdicts: dict[int, Outcome] = {}
        addresses: list[int] = []
        lengths: list[int] = []
        digests: list[bytes] = []
        owners: list[int] = []
        for position, move in moves:
            record = records[position]
            view = self._hierarchy.memory.view(record)
            try:
                digests.append(check_header(view, move.head, move.shape))
            except CorruptChunk as error:
                verdicts[position] = Outcome(Status.CORRUPT, detail=str(error))
                continue
            for offset, nbytes in zip(
                move.shape.segment_offsets, move.shape.segment_bytes, strict=True
            ):
                addresses.append(record.address + offset)
                lengths.append(nbytes)
                owners.append(position)
        if addresses:
            equal = self.pool.verify(
                np.array(addresses, dtype=np.uint64),
                np.array(lengths, dtype=np.uint64),
                b"".join(digests),
            )
            for position, same in zip(owners, equal.tolist(), strict=True):
                if not same:
                    verdicts[position] = Outcome(
                        Status.CORRUPT, detail="segment checksum does not match"
                    )
        return verdicts


@dataclass(slots=True)
class _Read:
    """What reading one batch gave, by position in the plan."""

    records: dict[int, Descriptor] = field(default_factory=dict)
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    tiers: dict[int, Tier] = field(default_factory=dict)


def _cut(moves: list[tuple[int, ChunkMove]]) -> list[list[tuple[int, ChunkMove]]]:
    """Batches of at most `READ_BATCH_BYTES`, at least one chunk each.

    The last quarter of the last one comes alone: nothing is read any more while it is verified.
    """
    batches: list[list[tuple[int, ChunkMove]]] = []
    room = 0
    for entry in moves:
        nbytes = entry[1].shape.record_bytes
        if not batches or room < nbytes:
            batches.append([])
            room = READ_BATCH_BYTES
        batches[-1].append(entry)
        room -= nbytes
    if batches and len(batches[-1]) > 1:
        last = batches.pop()
        alone = max(1, len(last) // 4)
        batches += [last[:-alone], last[-alone:]]
    return batches
