from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from kvtier.backends.memory import MemoryBackend, MemoryOptions
from kvtier.clock import ManualClock
from kvtier.testing.backend_suite import KEYS, get, put, record
from kvtier.testing.faults import Fault, FaultyBackend
from kvtier.types import Status
from kvtier.wrappers import Checksummed, Count, Counted, Throttled


def memory() -> MemoryBackend:
    return MemoryBackend(MemoryOptions(capacity=1 << 20, prefault=False))


def faulty() -> FaultyBackend:
    return FaultyBackend(memory())


# ---- Throttled


def test_bytes_take_their_time_and_each_call_its_latency() -> None:
    clock = ManualClock()
    with Throttled(memory(), 1000.0, 0.5, clock, clock.advance) as backend:
        put(backend, KEYS[:2], 2000)
        assert clock.now_s() == pytest.approx(4.5)
        get(backend, KEYS[0], 1000)
        assert clock.now_s() == pytest.approx(6.0)
        backend.contains(KEYS)
        assert clock.now_s() == pytest.approx(6.5)
        get(backend, KEYS[7])  # one that is not there costs the latency only
        assert clock.now_s() == pytest.approx(7.0)


def test_an_idle_line_saves_nothing_up() -> None:
    clock = ManualClock()
    with Throttled(memory(), 1000.0, 0.0, clock, clock.advance) as backend:
        clock.advance(100.0)
        put(backend, KEYS[:1], 2000)
        assert clock.now_s() == pytest.approx(102.0)


def test_threads_share_the_line() -> None:
    clock = ManualClock()
    waits_s: list[float] = []
    with (
        Throttled(memory(), 1000.0, 0.0, clock, waits_s.append) as backend,
        ThreadPoolExecutor(4) as threads,
    ):
        list(threads.map(lambda key: put(backend, [key], 1000), KEYS[:4]))
    assert sorted(waits_s) == pytest.approx([1.0, 2.0, 3.0, 4.0])


@pytest.mark.parametrize(("bytes_per_s", "latency_s"), [(0, 0), (-1, 0), (1, -1)])
def test_a_line_that_carries_nothing_is_refused(bytes_per_s: float, latency_s: float) -> None:
    with pytest.raises(ValueError, match="bytes/s"):
        Throttled(memory(), bytes_per_s, latency_s)


# ---- Counted


def test_each_operation_is_counted() -> None:
    clock = ManualClock()
    slow = Throttled(memory(), 1024.0, 0.0, clock, clock.advance)
    with Counted(slow, clock) as backend:
        put(backend, KEYS[:2], 2048)
        get(backend, KEYS[0], 512)
        get(backend, KEYS[5], 512)
        backend.remove(KEYS[:1])
        assert backend.counts() == {  # each number is exact in binary
            "put": Count(1, 2, 4096, 4.0, 0),
            "get": Count(2, 2, 512, 0.5, 0),
            "remove": Count(1, 1, 0, 0.0, 0),
        }


def test_faults_are_counted_and_misses_are_none() -> None:
    inner = faulty()
    with Counted(inner) as backend:
        put(backend, KEYS[:4])
        inner.break_on("get", Fault.FAILED, keys=KEYS[:1])
        inner.break_on("get", Fault.RETRY, keys=KEYS[1:2])
        inner.break_on("remove", Fault.RAISED)
        for key in (*KEYS[:4], KEYS[7]):
            get(backend, key)
        with pytest.raises(OSError, match="injected"):
            backend.remove(KEYS[:2])
        counts = backend.counts()
        assert (counts["get"].calls, counts["get"].errors) == (5, 2)
        assert (counts["remove"].calls, counts["remove"].keys, counts["remove"].errors) == (1, 2, 1)


def test_threads_are_counted_exactly() -> None:
    with Counted(memory()) as backend, ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: backend.contains(KEYS), range(200)))
        count = backend.counts()["contains"]
        assert (count.calls, count.keys) == (200, 200 * len(KEYS))


# ---- Checksummed


@pytest.mark.parametrize("fault", [Fault.FLIPPED, Fault.TORN])
@pytest.mark.parametrize("operation", ["put", "get"])
def test_spoiled_bytes_are_corrupt(operation: str, fault: Fault) -> None:
    inner = faulty()
    inner.break_on(operation, fault, keys=KEYS[:1])
    with Checksummed(inner) as backend:
        put(backend, KEYS[:2])
        outcome, _ = get(backend, KEYS[0])
        assert (outcome.status, outcome.nbytes) == (Status.CORRUPT, 0)
        assert outcome.detail
        outcome, found = get(backend, KEYS[1])
        assert (outcome.status, found) == (Status.OK, record(KEYS[1]))


def test_a_longer_target_is_no_fault() -> None:
    with Checksummed(memory()) as backend:
        put(backend, KEYS[:1], 500)
        outcome, found = get(backend, KEYS[0], 800)
        assert (outcome.status, found) == (Status.OK, record(KEYS[0], 500))


def test_another_length_than_was_stored_is_corrupt() -> None:
    inner = memory()
    with Checksummed(inner) as backend:
        put(backend, KEYS[:1], 500)
        inner.remove(KEYS[:1])
        put(inner, KEYS[:1], 400)
        for nbytes, offset in ((500, 0), (500, 100), (500, 450)):
            assert get(backend, KEYS[0], nbytes, offset)[0].status is Status.CORRUPT


def test_what_was_removed_may_come_back_different() -> None:
    with Checksummed(memory()) as backend:
        for take_out in (backend.remove, backend.quarantine):
            put(backend, KEYS[:1], 500)
            take_out(KEYS[:1])
            put(backend, KEYS[:1], 400)
            assert get(backend, KEYS[0], 400)[0].ok
            backend.remove(KEYS[:1])


def test_what_it_has_not_stored_is_passed_on() -> None:
    inner = memory()
    put(inner, KEYS[:1])
    with Checksummed(inner) as backend:
        assert get(backend, KEYS[0])[1] == record(KEYS[0])


def test_wrappers_stand_around_each_other() -> None:
    clock = ManualClock()
    inner = faulty()
    inner.break_on("get", Fault.FLIPPED, count=1)
    slow = Throttled(inner, 5000.0, 0.0, clock, clock.advance)
    with Counted(Checksummed(slow), clock) as backend:
        put(backend, KEYS[:1])
        assert [get(backend, KEYS[0])[0].status for _ in range(2)] == [Status.CORRUPT, Status.OK]
        assert backend.counts()["get"].errors == 1
    assert clock.now_s() == pytest.approx(3.0)
