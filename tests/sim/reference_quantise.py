"""Quantised tiles in numpy, after the words of `csrc/cuda/quantise_args.h`, operation by operation.

A tile is [token, head, element] of fp32 values; its stored form an array of bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from reference_elements import Floats

Bytes = npt.NDArray[np.uint8]
Codes = npt.NDArray[np.uint8]
Halves = npt.NDArray[np.float16]
LARGEST_HALF = np.float32(65504)


@dataclass(frozen=True)
class Stored:
    """A tile's stored form, and where its parts begin."""

    nbytes: int
    parameters_offset: int
    boost_offset: int


def stored_form(
    shape: tuple[int, int, int], bits: int, axis: str, group: int, boosted: int
) -> Stored:
    tokens, heads, width = shape
    codes = _aligned(tokens * heads * width * bits // 8)
    boosts = _aligned(tokens * heads * boosted // 4)
    along = tokens if axis == "channel" else width
    groups = -(-along // group) * heads * (width if axis == "channel" else tokens)
    return Stored(codes + boosts + _aligned(4 * groups), codes + boosts, codes)


def quantise(
    values: Floats,
    bits: int,
    axis: str,
    group: int,
    channels: npt.NDArray[np.uint8] | None,
    gap: int,
) -> Bytes:
    """The tile's stored form, `gap` in the bytes between its parts.

    `channels` are each head's boosted ones, [head, rank], ascending.
    """
    along = 0 if axis == "channel" else 2
    largest = np.full((1, *values.shape[1:]), (1 << bits) - 1, np.float32)
    if channels is not None:
        np.put_along_axis(largest, channels[None].astype(np.int64), np.float32(15), axis=2)
    parts = range(group, values.shape[along], group)
    codes, pairs = [], []
    for x in np.split(values, list(parts), axis=along):
        top = largest if axis == "channel" else largest[:, :1, :1]
        zero, scale = _parameters(x, along, top)
        codes.append(_codes(x, top, zero, scale))
        pairs.append(np.stack([scale, zero], axis=-1))
    parameters = np.concatenate(pairs, axis=along)  # [token or group, head, group or element, 2]
    all_codes = np.concatenate(codes, axis=along)
    boosted = 0 if channels is None else channels.shape[1]
    form = stored_form(values.shape, bits, axis, group, boosted)
    tile = np.full(form.nbytes, gap, np.uint8)
    if channels is not None:
        where = np.broadcast_to(channels, (len(values), *channels.shape)).astype(np.int64)
        _place(tile, form.boost_offset, _packed(np.take_along_axis(all_codes, where, 2), 2))
        all_codes = np.where(largest == 15, all_codes >> np.uint8(2), all_codes)
    _place(tile, 0, _packed(all_codes, bits))
    _place(tile, form.parameters_offset, np.ascontiguousarray(parameters).view(np.uint8))
    return tile


def dequantise(
    tile: Bytes,
    shape: tuple[int, int, int],
    bits: int,
    axis: str,
    group: int,
    channels: npt.NDArray[np.uint8] | None,
) -> Floats:
    """The values that a stored tile stands for, before they are rounded to elements."""
    tokens, heads, width = shape
    boosted = 0 if channels is None else channels.shape[1]
    form = stored_form(shape, bits, axis, group, boosted)
    codes = _unpacked(tile, bits, tokens * heads * width).reshape(shape)
    if channels is not None:
        where = np.broadcast_to(channels, (tokens, *channels.shape)).astype(np.int64)
        low = _unpacked(tile[form.boost_offset :], 2, where.size).reshape(where.shape)
        high = np.take_along_axis(codes, where, 2)
        np.put_along_axis(codes, where, high << 2 | low, 2)
    pairs = tile[form.parameters_offset :].view(np.float16)
    if axis == "channel":
        count = -(-tokens // group)
        pairs = pairs[: count * heads * width * 2].reshape(count, heads, width, 2)
        pairs = np.repeat(pairs, group, axis=0)[:tokens]
    else:
        count = -(-width // group)
        pairs = pairs[: tokens * heads * count * 2].reshape(tokens, heads, count, 2)
        pairs = np.repeat(pairs, group, axis=2)[:, :, :width]
    scale, zero = pairs[..., 0].astype(np.float32), pairs[..., 1].astype(np.float32)
    values: Floats = np.minimum(codes.astype(np.float32) * scale + zero, LARGEST_HALF)
    return values


def _parameters(x: Floats, along: int, largest: Floats) -> tuple[Halves, Halves]:
    low = np.fmin.reduce(x, axis=along, initial=np.float32(np.inf), keepdims=True)
    high = np.fmax.reduce(x, axis=along, initial=np.float32(-np.inf), keepdims=True)
    empty = low > high
    low = np.where(empty, np.float32(0), np.clip(low, -LARGEST_HALF, LARGEST_HALF))
    high = np.where(empty, np.float32(0), np.clip(high, -LARGEST_HALF, LARGEST_HALF))
    zero = low.astype(np.float16) + np.float16(0)
    span = high - zero.astype(np.float32)
    scale = np.where(span > 0, span * (np.float32(1) / largest), np.float32(0))
    return zero, scale.astype(np.float16)


def _codes(x: Floats, largest: Floats, zero: Halves, scale: Halves) -> Codes:
    wide = scale.astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        inverse = np.where(wide > 0, np.float32(1) / wide, np.float32(0))
        place = (x - zero.astype(np.float32)) * inverse
    place = np.where(np.isnan(place), np.float32(0), place)
    codes: Codes = np.rint(np.minimum(np.maximum(place, np.float32(0)), largest)).astype(np.uint8)
    return codes


def _packed(codes: Codes, bits: int) -> Bytes:
    each = 8 // bits
    low = codes.reshape(-1, each).astype(np.uint16) & np.uint16((1 << bits) - 1)
    shifted = low << np.arange(0, 8, bits, dtype=np.uint16)
    packed: Bytes = shifted.sum(axis=1).astype(np.uint8)
    return packed


def _unpacked(packed: Bytes, bits: int, count: int) -> Codes:
    each = 8 // bits
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes: Codes = packed[: count // each, None] >> shifts & np.uint8((1 << bits) - 1)
    return codes.reshape(-1)


def _place(tile: Bytes, offset: int, part: Bytes) -> None:
    tile[offset : offset + part.size] = part.reshape(-1)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 16) * 16
