"""Any paged arrays, in host memory or on a CUDA device: numpy, CuPy, and what speaks their protocols.

The order of an array's dimensions is said, never guessed: a string with one letter a dimension,
``L`` layer, ``N`` page, ``K`` K or V, ``T`` token in the page, ``H`` head, ``D`` element. Examples:
``"KNTHD"`` is flash-attention's ``[2, pages, tokens, heads, dim]``, ``"NKTHD"`` FlashInfer's,
``"NHTD"`` one of two separate head-major lists, ``"NTD"`` a latent (MLA) cache, ``"NLKTHD"`` one
cross-layer block-first array.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvtier import (
    DevicePlace,
    Extra,
    Hit,
    KvLayout,
    KVTier,
    LayoutMismatch,
    Load,
    Namespace,
    PagedKv,
    Space,
    Store,
    StoreResult,
)
from kvtier.arrays import ArrayView, stream_of, view_of
from kvtier.connector import ReadPage
from kvtier.control import Pages
from kvtier.keys import Tokens


class ArrayPages:
    """A paged KV cache in arrays, as layout, addresses and, where it can be, a way to read a page.

    `arrays` holds one array a layer, or K then V of each layer where K and V are apart (no ``K`` in
    `order`, twice as many arrays as `layers`), or a single one with ``L`` in `order`: numpy or CuPy
    arrays, torch tensors, or any object with ``__cuda_array_interface__`` or DLPack. They are kept
    alive, and must neither move nor be resized.

    Raises:
        LayoutMismatch: the arrays differ in shape, strides or device, or are not what `order` says.
    """

    def __init__(self, arrays: Sequence[Any], order: str, layers: int) -> None:
        views = _checked(arrays, order)
        first = views[0]
        self._arrays = list(arrays)
        self._order = order
        size = dict(zip(order, first.shape, strict=True))
        stride = dict(zip(order, first.strides, strict=True))
        element = first.itemsize
        if stride["D"] != element and size["D"] > 1:
            raise LayoutMismatch(f"elements of a head are {stride['D']} bytes apart, not adjacent")
        per_array = size.get("L", 1) * size.get("K", 1)
        planes, rest = divmod(per_array * len(arrays), layers)
        if (
            rest
            or planes not in (1, 2)
            or ("L" in order and (len(arrays), size["L"]) != (1, layers))
        ):
            raise LayoutMismatch(
                f"{len(arrays)} arrays of order {order!r} and shape {first.shape} are not "
                f"{layers} layers of one or two planes"
            )
        self.layout = KvLayout.per_token(
            layers=layers,
            planes=planes,
            page_tokens=size["T"],
            heads=size.get("H", 1),
            head_bytes=size["D"] * element,
            dtype=first.dtype,
        )
        addresses = [
            view.address + layer * stride.get("L", 0) + plane * stride.get("K", 0)
            for view in views
            for layer in range(size.get("L", 1))
            for plane in range(size.get("K", 1))
        ]
        place = None
        if first.device is not None:
            place = DevicePlace("cuda", first.device, stream_of(arrays[0]))
        self.kv = PagedKv(
            plane_addresses=np.array(addresses, dtype=np.uint64),
            page_count=size["N"],
            page_stride=stride["N"],
            row_stride=stride["T"],
            col_stride=stride.get("H", 0),
            owner=(self._arrays, views),
            place=place,
        )

    @property
    def read_page(self) -> ReadPage | None:
        """Reads one page through the library's own indexing, in stored order; None if it has none."""
        first = self._arrays[0]
        readable = isinstance(first, np.ndarray) or hasattr(first, "get")  # numpy's, CuPy's
        return self._read_page if readable else None

    def _read_page(self, page: int) -> bytes:
        order = self._order.replace("N", "")
        wanted = "".join(letter for letter in "LKTHD" if letter in order)
        at = (slice(None),) * self._order.index("N") + (page,)
        axes = [order.index(letter) for letter in wanted]
        return b"".join(self._to_host(array[at], axes) for array in self._arrays)

    def _to_host(self, part: Any, axes: list[int]) -> bytes:
        """One page of one array with its axes in stored order, as bytes."""
        part = part.transpose(axes)
        if not isinstance(part, np.ndarray):
            part = part.get()
        return np.ascontiguousarray(part).tobytes()


class ArrayCache:
    """A `KVTier` for one paged cache: store after prefill, load before the next one."""

    def __init__(self, tier: KVTier, namespace: Namespace, pages: ArrayPages) -> None:
        self._tier = tier
        self.space: Space = tier.attach(
            namespace, pages.layout, pages.kv, read_page=pages.read_page
        )

    def store(
        self, tokens: Tokens, pages: Pages, *, first_token: int = 0, extras: Sequence[Extra] = ()
    ) -> StoreResult:
        """Keep the KV of `tokens`; see `KVTier.store`."""
        return self._tier.store(self.space, tokens, pages, first_token=first_token, extras=extras)

    def start_store(
        self, tokens: Tokens, pages: Pages, *, first_token: int = 0, extras: Sequence[Extra] = ()
    ) -> Store:
        """Begin to keep KV that is computed layer by layer; see `KVTier.start_store`."""
        return self._tier.start_store(
            self.space, tokens, pages, first_token=first_token, extras=extras
        )

    def lookup(self, tokens: Tokens, *, extras: Sequence[Extra] = ()) -> Hit:
        """The longest held prefix, leased; see `KVTier.lookup`."""
        return self._tier.lookup(self.space, tokens, extras=extras)

    def start_load(self, hit: Hit, pages: Pages, *, first_token: int = 0) -> Load:
        """Begin to fill `pages` from `hit`, layer by layer; see `KVTier.load`."""
        return self._tier.load(hit, pages, first_token=first_token)

    def load(self, tokens: Tokens, pages: Pages, *, extras: Sequence[Extra] = ()) -> int:
        """Fill `pages` with what is held of `tokens`; how many tokens are right, from the first."""
        hit = self.lookup(tokens, extras=extras)
        try:
            count = min(hit.tokens // self.space.page_tokens, len(pages))
            if not count:
                return 0
            load = self._tier.load(hit, pages[:count])
            result = load.wait()
            if load.is_ordered:  # what the engine puts on its stream now comes after the copies
                load.wait_layer(self.space.layout.layers - 1)
            return min(result.tokens, count * self.space.page_tokens) if result is not None else 0
        finally:
            self._tier.release(hit)


def _checked(arrays: Sequence[Any], order: str) -> list[ArrayView]:
    if not arrays:
        raise LayoutMismatch("no arrays")
    if len(set(order)) != len(order) or not set("NTD") <= set(order) <= set("LNKTHD"):
        raise LayoutMismatch(f"order {order!r}: needs N, T and D, may have L, K and H, each once")
    try:
        views = [view_of(array) for array in arrays]
    except ValueError as error:
        raise LayoutMismatch(str(error)) from error
    first = views[0]
    for view in views:
        if len(view.shape) != len(order):
            raise LayoutMismatch(f"array of {len(view.shape)} dimensions, order {order!r}")
        if (view.shape, view.strides, view.dtype) != (first.shape, first.strides, first.dtype):
            raise LayoutMismatch("arrays differ in shape, strides or dtype: one group at a time")
        if view.device != first.device:
            raise LayoutMismatch("arrays on different devices: one cache a device")
        if not view.is_writable:
            raise LayoutMismatch("a read-only array is no KV cache")
    return views
