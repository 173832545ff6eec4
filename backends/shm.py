"""Transfers to and from another process of this host whose memory is a `SharedPool`.

The peer's pool is opened out of `/proc`, checked and mapped; from then on a transfer is a copy by
the processor, at the speed of memory, and a look needs none at all (`ShmTransfers.view`).
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
import numpy as np

from kvtier._core import Completions
from kvtier.copying import BATCH_BYTES, Copies, CopyingTransfers, Mapped, map_region
from kvtier.errors import BackendUnavailable, Closed
from kvtier.shared_pool import SharedPool, find_pool
from kvtier.transfer import Pieces, Reach, Route, Unsuitable
from kvtier.types import Region, RegionKind

_REACH = Reach(
    routes=frozenset({Route(RegionKind.DRAM, RegionKind.DRAM, peer=True)}),
    piece_bytes_max=BATCH_BYTES,
    latency_s=5e-5,
    bytes_per_s=5e9,
)
_VERSION = 1
_GONE = "the peer is gone"
_FOREIGN_BYTES_MAX = 256  # of an address or an export; ours have about 70
_Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Foreign = TypeVar("_Foreign", "_Address", "_Export")


class _Address(
    msgspec.Struct, frozen=True, tag="kvtier-shm", array_like=True, forbid_unknown_fields=True
):
    version: _Number
    process: _Number
    start_time: _Number  # in ticks since boot: a number used again is another process


class _Export(
    msgspec.Struct, frozen=True, tag="kvtier-pool", array_like=True, forbid_unknown_fields=True
):
    version: _Number
    process: _Number
    start_time: _Number
    fd: _Number
    device: _Number
    inode: _Number
    pool_bytes: _Number
    offset: _Number
    nbytes: _Number
    is_writable: bool


@dataclass(eq=False, slots=True)
class Link:
    """A process of this host."""

    process: int
    start_time: int
    is_gone: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Owned(Mapped):
    """A region of this process, and the pool it lies in if it lies in one."""

    pool: SharedPool | None


@dataclass(frozen=True, slots=True, eq=False)
class Imported(Mapped):
    """A region of a peer's pool, mapped here."""

    view: memoryview
    """Its bytes; keeps the mapping for whoever still copies when the handle is released."""
    place: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _LinkedCopies(Copies):
    link: Link


@dataclass(slots=True, eq=False)
class _Attached:
    pool: SharedPool
    users: int = 0


class ShmTransfers(CopyingTransfers):
    """The local side is any memory of this process, the peer's side lies in a pool of its own.

    All regions of one pool share one mapping, which goes with the last of them. A peer's end does
    not end its memory: what `disconnect` has not failed by then still arrives.
    """

    name: ClassVar[str] = "shm"

    def __init__(self, completions: Completions) -> None:
        """Ready at once.

        Raises:
            Unsuitable: the system has no sealed shared memory, or no `/proc` to find it in.
        """
        if not hasattr(os, "memfd_create"):
            raise Unsuitable("this system has no memfd_create")
        try:
            self._own = _Address(_VERSION, os.getpid(), _start_time(os.getpid()))
        except OSError as error:
            raise Unsuitable(f"no /proc to find other processes' memory in: {error}") from error
        self._attached: dict[tuple[int, ...], _Attached] = {}
        self._attaching = threading.Lock()  # held while mapping, so that two imports map once
        super().__init__(completions)

    @property
    def reach(self) -> Reach:
        return _REACH

    def register(self, region: Region, source: Any) -> Owned:
        mapped = map_region(region, source)
        pool = find_pool(region.address, region.nbytes)
        return Owned(mapped.address, mapped.nbytes, mapped.is_writable, pool)

    def deregister(self, handle: Any) -> None:
        if not isinstance(handle, Imported):
            return
        with self._attaching:
            attached = self._attached[handle.place]
            attached.users -= 1
            if attached.users > 0:
                return
            del self._attached[handle.place]
        attached.pool.close()

    def address(self) -> bytes:
        return msgspec.msgpack.encode(self._own)

    def export(self, handle: Any) -> bytes:
        """What a peer needs; empty if the region is in no pool or the pool is closed."""
        pool: SharedPool | None = handle.pool
        offset = pool.offset_of(handle.address, handle.nbytes) if pool is not None else None
        if pool is None or offset is None:
            return b""
        try:
            status = os.fstat(pool.fd)
        except Closed:
            return b""
        exported = _Export(
            version=_VERSION,
            process=self._own.process,
            start_time=self._own.start_time,
            fd=pool.fd,
            device=status.st_dev,
            inode=status.st_ino,
            pool_bytes=pool.capacity_bytes,
            offset=offset,
            nbytes=handle.nbytes,
            is_writable=pool.others_may_write and handle.is_writable,
        )
        return msgspec.msgpack.encode(exported)

    def connect(self, address: bytes, host_pid: int | None) -> Link:
        theirs = _decode(address, _Address)
        if host_pid is None:
            raise Unsuitable("the peer is not a process of this host")
        if theirs.process != host_pid:
            raise Unsuitable(f"process {host_pid} calls itself {theirs.process}: another namespace")
        _check_alive(theirs.process, theirs.start_time)
        return Link(theirs.process, theirs.start_time)

    def disconnect(self, link: Link) -> None:
        link.is_gone = True
        self.fail(lambda prepared: prepared.link is link, errno.ECONNRESET, _GONE)

    def import_region(self, link: Link, region: Region, exported: bytes) -> Imported:
        if not exported:
            raise Unsuitable("the peer's region lies in no SharedPool")
        theirs = _decode(exported, _Export)
        if (theirs.process, theirs.start_time) != (link.process, link.start_time):
            raise Unsuitable(f"a region of process {theirs.process}, not of {link.process}")
        if theirs.nbytes != region.nbytes or region.kind is not RegionKind.DRAM:
            raise Unsuitable(f"{theirs.nbytes} bytes of memory, not the region's {region.nbytes}")
        if theirs.nbytes < 1 or theirs.offset + theirs.nbytes > theirs.pool_bytes:
            raise Unsuitable(
                f"{theirs.nbytes} bytes at {theirs.offset} of a pool of {theirs.pool_bytes}"
            )
        place = (link.process, link.start_time, theirs.device, theirs.inode, theirs.is_writable)
        with self._attaching:
            attached = self._attached.get(place)
            if attached is None:
                attached = self._attached[place] = _Attached(_attach(theirs))
            if attached.pool.capacity_bytes != theirs.pool_bytes:
                raise Unsuitable(
                    f"a pool of {attached.pool.capacity_bytes} bytes, another was said"
                )
            attached.users += 1
            pool = attached.pool
        return Imported(
            pool.address + theirs.offset,
            theirs.nbytes,
            theirs.is_writable,
            pool.view(theirs.offset, theirs.nbytes),
            place,
        )

    def view(self, handle: Imported) -> memoryview:
        """The peer's bytes themselves, without a copy; valid for as long as it is kept.

        Writable where the peer lets others write. The peer may change them at any time, and does
        once it is told that nobody needs them.
        """
        return handle.view

    def prepare(self, pieces: Pieces, link: Link) -> _LinkedCopies:
        copies = super().prepare(pieces, link)
        return _LinkedCopies(
            copies.targets, copies.sources, copies.lengths, copies.batch_ends, copies.kept, link
        )

    def start(self, prepared: _LinkedCopies, ticket: int, deadline_s: float) -> None:
        if prepared.link.is_gone:
            failed = np.full(len(prepared.lengths), -errno.ECONNRESET, np.int64)
            self._completions.push(ticket, failed, 0, True, _GONE)
            return
        super().start(prepared, ticket, deadline_s)
        if prepared.link.is_gone:  # it went meanwhile, and may have passed this one over
            self.disconnect(prepared.link)


def _decode(foreign: bytes, kind: type[_Foreign]) -> _Foreign:
    if len(foreign) > _FOREIGN_BYTES_MAX:
        raise Unsuitable(f"{len(foreign)} bytes, at most {_FOREIGN_BYTES_MAX}")
    try:
        theirs = msgspec.msgpack.decode(foreign, type=kind)
    except msgspec.DecodeError as error:
        raise Unsuitable(f"not understood: {error}") from error
    if theirs.version != _VERSION:
        raise Unsuitable(f"the peer speaks version {theirs.version}, this is {_VERSION}")
    return theirs


def _attach(theirs: _Export) -> SharedPool:
    """Map the peer's pool; nothing that the peer says of it is believed."""
    path = f"/proc/{theirs.process}/fd/{theirs.fd}"
    access = os.O_RDWR if theirs.is_writable else os.O_RDONLY
    try:
        _check_same(os.stat(path), theirs)  # before opening: a pipe's or a device's has effects
        fd = os.open(path, access | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise Unsuitable(f"the peer's pool cannot be opened: {error}") from error
    try:
        _check_same(os.fstat(fd), theirs)
        _check_alive(theirs.process, theirs.start_time)
        return SharedPool.attach(fd, is_writable=theirs.is_writable, nbytes=theirs.pool_bytes)
    except (ValueError, BackendUnavailable) as error:
        raise Unsuitable(f"the peer's pool: {error}") from error
    finally:
        os.close(fd)


def _check_same(status: os.stat_result, theirs: _Export) -> None:
    is_same = (status.st_dev, status.st_ino) == (theirs.device, theirs.inode)
    if not stat.S_ISREG(status.st_mode) or not is_same:
        raise Unsuitable("the peer's descriptor is another file by now")


def _check_alive(process: int, start_time: int) -> None:
    try:
        found = _start_time(process)
    except OSError as error:
        raise Unsuitable(f"process {process} is not to be seen: {error}") from error
    if found != start_time:
        raise Unsuitable(f"process {process} is another one by now")


def _start_time(process: int) -> int:
    """When it began, in clock ticks since boot (field 22 of proc(5)'s stat)."""
    text = Path(f"/proc/{process}/stat").read_text()
    return int(text.rpartition(")")[2].split()[19])
