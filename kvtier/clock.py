"""Time as a value that tests can hold: everything that expires or waits takes a `Clock`."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds."""

    def now_s(self) -> float:
        """Seconds since some fixed moment, never going back."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        """Seconds since boot."""
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told; for tests and replays."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def now_s(self) -> float:
        """The time last set."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass."""
        self._now_s += seconds
