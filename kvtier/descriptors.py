"""Lists of descriptors as the agent takes them, and what backends get: merged, cut, within bounds.

A list is `Descriptor`s, or an N x 3 uint64 array whose rows are (region number, offset, bytes).
All work is on whole arrays: 4096 descriptors cost well under a millisecond.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvtier.transfer import Results
from kvtier.types import Descriptor, Region

DESCRIPTORS_MAX = 1 << 20

Table: TypeAlias = npt.NDArray[np.uint64]
DescriptorList: TypeAlias = Sequence[Descriptor] | Table
Select: TypeAlias = Sequence[int] | npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class Ends:
    """One side's descriptors: offsets within regions that are known and large enough."""

    regions: tuple[Region, ...]
    """Each region once."""
    which: npt.NDArray[np.uint32]
    """Per descriptor, an index into `regions`."""
    offsets: Table
    lengths: Table


@dataclass(frozen=True, slots=True)
class Cut:
    """Descriptor pairs as pieces, adjacent ones merged and long ones cut."""

    local_which: npt.NDArray[np.uint32]
    local_offsets: Table
    remote_which: npt.NDArray[np.uint32]
    remote_offsets: Table
    lengths: Table
    first: npt.NDArray[np.int64]
    """Per descriptor, the first piece that has bytes of it."""
    last: npt.NDArray[np.int64]
    """Per descriptor, the last one."""


def read_list(
    side: str, given: DescriptorList, select: Select | None, regions: Mapping[int, Region]
) -> Ends:
    """Check one side's list against the regions it may name.

    Raises:
        ValueError: it is malformed, empty, too long, or names bytes outside a region.
    """
    table: Table = _table(side, given, regions)
    if select is not None:
        table = _selected(side, table, select)
    if not 1 <= len(table) <= DESCRIPTORS_MAX:
        raise ValueError(f"{side}: {len(table)} descriptors, between 1 and {DESCRIPTORS_MAX}")
    numbers, offsets, lengths = (np.ascontiguousarray(table[:, i]) for i in range(3))
    if bool((numbers == numbers[0]).all()):
        distinct, which = numbers[:1], np.zeros(len(table), np.uint32)
    else:
        distinct, inverse = np.unique(numbers, return_inverse=True)
        which = inverse.astype(np.uint32)
    used = []
    for number in distinct.tolist():
        if number not in regions:
            raise ValueError(f"{side}: there is no region {number}")
        used.append(regions[number])
    sizes = np.array([region.nbytes for region in used], np.uint64)[which]
    bad = (lengths == 0) | (lengths > sizes) | (offsets > sizes - np.minimum(lengths, sizes))
    if bool(bad.any()):
        at = int(np.flatnonzero(bad)[0])
        raise ValueError(
            f"{side}: descriptor {at} is {lengths[at]} bytes at offset {offsets[at]} of region "
            f"{numbers[at]}, which has {sizes[at]} bytes"
        )
    return Ends(tuple(used), which, offsets, lengths)


def cut(local: Ends, remote: Ends, piece_bytes_max: int) -> Cut:
    """Pair both sides, merge what is adjacent on both, cut what is longer than `piece_bytes_max`.

    Raises:
        ValueError: the sides differ in number or length of descriptors.
    """
    if len(local.lengths) != len(remote.lengths):
        raise ValueError(f"{len(local.lengths)} local, {len(remote.lengths)} remote descriptors")
    lengths = local.lengths
    if not np.array_equal(lengths, remote.lengths):
        at = int(np.flatnonzero(lengths != remote.lengths)[0])
        raise ValueError(
            f"descriptor {at}: {lengths[at]} bytes here, {remote.lengths[at]} bytes there"
        )
    joined = np.ones(len(lengths) - 1, bool)
    for ends in (local, remote):
        joined &= ends.which[1:] == ends.which[:-1]
        joined &= ends.offsets[1:] == ends.offsets[:-1] + lengths[:-1]
    starts = np.concatenate(([0], np.flatnonzero(~joined) + 1))
    runs = np.add.reduceat(lengths, starts)
    run_of = np.zeros(len(lengths), np.int64)
    run_of[starts[1:]] = 1
    run_of = np.cumsum(run_of)
    limit = np.uint64(piece_bytes_max)
    counts = ((runs + (limit - np.uint64(1))) // limit).astype(np.int64)
    first_piece = np.cumsum(counts) - counts  # of each run
    begins = local.offsets - local.offsets[starts][run_of]  # of each descriptor in its run
    first = first_piece[run_of] + (begins // limit).astype(np.int64)
    last = first_piece[run_of] + ((begins + lengths - np.uint64(1)) // limit).astype(np.int64)
    if int(counts.max()) == 1:
        head, within, sizes = starts, np.zeros(len(starts), np.uint64), runs
    else:
        run = np.repeat(np.arange(len(runs)), counts)
        head = starts[run]
        within = (np.arange(len(run)) - first_piece[run]).astype(np.uint64) * limit
        sizes = np.minimum(limit, runs[run] - within)
    return Cut(
        local.which[head],
        local.offsets[head] + within,
        remote.which[head],
        remote.offsets[head] + within,
        sizes,
        first,
        last,
    )


def is_aligned(pieces: Cut, alignment: int) -> bool:
    """Whether offsets and lengths of both sides are multiples of `alignment`."""
    if alignment == 1:
        return True
    every = pieces.local_offsets | pieces.remote_offsets | pieces.lengths
    return not bool((every % np.uint64(alignment)).any())


def per_descriptor(pieces: Cut, results: Results, started: int) -> tuple[Results, Results]:
    """Per descriptor: 0 or the first error of its pieces, and whether its target may be changed."""
    bad = results != pieces.lengths.astype(np.int64)
    before = np.concatenate(([0], np.cumsum(bad)))
    failed = before[pieces.last + 1] > before[pieces.first]
    codes = np.zeros(len(failed), np.int64)
    if bool(failed.any()):
        wrong = np.flatnonzero(bad)
        earliest = wrong[np.searchsorted(wrong, pieces.first[failed])]
        short = results[earliest] >= 0  # a backend that says fewer bytes and no reason
        codes[failed] = np.where(short, SHORT, results[earliest])
    touched = (pieces.first < started).astype(np.int64)
    return codes, touched


SHORT = -5  # EIO


def _table(side: str, given: DescriptorList, regions: Mapping[int, Region]) -> Table:
    if isinstance(given, np.ndarray):
        if given.ndim != 2 or given.shape[1] != 3 or given.dtype != np.uint64:
            raise ValueError(
                f"{side}: an array of shape {given.shape} and dtype {given.dtype}, "
                "expected N x 3 and uint64: region number, offset, bytes"
            )
        return given
    rows = []
    for at, descriptor in enumerate(given):
        region = descriptor.region
        if regions.get(region.number) != region:
            raise ValueError(f"{side}: descriptor {at} is of a region that is not registered here")
        if descriptor.offset < 0 or descriptor.nbytes < 0:
            raise ValueError(f"{side}: descriptor {at} has a negative offset or length")
        rows.append((region.number, descriptor.offset, descriptor.nbytes))
    return np.array(rows, np.uint64).reshape(-1, 3)


def _selected(side: str, table: Table, select: Select) -> Table:
    index = np.asarray(select)
    if index.ndim != 1 or not np.issubdtype(index.dtype, np.integer):
        raise ValueError(f"{side}: the selection is not a list of whole numbers")
    if len(index) and not (int(index.min()) >= 0 and int(index.max()) < len(table)):
        raise ValueError(f"{side}: the selection reaches outside the {len(table)} descriptors")
    selected: Table = table[index]
    return selected
