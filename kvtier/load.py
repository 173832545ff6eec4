"""A load under way, as its caller sees it: what is there, layer by layer, and how it ended.

It ends by its deadline whatever a disk does; only what writes the engine's pages is waited for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from kvtier.clock import Clock
from kvtier.device import DeviceMove
from kvtier.planner import LoadPlan
from kvtier.types import Outcome, Status

CANCELLED = Outcome(Status.RETRY, detail="cancelled")
DEADLINE = Outcome(Status.RETRY, detail="deadline passed")


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What a load brought."""

    tokens: int
    """Tokens whose pages are right, counted from the first planned chunk on without a gap."""
    outcomes: tuple[Outcome, ...]
    """One per planned chunk."""
    failed_pages: tuple[int, ...]
    """The caller's pages whose content must be recomputed: of the first failed chunk and after."""
    nbytes: int
    seconds: float


@dataclass(slots=True, eq=False)
class Load:
    """A load under way; made by `KVTier.load`. Any thread may wait, poll or cancel."""

    plan: LoadPlan
    clock: Clock
    deadline_s: float
    stream: int = 0
    """Of pages on a device: where the engine computed when the load was made."""
    move: DeviceMove | None = None
    """What the device was told to copy, all of the plan in waves."""
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _outcomes: list[Outcome | None] = field(default_factory=list)
    _waves_done: int = 0
    _writing: bool = False
    _result: LoadResult | None = None
    _started_s: float = 0.0

    def __post_init__(self) -> None:
        self._outcomes = [None] * len(self.plan.chunks)
        self._started_s = self.clock.now_s()

    # For callers --------------------------------------------------------------------------------

    def wait_layer(self, layer: int, timeout_s: float | None = None) -> bool:
        """Wait until `layer` of every planned chunk is in place; False if it never will be.

        Of a hit in memory that goes to a device only the engine's stream waits: call it on the
        engine's thread, and True means that what is put on the stream from now on sees the layer.
        A load past its deadline is cancelled here: the answer comes by then.
        """
        wave = self.plan.space.wave_of_layer[layer]
        if self.move is not None:
            try:
                self.move.order_after(self.plan.space.stream(), wave)
            except OSError:  # the device failed, as the lane finds out too
                return False
            return True
        with self._changed:
            self._changed.wait_for(
                lambda: self._waves_done > wave or self._result is not None, self._left(timeout_s)
            )
            if self._waves_done > wave:
                return True
        self.done()
        return False

    def wait(self, timeout_s: float | None = None) -> LoadResult | None:
        """The result, or None if it is not there after `timeout_s` (default: the deadline)."""
        with self._changed:
            self._changed.wait_for(lambda: self._result is not None, self._left(timeout_s))
        return self.result()

    def done(self) -> bool:
        """Whether the load has ended; one past its deadline ends here."""
        if self._result is None and self.clock.now_s() >= self.deadline_s:
            self._end(DEADLINE)
        return self._result is not None

    def result(self) -> LoadResult | None:
        """The result if the load has ended."""
        self.done()
        return self._result

    @property
    def is_ordered(self) -> bool:
        """Whether the device itself keeps the order: a layer waited for needs no result to be right."""
        return self.move is not None

    def cancel(self) -> LoadResult:
        """End it now: when this returns, no page is touched any more."""
        self._end(CANCELLED)
        assert self._result is not None, "_end leaves a result"
        return self._result

    # For the loader ------------------------------------------------------------------------------

    def settle(self, position: int, outcome: Outcome) -> None:
        """Chunk `position` of the plan ended with `outcome`; the first word counts."""
        with self._changed:
            if self._outcomes[position] is None:
                self._outcomes[position] = outcome

    def write(self, work: Callable[[], object]) -> bool:
        """Run `work`, which writes engine pages, unless the load has ended; False if it has."""
        with self._changed:
            if self._result is not None or self.clock.now_s() >= self.deadline_s:
                return False
            self._writing = True
        try:
            work()
        finally:
            with self._changed:
                self._writing = False
                self._changed.notify_all()
        return True

    def begin_move(self, move: DeviceMove) -> None:
        """A device writes the pages until `end_move`."""
        with self._changed:
            self.move, self._writing = move, True

    def end_move(self) -> None:
        """The device has written all that it will."""
        with self._changed:
            self._writing = False
            self._changed.notify_all()

    def wave_done(self, wave: int) -> None:
        """All chunks have waves up to and including `wave` in place."""
        with self._changed:
            self._waves_done = max(self._waves_done, wave + 1)
            self._changed.notify_all()

    def finish(self) -> None:
        """All outcomes are settled, or the rest never will be."""
        self._end(DEADLINE)

    def all_ok(self) -> bool:
        """Whether every planned chunk is settled and right."""
        with self._changed:
            return all(outcome is not None and outcome.ok for outcome in self._outcomes)

    def _left(self, timeout_s: float | None) -> float:
        left = max(0.0, self.deadline_s - self.clock.now_s())
        return left if timeout_s is None else min(left, timeout_s)

    def _end(self, rest: Outcome) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._writing)  # copies: milliseconds
            if self._result is not None:
                return
            outcomes = tuple(outcome or rest for outcome in self._outcomes)
            self._result = self._summary(outcomes)
            self._changed.notify_all()

    def _summary(self, outcomes: tuple[Outcome, ...]) -> LoadResult:
        tokens, nbytes, whole = 0, 0, True
        failed: list[int] = []
        for move, outcome in zip(self.plan.chunks, outcomes, strict=True):
            whole = whole and outcome.ok
            if whole:
                tokens += move.head.tokens
                nbytes += outcome.nbytes
            else:
                failed.extend(page for page in move.pages.tolist() if page >= 0)
        return LoadResult(
            tokens, outcomes, tuple(failed), nbytes, self.clock.now_s() - self._started_s
        )
