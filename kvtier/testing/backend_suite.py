"""Conformance of a backend: subclass `BackendSuite`, give `make`, and pytest does the rest.

    class TestMyBackend(BackendSuite):
        def make(self, root: Path) -> MyBackend:
            return MyBackend(MyOptions(path=str(root)))

A backend whose records lie in memory subclasses `AddressableSuite`, which asks for more.
"""

from __future__ import annotations

import abc
import mmap
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvtier.backend import HEAD_BYTES, AddressableBackend, Backend
from kvtier.errors import Closed
from kvtier.types import ALIGN_BYTES, KEY_BYTES, ChunkKey, Outcome, RegionKind, Status

KEYS = [ChunkKey(bytes([i * 37 % 256]) + bytes([i]) * (KEY_BYTES - 1)) for i in range(8)]
"""Keys that differ in their first byte and in the others."""

_SIZES = [1, HEAD_BYTES - 1, HEAD_BYTES, 5000, ALIGN_BYTES, 3 * ALIGN_BYTES]
_THREAD_COUNT = 4
_WAIT_S = 60.0  # bound for a call that should come back at once


def record(key: ChunkKey, nbytes: int = 5000) -> bytes:
    """The bytes that `key` names in this suite: same key and size, same bytes."""
    return random.Random(key).randbytes(nbytes)


def put(backend: Backend, keys: Sequence[ChunkKey], nbytes: int = 5000) -> list[Status]:
    """Store each key's record."""
    outcomes = backend.put(keys, [memoryview(record(key, nbytes)) for key in keys])
    return [outcome.status for outcome in outcomes]


def get(
    backend: Backend, key: ChunkKey, nbytes: int = 5000, offset: int = 0
) -> tuple[Outcome, bytes]:
    """Outcome, and what of a target of `nbytes` was filled."""
    target = bytearray(nbytes)
    (outcome,) = backend.get([key], [memoryview(target)], offset)
    return outcome, bytes(target[: outcome.nbytes])


def aligned(nbytes: int) -> memoryview:
    """Writable memory at a page's start."""
    return memoryview(mmap.mmap(-1, nbytes))


class BackendSuite(abc.ABC):
    """Every `kvtier.backend.Backend` passes these."""

    big_record_bytes = (9 << 20) + 2 * ALIGN_BYTES
    """Of one record; several of them must fit."""
    model_examples = 25
    """Random sequences of calls that are compared with a dict."""
    knows_use_order = True
    """Whether `scan` follows `remember_use`; a place that cannot know says so here."""

    @abc.abstractmethod
    def make(self, root: Path) -> Backend:
        """Open a backend over `root`, a folder of its own; again over the same `root` after
        `close`, it must hold what it held if it claims to be persistent."""

    @pytest.fixture
    def backend(self, tmp_path: Path) -> Iterator[Backend]:
        """An open backend that holds nothing."""
        with self.make(tmp_path) as backend:
            yield backend

    # ---- put and get

    @pytest.mark.parametrize("nbytes", _SIZES)
    def test_get_returns_what_put_stored(self, backend: Backend, nbytes: int) -> None:
        data = record(KEYS[0], nbytes)
        (stored,) = backend.put([KEYS[0]], [memoryview(data)])
        assert (stored.status, stored.nbytes) == (Status.OK, nbytes)
        outcome, found = get(backend, KEYS[0], nbytes)
        assert (outcome.status, found) == (Status.OK, data)

    def test_each_key_of_a_batch_gets_its_own_bytes(self, backend: Backend) -> None:
        sizes = [100, 3 * ALIGN_BYTES, 5000, ALIGN_BYTES, 1, 8000, 192, 2 * ALIGN_BYTES]
        records = [record(key, size) for key, size in zip(KEYS, sizes, strict=True)]
        outcomes = backend.put(KEYS, [memoryview(data) for data in records])
        assert [outcome.nbytes for outcome in outcomes] == sizes
        targets = [bytearray(size) for size in reversed(sizes)]
        outcomes = backend.get(KEYS[::-1], [memoryview(target) for target in targets])
        assert [outcome.nbytes for outcome in outcomes] == sizes[::-1]
        assert targets == records[::-1]

    def test_a_missing_key_is_an_outcome_and_leaves_the_target(self, backend: Backend) -> None:
        target = bytearray(b"\xaa" * 5000)
        (outcome,) = backend.get([KEYS[1]], [memoryview(target)])
        assert (outcome.status, outcome.nbytes) == (Status.MISSING, 0)
        assert target == b"\xaa" * 5000

    def test_one_missing_key_spoils_no_other(self, backend: Backend) -> None:
        put(backend, [KEYS[0], KEYS[2]])
        targets = [bytearray(5000) for _ in range(3)]
        outcomes = backend.get(KEYS[:3], [memoryview(target) for target in targets])
        assert [o.status for o in outcomes] == [Status.OK, Status.MISSING, Status.OK]
        assert targets == [record(KEYS[0]), bytearray(5000), record(KEYS[2])]

    def test_a_read_starts_at_the_offset(self, backend: Backend) -> None:
        put(backend, [KEYS[0]], 3 * ALIGN_BYTES)
        data = record(KEYS[0], 3 * ALIGN_BYTES)
        for offset in (1, 192, ALIGN_BYTES, 2 * ALIGN_BYTES, 3 * ALIGN_BYTES - 1):
            outcome, found = get(backend, KEYS[0], 1000, offset)
            assert (outcome.status, found) == (Status.OK, data[offset : offset + 1000])
        target = aligned(ALIGN_BYTES)
        backend.get([KEYS[0]], [target], ALIGN_BYTES)
        assert bytes(target) == data[ALIGN_BYTES : 2 * ALIGN_BYTES]

    def test_a_read_past_the_end_is_ok_and_empty(self, backend: Backend) -> None:
        put(backend, [KEYS[0]], ALIGN_BYTES)
        for offset in (ALIGN_BYTES, ALIGN_BYTES + 1, 100 * ALIGN_BYTES):
            outcome, _ = get(backend, KEYS[0], ALIGN_BYTES, offset)
            assert (outcome.status, outcome.nbytes) == (Status.OK, 0)

    def test_a_negative_offset_is_refused(self, backend: Backend) -> None:
        with pytest.raises(ValueError, match="offset"):
            get(backend, KEYS[0], 100, -1)

    @pytest.mark.parametrize("nbytes", _SIZES)
    def test_a_short_record_fills_what_it_has(self, backend: Backend, nbytes: int) -> None:
        put(backend, [KEYS[0]], nbytes)
        for target in (memoryview(bytearray(20_001)), aligned(5 * ALIGN_BYTES)):
            (outcome,) = backend.get([KEYS[0]], [target])
            assert (outcome.status, outcome.nbytes) == (Status.OK, nbytes)
            assert bytes(target[:nbytes]) == record(KEYS[0], nbytes)

    def test_a_short_target_gets_the_start(self, backend: Backend) -> None:
        put(backend, [KEYS[0]])
        outcome, found = get(backend, KEYS[0], 192)
        assert (outcome.nbytes, found) == (192, record(KEYS[0])[:192])

    def test_an_empty_target_asks_only_whether_the_key_is_held(self, backend: Backend) -> None:
        put(backend, [KEYS[0]])
        assert get(backend, KEYS[0], 0)[0].status is Status.OK
        assert get(backend, KEYS[1], 0)[0].status is Status.MISSING

    def test_storing_a_held_key_leaves_its_bytes(self, backend: Backend) -> None:
        put(backend, [KEYS[0]])
        (outcome,) = backend.put([KEYS[0]], [memoryview(b"other bytes")])
        assert outcome.status is Status.OK
        assert get(backend, KEYS[0])[1] == record(KEYS[0])

    def test_the_record_is_a_copy(self, backend: Backend) -> None:
        source = bytearray(record(KEYS[0]))
        backend.put([KEYS[0]], [memoryview(source)])
        source[:] = bytes(len(source))
        assert get(backend, KEYS[0])[1] == record(KEYS[0])

    def test_a_key_may_come_twice_in_a_batch(self, backend: Backend) -> None:
        assert put(backend, [KEYS[0], KEYS[1], KEYS[0]]) == [Status.OK] * 3
        targets = [bytearray(5000), bytearray(5000)]
        backend.get([KEYS[0]] * 2, [memoryview(target) for target in targets])
        assert targets == [record(KEYS[0])] * 2
        assert backend.contains([KEYS[0], KEYS[0]]) == [True, True]
        assert [stored.key for stored in backend.scan()].count(KEYS[0]) == 1
        statuses = [outcome.status for outcome in backend.remove([KEYS[0], KEYS[0]])]
        assert statuses == [Status.OK, Status.MISSING]

    # ---- batches

    def test_a_ragged_batch_is_refused(self, backend: Backend) -> None:
        with pytest.raises(ValueError, match="1 keys for 0 buffers"):
            backend.put([KEYS[0]], [])
        with pytest.raises(ValueError, match="0 keys for 1 buffers"):
            backend.get([], [memoryview(bytearray(1))])

    def test_an_oversized_batch_is_refused(self, backend: Backend) -> None:
        count = backend.capabilities.batch_max + 1
        buffers = [memoryview(bytearray(1))] * count
        with pytest.raises(ValueError, match=f"{count} keys in one batch"):
            backend.put([KEYS[0]] * count, buffers)
        with pytest.raises(ValueError, match=f"{count} keys in one batch"):
            backend.get([KEYS[0]] * count, buffers)
        assert list(backend.scan()) == []

    def test_an_empty_batch_gives_nothing(self, backend: Backend) -> None:
        assert backend.put([], []) == []
        assert backend.get([], []) == []
        assert backend.contains([]) == []
        assert backend.remove([]) == []
        assert backend.quarantine([]) == []

    def test_a_large_batch_is_answered_key_by_key(self, backend: Backend) -> None:
        count = min(backend.capabilities.batch_max, 200)
        keys = [ChunkKey(i.to_bytes(KEY_BYTES, "big")) for i in range(count)]
        assert put(backend, keys[::2], 300) == [Status.OK] * len(keys[::2])
        targets = [bytearray(300) for _ in keys]
        outcomes = backend.get(keys, [memoryview(target) for target in targets])
        for i, (key, outcome, target) in enumerate(zip(keys, outcomes, targets, strict=True)):
            if i % 2 == 0:
                assert (outcome.status, bytes(target)) == (Status.OK, record(key, 300))
            else:
                assert outcome.status is Status.MISSING

    # ---- buffers

    def test_unaligned_buffers_work(self, backend: Backend) -> None:
        data = record(KEYS[0], 3 * ALIGN_BYTES)
        source = memoryview(b"x" + data + b"x")[1:-1]
        assert backend.put([KEYS[0]], [source])[0].ok
        memory = bytearray(b"\xaa" * (5 * ALIGN_BYTES))
        backend.get([KEYS[0]], [memoryview(memory)[1001 : 1001 + len(data)]])
        assert memory[1001 : 1001 + len(data)] == data
        assert set(memory[:1001] + memory[1001 + len(data) :]) == {0xAA}

    def test_aligned_buffers_work(self, backend: Backend) -> None:
        source, target = aligned(4 * ALIGN_BYTES), aligned(4 * ALIGN_BYTES)
        source[:] = record(KEYS[0], 4 * ALIGN_BYTES)
        assert backend.put([KEYS[0]], [source])[0].ok
        assert backend.get([KEYS[0]], [target])[0].nbytes == 4 * ALIGN_BYTES
        assert target == source

    def test_a_read_only_target_is_refused(self, backend: Backend) -> None:
        put(backend, [KEYS[0]])
        precious = b"\xaa" * 5000
        with pytest.raises(ValueError, match=r"read-only|writable|writeable"):
            backend.get([KEYS[0]], [memoryview(precious)])
        assert precious == b"\xaa" * 5000

    def test_a_buffer_with_gaps_is_refused(self, backend: Backend) -> None:
        with pytest.raises(ValueError, match="contiguous"):
            backend.put([KEYS[0]], [memoryview(bytearray(100))[::2]])
        put(backend, [KEYS[0]])
        with pytest.raises(ValueError, match="contiguous"):
            backend.get([KEYS[0]], [memoryview(bytearray(100))[::2]])

    def test_big_records_come_back_whole(self, backend: Backend) -> None:
        nbytes = self.big_record_bytes
        sources = [aligned(nbytes), aligned(nbytes)]
        for key, source in zip(KEYS, sources, strict=False):
            source[:] = record(key, nbytes)
        assert [o.nbytes for o in backend.put(KEYS[:2], sources)] == [nbytes] * 2
        targets = [aligned(nbytes), memoryview(bytearray(nbytes + 1))[1:]]
        assert [o.nbytes for o in backend.get(KEYS[:2], targets)] == [nbytes] * 2
        assert targets == sources
        outcome, found = get(backend, KEYS[0], 100, nbytes - 50)
        assert (outcome.nbytes, found) == (50, bytes(sources[0][-50:]))

    # ---- remove, quarantine

    def test_a_removed_key_is_gone_and_can_come_back(self, backend: Backend) -> None:
        put(backend, KEYS[:2])
        statuses = [outcome.status for outcome in backend.remove([KEYS[0], KEYS[2]])]
        assert statuses == [Status.OK, Status.MISSING]
        assert backend.contains(KEYS[:3]) == [False, True, False]
        assert get(backend, KEYS[0])[0].status is Status.MISSING
        assert [stored.key for stored in backend.scan()] == [KEYS[1]]
        assert put(backend, [KEYS[0]]) == [Status.OK]
        assert get(backend, KEYS[0])[1] == record(KEYS[0])

    def test_a_quarantined_key_is_gone_and_can_come_back(self, backend: Backend) -> None:
        for _ in range(6):  # more often than any place keeps files for inspection
            put(backend, KEYS[:2])
            statuses = [outcome.status for outcome in backend.quarantine([KEYS[0], KEYS[2]])]
            assert statuses == [Status.OK, Status.MISSING]
            assert backend.contains(KEYS[:3]) == [False, True, False]
            assert get(backend, KEYS[0])[0].status is Status.MISSING
            assert [stored.key for stored in backend.scan()] == [KEYS[1]]
        assert put(backend, KEYS) == [Status.OK] * len(KEYS)
        statuses = [outcome.status for outcome in backend.quarantine(KEYS)]
        assert statuses == [Status.OK] * len(KEYS)
        assert list(backend.scan()) == []

    # ---- scan

    def test_scan_gives_key_head_and_room_of_every_record(self, backend: Backend) -> None:
        assert list(backend.scan()) == []
        sizes = dict(zip(KEYS, [*_SIZES, 100, 9000], strict=True))
        for key, size in sizes.items():
            put(backend, [key], size)
        found = {stored.key: stored for stored in backend.scan()}
        assert found.keys() == sizes.keys()
        for key, size in sizes.items():
            assert found[key].head == record(key, size)[:HEAD_BYTES]
            assert found[key].nbytes >= size

    def test_scan_gives_the_oldest_use_first(self, backend: Backend) -> None:
        put(backend, KEYS[:4])
        backend.remember_use([KEYS[2], KEYS[0]])
        backend.remember_use([KEYS[7]])  # one that is not held
        put(backend, KEYS[4:5])
        backend.remember_use([KEYS[3]])
        order = [KEYS[1], KEYS[2], KEYS[0], KEYS[4], KEYS[3]]
        found = [stored.key for stored in backend.scan()]
        assert found == order if self.knows_use_order else sorted(found) == sorted(order)

    def test_a_scan_bears_changes_while_it_runs(self, backend: Backend) -> None:
        put(backend, KEYS)
        scan = backend.scan()
        first = next(scan).key
        backend.remove(KEYS)
        assert len({first, *(stored.key for stored in scan)}) <= len(KEYS)
        assert list(backend.scan()) == []

    # ---- life

    def test_persistence_is_as_claimed(self, tmp_path: Path) -> None:
        with self.make(tmp_path) as first:
            claimed = first.capabilities.persistent
            put(first, KEYS[:4])
            first.remove(KEYS[:1])
            first.quarantine(KEYS[1:2])
            first.remember_use([KEYS[2]])
            held = list(first.scan())
        with self.make(tmp_path) as second:
            assert second.contains(KEYS[:4]) == [False, False, claimed, claimed]
            assert list(second.scan()) == (held if claimed else [])
            if claimed:
                assert [get(second, key)[1] for key in KEYS[2:4]] == [
                    record(key) for key in KEYS[2:4]
                ]

    def test_closing_twice_is_closing_once(self, tmp_path: Path) -> None:
        backend = self.make(tmp_path)
        backend.close()
        backend.close()

    def test_a_closed_backend_says_so(self, tmp_path: Path) -> None:
        backend = self.make(tmp_path)
        put(backend, KEYS[:1])
        backend.close()
        with pytest.raises(Closed):
            put(backend, KEYS[:1])
        with pytest.raises(Closed):
            get(backend, KEYS[0])
        with pytest.raises(Closed):
            backend.contains(KEYS)
        with pytest.raises(Closed):
            backend.remove(KEYS)
        with pytest.raises(Closed):
            backend.quarantine(KEYS)
        if self.knows_use_order:
            with pytest.raises(Closed):
                backend.remember_use(KEYS)
        with pytest.raises(Closed):
            list(backend.scan())

    def test_free_bytes_is_a_size_or_nothing(self, backend: Backend) -> None:
        free_bytes = backend.free_bytes()
        assert free_bytes is None or free_bytes >= 0

    # ---- threads

    def test_threads_do_not_disturb_each_other(self, backend: Backend) -> None:
        def work(number: int) -> None:
            own = [ChunkKey(bytes([number, i]) * (KEY_BYTES // 2)) for i in range(4)]
            for turn in range(10):
                assert put(backend, own) == [Status.OK] * 4
                for key in own:
                    assert get(backend, key)[1] == record(key)
                backend.remember_use(own)
                assert {stored.key for stored in backend.scan()} >= set(own)
                take_out = backend.remove if turn % 2 else backend.quarantine
                assert all(outcome.ok for outcome in take_out(own))
                assert not any(backend.contains(own))

        with ThreadPoolExecutor(_THREAD_COUNT) as threads:
            for done in [threads.submit(work, number) for number in range(_THREAD_COUNT)]:
                done.result(_WAIT_S)
        assert list(backend.scan()) == []

    def test_threads_that_share_keys_see_whole_records(self, backend: Backend) -> None:
        def work(number: int) -> None:
            choice = random.Random(number)
            for _ in range(40):
                key = choice.choice(KEYS[:2])
                act = choice.randrange(3)
                if act == 0:
                    assert put(backend, [key], 3 * ALIGN_BYTES) == [Status.OK]
                elif act == 1:
                    backend.remove([key])
                else:
                    outcome, found = get(backend, key, 3 * ALIGN_BYTES)
                    assert outcome.status in (Status.OK, Status.MISSING)
                    if outcome.ok:
                        assert found == record(key, 3 * ALIGN_BYTES)

        with ThreadPoolExecutor(_THREAD_COUNT) as threads:
            for done in [threads.submit(work, number) for number in range(_THREAD_COUNT)]:
                done.result(_WAIT_S)
        held = {stored.key for stored in backend.scan()}
        assert backend.contains(KEYS) == [key in held for key in KEYS]

    # ---- any order of calls

    def test_agrees_with_a_dict(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        """Any order of calls gives what a plain dict gives."""
        suite = self
        some_keys = st.lists(st.sampled_from(KEYS), max_size=4)

        class Machine(RuleBasedStateMachine):
            """The backend beside a dict, which is right by definition and in order of use."""

            def __init__(self) -> None:
                super().__init__()
                self.root = tmp_path_factory.mktemp("model")
                self.backend = suite.make(self.root)
                self.model: dict[ChunkKey, bytes] = {}

            @rule(keys=some_keys, nbytes=st.sampled_from(_SIZES))
            def put(self, keys: list[ChunkKey], nbytes: int) -> None:
                assert put(self.backend, keys, nbytes) == [Status.OK] * len(keys)
                for key in keys:
                    self.model.setdefault(key, record(key, nbytes))

            @rule(
                keys=some_keys,
                nbytes=st.sampled_from(_SIZES),
                offset=st.sampled_from([0, 0, 1, ALIGN_BYTES]),
            )
            def get(self, keys: list[ChunkKey], nbytes: int, offset: int) -> None:
                targets = [bytearray(nbytes) for _ in keys]
                views = [memoryview(target) for target in targets]
                outcomes = self.backend.get(keys, views, offset)
                for key, target, outcome in zip(keys, targets, outcomes, strict=True):
                    if key not in self.model:
                        assert outcome == Outcome(Status.MISSING)
                        continue
                    right = self.model[key][offset : offset + nbytes]
                    assert (outcome.status, outcome.nbytes) == (Status.OK, len(right))
                    assert target[: len(right)] == right

            @rule(keys=some_keys, is_damaged=st.booleans())
            def take_out(self, keys: list[ChunkKey], is_damaged: bool) -> None:
                take_out = self.backend.quarantine if is_damaged else self.backend.remove
                right = [self.model.pop(key, None) is not None for key in keys]
                assert [outcome.ok for outcome in take_out(keys)] == right

            @rule(keys=some_keys)
            def remember_use(self, keys: list[ChunkKey]) -> None:
                self.backend.remember_use(keys)
                for key in keys:
                    if key in self.model:
                        self.model[key] = self.model.pop(key)

            @precondition(lambda self: self.backend.capabilities.persistent)
            @rule()
            def reopen(self) -> None:
                self.backend.close()
                self.backend = suite.make(self.root)

            @invariant()
            def holds_the_same(self) -> None:
                assert self.backend.contains(KEYS) == [key in self.model for key in KEYS]
                found = [(stored.key, stored.head) for stored in self.backend.scan()]
                right = [(key, data[:HEAD_BYTES]) for key, data in self.model.items()]
                if suite.knows_use_order:
                    assert found == right
                else:
                    assert sorted(found) == sorted(right)

            def teardown(self) -> None:
                self.backend.close()

        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=self.model_examples, stateful_step_count=20, deadline=None
            ),
        )


class AddressableSuite(BackendSuite):
    """Every `kvtier.backend.AddressableBackend` passes these too."""

    @abc.abstractmethod
    def make(self, root: Path) -> AddressableBackend: ...

    @pytest.fixture
    def place(self, tmp_path: Path) -> Iterator[AddressableBackend]:
        """The same as `backend`, under its narrower type."""
        with self.make(tmp_path) as place:
            yield place

    def test_a_reservation_is_seen_only_once_committed(self, place: AddressableBackend) -> None:
        reserved = place.reserve(5000)
        assert reserved is not None
        place.view(reserved)[:] = record(KEYS[0])
        assert place.contains(KEYS[:1]) == [False]
        assert place.locate(KEYS[:1]) == [None]
        assert list(place.scan()) == []
        assert place.commit(KEYS[0], reserved)
        assert get(place, KEYS[0])[1] == record(KEYS[0])

    def test_located_memory_is_the_record(self, place: AddressableBackend) -> None:
        put(place, KEYS[:2])
        found = place.locate([KEYS[1], KEYS[2], KEYS[0]])
        assert found[1] is None
        for key, descriptor in ((KEYS[1], found[0]), (KEYS[0], found[2])):
            assert descriptor is not None
            assert (descriptor.nbytes, descriptor.region.kind) == (5000, RegionKind.DRAM)
            assert descriptor.address % ALIGN_BYTES == 0
            view = place.view(descriptor)
            assert view == record(key)
            assert not view.readonly

    def test_memory_of_records_does_not_overlap(self, place: AddressableBackend) -> None:
        reserved = [place.reserve(5000) for _ in KEYS]
        for key, descriptor in zip(KEYS, reserved, strict=True):
            assert descriptor is not None
            place.view(descriptor)[:] = record(key)
            assert place.commit(key, descriptor)
        assert [get(place, key)[1] for key in KEYS] == [record(key) for key in KEYS]

    def test_committing_a_held_key_gives_the_room_back(self, place: AddressableBackend) -> None:
        put(place, KEYS[:1])
        used_bytes = place.used_bytes
        reserved = place.reserve(5000)
        assert reserved is not None
        assert not place.commit(KEYS[0], reserved)
        assert place.used_bytes == used_bytes
        assert get(place, KEYS[0])[1] == record(KEYS[0])

    def test_a_reservation_ends_once(self, place: AddressableBackend) -> None:
        reserved = place.reserve(5000)
        assert reserved is not None
        place.cancel(reserved)
        with pytest.raises(ValueError, match="reserved"):
            place.cancel(reserved)
        with pytest.raises(ValueError, match="reserved"):
            place.commit(KEYS[0], reserved)

    def test_room_is_counted_exactly(self, place: AddressableBackend) -> None:
        assert place.used_bytes == 0
        put(place, KEYS[:3])
        reserved = place.reserve(1)
        assert reserved is not None
        stored_bytes = sum(stored.nbytes for stored in place.scan())
        assert place.used_bytes == stored_bytes + ALIGN_BYTES
        place.cancel(reserved)
        assert place.used_bytes == stored_bytes
        place.remove(KEYS[:2])
        place.quarantine(KEYS[2:3])
        assert place.used_bytes == 0

    def test_a_full_place_says_so_and_works_again(self, place: AddressableBackend) -> None:
        free_bytes = place.free_bytes()
        assert free_bytes is not None
        reserved = place.reserve(free_bytes)
        assert reserved is not None
        assert place.free_bytes() == 0
        assert place.reserve(1) is None
        (outcome,) = place.put(KEYS[:1], [memoryview(record(KEYS[0]))])
        assert outcome.status is Status.FAILED
        assert outcome.detail
        place.cancel(reserved)
        assert put(place, KEYS[:1]) == [Status.OK]
