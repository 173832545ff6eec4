"""Regions, transfers and their ends, with a backend that moves bytes in this process and stops on command."""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from toy_agents import DRAM, WAIT_S, Bench, Toy, heard, until

from kvtier._core import Completions
from kvtier.agent import Agent
from kvtier.errors import BackendUnavailable, Closed, ConfigError, TransferTimeout
from kvtier.metadata import (
    decode_metadata,
    encode_metadata,
)
from kvtier.peers import NotificationKind
from kvtier.transfer import Op, Unsuitable
from kvtier.transfers import Transfer
from kvtier.types import Descriptor, Status


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
