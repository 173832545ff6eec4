"""One prefill or decode rank as a process: takes commands as JSON lines, one answer each.

    python handover_process.py

`build` comes first, and again for another rank in the same process. Bytes travel as hex.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from kvtier.agent import Agent
from kvtier.handover import HandoverReceiver, HandoverSender, Offer, Push, Shard, Source
from kvtier.peers import Peer
from kvtier.testing.handover_engine import ToyRank


class Process:
    """The commands; each gives what is answered."""

    def __init__(self) -> None:
        self._end: list[Callable[[], object]] = []
        self._pushes: dict[str, Push] = {}
        self._offers: dict[str, Offer] = {}

    def build(self, side: str, name: str, shard: dict[str, int], **rank: Any) -> dict[str, Any]:
        self.end()
        self.rank = ToyRank(Shard(**shard), noise=os.getpid(), **rank)
        agent = Agent(name)
        self._agent = agent
        self._end.append(agent.close)
        make: Any = HandoverSender if side == "prefill" else HandoverReceiver
        self._side = make(agent, self.rank.pages, model="toy", shard=self.rank.shard)
        self._end.append(self._side.close)
        known = self._side.introduction() if side == "prefill" else agent.metadata()
        return {"known": known.hex(), "pid": os.getpid()}

    def meet(self, known: list[str]) -> dict[str, Any]:
        """Decode ranks get introductions, prefill ranks metadata."""
        met = [bytes.fromhex(each) for each in known]
        if isinstance(self._side, HandoverReceiver):
            self._sources: list[Source] = [self._side.connect(each) for each in met]
        else:
            self._peers: list[Peer] = [self._agent.connect(each) for each in met]
        return {}

    # Decode --------------------------------------------------------------------------------------

    def expect(self, request: str, tokens: int, seed: int, deadline_s: float) -> dict[str, Any]:
        offer = self._side.expect(
            request,
            self.rank.request_pages(tokens, seed),
            tokens,
            self._sources,
            deadline_s=deadline_s,
        )
        self._offers[request] = offer
        return {"ticket": offer.ticket.hex()}

    def wait_layer(self, request: str, layer: int, timeout_s: float) -> dict[str, Any]:
        return {"ready": self._offers[request].wait_layer(layer, timeout_s)}

    def wait(self, request: str, timeout_s: float) -> dict[str, Any]:
        offer = self._offers[request]
        result = offer.wait(timeout_s)
        return {
            "status": result.status.value if result else None,
            "detail": result.detail if result else "",
            "quiet": offer.is_quiet,
        }

    def wait_quiet(self, request: str, timeout_s: float) -> dict[str, Any]:
        where = self._offers.get(request) or self._pushes[request]
        return {"quiet": where.wait_quiet(timeout_s)}

    def attend(self, tokens: int, seed: int, layer: int) -> dict[str, Any]:
        pages = self.rank.request_pages(tokens, seed)
        return {"sum": self.rank.attend(tokens, pages, layer)}

    def corrupt(self, tokens: int, seed: int) -> dict[str, Any]:
        self.rank.corrupt(self.rank.request_pages(tokens, seed)[0])
        return {}

    # Prefill -------------------------------------------------------------------------------------

    def begin(
        self, request: str, tickets: list[str], tokens: int, seed: int, deadline_s: float
    ) -> dict[str, Any]:
        self._pushes[request] = self._side.begin(
            request,
            [(p, bytes.fromhex(t)) for p, t in zip(self._peers, tickets, strict=True)],
            self.rank.request_pages(tokens, seed),
            tokens,
            deadline_s=deadline_s,
        )
        return {}

    def layer(self, request: str, prompt: list[int], seed: int, layer: int) -> dict[str, Any]:
        self.rank.compute(prompt, self.rank.request_pages(len(prompt), seed), layer)
        self._pushes[request].layer_done(layer)
        return {}

    def finish(self, request: str, deadline_s: float) -> dict[str, Any]:
        result = self._pushes[request].finish(deadline_s)
        return {"status": result.status.value, "detail": result.detail}

    # Both ----------------------------------------------------------------------------------------

    def compute(self, text: list[int], seed: int, layer: int, first_token: int) -> dict[str, Any]:
        """Decode computes the KV of new tokens, or of all when it must recompute."""
        self.rank.compute(text, self.rank.request_pages(len(text), seed), layer, first_token)
        return {}

    def cancel(self, request: str) -> dict[str, Any]:
        (self._offers.get(request) or self._pushes[request]).cancel()
        return {}

    def forget(self, request: str) -> dict[str, Any]:
        self._offers.pop(request, None)
        self._pushes.pop(request, None)
        return {}

    def stat(self) -> dict[str, Any]:
        side = self._side
        under_way = side._offers if isinstance(side, HandoverReceiver) else side._pushes
        return {
            "fds": len(os.listdir("/proc/self/fd")),
            "threads": threading.active_count(),
            "under_way": len(under_way),
        }

    def end(self) -> dict[str, Any]:
        """Close what `build` opened."""
        while self._end:
            self._end.pop()()
        self._pushes.clear()
        self._offers.clear()
        return {}


def main() -> None:
    process = Process()
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(getattr(process, command.pop("do"))(**command)), flush=True)
    process.end()


if __name__ == "__main__":
    main()
