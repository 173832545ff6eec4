"""Backends around a backend: slower, counted or checked; for experiments, tests and diagnosis.

Each owns the backend that it is given and closes it. They can stand one around the other, and
around `kvtier.testing.faults.FaultyBackend`, which is the fourth of the family. For transfer
backends the same things are in `kvtier.transfer_wrappers`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvtier._core import xxh3_128
from kvtier.backend import Backend, Capabilities, StoredChunk
from kvtier.clock import Clock, SystemClock
from kvtier.types import ChunkKey, Outcome, Status

Answers = TypeVar("Answers", list[Outcome], list[bool])


class Wrapper(Backend):
    """Passes every call on; subclasses look at those that they are about."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner

    @property
    def capabilities(self) -> Capabilities:
        """The inner backend's."""
        return self.inner.capabilities

    def put(self, keys: Sequence[ChunkKey], sources: Sequence[memoryview]) -> list[Outcome]:
        return self._around("put", keys, lambda: self.inner.put(keys, sources))

    def get(
        self, keys: Sequence[ChunkKey], targets: Sequence[memoryview], offset: int = 0
    ) -> list[Outcome]:
        return self._around("get", keys, lambda: self.inner.get(keys, targets, offset))

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return self._around("contains", keys, lambda: self.inner.contains(keys))

    def remove(self, keys: Sequence[ChunkKey]) -> list[Outcome]:
        return self._around("remove", keys, lambda: self.inner.remove(keys))

    def quarantine(self, keys: Sequence[ChunkKey]) -> list[Outcome]:
        return self._around("quarantine", keys, lambda: self.inner.quarantine(keys))

    def scan(self) -> Iterator[StoredChunk]:
        return self.inner.scan()

    def remember_use(self, keys: Sequence[ChunkKey]) -> None:
        self.inner.remember_use(keys)

    def free_bytes(self) -> int | None:
        return self.inner.free_bytes()

    def close(self) -> None:
        self.inner.close()

    def _around(
        self, operation: str, keys: Sequence[ChunkKey], call: Callable[[], Answers]
    ) -> Answers:
        return call()


class Pace:
    """How long bytes take that go one after the other over one line. Any thread."""

    def __init__(self, bytes_per_s: float, latency_s: float, clock: Clock) -> None:
        """The line carries `bytes_per_s`, shared by all, and each call waits `latency_s` besides.

        Raises:
            ValueError: a line that carries nothing, or a latency below 0.
        """
        if bytes_per_s <= 0 or latency_s < 0:
            raise ValueError(f"{bytes_per_s} bytes/s after {latency_s} s")
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s
        self._clock = clock
        self._lock = threading.Lock()
        self._free_s = clock.now_s()  # when what has been given to the line is through

    def through_s(self, nbytes: int) -> float:
        """The moment at which `nbytes` that are given to the line now are through."""
        with self._lock:
            self._free_s = max(self._free_s, self._clock.now_s()) + nbytes / self._bytes_per_s
            return self._free_s + self._latency_s


class Throttled(Wrapper):
    """As slow as told: a fast place stands in for a far one. Calls of all threads share the line."""

    def __init__(
        self,
        inner: Backend,
        bytes_per_s: float,
        latency_s: float = 0.0,
        clock: Clock | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Bytes of puts and gets take their time on the line; every call waits `latency_s`."""
        super().__init__(inner)
        self._clock = clock or SystemClock()
        self._sleep = sleep
        self._pace = Pace(bytes_per_s, latency_s, self._clock)

    def _around(
        self, operation: str, keys: Sequence[ChunkKey], call: Callable[[], Answers]
    ) -> Answers:
        answers = call()
        nbytes = sum(outcome.nbytes for outcome in _outcomes(answers))
        left_s = self._pace.through_s(nbytes) - self._clock.now_s()
        if left_s > 0:
            self._sleep(left_s)
        return answers


@dataclass(slots=True)
class Count:
    """What one operation has cost so far."""

    calls: int = 0
    keys: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    """Of all calls together, those of several threads side by side too."""
    errors: int = 0
    """Keys that were answered RETRY, FAILED or CORRUPT, and calls that raised."""


class Counted(Wrapper):
    """Counts calls, keys, bytes, seconds and errors of each operation."""

    def __init__(self, inner: Backend, clock: Clock | None = None) -> None:
        super().__init__(inner)
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._counts: dict[str, Count] = {}

    def counts(self) -> dict[str, Count]:
        """By name of the operation, those that were called; copies."""
        with self._lock:
            return {
                name: Count(each.calls, each.keys, each.nbytes, each.seconds, each.errors)
                for name, each in self._counts.items()
            }

    def _around(
        self, operation: str, keys: Sequence[ChunkKey], call: Callable[[], Answers]
    ) -> Answers:
        begin_s = self._clock.now_s()
        outcomes: list[Outcome] = []
        errors = 1  # unless it comes back
        try:
            answers = call()
            outcomes = _outcomes(answers)
            errors = sum(outcome.status not in _EXPECTED for outcome in outcomes)
        finally:
            with self._lock:
                count = self._counts.setdefault(operation, Count())
                count.calls += 1
                count.keys += len(keys)
                count.nbytes += sum(outcome.nbytes for outcome in outcomes)
                count.seconds += self._clock.now_s() - begin_s
                count.errors += errors
        return answers


_EXPECTED = (Status.OK, Status.MISSING)


def _outcomes(answers: Sequence[object]) -> list[Outcome]:
    """Those of a call that answers in outcomes; of one that says yes and no, none."""
    return [answer for answer in answers if isinstance(answer, Outcome)]


class Checksummed(Wrapper):
    """Remembers a digest of each record it stores and answers CORRUPT when another comes back.

    Manifests have checksums of their own; this one finds out which place spoils bytes, and where
    nobody reads manifests. It knows the records that were stored through it, in this process, and
    checks reads of whole records; of others it checks the length if it knows it.
    """

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self._known: dict[ChunkKey, tuple[int, bytes]] = {}  # bytes and XXH3-128 of those held

    def put(self, keys: Sequence[ChunkKey], sources: Sequence[memoryview]) -> list[Outcome]:
        outcomes = self.inner.put(keys, sources)
        for key, source, outcome in zip(keys, sources, outcomes, strict=True):
            if outcome.ok:
                with self._lock:  # the first to store a key has stored its bytes
                    is_known = key in self._known
                if not is_known:
                    digest = xxh3_128(source)
                    with self._lock:
                        self._known.setdefault(key, (source.nbytes, digest))
        return outcomes

    def get(
        self, keys: Sequence[ChunkKey], targets: Sequence[memoryview], offset: int = 0
    ) -> list[Outcome]:
        outcomes = self.inner.get(keys, targets, offset)
        with self._lock:
            known = [self._known.get(key) for key in keys]
        return [
            _checked(outcome, target, offset, right)
            for outcome, target, right in zip(outcomes, targets, known, strict=True)
        ]

    def remove(self, keys: Sequence[ChunkKey]) -> list[Outcome]:
        return self._forget(keys, self.inner.remove(keys))

    def quarantine(self, keys: Sequence[ChunkKey]) -> list[Outcome]:
        return self._forget(keys, self.inner.quarantine(keys))

    def _forget(self, keys: Sequence[ChunkKey], outcomes: list[Outcome]) -> list[Outcome]:
        with self._lock:
            for key, outcome in zip(keys, outcomes, strict=True):
                if outcome.status in _EXPECTED:
                    self._known.pop(key, None)
        return outcomes


def _checked(
    outcome: Outcome, target: memoryview, offset: int, right: tuple[int, bytes] | None
) -> Outcome:
    if right is None or not outcome.ok:
        return outcome
    nbytes, digest = right
    expected = max(0, min(target.nbytes, nbytes - offset))
    if outcome.nbytes != expected:
        return Outcome(Status.CORRUPT, detail=f"{outcome.nbytes} bytes instead of {expected}")
    if offset == 0 and expected == nbytes and xxh3_128(target.cast("B")[:nbytes]) != digest:
        return Outcome(Status.CORRUPT, detail="not the bytes that were stored")
    return outcome
