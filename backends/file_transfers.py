"""What the backends that move pieces between memory and files share: all but the engine.

A subclass says how memory and files are made ready, and which descriptor serves a piece.
"""

from __future__ import annotations

import abc
import errno
import threading
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvtier._core import Completions, FileEngine, StopFlag
from kvtier.backends.file_regions import (
    FILE_KINDS,
    FileHandle,
    MemoryHandle,
    failure_in_words,
    open_file,
    positions,
    split_sides,
)
from kvtier.transfer import BlockingTransfers, Pieces, Reach, Results, Route, Side, Stop
from kvtier.types import ALIGN_BYTES, Region, RegionKind


class Engine(Protocol):
    """`FileEngine`, or what moves the same arrays another way."""

    def read(
        self, fds: Any, offsets: Any, addresses: Any, lengths: Any, stop: StopFlag | None = None
    ) -> Results:
        """Bytes read per item, fewer where the file ends, or minus a code."""

    def write(
        self, fds: Any, offsets: Any, addresses: Any, lengths: Any, stop: StopFlag | None = None
    ) -> Results:
        """Bytes written per item, all of them, or minus a code."""

    def close(self) -> None:
        """Wait for the calls in progress and release everything."""


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """The engine's arrays: one entry for each piece, in the order of their place in the files."""

    is_read: bool
    files: Side
    order: npt.NDArray[np.intp]
    """Number of each entry's piece."""
    fds: npt.NDArray[np.int32]
    buffered_fds: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.uint64]
    addresses: npt.NDArray[np.uint64]
    lengths: npt.NDArray[np.uint64]


class FileTransfers(BlockingTransfers):
    """Memory to and from files; durable unless told otherwise."""

    def __init__(
        self,
        completions: Completions,
        engine: Engine,
        disk: FileEngine,
        routes: frozenset[Route],
        *,
        durable: bool,
        bytes_per_s: float,
    ) -> None:
        """`engine` moves, `disk` gives files room and syncs them; closes both."""
        self._reach = Reach(
            routes=routes,
            durable=durable,
            latency_s=1e-3 if durable else 2e-4,
            bytes_per_s=bytes_per_s,
        )
        self._file_kinds = {route.local for route in routes} & set(FILE_KINDS)
        self._engine = engine
        self._disk = disk
        self._lock = threading.Lock()
        self._files: set[FileHandle] = set()
        super().__init__(completions)

    @property
    def reach(self) -> Reach:
        return self._reach

    def register(self, region: Region, source: Any) -> MemoryHandle | FileHandle:
        if region.kind not in self._file_kinds:
            return self.register_memory(region)
        handle = open_file(region, source, self._disk)
        try:
            self.add_file(handle)
        except BaseException:
            handle.close()
            raise
        with self._lock:
            self._files.add(handle)
        return handle

    def deregister(self, handle: MemoryHandle | FileHandle) -> None:
        if isinstance(handle, MemoryHandle):
            self.deregister_memory(handle)
            return
        with self._lock:
            is_open = handle in self._files
            self._files.discard(handle)
        if is_open:
            self.remove_file(handle)
            handle.close()

    def prepare(self, pieces: Pieces, link: Any) -> Prepared:
        del link
        files, memory, is_read = split_sides(pieces, self.name)
        addresses = positions(memory, [handle.address for handle in memory.handles])
        offsets = positions(files, [handle.start for handle in files.handles])
        buffered = np.array([file.buffered for file in files.handles], np.int32)[files.which]
        direct = np.array([file.direct for file in files.handles], np.int32)[files.which]
        is_aligned = (addresses | offsets | pieces.lengths) % np.uint64(ALIGN_BYTES) == 0
        fds = self.choose(direct, buffered, is_aligned)
        order = np.argsort(offsets, kind="stable")  # disks like it: up to a fifth faster
        return Prepared(
            is_read,
            files,
            order,
            fds[order],
            buffered[order],
            offsets[order],
            addresses[order],
            pieces.lengths[order],
        )

    def piece_count(self, prepared: Prepared) -> int:
        return len(prepared.lengths)

    def move(self, prepared: Prepared, results: Results, stop: Stop) -> str:
        flag = StopFlag()
        stop.on_set(flag.set)
        stop.moved_bytes = lambda: flag.moved_bytes
        moved = self.hand_over(prepared, slice(None), flag)
        words = self.settle(prepared, moved, flag)
        if prepared.is_read:
            is_short = (moved >= 0) & (moved.astype(np.uint64) < prepared.lengths)
            moved[is_short] = -errno.ENODATA  # the file ends before the piece does
        elif self._reach.durable:
            self._sync(prepared, moved, flag)
        results[prepared.order] = moved
        return failure_in_words(prepared.files, results, words)

    def close(self) -> None:
        super().close()
        if self.is_stuck():
            # Stuck in the kernel: waiting for the engine would hang as well, and a descriptor
            # that is closed now could be another file by the time the thread goes on.
            return
        self._engine.close()
        self._disk.close()
        with self._lock:
            files, self._files = self._files, set()
        for file in files:
            file.close()

    # What a subclass says ------------------------------------------------------------------------

    @abc.abstractmethod
    def register_memory(self, region: Region) -> MemoryHandle:
        """Make memory ready. Raises Unsuitable."""

    def deregister_memory(self, handle: MemoryHandle) -> None:
        """Undo `register_memory`."""

    def add_file(self, handle: FileHandle) -> None:
        """Make an open file ready. Raises Unsuitable."""

    def remove_file(self, handle: FileHandle) -> None:
        """Undo `add_file`, before the file is closed."""

    def choose(
        self,
        direct: npt.NDArray[np.int32],
        buffered: npt.NDArray[np.int32],
        is_aligned: npt.NDArray[np.bool_],
    ) -> npt.NDArray[np.int32]:
        """The descriptor that serves each piece."""
        return np.where(is_aligned, direct, buffered)

    def settle(self, prepared: Prepared, moved: Results, flag: StopFlag) -> dict[int, str]:
        """Make what the engine answered final, in place; words for errnos that need other ones.

        Some file systems open a file for direct I/O and refuse it only then, or want more than
        4 KiB of alignment: what they refused goes through the cache, the next time as well.
        """
        refused = (moved == -errno.EINVAL) & (prepared.fds != prepared.buffered_fds)
        if refused.any():
            prepared.fds[refused] = prepared.buffered_fds[refused]
            moved[refused] = self.hand_over(prepared, refused, flag)
        return {}

    # ---------------------------------------------------------------------------------------------

    def hand_over(self, prepared: Prepared, which: Any, flag: StopFlag) -> Results:
        """Have the engine move some of the entries, or all."""
        run = self._engine.read if prepared.is_read else self._engine.write
        return run(
            prepared.fds[which],
            prepared.offsets[which],
            prepared.addresses[which],
            prepared.lengths[which],
            flag,
        )

    def _sync(self, prepared: Prepared, moved: Results, flag: StopFlag) -> None:
        """Make what was written durable; a file whose sync fails has nothing that is OK."""
        is_ok = moved >= 0
        fds = np.unique(prepared.buffered_fds[is_ok])
        if flag.is_set:
            moved[is_ok] = -errno.ECANCELED
        elif len(fds) > 0:
            for fd, synced in zip(fds, self._disk.sync(fds), strict=True):
                if synced < 0:
                    moved[is_ok & (prepared.buffered_fds == fd)] = synced


def routes_between(
    memory: tuple[RegionKind, ...], files: tuple[RegionKind, ...]
) -> frozenset[Route]:
    """Either side may be the local one."""
    return frozenset(
        route
        for one in memory
        for other in files
        for route in (Route(one, other), Route(other, one))
    )
