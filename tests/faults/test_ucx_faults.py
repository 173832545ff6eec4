"""Peers over UCX that are killed, stopped and lied about, in processes of their own.

A party's region is 32 MiB in slots; a transfer moves all of them in shuffled order, once, or so
often that it is certainly under way when something happens to its peer.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from ucx_party import SLOTS, Party

SOON_S = 10.0  # far less than the deadline of what is then in flight
LONG_S = 50.0
ALL = list(range(SLOTS))
RESIDENT_MAX = (
    8 << 20
)  # bytes that may come with use, of buffers that are filled as they are needed

NETWORK = pytest.param("tcp", False, id="network")
HOST = pytest.param("tcp,cma", True, id="host")
EVERY_WAY = pytest.mark.parametrize(("tls", "on_host"), [NETWORK, HOST])
BOTH_OPS = pytest.mark.parametrize("op", ["read", "write"])


@contextlib.contextmanager
def parties(count: int, tls: str) -> Iterator[list[Party]]:
    with ExitStack() as stack:
        begun = [Party(UCX_TLS=tls) for _ in range(count)]
        yield [stack.enter_context(party) for party in begun]


@EVERY_WAY
def test_shuffled_slots_arrive_byte_for_byte(tls: str, on_host: bool) -> None:
    with parties(2, tls) as (us, peer):
        us.meet(peer, "peer", on_host=on_host)
        every = list(range(SLOTS))
        peer.ask("fill", seed=1)
        end = us.move("read", "peer")
        assert (end["whole"], end["codes"], end["is_quiet"]) == (every, [], True)
        assert us.ask("differ", seed=1, of=every, inverse=False) == []
        us.ask("fill", seed=2)
        peer.ask("wipe")
        assert us.move("write", "peer")["whole"] == every
        assert peer.ask("differ", seed=2, of=every, inverse=True) == []


@EVERY_WAY
@BOTH_OPS
def test_a_killed_peer_ends_its_transfers_at_once(tls: str, on_host: bool, op: str) -> None:
    """And what is said to have arrived has arrived."""
    with parties(2, tls) as (us, peer):
        us.meet(peer, "peer", on_host=on_host)
        peer.ask("fill", seed=1)
        ticket = us.start_and_see_it_run(op, "peer", LONG_S)
        begin_s = time.monotonic()
        peer.kill()
        end = us.ask("wait", ticket=ticket)
        us.ask("wait_quiet", ticket=ticket)
        assert time.monotonic() - begin_s < SOON_S
        assert (end["codes"], end["short"]) == ([errno.ECONNRESET], 0)
        assert end["whole_count"] < end["started"] < end["count"]
        assert end["detail"]
        if op == "read":
            assert us.ask("differ", seed=1, of=end["whole"], inverse=False) == []
        again = us.move(op, "peer")
        assert (again["codes"], again["whole_count"]) == ([errno.ECONNRESET], 0)


@BOTH_OPS
def test_a_stopped_peer_costs_no_more_than_the_deadline(op: str) -> None:
    """What was read is quiet at once; what was written when the peer has said that it dropped the
    rest, for it may have some. Then nothing changes any more, and the next transfer works."""
    with parties(2, "tcp") as (us, peer):
        us.meet(peer, "peer", on_host=False)
        peer.ask("fill", seed=1)
        ticket = us.start_and_see_it_run(op, "peer", 1.0)
        peer.stop()
        begin_s = time.monotonic()
        end = us.ask("wait", ticket=ticket)
        assert time.monotonic() - begin_s < SOON_S
        assert (end["codes"], end["short"]) == ([errno.ETIMEDOUT], 0)
        assert us.ask("is_quiet", ticket=ticket) == (op == "read")
        us.ask("wipe")
        peer.go_on()
        us.ask("wait_quiet", ticket=ticket)
        peer.ask("wipe")
        assert us.move("write", "peer")["whole"] == ALL
        assert us.ask("is_all", value=0)
        assert peer.ask("is_all", value=0)
        peer.ask("fill", seed=3)
        assert us.move("read", "peer")["whole"] == ALL
        assert us.ask("differ", seed=3, of=ALL, inverse=False) == []


def test_the_kernel_copies_from_and_to_a_stopped_peer_as_well() -> None:
    with parties(2, "tcp,cma") as (us, peer):
        us.meet(peer, "peer", on_host=True)
        peer.ask("fill", seed=1)
        peer.stop()
        assert us.move("read", "peer")["whole"] == ALL
        assert us.ask("differ", seed=1, of=ALL, inverse=False) == []
        us.ask("fill", seed=2)
        assert us.move("write", "peer")["whole"] == ALL
        peer.go_on()
        assert peer.ask("differ", seed=2, of=ALL, inverse=True) == []


def test_a_stopped_peer_holds_up_no_other() -> None:
    with parties(3, "tcp,cma") as (us, stopped, other):
        us.meet(stopped, "stopped", on_host=False)
        us.meet(other, "far", on_host=False)
        us.meet(other, "near", on_host=True)
        tickets = [us.start_and_see_it_run(op, "stopped", LONG_S) for op in ("read", "write")]
        stopped.stop()
        begin_s = time.monotonic()
        for name in ("far", "near", "far", "near"):
            other.ask("fill", seed=2)
            assert us.move("read", name, SOON_S)["whole"] == ALL
            assert us.ask("differ", seed=2, of=ALL, inverse=False) == []
            us.ask("fill", seed=3)
            assert us.move("write", name, SOON_S)["whole"] == ALL
            assert other.ask("differ", seed=3, of=ALL, inverse=True) == []
        assert time.monotonic() - begin_s < LONG_S
        for ticket in tickets:
            us.ask("cancel", ticket=ticket)
            assert us.ask("wait", ticket=ticket)["codes"] == [errno.ECANCELED]
        us.ask("leave", name="stopped")  # given up, so there is nobody to be quiet for
        for ticket in tickets:
            us.ask("wait_quiet", ticket=ticket)


def test_a_cancelled_write_is_quiet_once_the_peer_has_dropped_the_rest() -> None:
    with parties(2, "tcp") as (us, peer):
        us.meet(peer, "peer", on_host=False)
        us.ask("fill", seed=2)
        for _ in range(3):
            ticket = us.start_and_see_it_run("write", "peer", LONG_S)
            us.ask("cancel", ticket=ticket)
            us.ask("wait_quiet", ticket=ticket)
            peer.ask("wipe")
            assert us.move("read", "peer")["whole"] == ALL  # whatever was on its way has come
            assert peer.ask("is_all", value=0)
            us.ask("fill", seed=2)


def test_a_reader_that_is_killed_leaves_its_source_usable() -> None:
    """In the middle of reads and of writes, by the network and on the host."""
    with parties(1, "tcp,cma") as (source,):
        for on_host, op, count in (
            (False, "read", 3),
            (False, "write", 3),
            (True, "read", 1),
            (True, "write", 1),
        ):
            for _ in range(count):
                with parties(1, "tcp,cma") as (reader,):
                    reader.meet(source, "source", on_host=on_host)
                    reader.start_and_see_it_run(op, "source", LONG_S)
                    reader.kill()
        with parties(1, "tcp,cma") as (reader,):
            source.ask("fill", seed=1)
            for name, on_host in (("far", False), ("near", True)):
                reader.meet(source, name, on_host=on_host)
                assert reader.move("read", name)["whole"] == ALL
                assert reader.ask("differ", seed=1, of=ALL, inverse=False) == []


@EVERY_WAY
def test_a_thousand_failures_leave_nothing_behind(tls: str, on_host: bool) -> None:
    with parties(2, tls) as (us, peer):
        us.meet(peer, "peer", on_host=on_host)
        us.move("read", "peer")
        us.ask("fail_often", offer=peer.offer, peer="peer", on_host=on_host, count=20)
        before = [party.ask("held") for party in (us, peer)]
        us.ask("fail_often", offer=peer.offer, peer="peer", on_host=on_host, count=200)
        assert us.move("read", "peer")["whole"] == ALL
        # Peers take a moment to see that a connection is gone.
        assert us.ask("wait_until_held", before=before[0], resident_max=RESIDENT_MAX) == ""
        assert peer.ask("wait_until_held", before=before[1], resident_max=RESIDENT_MAX) == ""
