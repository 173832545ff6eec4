"""Two agents in one process, with a backend that moves bytes here and stops on command."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from kvtier._core import Completions
from kvtier.agent import Agent
from kvtier.peers import Notification, Peer
from kvtier.transfer import BlockingTransfers, Op, Pieces, Reach, Results, Route, Stop, Unsuitable
from kvtier.transfers import Transfer
from kvtier.types import Descriptor, Region, RegionKind

WAIT_S = 20.0
DRAM = RegionKind.DRAM


class Toy(BlockingTransfers):
    """Memory of this process, of whichever agent; holds moves back, or fails them, when told."""

    name: ClassVar[str] = "toy"

    def __init__(self, completions: Completions, **reach: Any) -> None:
        super().__init__(completions)
        routes = frozenset({Route(DRAM, DRAM), Route(DRAM, DRAM, peer=True)})
        self._reach = Reach(routes=routes, **reach)
        self.gate = threading.Event()
        self.gate.set()
        self.reached = threading.Event()
        self.heeds_stop = True
        self.error_at: dict[int, int] = {}
        self.handles = 0
        self.links = 0

    @property
    def reach(self) -> Reach:
        return self._reach

    def register(self, region: Region, source: Any) -> int:
        if region.kind is not DRAM:
            raise Unsuitable("memory only")
        self.handles += 1
        return region.address

    def deregister(self, handle: Any) -> None:
        self.handles -= 1

    def address(self) -> bytes:
        return b"toy"

    def export(self, handle: Any) -> bytes:
        return b"here"

    def connect(self, address: bytes, host_pid: int | None) -> Any:
        assert host_pid == os.getpid()
        self.links += 1
        return object()

    def import_region(self, link: Any, region: Region, exported: bytes) -> int:
        self.handles += 1
        return region.address

    def disconnect(self, link: Any) -> None:
        self.links -= 1

    def prepare(self, pieces: Pieces, link: Any) -> Pieces:
        return pieces

    def piece_count(self, prepared: Pieces) -> int:
        return len(prepared.lengths)

    def move(self, prepared: Pieces, results: Results, stop: Stop) -> str:
        self.reached.set()
        while not self.gate.wait(0.005):
            if self.heeds_stop and stop.is_set():
                return "stopped"
        for i in range(len(prepared.lengths)):
            if i in self.error_at:
                results[i] = -self.error_at[i]
                continue
            local, remote = (
                side.handles[side.which[i]] + int(side.offsets[i])
                for side in (prepared.local, prepared.remote)
            )
            target, source = (local, remote) if prepared.op is Op.READ else (remote, local)
            ctypes.memmove(target, source, int(prepared.lengths[i]))
            results[i] = prepared.lengths[i]
        return "told to fail" if self.error_at else ""


class Bench:
    """Two agents with a toy backend each, and 64 KiB of memory each."""

    def __init__(self, **options: Any) -> None:
        self.toys: list[Toy] = []
        self.agents = [self.agent(name, **options) for name in ("one", "two")]
        self.one, self.two = self.agents
        self.memory = [np.zeros(1 << 16, np.uint8) for _ in self.agents]
        self.memory[0][:] = np.random.default_rng(1).integers(0, 256, 1 << 16, np.uint8)
        self.regions = [
            agent.register(memory) for agent, memory in zip(self.agents, self.memory, strict=True)
        ]

    def agent(self, name: str, **options: Any) -> Agent:
        def make(completions: Completions) -> Toy:
            self.toys.append(Toy(completions, **options))
            return self.toys[-1]

        return Agent(name, backends={"toy": make})

    def connected(self) -> Peer:
        peer = self.one.connect(self.two.metadata())
        until(lambda: peer.connected)
        return peer

    def write(self, peer: Peer, nbytes: int = 1000, count: int = 3) -> Transfer:
        """Prepared: `count` descriptors with gaps, from the start of one's memory to two's."""
        local = [Descriptor(self.regions[0], 2000 * i, nbytes) for i in range(count)]
        remote = [Descriptor(peer.regions[0], 2000 * i, nbytes) for i in range(count)]
        return self.one.prepare(Op.WRITE, local, remote, peer)


def until(condition: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < ends_s, "it did not come to be"
        time.sleep(0.001)


def heard(agent: Agent, count: int = 1) -> list[Notification]:
    found: list[Notification] = []

    def enough() -> bool:
        found.extend(agent.notifications())
        return len(found) >= count

    until(enough)
    return found
