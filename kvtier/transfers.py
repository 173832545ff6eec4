"""A transfer: what moves where, prepared once, posted any number of times."""

from __future__ import annotations

import enum
import errno
import os
import time
from typing import Any, Protocol

import numpy as np

from kvtier.descriptors import per_descriptor
from kvtier.peers import Held, Peer
from kvtier.routing import Choice
from kvtier.transfer import Op, Results
from kvtier.types import Outcome, Status

_PASSING = {errno.ETIMEDOUT, errno.ECANCELED, errno.EAGAIN, errno.EBUSY, errno.EINTR}
_ABSENT = {errno.ENOENT, errno.ENODATA}


class State(enum.Enum):
    """Where a transfer is in its life."""

    READY = "ready"
    """Never posted."""
    WAITING = "waiting"
    """Posted; the peer is not connected yet, or too much is in flight."""
    RUNNING = "running"
    ENDED = "ended"
    """Its outcomes are known; it may be posted again once it is quiet."""


class Owner(Protocol):
    """What a transfer asks of its agent."""

    def post(self, transfer: Transfer, deadline_s: float, notify: bytes | None) -> None:
        """Begin it."""

    def cancel(self, transfer: Transfer) -> None:
        """Ask it to end."""

    def wait(self, transfer: Transfer, timeout_s: float) -> bool:
        """Sleep until it has ended."""

    def look(self) -> None:
        """See what has ended."""

    def moved_bytes(self, transfer: Transfer) -> int:
        """How far it is."""


class Transfer:
    """Made by `Agent.prepare`. Any thread; one posting at a time."""

    def __init__(
        self,
        owner: Owner,
        op: Op,
        choice: Choice,
        held: tuple[Held, ...],
        peer: Peer | None,
    ) -> None:
        self.op = op
        self.peer = peer
        self.choice = choice
        self.backend = choice.backend
        """Name of the backend that moves the bytes."""
        self.reason = choice.reason
        """Why that one, and why not the others."""
        self.nbytes = int(choice.cut.lengths.sum())
        self.prepared = choice.prepared
        self.held = tuple({id(each): each for each in held}.values())
        self.state = State.READY
        self.is_quiet = True
        """Whether nothing of the last posting touches memory any more."""
        self.seconds = 0.0
        """How long the last posting took, from when it could begin."""
        self.failure = ""
        """Why the last posting failed; empty if it did not."""
        self.ok = False
        """Whether all bytes of the last posting arrived."""
        self.ticket = 0
        self.ends_s = 0.0
        self.notify: bytes | None = None
        self._owner = owner
        self._posted_s = 0.0
        self._codes: Results | None = None
        self._touched: Results | None = None
        self._outcomes: tuple[Outcome, ...] | None = None

    def post(self, deadline_s: float, notify: bytes | None = None) -> None:
        """Begin to move; returns at once. It has ended `deadline_s` seconds from now, or sooner.

        `notify` reaches the peer when all bytes are in place, or tells it that they are not.
        Posting anew costs no set-up.

        Raises:
            ValueError: it runs, or what it did before is not quiet yet; the payload is too long.
            Closed: the agent is closed.
        """
        self._owner.post(self, deadline_s, notify)

    def done(self) -> bool:
        """Whether the last posting has ended, well or not."""
        if self.state is not State.ENDED:
            self._owner.look()
        return self.state is State.ENDED

    def wait(self, timeout_s: float | None = None) -> bool:
        """Sleep until it has ended, at most `timeout_s`; without one the deadline is the bound.

        Raises:
            ValueError: it was never posted.
        """
        if self.state is State.READY:
            raise ValueError("the transfer was never posted")
        return self._owner.wait(self, 1e9 if timeout_s is None else timeout_s)

    def cancel(self) -> None:
        """Ask it to end soon, what has not arrived as RETRY; `wait` sees the end."""
        self._owner.cancel(self)

    def outcomes(self) -> tuple[Outcome, ...]:
        """One per descriptor, in their order, of the last posting.

        Raises:
            ValueError: it has not ended.
        """
        if not self.done():
            raise ValueError("the transfer has not ended")
        if self._outcomes is None:
            self._outcomes = self._told()
        return self._outcomes

    def overwritten(self) -> list[int]:
        """Descriptors that failed and whose target may hold other bytes than before.

        Raises:
            ValueError: it has not ended.
        """
        if not self.done() or self._codes is None or self._touched is None:
            raise ValueError("the transfer has not ended")
        indices: list[int] = np.flatnonzero((self._codes != 0) & (self._touched != 0)).tolist()
        return indices

    def progress(self) -> int:
        """Bytes of the posting that have arrived, as far as the backend can tell."""
        if self.state is State.ENDED and self._codes is not None:
            return self.nbytes if self.ok else 0
        return self._owner.moved_bytes(self)

    # For the agent, under its lock ---------------------------------------------------------------

    def begin(self, ticket: int, ends_s: float, notify: bytes | None) -> None:
        """A new posting."""
        if self.state in (State.WAITING, State.RUNNING):
            raise ValueError("the transfer is running")
        if not self.is_quiet:
            raise ValueError("what the transfer did before may still touch memory")
        self.state = State.WAITING
        self.ticket, self.ends_s, self.notify = ticket, ends_s, notify
        self._posted_s = time.monotonic()
        self._codes = self._touched = self._outcomes = None
        for held in self.held:
            held.uses += 1

    def run(self) -> None:
        """It goes to the backend."""
        self.state = State.RUNNING
        self._posted_s = time.monotonic()

    def all_failed(self, code: int) -> Results:
        """Results of a posting of which nothing arrived."""
        return np.full(len(self.choice.cut.lengths), -code, np.int64)

    def end(self, results: Results, started: int, is_quiet: bool, detail: str) -> None:
        """The posting's results, from the backend or in its place."""
        self.seconds = time.monotonic() - self._posted_s
        self._codes, self._touched = per_descriptor(self.choice.cut, results, started)
        self.ok = not self._codes.any()
        self.failure = "" if self.ok else (detail or _words(int(self._codes.min())))
        self.is_quiet = is_quiet
        if is_quiet:
            self._release()
        self.state = State.ENDED

    def become_quiet(self) -> None:
        """Nothing touches its memory any more."""
        self.is_quiet = True
        self._release()

    def _release(self) -> None:
        for held in self.held:
            held.uses -= 1

    def _told(self) -> tuple[Outcome, ...]:
        codes, touched = self._codes, self._touched
        assert codes is not None, "it has ended"
        assert touched is not None, "it has ended"
        lengths = self.choice.descriptor_lengths.tolist()
        if self.ok:
            return tuple(Outcome(Status.OK, nbytes) for nbytes in lengths)
        return tuple(
            Outcome(Status.OK, nbytes)
            if code == 0
            else Outcome(_status(-code), detail=self._detail(code, bool(changed)))
            for code, changed, nbytes in zip(codes.tolist(), touched.tolist(), lengths, strict=True)
        )

    def _detail(self, code: int, changed: bool) -> str:
        target = "may be overwritten in part" if changed else "is untouched"
        reason = f" ({self.failure})" if self.failure else ""
        return f"{_words(code)}{reason}; the target {target}"


def _status(code: int) -> Status:
    if code in _PASSING:
        return Status.RETRY
    if code in _ABSENT:
        return Status.MISSING
    if code == errno.EBADMSG:
        return Status.CORRUPT
    return Status.FAILED


def _words(code: int) -> str:
    name: Any = errno.errorcode.get(-code, str(-code))
    return f"{name}: {os.strerror(-code)}"
