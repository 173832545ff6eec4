"""Records as files on a local or shared POSIX file system, one file each.

``root/ab/abcd….kvc``: 256 folders by the key's first byte. A record is written under a temporary
name in its own folder, made durable, and renamed into place, so a reader sees all of it or none.
Files are read and written past the page cache where the file system allows it, many at a time;
buffers or lengths that are no multiple of 4 KiB go through the page cache instead.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import lmdb
import numpy as np
import numpy.typing as npt

from kvtier._core import FileEngine, Slab
from kvtier.backend import (
    HEAD_BYTES,
    Backend,
    BackendOptions,
    Capabilities,
    StoredChunk,
    check_batch,
    check_get,
)
from kvtier.backends.posix_index import PosixIndex, RecordFile
from kvtier.errors import BackendUnavailable, Closed
from kvtier.types import ALIGN_BYTES, KEY_BYTES, ChunkKey, Outcome, Status, align_up

_CAPABILITIES = Capabilities(persistent=True, alignment=ALIGN_BYTES)
_OPEN_FILES_MAX = 64  # at a time, of one call: enough to keep the disk busy, far from ulimit -n
_QUARANTINED_MAX = 4  # files kept for inspection
_RECONCILE_BATCH = 1024  # records noted in one transaction
_DIRECT = getattr(os, "O_DIRECT", 0)  # systems without it cache
_PASSING = {errno.EAGAIN, errno.EINTR, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EBUSY}

_RECORD_NAME = re.compile(r"([0-9a-f]{64})\.kvc")
_TEMPORARY_NAME = re.compile(r"[0-9a-f]{64}\.[0-9]+\.tmp")
_FOLDER_NAME = re.compile(r"[0-9a-f]{2}")
_OWN_NAMES = {"lock", "index", "quarantine"}

_log = logging.getLogger("kvtier.posix")


class PosixOptions(BackendOptions, frozen=True, kw_only=True):
    """Where the files are and how they are moved."""

    path: str
    """Folder of the records, made if absent; one process at a time has it open."""
    depth: int = 16
    """Most segments in flight."""
    segment: int = 16 << 20
    """Bytes of one request to the kernel, a multiple of 4096."""
    method: Literal["auto", "uring", "threads"] = "auto"
    """How requests are made; `auto` takes io_uring where the kernel allows it, else threads."""
    durable: bool = True
    """Whether OK means on stable storage. Without it a machine's crash may lose recent records."""
    min_free: int = 0
    """Bytes of the file system that are left to others: `free_bytes` counts only what is above."""


class PosixBackend(Backend):
    """Files under one folder: persistent, one process at a time, bounded by the file system.

    A removed record's file may be back after a machine's crash: removal is not synced.
    """

    Options: ClassVar[type[BackendOptions]] = PosixOptions

    def __init__(self, options: PosixOptions) -> None:
        """Open the folder, clear away what a crash left, and make the index agree with the files.

        Raises:
            BackendUnavailable: the folder cannot be made, read or written, or is open already.
        """
        self._root = Path(options.path)
        self._durable = options.durable
        self._min_free = options.min_free
        self._temporary_numbers = itertools.count()
        self._publishing = threading.Lock()  # a name and its entry in the index change together
        self._calls = _Calls(f"the posix backend at {self._root}")
        self._lock_fd = _lock_folder(self._root)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, self._lock_fd)
            self._engine = FileEngine(options.depth, options.segment, options.method)
            undo.callback(self._engine.close)
            try:
                self._direct = _DIRECT if _can_go_direct(self._root, self._engine) else 0
                self._index = PosixIndex(self._root / "index")
                undo.callback(self._index.close)
                self._reconcile()
            except (OSError, lmdb.Error) as error:
                raise BackendUnavailable(f"{self._root}: {error}") from error
            undo.pop_all()

    @property
    def capabilities(self) -> Capabilities:
        return _CAPABILITIES

    @property
    def method(self) -> str:
        """How requests are made: uring or threads."""
        return self._engine.method

    @property
    def is_direct(self) -> bool:
        """Whether the file system lets aligned transfers pass its page cache."""
        return self._direct != 0

    def put(self, keys: Sequence[ChunkKey], sources: Sequence[memoryview]) -> list[Outcome]:
        check_batch(_CAPABILITIES.batch_max, keys, sources)
        paths = [self._path(key) for key in keys]
        buffers = [_Buffer(source) for source in sources]
        with self._calls.one():
            return [
                outcome
                for some in _groups(len(keys))
                for outcome in self._put_group(keys[some], paths[some], buffers[some])
            ]

    def get(
        self, keys: Sequence[ChunkKey], targets: Sequence[memoryview], offset: int = 0
    ) -> list[Outcome]:
        check_get(_CAPABILITIES.batch_max, keys, targets, offset)
        paths = [self._path(key) for key in keys]
        buffers = [_Buffer(target) for target in targets]
        with self._calls.one():
            return [
                outcome
                for some in _groups(len(keys))
                for outcome in self._get_group(paths[some], buffers[some], offset)
            ]

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        check_batch(_CAPABILITIES.batch_max, keys)
        with self._calls.one():
            return [os.path.lexists(self._path(key)) for key in keys]

    def remove(self, keys: Sequence[ChunkKey]) -> list[Outcome]:
        check_batch(_CAPABILITIES.batch_max, keys)
        with self._calls.one():
            return self._take_away(keys, os.unlink)

    def quarantine(self, keys: Sequence[ChunkKey]) -> list[Outcome]:
        check_batch(_CAPABILITIES.batch_max, keys)
        folder = self._root / "quarantine"
        with self._calls.one():
            try:
                folder.mkdir(0o700, exist_ok=True)
            except OSError as error:
                return [_fault(error.errno or errno.EIO)] * len(keys)
            outcomes = self._take_away(
                keys, lambda path: os.replace(path, folder / os.path.basename(path))
            )
            with self._publishing, contextlib.suppress(OSError):
                by_age = sorted(os.scandir(folder), key=lambda entry: entry.stat().st_ctime_ns)
                for entry in by_age[:-_QUARANTINED_MAX]:
                    os.unlink(entry)
            return outcomes

    def scan(self) -> Iterator[StoredChunk]:
        return self._index.scan()

    def remember_use(self, keys: Sequence[ChunkKey]) -> None:
        with self._calls.one():
            self._index.note_use(keys)

    def free_bytes(self) -> int:
        with self._calls.one():
            room = os.statvfs(self._root)
        return max(0, room.f_bavail * room.f_frsize - self._min_free)

    def close(self) -> None:
        if self._calls.end():
            self._engine.close()
            self._index.close()
            os.close(self._lock_fd)  # and with it the lock

    def _path(self, key: ChunkKey) -> str:
        if len(key) != KEY_BYTES:
            raise ValueError(f"key of {len(key)} bytes, must be {KEY_BYTES}")
        name = key.hex()
        return f"{self._root}/{name[:2]}/{name}.kvc"

    def _put_group(
        self, keys: Sequence[ChunkKey], paths: Sequence[str], buffers: Sequence[_Buffer]
    ) -> list[Outcome]:
        outcomes = [Outcome(Status.OK)] * len(keys)  # which stands for those held already
        drafts: list[_Draft] = []
        try:
            for position, path in enumerate(paths):
                if not os.path.lexists(path):
                    try:
                        draft = self._draft(position, keys[position], path, buffers[position])
                    except OSError as error:
                        outcomes[position] = _fault(error.errno or errno.EIO)
                    else:
                        drafts.append(draft)
            good = self._write(drafts, outcomes)
            self._publish(good, outcomes)
        finally:
            for draft in drafts:
                draft.discard()
        if self._durable:
            self._make_names_durable(keys, paths, outcomes)
        return outcomes

    def _draft(self, position: int, key: ChunkKey, path: str, buffer: _Buffer) -> _Draft:
        temporary = f"{path[: -len('.kvc')]}.{next(self._temporary_numbers)}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        if buffer.is_aligned(0):
            flags |= self._direct
        try:
            fd = os.open(temporary, flags, 0o600)
        except FileNotFoundError:  # the first record of its folder
            with contextlib.suppress(FileExistsError):
                os.mkdir(os.path.dirname(path), 0o700)
            fd = os.open(temporary, flags, 0o600)
        return _Draft(position, key, path, temporary, buffer, fd)

    def _write(self, drafts: list[_Draft], outcomes: list[Outcome]) -> list[_Draft]:
        """Bring the drafts' bytes to the disk; those that got there."""

        def keep_good(drafts: list[_Draft], results: npt.NDArray[np.int64]) -> list[_Draft]:
            for draft, result in zip(drafts, results.tolist(), strict=True):
                if result < 0:
                    outcomes[draft.position] = _fault(-result)
            return [draft for draft, good in zip(drafts, results >= 0, strict=True) if good]

        fds, lengths = _fds(drafts), _lengths(drafts)
        drafts = keep_good(drafts, self._engine.allocate(fds, lengths))
        fds, lengths = _fds(drafts), _lengths(drafts)
        offsets = np.zeros(len(drafts), np.uint64)
        addresses = np.array([draft.buffer.address for draft in drafts], np.uint64)
        drafts = keep_good(drafts, self._engine.write(fds, offsets, addresses, lengths))
        if self._durable:
            drafts = keep_good(drafts, self._engine.sync(_fds(drafts)))
        return drafts

    def _publish(self, drafts: Sequence[_Draft], outcomes: list[Outcome]) -> None:
        files = []
        with self._publishing:
            for draft in drafts:
                if os.path.lexists(draft.path):  # somebody else was quicker: theirs stands
                    continue
                try:
                    room_bytes = _room_bytes(os.fstat(draft.fd))
                    os.rename(draft.temporary, draft.path)
                except OSError as error:
                    outcomes[draft.position] = _fault(error.errno or errno.EIO)
                    continue
                head = draft.buffer.bytes[:HEAD_BYTES].tobytes()
                files.append(RecordFile(draft.key, draft.buffer.nbytes, room_bytes, head))
                outcomes[draft.position] = Outcome(Status.OK, draft.buffer.nbytes)
            self._index.note(files)

    def _make_names_durable(
        self, keys: Sequence[ChunkKey], paths: Sequence[str], outcomes: list[Outcome]
    ) -> None:
        """Sync the folders of all that is OK, of what was there before too: its writer may still
        be at this point."""
        root = os.fspath(self._root)  # in case one of the folders is new
        folders = {os.path.dirname(path) for path, o in zip(paths, outcomes, strict=True) if o.ok}
        failed = self._sync_folders([root, *folders])
        for position, path in enumerate(paths):
            error = failed.get(os.path.dirname(path), failed.get(root))
            if error is not None and outcomes[position].ok:
                self._take_away([keys[position]], os.unlink)
                outcomes[position] = _fault(error)

    def _sync_folders(self, folders: Sequence[str]) -> dict[str, int]:
        """Make the names in each durable; errno of those that failed.

        All at once, because each waits for the disk and they can share one wait.
        """
        failed: dict[str, int] = {}
        open_folders: list[str] = []
        fds: list[int] = []
        try:
            for folder in folders:
                try:
                    fds.append(os.open(folder, os.O_RDONLY | os.O_CLOEXEC))
                    open_folders.append(folder)
                except OSError as error:
                    failed[folder] = error.errno or errno.EIO
            results = self._engine.sync(np.array(fds, np.int32), data_only=False)
        finally:
            for fd in fds:
                os.close(fd)
        for folder, result in zip(open_folders, results.tolist(), strict=True):
            if result < 0:
                failed[folder] = -result
        return failed

    def _get_group(
        self, paths: Sequence[str], buffers: Sequence[_Buffer], offset: int
    ) -> list[Outcome]:
        outcomes = [Outcome(Status.MISSING)] * len(paths)
        positions: list[int] = []
        fds: list[int] = []
        try:
            for position, (path, buffer) in enumerate(zip(paths, buffers, strict=True)):
                flags = os.O_RDONLY | os.O_CLOEXEC
                try:
                    fd = os.open(path, flags | (self._direct if buffer.is_aligned(offset) else 0))
                except FileNotFoundError:
                    continue
                except OSError as error:
                    outcomes[position] = _fault(error.errno or errno.EIO)
                    continue
                positions.append(position)
                fds.append(fd)
            results = self._engine.read(
                np.array(fds, np.int32),
                np.full(len(fds), offset, np.uint64),
                np.array([buffers[position].address for position in positions], np.uint64),
                np.array([buffers[position].nbytes for position in positions], np.uint64),
            )
        finally:
            for fd in fds:
                os.close(fd)
        for position, result in zip(positions, results.tolist(), strict=True):
            outcomes[position] = Outcome(Status.OK, result) if result >= 0 else _fault(-result)
        return outcomes

    def _take_away(self, keys: Sequence[ChunkKey], take: Callable[[str], None]) -> list[Outcome]:
        outcomes = []
        for key in keys:
            try:
                take(self._path(key))
            except FileNotFoundError:
                outcomes.append(Outcome(Status.MISSING))
            except OSError as error:
                outcomes.append(_fault(error.errno or errno.EIO))
            else:
                outcomes.append(Outcome(Status.OK))
        with self._publishing:  # a put may have brought some back in between
            self._index.forget([key for key in keys if not os.path.lexists(self._path(key))])
        return outcomes

    def _reconcile(self) -> None:
        """Make the index say what the folders hold, and delete what a crash left half-written."""
        known = self._index.take_known()
        unknown: list[tuple[int, ChunkKey, os.stat_result]] = []
        foreign_count = 0
        for folder in sorted(os.listdir(self._root)):
            if not (_FOLDER_NAME.fullmatch(folder) and (self._root / folder).is_dir()):
                foreign_count += folder not in _OWN_NAMES
                continue
            with os.scandir(self._root / folder) as entries:
                for entry in entries:
                    name = _RECORD_NAME.fullmatch(entry.name)
                    if name and entry.name[:2] == folder and entry.is_file(follow_symlinks=False):
                        key = ChunkKey(bytes.fromhex(name[1]))
                        status = entry.stat(follow_symlinks=False)
                        if known.pop(key, None) != status.st_size:
                            unknown.append((status.st_mtime_ns, key, status))
                    elif _TEMPORARY_NAME.fullmatch(entry.name):
                        os.unlink(entry.path)
                    else:
                        foreign_count += 1
        self._index.forget(known)
        unknown.sort(key=lambda found: found[0])  # the order of writing, for want of a better one
        for start in range(0, len(unknown), _RECONCILE_BATCH):
            self._index.note(
                [
                    RecordFile(key, status.st_size, _room_bytes(status), _head(self._path(key)))
                    for _, key, status in unknown[start : start + _RECONCILE_BATCH]
                ]
            )
        if foreign_count > 0:
            _log.warning("%s: %d foreign names left alone", self._root, foreign_count)


class _Buffer:
    """A caller's memory, as the engine wants it."""

    def __init__(self, view: memoryview) -> None:
        self.bytes = np.frombuffer(view, np.uint8)
        self.address: int = self.bytes.__array_interface__["data"][0]
        self.nbytes = view.nbytes

    def is_aligned(self, offset: int) -> bool:
        """Whether this and a file at `offset` suit a transfer past the page cache."""
        return (self.address | self.nbytes | offset) % ALIGN_BYTES == 0


@dataclass(slots=True)
class _Draft:
    """A record on its way into the folder."""

    position: int
    key: ChunkKey
    path: str
    temporary: str
    buffer: _Buffer
    fd: int

    def discard(self) -> None:
        """Close the file, and delete it unless it got its final name."""
        os.close(self.fd)
        with contextlib.suppress(OSError):
            os.unlink(self.temporary)


class _Calls:
    """Counts calls in progress, so that `close` waits for them and later ones are refused."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._count = 0
        self._is_closed = False

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Keep the object open meanwhile."""
        with self._changed:
            if self._is_closed:
                raise Closed(f"{self._name} is closed")
            self._count += 1
        try:
            yield
        finally:
            with self._changed:
                self._count -= 1
                self._changed.notify_all()

    def end(self) -> bool:
        """Refuse further calls and wait for those in progress; whether this was the first time."""
        with self._changed:
            is_first = not self._is_closed
            self._is_closed = True
            self._changed.wait_for(lambda: self._count == 0)
            return is_first


def _lock_folder(root: Path) -> int:
    """Descriptor that holds the folder's lock until it is closed."""
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise BackendUnavailable(f"{root} cannot be used: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        holder = f"process {os.getpid()} ({' '.join(sys.argv)[:200]}) since {time.ctime()}"
        os.ftruncate(fd, 0)
        os.pwrite(fd, holder.encode(errors="replace"), 0)
    except BlockingIOError as error:
        holder = os.pread(fd, 1024, 0).decode(errors="replace")
        os.close(fd)
        raise BackendUnavailable(f"{root} is in use by {holder or 'a process'}") from error
    except OSError as error:
        os.close(fd)
        raise BackendUnavailable(f"{root} cannot be locked: {error.strerror}") from error
    return fd


def _can_go_direct(root: Path, engine: FileEngine) -> bool:
    """Whether a page can be written past the page cache; some file systems refuse only then."""
    folder = root / "00"
    name = folder / f"{'0' * 2 * KEY_BYTES}.0.tmp"  # cleared away if we die here
    folder.mkdir(0o700, exist_ok=True)
    try:
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | _DIRECT, 0o600)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    page = Slab(ALIGN_BYTES, prefault=False)
    try:
        offset, length = np.zeros(1, np.uint64), np.full(1, ALIGN_BYTES, np.uint64)
        address = np.full(1, page.address, np.uint64)
        result = int(engine.write(np.array([fd], np.int32), offset, address, length)[0])
        return result != -errno.EINVAL
    finally:
        page.close()
        os.close(fd)
        os.unlink(name)


def _head(path: str) -> bytes:
    """A record's first bytes; none where the disk does not give them, so that nobody trusts it."""
    try:
        with open(path, "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no readahead behind it
            return file.read(HEAD_BYTES)
    except OSError as error:
        _log.warning("%s: %s", path, error.strerror)
        return b""


def _room_bytes(status: os.stat_result) -> int:
    return max(status.st_blocks * 512, align_up(status.st_size))


def _fault(error_number: int) -> Outcome:
    status = Status.RETRY if error_number in _PASSING else Status.FAILED
    name = errno.errorcode.get(error_number, str(error_number))
    return Outcome(status, detail=f"{name}: {os.strerror(error_number)}")


def _fds(drafts: Sequence[_Draft]) -> npt.NDArray[np.int32]:
    return np.array([draft.fd for draft in drafts], np.int32)


def _lengths(drafts: Sequence[_Draft]) -> npt.NDArray[np.uint64]:
    return np.array([draft.buffer.nbytes for draft in drafts], np.uint64)


def _groups(count: int) -> Iterator[slice]:
    """`count` items in pieces of few enough open files."""
    return (slice(at, at + _OPEN_FILES_MAX) for at in range(0, count, _OPEN_FILES_MAX))
