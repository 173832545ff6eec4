"""The torch connector passes the connector suite in every order of dimensions that engines use."""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from kvtier import DevicePlace, KVTier, LayoutMismatch, Namespace
from kvtier.connectors.torch import TorchCache, TorchPages
from kvtier.testing.connector_suite import Bytes, ConnectorSuite, toy_kv
from kvtier.testing.toy_device import ToyDevice, ToyStreams

LAYERS, HEADS, DIM, PAGE_TOKENS, PAGES = 5, 3, 8, 16, 160


class TorchEngine:
    """Toy KV in torch tensors of one order; reads and writes through torch indexing only."""

    page_tokens = PAGE_TOKENS
    page_count = PAGES

    def __init__(
        self,
        tier: KVTier,
        model: str,
        order: str,
        planes: int,
        place: DevicePlace | None = None,
    ) -> None:
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
        pages = TorchPages(self.tensors, order, LAYERS)
        pages.kv = replace(pages.kv, place=place)
        self.cache = TorchCache(tier, Namespace(model=model, dtype="bfloat16"), pages)

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


class EngineOnDevice(TorchEngine):
    """Its tensors are a device's: all that it does with them, it does on its stream, late."""

    def __init__(self, tier: KVTier, model: str, order: str, streams: ToyStreams) -> None:
        self.streams, self.stream = streams, streams.create()
        super().__init__(tier, model, order, 2, DevicePlace("toy", 0, lambda: self.stream))

    def write(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        self.streams.add(self.stream, lambda: TorchEngine.write(self, tokens, pages))

    def read(self, tokens: int, pages: Sequence[int]) -> Bytes:
        seen: list[Bytes] = []
        self.streams.add(self.stream, lambda: seen.append(TorchEngine.read(self, tokens, pages)))
        self.streams.synchronize(self.stream)
        return seen[0]


class TestOnADevice(ConnectorSuite):
    streams: ToyStreams

    @pytest.fixture(autouse=True)
    def toy_device(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Every tier knows it."""
        self.streams = streams = ToyStreams(seed=7)
        known = {"toy": lambda ordinal: ToyDevice(streams)}
        monkeypatch.setattr(KVTier, "open", partial(KVTier.open, devices=known))
        yield
        streams.close()

    def make(self, tier: KVTier, model: str) -> EngineOnDevice:
        return EngineOnDevice(tier, model, "KNTHD", self.streams)

    def test_layers_arrive_in_the_streams_order_without_the_host(self, tier: KVTier) -> None:
        engine = self.make(tier, "m")
        tokens = self.prompt(3 * 256)
        pages = self.pages(engine, len(tokens))
        engine.write(tokens, pages)
        engine.store(tokens, pages)
        others = self.pages(engine, len(tokens), seed=3)
        hit = engine.cache.lookup(tokens)
        load = engine.cache.start_load(hit, others)
        for layer in range(LAYERS):
            assert load.wait_layer(layer)
        assert np.array_equal(engine.read(len(tokens), others), engine.expected(tokens))
        assert load.wait() is not None
        engine.cache._tier.release(hit)

    def test_pages_are_the_engines_again_once_its_stream_is_told(self, tier: KVTier) -> None:
        """What overwrites the pages right after `finish` cannot change what is stored."""
        engine = self.make(tier, "m")
        tokens = self.prompt(2 * 256)
        pages = self.pages(engine, len(tokens))
        engine.write(tokens, pages)
        store = engine.cache.start_store(tokens, pages)
        gate = threading.Event()  # the device is slow: an engine that does not wait is quicker
        self.streams.add(tier._devices["toy", 0].out, gate.wait)  # type: ignore[attr-defined]
        for layer in range(LAYERS):
            store.filled(layer)
        store.finish()
        self.streams.add(engine.stream, lambda: [tensor.zero_() for tensor in engine.tensors])
        threading.Timer(0.05, gate.set).start()
        assert store.wait().stored_tokens == len(tokens)
        self.check_load(engine, tokens, len(tokens))

    def test_a_store_continues_one_that_is_still_on_its_way(self, tier: KVTier) -> None:
        engine = self.make(tier, "m")
        tokens = self.prompt(4 * 256)
        pages = self.pages(engine, len(tokens))
        engine.write(tokens, pages)
        half = len(pages) // 2
        stores = [
            engine.cache.start_store(tokens[: 2 * 256], pages[:half]),
            engine.cache.start_store(tokens, pages[half:], first_token=2 * 256),
        ]
        for store in stores:
            store.finish()
        assert [store.wait().stored_tokens for store in stores] == [512, 512]
        self.check_load(engine, tokens, len(tokens))

    def test_a_failed_device_leaves_nothing_but_misses(self, tier: KVTier) -> None:
        engine = self.make(tier, "m")
        tokens = self.prompt(2 * 256)
        pages = self.pages(engine, len(tokens))
        engine.write(tokens, pages)
        engine.store(tokens, pages)
        hit = engine.cache.lookup(tokens)
        device = tier._devices["toy", 0]
        assert isinstance(device, ToyDevice)
        store = engine.cache.start_store(self.prompt(256, seed=4), pages)
        device.fail("a sticky error")
        store.finish()
        assert store.wait().stored_tokens == 0
        result = engine.cache.start_load(hit, pages).wait()
        assert result is not None
        assert result.tokens == 0
        assert set(result.failed_pages) == set(pages)
        assert engine.cache.lookup(tokens).tokens == 0
        assert engine.store(self.prompt(256, seed=5), pages) == 0
        engine.cache._tier.release(hit)
        assert tier.stat()["leases"] == 0


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
