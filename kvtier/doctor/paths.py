"""The transfer backends: which work here, and how fast each moves bytes on its routes.

They are found by their entry points and tried through `kvtier.Agent`, as users use them, so this
knows none of them by name. A peer is a second process (`kvtier.doctor.peer`).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvtier._core import Completions
from kvtier.agent import Agent
from kvtier.doctor.disk import scratch
from kvtier.doctor.report import Asked, Figure, Finding, Verdict, in_gb_s
from kvtier.peers import Peer
from kvtier.registry import transfer_backends
from kvtier.shared_pool import SharedPool
from kvtier.transfer import Op, Route, TransferBackend, Unsuitable
from kvtier.types import Descriptor, Region, RegionKind

_SAMPLE_BYTES = 64 << 20
_PIECE_BYTES = 1 << 20
_ROUNDS = 3
_DEADLINE_S = 5.0


@dataclass(frozen=True, slots=True)
class Way:
    """A backend by another path than the one it would choose."""

    backend: str
    variables: dict[str, str]
    """What its library reads in the environment."""


WAYS = {"ucx by tcp": Way("ucx", {"UCX_TLS": "tcp"})}
"""Between processes of one host UCX takes shared memory; to other hosts it may have TCP only."""


def transfer(name: str, asked: Asked) -> Finding:
    """Move bytes on each route of the backend that needs nothing but memory and disk."""
    way = WAYS.get(name)
    if way is not None:
        os.environ.update(way.variables)  # also for the second process
        try:
            return _transfer(way.backend, asked)
        finally:
            for variable in way.variables:
                del os.environ[variable]
    return _transfer(name, asked)


def _transfer(name: str, asked: Asked) -> Finding:
    factory = transfer_backends([name])[name]
    opened: list[TransferBackend] = []

    def make(completions: Completions) -> TransferBackend:
        opened.append(factory(completions))
        return opened[0]

    try:
        make(Completions())
    except Unsuitable as reason:
        return Finding(verdict=Verdict.ABSENT, says=str(reason))
    opened.pop().close()
    # The copy that says whether it works is closed: the agent opens its own.
    figures: dict[str, Figure] = {}
    failures: list[str] = []
    with Agent(backends={name: make}) as agent:
        reach = opened[0].reach
        describe = getattr(opened[0], "describe", None)
        says = [str(describe())] if describe is not None else []
        figures["routes"] = sorted(map(str, reach.routes))
        for route in sorted(reach.routes, key=str):
            try:
                speeds = _measure(agent, name, route, asked)
            except Exception as error:  # noqa: BLE001 - a route must not cost the others
                failures.append(f"{route}: {type(error).__name__}: {error}")
                continue
            if speeds is None:
                says.append(f"{route}: not measured here")
                continue
            for op, speed in speeds.items():
                figures[f"{op.value}_{str(route).replace(' ', '_').replace('-', '_')}_gb_s"] = speed
            parts = ", ".join(f"{op.value}s {speed} GB/s" for op, speed in speeds.items())
            says.append(f"{route}: {parts}")
    verdict = Verdict.FAILED if failures else Verdict.OK
    return Finding(verdict=verdict, says="; ".join(failures + says), figures=figures)


def move(
    agent: Agent,
    local: Region,
    remote: Region,
    nbytes: int,
    peer: Peer | None = None,
    ops: tuple[Op, ...] = (Op.WRITE, Op.READ),
) -> dict[Op, float]:
    """GB/s of the best of a few transfers of `nbytes` in each direction.

    Raises:
        OSError: a piece did not arrive; says why.
    """
    speeds = {}
    here, there = (
        [
            Descriptor(region, at, min(_PIECE_BYTES, nbytes - at))
            for at in range(0, nbytes, _PIECE_BYTES)
        ]
        for region in (local, remote)
    )
    for op in ops:
        prepared = agent.prepare(op, here, there, peer=peer)
        spent_s = []
        for _ in range(_ROUNDS):
            begin_s = time.perf_counter()
            prepared.post(deadline_s=_DEADLINE_S)
            prepared.wait()
            spent_s.append(time.perf_counter() - begin_s)
            failed = [outcome for outcome in prepared.outcomes() if not outcome.ok]
            if failed:
                raise OSError(f"{op.value}: {failed[0].detail or failed[0].status.value}")
        speeds[op] = in_gb_s(nbytes, min(spent_s))
    return speeds


def _measure(agent: Agent, name: str, route: Route, asked: Asked) -> dict[Op, float] | None:
    """None where the route needs what is not simply there: a GPU, a device, an object store."""
    nbytes = asked.sample_bytes(_SAMPLE_BYTES)
    if route.local is not RegionKind.DRAM:
        return None
    if route.remote is RegionKind.DRAM and not route.peer:
        with _memory(agent, nbytes) as local, _memory(agent, nbytes) as remote:
            return move(agent, local, remote, nbytes)
    if route.remote is RegionKind.DRAM and route.peer:
        with _memory(agent, nbytes) as local, _peer(agent, name, nbytes) as peer:
            return move(agent, local, peer.regions[0], nbytes, peer)
    if route.remote is RegionKind.FILE and not route.peer:
        with scratch(asked.folder) as folder, _memory(agent, nbytes) as local:
            remote = agent.register(str(folder / "transfer"), nbytes=nbytes)
            try:
                return move(agent, local, remote, nbytes)
            finally:
                agent.deregister(remote)
    return None


@contextmanager
def _memory(agent: Agent, nbytes: int) -> Iterator[Region]:
    with SharedPool(nbytes, prefault=False) as pool:
        pool.view(0, nbytes)[:] = bytes(nbytes)  # real before it is measured
        region = agent.register(pool)
        try:
            yield region
        finally:
            agent.deregister(region)


@contextmanager
def _peer(agent: Agent, name: str, nbytes: int) -> Iterator[Peer]:
    """An agent in a process of its own, which ends when its input does."""
    command = [sys.executable, "-P", "-m", "kvtier.doctor.peer", name, str(nbytes)]
    process: subprocess.Popen[Any] = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        said = process.stdout.readline().split()
        if len(said) != 2 or said[0] != b"metadata":
            raise OSError("the second process did not start")
        peer = agent.connect(bytes.fromhex(said[1].decode()))
        yield peer
        agent.disconnect(peer)
    finally:
        process.stdin.close()
        process.stdout.close()
        process.kill()
        process.wait(_DEADLINE_S)
