"""Regions of files and of memory, for the backends that move pieces between the two.

Opens what a region of kind FILE or BLK names and gives it room; tells the two sides of a transfer
apart; puts its failures in words.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier._core import FileEngine
from kvtier.transfer import Op, Pieces, Results, Side, Unsuitable
from kvtier.types import Region, RegionKind

FILE_KINDS = (RegionKind.FILE, RegionKind.BLK)

_DIRECT = getattr(os, "O_DIRECT", 0)  # systems without it cache
_READ_ONLY = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ETXTBSY}
_FILE_BYTES_MAX = (1 << 63) - 1


@dataclass(frozen=True, slots=True, eq=False)
class MemoryHandle:
    """A region of memory of this process."""

    address: int
    number: int = 0
    """By which whatever moves its bytes knows it, if it wants to know it."""


@dataclass(frozen=True, slots=True, eq=False)
class FileHandle:
    """An open file or block device."""

    path: str
    buffered: int
    """Descriptor."""
    direct: int
    """Descriptor past the page cache; the buffered one again where there is no such way."""
    start: int
    """Where the region begins in the file."""
    is_writable: bool

    def close(self) -> None:
        """Close both descriptors."""
        for fd in {self.buffered, self.direct}:
            os.close(fd)


def split_sides(pieces: Pieces, name: str) -> tuple[Side, Side, bool]:
    """The side of files, the side of memory, and whether bytes go from files to memory.

    Raises:
        Unsuitable: a side is mixed, both are the same, or a file is not to be written.
    """
    for files, memory, op in (
        (pieces.remote, pieces.local, Op.READ),
        (pieces.local, pieces.remote, Op.WRITE),
    ):
        if all(isinstance(handle, FileHandle) for handle in files.handles) and all(
            isinstance(handle, MemoryHandle) for handle in memory.handles
        ):
            is_read = pieces.op is op
            for file in files.handles:
                if not (is_read or file.is_writable):
                    raise Unsuitable(f"{file.path} is open for reading only")
            return files, memory, is_read
    raise Unsuitable(f"{name} moves between memory on one side and files on the other")


def positions(side: Side, starts: list[int]) -> npt.NDArray[np.uint64]:
    """Where each piece begins, given where each region does."""
    found: npt.NDArray[np.uint64] = np.array(starts, np.uint64)[side.which] + side.offsets
    return found


def failure_in_words(files: Side, results: Results, words: Mapping[int, str]) -> str:
    """The first piece that failed, and why; nothing if none did.

    `words` explain the errnos for which the system's own do not.
    """
    failed = np.flatnonzero(results < 0)
    if len(failed) == 0:
        return ""
    first = int(failed[0])
    code = int(-results[first])
    name = errno.errorcode.get(code, str(code))
    path = files.handles[files.which[first]].path
    why = words.get(code) or os.strerror(code)
    return f"{len(failed)} of {len(results)} pieces; the first: {path}: {name}: {why}"


def open_file(region: Region, source: Any, engine: FileEngine) -> FileHandle:
    """Open what `source` names, and give it room for the region.

    Raises:
        Unsuitable: it cannot be opened, has too few bytes and cannot be given more.
    """
    try:
        path = os.fsdecode(source)
    except TypeError:
        kind = type(source).__name__
        raise Unsuitable(f"a region of files needs a path, not {kind}") from None
    end = region.address + region.nbytes
    if end > _FILE_BYTES_MAX:
        raise Unsuitable(f"{path}: the region ends at {end}, past what a file can hold")
    with contextlib.ExitStack() as undo:
        try:
            fd, is_writable, is_new = _open(path, may_create=region.kind is RegionKind.FILE)
            undo.callback(os.close, fd)
            os.set_blocking(fd, True)
            if is_new:
                undo.callback(os.unlink, path)
            _make_room(fd, path, end, is_writable and region.kind is RegionKind.FILE, engine)
            if is_new:
                _sync_folder(path)
            # Readahead would cache pages that no piece asked for, and a direct write to them at
            # that moment can leave the cache behind the disk.
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
            direct = _open_direct(fd, is_writable)
        except OSError as error:
            name = errno.errorcode.get(error.errno or 0, "?")
            raise Unsuitable(f"{path}: {name}: {error.strerror}") from error
        except ValueError as error:
            raise Unsuitable(f"{path!r}: {error}") from error
        undo.pop_all()
    return FileHandle(path, fd, direct, region.address, is_writable)


def _open(path: str, may_create: bool) -> tuple[int, bool, bool]:
    """A descriptor, whether it may be written, and whether the file is new.

    Never waits for the other end of a named pipe, which is no use here anyway.
    """
    flags = os.O_CLOEXEC | os.O_NONBLOCK
    try:
        return os.open(path, os.O_RDWR | flags), True, False
    except FileNotFoundError:
        if not may_create:
            raise
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | flags, 0o600), True, True
        except FileExistsError:  # another was quicker
            return os.open(path, os.O_RDWR | flags), True, False
    except OSError as error:
        if error.errno not in _READ_ONLY:
            raise
        return os.open(path, os.O_RDONLY | flags), False, False


def _make_room(fd: int, path: str, end: int, may_grow: bool, engine: FileEngine) -> None:
    """See to it that the file has bytes up to `end`; as before if it cannot."""
    status = os.fstat(fd)
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISBLK(status.st_mode)):
        raise Unsuitable(f"{path} is no file and no block device")
    nbytes = os.lseek(fd, 0, os.SEEK_END)
    if nbytes >= end:
        return
    if not (may_grow and stat.S_ISREG(status.st_mode)):
        raise Unsuitable(f"{path} has {nbytes} bytes, the region ends at {end}")
    try:
        result = int(engine.allocate(np.array([fd], np.int32), np.array([end], np.uint64))[0])
        if result < 0:
            raise OSError(-result, os.strerror(-result))
        if os.fstat(fd).st_size < end:  # the file system gives no room ahead
            os.ftruncate(fd, end)
    except OSError:
        os.ftruncate(fd, nbytes)
        raise


def _open_direct(fd: int, is_writable: bool) -> int:
    """The same file again past the page cache, or `fd` where that cannot be."""
    if not _DIRECT:
        return fd
    access = os.O_RDWR if is_writable else os.O_RDONLY
    try:  # by the descriptor: the name may stand for another file by now
        return os.open(f"/proc/self/fd/{fd}", access | _DIRECT | os.O_CLOEXEC)
    except OSError:
        return fd


def _sync_folder(path: str) -> None:
    """Make a new file's name durable."""
    fd = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
