from __future__ import annotations

import errno
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvtier._core import Completions
from kvtier.backends.host import HostTransfers
from kvtier.backends.posix_transfers import PosixTransfers
from kvtier.clock import ManualClock
from kvtier.testing.faulty_transfers import FaultyTransfers, TransferFault
from kvtier.testing.transfer_scene import WAIT_S, Field, Reader, Scene, bytes_at, dram
from kvtier.transfer import Op, Pieces, Side, TransferBackend, Unsuitable
from kvtier.transfer_wrappers import (
    ChecksummedTransfers,
    CountedTransfers,
    ThrottledTransfers,
    WrappedTransfers,
)
from kvtier.types import Region, RegionKind

NBYTES = 64 << 10
SLOT = 16 << 10
READER = Reader(
    lambda place, at, nbytes: bytes_at(place.region)[at : at + nbytes].tobytes(),
    lambda place, at, data: bytes_at(place.region).__setitem__(
        slice(at, at + len(data)), np.frombuffer(data, np.uint8)
    ),
)


@contextmanager
def scene(backend: TransferBackend, completions: Completions) -> Iterator[Scene]:
    local, remote = (Field([dram(NBYTES)], READER) for _ in range(2))
    made = Scene(backend, completions, local, remote, slot_bytes=SLOT)
    yield made
    made.close()


@pytest.fixture
def completions() -> Completions:
    return Completions()


@pytest.fixture
def faulty(completions: Completions) -> FaultyTransfers:
    return FaultyTransfers(completions, HostTransfers, seed=1)


@pytest.fixture
def stage(faulty: FaultyTransfers, completions: Completions) -> Iterator[Scene]:
    with scene(faulty, completions) as made:
        yield made


def start(stage: Scene, deadline_s: float = WAIT_S, op: Op = Op.READ) -> int:
    """A transfer of the whole region in four pieces."""
    return stage.start(stage.prepare(stage.adjacent(op)), deadline_s)


# ---- ThrottledTransfers


def test_an_end_is_told_when_the_line_would_have_carried_the_bytes(
    completions: Completions,
) -> None:
    clock = ManualClock()
    slow = ThrottledTransfers(completions, HostTransfers, NBYTES, 0.5, clock)
    with scene(slow, completions) as stage:
        tickets = [start(stage, math.inf) for _ in range(2)]
        for now_s, ended in ((1.25, [False, False]), (2.0, [True, False]), (2.5, [True, True])):
            clock.advance(now_s - clock.now_s())
            slow.wake()
            for ticket, has_ended in zip(tickets, ended, strict=True):
                if has_ended:
                    assert stage.ends.wait(ticket).results.tolist() == [SLOT] * 4
                else:
                    assert not stage.ends.has_ended(ticket)


def test_a_line_that_is_too_slow_ends_by_the_deadline(completions: Completions) -> None:
    clock = ManualClock()
    slow = ThrottledTransfers(completions, HostTransfers, NBYTES, 0.0, clock)
    with scene(slow, completions) as stage:
        ticket = start(stage, 60.0)
        other = start(stage, 1.5)
        clock.advance(1.75)
        slow.wake()
        assert stage.ends.wait_quiet(ticket).results.tolist() == [SLOT] * 4
        end = stage.ends.wait_quiet(other)
        assert (end.results.tolist(), end.started) == ([-errno.ETIMEDOUT] * 4, 4)


def test_a_transfer_on_the_line_can_be_cancelled(completions: Completions) -> None:
    slow = ThrottledTransfers(completions, HostTransfers, NBYTES, 0.0, ManualClock())
    with scene(slow, completions) as stage:
        ticket = start(stage)
        slow.cancel(ticket)
        results = stage.ends.wait_quiet(ticket).results
        assert set(results.tolist()) == {-errno.ECANCELED}


def test_closing_ends_what_is_on_the_line(completions: Completions) -> None:
    slow = ThrottledTransfers(completions, HostTransfers, 1.0, 0.0, ManualClock())
    with scene(slow, completions) as stage:
        tickets = [start(stage) for _ in range(3)]
        slow.close()
        for ticket in tickets:
            assert stage.ends.wait_quiet(ticket)


# ---- CountedTransfers


def test_each_direction_is_counted(completions: Completions) -> None:
    clock = ManualClock()
    inner = FaultyTransfers(Completions(), HostTransfers)

    def make(heard: Completions) -> FaultyTransfers:
        nonlocal inner
        inner.close()
        inner = FaultyTransfers(heard, HostTransfers)
        return inner

    counted = CountedTransfers(completions, make, clock)
    with scene(counted, completions) as stage:
        for _ in range(3):
            stage.move(stage.adjacent(Op.READ))
        inner.break_on(TransferFault.ERRNO, code=errno.ENOSPC, op=Op.WRITE)
        stage.ends.wait(start(stage, op=Op.WRITE))
        read, write = (counted.counts()[op] for op in (Op.READ, Op.WRITE))
        assert (read.started, read.ended, read.pieces, read.nbytes) == (3, 3, 12, 3 * NBYTES)
        assert (write.pieces, write.nbytes) == (4, NBYTES - SLOT)
        assert (dict(read.errors), dict(write.errors)) == ({}, {"ENOSPC": 1})


# ---- ChecksummedTransfers


def checksummed_over_faulty(completions: Completions) -> tuple[WrappedTransfers, FaultyTransfers]:
    made: list[FaultyTransfers] = []

    def make(heard: Completions) -> FaultyTransfers:
        made.append(FaultyTransfers(heard, HostTransfers, seed=3))
        return made[0]

    return ChecksummedTransfers(completions, make), made[0]


@pytest.mark.parametrize("op", list(Op))
def test_a_flipped_bit_is_a_bad_message(completions: Completions, op: Op) -> None:
    backend, faulty = checksummed_over_faulty(completions)
    with scene(backend, completions) as stage:
        faulty.break_on(TransferFault.FLIPPED, count=1)
        end = stage.ends.wait_quiet(start(stage, op=op))
        assert sorted(end.results.tolist()) == [-errno.EBADMSG, SLOT, SLOT, SLOT]
        assert "1 pieces differ" in end.detail
        stage.check([(stage.adjacent(op), end)])
        stage.move(stage.adjacent(op))


def test_bytes_out_of_sight_are_refused(completions: Completions, tmp_path: Path) -> None:
    backend = ChecksummedTransfers(completions, PosixTransfers)
    path = tmp_path / "file"
    path.write_bytes(bytes(NBYTES))
    local = backend.register(*dram(NBYTES))
    remote = backend.register(Region(RegionKind.FILE, 0, NBYTES, number=1), path)
    which, offsets = np.zeros(1, np.uint32), np.zeros(1, np.uint64)
    here, there = (Side((handle,), which, offsets) for handle in (local, remote))
    pieces = Pieces(Op.READ, here, there, np.array([8], np.uint64))
    with pytest.raises(Unsuitable, match="cannot look"):
        backend.prepare(pieces, None)
    for handle in (local, remote):
        backend.deregister(handle)
    backend.close()


# ---- FaultyTransfers


@pytest.mark.parametrize(
    "fault", [TransferFault.ERRNO, TransferFault.SHORT, TransferFault.FLIPPED, TransferFault.HANG]
)
def test_the_suite_notices_every_fault(
    stage: Scene, faulty: FaultyTransfers, fault: TransferFault
) -> None:
    """What the conformance tests stand on must not pass a backend that spoils something."""
    faulty.break_on(fault)
    drawn = stage.adjacent(Op.READ)
    end = stage.ends.wait(stage.start(stage.prepare(drawn), 0.2))

    def passes() -> None:
        assert end.results.tolist() == drawn.lengths
        stage.check([(drawn, end)])

    with pytest.raises(AssertionError):
        passes()


def test_the_suite_notices_bytes_beside_the_pieces_and_a_second_end(
    stage: Scene, completions: Completions
) -> None:
    ticket = start(stage)
    stage.check([(stage.adjacent(Op.READ), stage.ends.wait_quiet(ticket))])
    bytes_at(stage.remote.places[0].region)[5] ^= 1
    with pytest.raises(AssertionError, match="1 bytes of remote region 0 are wrong, from 5"):
        stage.check()
    completions.push(ticket, np.zeros(4, np.int64), 4)
    with pytest.raises(AssertionError, match="ended twice"):
        stage.ends.has_ended(ticket)


def test_one_piece_fails_as_told_and_the_others_arrive(
    stage: Scene, faulty: FaultyTransfers
) -> None:
    faulty.break_on(TransferFault.ERRNO, code=errno.EFAULT, count=1)
    end = stage.ends.wait_quiet(start(stage))
    assert sorted(end.results.tolist()) == [-errno.EFAULT, SLOT, SLOT, SLOT]
    assert end.detail == "injected: EFAULT"
    stage.move(stage.adjacent(Op.READ))
    assert faulty.faults == {TransferFault.ERRNO: 1}


def test_a_short_piece_says_how_much_there_was(stage: Scene, faulty: FaultyTransfers) -> None:
    faulty.break_on(TransferFault.SHORT)
    results = stage.ends.wait(start(stage)).results.tolist()
    assert sorted(results) == [SLOT // 2, SLOT, SLOT, SLOT]


def test_a_flipped_bit_looks_right_and_is_wrong(stage: Scene, faulty: FaultyTransfers) -> None:
    faulty.break_on(TransferFault.FLIPPED)
    assert stage.ends.wait_quiet(start(stage)).results.tolist() == [SLOT] * 4
    wrong = stage.local.look(0) ^ stage.remote.look(0)
    assert int(np.unpackbits(wrong).sum()) == 1


def test_a_delayed_end_comes_late_but_right(completions: Completions) -> None:
    clock = ManualClock()
    faulty = FaultyTransfers(completions, HostTransfers, clock=clock)
    faulty.break_on(TransferFault.DELAY, delay_s=2.0)
    with scene(faulty, completions) as stage:
        ticket = start(stage)
        clock.advance(1.9)
        faulty.wake()
        assert not stage.ends.has_ended(ticket)
        clock.advance(0.2)
        faulty.wake()
        assert stage.ends.wait_quiet(ticket).results.tolist() == [SLOT] * 4


def test_a_hang_moves_nothing_ends_by_its_deadline_and_is_quiet_once_healed(
    stage: Scene, faulty: FaultyTransfers
) -> None:
    faulty.break_on(TransferFault.HANG)
    ticket = start(stage, 0.02)
    end = stage.ends.wait(ticket)
    assert (end.results.tolist(), end.is_quiet) == ([-errno.ETIMEDOUT] * 4, False)
    other = start(stage)
    faulty.cancel(other)
    assert stage.ends.wait(other).results.tolist() == [-errno.ECANCELED] * 4
    third = start(stage)
    assert not any(stage.ends.is_quiet(each) for each in (ticket, other, third))
    faulty.heal()
    for each in (ticket, other, third):
        stage.ends.wait_quiet(each)
    stage.check()
    stage.move(stage.adjacent(Op.READ))


def test_closing_lets_go_of_what_hangs(stage: Scene, faulty: FaultyTransfers) -> None:
    faulty.break_on(TransferFault.HANG)
    ticket = start(stage)
    faulty.close()
    assert stage.ends.wait_quiet(ticket).results.tolist() == [-errno.ECANCELED] * 4


def test_a_lost_end_is_told_at_the_deadline_though_all_arrived(
    stage: Scene, faulty: FaultyTransfers
) -> None:
    faulty.break_on(TransferFault.LOST)
    end = stage.ends.wait_quiet(start(stage, 0.1))
    assert end.results.tolist() == [-errno.ETIMEDOUT] * 4
    stage.check([(stage.adjacent(Op.READ), end)])
    ticket = start(stage)
    faulty.cancel(ticket)
    assert stage.ends.wait_quiet(ticket).results.tolist() == [-errno.ECANCELED] * 4


def test_chance_follows_the_seed(completions: Completions) -> None:
    def struck(seed: int) -> list[list[int]]:
        told = Completions()
        faulty = FaultyTransfers(told, HostTransfers, seed=seed)
        faulty.break_on(TransferFault.ERRNO, rate=0.5)
        with scene(faulty, told) as stage:
            return [stage.ends.wait_quiet(start(stage)).results.tolist() for _ in range(20)]

    assert struck(7) == struck(7) != struck(8)


def test_faults_can_be_of_one_direction(stage: Scene, faulty: FaultyTransfers) -> None:
    faulty.break_on(TransferFault.ERRNO, op=Op.WRITE)
    stage.move(stage.adjacent(Op.READ))
    assert (stage.ends.wait(start(stage, op=Op.WRITE)).results < 0).any()
