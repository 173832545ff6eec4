"""A toy paged engine split into prefill and decode ranks, for tests of the hand-over.

Its KV is the hash chain of `toy_kv`; what it generates depends on every byte of the KV in its
pages, layer after layer, so a byte in the wrong place, or one that came too late, gives other text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from kvtier.connectors.torch import TorchPages
from kvtier.geometry import Shard
from kvtier.shared_pool import SharedPool
from kvtier.testing.connector_suite import Bytes, toy_kv
from kvtier.types import align_up

VOCABULARY = 32000


class ToyRank:
    """Pages of one rank: `shard` of a model whose heads have `head_bytes` bytes of K and of V."""

    def __init__(
        self,
        shard: Shard,
        *,
        order: str = "KNTHD",
        page_tokens: int = 16,
        page_count: int = 32,
        head_bytes: int = 8,
        noise: int = 1,
        shared: bool = False,
    ) -> None:
        """Allocate the pages and fill them with noise; `shared` with processes of this host."""
        self.shard = shard
        self.page_tokens = page_tokens
        self.page_count = page_count
        self.planes = 2 if "H" in order else 1  # without heads it is a latent cache
        self._head_bytes = head_bytes
        size = {
            "L": shard.layers,
            "K": self.planes,
            "N": page_count,
            "T": page_tokens,
            "H": shard.heads,
            "D": head_bytes,
        }
        shape = [size[letter] for letter in order]
        per_layer = 1 if "K" in order else self.planes
        count = 1 if "L" in order else shard.layers * per_layer
        random = torch.Generator().manual_seed(noise)
        nbytes = math.prod(shape)
        self.pool = SharedPool(count * align_up(nbytes)) if shared else None
        self.tensors = []
        for _ in range(count):
            tensor = torch.randint(0, 256, shape, dtype=torch.uint8, generator=random)
            if self.pool is not None:
                offset = self.pool.allocate(nbytes)
                assert offset is not None, "the pool was made for them"
                view = torch.frombuffer(self.pool.view(offset, nbytes), dtype=torch.uint8)
                tensor = view.reshape(shape).copy_(tensor)
            self.tensors.append(tensor)
        self.pages = TorchPages(self.tensors, order, shard.layers)
        self._planes = [plane for tensor in self.tensors for plane in _planes(tensor, order)]

    def request_pages(self, tokens: int, seed: int = 0) -> list[int]:
        """Enough pages for `tokens`, in a random order."""
        order = np.random.default_rng(seed).permutation(self.page_count)
        return [int(page) for page in order[: -(-tokens // self.page_tokens)]]

    def compute(
        self, tokens: Sequence[int], pages: Sequence[int], layer: int, first_token: int = 0
    ) -> None:
        """Put the KV of one layer of the model in the pages, from `first_token` on."""
        kv = self._expected(tokens)[layer]
        for plane, values in enumerate(kv):
            for token in range(first_token, len(tokens)):
                page, slot = pages[token // self.page_tokens], token % self.page_tokens
                self._plane(layer, plane)[page, slot] = values[token]

    def attend(self, tokens: int, pages: Sequence[int], layer: int) -> int:
        """This rank's part of what one layer contributes to the next token."""
        total = 0
        for plane in range(self.planes):
            held = self._plane(layer, plane)[list(pages)].reshape(-1, *self._row())[:tokens]
            total += int((held * self._weights(tokens, layer, plane)).sum())
        return total

    def matches(self, tokens: Sequence[int], pages: Sequence[int]) -> bool:
        """Whether the pages hold the KV of `tokens`, all of it."""
        kv = self._expected(tokens)
        shard = self.shard
        return all(
            np.array_equal(
                self._plane(layer, plane)[list(pages)].reshape(-1, *self._row())[: len(tokens)],
                kv[layer, plane],
            )
            for layer in range(shard.first_layer, shard.first_layer + shard.layers)
            for plane in range(self.planes)
        )

    def corrupt(self, page: int) -> None:
        """Flip one bit of one page."""
        self._planes[-1][page, 0, 0, 0] ^= 1

    def _row(self) -> tuple[int, int]:
        return self.shard.heads, self._head_bytes

    def _plane(self, layer: int, plane: int) -> Bytes:
        return self._planes[(layer - self.shard.first_layer) * self.planes + plane]

    def _expected(self, tokens: Sequence[int]) -> Bytes:
        """[layer of the model, plane, token, head of this rank, byte]."""
        shard = self.shard
        row = shard.model_heads * self._head_bytes
        kv = toy_kv(tokens, shard.model_layers, self.planes, row)
        heads = kv.reshape(*kv.shape[:3], shard.model_heads, self._head_bytes)
        return heads[..., shard.first_head : shard.first_head + shard.heads, :]

    def _weights(
        self, tokens: int, layer: int, plane: int
    ) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        """Another one for each place in the model, so that no swap of bytes goes unseen."""
        token = np.arange(tokens)[:, None, None]
        head = np.arange(self.shard.first_head, self.shard.first_head + self.shard.heads)[:, None]
        byte = np.arange(self._head_bytes)
        mixed = (((layer * 2 + plane) * 4099 + token) * 257 + head) * 131 + byte
        return mixed * 2654435761 % 65521


def generate(
    prompt: Sequence[int],
    count: int,
    attend: Callable[[int, int], int],
    append: Callable[[Sequence[int]], object],
    layers: int,
) -> list[int]:
    """Tokens after `prompt`, whose KV is in place.

    `attend(tokens, layer)` gives the sum over the ranks; `append` computes the last token's KV.
    """
    text = list(prompt)
    for _ in range(count):
        if len(text) > len(prompt):
            append(text)
        total = sum(attend(len(text), layer) * (layer + 1) for layer in range(layers))
        text.append(total % VOCABULARY)
    return text[len(prompt) :]


def _planes(tensor: torch.Tensor, order: str) -> list[Bytes]:
    """Views [page, token, head, byte], layer by layer and K before V."""
    missing = [letter for letter in "LKH" if letter not in order]
    letters = order + "".join(missing)
    view = tensor.reshape([*tensor.shape, *(1 for _ in missing)])
    view = view.permute([letters.index(letter) for letter in "LKNTHD"])
    return [plane.numpy() for layer in view for plane in layer]
