"""Any paged torch tensors: the reference connector, and the shortest way to use kvtier by hand.

The order of a tensor's dimensions is said, never guessed: a string with one letter a dimension,
``L`` layer, ``N`` page, ``K`` K or V, ``T`` token in the page, ``H`` head, ``D`` element. Examples:
``"KNTHD"`` is flash-attention's ``[2, pages, tokens, heads, dim]``, ``"NKTHD"`` FlashInfer's,
``"NHTD"`` one of two separate head-major lists, ``"NTD"`` a latent (MLA) cache, ``"NLKTHD"`` one
cross-layer block-first tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvtier import (
    Extra,
    Hit,
    KvLayout,
    KVTier,
    LayoutMismatch,
    Load,
    Namespace,
    PagedKv,
    Space,
    StoreResult,
)
from kvtier.control import Pages
from kvtier.keys import Tokens


class TorchPages:
    """A paged KV cache in torch tensors on the CPU, as layout, addresses and a way to read a page.

    `tensors` holds one tensor a layer, or K then V of each layer where K and V are apart (no ``K``
    in `order`, twice as many tensors as `layers`), or a single one with ``L`` in `order`. They are
    kept alive, and must neither move nor be resized.

    Raises:
        LayoutMismatch: the tensors differ in shape or strides, or are not what `order` says.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], order: str, layers: int) -> None:
        first = _checked(tensors, order)
        self._tensors = list(tensors)
        self._order = order
        size = dict(zip(order, first.shape, strict=True))
        stride = {
            letter: step * first.element_size()
            for letter, step in zip(order, first.stride(), strict=True)
        }
        element = first.element_size()
        if stride["D"] != element and size["D"] > 1:
            raise LayoutMismatch(f"elements of a head are {stride['D']} bytes apart, not adjacent")
        per_tensor = size.get("L", 1) * size.get("K", 1)
        planes, rest = divmod(per_tensor * len(tensors), layers)
        if (
            rest
            or planes not in (1, 2)
            or ("L" in order and (len(tensors), size["L"]) != (1, layers))
        ):
            raise LayoutMismatch(
                f"{len(tensors)} tensors of order {order!r} and shape {tuple(first.shape)} are not "
                f"{layers} layers of one or two planes"
            )
        self.layout = KvLayout.per_token(
            layers=layers,
            planes=planes,
            page_tokens=size["T"],
            heads=size.get("H", 1),
            head_bytes=size["D"] * element,
            dtype=str(first.dtype).removeprefix("torch."),
        )
        addresses = [
            tensor.data_ptr() + layer * stride.get("L", 0) + plane * stride.get("K", 0)
            for tensor in tensors
            for layer in range(size.get("L", 1))
            for plane in range(size.get("K", 1))
        ]
        self.kv = PagedKv(
            plane_addresses=np.array(addresses, dtype=np.uint64),
            page_count=size["N"],
            page_stride=stride["N"],
            row_stride=stride["T"],
            col_stride=stride.get("H", 0),
            owner=self._tensors,
        )

    def read_page(self, page: int) -> bytes:
        """One page through torch's own indexing, in stored order."""
        order = self._order.replace("N", "")
        wanted = "".join(letter for letter in "LKTHD" if letter in order)
        at = (slice(None),) * self._order.index("N") + (page,)
        return b"".join(
            tensor[at]
            .permute([order.index(letter) for letter in wanted])
            .contiguous()
            .view(torch.uint8)
            .numpy()
            .tobytes()
            for tensor in self._tensors
        )


class TorchCache:
    """A `KVTier` for one paged torch cache: store after prefill, load before the next one."""

    def __init__(self, tier: KVTier, namespace: Namespace, pages: TorchPages) -> None:
        self._tier = tier
        self.space: Space = tier.attach(
            namespace, pages.layout, pages.kv, read_page=pages.read_page
        )

    def store(
        self, tokens: Tokens, pages: Pages, *, first_token: int = 0, extras: Sequence[Extra] = ()
    ) -> StoreResult:
        """Keep the KV of `tokens`; see `KVTier.store`."""
        return self._tier.store(self.space, tokens, pages, first_token=first_token, extras=extras)

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
            result = self._tier.load(hit, pages[:count]).wait()
            return min(result.tokens, count * self.space.page_tokens) if result is not None else 0
        finally:
            self._tier.release(hit)


def _checked(tensors: Sequence[torch.Tensor], order: str) -> torch.Tensor:
    if not tensors:
        raise LayoutMismatch("no tensors")
    if len(set(order)) != len(order) or not set("NTD") <= set(order) <= set("LNKTHD"):
        raise LayoutMismatch(f"order {order!r}: needs N, T and D, may have L, K and H, each once")
    first = tensors[0]
    for tensor in tensors:
        if tensor.device.type != "cpu":
            raise LayoutMismatch(f"tensor on {tensor.device}: this connector copies host memory")
        if tensor.ndim != len(order):
            raise LayoutMismatch(f"tensor of {tensor.ndim} dimensions, order {order!r}")
        if (tensor.shape, tensor.stride(), tensor.dtype) != (
            first.shape,
            first.stride(),
            first.dtype,
        ):
            raise LayoutMismatch("tensors differ in shape, strides or dtype: one group at a time")
    return first
