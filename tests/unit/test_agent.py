"""The agent's own behaviour, with a backend that moves bytes in this process and stops on command."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest

from kvtier import aio
from kvtier._core import Completions
from kvtier.agent import Agent
from kvtier.errors import BackendUnavailable, Closed, ConfigError, TransferTimeout
from kvtier.metadata import (
    MESSAGE_BYTES_MAX,
    PAYLOAD_BYTES_MAX,
    Hello,
    decode_metadata,
    encode_message,
    encode_metadata,
)
from kvtier.peers import Notification, NotificationKind, Peer
from kvtier.transfer import BlockingTransfers, Op, Pieces, Reach, Results, Route, Stop, Unsuitable
from kvtier.transfers import Transfer
from kvtier.types import Descriptor, Region, RegionKind, Status

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


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    for toy in bench.toys:
        toy.gate.set()
    for agent in bench.agents:
        agent.close()


# ---- regions


def test_memory_of_every_kind_is_registered(bench: Bench) -> None:
    import torch

    tensor = torch.zeros(10, dtype=torch.float32)
    for source, nbytes in (
        (bytearray(100), 100),
        (np.zeros((3, 4), np.float32), 48),
        (tensor, 40),
        (memoryview(b"abc"), 3),
        ((tensor.data_ptr(), 40), 40),
    ):
        region = bench.one.register(source)
        assert (region.kind, region.nbytes) == (DRAM, nbytes)
        bench.one.deregister(region)


@pytest.mark.parametrize(
    ("source", "word"),
    [
        (b"", "0 bytes"),
        (np.zeros((4, 4))[:, ::2], "gaps"),
        (3.5, "no buffer"),
        ((0, 10), "address"),
        ((1 << 63, 10), "address"),
        (("a", 1), "not \\(address, bytes\\)"),
        ("/no/such/file", "absent"),
        ("/tmp", "folder"),
    ],
)
def test_what_is_no_region_is_refused(bench: Bench, source: Any, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        bench.one.register(source)


def test_a_place_that_nothing_serves_is_refused_with_each_reason(
    bench: Bench, tmp_path: Path
) -> None:
    with pytest.raises(BackendUnavailable, match="toy: memory only"):
        bench.one.register(tmp_path / "file", nbytes=10)


def test_a_buffer_stays_alive_while_it_is_registered(bench: Bench) -> None:
    region = bench.one.register(bytearray(b"x" * 100))
    target = bytearray(100)
    into = bench.one.register(target)
    move = bench.one.prepare(Op.READ, [Descriptor(into, 0, 100)], [Descriptor(region, 0, 100)])
    move.post(WAIT_S)
    assert move.wait()
    assert target == b"x" * 100


def test_a_backend_that_does_not_work_here_is_named_with_its_reason() -> None:
    def missing(completions: Completions) -> Toy:
        raise Unsuitable("libtoy.so is not installed")

    def broken(completions: Completions) -> Toy:
        raise RuntimeError("third party")

    with Agent(backends={"toy": Toy, "missing": missing, "broken": broken}) as agent:
        found = agent.backends()
        assert found["toy"] == ""
        assert found["missing"] == "libtoy.so is not installed"
        assert "third party" in found["broken"]
    with pytest.raises(ConfigError, match="nonesuch"):
        Agent(backends=["nonesuch"])


def test_a_region_in_use_is_not_let_go(bench: Bench) -> None:
    peer = bench.connected()
    write = bench.write(peer)
    bench.toys[0].gate.clear()
    write.post(WAIT_S)
    with pytest.raises(TransferTimeout, match="1 transfers"):
        bench.one.deregister(bench.regions[0], timeout_s=0.05)
    bench.toys[0].gate.set()
    bench.one.deregister(bench.regions[0], timeout_s=WAIT_S)
    write.post(WAIT_S)
    assert write.wait()
    assert all("withdrawn" in outcome.detail for outcome in write.outcomes())
    with pytest.raises(ValueError, match="not registered here"):
        bench.write(peer)
    with pytest.raises(ValueError, match="not registered"):
        bench.one.deregister(bench.regions[0])


def test_a_peer_is_waited_for_before_a_region_goes(bench: Bench) -> None:
    peer = bench.connected()
    write = bench.write(peer)
    bench.toys[0].gate.clear()
    write.post(WAIT_S)
    bench.toys[0].reached.wait(WAIT_S)
    with pytest.raises(TransferTimeout, match="1 peers"):
        bench.two.deregister(bench.regions[1], timeout_s=0.1)
    bench.toys[0].gate.set()
    bench.two.deregister(bench.regions[1], timeout_s=WAIT_S)
    assert write.wait()
    assert write.ok
    write.post(WAIT_S)
    assert write.wait()
    assert not write.ok
    assert peer.regions == ()
    assert bench.toys[0].handles == 1  # its own region; the peer's was given back


def test_metadata_from_before_a_region_went_do_not_reach_it(bench: Bench) -> None:
    early = bench.two.metadata()
    bench.two.deregister(bench.regions[1])
    peer = bench.one.connect(early)
    until(lambda: peer.connected)
    assert peer.regions == ()
    table = np.array([[0, 0, 100]], np.uint64)
    with pytest.raises(ValueError, match="remote: there is no region 0"):
        bench.one.prepare(Op.WRITE, table, table, peer)


# ---- prepare


def test_what_cannot_be_prepared_is_refused(bench: Bench) -> None:
    peer = bench.connected()
    constant = bench.one.register(b"constant")
    here, there = Descriptor(bench.regions[0], 0, 8), Descriptor(peer.regions[0], 0, 8)
    with pytest.raises(ValueError, match="read-only"):
        bench.one.prepare(Op.READ, [Descriptor(constant, 0, 8)], [there], peer)
    with pytest.raises(ValueError, match="bytes there"):
        bench.one.prepare(Op.READ, [here], [Descriptor(peer.regions[0], 0, 9)], peer)
    with pytest.raises(BackendUnavailable, match="no transfer backend 'ucx'"):
        bench.one.prepare(Op.READ, [here], [there], peer, backend="ucx")


def test_a_transfer_without_a_peer_is_between_own_regions(bench: Bench) -> None:
    other = bytearray(1 << 16)
    region = bench.one.register(other)
    table = np.array([[bench.regions[0].number, 0, 1 << 16]], np.uint64)
    into = np.array([[region.number, 0, 1 << 16]], np.uint64)
    move = bench.one.prepare(Op.WRITE, table, into)
    move.post(WAIT_S)
    assert move.wait()
    assert other == bench.memory[0].tobytes()


def test_what_no_backend_can_is_refused_with_the_reasons(tmp_path: Path) -> None:
    with Agent(backends={"toy": lambda c: Toy(c, alignment=64)}) as agent:
        a, b = agent.register(bytearray(1000)), agent.register(bytearray(1000))
        with pytest.raises(BackendUnavailable, match="toy: needs multiples of 64"):
            agent.prepare(Op.READ, [Descriptor(a, 8, 64)], [Descriptor(b, 0, 64)])


def test_the_quickest_backend_is_taken_first_by_promise_then_by_measure() -> None:
    with Agent(
        backends={
            "boaster": lambda c: Toy(c, latency_s=1e-6),
            "honest": lambda c: Toy(c, latency_s=1e-3),
        }
    ) as agent:
        a, b = agent.register(bytearray(1000)), agent.register(bytearray(1000))

        def prepare() -> Transfer:
            return agent.prepare(Op.READ, [Descriptor(a, 0, 900)], [Descriptor(b, 0, 900)])

        first = prepare()
        assert first.backend == "boaster"
        assert "not measured yet" in first.reason
        boaster = agent._backends["boaster"]
        assert isinstance(boaster, Toy)
        boaster.gate.clear()
        first.post(WAIT_S)
        time.sleep(0.02)  # what it costs, to be measured
        boaster.gate.set()
        assert first.wait()
        second = prepare()
        assert second.backend == "honest"
        assert "boaster" in second.reason
        assert "measured" in second.reason


# ---- post and its end


def test_bytes_arrive_and_each_descriptor_says_so(bench: Bench) -> None:
    write = bench.write(bench.connected())
    write.post(WAIT_S)
    assert write.wait()
    assert [(o.status, o.nbytes) for o in write.outcomes()] == [(Status.OK, 1000)] * 3
    assert write.overwritten() == []
    for at in (0, 2000, 4000):
        assert bytes(bench.memory[1][at : at + 1000]) == bytes(bench.memory[0][at : at + 1000])
    assert not bench.memory[1][5000:].any()
    assert write.progress() == 3000


def test_a_prepared_transfer_is_posted_again_and_again(bench: Bench) -> None:
    write = bench.write(bench.connected())
    for turn in range(20):
        bench.memory[0][0] = turn
        write.post(WAIT_S)
        assert write.wait()
        assert bench.memory[1][0] == turn


def test_a_running_transfer_is_not_posted_twice(bench: Bench) -> None:
    write = bench.write(bench.connected())
    bench.toys[0].gate.clear()
    write.post(WAIT_S)
    with pytest.raises(ValueError, match="running"):
        write.post(WAIT_S)
    with pytest.raises(ValueError, match="has not ended"):
        write.outcomes()
    assert not write.wait(0.01)
    bench.toys[0].gate.set()
    assert write.wait()


def test_nothing_is_prepared_for_a_peer_that_cannot_be_reached(bench: Bench) -> None:
    metadata = msgspec.structs.replace(decode_metadata(bench.two.metadata()), unix="kvtier-nobody")
    peer = bench.one.connect(encode_metadata(metadata))
    until(lambda: not peer.alive)
    table = np.array([[0, 0, 100]], np.uint64)
    with pytest.raises(BackendUnavailable, match="cannot connect"):
        bench.one.prepare(Op.WRITE, table, table, peer)
    assert peer.regions == ()
    assert heard(bench.one)[0].kind is NotificationKind.LOST


def test_a_peer_that_does_not_answer_costs_no_more_than_the_deadline(bench: Bench) -> None:
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind("\0kvtier-test-mute-" + os.urandom(8).hex())
        mute.listen()
        name = mute.getsockname()[1:].decode()
        changed = msgspec.structs.replace(decode_metadata(bench.two.metadata()), unix=name)
        peer = bench.one.connect(encode_metadata(changed))
        write = bench.write(peer)
        began_s = time.monotonic()
        write.post(0.2)
        assert write.wait()
        assert 0.1 < time.monotonic() - began_s < 2.0
        assert write.outcomes()[0].status is Status.RETRY


@pytest.mark.parametrize("deadline_s", [0.0, -1.0, float("-inf")])
def test_a_deadline_in_the_past_moves_nothing(bench: Bench, deadline_s: float) -> None:
    write = bench.write(bench.connected())
    write.post(deadline_s)
    assert write.wait()
    assert {o.status for o in write.outcomes()} == {Status.RETRY}
    assert all("untouched" in o.detail for o in write.outcomes())
    assert not bench.memory[1].any()
    with pytest.raises(ValueError, match="not a number"):
        write.post(float("nan"))


def test_a_hung_move_ends_by_its_deadline_and_is_quiet_only_later(bench: Bench) -> None:
    write = bench.write(bench.connected())
    toy = bench.toys[0]
    toy.heeds_stop = False
    toy.gate.clear()
    write.post(0.1)
    assert write.wait()
    assert [o.status for o in write.outcomes()] == [Status.RETRY] * 3
    assert write.overwritten() == [0, 1, 2]
    assert "may be overwritten" in write.outcomes()[0].detail
    assert not write.is_quiet
    with pytest.raises(ValueError, match="still touch"):
        write.post(1.0)
    with pytest.raises(TransferTimeout):
        bench.one.deregister(bench.regions[0], timeout_s=0.05)
    toy.gate.set()
    until(lambda: write.done() and bench.one.progress() is not None and write.is_quiet)
    bench.one.deregister(bench.regions[0])


def test_cancel_ends_a_running_and_a_waiting_transfer(bench: Bench) -> None:
    write = bench.write(bench.connected())
    bench.toys[0].gate.clear()
    write.post(WAIT_S)
    bench.toys[0].reached.wait(WAIT_S)
    write.cancel()
    assert write.wait(2.0)
    assert {o.status for o in write.outcomes()} == {Status.RETRY}
    write.cancel()  # over: nothing happens
    assert "ECANCELED" in write.outcomes()[0].detail


def test_one_broken_piece_spoils_no_other_descriptor(bench: Bench) -> None:
    write = bench.write(bench.connected())
    bench.toys[0].error_at = {1: errno.ENOSPC}
    write.post(WAIT_S)
    assert write.wait()
    assert [o.status for o in write.outcomes()] == [Status.OK, Status.FAILED, Status.OK]
    assert "ENOSPC" in write.outcomes()[1].detail
    assert write.overwritten() == [1]


def test_bytes_in_flight_are_bounded_and_the_rest_waits_its_turn() -> None:
    toys: list[Toy] = []

    def make(completions: Completions) -> Toy:
        toys.append(Toy(completions))
        return toys[0]

    with Agent(backends={"toy": make}, in_flight_bytes_max=1000) as agent:
        a, b = agent.register(bytearray(4000)), agent.register(bytearray(4000))
        moves = [
            agent.prepare(Op.READ, [Descriptor(a, 900 * i, 900)], [Descriptor(b, 900 * i, 900)])
            for i in range(4)
        ]
        toys[0].gate.clear()
        for move in moves:
            move.post(WAIT_S)
        until(toys[0].reached.is_set)
        assert [move.state.value for move in moves] == ["running"] + ["waiting"] * 3
        moves[3].cancel()
        assert moves[3].done()
        toys[0].gate.set()
        assert all(move.wait() for move in moves)
        assert [move.ok for move in moves] == [True, True, True, False]


def test_a_backend_that_breaks_its_word_is_not_waited_for(bench: Bench) -> None:
    peer = bench.connected()
    write = bench.write(peer)
    bench.toys[0].start = lambda *_: None  # type: ignore[method-assign]  # never says anything
    write.post(0.1)
    assert write.wait(10.0)
    assert "did not answer" in write.failure
    assert not write.is_quiet
    bench.one._completions.push_quiet(write.ticket)


def test_the_eventfd_is_readable_from_an_end_until_progress(bench: Bench) -> None:
    write = bench.write(bench.connected())
    bench.one.progress()
    poll = select.poll()
    poll.register(bench.one.fileno(), select.POLLIN)
    assert poll.poll(0) == []
    write.post(WAIT_S)
    assert poll.poll(WAIT_S * 1e3)
    until(write.done)
    assert bench.one.progress() == [write]
    assert poll.poll(0) == []


def test_several_threads_post_and_wait_at_once(bench: Bench) -> None:
    peer = bench.connected()
    failures: list[BaseException] = []

    def work(lane: int) -> None:
        try:
            span = [Descriptor(bench.regions[0], 8000 * lane, 8000)]
            into = [Descriptor(peer.regions[0], 8000 * lane, 8000)]
            move = bench.one.prepare(Op.WRITE, span, into, peer)
            for _ in range(100):
                move.post(WAIT_S)
                assert move.wait(WAIT_S)
                assert move.ok
        except BaseException as error:  # noqa: BLE001 - shown by the test
            failures.append(error)

    threads = [threading.Thread(target=work, args=(lane,)) for lane in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert failures == []
    assert bytes(bench.memory[1][:48000]) == bytes(bench.memory[0][:48000])


# ---- peers


def test_a_notification_comes_after_the_bytes(bench: Bench) -> None:
    write = bench.write(bench.connected())
    write.post(WAIT_S, notify=b"layer 3")
    (said,) = heard(bench.two)
    assert said == Notification("one", b"layer 3")
    assert bytes(bench.memory[1][:1000]) == bytes(bench.memory[0][:1000])


def test_a_failure_is_a_notification_too(bench: Bench) -> None:
    write = bench.write(bench.connected())
    bench.toys[0].error_at = {0: errno.EIO}
    write.post(WAIT_S, notify=b"layer 3")
    (said,) = heard(bench.two)
    assert (said.kind, said.payload) == (NotificationKind.FAILED, b"layer 3")
    assert said.detail


def test_words_of_their_own_keep_their_order(bench: Bench) -> None:
    peer = bench.one.connect(bench.two.metadata())
    sent = [i.to_bytes(4, "little") for i in range(2000)]
    for payload in sent:
        bench.one.send(peer, payload)
    assert [said.payload for said in heard(bench.two, 2000)] == sent
    with pytest.raises(ValueError, match="at most"):
        bench.one.send(peer, bytes(PAYLOAD_BYTES_MAX + 1))


def test_a_peer_that_closes_is_lost_to_both_sides(bench: Bench) -> None:
    peer = bench.connected()
    write = bench.write(peer)
    bench.two.close()
    (said,) = heard(bench.one)
    assert (said.peer, said.kind) == ("two", NotificationKind.LOST)
    assert not peer.alive
    write.post(WAIT_S)
    assert write.wait()
    assert "the peer is gone" in write.failure
    with pytest.raises(BackendUnavailable, match="gone"):
        bench.one.send(peer, b"")
    assert bench.toys[0].links == 0


def test_the_other_side_hears_of_the_loss_too(bench: Bench) -> None:
    bench.connected()
    bench.one.close()
    (said,) = heard(bench.two)
    assert (said.peer, said.kind) == ("one", NotificationKind.LOST)


def test_a_peer_that_was_parted_from_comes_back_as_another(bench: Bench) -> None:
    peer = bench.connected()
    bench.one.disconnect(peer)
    until(lambda: not peer.alive)
    again = bench.one.connect(bench.two.metadata())
    assert again is not peer
    write = bench.write(again)
    write.post(WAIT_S)
    assert write.wait()
    assert write.ok


def test_newer_metadata_update_a_peer_and_older_are_refused(bench: Bench) -> None:
    old = bench.two.metadata()
    peer = bench.connected()
    more = bench.two.register(bytearray(10))
    assert bench.one.connect(bench.two.metadata()) is peer
    assert peer.region(more.number).nbytes == 10
    with pytest.raises(ValueError, match="generation"):
        bench.one.connect(old)
    with pytest.raises(ValueError, match="own metadata"):
        bench.one.connect(bench.one.metadata())


def test_metadata_of_an_agent_that_is_gone_reach_nobody(bench: Bench) -> None:
    stale = bench.two.metadata()
    with bench.agent("two") as restarted:
        fresh = decode_metadata(restarted.metadata())
        # as if the restarted one listened where the old one did
        mixed = msgspec.structs.replace(decode_metadata(stale), unix=fresh.unix)
        peer = bench.one.connect(encode_metadata(mixed))
        until(lambda: not peer.alive)
    assert "refused" in peer.lost or "gone" in peer.lost


def test_whoever_does_not_have_the_token_is_refused(bench: Bench) -> None:
    wrong = msgspec.structs.replace(decode_metadata(bench.two.metadata()), token=b"?" * 16)
    peer = bench.one.connect(encode_metadata(wrong))
    until(lambda: not peer.alive)
    assert bench.two.notifications() == []


@pytest.mark.parametrize(
    "noise",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 100,
        (MESSAGE_BYTES_MAX + 1).to_bytes(4, "little"),
        b"\x02\x00\x00\x00\x91\x04",
        encode_message(Hello("x", b"a" * 16, b"b" * 16, b"c" * 16)) * 2,
    ],
)
def test_noise_on_the_socket_ends_that_connection_only(bench: Bench, noise: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(WAIT_S)
        stranger.connect("\0" + decode_metadata(bench.two.metadata()).unix)
        stranger.sendall(noise)
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(4096):
                pass
    write = bench.write(bench.connected())
    write.post(WAIT_S)
    assert write.wait()
    assert write.ok


def test_who_does_not_fetch_notifications_is_sent_no_more_and_loses_none() -> None:
    two = Agent("two", backends={}, notifications_max=10)
    with Agent("one", backends={}) as one, two:
        peer = one.connect(two.metadata())
        for i in range(5000):
            one.send(peer, i.to_bytes(4, "little") * 100)
        until(lambda: len(two._notifications) >= 10)
        time.sleep(0.05)
        assert len(two._notifications) < 5000
        assert [said.payload[:4] for said in heard(two, 5000)] == [
            i.to_bytes(4, "little") for i in range(5000)
        ]


def test_agents_meet_over_tcp_too() -> None:
    with (
        Agent("one", backends={}) as one,
        Agent("two", backends={}, listen="127.0.0.1:0") as two,
    ):
        far = msgspec.structs.replace(decode_metadata(two.metadata()), host=b"elsewhere-------")
        peer = one.connect(encode_metadata(far))
        assert peer.host_pid is None
        one.send(peer, b"hello")
        assert heard(two)[0].payload == b"hello"
    for wrong in ("0.0.0.0:0", "localhost:1", "127.0.0.1", ":0"):
        with pytest.raises(ValueError, match="listen"):
            Agent(backends={}, listen=wrong)


# ---- the end


def test_close_ends_what_runs_and_comes_back_in_time(bench: Bench) -> None:
    write = bench.write(bench.connected())
    bench.toys[0].gate.clear()
    write.post(WAIT_S)
    began_s = time.monotonic()
    bench.one.close()
    assert time.monotonic() - began_s < 3.0
    assert write.done()
    assert not write.ok
    bench.one.close()
    with pytest.raises(Closed):
        write.post(1.0)
    with pytest.raises(Closed):
        bench.one.register(bytearray(1))
    with pytest.raises(Closed):
        bench.one.connect(bench.two.metadata())


def test_a_thousand_failures_leave_no_thread_and_no_descriptor(bench: Bench) -> None:
    peer = bench.connected()
    write = bench.write(peer)
    write.post(WAIT_S)
    assert write.wait()
    dead = msgspec.structs.replace(decode_metadata(bench.two.metadata()), unix="kvtier-nobody")
    lost = [
        encode_metadata(msgspec.structs.replace(dead, agent=os.urandom(16))) for _ in range(300)
    ]

    def count() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    before = count()
    bench.toys[0].error_at = {0: errno.EIO, 1: errno.EIO, 2: errno.EIO}
    for metadata in lost:
        write.post(WAIT_S)
        assert write.wait()
        write.post(-1.0)
        assert write.wait()
        write.post(WAIT_S)
        write.cancel()
        assert write.wait()
        gone = bench.one.connect(metadata)
        until(lambda gone=gone: not gone.alive)  # type: ignore[misc]  # bound early on purpose
    until(lambda: all(now <= then for now, then in zip(count(), before, strict=True)))
    assert len(bench.one._peers) == 1
    assert bench.one._postings._running == {}
    assert bench.toys[0].links == 1


# ---- asyncio


def test_ends_and_notifications_are_awaited(bench: Bench) -> None:
    async def both() -> tuple[list[Status], list[bytes]]:
        peer = bench.one.connect(bench.two.metadata())
        writes = [bench.write(peer) for _ in range(5)]
        for i, write in enumerate(writes):
            write.post(WAIT_S, notify=bytes([i]))
        ended = await asyncio.gather(*(aio.finish(bench.one, write) for write in writes))
        payloads = []
        async for said in aio.notifications(bench.two):
            payloads.append(said.payload)
            if len(payloads) == 5:
                break
        return [outcome.status for outcomes in ended for outcome in outcomes], sorted(payloads)

    statuses, payloads = asyncio.run(asyncio.wait_for(both(), WAIT_S))
    assert set(statuses) == {Status.OK}
    assert payloads == [bytes([i]) for i in range(5)]


def test_an_end_that_another_thread_saw_first_is_awaited_too(bench: Bench) -> None:
    write = bench.write(bench.connected())
    stop = threading.Event()

    def snoop() -> None:
        while not stop.is_set():
            bench.one.progress()

    thread = threading.Thread(target=snoop)
    thread.start()

    async def finish() -> None:
        for _ in range(100):
            write.post(WAIT_S)
            await aio.finish(bench.one, write)

    try:
        asyncio.run(asyncio.wait_for(finish(), WAIT_S))
    finally:
        stop.set()
        thread.join()


def test_a_cancelled_task_cancels_its_transfer(bench: Bench) -> None:
    write = bench.write(bench.connected())
    bench.toys[0].gate.clear()

    async def give_up() -> None:
        write.post(WAIT_S)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(aio.finish(bench.one, write), 0.05)

    asyncio.run(give_up())
    assert write.wait(5.0)
    assert {o.status for o in write.outcomes()} == {Status.RETRY}


# ---- races


def test_a_peer_lost_while_a_transfer_is_prepared_leaves_no_link(bench: Bench) -> None:
    peer = bench.connected()
    toy = bench.toys[0]
    connect = toy.connect

    def lose_it_meanwhile(address: bytes, host_pid: int | None) -> Any:
        link = connect(address, host_pid)
        bench.two.close()
        until(lambda: not peer.alive)
        return link

    toy.connect = lose_it_meanwhile  # type: ignore[method-assign]
    with pytest.raises(BackendUnavailable, match="lost"):
        bench.write(peer)
    assert (toy.links, toy.handles) == (0, 1)


def test_a_region_withdrawn_while_a_transfer_is_prepared_leaves_no_handle(bench: Bench) -> None:
    peer = bench.connected()
    toy = bench.toys[0]
    take = toy.import_region

    def withdraw_it_meanwhile(link: Any, region: Region, exported: bytes) -> int:
        handle = take(link, region, exported)
        bench.two.deregister(bench.regions[1], WAIT_S)
        return handle

    toy.import_region = withdraw_it_meanwhile  # type: ignore[method-assign]
    with pytest.raises(BackendUnavailable, match="withdrawn"):
        bench.write(peer)
    assert toy.handles == 1
