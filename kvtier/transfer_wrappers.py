"""Transfer backends around a transfer backend: slower, counted or checked.

Each makes the inner one by its factory, hears its ends, and tells them on. To the agent it is the
inner one, under the same name, so that peers with and without a wrapper reach each other. They
can stand one around the other; `kvtier.testing.faulty_transfers` is the fourth of the family.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kvtier._core import Completions, CopyPool
from kvtier.clock import Clock, SystemClock
from kvtier.transfer import (
    Op,
    Pieces,
    Reach,
    Results,
    Side,
    TransferBackend,
    TransferBackendFactory,
    Unsuitable,
)
from kvtier.types import Region, RegionKind
from kvtier.wrappers import Pace

log = logging.getLogger("kvtier.transfer_wrappers")

_SLEEP_S_MAX = 3600.0  # a thread's sleep has a limit of its own
_CLOSE_S_MAX = 1.0  # that `close` waits for the thread


@dataclass(frozen=True, slots=True)
class End:
    """What a backend tells at the end of one transfer."""

    results: Results
    started: int
    detail: str


@dataclass(frozen=True, slots=True, eq=False)
class WrappedHandle:
    """The inner backend's handle, and where its bytes are if this process can look at them."""

    inner: Any
    address: int | None


@dataclass(frozen=True, slots=True, eq=False)
class WrappedPieces:
    """The inner backend's prepared transfer, and what it moves, with wrapped handles."""

    inner: Any
    pieces: Pieces

    @property
    def nbytes(self) -> int:
        """Of all pieces."""
        return int(self.pieces.lengths.sum())


@dataclass(slots=True, eq=False)
class Flight:
    """A transfer between its start and the moment when its memory is quiet."""

    ticket: int
    moved: WrappedPieces
    begin_s: float
    ends_s: float
    is_inner: bool = True
    """The inner backend has it, and will tell its end."""
    held: End | None = None
    """Its end, which is not told before `due_s`."""
    due_s: float = 0.0
    is_cancelled: bool = False
    """Somebody asked; the inner backend may have ended it at that moment."""
    is_told: bool = False
    is_quiet: bool = False


class WrappedTransfers(TransferBackend):
    """Passes everything on; subclasses change what they are about, by the three methods below.

    A thread of its own hears the inner backend's ends, in order, and keeps the deadlines of those
    that it holds back. It begins with the first transfer.
    """

    def __init__(
        self, completions: Completions, make: TransferBackendFactory, clock: Clock | None = None
    ) -> None:
        """Make the inner backend; its Unsuitable passes."""
        self._completions = completions
        self._clock = clock or SystemClock()
        self._heard = Completions()
        self._changed = threading.Lock()  # guards what follows; never held in a call of `inner`
        self._flights: dict[int, Flight] = {}
        self._closed = False
        self._thread: threading.Thread | None = None
        self.inner = make(self._heard)
        self.name = self.inner.name  # type: ignore[misc]  # stands in for a class's own

    # What a subclass changes -----------------------------------------------------------------------

    def _launch(self, flight: Flight) -> bool:
        """Whether the inner backend is to move it; else it hangs. Under the lock."""
        return True

    def _end(self, flight: Flight, end: End) -> End:
        """What to tell instead of `end`. Not under the lock: may take its time."""
        return end

    def _due_s(self, flight: Flight, end: End) -> float:
        """When to tell it, by the clock. Under the lock."""
        return 0.0

    def _told(self, flight: Flight, end: End) -> None:
        """It has just been told. Under the lock."""

    # The contract ----------------------------------------------------------------------------------

    @property
    def reach(self) -> Reach:
        return self.inner.reach

    def register(self, region: Region, source: Any) -> WrappedHandle:
        handle = self.inner.register(region, source)
        return WrappedHandle(handle, region.address if region.kind is RegionKind.DRAM else None)

    def deregister(self, handle: WrappedHandle) -> None:
        self.inner.deregister(handle.inner)

    def length(self, source: Any) -> int:
        return self.inner.length(source)

    def address(self) -> bytes:
        return self.inner.address()

    def export(self, handle: WrappedHandle) -> bytes:
        return self.inner.export(handle.inner)

    def connect(self, address: bytes, host_pid: int | None) -> Any:
        return self.inner.connect(address, host_pid)

    def import_region(self, link: Any, region: Region, exported: bytes) -> WrappedHandle:
        handle = self.inner.import_region(link, region, exported)
        try:
            seen = np.frombuffer(self.inner.view(handle), np.uint8)
        except Unsuitable:
            return WrappedHandle(handle, None)
        return WrappedHandle(handle, int(seen.ctypes.data))

    def view(self, handle: WrappedHandle) -> memoryview:
        return self.inner.view(handle.inner)

    def disconnect(self, link: Any) -> None:
        self.inner.disconnect(link)

    def prepare(self, pieces: Pieces, link: Any) -> WrappedPieces:
        inner = replace(pieces, local=_unwrapped(pieces.local), remote=_unwrapped(pieces.remote))
        return WrappedPieces(self.inner.prepare(inner, link), pieces)

    def start(self, prepared: WrappedPieces, ticket: int, deadline_s: float) -> None:
        now_s = self._clock.now_s()
        flight = Flight(ticket, prepared, now_s, now_s + deadline_s)
        with self._changed:
            if self._closed:
                self._tell_failed(flight, errno.ECANCELED, "closed", is_quiet=True)
                return
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._hear, name=f"kvtier-{self.name}-wrapper", daemon=True
                )
                self._thread.start()
            self._flights[ticket] = flight
            flight.is_inner = self._launch(flight)
        if flight.is_inner:
            self.inner.start(prepared.inner, ticket, deadline_s)
        else:
            self.wake()

    def cancel(self, ticket: int) -> None:
        with self._changed:
            flight = self._flights.get(ticket)
            if flight is None or flight.is_told:
                return
            if flight.held is not None or not flight.is_inner:
                self._tell_failed(flight, errno.ECANCELED, "cancelled")
                return
            flight.is_cancelled = True
        self.inner.cancel(ticket)

    def progress(self, ticket: int) -> int:
        return self.inner.progress(ticket)

    def close(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
            for flight in list(self._flights.values()):
                if not flight.is_told and (flight.held is not None or not flight.is_inner):
                    self._tell_failed(flight, errno.ECANCELED, "closed")
        self.inner.close()
        self.wake()
        if self._thread is not None:  # it stays for transfers that are not quiet yet
            self._thread.join(_CLOSE_S_MAX)

    def wake(self) -> None:
        """Look at the clock: for whoever moves one by hand."""
        self._heard.signal()

    # The thread ------------------------------------------------------------------------------------

    def _hear(self) -> None:
        while True:
            seen = self._heard.generation
            ended, quiet = self._heard.drain()
            for ticket, results, started, is_quiet, detail in ended:
                self._hear_end(ticket, End(results, started, detail), is_quiet)
            with self._changed:
                for ticket in quiet:
                    self._make_quiet(self._flights[ticket])
                wait_s = self._tell_due()
                if self._closed and not self._flights:
                    return
            self._heard.wait(seen, wait_s)

    def _hear_end(self, ticket: int, end: End, is_quiet: bool) -> None:
        with self._changed:
            flight = self._flights[ticket]
        try:
            end = self._end(flight, end)
        except Exception as error:  # outermost frame of the thread for what a subclass does
            log.exception("kvtier: %s: looking at a transfer failed", self.name)
            end = End(np.full(len(end.results), -errno.EIO, np.int64), end.started, repr(error))
        with self._changed:
            flight.is_quiet = is_quiet
            flight.due_s = self._due_s(flight, end)
            flight.held = end

    def _tell_due(self) -> float:
        """Tell what is due and end what is overdue; seconds until the next of either."""
        now_s = self._clock.now_s()
        next_s = now_s + _SLEEP_S_MAX
        for flight in list(self._flights.values()):
            if flight.is_told:
                continue
            if flight.held is not None and (flight.due_s <= now_s or self._closed):
                self._tell(flight, flight.held)
            elif flight.held is not None and flight.is_cancelled:
                self._tell_failed(flight, errno.ECANCELED, "cancelled")
            elif flight.held is None and flight.is_inner:
                continue  # the inner backend keeps its deadline
            elif flight.ends_s <= now_s:
                self._tell_failed(flight, errno.ETIMEDOUT, "deadline passed")
            else:
                due_s = flight.due_s if flight.held is not None else flight.ends_s
                next_s = min(next_s, due_s, flight.ends_s)
        return max(0.0, next_s - now_s)

    def _make_quiet(self, flight: Flight) -> None:
        """Nothing touches its memory any more. Under the lock."""
        flight.is_quiet = True
        if flight.is_told:
            del self._flights[flight.ticket]
            self._completions.push_quiet(flight.ticket)

    def _tell(self, flight: Flight, end: End) -> None:
        flight.is_told = True
        if flight.is_quiet:
            self._flights.pop(flight.ticket, None)
        self._told(flight, end)
        self._completions.push(flight.ticket, end.results, end.started, flight.is_quiet, end.detail)

    def _tell_failed(
        self, flight: Flight, code: int, detail: str, is_quiet: bool | None = None
    ) -> None:
        if is_quiet is not None:
            flight.is_quiet = is_quiet
        count = len(flight.moved.pieces.lengths)
        begun = 0 if is_quiet else count
        self._tell(flight, End(np.full(count, -code, np.int64), begun, detail))


class ThrottledTransfers(WrappedTransfers):
    """As slow as told: ends are told when a line of `bytes_per_s` would have carried the bytes.

    The bytes themselves arrive as fast as ever, so nobody must look at a target before the end.
    """

    def __init__(
        self,
        completions: Completions,
        make: TransferBackendFactory,
        bytes_per_s: float,
        latency_s: float = 0.0,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(completions, make, clock)
        self._pace = Pace(bytes_per_s, latency_s, self._clock)
        self._through_s: dict[int, float] = {}

    def _launch(self, flight: Flight) -> bool:
        self._through_s[flight.ticket] = self._pace.through_s(flight.moved.nbytes)
        return True

    def _due_s(self, flight: Flight, end: End) -> float:
        return self._through_s[flight.ticket] if (end.results > 0).any() else 0.0

    def _told(self, flight: Flight, end: End) -> None:
        self._through_s.pop(flight.ticket, None)


@dataclass(slots=True)
class TransferCount:
    """What transfers of one direction have come to so far."""

    started: int = 0
    ended: int = 0
    pieces: int = 0
    """Of those that have ended."""
    nbytes: int = 0
    """That arrived."""
    seconds: float = 0.0
    """From each start to its end, those side by side too."""
    errors: Counter[str] = field(default_factory=Counter)
    """Failed pieces by the name of their errno."""


class CountedTransfers(WrappedTransfers):
    """Counts starts, pieces, bytes, seconds and errors of each direction."""

    def __init__(
        self, completions: Completions, make: TransferBackendFactory, clock: Clock | None = None
    ) -> None:
        super().__init__(completions, make, clock)
        self._counts = {op: TransferCount() for op in Op}

    def counts(self) -> dict[Op, TransferCount]:
        """By direction; copies."""
        with self._changed:
            return {
                op: replace(count, errors=Counter(count.errors))
                for op, count in self._counts.items()
            }

    def _launch(self, flight: Flight) -> bool:
        self._counts[flight.moved.pieces.op].started += 1
        return True

    def _told(self, flight: Flight, end: End) -> None:
        count = self._counts[flight.moved.pieces.op]
        count.ended += 1
        count.pieces += len(end.results)
        count.nbytes += int(end.results[end.results > 0].sum())
        count.seconds += self._clock.now_s() - flight.begin_s
        codes, times = np.unique(end.results[end.results < 0], return_counts=True)
        for code, number in zip(codes.tolist(), times.tolist(), strict=True):
            count.errors[errno.errorcode.get(-code, str(code))] += number


class ChecksummedTransfers(WrappedTransfers):
    """Compares digests of both sides after an OK; a piece that differs ends with -EBADMSG.

    For routes of which this process can look at both sides: memory, its own or mapped. The source
    must not change before the end, which comes later by the time that reading both sides takes,
    possibly after the deadline.
    """

    def __init__(self, completions: Completions, make: TransferBackendFactory) -> None:
        super().__init__(completions, make)
        self._pool = CopyPool(1)

    def prepare(self, pieces: Pieces, link: Any) -> WrappedPieces:
        for side in (pieces.local, pieces.remote):
            if any(handle.address is None for handle in side.handles):
                raise Unsuitable(f"{self.name}: checksummed, and cannot look at one side's bytes")
        return super().prepare(pieces, link)

    def _end(self, flight: Flight, end: End) -> End:
        pieces = flight.moved.pieces
        moved = np.flatnonzero(end.results == pieces.lengths.astype(np.int64))
        if not moved.size:
            return end
        lengths = np.ascontiguousarray(pieces.lengths[moved])
        digests = [
            np.frombuffer(self._pool.checksum(addresses(side)[moved], lengths), "V16")
            for side in (pieces.local, pieces.remote)
        ]
        wrong = moved[digests[0] != digests[1]]
        if not wrong.size:
            return end
        results = end.results.copy()
        results[wrong] = -errno.EBADMSG
        return End(results, end.started, f"{wrong.size} pieces differ from their source")


def addresses(side: Side) -> Any:
    """Where each piece of a side begins, as uint64; all its handles have an address."""
    starts = np.array([handle.address for handle in side.handles], np.uint64)
    return np.ascontiguousarray(starts[side.which] + side.offsets, np.uint64)


def _unwrapped(side: Side) -> Side:
    return replace(side, handles=tuple(handle.inner for handle in side.handles))
