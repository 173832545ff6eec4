"""The class that vLLM loads: every hook of its V1 connector API, handed to one of the two sides.

vLLM builds it once for the worker and once for the scheduler and calls hooks on its own thread. A
wrong setting stops the engine's start. After that no exception leaves a hook: it is caught here,
logged once per hook, counted, and costs a recompute or a lost store, never the engine.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import wraps
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

from kvtier import ConfigError
from kvtier.connectors.vllm.engine import (
    SCHEDULER,
    WORKER,
    join_engine,
    leave_engine,
    open_engine,
)
from kvtier.connectors.vllm.identity import model_namespace
from kvtier.connectors.vllm.pages import describe_pages, packing_name, page_tokens
from kvtier.connectors.vllm.scheduler import SchedulerSide
from kvtier.connectors.vllm.settings import split_settings
from kvtier.connectors.vllm.worker import Report, Step, WorkerSide
from kvtier.metrics import Metrics

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = logging.getLogger("kvtier")

Hook = TypeVar("Hook", bound=Callable[..., Any])


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Orders of the scheduler's side for one step; both sides are in one process."""

    step: Step


@dataclass
class ReportMetadata(KVConnectorWorkerMetadata):
    """What the worker's side did."""

    report: Report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Of several workers; there is one."""
        raise NotImplementedError("kvtier runs with one worker")


def _or(fallback: Callable[[], Any]) -> Callable[[Hook], Hook]:
    """Make a hook that answers with `fallback` where it would raise."""

    def decorate(hook: Hook) -> Hook:
        @wraps(hook)
        def guarded(self: KVTierConnector, *args: Any, **kwargs: Any) -> Any:
            with self.guard(hook.__name__):
                return hook(self, *args, **kwargs)
            return fallback()

        return cast("Hook", guarded)

    return decorate


def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True)
class _Guard(AbstractContextManager[None]):
    hook: str
    counts: dict[str, int]
    metrics: Metrics

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        if self.hook not in self.counts:
            log.error("kvtier: %s failed; vLLM goes on without", self.hook, exc_info=error)
        self.counts[self.hook] = self.counts.get(self.hook, 0) + 1
        self.metrics.add(f"vllm_faults_{self.hook}")
        return True


class KVTierConnector(KVConnectorBase_V1, SupportsHMA):
    """kvtier in vLLM; see the package for how to configure it."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._faults: dict[str, int] = {}
        _check(vllm_config)
        transfer = self._kv_transfer_config
        if transfer.kv_load_failure_policy != "recompute":
            # vLLM reads it after this; its default would fail requests over a cache's bad day.
            log.info("kvtier: failed loads are recomputed (kv_load_failure_policy is overridden)")
            transfer.kv_load_failure_policy = "recompute"
        self._page_tokens = page_tokens(kv_cache_config)
        self._engine_id = str(transfer.engine_id)
        scheduler = vllm_config.scheduler_config
        if role is KVConnectorRole.WORKER:
            self._engine = open_engine(
                self._engine_id,
                transfer.kv_connector_extra_config,
                lambda settings: model_namespace(vllm_config, settings),
            )
            self._worker = WorkerSide(self._engine, self.guard, bool(scheduler.async_scheduling))
        else:
            self._engine = join_engine(self._engine_id)
            speculative = vllm_config.speculative_config
            self._scheduler = SchedulerSide(
                self._engine,
                time.monotonic,
                speculative is not None and speculative.use_eagle_block_drop(),
            )

    def guard(self, hook: str) -> AbstractContextManager[None]:
        """What is raised within becomes a log line and a count; the code after it copes."""
        return _Guard(hook, self._faults, self._engine.tier.metrics)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a store that is lost is a later miss."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Layers wait for their bytes in Python, which a full CUDA graph would leave out."""
        return split_settings(extra_config)[1].load in ("auto", "layerwise")

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """On GPUs blocks of all layers together, which the copy engine takes in one piece.

        A wish: where the attention backend does not offer it, vLLM takes another and says so.
        """
        from vllm.platforms import current_platform

        return "BLHNC" if current_platform.is_cuda_alike() else None

    # Worker ---------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Learn the KV memory; an error here stops the start."""
        name, tensor = next(iter(kv_caches.items()), ("", None))
        packing = packing_name(self._vllm_config, name, tensor) if tensor is not None else ""
        self._engine.bind(
            describe_pages(kv_caches, self._page_tokens, self._kv_cache_config.num_blocks, packing)
        )

    @_or(_nothing)
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """First of a step: freed pages still hold what they held."""
        if isinstance(kv_connector_metadata, StepMetadata):
            self._worker.begin(kv_connector_metadata.step)

    @_or(_nothing)
    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Begin the step's loads."""
        self._worker.start_loads(self._step())

    @_or(_nothing)
    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return when the layer's pages are there, or never will be."""
        self._worker.wait_layer(layer_name)

    @_or(_nothing)
    def save_kv_layer(self, layer_name: str, *args: Any, **kwargs: Any) -> None:
        """The layer's KV is on its way into its pages: a device may copy it out as it comes."""
        self._worker.layer_filled(layer_name, self._step())

    @_or(_nothing)
    def wait_for_save(self) -> None:
        """After the forward pass: settle its loads, copy out what it filled."""
        self._worker.finish(self._step())

    @_or(lambda: (None, None))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose load between steps is over."""
        arrived = self._worker.arrived(finished_req_ids, self._step().idle)
        return None, arrived or None

    @_or(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        """Pages that vLLM must recompute."""
        return self._worker.take_bad_pages()

    @_or(_nothing)
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """The step's report, if there is anything to say."""
        report = self._worker.take_report()
        return ReportMetadata(report) if report is not None else None

    # Scheduler ------------------------------------------------------------------------------------

    @_or(lambda: (0, False))
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """What a load would bring beyond vLLM's own prefix cache."""
        return self._scheduler.offer(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Room was made. Not guarded: a promise that is neither kept nor failed is wrong text."""
        (pages,) = blocks.get_block_ids()
        self._scheduler.allocated(request, pages, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """The step's orders; a fault in planning stores leaves the loads in place."""
        step = Step(
            loads=self._scheduler.take_loads(),
            idle=scheduler_output.total_num_scheduled_tokens == 0,
        )
        self._plan_stores(scheduler_output, step)
        return StepMetadata(step)

    @_or(_nothing)
    def _plan_stores(self, scheduler_output: SchedulerOutput, step: Step) -> None:
        self._scheduler.plan_stores(scheduler_output, step)

    @_or(_nothing)
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Hear the worker's report."""
        meta = connector_output.kv_connector_worker_meta
        if not isinstance(meta, ReportMetadata):
            return
        self._scheduler.heard(meta.report)
        if meta.report.spoiled_pages and self._kv_cache_manager is not None:
            # vLLM recomputes these pages, but until then its own prefix cache would give them out.
            self._kv_cache_manager.evict_blocks(meta.report.spoiled_pages)

    @_or(dict)
    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """Host memory or disk, for vLLM's own metrics."""
        below = min(num_external_tokens, self._scheduler.tokens_below_memory(request))
        sources = {
            CacheHitSource.HOST: num_external_tokens - below,
            CacheHitSource.DISK: below,
        }
        return {source: tokens for source, tokens in sources.items() if tokens}

    @_or(lambda: (False, None))
    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Last look at the request's pages; they may be freed at once."""
        regular = request.status in (
            RequestStatus.FINISHED_STOPPED,
            RequestStatus.FINISHED_LENGTH_CAPPED,
        )
        self._scheduler.finished(request, block_ids, regular)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """There is one group."""
        return self.request_finished(request, block_ids[0])

    @_or(lambda: False)
    def reset_cache(self) -> bool:
        """Forget this engine's chunks, as asked after its weights were changed."""
        result = self._engine.tier.cleanup(self._engine.space("", ""))
        return not result.leased

    # Both -----------------------------------------------------------------------------------------

    @_or(_nothing)
    def shutdown(self) -> None:
        """Let go; the second of the two roles closes the tier, which writes down what waits."""
        if self.role is KVConnectorRole.WORKER:
            self._worker.stop()
            leave_engine(self._engine_id, WORKER)
        else:
            self._scheduler.stop()
            leave_engine(self._engine_id, SCHEDULER)

    def _step(self) -> Step:
        metadata = self._connector_metadata
        return metadata.step if isinstance(metadata, StepMetadata) else Step()


def _check(vllm_config: VllmConfig) -> None:
    """Raise ConfigError for what this connector cannot serve."""
    transfer = vllm_config.kv_transfer_config
    if transfer.kv_role != "kv_both":
        raise ConfigError(
            f"kv_role is {transfer.kv_role!r}: kvtier is a cache, not a channel between a producer "
            "and a consumer; set kv_role to 'kv_both'"
        )
    parallel = vllm_config.parallel_config
    if parallel.world_size > 1:
        raise ConfigError(
            f"{parallel.world_size} worker processes (tensor parallel "
            f"{parallel.tensor_parallel_size}, pipeline parallel "
            f"{parallel.pipeline_parallel_size}): one process per rank needs kvtier's node daemon, "
            "which this version lacks; use one worker"
        )
    if "kv_connector_block_state" not in SchedulerOutput.__dataclass_fields__:
        raise ConfigError("this vLLM is too old: kvtier needs 0.32 or later")
