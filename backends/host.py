"""Transfers between two regions of this process's own memory: native copies on threads."""

from __future__ import annotations

from typing import Any, ClassVar

from kvtier.copying import BATCH_BYTES, CopyingTransfers, Mapped, map_region
from kvtier.transfer import Reach, Route
from kvtier.types import Region, RegionKind

_REACH = Reach(
    routes=frozenset({Route(RegionKind.DRAM, RegionKind.DRAM)}),
    piece_bytes_max=BATCH_BYTES,
    latency_s=5e-5,
    bytes_per_s=5e9,
)


class HostTransfers(CopyingTransfers):
    """Any memory of this process; both sides are the agent's own."""

    name: ClassVar[str] = "host"

    @property
    def reach(self) -> Reach:
        return _REACH

    def register(self, region: Region, source: Any) -> Mapped:
        return map_region(region, source)
