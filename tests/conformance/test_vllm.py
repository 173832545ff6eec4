"""The vLLM connector's two sides pass the connector suite, driven in vLLM's order without vLLM.

The engine tests do the same with a real vLLM; these need none, and see the bytes of every page.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from kvtier import KVTier, Namespace
from kvtier.connectors.vllm.engine import Engine
from kvtier.connectors.vllm.pages import describe_pages
from kvtier.connectors.vllm.scheduler import SchedulerSide
from kvtier.connectors.vllm.settings import LoadMode, VllmSettings
from kvtier.connectors.vllm.worker import Report, Step, WorkerSide
from kvtier.testing.connector_suite import Bytes, ConnectorSuite, toy_kv

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 4, 90, 2, 32, 16
ROW_BYTES = HEADS * CONTENT * 2
DEADLINE_S = 30.0


class ToyVllm:
    """vLLM's calls for one request at a time, on pages that the suite chooses."""

    page_tokens = TOKENS
    page_count = BLOCKS

    def __init__(self, tier: KVTier, model: str, load: LoadMode) -> None:
        generator = torch.Generator().manual_seed(7)
        shape = (BLOCKS, LAYERS, HEADS, TOKENS, CONTENT)
        self._memory = torch.randint(-9999, 9999, shape, dtype=torch.int16, generator=generator)
        self._tensors = {
            f"layers.{i}.attn": self._memory[:, i].view(torch.bfloat16) for i in range(LAYERS)
        }
        engine = Engine(tier, VllmSettings(load=load), Namespace(model=model, dtype="bfloat16"))
        engine.bind(describe_pages(self._tensors, TOKENS, BLOCKS, "toy"))
        self._worker = WorkerSide(engine, lambda _hook: nullcontext(), runs_ahead=False)
        self._scheduler = SchedulerSide(engine, time.monotonic, drops_last_page=False)
        self._count = 0

    def write(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        rows = self._rows(pages)
        rows[:, : len(tokens)] = self.expected(tokens)[:, 0]
        blocks = rows.reshape(LAYERS, len(pages), TOKENS, HEADS, CONTENT * 2)
        bytes_ = torch.from_numpy(np.ascontiguousarray(blocks.transpose(1, 0, 3, 2, 4)))
        self._memory[list(pages)] = bytes_.view(torch.int16)

    def read(self, tokens: int, pages: Sequence[int]) -> Bytes:
        return self._rows(pages)[:, None, :tokens]

    def expected(self, tokens: Sequence[int]) -> Bytes:
        return toy_kv(tokens, LAYERS, 1, ROW_BYTES)

    def store(self, tokens: Sequence[int], pages: Sequence[int]) -> int:
        """A prefill of which vLLM computed everything itself."""
        request = self._request(tokens)
        self._scheduler.offer(request, 0)
        self._scheduler.allocated(request, pages, 0)
        step = Step()
        output: Any = SimpleNamespace(
            num_scheduled_tokens={request.request_id: len(tokens)},
            kv_connector_block_state=SimpleNamespace(get_block_ids=lambda _id: (list(pages),)),
        )
        self._scheduler.plan_stores(output, step)
        report = self._forward(step)
        self._scheduler.finished(request, pages, regular=False)
        return report.stored_tokens

    def load(self, tokens: Sequence[int], pages: Sequence[int]) -> int:
        """A prefill of the tokens and one more, which vLLM always keeps to compute itself."""
        request = self._request([*tokens, 0])
        offered, between_steps = self._scheduler.offer(request, 0)
        self._scheduler.allocated(request, pages, offered)
        report = self._forward(Step(loads=self._scheduler.take_loads()))
        deadline_s = time.monotonic() + DEADLINE_S
        while between_steps and not self._worker.arrived(set(), idle=True):
            assert time.monotonic() < deadline_s, "a load between steps never ended"
        report = self._worker.take_report() or report
        self._scheduler.heard(report)
        bad = self._worker.take_bad_pages()
        assert bool(bad) == (request.request_id in report.failed)
        self._scheduler.finished(request, pages, regular=False)
        good = 0
        while good < offered // TOKENS and pages[good] not in bad:
            good += 1
        return good * TOKENS

    def _forward(self, step: Step) -> Report:
        self._worker.begin(step)
        self._worker.start_loads(step)
        for name in self._tensors:
            self._worker.wait_layer(name)
        self._worker.finish(step)
        return self._worker.take_report() or Report()

    def _request(self, tokens: Sequence[int]) -> Any:
        self._count += 1
        return SimpleNamespace(
            request_id=f"request-{self._count}",
            _all_token_ids=list(tokens),
            num_tokens=len(tokens),
            num_prompt_tokens=len(tokens),
            num_computed_tokens=0,
            skip_reading_prefix_cache=False,
            lora_request=None,
            cache_salt=None,
            mm_features=(),
            prompt_embeds=None,
            prompt_is_token_ids=None,
            pooling_params=None,
            resumable=False,
        )

    def _rows(self, pages: Sequence[int]) -> Bytes:
        """[layer, token, byte] of the pages in turn; a copy."""
        blocks = self._memory[list(pages)].view(torch.uint8).numpy()
        return np.ascontiguousarray(blocks.transpose(1, 0, 3, 2, 4)).reshape(LAYERS, -1, ROW_BYTES)


class TestLayerByLayer(ConnectorSuite):
    def make(self, tier: KVTier, model: str) -> ToyVllm:
        return ToyVllm(tier, model, "layerwise")


class TestBeforeTheForwardPass(ConnectorSuite):
    def make(self, tier: KVTier, model: str) -> ToyVllm:
        return ToyVllm(tier, model, "before")


class TestBetweenSteps(ConnectorSuite):
    def make(self, tier: KVTier, model: str) -> ToyVllm:
        return ToyVllm(tier, model, "async")
