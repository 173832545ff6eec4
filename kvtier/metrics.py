"""Counters and histograms of one `KVTier`; exporters live outside and read `snapshot`."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import defaultdict

BUCKETS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Upper bounds of the latency buckets; one more counts what is beyond."""


class Metrics:
    """Named numbers that only grow. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: defaultdict[str, int] = defaultdict(int)
        self._histograms: dict[str, tuple[list[int], list[float]]] = {}

    def add(self, name: str, count: int = 1) -> None:
        """Count `count` more of `name`."""
        with self._lock:
            self._counters[name] += count

    def observe(self, name: str, seconds: float) -> None:
        """Put one duration into the histogram `name`."""
        with self._lock:
            counts, total = self._histograms.setdefault(name, ([0] * (len(BUCKETS_S) + 1), [0.0]))
            counts[bisect_left(BUCKETS_S, seconds)] += 1
            total[0] += seconds

    def count(self, name: str) -> int:
        """The counter `name`, 0 if nothing was counted."""
        with self._lock:
            return self._counters.get(name, 0)

    def snapshot(self) -> dict[str, float]:
        """All counters, and for each histogram ``_count``, ``_sum`` and ``_le_BOUND`` entries."""
        with self._lock:
            flat: dict[str, float] = dict(self._counters)
            for name, (counts, total) in self._histograms.items():
                flat[f"{name}_count"] = sum(counts)
                flat[f"{name}_sum"] = total[0]
                running = 0
                for bound, count in zip(BUCKETS_S, counts, strict=False):
                    running += count
                    flat[f"{name}_le_{bound:g}"] = running
            return flat
