"""Shared memory with peers that are real processes: what arrives, and what their end does."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import subprocess
import sys
from ast import literal_eval
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvtier._core import Completions
from kvtier.backends.shm import Imported, Link, ShmTransfers
from kvtier.shared_pool import SharedPool
from kvtier.testing.transfer_scene import Ends, bytes_at, dram
from kvtier.transfer import Op, Pieces, Side, Unsuitable
from kvtier.types import Region, RegionKind

NBYTES = 256 << 10
WAIT_S = 60.0

CHILD = """
import sys
import numpy as np
from kvtier._core import Completions
from kvtier.backends.shm import ShmTransfers
from kvtier.shared_pool import SharedPool
from kvtier.types import Region, RegionKind
nbytes = 256 << 10
pool = SharedPool(64 << 20, others_may_write=sys.argv[1] == "write", name="kvtier-peer")
backend = ShmTransfers(Completions())
def export(offset):
    region = Region(RegionKind.DRAM, pool.address + offset, nbytes)
    handle = backend.register(region, pool.view(offset, nbytes))
    return region.address, backend.export(handle)
def array(offset):
    return np.frombuffer(pool.view(offset, nbytes), np.uint8)
def fill(offset, value):
    np.frombuffer(pool.view(offset, nbytes), np.uint8)[:] = value
for line in sys.stdin:
    print(repr(eval(line)), flush=True)
"""


class Peer:
    """A process with a pool and a backend, which does what it is told."""

    def __init__(self, access: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", CHILD, access],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid

    def ask(self, expression: str) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(expression + "\n")
        self._process.stdin.flush()
        return literal_eval(self._process.stdout.readline())

    def export(self, offset: int) -> tuple[Region, bytes]:
        address, exported = self.ask(f"export({offset})")
        return Region(RegionKind.DRAM, address, NBYTES), exported

    def kill(self) -> None:
        if self._process.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
        self._process.wait(WAIT_S)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


@pytest.fixture
def peer() -> Iterator[Peer]:
    process = Peer("write")
    yield process
    process.kill()


@pytest.fixture
def silent_peer() -> Iterator[Peer]:
    """One that lets nobody write its pool."""
    process = Peer("read")
    yield process
    process.kill()


class Here:
    """Our side: a backend and one region of ordinary memory."""

    def __init__(self) -> None:
        completions = Completions()
        self.ends = Ends(completions)
        self.backend = ShmTransfers(completions)
        self.place = dram(NBYTES)
        self.local = self.backend.register(*self.place)
        self.bytes = bytes_at(self.place.region)
        self.tickets = 0

    def link(self, peer: Peer) -> Link:
        return self.backend.connect(peer.ask("backend.address()"), peer.pid)

    def prepare(self, op: Op, remote: Imported, link: Link) -> Any:
        which, offsets = np.zeros(1, np.uint32), np.zeros(1, np.uint64)
        lengths = np.array([NBYTES], np.uint64)
        pieces = Pieces(
            op, Side((self.local,), which, offsets), Side((remote,), which, offsets), lengths
        )
        return self.backend.prepare(pieces, link)

    def start(self, prepared: Any) -> list[int]:
        self.tickets += 1
        self.backend.start(prepared, self.tickets, WAIT_S)
        results: list[int] = self.ends.wait_quiet(self.tickets).results.tolist()
        return results


@pytest.fixture
def here() -> Iterator[Here]:
    ours = Here()
    yield ours
    ours.backend.close()


def mapped() -> int:
    """Mappings of peers' pools in this process."""
    return Path("/proc/self/maps").read_text().count("/memfd:kvtier-peer ")


def fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_bytes_go_both_ways(here: Here, peer: Peer) -> None:
    link = here.link(peer)
    remote = here.backend.import_region(link, *peer.export(NBYTES))
    peer.ask(f"fill({NBYTES}, 7)")
    assert here.start(here.prepare(Op.READ, remote, link)) == [NBYTES]
    assert (here.bytes == 7).all()
    here.bytes[:] = 9
    assert here.start(here.prepare(Op.WRITE, remote, link)) == [NBYTES]
    assert peer.ask(f"bool((array({NBYTES}) == 9).all())") is True
    assert peer.ask("bool((array(0) == 0).all())") is True


def test_a_look_needs_no_transfer(here: Here, peer: Peer) -> None:
    link = here.link(peer)
    remote = here.backend.import_region(link, *peer.export(0))
    peer.ask("fill(0, 7)")
    view = here.backend.view(remote)
    assert bytes(view) == b"\x07" * NBYTES
    view[:3] = b"abc"
    assert peer.ask("bytes(array(0)[:4])") == b"abc\x07"
    here.backend.deregister(remote)
    assert bytes(view[:4]) == b"abc\x07"


def test_regions_of_one_pool_share_a_mapping_that_goes_with_the_last(
    here: Here, peer: Peer
) -> None:
    link = here.link(peer)
    before = fds()
    handles = [here.backend.import_region(link, *peer.export(i * NBYTES)) for i in range(5)]
    handles.append(here.backend.import_region(here.link(peer), *peer.export(0)))
    assert (mapped(), fds()) == (1, before + 1)
    while len(handles) > 1:
        here.backend.deregister(handles.pop())
    assert mapped() == 1
    here.backend.deregister(handles.pop())
    assert (mapped(), fds()) == (0, before)


def test_a_pool_that_others_may_not_write_is_read_only_here(here: Here, silent_peer: Peer) -> None:
    link = here.link(silent_peer)
    remote = here.backend.import_region(link, *silent_peer.export(0))
    silent_peer.ask("fill(0, 7)")
    assert here.start(here.prepare(Op.READ, remote, link)) == [NBYTES]
    assert (here.bytes == 7).all()
    assert here.backend.view(remote).readonly
    with pytest.raises(Unsuitable, match="read-only"):
        here.prepare(Op.WRITE, remote, link)


def test_a_killed_peers_memory_stays_until_the_link_is_dropped(here: Here, peer: Peer) -> None:
    link = here.link(peer)
    remote = here.backend.import_region(link, *peer.export(0))
    other = peer.export(NBYTES)
    address = peer.ask("backend.address()")
    peer.ask("fill(0, 7)")
    prepared = here.prepare(Op.READ, remote, link)
    peer.kill()
    assert here.start(prepared) == [NBYTES]
    assert (here.bytes == 7).all()
    late = ShmTransfers(Completions())
    with pytest.raises(Unsuitable, match="cannot be opened"):
        late.import_region(link, *other)
    late.close()
    with pytest.raises(Unsuitable, match=f"process {peer.pid} is not to be seen"):
        here.backend.connect(address, peer.pid)
    here.backend.disconnect(link)
    assert here.start(prepared) == [-errno.ECONNRESET]
    here.backend.deregister(remote)
    del prepared
    assert mapped() <= 1  # a thread may be letting go of it at this moment


def test_another_process_under_the_same_number_is_noticed(here: Here, peer: Peer) -> None:
    kind, version, process, start_time = msgspec.msgpack.decode(peer.ask("backend.address()"))
    with pytest.raises(Unsuitable, match="another one by now"):
        here.backend.connect(
            msgspec.msgpack.encode([kind, version, process, start_time + 1]), peer.pid
        )


def test_peers_elsewhere_are_refused(here: Here, peer: Peer) -> None:
    address = peer.ask("backend.address()")
    with pytest.raises(Unsuitable, match="not a process of this host"):
        here.backend.connect(address, None)
    with pytest.raises(Unsuitable, match="another namespace"):
        here.backend.connect(address, os.getpid())
    other = here.backend.connect(here.backend.address(), os.getpid())
    with pytest.raises(Unsuitable, match=f"a region of process {peer.pid}"):
        here.backend.import_region(other, *peer.export(0))


def test_memory_outside_a_pool_is_not_exported(here: Here, peer: Peer) -> None:
    assert here.backend.export(here.local) == b""
    with pytest.raises(Unsuitable, match="no SharedPool"):
        here.backend.import_region(here.link(peer), Region(RegionKind.DRAM, 4096, NBYTES), b"")
    with SharedPool(4096) as pool:
        handle = here.backend.register(Region(RegionKind.DRAM, pool.address, 4096), None)
        assert here.backend.export(handle)
    assert here.backend.export(handle) == b""


def test_no_lie_about_a_pool_is_believed(here: Here, peer: Peer) -> None:
    """Each is refused with a reason, maps nothing and keeps no descriptor."""
    link = here.link(peer)
    region, exported = peer.export(0)
    names = "kind version process start_time fd device inode pool_bytes offset nbytes writable"
    true = dict(zip(names.split(), msgspec.msgpack.decode(exported), strict=True))
    before = fds()

    def refused(reason: str, **lies: Any) -> None:
        with pytest.raises(Unsuitable, match=reason):
            here.backend.import_region(
                link, region, msgspec.msgpack.encode(list({**true, **lies}.values()))
            )

    refused("another file", fd=0)  # a pipe, which opening would disturb
    refused("cannot be opened", fd=9999)
    refused("another file", inode=true["inode"] + 1)
    refused("another file", device=true["device"] + 1)
    refused("expected", pool_bytes=true["pool_bytes"] + 4096)
    refused("of a pool of", offset=true["pool_bytes"])
    refused("not understood", offset=-4096)
    refused("not understood", fd="0/../../1/fd/0")
    refused("not the region's", nbytes=NBYTES + 1)
    refused("a region of process", process=os.getpid())
    refused("version 2", version=2)
    for make in ("os.memfd_create('x', 2)", "os.open('/tmp', 0o20200002, 0o600)"):
        fd = peer.ask(f"[os := __import__('os'), fd := {make}, os.ftruncate(fd, 1 << 20)] and fd")
        status = os.stat(f"/proc/{peer.pid}/fd/{fd}")
        refused(
            r"not sealed|no shared memory",
            fd=fd,
            device=status.st_dev,
            inode=status.st_ino,
            pool_bytes=1 << 20,
        )
    assert (mapped(), fds()) == (0, before)
    here.backend.deregister(here.backend.import_region(link, region, exported))


def test_a_pool_that_could_shrink_is_refused(here: Here) -> None:
    """Its end would end us with a bus error."""
    with SharedPool(1 << 20) as pool:
        handle = here.backend.register(Region(RegionKind.DRAM, pool.address, 4096), None)
        exported = msgspec.msgpack.decode(here.backend.export(handle))
    fd = os.memfd_create("x", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 1 << 20)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    status = os.fstat(fd)
    exported[4:7] = [fd, status.st_dev, status.st_ino]
    link = here.backend.connect(here.backend.address(), os.getpid())
    with pytest.raises(Unsuitable, match="could shrink"):
        here.backend.import_region(
            link, Region(RegionKind.DRAM, 4096, 4096), msgspec.msgpack.encode(exported)
        )
    os.close(fd)
