"""Memory that processes of one host share: what a chunk in it costs another process is a look.

A `SharedPool` is a memfd, sealed so that it can neither shrink nor grow: whoever maps it reads
memory, never a bus error. Its owner allocates; others get the descriptor over a socket or out of
`/proc` and attach. It outlives its owner for as long as somebody has it mapped.
"""

from __future__ import annotations

import array
import contextlib
import enum
import fcntl
import os
import socket
import stat
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from kvtier._core import Slab
from kvtier.errors import BackendUnavailable, Closed
from kvtier.types import ALIGN_BYTES, Region, RegionKind, align_up

_HUGE_PAGE_BYTES = 2 << 20
_AUTO_HUGE_BYTES_MIN = 16 * _HUGE_PAGE_BYTES  # below, the rounding up would be a large part
_BLOCK_BYTES = 512  # unit of st_blocks
_MFD_HUGE_2MB = 21 << 26  # log2 of the page size, as linux/memfd.h packs it
_F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; the fcntl module does not name it
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_HUGE_PAGES = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")
_GREETING = b"kvtier pool 1"  # goes with the descriptor: a socket cannot send one alone


class HugePages(enum.Enum):
    """Whether a pool lies on 2 MiB pages that were set aside at the system's start."""

    AUTO = "auto"
    """If enough of them are free and the pool is 32 MiB or more; else ordinary ones."""
    NEVER = "never"
    REQUIRED = "required"


class SharedPool:
    """A run of shared memory, allocated in multiples of 4 KiB. Any thread.

    Memoryviews of it stay valid after `close` and after the end of the process that made it. Those
    who may write it are trusted with its content, not with the life of those who read.
    """

    def __init__(
        self,
        nbytes: int,
        *,
        huge_pages: HugePages = HugePages.AUTO,
        others_may_write: bool = True,
        prefault: bool = True,
        name: str = "kvtier",
    ) -> None:
        """Make a pool of `nbytes`, rounded up to whole pages; all of it is free.

        Unless `others_may_write`, the kernel lets nobody else map it writable. With `prefault` a
        thread of its own makes the memory real. `name` is what `/proc/*/maps` shows.

        Raises:
            ValueError: `nbytes` is less than 1.
            BackendUnavailable: the system has no such memory; says why.
        """
        if nbytes < 1:
            raise ValueError(f"a pool of {nbytes} bytes, at least 1")
        for is_huge in _page_choices(nbytes, huge_pages):
            try:
                fd, size_bytes = _make_file(name, nbytes, is_huge)
                try:
                    slab = _map(fd, size_bytes, True, prefault)
                    # The mapping above stays writable, those to come will not be.
                    later = 0 if others_may_write else _F_SEAL_FUTURE_WRITE
                    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS | later)
                except BaseException:
                    os.close(fd)
                    raise
                break
            except OSError as error:
                failure = BackendUnavailable(f"no shared memory of {nbytes} bytes: {error}")
                failure.__cause__ = error
        else:
            raise failure
        self._take(slab, fd, is_owner=True, is_writable=True, is_huge=is_huge)
        self.others_may_write = others_may_write

    @classmethod
    def attach(
        cls, fd: int, *, is_writable: bool = False, nbytes: int | None = None, prefault: bool = True
    ) -> Self:
        """Map a pool that another process made; `fd` stays the caller's and may be closed.

        Nothing is believed of a descriptor that came from elsewhere: its kind, its seals and its
        size are asked of the kernel. `nbytes`, if given, is what the size must be. With `prefault`
        a thread maps page by page what is real already; memory that nobody has touched yet stays
        unreal, so that a huge and empty pool costs whoever attaches it nothing.

        Raises:
            ValueError: it is no sealed shared memory, or not of that size.
            BackendUnavailable: the system refuses the mapping, as it does a writable one of a pool
                that others may not write.
        """
        size_bytes, seals = _check_file(fd, nbytes)
        own = os.dup(fd)
        prefault = prefault and os.fstat(own).st_blocks * _BLOCK_BYTES >= size_bytes
        try:
            slab = _map(own, size_bytes, is_writable, prefault)
        except OSError as error:
            os.close(own)
            how = "writable" if is_writable else "read-only"
            raise BackendUnavailable(f"cannot map the pool {how}: {error}") from error
        except BaseException:
            os.close(own)
            raise
        pool = cls.__new__(cls)
        is_huge = os.fstatvfs(own).f_bsize >= _HUGE_PAGE_BYTES
        pool._take(slab, own, is_owner=False, is_writable=is_writable, is_huge=is_huge)
        pool.others_may_write = not seals & _F_SEAL_FUTURE_WRITE
        return pool

    def _take(
        self, slab: Slab, fd: int, *, is_owner: bool, is_writable: bool, is_huge: bool
    ) -> None:
        self._slab = slab
        self._fd = fd
        self._close_fd = weakref.finalize(self, os.close, fd)
        self.is_owner = is_owner
        self.is_writable = is_writable
        self.pages = "2 MiB pages" if is_huge else "ordinary pages"
        self.address = slab.address
        self.capacity_bytes = slab.capacity_bytes
        with _pools_lock:
            _pools.add(self)

    @property
    def fd(self) -> int:
        """The descriptor, the pool's own; hand it on by `send_pool`."""
        if not self._close_fd.alive:
            raise Closed("the pool is closed")
        return self._fd

    @property
    def is_open(self) -> bool:
        """Whether it has not been closed."""
        return self._close_fd.alive

    @property
    def used_bytes(self) -> int:
        """Bytes allocated now."""
        return self._slab.used_bytes

    @property
    def prefaulted_bytes(self) -> int:
        """How much of the memory the background thread has made real so far."""
        return self._slab.prefaulted_bytes

    @property
    def joined_bytes(self) -> int:
        """For how much of it the thread has then asked for huge pages, which few systems give
        shared memory at once; stays behind where the kernel cannot."""
        return self._slab.joined_bytes

    @property
    def region(self) -> Region:
        """The whole pool at its address in this process."""
        return Region(RegionKind.DRAM, self.address, self.capacity_bytes)

    def allocate(self, nbytes: int) -> int | None:
        """Offset of a free run of `nbytes`, rounded up to 4 KiB; None when there is none.

        Raises:
            ValueError: `nbytes` is less than 1, or the pool is another process's.
            Closed: after `close`.
        """
        self._require_owner()
        offset = self._slab.allocate(nbytes)
        return None if offset < 0 else offset

    def free(self, offset: int) -> None:
        """Give back what `allocate` gave; also after `close`.

        Raises:
            ValueError: nothing is allocated there.
        """
        self._slab.free(offset)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """The bytes themselves, without a copy; they keep the memory mapped.

        Raises:
            ValueError: they are not all in the pool.
            Closed: after `close`.
        """
        self.fd  # noqa: B018 - raises when closed
        return self._slab.memory(offset, nbytes)

    def offset_of(self, address: int, nbytes: int) -> int | None:
        """Where in the pool these bytes lie; None if they do not all lie in it."""
        offset = address - self.address
        is_inside = 0 <= offset <= self.capacity_bytes and nbytes <= self.capacity_bytes - offset
        return offset if is_inside else None

    def close(self) -> None:
        """Let go of descriptor and memory, which stays while somebody looks; again, do nothing."""
        with _pools_lock:
            _pools.discard(self)
        self._close_fd()
        self._slab.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _require_owner(self) -> None:
        if not self.is_owner:
            raise ValueError("the pool is allocated by the process that made it")
        self.fd  # noqa: B018 - raises when closed


_pools: weakref.WeakSet[SharedPool] = weakref.WeakSet()
_pools_lock = threading.Lock()


def find_pool(address: int, nbytes: int) -> SharedPool | None:
    """The open pool of this process in which these bytes lie, so that buffers tell where from."""
    with _pools_lock:
        pools = list(_pools)
    for pool in pools:
        if pool.is_open and pool.offset_of(address, nbytes) is not None:
            return pool
    return None


def send_pool(connection: socket.socket, pool: SharedPool) -> None:
    """Hand the pool to the process at the other end of a Unix socket; it calls `receive_pool`."""
    socket.send_fds(connection, [_GREETING], [pool.fd])


def receive_pool(connection: socket.socket, *, is_writable: bool = False) -> SharedPool:
    """Attach what `send_pool` sent; waits as long as the socket's timeout says.

    Raises:
        ValueError: the other side sent something else, or nothing.
        BackendUnavailable: what `SharedPool.attach` says.
        TimeoutError: by the socket's timeout.
    """
    with _received(connection) as (greeting, fds):
        if greeting != _GREETING or len(fds) != 1:
            raise ValueError(f"{len(fds)} descriptors with {greeting!r} instead of a pool")
        return SharedPool.attach(fds[0], is_writable=is_writable)


@contextlib.contextmanager
def _received(connection: socket.socket) -> Iterator[tuple[bytes, list[int]]]:
    """A message and its descriptors, which are closed at the end, however many they are."""
    fds: list[int] = []
    try:
        # Like socket.recv_fds, but a descriptor that comes is not handed on to a child.
        room = socket.CMSG_SPACE(4 * array.array("i").itemsize)
        message, parts, _, _ = connection.recvmsg(len(_GREETING), room, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in parts:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                numbers = array.array("i")
                numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
                fds.extend(numbers)
        yield message, fds
    finally:
        for fd in fds:
            os.close(fd)


def _page_choices(nbytes: int, huge_pages: HugePages) -> list[bool]:
    if huge_pages is HugePages.REQUIRED:
        return [True]
    if huge_pages is HugePages.NEVER or nbytes < _AUTO_HUGE_BYTES_MIN:
        return [False]
    return [True, False] if free_huge_bytes() >= align_up(nbytes, _HUGE_PAGE_BYTES) else [False]


def free_huge_bytes() -> int:
    """Bytes of 2 MiB pages that are set aside and neither used nor promised; often 0."""
    try:
        free, promised = (
            int((_HUGE_PAGES / name).read_text()) for name in ("free_hugepages", "resv_hugepages")
        )
    except (OSError, ValueError):
        return 0
    return max(0, free - promised) * _HUGE_PAGE_BYTES


def _make_file(name: str, nbytes: int, is_huge: bool) -> tuple[int, int]:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    size_bytes = align_up(nbytes, _HUGE_PAGE_BYTES if is_huge else ALIGN_BYTES)
    fd = os.memfd_create(name, flags | (os.MFD_HUGETLB | _MFD_HUGE_2MB if is_huge else 0))
    try:
        os.ftruncate(fd, size_bytes)
    except BaseException:
        os.close(fd)
        raise
    return fd, size_bytes


def _check_file(fd: int, nbytes: int | None) -> tuple[int, int]:
    """Size and seals of a pool; ValueError for anything else."""
    try:
        status = os.fstat(fd)
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ValueError(f"descriptor {fd} is no shared memory: {error}") from error
    if not stat.S_ISREG(status.st_mode) or seals & _SEALS != _SEALS:
        raise ValueError(f"descriptor {fd} is not sealed (seals {seals:#x}): it could shrink")
    size_bytes = os.fstat(fd).st_size  # sealed by now: it stays
    if size_bytes == 0 or size_bytes % ALIGN_BYTES:
        raise ValueError(f"shared memory of {size_bytes} bytes is no pool")
    if nbytes is not None and nbytes != size_bytes:
        raise ValueError(f"a pool of {size_bytes} bytes, {nbytes} expected")
    return size_bytes, seals


def _map(fd: int, size_bytes: int, is_writable: bool, prefault: bool) -> Slab:
    try:
        return Slab.over(fd, size_bytes, is_writable, prefault)
    except MemoryError as error:  # one kind of failure for those who look at it
        raise OSError(str(error)) from error
