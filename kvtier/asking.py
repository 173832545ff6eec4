"""Finds what others stored: asks shared tiers, by key, for the chunks that the books do not know.

Nothing is listed, at the start neither: a lookup asks for the keys that follow the run it knows, and
what is there enters the books. It waits a bounded time; answers that come later serve the next one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from kvtier.clock import Clock
from kvtier.errors import Closed
from kvtier.hierarchy import MEMORY, Hierarchy, Tier
from kvtier.keys import Extra, Tokens
from kvtier.manifest import NO_PARENT, Head
from kvtier.metrics import Metrics
from kvtier.policy import ChunkNumbers
from kvtier.space import Space
from kvtier.types import ChunkKey

log = logging.getLogger("kvtier")

KEYS_MAX = 1024  # of one lookup; the next one goes on from there
FIRST_KEYS = 4  # asked at once; four times as many each time that all of them are held
ASKING_MAX = 4  # at a time; beyond it a lookup does without, as when a server hangs
ABSENT_S = 1.0  # so long a key that was absent is not asked for again
ABSENT_MAX = 4096  # such keys remembered


class Asker:
    """Any thread. Threads of its own end with their tier's answer."""

    def __init__(
        self, hierarchy: Hierarchy, clock: Clock, metrics: Metrics, timeout_s: float
    ) -> None:
        self._hierarchy = hierarchy
        self._clock = clock
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._tiers = [tier for tier in hierarchy.tiers[MEMORY + 1 :] if tier.is_shared]
        self._slots = threading.BoundedSemaphore(ASKING_MAX)
        self._lock = threading.Lock()
        self._absent: dict[ChunkKey, float] = {}  # when to ask again, oldest first

    def ask(self, space: Space, tokens: Tokens, extras: Sequence[Extra]) -> None:
        """Bring into the books what shared tiers hold of `tokens` beyond the run that is known.

        Whole chunks are asked for, and after them the last pages as one more: not for those alone,
        since the answer would take longer than to compute them.
        """
        if not self._tiers or not self._timeout_s:
            return
        table = self._hierarchy.index.table
        with self._hierarchy.index.lock:
            run = space.find_run(table, tokens, extras)
            first = int(table.tokens(run).sum()) // space.chunk_tokens
            if first >= len(tokens) // space.chunk_tokens:
                return
            table.lease(run)  # else it could be gone when what continues it is found
        heads = self._heads(space, tokens, extras, first)
        if self._is_absent(heads[0].key) or not self._slots.acquire(blocking=False):
            self._release(run)
            return
        done = threading.Event()

        def work() -> None:
            try:
                self._ask_all(heads)
            except Closed:
                pass
            except Exception:  # outermost frame of the thread: the lookup finds what it knew before
                log.exception("kvtier: could not ask")
                self._metrics.add("ask_failed")
            finally:
                self._release(run)
                self._slots.release()
                done.set()

        begin_s = self._clock.now_s()
        threading.Thread(target=work, name="kvtier-ask", daemon=True).start()
        if not done.wait(self._timeout_s):
            self._metrics.add("ask_late")
        self._metrics.observe("ask_seconds", self._clock.now_s() - begin_s)

    def _heads(
        self, space: Space, tokens: Tokens, extras: Sequence[Extra], first: int
    ) -> list[Head]:
        keys, sizes = space.keys_of(tokens, extras)
        stop = min(len(keys), first + KEYS_MAX)
        return [
            space.head(keys[i], keys[i - 1] if i else NO_PARENT, sizes[i])
            for i in range(first, stop)
        ]

    def _ask_all(self, heads: list[Head]) -> None:
        known = 0
        for tier in self._tiers:
            known += self._ask_tier(tier, heads[known:])
        if known < len(heads):
            with self._lock:
                self._absent.pop(heads[known].key, None)
                self._absent[heads[known].key] = self._clock.now_s() + ABSENT_S
                while len(self._absent) > ABSENT_MAX:
                    del self._absent[next(iter(self._absent))]

    def _ask_tier(self, tier: Tier, heads: list[Head]) -> int:
        """How many of a run the tier holds, counted from its beginning; those are adopted."""
        held, count = 0, FIRST_KEYS
        while held < len(heads):
            some = heads[held : held + min(count, tier.backend.capabilities.batch_max)]
            answers = tier.backend.contains([head.key for head in some])
            there = answers.index(False) if False in answers else len(answers)
            self._metrics.add(f"asked_chunks_{tier.name}", len(some))
            if there:
                self._hierarchy.adopt(tier, some[:there])
            held += there
            if there < len(some):
                break
            count *= 4
        return held

    def _is_absent(self, key: ChunkKey) -> bool:
        with self._lock:
            return self._absent.get(key, -1.0) > self._clock.now_s()

    def _release(self, run: ChunkNumbers) -> None:
        with self._hierarchy.index.lock:
            self._hierarchy.index.table.release(run)
