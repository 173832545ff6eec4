"""The agent for asyncio: awaitable ends of transfers, and notifications as they come.

    outcomes = await kvtier.aio.finish(transfer)
    async for notification in kvtier.aio.notifications(agent):
        ...

The event loop sleeps on the agent's eventfd; no thread is added. One loop an agent at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Iterator
from weakref import WeakKeyDictionary

from kvtier.agent import Agent
from kvtier.peers import Notification
from kvtier.transfers import State, Transfer
from kvtier.types import Outcome


async def finish(agent: Agent, transfer: Transfer) -> tuple[Outcome, ...]:
    """The outcomes of a posted transfer, once it has ended.

    When the awaiting task is cancelled, so is the transfer.

    Raises:
        ValueError: it was never posted.
    """
    if transfer.state is State.READY:
        raise ValueError("the transfer was never posted")
    with _watched(agent) as watch:
        try:
            while not transfer.done():
                await watch.change()
        except asyncio.CancelledError:
            transfer.cancel()
            raise
    return transfer.outcomes()


async def notifications(agent: Agent) -> AsyncIterator[Notification]:
    """What peers say, one by one, without end. One iteration at a time gets each of them."""
    waiting: deque[Notification] = deque()
    with _watched(agent) as watch:
        while True:
            waiting.extend(agent.notifications())
            while waiting:
                yield waiting.popleft()
            await watch.change()


class _Watch:
    """One agent in one loop, and the tasks that sleep until something happens to it.

    Whoever else looks at the agent may clear its eventfd first, so it also calls `on_change`.
    """

    def __init__(self, agent: Agent, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.users = 0
        self._agent = agent
        self._sleepers: set[asyncio.Future[None]] = set()

    def begin(self) -> None:
        self._agent.listeners.add(self.on_change)
        self.loop.add_reader(self._agent.fileno(), self._on_readable)

    def end(self) -> None:
        self._agent.listeners.discard(self.on_change)
        self.loop.remove_reader(self._agent.fileno())

    def on_change(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(self._wake)

    def _on_readable(self) -> None:
        self._agent.clear()
        self._wake()

    def _wake(self) -> None:
        for sleeper in self._sleepers:
            if not sleeper.done():
                sleeper.set_result(None)

    async def change(self) -> None:
        sleeper = self.loop.create_future()
        self._sleepers.add(sleeper)
        try:
            await sleeper
        finally:
            self._sleepers.discard(sleeper)


_watches: WeakKeyDictionary[Agent, _Watch] = WeakKeyDictionary()


@contextlib.contextmanager
def _watched(agent: Agent) -> Iterator[_Watch]:
    loop = asyncio.get_running_loop()
    watch = _watches.get(agent)
    if watch is not None and watch.loop is not loop:
        if not watch.loop.is_closed():
            raise RuntimeError("another event loop waits for this agent")
        watch = None
    if watch is None:
        watch = _watches[agent] = _Watch(agent, loop)
    if not watch.users:
        watch.begin()
    watch.users += 1
    try:
        yield watch
    finally:
        watch.users -= 1
        if not watch.users:
            watch.end()
            del _watches[agent]
