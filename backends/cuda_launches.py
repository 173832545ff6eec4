"""Launches of the kernels that compute, from the geometry of what they work on. Moves nothing.

Addresses and numbers are taken as they are: `kvtier.backends.cuda_kernels` checks them before.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from kvtier.backends.cuda_arguments import (
    HOT_COPY_THREADS,
    QUANTISE_THREADS,
    ROPE_THREADS,
    WORK_ITEMS_END,
    Element,
    FastDiv,
    HotArgs,
    HotCopyArgs,
    QuantiseArgs,
    RopeArgs,
    hot_shared_bytes,
)
from kvtier.device import Paging

OCTET = 8
"""Elements that a thread takes at a time."""
WARP_LANES = 32
HOT_THREADS = 512
SHARED_BYTES_MAX = 48 << 10  # what every device grants a CTA unasked
_ALIGN_BYTES = 16


class Axis(StrEnum):
    """Along what the elements of a group lie."""

    TOKEN = "token"
    """Consecutive elements of one token and head: for V."""
    CHANNEL = "channel"
    """One element of consecutive tokens: for K, whose outliers stay in their channels."""


@dataclass(frozen=True, slots=True)
class TileForm:
    """A quantised tile: what one plane holds of one page. Bytes."""

    nbytes: int
    parameters_offset: int
    boost_offset: int


@dataclass(frozen=True, slots=True)
class QuantForm:
    """How KV is quantised; the stored form is laid down in `csrc/cuda/quantise_args.h`."""

    bits: int
    """8, 4 or 2."""
    axis: Axis
    group: int
    """Elements of a group. Token axis: 32, 64, 128 or 256; channel axis: any number of tokens."""
    boosted: int = 0
    """Channels of each head that have 4 bits instead of 2: a multiple of 4."""

    def __post_init__(self) -> None:
        if self.bits not in (8, 4, 2):
            raise ValueError(f"{self.bits} bits a code, expected 8, 4 or 2")
        if self.axis is Axis.TOKEN and self.group not in (32, 64, 128, 256):
            raise ValueError(
                f"groups of {self.group} elements of a token, expected 32, 64, 128 or 256"
            )
        if self.group < 1:
            raise ValueError(f"groups of {self.group} tokens")
        if self.boosted < 0 or self.boosted % 4:
            raise ValueError(f"{self.boosted} boosted channels, expected a multiple of 4")
        if self.boosted and (self.bits != 2 or self.axis is not Axis.CHANNEL):
            raise ValueError("only 2 bits along the channel axis can be boosted")

    def tile(self, rows: int, cols: int, run_elements: int) -> TileForm:
        """Where the parts of a tile of `rows` tokens and `cols` heads lie.

        Raises:
            ValueError: no kernel does it.
        """
        if run_elements < OCTET or run_elements % OCTET:
            raise ValueError(f"heads of {run_elements} elements, expected a multiple of {OCTET}")
        if self.boosted and (run_elements > OCTET * WARP_LANES or self.boosted * 2 > run_elements):
            raise ValueError(
                f"{self.boosted} boosted channels of {run_elements}: at most half of them, "
                f"and heads of at most {OCTET * WARP_LANES}"
            )
        codes = _aligned(rows * cols * run_elements * self.bits // 8)
        boosts = _aligned(rows * cols * self.boosted // 4)
        if self.axis is Axis.TOKEN:
            groups = rows * cols * -(-run_elements // self.group)
        else:
            groups = -(-rows // self.group) * cols * run_elements
        tile = TileForm(codes + boosts + _aligned(4 * groups), codes + boosts, codes)
        if tile.nbytes >= WORK_ITEMS_END:
            raise ValueError(f"tiles of {tile.nbytes} bytes, less than 2 GiB are possible")
        return tile

    def kernel(self, verb: str) -> str:
        """Name of the kernel; `verb` is ``quantise`` or ``dequantise``."""
        if self.boosted:
            return f"kvtier_{verb}_k2x2"
        what = "v_per_token" if self.axis is Axis.TOKEN else "k_per_channel"
        return f"kvtier_{verb}_{what}_b{self.bits}"


@dataclass(frozen=True, slots=True)
class Launch:
    """What `CudaDevice.launch` takes."""

    name: str
    arguments: bytes
    blocks: int
    """CTAs that would do all of it at once; fewer may."""
    threads: int
    shared_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Tables:
    """Device addresses of a launch's tables; 0 where it has none."""

    planes: int
    pages: int
    boost_octets: int = 0
    boost_channels: int = 0
    units: int = 0
    page_units: int = 0


@dataclass(frozen=True, slots=True)
class StoredStrides:
    """Bytes between neighbours on the stored side of a page."""

    plane: int
    row: int
    col: int


def boost_tables(
    channels: npt.NDArray[np.uint8], run_elements: int
) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint8]]:
    """The kernels' two tables of boosted channels, from these [plane, head, rank], ascending."""
    is_boosted = np.zeros((*channels.shape[:2], run_elements), np.uint8)
    np.put_along_axis(is_boosted, channels.astype(np.int64), 1, axis=2)
    octets = is_boosted.reshape(*channels.shape[:2], -1, OCTET)
    masks = np.packbits(octets, axis=3, bitorder="little")[..., 0].astype(np.uint16)
    counts = octets.sum(axis=3, dtype=np.uint16)
    ranks = (np.cumsum(counts, axis=2, dtype=np.uint16) - counts).astype(np.uint16)
    return masks | ranks << 8, np.ascontiguousarray(channels)


def quantise_launch(
    verb: str,
    form: QuantForm,
    paging: Paging,
    element: Element,
    page_count: int,
    plane_count: int,
    tables: Tables,
) -> Launch:
    """Of `form.kernel(verb)`: pages whose tiles lie plane after plane.

    Raises:
        ValueError: too much for one launch.
    """
    width = paging.run_bytes // element.nbytes
    tile = form.tile(paging.rows, paging.cols, width)
    octets, heads = width // OCTET, paging.cols
    lines = -(-paging.rows // form.group)
    lanes = 1
    if form.axis is Axis.TOKEN:
        octets = -(-width // form.group) * (form.group // OCTET)
        lines = paging.rows
    elif form.boosted:
        heads = -(-paging.cols // (WARP_LANES // octets))
        lanes = WARP_LANES
    total = _items(page_count * plane_count * lines * heads * (octets if lanes == 1 else lanes))
    arguments = QuantiseArgs(
        tables.planes,
        tables.pages,
        tables.boost_octets,
        tables.boost_channels,
        paging.row_stride,
        paging.col_stride,
        tile.nbytes,
        tile.parameters_offset,
        tile.boost_offset,
        total,
        element,
        width,
        paging.cols,
        paging.rows,
        form.group if form.axis is Axis.CHANNEL else 0,
        (form.group // OCTET).bit_length() - 1 if form.axis is Axis.TOKEN else 0,
        form.boosted,
        FastDiv(octets),
        FastDiv(heads),
        FastDiv(lines),
        FastDiv(plane_count),
    )
    return _launch(form.kernel(verb), bytes(arguments), total, QUANTISE_THREADS)


def rope_launch(
    paging: Paging,
    element: Element,
    rotary_elements: int,
    is_neox: bool,
    page_count: int,
    plane_count: int,
    tables: Tables,
    stored: StoredStrides | None,
) -> Launch:
    """Of `kvtier_rope_shift_*`: in place, or with `stored` from there to the pages.

    Raises:
        ValueError: too much for one launch.
    """
    width = paging.run_bytes // element.nbytes
    pieces = rotary_elements // (2 * OCTET)
    if stored is not None:
        pieces += -(-(width - rotary_elements) // (2 * OCTET))
    total = _items(page_count * plane_count * paging.rows * paging.cols * pieces)
    strides = stored or StoredStrides(0, 0, 0)
    arguments = RopeArgs(
        tables.planes,
        tables.pages,
        tables.units,
        tables.page_units,
        paging.row_stride,
        paging.col_stride,
        strides.plane,
        strides.row,
        strides.col,
        total,
        element,
        stored is not None,
        width,
        rotary_elements,
        FastDiv(pieces),
        FastDiv(paging.cols),
        FastDiv(paging.rows),
        FastDiv(plane_count),
    )
    name = f"kvtier_rope_shift_{'neox' if is_neox else 'interleaved'}"
    return _launch(name, bytes(arguments), total, ROPE_THREADS)


def hot_table_size(top_count: int) -> int:
    """Places of the hash table: a power of two, at least twice what it holds."""
    return 1 << max(5, (2 * top_count - 1).bit_length())


def hot_resolve_launch(
    arguments: HotArgs, request_count: int, threads: int = HOT_THREADS
) -> Launch:
    """Of `kvtier_hot_resolve`: one CTA a request.

    Raises:
        ValueError: the table and the slots do not fit into shared memory.
    """
    shared = hot_shared_bytes(arguments.table_size, arguments.capacity, threads)
    if shared > SHARED_BYTES_MAX:
        raise ValueError(
            f"{arguments.top_count} tokens in {arguments.capacity} slots need {shared} bytes of "
            f"shared memory, at most {SHARED_BYTES_MAX}"
        )
    return Launch("kvtier_hot_resolve", bytes(arguments), request_count, threads, shared)


def hot_copy_launch(arguments: HotCopyArgs, vector_bytes: int) -> Launch:
    """Of `kvtier_hot_copy_v*`; as many CTAs as if every token were missing."""
    rows = arguments.request_count * arguments.top_count
    blocks = -(-rows * WARP_LANES // HOT_COPY_THREADS)
    name = f"kvtier_hot_copy_v{vector_bytes}"
    return Launch(name, bytes(arguments), blocks, HOT_COPY_THREADS)


def _launch(name: str, arguments: bytes, total: int, threads: int) -> Launch:
    return Launch(name, arguments, -(-total // threads), threads)


def _items(total: int) -> int:
    if total >= WORK_ITEMS_END:
        raise ValueError(f"{total} work items in one launch, fewer than 2^31 are possible")
    return total


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
