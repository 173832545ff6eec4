"""What an engine's paged KV memory looks like, and where it lies.

`KvLayout` is the part that goes into every key (through its fingerprint): two engines share chunks
only if it is equal. `PagedKv` is the part that a process alone knows: addresses and strides.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier import _core
from kvtier.device import Device, DeviceCopies, DevicePlace, Paging
from kvtier.errors import LayoutMismatch

Addresses = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """Shape of one group of layers, as chunks of it are stored; sizes in bytes.

    A page holds, for each layer, `planes` planes (K and V apart, or one that joins them). Build it
    with `per_token` where the place of each token is known, with `opaque` where it is not.
    """

    layers: int
    planes: int
    page_tokens: int
    rows: int
    cols: int
    run_bytes: int
    dtype: str
    packing: str

    def __post_init__(self) -> None:
        for name in ("layers", "planes", "page_tokens", "rows", "cols", "run_bytes"):
            value = getattr(self, name)
            if not 1 <= value < 2**31:
                raise LayoutMismatch(f"{name} is {value}, expected 1 to 2^31 - 1")

    @classmethod
    def per_token(
        cls, *, layers: int, planes: int, page_tokens: int, heads: int, head_bytes: int, dtype: str
    ) -> KvLayout:
        """Token `t`, head `h` of a plane is a run of `head_bytes` whose place is known.

        Stored token-major whatever the engine's order is, so engines of different order share.
        """
        return cls(
            layers=layers,
            planes=planes,
            page_tokens=page_tokens,
            rows=page_tokens,
            cols=heads,
            run_bytes=head_bytes,
            dtype=dtype,
            packing="",
        )

    @classmethod
    def opaque(
        cls,
        *,
        layers: int,
        page_tokens: int,
        page_bytes: int,
        dtype: str,
        packing: str,
        planes: int = 1,
    ) -> KvLayout:
        """The engine packs a page as it likes; only whole pages are copied.

        `packing` names the engine, its backend and its packing: pages of different packings must
        never meet.
        """
        if not packing:
            raise LayoutMismatch("an opaque layout needs the name of its packing")
        return cls(
            layers=layers,
            planes=planes,
            page_tokens=page_tokens,
            rows=1,
            cols=1,
            run_bytes=page_bytes,
            dtype=dtype,
            packing=packing,
        )

    @property
    def page_bytes(self) -> int:
        """One plane of one page."""
        return self.rows * self.cols * self.run_bytes

    @property
    def block_bytes(self) -> int:
        """One page over all layers."""
        return self.layers * self.planes * self.page_bytes

    @property
    def fingerprint(self) -> bytes:
        """16 bytes; equal exactly when stored chunks are interchangeable."""
        text = "|".join(
            str(part)
            for part in (
                "kvtier layout 1",
                self.layers,
                self.planes,
                self.page_tokens,
                self.rows,
                self.cols,
                self.run_bytes,
                self.dtype,
                self.packing,
            )
        )
        return hashlib.sha256(text.encode()).digest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PagedKv:
    """Where an engine's pages lie in this process.

    Byte `x` of (plane `p`, page `g`, token `t`, head `h`) is at
    ``plane_addresses[p] + g * page_stride + t * row_stride + h * col_stride + x``; planes are
    ordered layer by layer, K before V. Strides in bytes; row and column strides are ignored by
    opaque layouts. `owner` is kept alive as long as this is. With a `place` the addresses are a
    device's, else they are this process's own memory.
    """

    plane_addresses: Addresses
    page_count: int
    page_stride: int
    row_stride: int = 0
    col_stride: int = 0
    owner: Any = None
    place: DevicePlace | None = None

    def paging(self, layout: KvLayout) -> Paging:
        """The same as native copies take it.

        Raises:
            LayoutMismatch: there is not an address for each of the layout's planes.
        """
        expected = layout.layers * layout.planes
        if len(self.plane_addresses) != expected:
            raise LayoutMismatch(
                f"{len(self.plane_addresses)} plane addresses for {layout.layers} layers of "
                f"{layout.planes} planes"
            )
        return Paging(
            self.plane_addresses,
            self.page_count,
            self.page_stride,
            layout.rows,
            self.row_stride,
            layout.cols,
            self.col_stride,
            layout.run_bytes,
            self.owner,
        )

    def copy_plan(self, layout: KvLayout) -> _core.CopyPlan:
        """The native copy plan between these pages, in host memory, and block-first segments.

        Raises:
            LayoutMismatch: the addresses do not fit the layout.
        """
        at = self.paging(layout)
        try:
            return _core.CopyPlan(
                at.plane_addresses,
                at.page_count,
                at.page_stride,
                at.rows,
                at.row_stride,
                at.cols,
                at.col_stride,
                at.run_bytes,
            )
        except ValueError as error:
            raise LayoutMismatch(str(error)) from error

    def device_copies(self, layout: KvLayout, device: Device) -> DeviceCopies:
        """The copies between these pages, on `device`, and block-first segments.

        Raises:
            LayoutMismatch: the addresses do not fit the layout, or are not memory of the device.
        """
        try:
            return device.copies(self.paging(layout))
        except ValueError as error:
            raise LayoutMismatch(str(error)) from error
