"""Records in this process's memory: the fast tier, and the place that engines copy to and from.

All records lie in one slab of huge pages. `reserve`, `commit` and `locate` hand out its memory
itself; `put` and `get` copy, for those who cannot work in place.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np

from kvtier._core import Slab
from kvtier.backend import (
    HEAD_BYTES,
    AddressableBackend,
    BackendOptions,
    Capabilities,
    StoredChunk,
    check_batch,
    check_get,
)
from kvtier.errors import Closed
from kvtier.types import (
    ChunkKey,
    Descriptor,
    Outcome,
    Region,
    RegionKind,
    Status,
    align_up,
)

_CAPABILITIES = Capabilities(persistent=False)


class MemoryOptions(BackendOptions, frozen=True, kw_only=True):
    """How much memory, and whether to make it real at once."""

    capacity: int
    """Bytes of all records and reservations; mapped at the start, never more."""
    prefault: bool = True
    """Touch the memory in the background: the first touch of a page can be 50 times slower."""


class MemoryBackend(AddressableBackend):
    """Bounded by its capacity, local to the process, lost at close."""

    Options: ClassVar[type[BackendOptions]] = MemoryOptions

    def __init__(self, options: MemoryOptions) -> None:
        """Map the memory; MemoryError when the system has none of that size."""
        self._slab = Slab(options.capacity, options.prefault)
        self._region = Region(RegionKind.DRAM, self._slab.address, self._slab.capacity_bytes)
        self._memory: memoryview | None = self._slab.memory(0, self._slab.capacity_bytes)
        self._lock = threading.Lock()  # dict work only, no copy under it
        self._records: dict[ChunkKey, Descriptor] = {}  # oldest use first
        self._reserved: set[int] = set()  # offsets
        self._readers: dict[int, int] = {}  # offset -> copies out of it in progress
        self._condemned: set[int] = set()  # removed while being read; the last reader frees them

    @property
    def capabilities(self) -> Capabilities:
        return _CAPABILITIES

    @property
    def region(self) -> Region:
        return self._region

    @property
    def used_bytes(self) -> int:
        return self._slab.used_bytes

    @property
    def prefaulted_bytes(self) -> int:
        """How much of the memory the background thread has made real so far."""
        return self._slab.prefaulted_bytes

    def reserve(self, nbytes: int) -> Descriptor | None:
        with self._lock:
            self._require_open()
            offset = self._slab.allocate(max(nbytes, 1))
            if offset < 0:
                return None
            self._reserved.add(offset)
        return Descriptor(self._region, offset, nbytes)

    def commit(self, key: ChunkKey, record: Descriptor) -> bool:
        with self._lock:
            self._take_reservation(record)
            if key in self._records:
                self._slab.free(record.offset)
                return False
            self._records[key] = record
            return True

    def cancel(self, record: Descriptor) -> None:
        with self._lock:
            self._take_reservation(record)
            self._slab.free(record.offset)

    def locate(self, keys: Sequence[ChunkKey]) -> list[Descriptor | None]:
        with self._lock:
            return [self._records.get(key) for key in keys]

    def view(self, record: Descriptor) -> memoryview:
        memory = self._require_open()
        return memory[record.offset : record.offset + record.nbytes]

    def put(self, keys: Sequence[ChunkKey], sources: Sequence[memoryview]) -> list[Outcome]:
        check_batch(_CAPABILITIES.batch_max, keys, sources)
        self._require_open()
        return [self._put_one(key, source) for key, source in zip(keys, sources, strict=True)]

    def get(
        self, keys: Sequence[ChunkKey], targets: Sequence[memoryview], offset: int = 0
    ) -> list[Outcome]:
        check_get(_CAPABILITIES.batch_max, keys, targets, offset)
        self._require_open()
        return [
            self._get_one(key, target, offset) for key, target in zip(keys, targets, strict=True)
        ]

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        check_batch(_CAPABILITIES.batch_max, keys)
        with self._lock:
            self._require_open()
            return [key in self._records for key in keys]

    def remove(self, keys: Sequence[ChunkKey]) -> list[Outcome]:
        check_batch(_CAPABILITIES.batch_max, keys)
        with self._lock:
            self._require_open()
            return [self._remove_one(key) for key in keys]

    def scan(self) -> Iterator[StoredChunk]:
        with self._lock:
            self._require_open()
            keys = list(self._records)
        for key in keys:
            with self._lock:  # a head is so short that copying it here beats counting a reader
                record = self._records.get(key)
                if record is None:
                    continue
                head = bytes(self.view(record)[:HEAD_BYTES])
            yield StoredChunk(key, align_up(max(record.nbytes, 1)), head)

    def remember_use(self, keys: Sequence[ChunkKey]) -> None:
        with self._lock:
            self._require_open()
            for key in keys:
                record = self._records.pop(key, None)
                if record is not None:
                    self._records[key] = record

    def free_bytes(self) -> int:
        return self._slab.capacity_bytes - self._slab.used_bytes

    def close(self) -> None:
        with self._lock:
            self._memory = None  # views that others hold keep the memory itself
            self._records.clear()
        self._slab.close()

    def _require_open(self) -> memoryview:
        memory = self._memory
        if memory is None:
            raise Closed("the memory backend is closed")
        return memory

    def _take_reservation(self, record: Descriptor) -> None:
        self._require_open()
        if record.offset not in self._reserved:
            raise ValueError(f"nothing is reserved at offset {record.offset}")
        self._reserved.remove(record.offset)

    def _put_one(self, key: ChunkKey, source: memoryview) -> Outcome:
        if self.contains([key])[0]:
            return Outcome(Status.OK)
        record = self.reserve(source.nbytes)
        if record is None:
            longest = self._slab.largest_free_bytes
            return Outcome(
                Status.FAILED,
                detail=f"no run of {source.nbytes} bytes is free, the longest has {longest}",
            )
        try:
            _copy(self.view(record), source)
        except BaseException:
            self.cancel(record)
            raise
        return Outcome(Status.OK, source.nbytes if self.commit(key, record) else 0)

    def _get_one(self, key: ChunkKey, target: memoryview, offset: int) -> Outcome:
        with self._lock:
            record = self._records.get(key)
            if record is None:
                return Outcome(Status.MISSING)
            source = self.view(record)[offset : offset + target.nbytes]
            self._readers[record.offset] = self._readers.get(record.offset, 0) + 1
        try:
            _copy(target, source)
        finally:
            with self._lock:
                self._end_read(record)
        return Outcome(Status.OK, source.nbytes)

    def _end_read(self, record: Descriptor) -> None:
        self._readers[record.offset] -= 1
        if self._readers[record.offset] > 0:
            return
        del self._readers[record.offset]
        if record.offset in self._condemned:
            self._condemned.remove(record.offset)
            self._slab.free(record.offset)

    def _remove_one(self, key: ChunkKey) -> Outcome:
        record = self._records.pop(key, None)
        if record is None:
            return Outcome(Status.MISSING)
        if record.offset in self._readers:
            self._condemned.add(record.offset)
        else:
            self._slab.free(record.offset)
        return Outcome(Status.OK)


def _copy(target: memoryview, source: memoryview) -> None:
    """Copy all of `source` to the start of `target`; numpy lets go of the GIL, memoryviews do not."""
    if source.nbytes > 0:
        np.copyto(np.frombuffer(target, np.uint8, source.nbytes), np.frombuffer(source, np.uint8))
