"""What the UCX backend promises beside moving bytes: what it refuses, and what it leaves alone."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier._core import Completions
from kvtier.backends.ucx import SETTINGS, UcxTransfers
from kvtier.testing.transfer_scene import Ends, dram
from kvtier.transfer import Op, Pieces, Side, Unsuitable
from kvtier.types import Region, RegionKind

REGION_BYTES = 1 << 20


class Two:
    """Two backends of this process; the first reaches the second's region as one elsewhere."""

    def __init__(self) -> None:
        completions = Completions()
        self.ends = Ends(completions)
        self.ours, self.peer = UcxTransfers(completions), UcxTransfers(Completions())
        self.places = [dram(REGION_BYTES) for _ in range(2)]
        self.local = self.ours.register(*self.places[0])
        self.theirs = self.peer.register(*self.places[1])
        self.link = self.ours.connect(self.peer.address(), None)
        self.exported = self.peer.export(self.theirs)
        self.remote = self.ours.import_region(self.link, self.places[1].region, self.exported)
        self.tickets = 0

    def move(self, op: Op, offset: int = 0, nbytes: int = 4096) -> Any:
        """Start one piece; gives its end."""
        which, at = np.zeros(1, np.uint32), np.zeros(1, np.uint64)
        pieces = Pieces(
            op,
            Side((self.local,), which, at),
            Side((self.remote,), which, at + np.uint64(offset)),
            np.array([nbytes], np.uint64),
        )
        self.tickets += 1
        self.ours.start(self.ours.prepare(pieces, self.link), self.tickets, 20.0)
        return self.ends.wait_quiet(self.tickets)

    def close(self) -> None:
        self.ours.close()
        self.peer.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[Two]:
    two = Two()
    yield two
    two.close()


@pytest.fixture
def two() -> Iterator[Two]:
    two = Two()
    yield two
    two.close()


def test_it_says_which_ucx_it_is_and_what_that_can_use(shared: Two) -> None:
    said = shared.ours.describe()
    assert said.startswith("UCX 1.")
    assert "libucp.so" in said
    assert any(each.startswith("tcp/") for each in shared.ours.transports)


def test_rdma_that_is_required_and_absent_is_a_reason() -> None:
    with pytest.raises(Unsuitable, match="no RDMA device"):
        UcxTransfers(Completions(), rdma="required")


def test_a_window_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="a window of nothing"):
        UcxTransfers(Completions(), window_bytes=0)
    with pytest.raises(ValueError, match="messages of 1073741824 bytes"):
        UcxTransfers(Completions(), message_bytes_max=1 << 30)


@pytest.mark.parametrize("what", ["address", "export"])
def test_damaged_bytes_are_refused(shared: Two, what: str) -> None:
    """However they are damaged: no byte can change, be left out or be added."""
    whole = shared.peer.address() if what == "address" else shared.exported

    def use(foreign: bytes) -> None:
        if what == "address":
            shared.ours.connect(foreign, None)
        else:
            shared.ours.import_region(shared.link, shared.places[1].region, foreign)

    def take(foreign: bytes) -> None:
        with pytest.raises(Unsuitable, match=r"\w"):
            use(foreign)

    @settings(max_examples=300, deadline=None)
    @given(st.data())
    def refused(data: st.DataObject) -> None:
        damaged = bytearray(whole)
        for _ in range(data.draw(st.integers(1, 4))):
            at = data.draw(st.integers(0, len(damaged) - 1))
            kind = data.draw(st.sampled_from(["flip", "cut", "insert", "drop"]))
            if kind == "flip":
                damaged[at] ^= data.draw(st.integers(1, 255))
            elif kind == "cut":
                del damaged[at + 1 :]
            elif kind == "insert":
                damaged[at:at] = data.draw(st.binary(min_size=1, max_size=8))
            elif len(damaged) > 1:
                del damaged[at]
        if bytes(damaged) != whole:
            take(bytes(damaged))

    refused()
    take(shared.exported if what == "address" else shared.peer.address())
    take(b"")
    take(os.urandom(1 << 20))
    assert shared.move(Op.READ).results.tolist() == [4096]


def test_a_key_of_another_region_is_refused(shared: Two) -> None:
    region = shared.places[1].region
    other = Region(RegionKind.DRAM, region.address + 4096, region.nbytes)
    with pytest.raises(Unsuitable, match="the key is of"):
        shared.ours.import_region(shared.link, other, shared.exported)


def test_an_address_of_another_process_is_refused(shared: Two) -> None:
    with pytest.raises(Unsuitable, match="process"):
        shared.ours.connect(shared.peer.address(), os.getppid())


def test_peers_whose_segments_do_not_fit_are_refused() -> None:
    """UCX would hang, or worse, on a message that is longer than what its receiver reads."""
    small = {"TCP_TX_SEG_SIZE": "8k", "TCP_RX_SEG_SIZE": "64kb"}
    ours = UcxTransfers(Completions())
    peer = UcxTransfers(Completions(), settings=small)
    try:
        for one, other in ((ours, peer), (peer, ours)):
            with pytest.raises(Unsuitable, match="TCP segments"):
                one.connect(other.address(), None)
    finally:
        ours.close()
        peer.close()


@pytest.mark.parametrize("op", [Op.READ, Op.WRITE])
def test_memory_that_the_peer_has_deregistered_is_out_of_reach(two: Two, op: Op) -> None:
    """Its engine looks at every address, so no stale key can end that process."""
    assert two.move(op).results.tolist() == [4096]
    two.peer.deregister(two.theirs)
    end = two.move(op)
    assert end.results.tolist() == [-errno.EREMOTEIO]
    assert "refused" in end.detail


@pytest.mark.parametrize("op", [Op.READ, Op.WRITE])
def test_bytes_beyond_the_region_are_out_of_reach(two: Two, op: Op) -> None:
    for offset in (REGION_BYTES - 4095, REGION_BYTES, (1 << 64) - 4096, 1 << 63):
        end = two.move(op, offset=offset)
        assert end.results.tolist() == [-errno.ERANGE]
    assert two.move(op, offset=REGION_BYTES - 4096).results.tolist() == [4096]


def test_a_read_only_region_is_read_and_not_written(two: Two) -> None:
    region, memory = dram(REGION_BYTES)
    readable = two.peer.register(region, memory.toreadonly())
    exported = two.peer.export(readable)
    two.remote = two.ours.import_region(two.link, region, exported)
    assert two.move(Op.READ).results.tolist() == [4096]
    with pytest.raises(Unsuitable, match="read-only"):
        two.move(Op.WRITE)
    two.local = two.ours.register(Region(RegionKind.DRAM, *_of(memory)), memory.toreadonly())
    with pytest.raises(Unsuitable, match="read-only"):
        two.move(Op.READ)


def _of(memory: memoryview) -> tuple[int, int]:
    return int(np.frombuffer(memory, np.uint8).ctypes.data), memory.nbytes


def _printed(script: str, **environment: str) -> list[str]:
    """What a process of its own prints that imports the backend first."""
    begin = "import os\nfrom kvtier._core import Completions\n"
    begin += "from kvtier.backends.ucx import UcxTransfers\n"
    done = subprocess.run(
        [sys.executable, "-P", "-c", begin + script],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout.split()


def test_loading_ucx_leaves_the_environment_and_signals_alone() -> None:
    script = """
import ctypes, signal
libc = ctypes.CDLL(None)
libc.getenv.restype = ctypes.c_char_p
before = dict(os.environ)
handled = open("/proc/self/status").read().split("SigCgt:")[1].split()[0]
backend = UcxTransfers(Completions())
after = open("/proc/self/status").read().split("SigCgt:")[1].split()[0]
print(before == dict(os.environ), libc.getenv(b"UCX_LOG_LEVEL"), libc.getenv(b"UCX_DEBUG_SIGNO"))
print(handled == after)
backend.close()
"""
    assert _printed(script) == ["True", "None", "None", "True"]


def test_the_users_settings_win() -> None:
    script = f"""
backend = UcxTransfers(Completions())
print([backend._setting_bytes(name) for name in {[*SETTINGS][:2]}])
print(sorted({{each.split("/")[0] for each in backend.transports}}))
backend.close()
"""
    told = _printed(script, UCX_TLS="tcp,self", UCX_TCP_TX_SEG_SIZE="16K")
    assert " ".join(told) == "[16384, 1114112] ['self', 'tcp']"


def test_a_library_that_is_none_is_a_reason() -> None:
    script = """
from kvtier.transfer import Unsuitable
try:
    UcxTransfers(Completions())
except Unsuitable as reason:
    print(reason)
"""
    told = " ".join(_printed(script, KVTIER_UCX_LIBRARY="/nowhere/libucp.so"))
    assert told.startswith("no usable UCX library: /nowhere/libucp.so")
