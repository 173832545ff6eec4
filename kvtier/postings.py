"""Transfers under way: started in order, bounded, ended by their deadline, seen to be quiet.

The half of the agent that knows time. It shares the agent's lock, and calls backends under it:
none of them waits in `start` or `cancel`.
"""

from __future__ import annotations

import errno
import heapq
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

from kvtier._core import Completions
from kvtier.errors import Closed
from kvtier.metadata import Notify, check_payload
from kvtier.peers import Held
from kvtier.routing import Router
from kvtier.transfer import Results, TransferBackend
from kvtier.transfers import State, Transfer

log = logging.getLogger("kvtier.agent")

TICK_S = 1.0
_DEADLINE_S_MAX = 1e6
_OVERDUE_S = (
    1.0  # after its deadline a backend has broken its word, and the transfer ends without it
)
_ENDED_MAX = 4096  # kept for `progress`; whoever never asks loses the oldest


class Postings:
    """Every transfer between `post` and quiet. Any thread."""

    def __init__(
        self,
        lock: threading.RLock,
        completions: Completions,
        backends: Mapping[str, TransferBackend],
        router: Router,
        in_flight_bytes_max: int,
        follow: Callable[[bool], None],
        wake: Callable[[], None],
        released: Callable[[Transfer], None],
        heed: Callable[[], object],
    ) -> None:
        """`follow` says whether ends must be looked at though nobody asks, `wake` that a deadline
        is new, `released` is told of each transfer that touches its regions no more, `heed` that
        some have ended."""
        self._lock = lock
        self._completions = completions
        self._backends = backends
        self._router = router
        self._in_flight_bytes_max = in_flight_bytes_max
        self._follow_ends = follow
        self._wake = wake
        self._released = released
        self._heed = heed
        self._next_ticket = 1
        self._running: dict[int, Transfer] = {}
        self._unquiet: dict[int, Transfer] = {}
        self._waiting: deque[Transfer] = deque()
        self._deadlines: list[tuple[float, int, Transfer]] = []  # of those that wait
        self._notifying = 0  # of those that run
        self._awaited: list[Held] = []  # regions that a peer wants back
        self._in_flight_bytes = 0
        self._ended: deque[Transfer] = deque(maxlen=_ENDED_MAX)
        self._closed = False

    def post(self, transfer: Transfer, deadline_s: float, notify: bytes | None) -> None:
        """`Transfer.post`."""
        if math.isnan(deadline_s):
            raise ValueError("the deadline is not a number")
        if notify is not None:
            check_payload(notify)
            if transfer.peer is None:
                raise ValueError("there is no peer to notify")
        deadline_s = min(deadline_s, _DEADLINE_S_MAX)
        with self._lock:
            if self._closed:
                raise Closed("the agent is closed")
            transfer.begin(self._next_ticket, time.monotonic() + deadline_s, notify)
            self._next_ticket += 1
            if deadline_s <= 0:
                self._refuse(transfer, errno.ETIMEDOUT, "the deadline is in the past")
            elif not self._try_start(transfer):
                self._waiting.append(transfer)
                heapq.heappush(self._deadlines, (transfer.ends_s, transfer.ticket, transfer))
                self._forget_deadlines()
                self._follow()
                self._wake()

    def cancel(self, transfer: Transfer) -> None:
        """`Transfer.cancel`."""
        with self._lock:
            if transfer.state is State.WAITING:
                self._refuse(transfer, errno.ECANCELED, "cancelled")
            elif transfer.state is State.RUNNING:
                self._backends[transfer.backend].cancel(transfer.ticket)

    def moved_bytes(self, transfer: Transfer) -> int:
        """`Transfer.progress`."""
        with self._lock:
            if transfer.state is not State.RUNNING:
                return 0
            backend, ticket = self._backends[transfer.backend], transfer.ticket
        return backend.progress(ticket)

    def wait(self, transfer: Transfer, timeout_s: float) -> bool:
        """`Transfer.wait`."""
        ends_s = time.monotonic() + timeout_s
        while True:
            seen = self._completions.generation
            self.look()
            if transfer.state is State.ENDED:
                return True
            now_s = time.monotonic()
            if now_s >= ends_s:
                return False
            self._completions.wait(seen, min(ends_s - now_s, TICK_S))
            self._end_overdue()

    def look(self) -> None:
        """Take in what backends have said."""
        with self._lock:
            ended, quiet = self._completions.drain()
            for ticket, results, started, is_quiet, detail in ended:
                if (transfer := self._running.get(ticket)) is not None:
                    self._end_running(transfer, results, started, is_quiet, detail)
                elif is_quiet:  # it was ended as overdue
                    quiet.append(ticket)
            for ticket in quiet:
                if (transfer := self._unquiet.pop(ticket, None)) is not None:
                    transfer.become_quiet()
                    self._released(transfer)
            if ended or quiet:
                self.start_waiting()

    def ended(self) -> list[Transfer]:
        """Those that ended since the last call."""
        with self._lock:
            found = list(self._ended)
            self._ended.clear()
        return found

    def tick(self) -> float:
        """End what is overdue, start what may; gives the seconds until the next time."""
        self.look()
        self._end_overdue()
        with self._lock:
            self.start_waiting()
            now_s = time.monotonic()
            while self._deadlines and self._deadlines[0][0] <= now_s:
                _, ticket, transfer = heapq.heappop(self._deadlines)
                if transfer.state is State.WAITING and transfer.ticket == ticket:
                    self._refuse(transfer, errno.ETIMEDOUT, "deadline passed before it could begin")
            return min(self._deadlines[0][0] - now_s, TICK_S) if self._deadlines else TICK_S

    def start_waiting(self) -> None:
        """Begin what may begin, in order of posting; a peer not there yet holds up only its own."""
        with self._lock:
            for _ in range(len(self._waiting)):
                transfer = self._waiting.popleft()
                if transfer.state is State.WAITING and not self._try_start(transfer):
                    self._waiting.append(transfer)
            self._follow()

    def await_quiet(self, held: Held) -> None:
        """Look at ends, though nobody asks, until nothing touches the region any more."""
        with self._lock:
            self._awaited.append(held)
            self._follow()
            self._wake()

    def close(self, timeout_s: float) -> list[Transfer]:
        """Cancel all, refuse what comes, and wait until memory is quiet; gives what is not."""
        with self._lock:
            self._closed = True
            for transfer in [*self._running.values(), *self._waiting]:
                self.cancel(transfer)
        ends_s = time.monotonic() + timeout_s
        while True:
            seen = self._completions.generation
            self.look()
            with self._lock:
                busy = [*self._running.values(), *self._unquiet.values()]
            left_s = ends_s - time.monotonic()
            if not busy or left_s <= 0:
                return busy
            self._completions.wait(seen, left_s)

    # Under the lock ------------------------------------------------------------------------------

    def _try_start(self, transfer: Transfer) -> bool:
        """Give it to its backend, or end it if it can no longer be; False if it must wait."""
        peer = transfer.peer
        left_s = transfer.ends_s - time.monotonic()
        if peer is not None and not peer.alive:
            self._refuse(transfer, errno.ECONNRESET, f"{peer.name}: {peer.lost}")
        elif gone := [held for held in transfer.held if held.leaving]:
            why = f"region {gone[0].region.number} was withdrawn"
            self._refuse(transfer, errno.ECONNABORTED, why)
        elif left_s <= 0:
            self._refuse(transfer, errno.ETIMEDOUT, "deadline passed before it could begin")
        elif (peer is not None and not peer.connected) or self._is_full(transfer):
            return False
        else:
            self._start(transfer, left_s)
        return True

    def _forget_deadlines(self) -> None:
        """Those of transfers that no longer wait keep them alive: now and then let them go."""
        if len(self._deadlines) > 2 * len(self._waiting) + 64:
            self._deadlines = [(t.ends_s, t.ticket, t) for t in self._waiting]
            heapq.heapify(self._deadlines)

    def _is_full(self, transfer: Transfer) -> bool:
        return bool(self._in_flight_bytes) and (
            self._in_flight_bytes + transfer.nbytes > self._in_flight_bytes_max
        )

    def _start(self, transfer: Transfer, left_s: float) -> None:
        transfer.run()
        self._running[transfer.ticket] = transfer
        self._in_flight_bytes += transfer.nbytes
        if transfer.notify is not None:
            self._notifying += 1
            self._follow()
        try:
            self._backends[transfer.backend].start(transfer.prepared, transfer.ticket, left_s)
        except Exception as error:  # another package's code, against its contract
            log.exception("kvtier: %s: cannot start", transfer.backend)
            failed = transfer.all_failed(errno.EIO)
            self._completions.push(transfer.ticket, failed, 0, True, repr(error))

    def _refuse(self, transfer: Transfer, code: int, detail: str) -> None:
        """End a transfer that no backend has."""
        self._finish(transfer, transfer.all_failed(code), 0, True, detail)
        self._completions.signal()

    def _follow(self) -> None:
        self._awaited = [held for held in self._awaited if held.uses]
        self._follow_ends(bool(self._waiting or self._awaited) or self._notifying > 0)

    def _end_running(
        self, transfer: Transfer, results: Results, started: int, is_quiet: bool, detail: str
    ) -> None:
        del self._running[transfer.ticket]
        self._in_flight_bytes -= transfer.nbytes
        if transfer.notify is not None:
            self._notifying -= 1
        self._finish(transfer, results, started, is_quiet, detail)
        self._router.learn(transfer.choice, transfer.seconds, ok=transfer.ok)

    def _finish(
        self, transfer: Transfer, results: Results, started: int, is_quiet: bool, detail: str
    ) -> None:
        if not is_quiet:
            self._unquiet[transfer.ticket] = transfer
        transfer.end(results, started, is_quiet, detail)
        self._ended.append(transfer)
        self._heed()
        if transfer.peer is not None and transfer.notify is not None:
            transfer.peer.say(Notify(transfer.notify, transfer.failure[:1000]))
        if is_quiet:
            self._released(transfer)

    def _end_overdue(self) -> None:
        """The last resort: a backend that has not kept its word is not waited for."""
        now_s = time.monotonic()
        with self._lock:
            overdue = [t for t in self._running.values() if now_s >= t.ends_s + _OVERDUE_S]
            for transfer in overdue:
                why = f"{transfer.backend} did not answer by the deadline"
                failed = transfer.all_failed(errno.ETIMEDOUT)
                self._end_running(transfer, failed, len(failed), False, why)
                self._completions.signal()
