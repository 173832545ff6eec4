from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvtier.backends.memory import MemoryBackend, MemoryOptions
from kvtier.testing.backend_suite import KEYS, get, put, record
from kvtier.testing.faults import Fault, FaultyBackend
from kvtier.types import Status


@pytest.fixture
def faulty() -> Iterator[FaultyBackend]:
    inner = MemoryBackend(MemoryOptions(capacity=1 << 20, prefault=False))
    with FaultyBackend(inner, seed=7) as backend:
        yield backend


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        (Fault.RETRY, Status.RETRY),
        (Fault.FAILED, Status.FAILED),
        (Fault.NO_SPACE, Status.FAILED),
        (Fault.MISSING, Status.MISSING),
    ],
)
def test_a_refused_key_is_not_passed_on_and_spoils_no_other(
    faulty: FaultyBackend, fault: Fault, status: Status
) -> None:
    faulty.break_on("put", fault, keys=[KEYS[1]])
    assert put(faulty, KEYS[:3]) == [Status.OK, status, Status.OK]
    assert faulty.inner.contains(KEYS[:3]) == [True, False, True]
    faulty.heal()
    assert put(faulty, KEYS[:3]) == [Status.OK] * 3


def test_a_fault_strikes_as_often_as_told(faulty: FaultyBackend) -> None:
    faulty.break_on("put", Fault.RETRY, count=2)
    assert put(faulty, KEYS[:3]) == [Status.RETRY, Status.RETRY, Status.OK]
    assert faulty.faults["put", Fault.RETRY] == 2
    assert (faulty.calls["put"], faulty.keys["put"]) == (1, 3)


def test_the_same_seed_strikes_the_same_keys() -> None:
    def statuses(seed: int) -> list[Status]:
        inner = MemoryBackend(MemoryOptions(capacity=1 << 20, prefault=False))
        with FaultyBackend(inner, seed) as backend:
            backend.break_on("put", Fault.FAILED, rate=0.5)
            return [status for _ in range(4) for status in put(backend, KEYS)]

    assert statuses(1) == statuses(1)
    assert statuses(1) != statuses(2)


@pytest.mark.parametrize("operation", ["put", "get"])
def test_a_flipped_bit_is_exactly_one(faulty: FaultyBackend, operation: str) -> None:
    faulty.break_on(operation, Fault.FLIPPED)
    assert put(faulty, KEYS[:1]) == [Status.OK]
    outcome, found = get(faulty, KEYS[0])
    assert outcome.ok
    differing = [a ^ b for a, b in zip(found, record(KEYS[0]), strict=True) if a != b]
    assert [bits.bit_count() for bits in differing] == [1]


@pytest.mark.parametrize("operation", ["put", "get"])
def test_a_torn_record_is_right_in_its_first_half_only(
    faulty: FaultyBackend, operation: str
) -> None:
    faulty.break_on(operation, Fault.TORN)
    put(faulty, KEYS[:1])
    found = get(faulty, KEYS[0])[1]
    assert found[:2500] == record(KEYS[0])[:2500]
    assert found[2500] != record(KEYS[0])[2500]


def test_a_broken_place_raises(faulty: FaultyBackend) -> None:
    faulty.break_on("get", Fault.RAISED, count=1)
    with pytest.raises(OSError, match="injected"):
        get(faulty, KEYS[0])
    assert get(faulty, KEYS[0])[0].status is Status.MISSING


def test_a_held_call_waits_for_its_gate(faulty: FaultyBackend) -> None:
    put(faulty, KEYS[:1])
    gate = faulty.hold("get")
    with ThreadPoolExecutor(1) as thread:
        pending = thread.submit(get, faulty, KEYS[0])
        assert gate.wait_reached()
        assert not pending.done()
        gate.open()
        assert pending.result(60)[1] == record(KEYS[0])


def test_what_moves_no_bytes_cannot_be_torn(faulty: FaultyBackend) -> None:
    with pytest.raises(ValueError, match="moves no bytes"):
        faulty.break_on("remove", Fault.TORN)
