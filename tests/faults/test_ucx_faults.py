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

from .ucx_party import SLOTS, Party

SOON_S = 10.0  # far less than the deadline of what is then in flight
LONG_S = 50.0

NETWORK = pytest.param("tcp", False, id="network")
HOST_TCP = pytest.param("tcp", True, id="host-tcp")
HOST_COPY = pytest.param("posix,cma", True, id="host-cma")
HOST_EMULATED = pytest.param("posix", True, id="host-posix")
EVERY_WAY = pytest.mark.parametrize(
    ("tls", "on_host"), [NETWORK, HOST_TCP, HOST_COPY, HOST_EMULATED]
)
NEEDS_THE_PEER = pytest.mark.parametrize(  # the kernel copies from a stopped process as well
    ("tls", "on_host"), [NETWORK, HOST_TCP, HOST_EMULATED]
)
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
        else:
            assert end["whole_count"] == 0  # nothing was confirmed
        again = us.move(op, "peer")
        assert (again["codes"], again["whole_count"]) == ([errno.ECONNRESET], 0)


@NEEDS_THE_PEER
@BOTH_OPS
def test_a_stopped_peer_costs_no_more_than_the_deadline(
    tls: str, on_host: bool, op: str
) -> None:
    """Memory becomes quiet though the peer still stands, stays so when it goes on, and then the
    next transfer works."""
    with parties(2, tls) as (us, peer):
        us.meet(peer, "peer", on_host=on_host)
        peer.ask("fill", seed=1)
        ticket = us.start_and_see_it_run(op, "peer", 0.5)
        peer.stop()
        begin_s = time.monotonic()
        end = us.ask("wait", ticket=ticket)
        assert time.monotonic() - begin_s < SOON_S
        assert (end["codes"], end["short"]) == ([errno.ETIMEDOUT], 0)
        us.ask("wait_quiet", ticket=ticket)
        assert time.monotonic() - begin_s < SOON_S
        us.ask("wipe")
        peer.go_on()
        peer.ask("fill", seed=3)  # it runs again, and so does all that it had waiting
        every = list(range(SLOTS))
        assert us.move("write", "peer")["whole"] == every
        assert us.ask("is_all", value=0)
        peer.ask("fill", seed=3)
        assert us.move("read", "peer")["whole"] == every
        assert us.ask("differ", seed=3, of=every, inverse=False) == []


def test_the_kernel_copies_from_a_stopped_peer_as_well() -> None:
    with parties(2, "posix,cma") as (us, peer):
        us.meet(peer, "peer", on_host=True)
        peer.ask("fill", seed=1)
        us.move("read", "peer")  # they have met
        us.ask("wipe")
        peer.stop()
        assert us.move("read", "peer")["whole"] == list(range(SLOTS))
        peer.go_on()
        assert us.ask("differ", seed=1, of=range_list(), inverse=False) == []


@NEEDS_THE_PEER
def test_a_stopped_peer_holds_up_no_other(tls: str, on_host: bool) -> None:
    with parties(3, tls) as (us, stopped, other):
        us.meet(stopped, "stopped", on_host=on_host)
        us.meet(other, "other", on_host=on_host)
        other.ask("fill", seed=2)
        tickets = [us.start_and_see_it_run(op, "stopped", LONG_S) for op in ("read", "write")]
        stopped.stop()
        begin_s = time.monotonic()
        for _ in range(5):
            us.ask("wipe")
            assert us.move("read", "other", SOON_S)["whole"] == range_list()
            assert us.ask("differ", seed=2, of=range_list(), inverse=False) == []
            assert us.move("write", "other", SOON_S)["whole"] == range_list()
            other.ask("fill", seed=2)
        assert time.monotonic() - begin_s < LONG_S
        for ticket in tickets:
            us.ask("cancel", ticket=ticket)
            assert us.ask("wait", ticket=ticket)["codes"] == [errno.ECANCELED]
            us.ask("wait_quiet", ticket=ticket)


def test_a_reader_that_is_killed_leaves_its_source_usable() -> None:
    """In the middle of a read and of a write, by the network and on the host."""
    with parties(1, "tcp,posix,cma") as (source,):
        source.ask("fill", seed=1)
        for on_host in (False, True):
            for op in ("read", "write"):
                with parties(1, "tcp,posix,cma") as (reader,):
                    reader.meet(source, "source", on_host=on_host)
                    reader.start_and_see_it_run(op, "source", LONG_S)
                    reader.kill()
        with parties(1, "tcp,posix,cma") as (reader,):
            source.ask("fill", seed=1)
            for name, on_host in (("far", False), ("near", True)):
                reader.meet(source, name, on_host=on_host)
                assert reader.move("read", name)["whole"] == range_list()
                assert reader.ask("differ", seed=1, of=range_list(), inverse=False) == []


def range_list() -> list[int]:
    return list(range(SLOTS))
