"""What `BlockingTransfers` adds to a function that blocks, with functions that do so on command."""

from __future__ import annotations

import errno
import gc
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import pytest

from kvtier._core import Completions
from kvtier.testing.transfer_scene import Ends
from kvtier.transfer import (
    QUEUE_MAX,
    BlockingTransfers,
    Pieces,
    Reach,
    Results,
    Stop,
)
from kvtier.types import Region

WAIT_S = 30.0
Move = Callable[[Results, Stop], str]


class Told(BlockingTransfers):
    """Its prepared transfers are the functions that `move` calls, on two pieces each."""

    name: ClassVar[str] = "told"
    threads: ClassVar[int] = 2

    @property
    def reach(self) -> Reach:
        return Reach(frozenset())

    def register(self, region: Region, source: Any) -> None:
        raise NotImplementedError

    def deregister(self, handle: Any) -> None:
        raise NotImplementedError

    def prepare(self, pieces: Pieces, link: Any) -> None:
        raise NotImplementedError

    def piece_count(self, prepared: Any) -> int:
        return 2

    def move(self, prepared: Move, results: Results, stop: Stop) -> str:
        return prepared(results, stop)


class Hang:
    """A move that touches nothing, ignores its `stop`, and returns when it is let go."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.stop: Stop | None = None
        self._let_go = threading.Event()

    def __call__(self, results: Results, stop: Stop) -> str:
        self.stop = stop
        self.reached.set()
        assert self._let_go.wait(WAIT_S)
        results[:] = 8
        return ""

    def let_go(self) -> None:
        self._let_go.set()


def fine(results: Results, stop: Stop) -> str:
    results[:] = 8
    return ""


@contextmanager
def hung(transfers: Told) -> Iterator[list[Hang]]:
    """Every thread of it stands in a move that hangs; they are tickets 9001, 9002."""
    hangs = [Hang() for _ in range(transfers.threads)]
    try:
        for number, hang in enumerate(hangs):
            transfers.start(hang, 9001 + number, WAIT_S)
            assert hang.reached.wait(WAIT_S)
        yield hangs
    finally:
        for hang in hangs:
            hang.let_go()


@pytest.fixture
def completions() -> Completions:
    return Completions()


@pytest.fixture
def ends(completions: Completions) -> Ends:
    return Ends(completions)


@pytest.fixture
def transfers(completions: Completions) -> Iterator[Told]:
    told = Told(completions)
    yield told
    told.close()


def test_a_move_that_ends_is_told_once_with_its_results(transfers: Told, ends: Ends) -> None:
    def half(results: Results, stop: Stop) -> str:
        results[:] = (8, -errno.EIO)
        return "the disk said so"

    transfers.start(half, 1, WAIT_S)
    end = ends.wait(1)
    assert (end.results.tolist(), end.started, end.is_quiet) == ([8, -errno.EIO], 2, True)
    assert end.detail == "the disk said so"


def test_a_hung_move_ends_by_its_deadline_and_is_quiet_when_it_returns(
    transfers: Told, ends: Ends
) -> None:
    hang = Hang()
    transfers.start(hang, 1, 0.05)
    assert hang.reached.wait(WAIT_S)
    end = ends.wait(1)
    assert (end.results.tolist(), end.is_quiet) == ([-errno.ETIMEDOUT] * 2, False)
    assert end.started == 2  # both may have been begun
    assert hang.stop is not None
    assert hang.stop.is_set()
    assert not ends.is_quiet(1)
    hang.let_go()
    ends.wait_quiet(1)


def test_a_later_and_shorter_deadline_is_kept_too(transfers: Told, ends: Ends) -> None:
    with hung(transfers):
        transfers.start(fine, 1, WAIT_S)
        transfers.start(fine, 2, 0.05)
        assert ends.wait(2).results.tolist() == [-errno.ETIMEDOUT] * 2
        assert not ends.has_ended(1)


def test_a_transfer_whose_turn_never_came_is_untouched(transfers: Told, ends: Ends) -> None:
    ran = threading.Event()

    def note(results: Results, stop: Stop) -> str:
        ran.set()
        return fine(results, stop)

    with hung(transfers):
        transfers.start(note, 1, WAIT_S)
        transfers.cancel(1)
        end = ends.wait(1)
        assert (end.results.tolist(), end.started) == ([-errno.ECANCELED] * 2, 0)
        assert end.is_quiet
    transfers.start(fine, 2, WAIT_S)
    transfers.start(fine, 3, WAIT_S)
    assert ends.wait(2).results.tolist() == ends.wait(3).results.tolist() == [8, 8]
    assert not ran.is_set()


def test_a_running_transfer_is_cancelled_at_once_and_quiet_later(
    transfers: Told, ends: Ends
) -> None:
    def patient(results: Results, stop: Stop) -> str:
        results[0] = 8
        running.set()
        while not stop.wait(WAIT_S):
            pass
        return "stopped"

    running = threading.Event()
    transfers.start(patient, 1, WAIT_S)
    assert running.wait(WAIT_S)
    transfers.cancel(1)
    assert ends.wait_quiet(1).results.tolist() == [-errno.ECANCELED] * 2
    transfers.cancel(1)
    transfers.cancel(77)


def test_a_deadline_in_the_past_runs_nothing(transfers: Told, ends: Ends) -> None:
    ran = threading.Event()

    def note(results: Results, stop: Stop) -> str:
        ran.set()
        return fine(results, stop)

    for ticket, deadline_s in ((1, 0.0), (2, -5.0)):
        transfers.start(note, ticket, deadline_s)
        assert ends.wait_quiet(ticket).results.tolist() == [-errno.ETIMEDOUT] * 2
    assert not ran.is_set()


def test_pieces_not_begun_by_the_deadline_say_so(transfers: Told, ends: Ends) -> None:
    """A move that obeys its deadline says the same as one that is given up at it."""

    def obeys(results: Results, stop: Stop) -> str:
        results[0] = 8
        while not stop.wait(WAIT_S):
            pass
        return "stopped"

    transfers.start(obeys, 1, 0.05)
    end = ends.wait_quiet(1)
    assert end.results.tolist()[1] == -errno.ETIMEDOUT
    assert end.results.tolist()[0] in (8, -errno.ETIMEDOUT)  # told by whichever came first


def test_no_deadline_is_a_deadline(transfers: Told, ends: Ends) -> None:
    transfers.start(fine, 1, math.inf)
    assert ends.wait(1).results.tolist() == [8, 8]
    hang = Hang()
    transfers.start(hang, 2, 0.05)
    assert ends.wait(2).results.tolist() == [-errno.ETIMEDOUT] * 2
    hang.let_go()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (lambda: OSError(errno.ENOSPC, "no room"), errno.ENOSPC),
        (lambda: OSError("no number"), errno.EIO),
        (lambda: RuntimeError("a fault of ours"), errno.EIO),
    ],
)
def test_what_a_move_raises_fails_what_is_unanswered(
    transfers: Told, ends: Ends, error: Callable[[], Exception], code: int
) -> None:
    def breaks(results: Results, stop: Stop) -> str:
        results[0] = 8
        raise error()

    transfers.start(breaks, 1, WAIT_S)
    end = ends.wait(1)
    assert (end.results.tolist(), end.is_quiet) == ([8, -code], True)
    assert repr(error()) in end.detail
    transfers.start(fine, 2, WAIT_S)
    assert ends.wait(2).results.tolist() == [8, 8]


def test_the_queue_is_bounded_and_says_so(transfers: Told, ends: Ends) -> None:
    with hung(transfers):
        waiting = QUEUE_MAX - transfers.threads
        for ticket in range(1, waiting + 1):
            transfers.start(fine, ticket, WAIT_S)
        transfers.start(fine, 2000, WAIT_S)
        end = ends.wait(2000)
        assert (end.results.tolist(), end.started) == ([-errno.EAGAIN] * 2, 0)
        assert end.is_quiet
        assert not ends.has_ended(waiting)
    for ticket in range(1, waiting + 1):
        assert ends.wait(ticket).results.tolist() == [8, 8]
    transfers.start(fine, 2001, WAIT_S)
    assert ends.wait(2001).results.tolist() == [8, 8]


def test_the_queue_is_bounded_for_those_given_up_as_well(transfers: Told, ends: Ends) -> None:
    with hung(transfers):
        for ticket in range(1, 2 * QUEUE_MAX):
            transfers.start(fine, ticket, WAIT_S)
            transfers.cancel(ticket)
        assert ends.wait(QUEUE_MAX).results.tolist() == [-errno.ECANCELED] * 2
        assert ends.wait(2 * QUEUE_MAX - 1).results.tolist() == [-errno.EAGAIN] * 2


def test_what_was_prepared_is_let_go_with_its_end(transfers: Told, ends: Ends) -> None:
    """Handles in it may hold files and mappings; neither thread may keep them until its next job."""

    class Prepared:
        def __call__(self, results: Results, stop: Stop) -> str:
            return fine(results, stop)

    prepared = Prepared()
    gone = weakref.ref(prepared)
    transfers.start(prepared, 1, WAIT_S)
    ends.wait_quiet(1)
    del prepared
    ends_s = time.monotonic() + WAIT_S
    while gone() is not None:  # the thread is a step behind what it has told
        gc.collect()
        assert time.monotonic() < ends_s


def test_closing_ends_all_and_leaves_a_hung_thread_behind(transfers: Told, ends: Ends) -> None:
    with hung(transfers):
        transfers.start(fine, 1, WAIT_S)
        begin_s = time.monotonic()
        transfers.close()
        assert time.monotonic() - begin_s < 3.0
        assert ends.wait(1).started == 0
        assert ends.is_quiet(1)
        for ticket in (9001, 9002):
            assert ends.wait(ticket).results.tolist() == [-errno.ECANCELED] * 2
            assert not ends.is_quiet(ticket)
        transfers.close()
    for ticket in (9001, 9002):
        ends.wait_quiet(ticket)


def test_a_start_after_close_is_told_as_cancelled(transfers: Told, ends: Ends) -> None:
    transfers.close()
    transfers.start(fine, 1, WAIT_S)
    end = ends.wait(1)
    assert (end.results.tolist(), end.started) == ([-errno.ECANCELED] * 2, 0)
    assert end.is_quiet
    assert end.detail == "closed"


def test_a_closed_one_has_no_threads(completions: Completions) -> None:
    before = threading.active_count()
    for _ in range(3):
        Told(completions).close()
    assert threading.active_count() == before


def test_ended_jobs_with_far_deadlines_do_not_pile_up(transfers: Told, ends: Ends) -> None:
    for ticket in range(1, 2001):
        transfers.start(fine, ticket, 3600.0)
        if ticket % 100 == 0:
            ends.wait(ticket)
    assert len(transfers._overdue) < 600


def test_many_threads_start_and_cancel_and_each_ends_once(transfers: Told, ends: Ends) -> None:
    def work(number: int) -> None:
        chance = np.random.default_rng(number)
        for i in range(100):
            ticket = 1000 * number + i
            transfers.start(fine, ticket, float(chance.choice((0.0, 0.001, WAIT_S))))
            if chance.random() < 0.5:
                transfers.cancel(ticket)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    for number in range(1, 5):
        for i in range(100):
            end = ends.wait_quiet(1000 * number + i)
            assert set(end.results.tolist()) <= {8, -errno.ECANCELED, -errno.ETIMEDOUT}
