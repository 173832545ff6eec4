"""The one statement of what a transfer backend is: what moves pieces between two regions.

Dependencies point here: `kvtier.agent` calls `TransferBackend`, implementations under
`kvtier.backends` subclass it (or `BlockingTransfers`, which brings threads and deadlines to a
blocking function), and `kvtier.testing.transfer_suite` checks them.
"""

from __future__ import annotations

import abc
import enum
import errno
import heapq
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from kvtier._core import Completions
from kvtier.types import Region, RegionKind

log = logging.getLogger("kvtier.transfer")

Results = npt.NDArray[np.int64]
"""Per piece: bytes moved, or -errno."""

_SLEEP_S_MAX = 3600.0  # a thread's sleep has a limit of its own, which "no deadline" would exceed
_ENDED_MAX = 256  # jobs that are over and wait in the list of deadlines for it to be cleared
QUEUE_MAX = 1024  # transfers waiting for a thread of one backend; beyond it they end with EAGAIN


class Op(enum.Enum):
    """Which way bytes go; the caller's side is always `local`."""

    READ = "read"
    """From remote to local."""
    WRITE = "write"
    """From local to remote."""


@dataclass(frozen=True, slots=True)
class Route:
    """Two kinds of memory that bytes can go between, either way."""

    local: RegionKind
    remote: RegionKind
    peer: bool = False
    """The remote region is another agent's; else it is one of this agent's own."""

    def __str__(self) -> str:
        return f"{self.local.value}-{'peer ' if self.peer else ''}{self.remote.value}"


@dataclass(frozen=True, slots=True)
class Reach:
    """What an implementation can do; constant over its life."""

    routes: frozenset[Route]
    alignment: int = 1
    """Offsets and lengths of both sides are multiples of it in every transfer the agent gives."""
    piece_bytes_max: int = 1 << 40
    """The agent cuts longer pieces."""
    durable: bool = False
    """An OK write is on stable storage."""
    latency_s: float = 1e-4
    """Expected time of a transfer of nothing, until the agent has measured it."""
    bytes_per_s: float = 1e9
    """Expected speed, until the agent has measured it."""


@dataclass(frozen=True, slots=True)
class Side:
    """One end of each piece: `offsets[i]` in the region that `handles[which[i]]` stands for."""

    handles: tuple[Any, ...]
    """What `register` or `import_region` gave for each region."""
    which: npt.NDArray[np.uint32]
    offsets: npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Pieces:
    """What one transfer moves: within the regions, merged and cut, none of them empty."""

    op: Op
    local: Side
    remote: Side
    lengths: npt.NDArray[np.uint64]


class Unsuitable(Exception):
    """A backend says that it cannot serve this region or peer, and why; others may."""


class TransferBackend(abc.ABC):
    """Moves pieces between regions of the kinds it knows.

    The agent calls from any thread, registers before it prepares, and deregisters only what no
    unfinished or unquiet transfer uses. Nothing here waits for bytes or for a peer, except `close`.
    """

    name: ClassVar[str]
    """As metrics, reasons and metadata call it."""

    @property
    @abc.abstractmethod
    def reach(self) -> Reach:
        """Constant description of this instance."""

    @abc.abstractmethod
    def register(self, region: Region, source: Any) -> Any:
        """Make the region usable; gives the handle that stands for it in `Side`.

        `source` is what the caller registered: a buffer, a path, a URL. It outlives the handle.

        Raises:
            Unsuitable: this backend cannot serve it; the reason is shown to the user.
        """

    @abc.abstractmethod
    def deregister(self, handle: Any) -> None:
        """Release what `register` or `import_region` took; a peer's maybe after its link."""

    def length(self, source: Any) -> int:
        """Bytes of the place that `source` names, such as an object; 0 if that is not for it to say.

        Raises Unsuitable where the place is of its kind and cannot be looked at.
        """
        return 0

    # Peers; a backend without peer routes leaves these alone -------------------------------------

    def address(self) -> bytes:
        """How agents elsewhere reach this one; travels in the metadata."""
        return b""

    def export(self, handle: Any) -> bytes:
        """What a peer needs to reach the region; empty if it cannot."""
        return b""

    def connect(self, address: bytes, host_pid: int | None) -> Any:
        """A link to the agent whose backend gave `address`; any number of times.

        `host_pid` is its process id if it runs on this host in this pid namespace and may be
        reached as such, else None. Bytes are foreign: malformed ones raise Unsuitable.
        """
        raise Unsuitable(f"{self.name} reaches no peers")

    def import_region(self, link: Any, region: Region, exported: bytes) -> Any:
        """A handle of a peer's region; malformed bytes raise Unsuitable."""
        raise Unsuitable(f"{self.name} reaches no peers")

    def view(self, handle: Any) -> memoryview:
        """A peer's region itself, without a copy, where it lies in memory that both have mapped.

        Raises Unsuitable where it does not.
        """
        raise Unsuitable(f"{self.name} shares no memory with peers")

    def disconnect(self, link: Any) -> None:  # noqa: B027 - optional hook
        """Fail what is in flight on the link with ECONNRESET and drop it."""

    # Transfers -----------------------------------------------------------------------------------

    @abc.abstractmethod
    def prepare(self, pieces: Pieces, link: Any) -> Any:
        """All the work that need not be repeated when a transfer is posted again.

        `link` is the peer's, None where the remote side is local. Raises Unsuitable.
        """

    @abc.abstractmethod
    def start(self, prepared: Any, ticket: int, deadline_s: float) -> None:
        """Begin to move; returns at once.

        By `deadline_s` (from now) one completion of `ticket` is in the agent's `Completions`,
        whatever happens: bytes or -errno per piece (-ETIMEDOUT, -ECANCELED, -ECONNRESET ...), never
        OK for bytes that did not arrive. If memory may be touched after that, it says so
        (`is_quiet=False`) and tells when it no longer is. An OK write to a peer is in the peer's
        memory, not only on its way. `prepared` may be in flight only once.
        """

    @abc.abstractmethod
    def cancel(self, ticket: int) -> None:
        """End the transfer soon with -ECANCELED for what has not arrived; unknown ones are over."""

    def progress(self, ticket: int) -> int:
        """Bytes of the running transfer that have arrived so far; 0 if it cannot tell."""
        return 0

    @abc.abstractmethod
    def close(self) -> None:
        """End all that is in flight, wait a bounded time, release threads; again, do nothing."""


class Stop:
    """Tells a blocking move that nobody waits for it any more, and how long somebody will."""

    def __init__(self, ends_s: float) -> None:
        self._ends_s = ends_s
        self._asked = False
        self._hooks: list[Callable[[], object]] = []
        self.moved_bytes: Callable[[], int] | None = None
        """Set by a move that fills its results only at its end: how far it is."""

    def set(self) -> None:
        """Ask it to end; pieces not begun yet are not begun."""
        self._asked = True
        for hook in self._hooks:
            hook()

    def on_set(self, hook: Callable[[], object]) -> None:
        """Have `hook` called when it is asked to end, at once if it was; perhaps twice."""
        self._hooks.append(hook)
        if self._asked:  # it may not have seen the hook
            hook()

    def is_set(self) -> bool:
        """Whether it was asked to end, or the deadline is over."""
        return self._asked or self.left_s() <= 0

    def left_s(self) -> float:
        """Seconds until the deadline; less than 0 after it."""
        return self._ends_s - time.monotonic()

    def wait(self, timeout_s: float) -> bool:
        """Sleep, no longer than to the deadline; True as soon as it should end."""
        event = threading.Event()
        self.on_set(event.set)
        event.wait(max(0.0, min(timeout_s, self.left_s())))
        self._hooks.remove(event.set)
        return self.is_set()


@dataclass(slots=True, eq=False)
class _Job:
    prepared: Any
    count: int
    ticket: int
    stop: Stop
    ends_s: float
    running: bool = False
    told: bool = False  # its completion is pushed
    results: Results | None = None

    def __lt__(self, other: _Job) -> bool:
        return self.ends_s < other.ends_s


class BlockingTransfers(TransferBackend):
    """A transfer backend made of a function that blocks: brings threads, deadlines and cancel.

    `move` runs on `threads` threads of the backend's own, daemons, so that a call that hangs in the
    kernel or in a server holds up neither the caller nor the end of the process. One more thread
    ends what is overdue.
    """

    threads: ClassVar[int] = 4

    def __init__(self, completions: Completions) -> None:
        self._completions = completions
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._jobs: dict[int, _Job] = {}
        self._overdue: list[_Job] = []
        self._closed = False
        self._threads: list[threading.Thread] = []  # none before the first transfer

    @abc.abstractmethod
    def move(self, prepared: Any, results: Results, stop: Stop) -> str:
        """Move all pieces; fill `results` as they end; gives the reason of a failure, or "".

        `results` starts as -ECANCELED everywhere, which is what a piece that was not begun keeps.
        Must look at `stop` between pieces. Anything raised fails the pieces still unanswered.
        """

    @abc.abstractmethod
    def piece_count(self, prepared: Any) -> int:
        """How many pieces `prepared` has."""

    def start(self, prepared: Any, ticket: int, deadline_s: float) -> None:  # noqa: D102
        ends_s = time.monotonic() + deadline_s
        job = _Job(prepared, self.piece_count(prepared), ticket, Stop(ends_s), ends_s)
        with self._changed:
            # Those given up lie in the queue too, until one of the threads is free to pass over them.
            if self._closed or max(len(self._jobs), self._queue.qsize()) >= QUEUE_MAX:
                code, why = (
                    (errno.ECANCELED, "closed")
                    if self._closed
                    else (errno.EAGAIN, f"{QUEUE_MAX} transfers are waiting")
                )
                self._tell(job, np.full(job.count, -code, np.int64), 0, True, why)
                return
            if not self._threads:
                self._begin()
            self._jobs[ticket] = job
            if len(self._overdue) > len(self._jobs) + _ENDED_MAX:
                self._overdue = [each for each in self._overdue if not each.told]
                heapq.heapify(self._overdue)
            heapq.heappush(self._overdue, job)
            if self._overdue[0] is job:
                self._changed.notify()
        self._queue.put(job)

    def cancel(self, ticket: int) -> None:  # noqa: D102
        with self._changed:
            if (job := self._jobs.get(ticket)) is not None:
                self._give_up(job, errno.ECANCELED, "cancelled")

    def fail(self, is_meant: Callable[[Any], bool], code: int, detail: str) -> None:
        """End every transfer in flight whose `prepared` is meant with -`code`, as `cancel` does."""
        with self._changed:
            for job in list(self._jobs.values()):
                if not job.told and is_meant(job.prepared):
                    self._give_up(job, code, detail)

    def close(self) -> None:  # noqa: D102
        with self._changed:
            if self._closed:
                return
            self._closed = True
            for job in list(self._jobs.values()):
                self._give_up(job, errno.ECANCELED, "closed")
            self._changed.notify()
        for _ in self._threads:
            self._queue.put(None)
        ends_s = time.monotonic() + 1.0
        for thread in self._threads:  # one stuck below is left behind
            thread.join(max(0.0, ends_s - time.monotonic()))

    def progress(self, ticket: int) -> int:  # noqa: D102
        with self._changed:
            job = self._jobs.get(ticket)
        if job is None or job.results is None:
            return 0
        if (moved_bytes := job.stop.moved_bytes) is not None:
            return moved_bytes()
        results = job.results
        return int(results[results > 0].sum())

    def is_stuck(self) -> bool:
        """Whether, after `close`, a thread is still at a move and what it uses must stay."""
        return any(thread.is_alive() for thread in self._threads)

    def _begin(self) -> None:
        self._threads = [
            threading.Thread(target=self._watch, name=f"kvtier-{self.name}-deadlines", daemon=True),
            *(
                threading.Thread(target=self._work, name=f"kvtier-{self.name}-{i}", daemon=True)
                for i in range(self.threads)
            ),
        ]
        for thread in self._threads:
            thread.start()

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            self._run(job)
            del job  # or it would stay until the next one comes

    def _run(self, job: _Job) -> None:
        with self._changed:
            if job.told:  # given up while it waited
                return
            if job.stop.is_set():  # overdue, which the other thread has not seen yet
                self._give_up(job, errno.ETIMEDOUT, "deadline passed")
                return
            job.running = True
        results = job.results = np.full(job.count, -errno.ECANCELED, np.int64)
        try:
            detail = self.move(job.prepared, results, job.stop)
        except Exception as error:  # outermost frame of the thread
            log.exception("kvtier: %s: transfer failed", self.name)
            code = error.errno if isinstance(error, OSError) and error.errno else errno.EIO
            results[results == -errno.ECANCELED] = -code
            detail = repr(error)
        with self._changed:
            del self._jobs[job.ticket]
            job.prepared = None  # the list of deadlines may know the job for long
            if job.told:
                self._completions.push_quiet(job.ticket)
                return
            if job.stop.left_s() <= 0:  # nobody cancelled it, so that is what stopped it
                results[results == -errno.ECANCELED] = -errno.ETIMEDOUT
            self._tell(job, results, job.count, True, detail)

    def _watch(self) -> None:
        with self._changed:
            while not self._closed:
                if not self._overdue:
                    self._changed.wait()
                    continue
                job = self._overdue[0]
                left_s = job.ends_s - time.monotonic()
                if job.told:
                    heapq.heappop(self._overdue)
                elif left_s > 0:
                    self._changed.wait(min(left_s, _SLEEP_S_MAX))
                else:
                    heapq.heappop(self._overdue)
                    self._give_up(job, errno.ETIMEDOUT, "deadline passed")

    def _give_up(self, job: _Job, code: int, detail: str) -> None:
        """Say that it ended; if a thread is at it, its memory is quiet only later. Under the lock."""
        job.stop.set()
        if job.told:
            return
        if not job.running:
            self._jobs.pop(job.ticket, None)
            job.prepared = None
        results = np.full(job.count, -code, np.int64)
        self._tell(job, results, job.count if job.running else 0, not job.running, detail)

    def _tell(self, job: _Job, results: Results, started: int, quiet: bool, detail: str) -> None:
        job.told = True
        self._completions.push(job.ticket, results, started, quiet, detail)


TransferBackendFactory = Callable[[Completions], TransferBackend]
"""What an entry point of the group ``kvtier.transfers`` names; raises Unsuitable, with the reason,
on a machine where it cannot work."""
