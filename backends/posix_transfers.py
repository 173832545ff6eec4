"""Pieces between memory and files or block devices: direct I/O, many requests in flight.

Pieces whose address, offset and length are multiples of 4 KiB go past the page cache where the file
system lets them; others go through it. The kernel keeps the two views of a file the same.
"""

from __future__ import annotations

import errno
import threading
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

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
from kvtier.transfer import BlockingTransfers, Pieces, Reach, Results, Route, Side, Stop, Unsuitable
from kvtier.types import ALIGN_BYTES, Region, RegionKind

DEPTH = 64  # requests in flight of one transfer: what pieces of 64 KiB need; 16 do for large ones
SEGMENT_BYTES = 1 << 20  # of one request; what is in flight at a cancel has to end, so no more


@dataclass(frozen=True, slots=True, eq=False)
class _Prepared:
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


class PosixTransfers(BlockingTransfers):
    """DRAM to and from files and block devices by `FileEngine`.

    A source of kind FILE is a path; the file is made, and gets room for the region, if it may be
    written. One of kind BLK is the path of a device, or of a file of fixed size. The region's
    address is where it begins in the file.
    """

    name: ClassVar[str] = "posix"

    def __init__(
        self,
        completions: Completions,
        *,
        durable: bool = True,
        depth: int = DEPTH,
        segment_bytes: int = SEGMENT_BYTES,
        method: Literal["auto", "uring", "threads"] = "auto",
    ) -> None:
        """Start it.

        Without `durable`, OK means that the file system has the bytes, not that they survive a
        machine's crash. `depth` requests of at most `segment_bytes` are in flight of each transfer.
        """
        self._reach = Reach(
            routes=frozenset(
                Route(local, remote)
                for kind in FILE_KINDS
                for local, remote in ((RegionKind.DRAM, kind), (kind, RegionKind.DRAM))
            ),
            durable=durable,
            latency_s=1e-3 if durable else 2e-4,
            bytes_per_s=2e9,
        )
        self._engine = FileEngine(depth, segment_bytes, method)
        self._lock = threading.Lock()
        self._files: set[FileHandle] = set()
        super().__init__(completions)

    @property
    def reach(self) -> Reach:
        return self._reach

    def register(self, region: Region, source: Any) -> MemoryHandle | FileHandle:
        if region.kind is RegionKind.DRAM:
            return MemoryHandle(region.address)
        if region.kind not in FILE_KINDS:
            raise Unsuitable(f"posix moves between memory and files, not {region.kind.value}")
        handle = open_file(region, source, self._engine)
        with self._lock:
            self._files.add(handle)
        return handle

    def deregister(self, handle: MemoryHandle | FileHandle) -> None:
        if isinstance(handle, FileHandle):
            with self._lock:
                is_open = handle in self._files
                self._files.discard(handle)
            if is_open:
                handle.close()

    def prepare(self, pieces: Pieces, link: Any) -> _Prepared:
        del link
        files, memory, is_read = split_sides(pieces, self.name)
        addresses = positions(memory, [handle.address for handle in memory.handles])
        offsets = positions(files, [handle.start for handle in files.handles])
        buffered = np.array([file.buffered for file in files.handles], np.int32)[files.which]
        direct = np.array([file.direct for file in files.handles], np.int32)[files.which]
        is_aligned = (addresses | offsets | pieces.lengths) % np.uint64(ALIGN_BYTES) == 0
        fds = np.where(is_aligned, direct, buffered)
        order = np.argsort(offsets, kind="stable")  # disks like it: up to a fifth faster
        return _Prepared(
            is_read,
            files,
            order,
            fds[order],
            buffered[order],
            offsets[order],
            addresses[order],
            pieces.lengths[order],
        )

    def piece_count(self, prepared: _Prepared) -> int:
        return len(prepared.lengths)

    def move(self, prepared: _Prepared, results: Results, stop: Stop) -> str:
        flag = StopFlag()
        stop.on_set(flag.set)
        moved = self._hand_over(prepared, slice(None), flag)
        # Some file systems open a file for direct I/O and refuse it only then, or want more than
        # 4 KiB of alignment; the arrays remember it for the next time.
        refused = (moved == -errno.EINVAL) & (prepared.fds != prepared.buffered_fds)
        if refused.any():
            prepared.fds[refused] = prepared.buffered_fds[refused]
            moved[refused] = self._hand_over(prepared, refused, flag)
        if prepared.is_read:
            is_short = (moved >= 0) & (moved.astype(np.uint64) < prepared.lengths)
            moved[is_short] = -errno.ENODATA  # the file ends before the piece does
        elif self._reach.durable:
            self._sync(prepared, moved, flag)
        results[prepared.order] = moved
        return failure_in_words(prepared.files, results)

    def close(self) -> None:
        super().close()
        if self.is_stuck():
            # Stuck in the kernel: waiting for the engine would hang as well, and a descriptor
            # that is closed now could be another file by the time the thread goes on.
            return
        self._engine.close()
        with self._lock:
            files, self._files = self._files, set()
        for file in files:
            file.close()

    def _hand_over(self, prepared: _Prepared, which: Any, flag: StopFlag) -> Results:
        run = self._engine.read if prepared.is_read else self._engine.write
        return run(
            prepared.fds[which],
            prepared.offsets[which],
            prepared.addresses[which],
            prepared.lengths[which],
            flag,
        )

    def _sync(self, prepared: _Prepared, moved: Results, flag: StopFlag) -> None:
        """Make what was written durable; a file whose sync fails has nothing that is OK."""
        is_ok = moved >= 0
        fds = np.unique(prepared.buffered_fds[is_ok])
        if flag.is_set:
            moved[is_ok] = -errno.ECANCELED
        elif len(fds) > 0:
            for fd, synced in zip(fds, self._engine.sync(fds), strict=True):
                if synced < 0:
                    moved[is_ok & (prepared.buffered_fds == fd)] = synced
