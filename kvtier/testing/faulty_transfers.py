"""A transfer backend that fails on command: what the agent is tested against.

`FaultyTransfers` stands before any other transfer backend and spoils some transfers as told. All
chance comes from one seed, so a failing test that prints the seed can be repeated.
"""

from __future__ import annotations

import ctypes
import enum
import errno
import random
from collections import Counter
from dataclasses import dataclass

import numpy as np

from kvtier._core import Completions
from kvtier.clock import Clock
from kvtier.transfer import Op, TransferBackendFactory
from kvtier.transfer_wrappers import End, Flight, WrappedTransfers, addresses


class TransferFault(enum.Enum):
    """What happens to one transfer."""

    ERRNO = "errno"
    """One piece ends with -errno, whatever became of its bytes."""
    SHORT = "short"
    """One piece ends with fewer bytes than it has."""
    FLIPPED = "flipped"
    """OK, but one bit of one piece is wrong; of targets elsewhere EIO, all of it."""
    DELAY = "delay"
    """The end is told later, yet by the deadline."""
    HANG = "hang"
    """Nothing moves; it ends by its deadline or when cancelled, and is quiet only after `heal`."""
    LOST = "lost"
    """All arrives, but nobody is told before the deadline."""


@dataclass(slots=True)
class _Rule:
    fault: TransferFault
    rate: float
    left: int | None  # how often it still strikes; None: without end
    op: Op | None  # which direction; None: both
    code: int
    delay_s: float


class FaultyTransfers(WrappedTransfers):
    """Another transfer backend, spoiled on command; owns it and closes it. Any thread."""

    def __init__(
        self,
        completions: Completions,
        make: TransferBackendFactory,
        seed: int = 0,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(completions, make, clock)
        self.seed = seed
        self.faults: Counter[TransferFault] = Counter()
        """How many transfers each has struck."""
        self._chance = random.Random(seed)
        self._rules: list[_Rule] = []
        self._struck: dict[int, _Rule] = {}

    def break_on(
        self,
        fault: TransferFault,
        *,
        rate: float = 1.0,
        count: int | None = None,
        op: Op | None = None,
        code: int = errno.EIO,
        delay_s: float = 0.1,
    ) -> None:
        """From now on `fault` strikes each transfer with probability `rate`, `count` times.

        `code` is what ERRNO ends with, `delay_s` how long DELAY takes.
        """
        with self._changed:
            self._rules.append(_Rule(fault, rate, count, op, code, delay_s))

    def heal(self) -> None:
        """No faults any more; what hangs ends with -ECANCELED, and all that hung is quiet."""
        with self._changed:
            self._rules.clear()
            for flight in list(self._flights.values()):
                if flight.is_inner:
                    continue
                if not flight.is_told:
                    self._tell_failed(flight, errno.ECANCELED, "injected: hung")
                self._make_quiet(flight)

    def close(self) -> None:
        self.heal()
        super().close()

    def _launch(self, flight: Flight) -> bool:
        rule = self._draw(flight.moved.pieces.op)
        if rule is None:
            return True
        self.faults[rule.fault] += 1
        if rule.fault is TransferFault.HANG:
            return False
        self._struck[flight.ticket] = rule
        return True

    def _draw(self, op: Op) -> _Rule | None:
        for rule in self._rules:
            if rule.left == 0 or rule.op not in (None, op):
                continue
            if self._chance.random() < rule.rate:
                if rule.left is not None:
                    rule.left -= 1
                return rule
        return None

    def _end(self, flight: Flight, end: End) -> End:
        with self._changed:
            rule = self._struck.get(flight.ticket)
            arrived = np.flatnonzero(end.results > 0).tolist()
            piece = self._chance.choice(arrived) if arrived else None
            bit = self._chance.randrange(8)
        if rule is None or piece is None:
            return end
        results = end.results.copy()
        if rule.fault is TransferFault.ERRNO:
            results[piece] = -rule.code
            return End(results, end.started, f"injected: {errno.errorcode[rule.code]}")
        if rule.fault is TransferFault.SHORT:
            results[piece] //= 2
            return End(results, end.started, "injected: short")
        if rule.fault is TransferFault.FLIPPED:
            pieces = flight.moved.pieces
            target = pieces.local if pieces.op is Op.READ else pieces.remote
            if target.handles[target.which[piece]].address is None:
                raise ValueError("the target of a flipped bit is nowhere to be looked at")
            at = int(addresses(target)[piece])
            ctypes.c_uint8.from_address(at).value ^= 1 << bit
        return end

    def _due_s(self, flight: Flight, end: End) -> float:
        rule = self._struck.get(flight.ticket)
        if rule is not None and rule.fault is TransferFault.LOST:
            return float("inf")
        if rule is not None and rule.fault is TransferFault.DELAY:
            return flight.begin_s + rule.delay_s
        return 0.0

    def _told(self, flight: Flight, end: End) -> None:
        self._struck.pop(flight.ticket, None)
