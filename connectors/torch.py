"""Any paged torch tensors, on the CPU or on a GPU: the reference connector, and kvtier by hand.

The order of a tensor's dimensions is said, never guessed; see `kvtier.connectors.arrays`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvtier import KVTier, Namespace
from kvtier.connector import ReadPage
from kvtier.connectors.arrays import ArrayCache, ArrayPages


class TorchPages(ArrayPages):
    """A paged KV cache in torch tensors, as layout, addresses and a way to read a page."""

    def __init__(self, tensors: Sequence[torch.Tensor], order: str, layers: int) -> None:
        super().__init__(tensors, order, layers)

    @property
    def read_page(self) -> ReadPage:
        """Reads one page through torch's own indexing, in stored order."""
        return self._read_page

    def _to_host(self, part: torch.Tensor, axes: list[int]) -> bytes:
        return part.permute(axes).contiguous().view(torch.uint8).cpu().numpy().tobytes()


class TorchCache(ArrayCache):
    """A `KVTier` for one paged torch cache: store after prefill, load before the next one."""

    def __init__(self, tier: KVTier, namespace: Namespace, pages: TorchPages) -> None:
        super().__init__(tier, namespace, pages)
