"""What the agent itself costs: to prepare 4096 descriptors, to post, to see the end."""

from __future__ import annotations

import select
import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from result import Result, Setting

from kvtier import Agent, Op, Transfer
from kvtier.backends.host import HostTransfers
from kvtier.errors import KvtierError
from kvtier.transfer import Results, Stop

COUNT, PIECE_BYTES = 4096, 64 << 10
ROUNDS = 201
PREPARE_MS, POST_US, COMPLETION_US = 1.0, 50.0, 100.0


class _Timed(HostTransfers):
    """Notes when the last byte of a move was in place."""

    moved_s = 0.0

    def move(self, prepared: Any, results: Results, stop: Stop) -> str:
        detail = super().move(prepared, results, stop)
        self.moved_s = time.perf_counter()
        return detail


def run(wanted: set[str], setting: Setting) -> Iterator[Result]:
    backends: list[_Timed] = []

    def make(completions: Any) -> _Timed:
        backends.append(_Timed(completions))
        return backends[0]

    rng = np.random.default_rng(5)
    with Agent(backends={"host": make}) as agent:
        ours = np.zeros(COUNT * PIECE_BYTES, np.uint8)
        theirs = rng.integers(0, 256, COUNT * PIECE_BYTES, np.uint8)
        local_region, remote_region = agent.register(ours), agent.register(theirs)
        local = np.empty((COUNT, 3), np.uint64)
        local[:] = (local_region.number, 0, PIECE_BYTES)
        remote = local.copy()
        remote[:, 0] = remote_region.number
        local[:, 1] = np.arange(COUNT) * PIECE_BYTES
        remote[:, 1] = rng.permutation(COUNT) * PIECE_BYTES

        def prepare() -> Transfer:
            return agent.prepare(Op.READ, local, remote)

        whole = prepare()
        whole.post(deadline_s=60.0)
        whole.wait()
        order = (remote[:, 1] // PIECE_BYTES).astype(np.int64)
        if not np.array_equal(ours.reshape(COUNT, -1), theirs.reshape(COUNT, -1)[order]):
            raise KvtierError("the bytes are not those that were asked for")
        if "agent_prepare" in wanted:
            samples = []
            for _ in range(ROUNDS):
                begin_s = time.perf_counter()
                prepare()
                samples.append((time.perf_counter() - begin_s) * 1e3)
            limit_is = f"must be at most, {COUNT} descriptors from arrays"
            yield _cost("agent_prepare", "ms", samples, PREPARE_MS, limit_is)
        if "agent_post" in wanted:
            samples = []
            for _ in range(31):
                begin_s = time.perf_counter()
                whole.post(deadline_s=60.0)
                samples.append((time.perf_counter() - begin_s) * 1e6)
                whole.wait()
            limit_is = f"must be at most, {COUNT} descriptors posted anew"
            yield _cost("agent_post", "us", samples, POST_US, limit_is)
        if "agent_completion" in wanted:
            one = agent.prepare(Op.READ, local[:1], remote[:1])
            poll = select.poll()
            poll.register(agent.fileno(), select.POLLIN)
            samples = []
            for _ in range(ROUNDS):
                agent.progress()
                one.post(deadline_s=60.0)
                poll.poll(60_000)
                samples.append((time.perf_counter() - backends[0].moved_s) * 1e6)
                one.wait()
            limit_is = "must be at most, from the last byte to a thread asleep on the eventfd"
            yield _cost("agent_completion", "us", samples, COMPLETION_US, limit_is)


def _cost(bench: str, unit: str, samples: list[float], limit: float, limit_is: str) -> Result:
    ordered = sorted(samples)
    return Result(
        bench=bench,
        value=statistics.median(samples),
        unit=unit,
        higher_is_better=False,
        limit=limit,
        limit_is=limit_is,
        rounds=len(samples),
        more={"p90": float(f"{ordered[len(ordered) * 9 // 10]:.4g}")},
    )
