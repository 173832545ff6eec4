from __future__ import annotations

import fcntl
import gc
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvtier.errors import BackendUnavailable, Closed
from kvtier.shared_pool import (
    HugePages,
    SharedPool,
    find_pool,
    free_huge_bytes,
    receive_pool,
    send_pool,
)

PAGE = 4096
WAIT_S = 60.0
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@contextmanager
def other_process(code: str) -> Iterator[tuple[subprocess.Popen[bytes], socket.socket]]:
    """Runs `code` with a Unix socket to us as `peer`; it is ended if it does not end."""
    here, there = socket.socketpair()
    here.settimeout(WAIT_S)
    lines = (
        "import socket",
        "from kvtier.shared_pool import *",
        f"peer = socket.socket(fileno={there.fileno()})",
        "peer.settimeout(60)",
        code,
    )
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", "\n".join(lines)], pass_fds=[there.fileno()]
    )
    there.close()
    try:
        yield process, here
        assert process.wait(WAIT_S) in (0, -signal.SIGKILL)
    finally:
        here.close()
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            process.wait(WAIT_S)


def memfd(nbytes: int, seals: int) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def fds() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def mapped(name: str) -> int:
    """How many mappings of memfds of that name this process has."""
    return Path("/proc/self/maps").read_text().count(f"/memfd:{name} ")


# ---- allocation


def test_runs_are_whole_pages_of_the_pool() -> None:
    with SharedPool(8 * PAGE, prefault=False) as pool:
        first, second = pool.allocate(1), pool.allocate(PAGE + 1)
        assert (first, second) == (0, PAGE)
        assert (pool.used_bytes, pool.capacity_bytes) == (3 * PAGE, 8 * PAGE)
        assert pool.allocate(6 * PAGE) is None
        pool.free(0)
        assert pool.used_bytes == 2 * PAGE
        with pytest.raises(ValueError, match="nothing is allocated"):
            pool.free(0)
        with pytest.raises(ValueError, match="at least 1"):
            pool.allocate(0)


def test_a_pool_is_aligned_and_says_what_it_lies_on() -> None:
    with SharedPool(PAGE, huge_pages=HugePages.NEVER) as pool:
        assert pool.address % (2 << 20) == 0
        assert pool.pages == "ordinary pages"
        assert (pool.region.address, pool.region.nbytes) == (pool.address, PAGE)


def test_huge_pages_are_taken_if_there_are_any_and_else_named_in_the_refusal() -> None:
    nbytes = 32 << 20
    if free_huge_bytes() >= nbytes:
        with SharedPool(nbytes) as pool:
            assert (pool.pages, pool.capacity_bytes) == ("2 MiB pages", nbytes)
            pool.view(0, 3)[:] = b"abc"
            with SharedPool.attach(pool.fd) as other:
                assert (other.pages, bytes(other.view(0, 3))) == ("2 MiB pages", b"abc")
        with SharedPool(nbytes, huge_pages=HugePages.NEVER) as pool:
            assert pool.pages == "ordinary pages"
    else:
        with SharedPool(nbytes) as pool:
            assert pool.pages == "ordinary pages"
        with pytest.raises(BackendUnavailable, match="no shared memory of 33554432 bytes"):
            SharedPool(nbytes, huge_pages=HugePages.REQUIRED)


def test_a_pool_of_nothing_or_too_much_is_refused() -> None:
    before = fds()
    with pytest.raises(ValueError, match="at least 1"):
        SharedPool(0)
    with pytest.raises(BackendUnavailable, match="no shared memory"):
        SharedPool(1 << 62)
    assert fds() == before


def test_a_view_is_the_memory_itself() -> None:
    with SharedPool(4 * PAGE) as pool:
        view = pool.view(PAGE, 5)
        view[:] = b"hello"
        assert bytes(pool.view(PAGE - 1, 7)) == b"\0hello\0"
        with pytest.raises(ValueError, match="of a slab of"):
            pool.view(4 * PAGE, 1)
        assert np.frombuffer(view, np.uint8).ctypes.data == pool.address + PAGE


# ---- attaching


def test_what_is_attached_is_the_same_memory() -> None:
    with SharedPool(4 * PAGE) as pool, SharedPool.attach(pool.fd) as other:
        pool.view(PAGE, 3)[:] = b"abc"
        assert bytes(other.view(PAGE, 3)) == b"abc"
        pool.view(PAGE, 3)[:] = b"xyz"
        assert bytes(other.view(PAGE, 3)) == b"xyz"
        assert other.address != pool.address


def test_an_attached_pool_is_read_only_unless_asked_for() -> None:
    with SharedPool(PAGE) as pool:
        with SharedPool.attach(pool.fd) as other:
            view = other.view(0, 1)
            assert view.readonly
            with pytest.raises(TypeError, match="read-only"):
                view[:] = b"x"
            assert not np.frombuffer(view, np.uint8).flags.writeable
        with SharedPool.attach(pool.fd, is_writable=True) as other:
            other.view(0, 1)[:] = b"x"
        assert bytes(pool.view(0, 1)) == b"x"


def test_a_pool_that_others_may_not_write_is_kept_so_by_the_kernel() -> None:
    with SharedPool(PAGE, others_may_write=False) as pool:
        pool.view(0, 1)[:] = b"x"
        with pytest.raises(BackendUnavailable, match="writable"):
            SharedPool.attach(pool.fd, is_writable=True)
        with pytest.raises(OSError, match="not permitted"):
            os.pwrite(pool.fd, b"y", 0)
        with SharedPool.attach(pool.fd) as other:
            assert (bytes(other.view(0, 1)), other.others_may_write) == (b"x", False)


def test_only_the_maker_allocates() -> None:
    with SharedPool(PAGE) as pool, SharedPool.attach(pool.fd, is_writable=True) as other:
        with pytest.raises(ValueError, match="process that made it"):
            other.allocate(1)
        assert (pool.is_owner, other.is_owner) == (True, False)


def test_foreign_descriptors_are_refused() -> None:
    before = fds()
    read, write = os.pipe()
    with tempfile.TemporaryFile() as file:
        file.truncate(PAGE)
        device = os.open("/dev/zero", os.O_RDWR)
        foreign = [
            read,
            file.fileno(),
            device,
            memfd(PAGE, 0),
            memfd(PAGE, fcntl.F_SEAL_SHRINK),
            memfd(PAGE, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW),
            memfd(0, SEALS),
            memfd(PAGE + 1, SEALS),
        ]
        for fd in foreign:
            with pytest.raises(ValueError, match=r"descriptor|no pool"):
                SharedPool.attach(fd)
        with pytest.raises(ValueError, match="no shared memory"):
            SharedPool.attach(10**6)
    for fd in (*foreign[3:], read, write, device):
        os.close(fd)
    assert fds() == before


def test_a_pool_of_another_size_than_said_is_refused() -> None:
    with SharedPool(PAGE) as pool:
        with pytest.raises(ValueError, match="4096 bytes, 8192 expected"):
            SharedPool.attach(pool.fd, nbytes=2 * PAGE)
        SharedPool.attach(pool.fd, nbytes=PAGE).close()


def test_a_pool_can_neither_shrink_nor_grow_nor_be_unsealed() -> None:
    with SharedPool(2 * PAGE) as pool:
        for nbytes in (0, PAGE, 3 * PAGE):
            with pytest.raises(OSError, match="not permitted"):
                os.ftruncate(pool.fd, nbytes)
        with pytest.raises(OSError, match="not permitted"):
            fcntl.fcntl(pool.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


# ---- life


def test_views_outlive_the_pool() -> None:
    with SharedPool(PAGE) as pool:
        view = pool.view(0, 3)
        view[:] = b"abc"
        other = SharedPool.attach(pool.fd)
    seen = other.view(0, 3)
    other.close()
    del other, pool
    gc.collect()
    assert bytes(view) == bytes(seen) == b"abc"


def test_a_closed_pool_says_so() -> None:
    pool = SharedPool(PAGE)
    offset = pool.allocate(1)
    pool.close()
    pool.close()
    assert offset == 0
    pool.free(offset)
    for use in (lambda: pool.fd, lambda: pool.allocate(1), lambda: pool.view(0, 1)):
        with pytest.raises(Closed):
            use()


def test_pools_leave_neither_descriptors_nor_mappings() -> None:
    before = fds()
    for turn in range(20):
        pool = SharedPool(PAGE, name="leaky")
        other = SharedPool.attach(pool.fd)
        pool.view(0, 1)[:] = b"x"
        if turn % 2:  # the others are closed by being forgotten
            pool.close()
            other.close()
    del pool, other
    assert fds() == before
    assert mapped("leaky") == 0


def test_the_pool_of_an_address_is_found_while_it_is_open() -> None:
    with SharedPool(2 * PAGE) as pool, SharedPool(PAGE) as second:
        assert find_pool(pool.address + 5, 100) is pool
        assert find_pool(pool.address, 2 * PAGE) is pool
        assert find_pool(second.address, PAGE) is second
        assert find_pool(pool.address, 2 * PAGE + 1) is None
        assert find_pool(pool.address - 1, 2) is None
        address = pool.address
    assert find_pool(address, 1) is None


# ---- other processes


def test_another_process_sees_and_changes_the_same_bytes() -> None:
    code = """
with receive_pool(peer, is_writable=True) as pool:
    assert bytes(pool.view(4096, 5)) == b"hello"
    pool.view(8192, 5)[:] = b"world"
    peer.send(b"done")
    assert peer.recv(1) == b"."
    assert bytes(pool.view(4096, 5)) == b"later"
"""
    with SharedPool(4 * PAGE) as pool, other_process(code) as (_, peer):
        pool.view(PAGE, 5)[:] = b"hello"
        send_pool(peer, pool)
        assert peer.recv(4) == b"done"
        assert bytes(pool.view(2 * PAGE, 5)) == b"world"
        pool.view(PAGE, 5)[:] = b"later"
        peer.send(b".")


def test_a_pool_outlives_its_killed_maker() -> None:
    code = """
pool = SharedPool(4 << 20)
pool.view(1 << 20, 5)[:] = b"hello"
send_pool(peer, pool)
peer.recv(1)
"""
    with other_process(code) as (process, peer), receive_pool(peer) as pool:
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait(WAIT_S) == -signal.SIGKILL
        assert bytes(pool.view(1 << 20, 5)) == b"hello"
        whole = np.frombuffer(pool.view(0, pool.capacity_bytes), np.uint8)
        assert int(whole.sum(dtype=np.int64)) == sum(b"hello")


def test_what_is_no_pool_is_refused_and_its_descriptors_are_closed() -> None:
    here, there = socket.socketpair()
    here.settimeout(WAIT_S)
    with here, there, SharedPool(PAGE) as pool:
        before = fds()
        socket.send_fds(there, [b"kvtier pool 1"], [pool.fd, pool.fd])
        with pytest.raises(ValueError, match="2 descriptors"):
            receive_pool(here)
        socket.send_fds(there, [b"something els"], [pool.fd])
        with pytest.raises(ValueError, match="something els"):
            receive_pool(here)
        socket.send_fds(there, [b"kvtier pool 1"], [there.fileno()])
        with pytest.raises(ValueError, match="no shared memory"):
            receive_pool(here)
        there.close()
        with pytest.raises(ValueError, match="0 descriptors"):
            receive_pool(here)
        assert fds() == before - 1


def test_a_silent_other_side_is_a_timeout() -> None:
    here, there = socket.socketpair()
    with here, there:
        here.settimeout(0.01)
        with pytest.raises(TimeoutError):
            receive_pool(here)


def wait_until_real(pool: SharedPool) -> None:
    ends_s = time.monotonic() + WAIT_S
    while pool.prefaulted_bytes < pool.capacity_bytes:
        assert time.monotonic() < ends_s
        time.sleep(0.001)


def test_prefaulting_makes_the_memory_real_and_changes_no_byte() -> None:
    with SharedPool(16 << 20) as pool:
        whole = np.frombuffer(pool.view(0, 16 << 20), np.uint32)
        whole[:] = np.arange(len(whole), dtype=np.uint32)
        wait_until_real(pool)
        assert os.fstat(pool.fd).st_blocks * 512 == 16 << 20
        with SharedPool.attach(pool.fd) as other:
            wait_until_real(other)
            # Meanwhile the maker's thread may be copying the pages into huge ones.
            for seen in (pool, other):
                right = np.arange(len(whole), dtype=np.uint32)
                assert (np.frombuffer(seen.view(0, 16 << 20), np.uint32) == right).all()


def test_attaching_an_empty_pool_makes_nothing_real() -> None:
    with SharedPool(1 << 40, prefault=False) as pool, SharedPool.attach(pool.fd) as other:
        assert bytes(other.view(1 << 39, 1)) == b"\0"
        assert other.prefaulted_bytes == 0
        assert os.fstat(pool.fd).st_blocks * 512 <= 4 << 20
