"""What a hand-over leaves to wait for after the prefill, against sending all of it then.

30 layers of 8 MiB go to another process of this host while the next layer's matrix products run;
each layer computes longer than it is sent, as on real engines. A second process counts from the
moment the last layer was computed to the moment decode knows that everything is in place.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from handover_decode import LAYERS, NBYTES, PATIENCE_S, TOKENS, BenchPages
from result import GB, Result, Sample, Setting, Work, fastest, progress, take_turns

from kvtier import Agent, Op
from kvtier.errors import KvtierError
from kvtier.geometry import plan
from kvtier.handover import HandoverSender, Push
from kvtier.handover_protocol import Ticket, decode, unpack_pages
from kvtier.slices import LayerSlices

ROUNDS = 11
COMPUTE_PER_TRANSFER = 2.0  # a layer's compute, in times of its share of sending all at once
LAYER_DONE_US_MAX = 200.0


class Bench:
    """The prefill side, and the process that is the decode side."""

    def __init__(self, agent: Agent, child: subprocess.Popen[str]) -> None:
        self._child = child
        self.agent = agent
        self.pages = BenchPages(seed=1)
        self.sender = HandoverSender(agent, self.pages, model="bench")
        self.peer = agent.connect(bytes.fromhex(self._hear()["metadata"]))
        self._tell(known=self.sender.introduction().hex())
        self.turn = 0
        self.layer_done_us: list[float] = []
        self.decode_cpu_s: list[float] = []
        self._compute: Callable[[], object] = lambda: None

    def begin(self) -> None:
        """New words in the pages, and a push whose first transfers are ready."""
        self.turn += 1
        self.pages.fill(self.turn)
        self._tell(request=f"r{self.turn}")
        self.ticket = bytes.fromhex(self._hear()["ticket"])
        self.push: Push = self.sender.begin(
            f"r{self.turn}",
            [(self.peer, self.ticket)],
            self.pages.order,
            TOKENS,
            deadline_s=PATIENCE_S,
        )

    def layer_by_layer(self) -> Sample:
        """Compute and send; the time after the last layer was computed."""
        computed_s = cpu_s = 0.0
        for layer in range(LAYERS):
            self._compute()
            computed_s, cpu_s = time.monotonic(), time.process_time()
            self.push.layer_done(layer)
            self.layer_done_us.append((time.monotonic() - computed_s) * 1e6)
        return self._exposed(computed_s, cpu_s)

    def all_layers_after(self) -> Sample:
        """Compute everything, then send everything."""
        for _ in range(LAYERS):
            self._compute()
        ended_s, cpu_s = time.monotonic(), time.process_time()
        for layer in range(LAYERS):
            self.push.layer_done(layer)
        sample = self._exposed(ended_s, cpu_s)
        self.decode_cpu_s.append(self._decode_cpu_s)
        return sample

    def begin_whole(self) -> None:
        """One transfer of all layers; the push is dropped, only its pages are used."""
        self.begin()
        self.push.cancel()
        self._hear()
        ticket = decode(self.ticket, Ticket)
        source, target = self.sender._geometry, ticket.geometry
        parts = plan([source.shape.shard], target.shape.shard)[0]
        pages = self.pages.order.astype(np.int64)
        slices = LayerSlices(source, target, parts, pages, unpack_pages(ticket.pages), TOKENS)
        tables = [slices.layer(layer) for layer in range(LAYERS)]
        self.whole = self.agent.prepare(
            Op.WRITE,
            np.concatenate([local for local, _ in tables]),
            np.concatenate([remote for _, remote in tables]),
            peer=self.peer,
        )

    def whole_after(self) -> Sample:
        """The agent alone: no layers, no words but the end of the transfer on this side."""
        begin_s, cpu_s = time.monotonic(), time.process_time()
        self.whole.post(PATIENCE_S)
        self.whole.wait()
        if not self.whole.ok:
            raise KvtierError(self.whole.failure)
        return Sample(time.monotonic() - begin_s, time.process_time() - cpu_s)

    def calibrate(self) -> float:
        """Make the compute of a layer long enough; gives its seconds."""
        self.begin()
        transfer_s = self.all_layers_after().wall_s / LAYERS
        a = torch.ones(256, 1024)
        b = torch.ones(1024, 1024)

        def once() -> None:
            torch.mm(a, b)

        once()
        costs = []
        for _ in range(20):
            begin_s = time.perf_counter()
            once()
            costs.append(time.perf_counter() - begin_s)
        times = max(1, round(COMPUTE_PER_TRANSFER * transfer_s / statistics.median(costs)))

        def compute() -> None:
            for _ in range(times):
                once()

        self._compute = compute
        return times * statistics.median(costs)

    def check(self) -> None:
        """Decode has this turn's words."""
        self._tell(check=self.turn)
        if not self._hear()["right"]:
            raise KvtierError("decode does not hold what was handed over")

    def close(self) -> None:
        self.sender.close()

    def _exposed(self, ended_s: float, cpu_s: float) -> Sample:
        result = self.push.finish()
        cpu_s = time.process_time() - cpu_s
        answer = self._hear()
        if not (result.ok and answer["ok"]):
            raise KvtierError(f"hand-over failed: {result}")
        self._decode_cpu_s = answer["cpu_s"]
        return Sample(answer["at_s"] - ended_s, cpu_s)

    def _tell(self, **message: Any) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(message) + "\n")
        self._child.stdin.flush()

    def _hear(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        heard: dict[str, Any] = json.loads(self._child.stdout.readline())
        return heard


def run(wanted: set[str], setting: Setting) -> Iterator[Result]:
    torch.set_num_threads(1)
    child = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("handover_decode.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child, Agent("bench-prefill") as agent:
        bench = Bench(agent, child)
        layer_s = bench.calibrate()
        progress(f"  a layer computes {layer_s * 1e3:.2f} ms")
        costs = take_turns(
            {
                "layer by layer": Work(bench.layer_by_layer, bench.begin),
                "all layers after": Work(bench.all_layers_after, bench.begin),
                "one transfer after": Work(bench.whole_after, bench.begin_whole),
            },
            ROUNDS,
        )
        bench.begin()
        bench.layer_by_layer()
        bench.check()
        bench.close()
    exposed = costs.pop("layer by layer")
    name, limit_s = fastest(costs)
    decode_cpu_s = statistics.median(bench.decode_cpu_s)
    if "handover_exposed" in wanted:
        yield Result(
            bench="handover_exposed",
            value=exposed.wall_s * 1e3,
            unit="ms",
            higher_is_better=False,
            limit=limit_s * 1e3,
            limit_is=f"sending all of it after the prefill ({name}); the ratio must be at most 0.1",
            rounds=ROUNDS,
            cpu_s_per_gb=(costs["all layers after"].cpu_s + decode_cpu_s) / NBYTES * GB,
            more={"layers": LAYERS, "gb_per_s": round(NBYTES / limit_s / GB, 2)},
        )
    if "handover_layer_done" in wanted:
        yield Result(
            bench="handover_layer_done",
            value=statistics.median(bench.layer_done_us),
            unit="us",
            higher_is_better=False,
            limit=LAYER_DONE_US_MAX,
            limit_is="must be at most, of the compute thread for each layer",
            rounds=len(bench.layer_done_us),
            more={"p99": round(float(np.percentile(bench.layer_done_us, 99)), 1)},
        )
