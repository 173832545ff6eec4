"""What happened to chunks, for routers and for tests: a bounded stream that the reader drains."""

from __future__ import annotations

import enum
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.types import ChunkKey


class EventKind(enum.Enum):
    """What happened."""

    STORED = "stored"
    """The tier now holds the chunks, whole and readable."""
    REMOVED = "removed"
    """The tier holds them no longer."""


@dataclass(frozen=True, slots=True)
class Event:
    """One change in one tier; a move is a STORED in one and a REMOVED in another."""

    kind: EventKind
    tier: str
    keys: tuple[ChunkKey, ...]
    reason: str = ""
    """Why chunks were removed: ``evicted``, ``damaged``, ``cleanup``, ``moved``,
    ``unreachable``, ``forgotten``."""


class EventLog:
    """The newest `events_max` events since the last `drain`. Any thread."""

    def __init__(self, events_max: int) -> None:
        self._lock = threading.Lock()
        self._events: deque[Event] = deque(maxlen=events_max)
        self._dropped = 0

    def emit(self, kind: EventKind, tier: str, keys: Sequence[ChunkKey], reason: str = "") -> None:
        """Append one event; the oldest makes room if there is none."""
        with self._lock:
            if len(self._events) == self._events.maxlen:
                self._dropped += 1
            self._events.append(Event(kind, tier, tuple(keys), reason))

    def drain(self) -> tuple[list[Event], int]:
        """Events since the last call, oldest first, and how many were lost before them."""
        with self._lock:
            events, dropped = list(self._events), self._dropped
            self._events.clear()
            self._dropped = 0
            return events, dropped
