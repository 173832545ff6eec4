"""What a folder of records remembers beside its files: order of use, sizes, heads.

The files are the truth and this is their fast path: with it, opening a folder of a hundred thousand
records takes listing their names instead of reading them. It can be deleted at any time and is then
rebuilt from the files by `kvtier.backends.posix`.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import shutil
import struct
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import lmdb

from kvtier import _core
from kvtier.backend import HEAD_BYTES, StoredChunk
from kvtier.errors import Closed
from kvtier.types import KEY_BYTES, ChunkKey

_ENTRY = struct.Struct("<QQQ")  # use sequence, file bytes, room in bytes; the head follows
_MAP_BYTES = 256 << 20  # address space only; doubled when full, at about 500 bytes a record
_SCAN_BATCH = 1024  # records read under one hold of the lock
_WAITING_MAX = 1024  # changes that a full disk keeps from being noted

_log = logging.getLogger("kvtier.posix")


@dataclass(frozen=True, slots=True)
class RecordFile:
    """One record's file."""

    key: ChunkKey
    file_bytes: int
    room_bytes: int
    head: bytes


class PosixIndex:
    """Key -> use sequence, sizes, head, in an LMDB file in a folder of its own.

    One process at a time, the owner's lock sees to that; any thread. LMDB runs without syncing:
    that survives a killed process, but not surely a machine's crash. So `state` names the boot
    during which the file is in use, or after a clean close the file's checksum; whatever else is
    found at the opening means beginning anew.

    A change that LMDB refuses (disk full) is never the record's fault: it waits for the next one,
    and if it is never taken, the next opening finds it out from the files.
    """

    def __init__(self, folder: Path) -> None:
        """Open `folder`, or begin anew where it is absent, damaged or doubtful.

        Raises:
            OSError, lmdb.Error: not even a new one can be made there.
        """
        self._folder = folder
        self._lock = threading.Lock()
        self._sequence = 1
        self._is_open = True
        self._has_complained = False
        self._waiting: deque[tuple[Callable[[lmdb.Transaction], None], int]]
        self._waiting = deque(maxlen=_WAITING_MAX)  # beyond it the oldest is lost
        self._environment, known = _open_or_begin_anew(folder)
        self._known_at_opening = {key: file_bytes for key, (_, file_bytes) in known.items()}
        for sequence, _ in known.values():
            self._sequence = max(self._sequence, sequence + 1)
        # Durable before the first change: else a crash could leave a clean state beside a torn file.
        _write_state(folder, f"boot {_boot_id()}")

    def take_known(self) -> dict[ChunkKey, int]:
        """File bytes per key as found at the opening, to compare with the files; handed out once."""
        known, self._known_at_opening = self._known_at_opening, {}
        return known

    def note(self, files: Sequence[RecordFile]) -> None:
        """These records are in place; the last of them counts as used most recently."""

        def change(transaction: lmdb.Transaction) -> None:
            for number, file in enumerate(files):
                fixed = _ENTRY.pack(self._sequence + number, file.file_bytes, file.room_bytes)
                transaction.put(file.key, fixed + file.head)

        self._change(change, len(files))

    def note_use(self, keys: Sequence[ChunkKey]) -> None:
        """These were used now, the last of them most recently; unknown ones are ignored."""

        def change(transaction: lmdb.Transaction) -> None:
            for number, key in enumerate(keys):
                entry = transaction.get(key)
                if entry is not None:
                    _, file_bytes, room_bytes = _ENTRY.unpack_from(entry)
                    fixed = _ENTRY.pack(self._sequence + number, file_bytes, room_bytes)
                    transaction.put(key, fixed + entry[_ENTRY.size :])

        self._change(change, len(keys))

    def forget(self, keys: Collection[ChunkKey]) -> None:
        """These records are gone."""

        def change(transaction: lmdb.Transaction) -> None:
            for key in keys:
                transaction.delete(key)

        self._change(change, 0)

    def scan(self) -> Iterator[StoredChunk]:
        """Every record known, oldest use first."""
        with self._lock:
            self._require_open()
            self._apply_waiting()
            known = _read(self._environment)
        order = sorted((sequence, key) for key, (sequence, _) in known.items())
        del known
        for start in range(0, len(order), _SCAN_BATCH):
            with self._lock:
                self._require_open()
                batch = self._stored(key for _, key in order[start : start + _SCAN_BATCH])
            yield from batch

    def close(self) -> None:
        """Make it durable and leave its checksum."""
        with self._lock, contextlib.suppress(lmdb.Error, OSError):  # else: rebuilt next time
            self._is_open = False
            try:
                self._apply_waiting()
                self._environment.sync(True)
            finally:
                self._environment.close()
            _write_state(self._folder, f"clean {_checksum(self._folder)}")

    def _require_open(self) -> None:
        if not self._is_open:
            raise Closed(f"the index in {self._folder} is closed")

    def _stored(self, keys: Iterable[ChunkKey]) -> list[StoredChunk]:
        stored: list[StoredChunk] = []
        with self._environment.begin() as transaction:
            for key in keys:
                entry = transaction.get(key)
                if entry is not None:  # else removed since the order was taken
                    room_bytes = _ENTRY.unpack_from(entry)[2]
                    stored.append(StoredChunk(key, room_bytes, entry[_ENTRY.size :]))
        return stored

    def _change(self, change: Callable[[lmdb.Transaction], None], count: int) -> None:
        with self._lock:
            self._waiting.append((change, count))
            self._apply_waiting()

    def _apply_waiting(self) -> None:
        try:
            while self._waiting:
                change, count = self._waiting[0]
                try:
                    with self._environment.begin(write=True) as transaction:
                        change(transaction)
                except lmdb.MapFullError:
                    self._environment.set_mapsize(2 * self._environment.info()["map_size"])
                    continue
                self._waiting.popleft()
                self._sequence += count
        except lmdb.Error as error:
            if not self._has_complained:
                self._has_complained = True
                _log.warning("%s: cannot note changes for now: %s", self._folder, error)


class _Damaged(Exception):
    """The file is LMDB's and its content is not ours."""


def _open_or_begin_anew(
    folder: Path,
) -> tuple[lmdb.Environment, dict[ChunkKey, tuple[int, int]]]:
    try:
        _check_state(folder)
        environment = _open(folder)
        try:
            return environment, _read(environment)
        except BaseException:
            environment.close()
            raise
    except (_Damaged, lmdb.Error, OSError) as error:
        if folder.exists():
            _log.warning("%s: rebuilt from the records: %s", folder, error)
            shutil.rmtree(folder, ignore_errors=True)
        return _open(folder), {}


def _open(folder: Path) -> lmdb.Environment:
    folder.mkdir(exist_ok=True)
    # Every transaction runs under the index's own lock, and the folder's keeps others away.
    environment = lmdb.open(
        os.fspath(folder), map_size=_MAP_BYTES, sync=False, metasync=False, lock=False
    )
    # Reading a mapped page past a cut-off file's end kills the process: look before.
    needed = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
    if _data(folder).stat().st_size < needed:
        environment.close()
        raise _Damaged("cut short")
    return environment


def _read(environment: lmdb.Environment) -> dict[ChunkKey, tuple[int, int]]:
    """Use sequence and file bytes per key."""
    known: dict[ChunkKey, tuple[int, int]] = {}
    with environment.begin() as transaction:
        for key, entry in transaction.cursor():
            if len(key) != KEY_BYTES or not 0 <= len(entry) - _ENTRY.size <= HEAD_BYTES:
                raise _Damaged("holds what is no record")
            sequence, file_bytes, _ = _ENTRY.unpack_from(entry)
            known[ChunkKey(key)] = (sequence, file_bytes)
    return known


def _data(folder: Path) -> Path:
    return folder / "data.mdb"


def _boot_id() -> str:
    """Names this boot of the machine; empty where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _checksum(folder: Path) -> str:
    with _data(folder).open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return "empty"
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as content:
            return _core.xxh3_128(content).hex()


def _check_state(folder: Path) -> None:
    state = (folder / "state").read_bytes().decode(errors="replace")
    boot_id = _boot_id()
    if boot_id and state == f"boot {boot_id}":
        return  # a process ended without closing: what it wrote is all there
    if not state.startswith("clean"):
        raise _Damaged("in use when the machine went down")
    if state != f"clean {_checksum(folder)}":
        raise _Damaged("not what was closed")


def _write_state(folder: Path, state: str) -> None:
    new = folder / "state.new"
    with new.open("w") as file:
        file.write(state)
        file.flush()
        os.fsync(file.fileno())
    new.replace(folder / "state")
    folder_fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(folder_fd)
    finally:
        os.close(folder_fd)
