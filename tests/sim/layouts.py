"""Engines' layouts of paged KV in numpy: where each plane's pages lie, as views of the memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Shape:
    """What an engine's pages hold."""

    layers: int
    pages: int
    tokens: int
    heads: int
    run_bytes: int
    """Of one head of one token."""


@dataclass(frozen=True)
class Paged:
    """An engine's memory, and every plane of it as [page, token, head, byte]."""

    memories: list[Bytes]
    planes: list[Bytes]
    """In stored order: layer by layer, K before V. Views of `memories`."""
    planes_per_layer: int


Layout = Callable[[Shape, "Allocate"], Paged]
Allocate = Callable[[Sequence[int]], tuple[Bytes, Bytes]]


def kv_first(shape: Shape, allocate: Allocate) -> Paged:
    """A layer: [2, page, token, head, byte]."""
    layers = [allocate((2, shape.pages, *_token_major(shape))) for _ in range(shape.layers)]
    return Paged(*_split(layers, lambda kv: [kv[0], kv[1]]), 2)


def page_first(shape: Shape, allocate: Allocate) -> Paged:
    """A layer: [page, 2, token, head, byte]."""
    layers = [allocate((shape.pages, 2, *_token_major(shape))) for _ in range(shape.layers)]
    return Paged(*_split(layers, lambda kv: [kv[:, 0], kv[:, 1]]), 2)


def head_major(shape: Shape, allocate: Allocate) -> Paged:
    """A layer: [page, 2, head, token, byte]."""
    layers = [allocate((shape.pages, 2, *_head_major(shape))) for _ in range(shape.layers)]
    return Paged(*_split(layers, lambda kv: [kv[:, i].swapaxes(1, 2) for i in (0, 1)]), 2)


def joined(shape: Shape, allocate: Allocate) -> Paged:
    """A layer: [page, token, head, K and V], one behind the other."""
    dims = (shape.pages, shape.tokens, shape.heads, 2 * shape.run_bytes)
    layers = [allocate(dims) for _ in range(shape.layers)]
    size = shape.run_bytes
    return Paged(*_split(layers, lambda kv: [kv[..., :size], kv[..., size:]]), 2)


def latent(shape: Shape, allocate: Allocate) -> Paged:
    """MLA; a layer: [page, token, byte], neither K nor V."""
    dims = (shape.pages, shape.tokens, 1, shape.heads * shape.run_bytes)
    layers = [allocate(dims) for _ in range(shape.layers)]
    return Paged(*_split(layers, lambda plane: [plane]), 1)


def cross_layer(shape: Shape, allocate: Allocate) -> Paged:
    """All layers: [page, layer, 2, token, head, byte]."""
    memory, view = allocate((shape.pages, shape.layers, 2, *_token_major(shape)))
    planes = [view[:, layer, kv] for layer in range(shape.layers) for kv in (0, 1)]
    return Paged([memory], planes, 2)


def separate(shape: Shape, allocate: Allocate) -> Paged:
    """K and V of each layer by themselves: [page, token, head, byte]."""
    dims = (shape.pages, *_token_major(shape))
    planes = [allocate(dims) for _ in range(2 * shape.layers)]
    return Paged(*_split(planes, lambda plane: [plane]), 2)


def padded(shape: Shape, allocate: Allocate) -> Paged:
    """A layer: [2, page, token + 1, head + 1, byte + 16], of which the rest is nobody's."""
    dims = (2, shape.pages, shape.tokens + 1, shape.heads + 1, shape.run_bytes + 16)
    layers = [allocate(dims) for _ in range(shape.layers)]

    def inner(kv: Bytes) -> list[Bytes]:
        return [kv[i, :, : shape.tokens, : shape.heads, : shape.run_bytes] for i in (0, 1)]

    return Paged(*_split(layers, inner), 2)


def backward(shape: Shape, allocate: Allocate) -> Paged:
    """A layer: [2, page, token, head, byte] with tokens and heads from the last to the first."""
    layers = [allocate((2, shape.pages, *_token_major(shape))) for _ in range(shape.layers)]
    return Paged(*_split(layers, lambda kv: [kv[i, :, ::-1, ::-1] for i in (0, 1)]), 2)


LAYOUTS: dict[str, Layout] = {
    layout.__name__: layout
    for layout in (
        kv_first,
        page_first,
        head_major,
        joined,
        latent,
        cross_layer,
        separate,
        padded,
        backward,
    )
}


def allocator(rng: np.random.Generator, offset: int) -> Allocate:
    """Memory of random bytes that begins `offset` bytes into an aligned array."""

    def allocate(dims: Sequence[int]) -> tuple[Bytes, Bytes]:
        memory = rng.integers(0, 256, offset + int(np.prod(dims)), dtype=np.uint8)
        return memory, memory[offset:].reshape(dims)

    return allocate


def _token_major(shape: Shape) -> tuple[int, int, int]:
    return shape.tokens, shape.heads, shape.run_bytes


def _head_major(shape: Shape) -> tuple[int, int, int]:
    return shape.heads, shape.tokens, shape.run_bytes


def _split(
    arrays: list[tuple[Bytes, Bytes]], planes_of: Callable[[Bytes], list[Bytes]]
) -> tuple[list[Bytes], list[Bytes]]:
    memories = [memory for memory, _ in arrays]
    return memories, [plane for _, view in arrays for plane in planes_of(view)]
