"""Arguments of the kernels, as Python packs them: the twins of `csrc/cuda/types.h` and `*_args.h`.

What each field means is said there, once; a test compiles the headers and compares every offset.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum

QUANTISE_THREADS = ROPE_THREADS = HOT_COPY_THREADS = 256
WORK_ITEMS_END = 1 << 31  # of one launch: divisions by multiplication are exact below it


class Element(IntEnum):
    """What the kernels take an element of KV for."""

    BFLOAT16 = 0
    FLOAT16 = 1
    FLOAT32 = 2

    @property
    def nbytes(self) -> int:
        """Bytes of one."""
        return 4 if self is Element.FLOAT32 else 2


class FastDiv(ctypes.Structure):
    """Division by an invariant of 1 up to 2^31 - 1, as `make_fast_div` of `types.h`."""

    _fields_ = (
        ("divisor", ctypes.c_uint32),
        ("multiplier", ctypes.c_uint32),
        ("shift", ctypes.c_uint32),
    )

    def __init__(self, divisor: int) -> None:
        log2_up = (divisor - 1).bit_length()
        if divisor == 1:
            super().__init__(1, 0, 0)
        else:
            super().__init__(divisor, -(-(1 << (31 + log2_up)) // divisor), log2_up - 1)


class CopyArgs(ctypes.Structure):
    """Of the copies: the gathers and scatters, the bulk ones too."""

    _fields_ = (
        ("planes", ctypes.c_uint64),
        ("pages", ctypes.c_uint64),
        ("row_stride", ctypes.c_int64),
        ("col_stride", ctypes.c_int64),
        ("stored_plane_stride", ctypes.c_int64),
        ("stored_row_stride", ctypes.c_int64),
        ("stored_col_stride", ctypes.c_int64),
        ("total", ctypes.c_uint32),
        ("run_bytes", ctypes.c_uint32),
        ("vectors", FastDiv),
        ("cols", FastDiv),
        ("rows", FastDiv),
        ("plane_count", FastDiv),
    )


class QuantiseArgs(ctypes.Structure):
    """Of quantise and dequantise."""

    _fields_ = (
        ("planes", ctypes.c_uint64),
        ("pages", ctypes.c_uint64),
        ("boost_octets", ctypes.c_uint64),
        ("boost_channels", ctypes.c_uint64),
        ("row_stride", ctypes.c_int64),
        ("col_stride", ctypes.c_int64),
        ("stored_plane_stride", ctypes.c_int64),
        ("parameters_offset", ctypes.c_uint32),
        ("boost_offset", ctypes.c_uint32),
        ("total", ctypes.c_uint32),
        ("element", ctypes.c_uint32),
        ("run_elements", ctypes.c_uint32),
        ("cols", ctypes.c_uint32),
        ("rows", ctypes.c_uint32),
        ("group_rows", ctypes.c_uint32),
        ("group_shift", ctypes.c_uint32),
        ("boosted", ctypes.c_uint32),
        ("octets", FastDiv),
        ("heads", FastDiv),
        ("lines", FastDiv),
        ("plane_count", FastDiv),
    )


class RopeArgs(ctypes.Structure):
    """Of the RoPE shift."""

    _fields_ = (
        ("planes", ctypes.c_uint64),
        ("pages", ctypes.c_uint64),
        ("units", ctypes.c_uint64),
        ("page_units", ctypes.c_uint64),
        ("row_stride", ctypes.c_int64),
        ("col_stride", ctypes.c_int64),
        ("stored_plane_stride", ctypes.c_int64),
        ("stored_row_stride", ctypes.c_int64),
        ("stored_col_stride", ctypes.c_int64),
        ("total", ctypes.c_uint32),
        ("element", ctypes.c_uint32),
        ("is_from_stored", ctypes.c_uint32),
        ("run_elements", ctypes.c_uint32),
        ("rotary_elements", ctypes.c_uint32),
        ("pieces", FastDiv),
        ("cols", FastDiv),
        ("rows", FastDiv),
        ("plane_count", FastDiv),
    )


class HotArgs(ctypes.Structure):
    """Of `kvtier_hot_resolve`."""

    _fields_ = (
        ("top_tokens", ctypes.c_uint64),
        ("slot_tokens", ctypes.c_uint64),
        ("order", ctypes.c_uint64),
        ("top_slots", ctypes.c_uint64),
        ("missing_tokens", ctypes.c_uint64),
        ("missing_slots", ctypes.c_uint64),
        ("missing_counts", ctypes.c_uint64),
        ("top_count", ctypes.c_uint32),
        ("capacity", ctypes.c_uint32),
        ("table_size", ctypes.c_uint32),
        ("token_end", ctypes.c_int32),
    )


class HotCopyArgs(ctypes.Structure):
    """Of `kvtier_hot_copy_v*`."""

    _fields_ = (
        ("sources", ctypes.c_uint64),
        ("missing_tokens", ctypes.c_uint64),
        ("missing_slots", ctypes.c_uint64),
        ("missing_counts", ctypes.c_uint64),
        ("target", ctypes.c_uint64),
        ("source_offset", ctypes.c_uint64),
        ("source_stride", ctypes.c_uint64),
        ("target_stride", ctypes.c_uint64),
        ("target_request_stride", ctypes.c_uint64),
        ("row_bytes", ctypes.c_uint32),
        ("request_count", ctypes.c_uint32),
        ("top_count", ctypes.c_uint32),
        ("part_count", ctypes.c_uint32),
        ("part_tokens", FastDiv),
    )


def hot_shared_bytes(table_size: int, capacity: int, threads: int) -> int:
    """Shared memory of one CTA of `kvtier_hot_resolve`, as the header computes it."""
    return table_size * 8 + (capacity + 1) // 2 * 4 + threads // 32 * 8
