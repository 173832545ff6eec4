"""The scheduler's side: looks requests up, promises hits to vLLM, decides what is worth storing.

vLLM asks for the same request again and again while there is no room for it, so a lookup's hit (and
its lease) is kept until it is used, outdated or given up. What is promised must be delivered or
reported as failed: once `allocated` has seen a promise, an order for it exists.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier import Extra, Hit, Space
from kvtier.connectors.vllm.identity import Adapters, is_knowable, request_extras
from kvtier.connectors.vllm.worker import LoadOrder, Report, Step, StoreOrder

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from kvtier.connectors.vllm.engine import Engine

log = logging.getLogger("kvtier")


@dataclass(slots=True, eq=False)
class _Tracked:
    """What is known of one request while vLLM has it."""

    request: Request
    space: Space
    extras: tuple[Extra, ...]
    hit: Hit | None = None
    asked_tokens: int = 0
    """The request's length when it was looked up; a longer one may hit more."""
    asked_s: float = 0.0
    local_tokens: int = 0
    """What vLLM's own prefix cache had when the hit was offered."""
    between_steps: bool = False
    loading: bool = False
    barred: bool = False
    """A load failed: offering the same hit again could go on for ever."""
    stored_tokens: int = 0
    """Up to here nothing is left to store."""
    attempt: int = 0


class SchedulerSide:
    """State of the requests that vLLM has, and of the next step's orders."""

    def __init__(self, engine: Engine, clock_s: Callable[[], float], drops_last_page: bool) -> None:
        self._engine = engine
        self._clock_s = clock_s
        self._drops_last_page = drops_last_page
        self._page = engine.need_pages().layout.page_tokens
        self._chunk = engine.settings.chunk_tokens
        self._adapters = Adapters()
        self._requests: dict[str, _Tracked] = {}
        self._loads: list[LoadOrder] = []
        self._last_stores: list[StoreOrder] = []
        self._lookups = self._found = self._stored_tokens = 0
        self._warned = False

    # In the order of a request's life -----------------------------------------------------------

    def offer(self, request: Request, local_tokens: int) -> tuple[int, bool]:
        """Tokens beyond `local_tokens` that a load would bring, and whether between steps."""
        tracked = self._track(request)
        if tracked is None or tracked.barred or tracked.loading:
            return 0, False
        # vLLM must be left a token to compute, and takes whole pages.
        usable = (request.num_tokens - 1) // self._page * self._page
        if request.skip_reading_prefix_cache or usable <= local_tokens:
            self._give_up(tracked)
            return 0, False
        hit = self._look_up(tracked)
        held = hit.tokens - (self._page if self._drops_last_page else 0)
        tokens = min(held, usable) // self._page * self._page
        if tokens <= local_tokens:
            self._give_up(tracked)
            return 0, False
        mode = self._engine.settings.load
        tracked.local_tokens = local_tokens
        tracked.between_steps = mode == "async" or (mode == "auto" and not hit.in_memory)
        return tokens - local_tokens, tracked.between_steps

    def allocated(self, request: Request, pages: Sequence[int], external_tokens: int) -> None:
        """vLLM made room; `external_tokens` of what was offered are promised from now on."""
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            assert not external_tokens, "promised without an offer"
            return
        if not external_tokens:
            if not tracked.loading:
                self._give_up(tracked)
            return
        first = tracked.local_tokens
        stop = first + external_tokens
        tracked.loading = True
        tracked.stored_tokens = max(tracked.stored_tokens, stop)
        self._loads.append(
            LoadOrder(
                request.request_id,
                tracked.hit,
                first,
                pages[first // self._page : stop // self._page],
                tracked.between_steps,
            )
        )

    def tokens_below_memory(self, request: Request) -> int:
        """How much of a promised hit has to come from a tier below memory."""
        tracked = self._requests.get(request.request_id)
        if tracked is None or tracked.hit is None:
            return 0
        return tracked.hit.tokens - tracked.hit.tokens_by_tier().get(tracked.hit.tier_names[0], 0)

    def take_loads(self) -> list[LoadOrder]:
        """Orders for what was promised since the last call."""
        taken, self._loads = self._loads, []
        return taken

    def plan_stores(self, output: SchedulerOutput, step: Step) -> None:
        """Add to `step` what this step's forward pass will fill."""
        step.last_stores, self._last_stores = self._last_stores, []
        state = output.kv_connector_block_state
        if state is None:
            return
        for request_id, scheduled in output.num_scheduled_tokens.items():
            tracked = self._requests.get(request_id)
            if tracked is None:
                continue
            request = tracked.request
            computed = request.num_computed_tokens
            # Drafted tokens are scheduled too; what is certain ends with the known tokens.
            stop = self._worth_storing(tracked, min(computed + scheduled, request.num_tokens))
            # After a failed load or a preemption the request starts over.
            start = min(tracked.stored_tokens, computed)
            if stop <= start:
                continue
            blocks = state.get_block_ids(request_id)
            if blocks is not None:
                step.stores.append(self._store_order(tracked, start, stop, blocks[0]))
                tracked.stored_tokens = stop

    def finished(self, request: Request, pages: Sequence[int], regular: bool) -> None:
        """vLLM is about to free the request's pages; `regular` if it was not aborted."""
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None:
            return
        self._give_up(tracked)  # a load under way has a lease of its own
        if regular and self._engine.settings.store_decoded and not tracked.loading:
            known = min(request.num_computed_tokens, request.num_tokens, len(pages) * self._page)
            stop = known // self._page * self._page
            if stop > tracked.stored_tokens:
                self._last_stores.append(
                    self._store_order(tracked, tracked.stored_tokens, stop, pages)
                )

    def heard(self, report: Report) -> None:
        """Take in what the worker's side did in the last step."""
        self._stored_tokens += report.stored_tokens
        for request_id in report.ended:
            tracked = self._requests.get(request_id)
            if tracked is not None:
                tracked.loading = False
                self._give_up(tracked)
        for request_id in report.failed | report.spoiled:
            tracked = self._requests.get(request_id)
            if tracked is not None:
                tracked.attempt += 1
                tracked.stored_tokens = 0
                tracked.barred = tracked.barred or request_id in report.failed

    def stop(self) -> None:
        """Let go of every lease."""
        for tracked in self._requests.values():
            self._give_up(tracked)
        self._requests.clear()

    # Parts --------------------------------------------------------------------------------------

    def _track(self, request: Request) -> _Tracked | None:
        tracked = self._requests.get(request.request_id)
        if tracked is None and is_knowable(request):
            tracked = self._requests[request.request_id] = _Tracked(
                request,
                self._engine.space(
                    self._adapters.identity(request.lora_request), request.cache_salt or ""
                ),
                request_extras(request),
            )
        return tracked

    def _look_up(self, tracked: _Tracked) -> Hit:
        now, tokens = self._clock_s(), tracked.request.num_tokens
        fresh = now - tracked.asked_s < self._engine.tier.config.lease_s / 2
        if tracked.hit is not None and tracked.asked_tokens == tokens and fresh:
            return tracked.hit
        self._give_up(tracked)
        hit = self._engine.tier.lookup(
            tracked.space,
            tracked.request._all_token_ids,
            extras=tracked.extras,
            owner=tracked.request.request_id,
        )
        tracked.hit, tracked.asked_tokens, tracked.asked_s = hit, tokens, now
        self._count(hit)
        return hit

    def _give_up(self, tracked: _Tracked) -> None:
        if tracked.hit is not None:
            hit, tracked.hit = tracked.hit, None
            self._engine.tier.release(hit)

    def _worth_storing(self, tracked: _Tracked, known: int) -> int:
        """Where storing ends when the KV of the first `known` tokens is there."""
        prompt: int = tracked.request.num_prompt_tokens
        if known < prompt:
            return known // self._chunk * self._chunk
        decoded = known // self._chunk * self._chunk if self._engine.settings.store_decoded else 0
        return max(decoded, prompt // self._page * self._page)

    def _store_order(
        self, tracked: _Tracked, start: int, stop: int, pages: Sequence[int]
    ) -> StoreOrder:
        return StoreOrder(
            tracked.request.request_id,
            tracked.space,
            tracked.request._all_token_ids[:stop],
            tracked.extras,
            list(pages[: stop // self._page]),
            start // self._chunk * self._chunk,
            stop <= tracked.request.num_prompt_tokens,
            tracked.attempt,
        )

    def _count(self, hit: Hit) -> None:
        """A cache that never hits is misconfigured or misused; silence would hide it for weeks."""
        self._lookups += 1
        self._found += hit.tokens > 0
        limit = self._engine.settings.warn_after_lookups
        if self._warned or self._found or not self._stored_tokens or self._lookups < limit:
            return
        self._warned = True
        log.warning(
            "kvtier: %d lookups found nothing although %d tokens were stored: either no two prompts "
            "begin with the same %d tokens (is there a date or an id at their start?), or chunks are "
            "evicted before they are asked for; see `stat()` for what is held",
            self._lookups,
            self._stored_tokens,
            self._page,
        )
