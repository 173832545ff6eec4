"""Agents in processes of their own that are killed, stopped, restarted, and parted with.

Whatever happens: an end by the deadline, never OK for bytes that did not arrive, and memory that is
free again once nothing can touch it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from agent_process import AgentProcess, digest, make_memory, pattern

from kvtier import Agent, NotificationKind, Op, Peer, Status, Transfer, TransferTimeout
from kvtier.backends.shm import ShmTransfers

NBYTES = 32 << 20
PIECE = 64 << 10
DEADLINE_S = 3.0
GRACE_S = 1.5  # a shared machine may be late, but not without bound
WAIT_S = 20.0


@dataclass(frozen=True)
class Way:
    """A backend, and what memory and settings it is used with."""

    backend: str
    shared: bool
    environment: dict[str, str]


WAYS = {
    "shm": Way("shm", True, {}),
    "ucx": Way("ucx", False, {"UCX_TLS": "posix,cma,self"}),
    "ucx-tcp": Way("ucx", False, {"UCX_TLS": "tcp,self"}),
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    return WAYS[request.param]


@pytest.fixture
def agent(way: Way, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    for name, value in way.environment.items():
        monkeypatch.setenv(name, value)
    with Agent("here") as agent:
        yield agent


@pytest.fixture
def child(way: Way) -> Iterator[AgentProcess]:
    with AgentProcess("there", way.environment) as child:
        child.ask("register", nbytes=NBYTES, shared=way.shared, seed=2)
        yield child


def until(condition: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < ends_s, "it did not come to be"
        time.sleep(0.001)


def tables(local: int, remote: int) -> tuple[Any, Any]:
    """All of both regions, in shuffled pieces on one side."""
    count = NBYTES // PIECE
    here = np.empty((count, 3), np.uint64)
    here[:] = (local, 0, PIECE)
    there = here.copy()
    there[:, 0] = remote
    here[:, 1] = np.arange(count) * PIECE
    there[:, 1] = np.random.default_rng(7).permutation(count) * PIECE
    return here, there


def moved(source: Any, there: Any) -> bytes:
    """What a READ of `tables` makes of the source."""
    order = (there[:, 1] // PIECE).astype(np.int64)
    return bytes(np.frombuffer(source, np.uint8).reshape(-1, PIECE)[order])


def prepared(agent: Agent, way: Way, child: AgentProcess, op: Op) -> tuple[Peer, Transfer, Any]:
    source, ours = make_memory(NBYTES, way.shared, 1)
    region = agent.register(source)
    peer = agent.connect(child.metadata())
    until(lambda: peer.connected)
    here, there = tables(region.number, peer.regions[0].number)
    return peer, agent.prepare(op, here, there, peer, backend=way.backend), ours


@pytest.mark.parametrize("op", list(Op))
def test_bytes_arrive_whole(agent: Agent, way: Way, child: AgentProcess, op: Op) -> None:
    _, transfer, ours = prepared(agent, way, child, op)
    _, there = tables(0, 0)
    transfer.post(DEADLINE_S)
    assert transfer.wait()
    assert transfer.ok, transfer.failure
    if op is Op.READ:
        assert bytes(ours) == moved(pattern(NBYTES, 2), there)
    else:
        back = np.empty((NBYTES // PIECE, PIECE), np.uint8)
        back[(there[:, 1] // PIECE).astype(np.int64)] = pattern(NBYTES, 1).reshape(-1, PIECE)
        assert child.ask("digest", index=0) == digest(back)


@pytest.mark.parametrize("op", list(Op))
def test_a_peer_killed_in_the_middle_ends_the_transfer_and_frees_the_memory(
    agent: Agent, way: Way, child: AgentProcess, op: Op
) -> None:
    peer, transfer, _ = prepared(agent, way, child, op)
    killer = threading.Timer(0.05, child.kill)
    killer.start()
    while peer.alive:  # postings without a gap, so that the end comes in the middle of one
        began_s = time.monotonic()
        transfer.post(DEADLINE_S)
        assert transfer.wait()
        assert time.monotonic() - began_s < DEADLINE_S + GRACE_S
        until(lambda: agent.progress() is not None and transfer.is_quiet)
    killer.join()
    transfer.post(DEADLINE_S)
    assert transfer.wait(1.0)
    assert {o.status for o in transfer.outcomes()} == {Status.FAILED}
    assert all("untouched" in o.detail for o in transfer.outcomes())
    assert [n.kind for n in agent.notifications()] == [NotificationKind.LOST]
    agent.deregister(transfer.held[0].region, WAIT_S)


def test_bytes_said_to_have_arrived_have_arrived_though_the_peer_is_killed(
    agent: Agent, way: Way, child: AgentProcess
) -> None:
    _, transfer, ours = prepared(agent, way, child, Op.READ)
    _, there = tables(0, 0)
    want = np.frombuffer(moved(pattern(NBYTES, 2), there), np.uint8).reshape(-1, PIECE)
    got = np.frombuffer(ours, np.uint8).reshape(-1, PIECE)
    killer = threading.Timer(0.05, child.kill)
    killer.start()
    began_s = time.monotonic()
    while True:
        ours[:] = bytes(NBYTES)
        transfer.post(DEADLINE_S)
        assert transfer.wait()
        until(lambda: agent.progress() is not None and transfer.is_quiet)
        if not transfer.ok or time.monotonic() - began_s > DEADLINE_S:
            break  # memory that is shared outlives its process
    killer.join()
    for index, outcome in enumerate(transfer.outcomes()):
        if outcome.ok:
            assert np.array_equal(got[index], want[index])
        elif "untouched" in outcome.detail:
            assert not got[index].any()


@pytest.mark.parametrize("op", list(Op))
def test_a_stopped_peer_costs_no_more_than_the_deadline(
    agent: Agent, way: Way, child: AgentProcess, op: Op
) -> None:
    _, transfer, ours = prepared(agent, way, child, op)
    _, there = tables(0, 0)
    child.stop()
    for _ in range(3):
        began_s = time.monotonic()
        transfer.post(0.5)
        assert transfer.wait()
        assert time.monotonic() - began_s < 0.5 + GRACE_S
        if not transfer.is_quiet:
            break
        if transfer.ok and op is Op.READ:  # one side alone can do it where memory is shared
            assert bytes(ours) == moved(pattern(NBYTES, 2), there)
    child.resume()
    until(lambda: agent.progress() is not None and transfer.is_quiet)
    agent.deregister(transfer.held[0].region, WAIT_S)


def test_a_stopped_peer_holds_up_no_other(agent: Agent, way: Way, child: AgentProcess) -> None:
    _, stuck, _ = prepared(agent, way, child, Op.READ)
    with AgentProcess("third", way.environment) as third:
        third.ask("register", nbytes=NBYTES, shared=way.shared, seed=2)
        _, free, ours = prepared(agent, way, third, Op.READ)
        child.stop()
        stuck.post(DEADLINE_S)
        for _ in range(3):
            free.post(DEADLINE_S)
            assert free.wait()
            assert free.ok, free.failure
        _, there = tables(0, 0)
        assert bytes(ours) == moved(pattern(NBYTES, 2), there)
        assert stuck.wait()
        child.resume()
        until(lambda: agent.progress() is not None and stuck.is_quiet)


@pytest.mark.parametrize("op", list(Op))
def test_who_uses_our_memory_and_is_killed_gives_it_back(
    agent: Agent, way: Way, child: AgentProcess, op: Op
) -> None:
    region = agent.register(make_memory(NBYTES, way.shared, 1)[0])
    child.ask("connect", metadata=agent.metadata().hex())
    here, there = tables(0, region.number)
    child.ask(
        "prepare",
        op=op.value,
        local=here.tolist(),
        remote=there.tolist(),
        peer=0,
        backend=way.backend,
    )
    child.ask("again_and_again", transfer=0, deadline_s=DEADLINE_S)
    time.sleep(0.1)  # some postings, so that the end comes in the middle of one
    child.kill()
    agent.deregister(region, WAIT_S)
    said = agent.notifications()
    assert [(n.peer, n.kind) for n in said] == [("there", NotificationKind.LOST)]


def test_memory_that_a_stopped_peer_may_touch_is_kept_until_it_has_spoken(
    agent: Agent, way: Way, child: AgentProcess
) -> None:
    region = agent.register(make_memory(NBYTES, way.shared, 1)[0])
    child.ask("connect", metadata=agent.metadata().hex())
    here, there = tables(0, region.number)
    child.ask("prepare", op="write", local=here.tolist(), remote=there.tolist(), peer=0)
    child.ask("again_and_again", transfer=0, deadline_s=DEADLINE_S)
    time.sleep(0.1)  # as above
    child.stop()
    with pytest.raises(TransferTimeout, match="1 peers"):
        agent.deregister(region, 0.3)
    child.resume()
    agent.deregister(region, WAIT_S)


def test_metadata_of_a_process_that_restarted_do_not_reach_the_new_one(
    agent: Agent, way: Way
) -> None:
    with AgentProcess("there", way.environment) as first:
        first.ask("register", nbytes=NBYTES, shared=way.shared, seed=2)
        stale = first.metadata()
        early = agent.connect(stale)
        until(lambda: early.connected)
        first.kill()
        until(lambda: not early.alive)
    with AgentProcess("there", way.environment) as second:
        second.ask("register", nbytes=NBYTES, shared=way.shared, seed=3)
        before = second.ask("digest", index=0)
        late = agent.connect(stale)
        until(lambda: not late.alive)
        assert "cannot connect" in late.lost
        region = agent.register(make_memory(NBYTES, way.shared, 1)[0])
        fresh = agent.connect(second.metadata())
        assert fresh.agent != early.agent
        here, there = tables(region.number, fresh.regions[0].number)
        transfer = agent.prepare(Op.READ, here, there, fresh, backend=way.backend)
        transfer.post(DEADLINE_S)
        assert transfer.wait()
        assert transfer.ok, transfer.failure
        assert second.ask("digest", index=0) == before


def test_a_peer_that_lets_a_region_go_is_not_touched_there_any_more(
    agent: Agent, way: Way, child: AgentProcess
) -> None:
    peer, transfer, _ = prepared(agent, way, child, Op.WRITE)
    transfer.post(DEADLINE_S)
    assert transfer.wait()
    assert child.ask("deregister", index=0, timeout_s=WAIT_S) == ""
    after = child.ask("digest", index=0)
    transfer.post(DEADLINE_S)
    assert transfer.wait()
    assert not transfer.ok
    assert "withdrawn" in transfer.failure
    assert peer.regions == ()
    assert child.ask("digest", index=0) == after


def test_peers_that_die_leave_no_descriptor_behind(agent: Agent, way: Way) -> None:
    region = agent.register(make_memory(NBYTES, way.shared, 1)[0])
    counts: list[int] = []
    for _ in range(4):
        with AgentProcess("there", way.environment) as child:
            child.ask("register", nbytes=NBYTES, shared=way.shared, seed=2)
            peer = agent.connect(child.metadata())
            until(lambda peer=peer: peer.connected)  # type: ignore[misc]  # bound early on purpose
            here, there = tables(region.number, peer.regions[0].number)
            transfer = agent.prepare(Op.READ, here, there, peer, backend=way.backend)
            transfer.post(DEADLINE_S)
            child.kill()
            assert transfer.wait()
            until(lambda peer=peer: not peer.alive)  # type: ignore[misc]  # bound early on purpose
            until(lambda t=transfer: agent.progress() is not None and t.is_quiet)  # type: ignore[misc]
            del transfer
        counts.append(len(os.listdir("/proc/self/fd")))
    until(lambda: len(os.listdir("/proc/self/fd")) <= counts[0])
    shm = agent._backends["shm"]
    assert isinstance(shm, ShmTransfers)
    assert shm._attached == {}
