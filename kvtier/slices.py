"""Descriptors of a request's KV, layer by layer, between pages of different size, order and shard.

Pure: geometries and page numbers in, N x 3 arrays of (region, offset, bytes) out. What is adjacent
on both sides is one descriptor: whole pages of both planes at best, a head of a token at worst.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtier.errors import LayoutMismatch
from kvtier.geometry import Geometry, Part

Table = npt.NDArray[np.uint64]
PageIds = npt.NDArray[np.int64]

_Offsets = npt.NDArray[np.int64]
_Runs = tuple[_Offsets, _Offsets, _Offsets]  # source offset, target offset, bytes


def page_ids(
    given: Sequence[int] | npt.NDArray[np.integer], tokens: int, place: Geometry
) -> PageIds:
    """The pages of a request of `tokens` tokens, checked.

    Raises:
        ValueError: too few or too many for the tokens, or outside the engine's pages.
    """
    ids = np.asarray(given, dtype=np.int64)
    expected = -(-tokens // place.shape.page_tokens)
    if tokens < 1 or ids.shape != (expected,):
        raise ValueError(f"{ids.size} pages for {tokens} tokens, expected {expected}")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= place.page_count:
        raise ValueError(f"page {low if low < 0 else high} of {place.page_count}")
    return ids


class LayerSlices:
    """The descriptors of one request from one source to one target.

    Tokens are laid out once; a layer costs one addition per descriptor. About 10 ms for 128k tokens
    of 16-token pages, 100 times that where each token's heads must be taken apart.
    """

    def __init__(
        self,
        source: Geometry,
        target: Geometry,
        parts: Sequence[Part],
        source_pages: PageIds,
        target_pages: PageIds,
        tokens: int,
    ) -> None:
        source.shape.check_sends_to(target.shape)
        if len(np.unique(target_pages)) != len(target_pages):
            raise LayoutMismatch("a target page is named twice: its bytes would be of two places")
        self._source, self._target = source, target
        self._parts = [
            (part, _runs(source, target, part, source_pages, target_pages, tokens))
            for part in parts
        ]
        self._joined: dict[tuple[int, tuple[int, ...], tuple[int, ...]], _Runs] = {}
        self.layers = tuple(
            sorted({part.first_layer + i for part in parts for i in range(part.layers)})
        )
        """Layers of the model that have anything to send, in order."""

    def layer(self, layer: int) -> tuple[Table, Table]:
        """Source and target descriptors of one layer of the model, pairwise of equal length."""
        pieces = [
            piece
            for at, (part, _) in enumerate(self._parts)
            if part.first_layer <= layer < part.first_layer + part.layers
            for piece in self._planes(at, layer)
        ]
        return (
            np.concatenate([local for local, _ in pieces]),
            np.concatenate([remote for _, remote in pieces]),
        )

    def _planes(self, at: int, layer: int) -> list[tuple[Table, Table]]:
        """Of one part, in as few tables as the planes have regions."""
        source, target = self._source, self._target
        s_planes, t_planes = _planes_of(source, layer), _planes_of(target, layer)
        s_regions = {region for region, _ in s_planes}
        t_regions = {region for region, _ in t_planes}
        if len(s_regions) == len(t_regions) == 1:
            groups = [(s_planes, t_planes)]
        else:
            groups = [([s], [t]) for s, t in zip(s_planes, t_planes, strict=True)]
        tables = []
        for s_group, t_group in groups:
            (s_region, s_base), (t_region, t_base) = s_group[0], t_group[0]
            s_shifts = tuple(offset - s_base for _, offset in s_group)
            t_shifts = tuple(offset - t_base for _, offset in t_group)
            s_runs, t_runs, nbytes = self._join(at, s_shifts, t_shifts)
            tables.append(
                (_table(s_region, s_base, s_runs, nbytes), _table(t_region, t_base, t_runs, nbytes))
            )
        return tables

    def _join(self, at: int, s_shifts: tuple[int, ...], t_shifts: tuple[int, ...]) -> _Runs:
        """The runs of planes at these distances; the same for nearly all layers."""
        key = (at, s_shifts, t_shifts)
        if key not in self._joined:
            s_runs, t_runs, nbytes = self._parts[at][1]
            self._joined[key] = _merge(
                np.concatenate([s_runs + shift for shift in s_shifts]),
                np.concatenate([t_runs + shift for shift in t_shifts]),
                np.tile(nbytes, len(s_shifts)),
            )
        return self._joined[key]


def _planes_of(place: Geometry, layer: int) -> list[tuple[int, int]]:
    """Region and offset of each plane of one layer of the model."""
    planes = place.shape.planes
    first = (layer - place.shape.shard.first_layer) * planes
    return list(
        zip(
            place.plane_regions[first : first + planes],
            place.plane_offsets[first : first + planes],
            strict=True,
        )
    )


def _table(region: int, base: int, offsets: _Offsets, nbytes: _Offsets) -> Table:
    table = np.empty((len(offsets), 3), np.uint64)
    table[:, 0] = region
    table[:, 1] = offsets + base
    table[:, 2] = nbytes
    return table


def _runs(
    source: Geometry, target: Geometry, part: Part, s_pages: PageIds, t_pages: PageIds, tokens: int
) -> _Runs:
    """Runs of one plane, as offsets from its first byte."""
    run = source.shape.run_bytes
    if source.shape.packing:
        return _merge(
            s_pages * source.page_stride, t_pages * target.page_stride, np.full(len(s_pages), run)
        )
    s_tokens, t_tokens = source.shape.page_tokens, target.shape.page_tokens
    starts = np.union1d(np.arange(0, tokens, s_tokens), np.arange(0, tokens, t_tokens))
    counts = np.diff(starts, append=tokens)  # tokens that share a page on both sides
    s_at, t_at = (
        pages[starts // size] * place.page_stride
        + starts % size * place.row_stride
        + (part.first_head - place.shape.shard.first_head) * place.col_stride
        for pages, size, place in ((s_pages, s_tokens, source), (t_pages, t_tokens, target))
    )
    heads = part.heads
    if heads > 1 and source.col_stride == target.col_stride == run:
        run, heads = run * heads, 1  # the heads of a token are one run
    rows_join = source.row_stride == target.row_stride == run
    if not rows_join:
        of = np.repeat(np.arange(len(counts)), counts)
        row = np.arange(tokens) - starts[of]
        s_at = s_at[of] + row * source.row_stride
        t_at = t_at[of] + row * target.row_stride
        counts = np.ones(tokens, np.int64)
    if heads > 1:
        head = np.arange(heads)
        s_at = (s_at[:, None] + head * source.col_stride).ravel()
        t_at = (t_at[:, None] + head * target.col_stride).ravel()
        counts = np.repeat(counts, heads)
    return _merge(s_at, t_at, counts * run)


def _merge(s_at: _Offsets, t_at: _Offsets, nbytes: _Offsets) -> _Runs:
    """In the source's order, with what is adjacent on both sides made one."""
    if len(s_at) > 1 and bool((s_at[1:] < s_at[:-1]).any()):
        order = np.argsort(s_at, kind="stable")
        s_at, t_at, nbytes = s_at[order], t_at[order], nbytes[order]
    apart = (s_at[1:] != s_at[:-1] + nbytes[:-1]) | (t_at[1:] != t_at[:-1] + nbytes[:-1])
    first = np.concatenate(([0], np.flatnonzero(apart) + 1))
    return s_at[first], t_at[first], np.add.reduceat(nbytes, first)
