"""vLLM's KV tensors are read through their strides, whatever order the memory has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvtier import KVTier, LayoutMismatch, Namespace
from kvtier.connectors.vllm.pages import describe_pages

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 3, 10, 2, 16, 8
# Orders of (layer, block, head, token, content) in memory that keep a page in one piece.
ORDERS = ["LBHNC", "LBNHC", "BLHNC", "BLNHC"]
SCATTERED = ["LHBNC", "BHLNC"]  # those that do not


def registered(order: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """Views [block, head, token, content] a layer over one buffer, as vLLM registers them."""
    extents = dict(zip("LBHNC", (LAYERS, BLOCKS, HEADS, TOKENS, CONTENT), strict=True))
    generator = torch.Generator().manual_seed(seed)
    buffer = torch.randn([extents[axis] for axis in order], generator=generator)
    standard = buffer.permute([order.index(axis) for axis in "LBHNC"])
    return {f"model.layers.{i}.attn": standard[i] for i in range(LAYERS)}


@pytest.fixture
def tier() -> Iterator[KVTier]:
    with KVTier.open({"tiers": [{"kind": "memory", "capacity": "1 MiB"}]}) as tier:
        yield tier


@pytest.mark.parametrize("order", ORDERS)
def test_pages_come_back_whole_in_every_order_of_memory(tier: KVTier, order: str) -> None:
    tensors = registered(order)
    pages = describe_pages(tensors, TOKENS, BLOCKS, "test")
    namespace = Namespace(model="m", chunk_tokens=2 * TOKENS)
    space = tier.attach(namespace, pages.layout, pages.kv, read_page=pages.read_page)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    tokens = list(range(5 * TOKENS))
    assert tier.store(space, tokens, [9, 1, 4, 0, 6]).stored_tokens == len(tokens)
    for tensor in tensors.values():
        tensor.zero_()
    hit = tier.lookup(space, tokens)
    result = tier.load(hit, [2, 3, 5, 7, 8]).wait()
    assert result is not None
    assert result.tokens == len(tokens)
    for name, tensor in tensors.items():
        assert torch.equal(tensor[[2, 3, 5, 7, 8]], before[name][[9, 1, 4, 0, 6]])
        assert not tensor[[9, 1, 4, 0, 6]].any()
    tier.release(hit)


def test_orders_that_keep_heads_before_tokens_share_chunks() -> None:
    """What is inside a page decides, not where pages lie."""

    def fingerprint(order: str) -> bytes:
        return describe_pages(registered(order), TOKENS, BLOCKS, "test").layout.fingerprint

    assert fingerprint("LBHNC") == fingerprint("BLHNC")
    assert fingerprint("LBHNC") != fingerprint("LBNHC")


@pytest.mark.parametrize("order", SCATTERED)
def test_a_page_in_pieces_is_refused_with_the_reason(order: str) -> None:
    with pytest.raises(LayoutMismatch, match="not one piece"):
        describe_pages(registered(order), TOKENS, BLOCKS, "test")


def test_layers_that_share_memory_are_one_layer() -> None:
    tensors = registered("LBHNC")
    tensors["model.layers.9.attn"] = tensors["model.layers.1.attn"]
    pages = describe_pages(tensors, TOKENS, BLOCKS, "test")
    assert pages.layout.layers == LAYERS
    assert pages.layer_of["model.layers.9.attn"] == pages.layer_of["model.layers.1.attn"]


def test_unequal_layers_are_refused() -> None:
    tensors = registered("LBHNC")
    tensors["odd"] = torch.zeros(BLOCKS, HEADS, TOKENS, 2 * CONTENT)
    with pytest.raises(LayoutMismatch, match="differ"):
        describe_pages(tensors, TOKENS, BLOCKS, "test")


def test_a_wrong_count_of_blocks_is_refused() -> None:
    with pytest.raises(LayoutMismatch, match="blocks"):
        describe_pages(registered("LBHNC"), TOKENS, BLOCKS + 1, "test")


def test_no_tensors_are_refused() -> None:
    with pytest.raises(LayoutMismatch, match="no KV"):
        describe_pages({}, TOKENS, BLOCKS, "test")
