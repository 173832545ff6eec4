"""What agents say to each other, who is lost, what races leave, and the same for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from toy_agents import WAIT_S, Bench, heard, until

from kvtier import aio
from kvtier.agent import Agent
from kvtier.errors import BackendUnavailable
from kvtier.metadata import (
    MESSAGE_BYTES_MAX,
    PAYLOAD_BYTES_MAX,
    Hello,
    decode_metadata,
    encode_message,
    encode_metadata,
)
from kvtier.peers import Notification, NotificationKind
from kvtier.types import Region, Status


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    for toy in bench.toys:
        toy.gate.set()
    for agent in bench.agents:
        agent.close()


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
