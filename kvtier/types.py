"""The frozen values that every part of kvtier speaks in; this module imports only the errors."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NewType

ChunkKey = NewType("ChunkKey", bytes)
"""32-byte name of one chunk: chained over its prefix, salted by its namespace (`kvtier.keys`)."""

KEY_BYTES = 32

ALIGN_BYTES = 4096  # O_DIRECT, cuFile and page-wise accounting all need whole memory pages


class Status(enum.Enum):
    """What became of one key of a batch."""

    OK = "ok"
    MISSING = "missing"
    """The key is not held. Expected traffic, not a fault."""
    RETRY = "retry"
    """A passing fault; the same call may succeed later."""
    FAILED = "failed"
    """A lasting fault; `Outcome.detail` says which."""
    CORRUPT = "corrupt"
    """Bytes are there and are wrong; they were not given out."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result for one key of a batch, at the same index as its key."""

    status: Status
    nbytes: int = 0
    """Bytes moved; 0 unless `status` is `OK`."""
    detail: str = ""

    @property
    def ok(self) -> bool:
        """Whether the key's bytes arrived whole."""
        return self.status is Status.OK


class RegionKind(enum.Enum):
    """What kind of memory a region is."""

    DRAM = "dram"
    VRAM = "vram"
    FILE = "file"
    BLK = "blk"
    """A block device."""
    OBJ = "obj"
    """An object in an object store."""


@dataclass(frozen=True, slots=True)
class Region:
    """Registered memory; who registered it keeps it alive."""

    kind: RegionKind
    address: int
    nbytes: int
    device: int = 0
    number: int = -1
    """Which of its agent's regions it is; -1 for memory that no agent has registered."""


@dataclass(frozen=True, slots=True)
class Descriptor:
    """One piece of a region: what a transfer reads or fills."""

    region: Region
    offset: int
    nbytes: int

    @property
    def address(self) -> int:
        """Absolute address of the first byte."""
        return self.region.address + self.offset


def align_up(nbytes: int, alignment: int = ALIGN_BYTES) -> int:
    """`nbytes` rounded up to a multiple of `alignment`."""
    return -(-nbytes // alignment) * alignment
