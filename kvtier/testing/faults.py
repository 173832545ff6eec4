"""A backend that fails on command: what the agent and the hierarchy are tested against.

`FaultyBackend` stands before any other backend and passes calls on, spoiling some as told. All
chance comes from one seed, so a failing test that prints the seed can be repeated.
"""

from __future__ import annotations

import enum
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvtier.backend import Backend, Capabilities, StoredChunk, check_batch, check_get
from kvtier.types import ChunkKey, Outcome, Status


class Fault(enum.Enum):
    """What happens to a key of a call."""

    RETRY = "retry"
    """A passing fault is reported, nothing is done."""
    FAILED = "failed"
    """A lasting fault is reported, nothing is done."""
    NO_SPACE = "no space"
    """The place is full: FAILED with ENOSPC, nothing is done."""
    MISSING = "missing"
    """The key is said not to be held, nothing is done."""
    TORN = "torn"
    """OK, but the second half of the bytes is not what was stored."""
    FLIPPED = "flipped"
    """OK, but one bit is not what was stored."""
    RAISED = "raised"
    """The whole call raises OSError, which no backend should: the place is broken."""


_OUTCOMES = {
    Fault.RETRY: Outcome(Status.RETRY, detail="injected: busy"),
    Fault.FAILED: Outcome(Status.FAILED, detail="injected: EIO: Input/output error"),
    Fault.NO_SPACE: Outcome(Status.FAILED, detail="injected: ENOSPC: No space left on device"),
    Fault.MISSING: Outcome(Status.MISSING),
}
_WAIT_S_MAX = 60.0  # a gate that nobody opens ends by itself, and the test fails on its own words


class Gate:
    """Holds calls back until a test opens it: a delay without a clock."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self._opened = threading.Event()

    def wait_reached(self, timeout_s: float = _WAIT_S_MAX) -> bool:
        """Wait until a call stands at the gate; False when none came in time."""
        return self._reached.wait(timeout_s)

    def open(self) -> None:
        """Let through all that wait and all that come."""
        self._opened.set()

    def pass_through(self) -> None:
        """Wait at the gate, as a held call does."""
        self._reached.set()
        self._opened.wait(_WAIT_S_MAX)


@dataclass(slots=True)
class _Rule:
    fault: Fault
    rate: float
    left: int | None  # how often it still strikes; None: without end
    keys: frozenset[ChunkKey] | None  # whom; None: all


class FaultyBackend(Backend):
    """Another backend, spoiled on command; owns it and closes it.

    `operation` below is ``put``, ``get``, ``contains``, ``remove`` or ``quarantine``. Any thread.
    """

    def __init__(self, inner: Backend, seed: int = 0) -> None:
        self.inner = inner
        self.seed = seed
        self.calls: Counter[str] = Counter()
        """Calls per operation."""
        self.keys: Counter[str] = Counter()
        """Keys per operation."""
        self.faults: Counter[tuple[str, Fault]] = Counter()
        """How often each fault struck a key."""
        self._chance = random.Random(seed)
        self._lock = threading.Lock()
        self._rules: dict[str, list[_Rule]] = {}
        self._gates: dict[str, Gate] = {}

    def break_on(
        self,
        operation: str,
        fault: Fault,
        *,
        rate: float = 1.0,
        count: int | None = None,
        keys: Sequence[ChunkKey] | None = None,
    ) -> None:
        """From now on `fault` strikes each key (of `keys`) with probability `rate`, `count` times.

        TORN and FLIPPED are for put and get: a put then stores spoiled bytes, a get hands them out.
        """
        if fault in (Fault.TORN, Fault.FLIPPED) and operation not in ("put", "get"):
            raise ValueError(f"{operation} moves no bytes that could be {fault.value}")
        with self._lock:
            self._rules.setdefault(operation, []).append(
                _Rule(fault, rate, count, None if keys is None else frozenset(keys))
            )

    def hold(self, operation: str) -> Gate:
        """From now on calls of `operation` wait at the returned gate, for a minute at most."""
        with self._lock:
            gate = self._gates[operation] = Gate()
        return gate

    def heal(self) -> None:
        """No faults any more, and all gates open."""
        with self._lock:
            self._rules.clear()
            gates = list(self._gates.values())
            self._gates.clear()
        for gate in gates:
            gate.open()

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    def put(self, keys: Sequence[ChunkKey], sources: Sequence[memoryview]) -> list[Outcome]:
        check_batch(self.capabilities.batch_max, keys, sources)
        faults = self._enter("put", keys)
        spoiled = [
            memoryview(self._spoiled(bytes(source), fault))
            if fault in (Fault.TORN, Fault.FLIPPED)
            else source
            for source, fault in zip(sources, faults, strict=True)
        ]
        return self._answer(
            keys, faults, lambda some: self.inner.put(*_chosen(some, keys, spoiled))
        )

    def get(
        self, keys: Sequence[ChunkKey], targets: Sequence[memoryview], offset: int = 0
    ) -> list[Outcome]:
        check_get(self.capabilities.batch_max, keys, targets, offset)
        faults = self._enter("get", keys)
        outcomes = self._answer(
            keys, faults, lambda some: self.inner.get(*_chosen(some, keys, targets), offset)
        )
        for target, fault, outcome in zip(targets, faults, outcomes, strict=True):
            if fault in (Fault.TORN, Fault.FLIPPED) and outcome.nbytes > 0:
                whole = target.cast("B")[: outcome.nbytes]
                whole[:] = self._spoiled(bytes(whole), fault)
        return outcomes

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        faults = self._enter("contains", keys)
        held = self.inner.contains(keys)
        return [is_held and fault is None for is_held, fault in zip(held, faults, strict=True)]

    def remove(self, keys: Sequence[ChunkKey]) -> list[Outcome]:
        faults = self._enter("remove", keys)
        return self._answer(
            keys, faults, lambda some: self.inner.remove([keys[position] for position in some])
        )

    def quarantine(self, keys: Sequence[ChunkKey]) -> list[Outcome]:
        faults = self._enter("quarantine", keys)
        return self._answer(
            keys, faults, lambda some: self.inner.quarantine([keys[position] for position in some])
        )

    def scan(self) -> Iterator[StoredChunk]:
        return self.inner.scan()

    def remember_use(self, keys: Sequence[ChunkKey]) -> None:
        self.inner.remember_use(keys)

    def free_bytes(self) -> int | None:
        return self.inner.free_bytes()

    def close(self) -> None:
        self.heal()
        self.inner.close()

    def _enter(self, operation: str, keys: Sequence[ChunkKey]) -> list[Fault | None]:
        """Count the call, hold it at its gate, and draw each key's fault."""
        with self._lock:
            self.calls[operation] += 1
            self.keys[operation] += len(keys)
            gate = self._gates.get(operation)
        if gate is not None:
            gate.pass_through()
        with self._lock:
            faults = [self._draw(operation, key) for key in keys]
            self.faults.update((operation, fault) for fault in faults if fault is not None)
        if Fault.RAISED in faults:
            raise OSError(f"injected: {operation} broke")
        return faults

    def _draw(self, operation: str, key: ChunkKey) -> Fault | None:
        for rule in self._rules.get(operation, ()):
            if rule.left == 0 or (rule.keys is not None and key not in rule.keys):
                continue
            if self._chance.random() < rule.rate:
                if rule.left is not None:
                    rule.left -= 1
                return rule.fault
        return None

    def _answer(
        self,
        keys: Sequence[ChunkKey],
        faults: Sequence[Fault | None],
        pass_on: Callable[[Sequence[int]], list[Outcome]],
    ) -> list[Outcome]:
        """Injected outcomes where a fault prevents the call, and the true ones elsewhere."""
        outcomes = [_OUTCOMES.get(fault) if fault else None for fault in faults]
        through = [position for position, outcome in enumerate(outcomes) if outcome is None]
        true_outcomes = iter(pass_on(through))
        return [outcome or next(true_outcomes) for outcome in outcomes]

    def _spoiled(self, whole: bytes, fault: Fault | None) -> bytearray:
        spoiled = bytearray(whole)
        if fault is Fault.TORN:
            half = len(spoiled) // 2
            spoiled[half:] = bytes(byte ^ 0xFF for byte in spoiled[half:])
        elif spoiled:
            with self._lock:
                position = self._chance.randrange(8 * len(spoiled))
            spoiled[position // 8] ^= 1 << position % 8
        return spoiled


def _chosen(
    positions: Sequence[int], keys: Sequence[ChunkKey], buffers: Sequence[memoryview]
) -> tuple[Sequence[ChunkKey], Sequence[memoryview]]:
    """The keys and buffers at `positions`; all of them as they are where none is left out."""
    if len(positions) == len(keys):
        return keys, buffers
    return [keys[p] for p in positions], [buffers[p] for p in positions]
