"""Pieces between memory and files or block devices: direct I/O, many requests in flight.

Pieces whose address, offset and length are multiples of 4 KiB go past the page cache where the file
system lets them; others go through it. The kernel keeps the two views of a file the same.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from kvtier._core import Completions, FileEngine
from kvtier.backends.file_regions import FILE_KINDS, MemoryHandle
from kvtier.backends.file_transfers import FileTransfers, routes_between
from kvtier.transfer import Unsuitable
from kvtier.types import Region, RegionKind

DEPTH = 64  # requests in flight of one transfer: what pieces of 64 KiB need; 16 do for large ones
SEGMENT_BYTES = 2 << 20  # of one request; what is in flight at a cancel has to end, so not more


class PosixTransfers(FileTransfers):
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
        engine = FileEngine(depth, segment_bytes, method)
        routes = routes_between((RegionKind.DRAM,), FILE_KINDS)
        super().__init__(completions, engine, engine, routes, durable=durable, bytes_per_s=2e9)

    def register_memory(self, region: Region) -> MemoryHandle:
        if region.kind is not RegionKind.DRAM:
            raise Unsuitable(f"posix moves between memory and files, not {region.kind.value}")
        return MemoryHandle(region.address)
