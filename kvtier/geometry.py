"""How one rank's KV memory looks to another process: values that travel, and who sends what.

`Shape` says what a rank holds, `Geometry` also where it lies in regions its agent has registered.
Both may come from anywhere, so they are bounded when decoded and checked once more by `Geometry`.
`plan` is the split of work between ranks; it depends on shapes alone, so that both sides, each by
itself, come to the same one. `kvtier.slices` turns geometries into descriptors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Annotated, Protocol

import msgspec
import numpy as np
from msgspec import Meta

from kvtier.errors import LayoutMismatch
from kvtier.layout import KvLayout, PagedKv
from kvtier.types import Region

PLANES_MAX = 8192  # 4096 layers of K and V
RANKS_MAX = 1024
PLAN_STEPS_MAX = 1 << 21  # about a second: shards from anywhere could overlap in a million ways
ADDRESS_BITS = 62  # sums of offsets stay below it, so that no arithmetic on them overflows

_Text = Annotated[str, Meta(max_length=512)]
_Count = Annotated[int, Meta(ge=1, lt=2**31)]
_First = Annotated[int, Meta(ge=0, lt=2**31)]
_Stride = Annotated[int, Meta(ge=0, lt=2**48)]


class Pages(Protocol):
    """An engine's paged KV, such as `kvtier.connectors.torch.TorchPages`."""

    layout: KvLayout
    kv: PagedKv


class Shard(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Which part of the model's KV one rank holds: heads and layers, counted over the model."""

    heads: _Count
    layers: _Count
    model_heads: _Count
    model_layers: _Count
    first_head: _First = 0
    first_layer: _First = 0
    rank: _First = 0
    """Number among the ranks of its side; spreads the work where ranks hold the same."""

    def __post_init__(self) -> None:
        if (
            self.first_head + self.heads > self.model_heads
            or self.first_layer + self.layers > self.model_layers
        ):
            raise LayoutMismatch(
                f"heads {self.first_head} + {self.heads} of {self.model_heads}, layers "
                f"{self.first_layer} + {self.layers} of {self.model_layers}: outside the model"
            )
        if self.model_layers > PLANES_MAX // 2:
            raise LayoutMismatch(f"{self.model_layers} layers, at most {PLANES_MAX // 2}")


class Shape(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a rank's pages hold; ranks of one model differ in page size and shard only."""

    model: _Text
    """Names weights and everything else that changes K or V."""
    dtype: _Text
    packing: _Text
    """Empty where the place of each token is known; else only whole pages move."""
    planes: Annotated[int, Meta(ge=1, le=16)]
    page_tokens: _Count
    run_bytes: _Count
    """One head of one token, or one whole page if it is packed."""
    shard: Shard

    @classmethod
    def of(cls, layout: KvLayout, model: str, shard: Shard | None = None) -> Shape:
        """The shape of pages of `layout`; without `shard` they hold the whole model.

        Raises:
            LayoutMismatch: the layout does not hold what the shard says.
        """
        whole = Shard(layout.cols, layout.layers, layout.cols, layout.layers)
        shard = shard if shard is not None else whole
        if layout.layers != shard.layers or (not layout.packing and layout.cols != shard.heads):
            raise LayoutMismatch(
                f"pages of {layout.layers} layers and {layout.cols} heads, a shard of "
                f"{shard.layers} and {shard.heads}"
            )
        return cls(
            model,
            layout.dtype,
            layout.packing,
            layout.planes,
            layout.page_tokens,
            layout.run_bytes,
            shard,
        )

    def check_sends_to(self, target: Shape) -> None:
        """Whether this rank's KV means the same in `target`'s pages.

        Raises:
            LayoutMismatch: it does not; says in what they differ.
        """
        names = ["model", "dtype", "packing", "planes", "run_bytes"]
        pairs = [(name, getattr(self, name), getattr(target, name)) for name in names]
        ours, theirs = self.shard, target.shard
        pairs += [
            ("heads of the model", ours.model_heads, theirs.model_heads),
            ("layers of the model", ours.model_layers, theirs.model_layers),
        ]
        if self.packing:  # what is inside a packed page cannot be taken apart
            pairs += [
                ("page_tokens", self.page_tokens, target.page_tokens),
                ("heads", (ours.first_head, ours.heads), (theirs.first_head, theirs.heads)),
                ("layers", (ours.first_layer, ours.layers), (theirs.first_layer, theirs.layers)),
            ]
        for name, here, there in pairs:
            if here != there:
                raise LayoutMismatch(f"{name}: {here!r} of the source, {there!r} of the target")


class Geometry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where the pages of a rank lie in its agent's regions; strides in bytes, as in `PagedKv`."""

    shape: Shape
    page_count: _Count
    page_stride: _Stride
    row_stride: _Stride
    col_stride: _Stride
    plane_regions: Annotated[tuple[_First, ...], Meta(min_length=1, max_length=PLANES_MAX)]
    plane_offsets: Annotated[tuple[_Stride, ...], Meta(min_length=1, max_length=PLANES_MAX)]

    def __post_init__(self) -> None:
        expected = self.shape.shard.layers * self.shape.planes
        if not len(self.plane_regions) == len(self.plane_offsets) == expected:
            raise LayoutMismatch(
                f"{len(self.plane_offsets)} planes in {len(self.plane_regions)} regions, "
                f"expected {expected}"
            )
        if max(self.plane_offsets) + self.plane_bytes >= 1 << ADDRESS_BITS:
            raise LayoutMismatch("pages reach past the end of all memory")

    @property
    def plane_bytes(self) -> int:
        """From the first byte of a plane to its last one, what lies between included."""
        shape = self.shape
        rows, cols = (1, 1) if shape.packing else (shape.page_tokens, shape.shard.heads)
        return (
            (self.page_count - 1) * self.page_stride
            + (rows - 1) * self.row_stride
            + (cols - 1) * self.col_stride
            + shape.run_bytes
        )


def extents(layout: KvLayout, kv: PagedKv) -> list[tuple[int, int]]:
    """Address and bytes of the stretches of memory that hold all planes; none touches another."""
    nbytes = (
        (kv.page_count - 1) * kv.page_stride
        + (layout.rows - 1) * kv.row_stride
        + (layout.cols - 1) * kv.col_stride
        + layout.run_bytes
    )
    found: list[tuple[int, int]] = []
    for begin in np.sort(kv.plane_addresses).tolist():
        if found and begin <= found[-1][0] + found[-1][1]:
            first, length = found[-1]
            found[-1] = (first, max(length, begin + nbytes - first))
        else:
            found.append((begin, nbytes))
    return found


def place(shape: Shape, kv: PagedKv, regions: Iterable[Region]) -> Geometry:
    """The geometry of `kv` within `regions` of its agent.

    Raises:
        LayoutMismatch: a plane lies in none of them.
    """
    packed = bool(shape.packing)
    planes = shape.shard.layers * shape.planes
    geometry = Geometry(
        shape,
        kv.page_count,
        kv.page_stride,
        0 if packed else kv.row_stride,
        0 if packed else kv.col_stride,
        (0,) * planes,
        (0,) * planes,
    )
    known = [(region.address, region.nbytes, region.number) for region in regions]
    numbers, offsets = [], []
    for begin in kv.plane_addresses.tolist():
        end = begin + geometry.plane_bytes
        inside = [r for r in known if r[0] <= begin and end <= r[0] + r[1]]
        if not inside:
            raise LayoutMismatch(f"plane of {end - begin} bytes at {begin:#x}: not registered")
        address, _, number = inside[0]
        numbers.append(number)
        offsets.append(begin - address)
    return msgspec.structs.replace(
        geometry, plane_regions=tuple(numbers), plane_offsets=tuple(offsets)
    )


@dataclass(frozen=True, slots=True)
class Part:
    """What one source sends: these heads of these layers, counted over the model."""

    first_layer: int
    layers: int
    first_head: int
    heads: int


def plan(sources: Sequence[Shard], target: Shard) -> tuple[tuple[Part, ...], ...]:
    """For each source, what it sends to `target`; together, each head of each layer once.

    Where several sources hold the same heads, the target's rank decides, so that targets of the
    same heads ask different ones.

    Raises:
        LayoutMismatch: some part of the target is held by no source.
    """
    if not 1 <= len(sources) <= RANKS_MAX:
        raise LayoutMismatch(f"{len(sources)} sources, between 1 and {RANKS_MAX}")
    return _plan(tuple(sources), target)


@lru_cache(maxsize=1024)
def _plan(sources: tuple[Shard, ...], target: Shard) -> tuple[tuple[Part, ...], ...]:
    parts: list[list[Part]] = [[] for _ in sources]
    layer_cuts = _cuts(
        target.first_layer, target.layers, [(s.first_layer, s.layers) for s in sources]
    )
    head_cuts = _cuts(target.first_head, target.heads, [(s.first_head, s.heads) for s in sources])
    if len(layer_cuts) * len(head_cuts) * len(sources) > PLAN_STEPS_MAX:
        raise LayoutMismatch(f"{len(sources)} sources that overlap in too many ways")
    for layer, layer_end in pairwise(layer_cuts):
        for head, head_end in pairwise(head_cuts):
            holders = [
                i
                for i, s in enumerate(sources)
                if s.first_layer <= layer < s.first_layer + s.layers
                and s.first_head <= head < s.first_head + s.heads
            ]
            if not holders:
                raise LayoutMismatch(f"no source holds head {head} of layer {layer}")
            mine = parts[holders[target.rank % len(holders)]]
            before = mine[-1] if mine else None
            if (
                before is not None
                and before.first_layer == layer
                and before.first_head + before.heads == head
            ):
                mine[-1] = Part(
                    layer, layer_end - layer, before.first_head, head_end - before.first_head
                )
            else:
                mine.append(Part(layer, layer_end - layer, head, head_end - head))
    return tuple(tuple(each) for each in parts)


def _cuts(first: int, count: int, ranges: Iterable[tuple[int, int]]) -> list[int]:
    """Where the set of ranges that hold a number changes, from `first` to `first` + `count`."""
    end = first + count
    inner = {at for begin, length in ranges for at in (begin, begin + length) if first < at < end}
    return [first, *sorted(inner), end]
