"""The torch connector passes the connector suite in every order of dimensions that engines use."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from kvtier import KVTier, LayoutMismatch, Namespace
from kvtier.connectors.torch import TorchCache, TorchPages
from kvtier.testing.connector_suite import Bytes, ConnectorSuite, toy_kv

LAYERS, HEADS, DIM, PAGE_TOKENS, PAGES = 5, 3, 8, 16, 160


class TorchEngine:
    """Toy KV in torch tensors of one order; reads and writes through torch indexing only."""

    page_tokens = PAGE_TOKENS
    page_count = PAGES

    def __init__(self, tier: KVTier, model: str, order: str, planes: int) -> None:
        size = {"L": LAYERS, "N": PAGES, "K": planes, "T": PAGE_TOKENS, "H": HEADS, "D": DIM}
        self.planes, self.order = planes, order
        self.heads = HEADS if "H" in order else 1
        per_layer = 1 if "L" in order else LAYERS
        count = per_layer * (1 if "K" in order or planes == 1 else planes)
        shape = [size[letter] for letter in order]
        generator = torch.Generator().manual_seed(5)
        self.tensors = [
            torch.randint(-9999, 9999, shape, dtype=torch.int16, generator=generator).view(
                torch.bfloat16
            )
            for _ in range(count)
        ]
        self.cache = TorchCache(
            tier,
            Namespace(model=model, dtype="bfloat16"),
            TorchPages(self.tensors, order, LAYERS),
        )

    def _view(self) -> torch.Tensor:
        """All of it as [layer, plane, page, token, head, dim]."""
        order = self.order
        parts = []
        for tensor in self.tensors:
            view = tensor.view(torch.int16)
            missing = [letter for letter in "LKH" if letter not in order]
            letters = order + "".join(missing)
            for _ in missing:
                view = view.unsqueeze(-1)
            parts.append(view.permute([letters.index(letter) for letter in "LKNTHD"]))
        if "L" in order:
            return parts[0]
        layers = [
            torch.cat(parts[i : i + len(parts) // LAYERS], dim=1)
            for i in range(0, len(parts), len(parts) // LAYERS)
        ]
        return torch.cat(layers, dim=0)

    def write(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        kv = self.expected(tokens)
        for layer in range(LAYERS):
            for plane in range(self.planes):
                for i in range(len(tokens)):
                    row = torch.from_numpy(kv[layer, plane, i].copy()).view(torch.int16)
                    self._write_row(layer, plane, pages[i // PAGE_TOKENS], i % PAGE_TOKENS, row)

    def _write_row(self, layer: int, plane: int, page: int, slot: int, row: torch.Tensor) -> None:
        index = {"L": layer, "N": page, "K": plane, "T": slot}
        per_layer = len(self.tensors) // LAYERS
        tensor = self.tensors[
            0 if "L" in self.order else layer * per_layer + (plane if per_layer > 1 else 0)
        ]
        at = tuple(index.get(letter, slice(None)) for letter in self.order)
        part = tensor.view(torch.int16)[at]
        part.copy_(row.view(part.shape))

    def read(self, tokens: int, pages: Sequence[int]) -> Bytes:
        view = self._view()[:, :, list(pages)].contiguous()
        flat = view.reshape(LAYERS, self.planes, -1, self.heads * DIM)[:, :, :tokens]
        return flat.contiguous().view(torch.uint8).numpy()

    def expected(self, tokens: Sequence[int]) -> Bytes:
        return toy_kv(tokens, LAYERS, self.planes, self.heads * DIM * 2)

    def store(self, tokens: Sequence[int], pages: Sequence[int]) -> int:
        return self.cache.store(tokens, pages).stored_tokens

    def load(self, tokens: Sequence[int], pages: Sequence[int]) -> int:
        return self.cache.load(tokens, pages)


class TestFlashAttentionOrder(ConnectorSuite):
    def make(self, tier: KVTier, model: str) -> TorchEngine:
        return TorchEngine(tier, model, "KNTHD", planes=2)


class TestFlashInferOrder(ConnectorSuite):
    def make(self, tier: KVTier, model: str) -> TorchEngine:
        return TorchEngine(tier, model, "NKTHD", planes=2)


class TestHeadMajorOrder(ConnectorSuite):
    def make(self, tier: KVTier, model: str) -> TorchEngine:
        return TorchEngine(tier, model, "NKHTD", planes=2)


class TestSeparateKAndV(ConnectorSuite):
    def make(self, tier: KVTier, model: str) -> TorchEngine:
        return TorchEngine(tier, model, "NTHD", planes=2)


class TestLatent(ConnectorSuite):
    def make(self, tier: KVTier, model: str) -> TorchEngine:
        return TorchEngine(tier, model, "NTD", planes=1)


class TestCrossLayerBlocks(ConnectorSuite):
    def make(self, tier: KVTier, model: str) -> TorchEngine:
        return TorchEngine(tier, model, "NLKTHD", planes=2)


def test_engines_of_different_order_share_chunks() -> None:
    """Stored token-major, whatever the engine's order is."""
    with KVTier.open({"tiers": [{"kind": "memory", "capacity": "64 MiB"}]}) as tier:
        writer = TorchEngine(tier, "m", "KNTHD", planes=2)
        reader = TorchEngine(tier, "m", "NKHTD", planes=2)
        tokens = ConnectorSuite.prompt(300)
        pages = ConnectorSuite.pages(writer, len(tokens))
        writer.write(tokens, pages)
        writer.store(tokens, pages)
        assert reader.load(tokens, pages) == 288
        assert np.array_equal(reader.read(288, pages), reader.expected(tokens)[:, :, :288])


@pytest.mark.parametrize(
    ("shape", "order", "layers", "message"),
    [
        ((4, 16, 8), "NTH", 1, "needs N, T and D"),
        ((4, 16, 8), "NTHD", 1, "3 dimensions"),
        ((3, 4, 16, 2, 8), "KNTHD", 1, "not 1 layers"),
        ((2, 4, 16, 2, 8), "KNTHD", 3, "not 3 layers"),
    ],
)
def test_what_order_does_not_say_is_refused(
    shape: tuple[int, ...], order: str, layers: int, message: str
) -> None:
    with pytest.raises(LayoutMismatch, match=message):
        TorchPages([torch.zeros(shape)], order, layers)


def test_overlapping_pages_are_refused_at_attach() -> None:
    """`expand` makes every page the same memory: what one page stores, another would overwrite."""
    shared = torch.zeros(1, 16, 2, 8).expand(4, 16, 2, 8)
    with (
        KVTier.open({"tiers": [{"kind": "memory", "capacity": "1 MiB"}]}) as tier,
        pytest.raises(LayoutMismatch, match="overlap"),
    ):
        TorchCache(tier, Namespace(model="m"), TorchPages([shared], "NTHD", 1))


def test_a_wrong_order_is_seen_by_the_engines_own_view() -> None:
    """Pages and tokens swapped: sizes fit, strides do not overlap, and yet it is wrong."""
    pages = TorchPages([torch.zeros(16, 16, 8)], "NTD", 1)
    wrong = TorchPages([torch.zeros(16, 16, 8)], "TND", 1)
    with (
        KVTier.open({"tiers": [{"kind": "memory", "capacity": "1 MiB"}]}) as tier,
        pytest.raises(LayoutMismatch, match="engine's own view"),
    ):
        tier.attach(Namespace(model="m"), pages.layout, pages.kv, read_page=wrong.read_page)
