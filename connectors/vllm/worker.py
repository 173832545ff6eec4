"""The worker's side: copies hits into vLLM's pages and full chunks out of them.

Everything vLLM calls runs on its own thread, in the order of `connector`. Copies out of pages are done
before a call returns, so that whatever vLLM does with a page afterwards (preemption, abort, reuse)
cannot change what was stored. Copies into pages run on kvtier's threads and are over, for certain,
before vLLM is told that they are.

On a GPU the same holds in the order of vLLM's stream, and nothing here waits for the GPU: what vLLM
puts on its stream after a call comes after the copies that the call began.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtier import Extra, Hit, Load, Space, Store

if TYPE_CHECKING:
    from kvtier.connectors.vllm.engine import Engine

IDLE_WAIT_S = 0.002  # while all requests wait for loads vLLM spins; this leaves it the processor

Guard = Callable[[str], AbstractContextManager[None]]
"""`with guard(hook)` swallows what is raised within, logged and counted; see `connector`."""


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Copy a hit into a request's pages."""

    request_id: str
    hit: Hit | None
    """None: it was lost between promise and order, so the pages are failed at once."""
    first_token: int
    pages: Sequence[int]
    between_steps: bool
    """The request waits, others go on; else the forward pass of this step needs the pages."""


@dataclass(frozen=True, slots=True)
class StoreOrder:
    """Copy chunks that are full out of a request's pages."""

    request_id: str
    space: Space
    tokens: Sequence[int]
    """From the start of the prompt to the end of what is stored."""
    extras: tuple[Extra, ...]
    pages: Sequence[int]
    """All pages of `tokens`."""
    first_token: int
    """Where the first chunk to store begins."""
    of_prompt: bool
    """No generated tokens among them."""
    attempt: int
    """Counts the times the request's KV had to be made anew after a failed load."""


@dataclass(slots=True)
class Step:
    """What the scheduler's side wants of one engine step."""

    loads: list[LoadOrder] = field(default_factory=list)
    stores: list[StoreOrder] = field(default_factory=list)
    """To be done after the forward pass."""
    last_stores: list[StoreOrder] = field(default_factory=list)
    """Of requests that ended: to be done before anything else overwrites their pages."""
    idle: bool = False
    """No forward pass in this step."""


@dataclass(slots=True)
class Report:
    """What the worker's side tells the scheduler's side after a step."""

    ended: set[str] = field(default_factory=set)
    """Requests whose load is over, for better or worse."""
    failed: set[str] = field(default_factory=set)
    """Those of them for which it brought less than was promised."""
    spoiled: set[str] = field(default_factory=set)
    """Requests whose forward pass read pages that a load had left wrong."""
    spoiled_pages: set[int] = field(default_factory=set)
    """Those pages."""
    stored_tokens: int = 0


@dataclass(slots=True)
class _Running:
    order: LoadOrder
    load: Load | None
    """None if it could not even begin."""
    failed: bool = False


class WorkerSide:
    """State of the loads under way and of what they spoiled."""

    def __init__(self, engine: Engine, guard: Guard, runs_ahead: bool) -> None:
        self._engine = engine
        self._runs_ahead = runs_ahead
        self._guard = guard
        self._in_step: list[_Running] = []
        self._trailing: list[_Running] = []
        """Loads of earlier steps that a device keeps in order and whose end is still to be heard of."""
        self._filling: list[tuple[StoreOrder, Store | None]] | None = None
        """This step's stores, once its first layer is filled."""
        self._storing: list[Store] = []
        """Stores of earlier steps whose end is still to be heard of."""
        self._between: dict[str, _Running] = {}
        self._bad_pages: set[int] = set()
        self._spoiled: dict[str, int] = {}
        """Requests that computed on bad pages, and in which attempt."""
        self._read_wrong: set[int] = set()
        """Bad pages of this step and, where vLLM schedules one step ahead, of the one before."""
        self._report = Report()

    # In the order of a step ---------------------------------------------------------------------

    def begin(self, step: Step) -> None:
        """Nothing of this step has touched a page yet: save what ended requests leave."""
        for order in step.last_stores:
            self._end_store(order, self._begin_store(order))

    def start_loads(self, step: Step) -> None:
        """Start this step's loads; returns at once."""
        for order in step.loads:
            running = _Running(order, self._start(order))
            if order.between_steps:
                self._between[order.request_id] = running
            else:
                self._in_step.append(running)
                if self._engine.settings.load == "before" and running.load is not None:
                    running.load.wait()

    def wait_layer(self, name: str) -> None:
        """The named layer's attention is next: its pages must be there, or known to be bad."""
        if not self._in_step:
            return
        layer = self._engine.need_pages().layer_of[name]
        for running in self._in_step:
            if running.load is None or running.failed:
                continue
            running.failed = True
            with self._guard("wait_for_layer_load"):
                running.failed = not running.load.wait_layer(layer)

    def layer_filled(self, name: str, step: Step) -> None:
        """The named layer of the step's pages is filled when vLLM's stream comes to it."""
        if not step.stores or self._engine.need_pages().kv.place is None:
            return
        if self._filling is None:
            self._filling = [(order, self._begin_store(order)) for order in step.stores]
        layer = self._engine.need_pages().layer_of[name]
        for _, store in self._filling:
            if store is not None:
                with self._guard("save_kv_layer"):
                    store.filled(layer)

    def finish(self, step: Step) -> None:
        """The forward pass is over: settle its loads, then store what it filled."""
        bad: set[int] = set()
        running_on, self._in_step = [*self._trailing, *self._in_step], []
        self._trailing.clear()
        for running in running_on:
            if self._is_trailing(running):
                self._trailing.append(running)
            else:
                bad.update(self._settle(running))
        self._report.spoiled_pages |= bad
        self._read_wrong |= bad
        stores, self._filling = self._filling, None
        if stores is None:
            stores = [(order, self._begin_store(order)) for order in step.stores]
        for order, store in stores:
            # A request may share the pages of another's failed load through vLLM's prefix cache.
            if not self._read_wrong.isdisjoint(order.pages):
                self._spoiled[order.request_id] = order.attempt
                self._report.spoiled.add(order.request_id)
            self._end_store(order, store)
        self._read_wrong = bad if self._runs_ahead else set()
        self._hear_of_stores()

    def arrived(self, ended_requests: set[str], idle: bool) -> set[str]:
        """Requests whose load between steps is over, each told once, also when it failed."""
        for request_id in ended_requests:
            self._spoiled.pop(request_id, None)
            if request_id in self._between:  # aborted: the pages are wanted back soon
                self._cancel(self._between[request_id])
        if idle and self._between:
            self._rest()
        arrived = set()
        for request_id, running in list(self._between.items()):
            if running.load is None or running.load.done():
                del self._between[request_id]
                self._settle(running)
                arrived.add(request_id)
        return arrived

    def take_bad_pages(self) -> set[int]:
        """Pages that loads left wrong since the last call."""
        taken, self._bad_pages = self._bad_pages, set()
        return taken

    def take_report(self) -> Report | None:
        """What happened since the last call, or None if nothing did."""
        taken, self._report = self._report, Report()
        return taken if taken != Report() else None

    def stop(self) -> None:
        """No page is touched after this."""
        for _, store in self._filling or ():
            if store is not None:
                store.cancel()
        for running in [*self._in_step, *self._trailing, *self._between.values()]:
            self._cancel(running)

    # Single orders: a fault in one is that one's failure ------------------------------------------

    def _start(self, order: LoadOrder) -> Load | None:
        if order.hit is None:
            return None
        with self._guard("start_load_kv"):
            return self._engine.tier.load(order.hit, order.pages, first_token=order.first_token)
        return None

    def _settle(self, running: _Running) -> Sequence[int]:
        """Ends the load if it has not ended; its bad pages."""
        order, result = running.order, None
        self._report.ended.add(order.request_id)
        if running.load is not None:
            with self._guard("wait_for_save"):
                result = running.load.cancel() if running.failed else running.load.wait()
                result = result or running.load.cancel()
        bad = order.pages if result is None else result.failed_pages
        if running.failed:  # a layer went on without its bytes, whatever came after
            bad = bad or order.pages
        if bad:
            self._bad_pages.update(bad)
            self._report.failed.add(order.request_id)
        return bad

    def _is_trailing(self, running: _Running) -> bool:
        """Whether the device keeps its order and has not ended it: nothing needs to wait for it."""
        load = running.load
        return load is not None and not running.failed and load.is_ordered and not load.done()

    def _is_spoiled(self, order: StoreOrder) -> bool:
        return self._spoiled.get(order.request_id, -1) >= order.attempt

    def _begin_store(self, order: StoreOrder) -> Store | None:
        if self._is_spoiled(order):
            return None
        with self._guard("save_kv_layer"):
            return self._engine.tier.start_store(
                order.space,
                order.tokens,
                order.pages[order.first_token // order.space.page_tokens :],
                first_token=order.first_token,
                extras=order.extras,
            )
        return None

    def _end_store(self, order: StoreOrder, store: Store | None) -> None:
        if store is None:
            return
        with self._guard("wait_for_save"):
            if self._is_spoiled(order):
                store.cancel()
            else:
                store.finish()
                self._storing.append(store)

    def _hear_of_stores(self) -> None:
        for store in self._storing:
            if store.done():
                self._report.stored_tokens += store.result().stored_tokens
        self._storing = [store for store in self._storing if not store.done()]

    def _cancel(self, running: _Running) -> None:
        if running.load is not None:
            with self._guard("get_finished"):
                running.load.cancel()

    def _rest(self) -> None:
        running = next(iter(self._between.values()))
        if running.load is not None:
            running.load.wait(IDLE_WAIT_S)
