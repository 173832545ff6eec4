"""Transfers that are plain copies between two pieces of mapped memory: what such backends share.

`kvtier.backends.host` copies within the process, `kvtier.backends.shm` from and to memory that
another process shares; both differ only in where their handles come from.
"""

from __future__ import annotations

import abc
import contextlib
import os
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from kvtier._core import Completions, CopyPool
from kvtier.transfer import BlockingTransfers, Op, Pieces, Results, Side, Stop, Unsuitable
from kvtier.types import Region, RegionKind

BATCH_BYTES = 64 << 20  # between two looks at the stop flag: some 10 ms
_ADDRESS_MAX = 1 << 64

Addresses = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class Mapped:
    """A handle: memory that this process can reach by address."""

    address: int
    nbytes: int
    is_writable: bool


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """A prepared transfer: absolute addresses, and after which pieces to look at the stop flag."""

    targets: Addresses
    sources: Addresses
    lengths: Addresses
    batch_ends: list[int]
    kept: tuple[Any, ...]
    """The handles, which keep mappings where they are."""


class CopyingTransfers(BlockingTransfers):
    """Copies on one thread, of which each copy runs on as many as memory bandwidth needs.

    Prepare costs a few array operations; a batch of 64 MiB is the unit of cancelling.
    """

    threads: ClassVar[int] = 2

    def __init__(self, completions: Completions) -> None:
        self._pool = CopyPool(copy_threads())
        super().__init__(completions)

    @abc.abstractmethod
    def register(self, region: Region, source: Any) -> Mapped: ...  # noqa: D102

    def deregister(self, handle: Any) -> None:
        """Nothing was taken."""

    def prepare(self, pieces: Pieces, link: Any) -> Copies:  # noqa: D102
        local, remote = addresses_of(pieces.local), addresses_of(pieces.remote)
        source_side, target_side = pieces.remote, pieces.local
        sources, targets = remote, local
        if pieces.op is Op.WRITE:
            source_side, target_side = pieces.local, pieces.remote
            sources, targets = local, remote
        _check_writable(target_side)
        lengths = np.ascontiguousarray(pieces.lengths, np.uint64)
        check_overlap(targets, sources, lengths)
        kept = (*source_side.handles, *target_side.handles)
        return Copies(targets, sources, lengths, batch_ends(lengths), kept)

    def piece_count(self, prepared: Copies) -> int:  # noqa: D102
        return len(prepared.lengths)

    def move(self, prepared: Copies, results: Results, stop: Stop) -> str:  # noqa: D102
        first = 0
        for end in prepared.batch_ends:
            if stop.is_set():
                return "stopped"
            part = slice(first, end)
            lengths = prepared.lengths[part]
            self._pool.copy(prepared.targets[part], prepared.sources[part], lengths)
            results[part] = lengths
            first = end
        return ""


def copy_threads() -> int:
    """Two where there are cores to spare: more do not make memory faster for long."""
    return 1 + (len(os.sched_getaffinity(0)) >= 4)


def map_region(region: Region, source: Any) -> Mapped:
    """The handle of memory of this process.

    Raises:
        Unsuitable: it is no such memory.
    """
    if region.kind is not RegionKind.DRAM:
        raise Unsuitable(f"{region.kind.value} is not memory of this process")
    if region.address <= 0 or region.nbytes <= 0 or region.address + region.nbytes > _ADDRESS_MAX:
        raise Unsuitable(f"{region.nbytes} bytes at address {region.address:#x} are no memory")
    is_writable = True
    with contextlib.suppress(TypeError), memoryview(source) as view:
        is_writable = not view.readonly
    return Mapped(region.address, region.nbytes, is_writable)


def batch_ends(lengths: Addresses) -> list[int]:
    """Indices after which about `BATCH_BYTES` have been moved since the one before."""
    batches = (np.cumsum(lengths, dtype=np.uint64) - np.uint64(1)) // np.uint64(BATCH_BYTES)
    return [*(np.flatnonzero(np.diff(batches)) + 1).tolist(), len(lengths)]


def addresses_of(side: Side) -> Addresses:
    """Where each piece begins on that side; its handles have an `address`."""
    starts = np.array([handle.address for handle in side.handles], np.uint64)
    return np.ascontiguousarray(starts[side.which] + side.offsets, np.uint64)


def _check_writable(target: Side) -> None:
    """A store into read-only memory would end the process."""
    is_writable = np.array([handle.is_writable for handle in target.handles], bool)
    if not is_writable.all() and not is_writable[target.which].all():
        raise Unsuitable("the target region is read-only")


def check_overlap(targets: Addresses, sources: Addresses, lengths: Addresses) -> None:
    """A copy between bytes that overlap would read what it has just written."""
    apart = np.where(targets > sources, targets - sources, sources - targets)
    overlaps = apart < lengths
    if overlaps.any():
        raise Unsuitable(f"source and target of piece {int(np.argmax(overlaps))} overlap")
