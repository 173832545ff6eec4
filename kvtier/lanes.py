"""Threads that do one thing after the other, with a bound on what waits."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Lane:
    """One thread that runs what is offered, in order."""

    def __init__(self, name: str, queue_max: int) -> None:
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(maxsize=queue_max)
        self._thread = threading.Thread(target=self._run, name=f"kvtier-{name}", daemon=True)
        self._thread.start()

    def offer(self, work: Callable[[], None]) -> bool:
        """Queue `work`; False, and it is not done, when as much is waiting as may."""
        try:
            self._queue.put_nowait(work)
        except queue.Full:
            return False
        return True

    def close(self, timeout_s: float = 1.0) -> None:
        """Let what is queued run, then end the thread; one that is stuck is left behind."""
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(timeout=timeout_s)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work()
            del work  # or what it holds would stay until the next one comes
