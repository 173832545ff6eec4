"""Spaces whose pages lie on a device: what the core does when it is slow, fails or is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from kvtier import (
    BackendUnavailable,
    ConfigError,
    DevicePlace,
    KvLayout,
    KVTier,
    LayoutMismatch,
    Namespace,
    PagedKv,
    Space,
)
from kvtier.testing.toy_device import ToyDevice, ToyStreams

LAYERS, PAGE_TOKENS, PAGES, PAGE_BYTES = 8, 16, 64, 512
LAYOUT = KvLayout.opaque(
    layers=LAYERS, page_tokens=PAGE_TOKENS, page_bytes=PAGE_BYTES, dtype="u8", packing="test"
)
BLOCK = LAYERS * PAGE_BYTES
PROMPT = list(range(512))


class Bench:
    """A tier, a toy device, and an engine's pages on it."""

    def __init__(self, capacity: str = "4 MiB", **config: object) -> None:
        self.streams = ToyStreams(seed=3)
        self.device = ToyDevice(self.streams)
        self.stream = self.streams.create()
        self.memory = np.random.default_rng(1).integers(
            0, 256, (LAYERS, PAGES, PAGE_BYTES), dtype=np.uint8
        )
        self.kv = PagedKv(
            plane_addresses=np.array([layer.ctypes.data for layer in self.memory], dtype=np.uint64),
            page_count=PAGES,
            page_stride=PAGE_BYTES,
            owner=self.memory,
            place=DevicePlace("toy", 0, lambda: self.stream),
        )
        self.tier = KVTier.open(
            {"tiers": [{"kind": "memory", "capacity": capacity}], **config},
            devices={"toy": lambda _: self.device},
        )

    def attach(self, waves: int = 8) -> Space:
        return self.tier.attach(Namespace(model="m", waves=waves), LAYOUT, self.kv)

    def block_device(self, stream: int) -> Callable[[], None]:
        """Nothing passes on that stream of the device until the result is called."""
        gate = threading.Event()
        self.streams.add(stream, gate.wait)
        return gate.set

    def close(self) -> None:
        self.tier.close()
        self.streams.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


def test_a_cancelled_store_leaves_no_trace(bench: Bench) -> None:
    space = bench.attach()
    before = bench.tier.stat()
    store = bench.tier.start_store(space, PROMPT, range(32))
    store.filled(0)
    store.cancel()
    store.finish()
    assert store.done()
    assert store.result().stored_tokens == 0
    after = bench.tier.stat()
    assert after["tiers"]["memory"] == before["tiers"]["memory"]
    assert after["leases"] == 0


def test_a_store_that_continues_one_that_failed_is_dropped(bench: Bench) -> None:
    """Its prefix was expected and never came: nobody could reach it."""
    space = bench.attach()
    first = bench.tier.start_store(space, PROMPT[:256], range(16))
    second = bench.tier.start_store(space, PROMPT, range(16, 32), first_token=256)
    third = bench.tier.start_store(space, PROMPT[:256], range(16))
    first.cancel()
    second.finish()
    assert second.wait().stored_tokens == 0
    third.finish()
    assert third.wait().stored_tokens == 0  # it had counted on the first one, too
    assert bench.tier.lookup(space, PROMPT).tokens == 0
    assert bench.tier.store(space, PROMPT, range(32)).stored_tokens == 512
    assert bench.tier.stat()["tiers"]["memory"]["chunks"] == 2


def test_a_deadline_waits_for_the_device_and_no_page_is_touched_after_it(bench: Bench) -> None:
    space = bench.attach()
    bench.tier.store(space, PROMPT, range(32))
    hit = bench.tier.lookup(space, PROMPT)
    release = bench.block_device(bench.device.into)
    load = bench.tier.load(hit, range(32, 64), timeout_s=0.001)
    threading.Timer(0.05, release).start()
    result = load.cancel()
    seen = bench.memory.copy()
    bench.streams.synchronize(bench.device.into)
    assert np.array_equal(bench.memory, seen)
    assert result.tokens in (0, 512)
    assert not result.tokens or np.array_equal(bench.memory[:, 32:], bench.memory[:, :32])
    bench.tier.release(hit)
    assert bench.tier.stat()["leases"] == 0


def test_a_wave_is_on_its_way_before_later_layers_are_filled(bench: Bench) -> None:
    space = bench.attach(waves=2)
    store = bench.tier.start_store(space, PROMPT, range(32))
    wave_layers = space.wave_of_layer.count(0)
    for layer in [*range(wave_layers - 1), *range(wave_layers - 1), 0]:
        store.filled(layer)  # twice, as layers do that share their KV
    assert not store._begun
    store.filled(wave_layers - 1)
    moves = store._begun
    assert len(moves) == 1
    assert moves[0].wait(10.0)
    assert moves[0].nbytes == 32 * wave_layers * PAGE_BYTES
    bench.memory[wave_layers:] ^= 0xFF  # what the later layers compute
    expected = bench.memory.copy()
    for layer in range(wave_layers, LAYERS):
        store.filled(layer)
    store.finish()
    assert store.wait().stored_tokens == 512
    hit = bench.tier.lookup(space, PROMPT)
    assert bench.tier.load(hit, range(32, 64)).wait() is not None
    assert np.array_equal(bench.memory[:, 32:], expected[:, :32])
    bench.tier.release(hit)


def test_a_bad_day_of_the_device_at_the_start_is_said(bench: Bench) -> None:
    bench.device.fail("no memory left to page-lock")
    with pytest.raises(BackendUnavailable, match="page-lock"):
        bench.attach()
    assert bench.device.closed


def test_a_memory_tier_without_room_for_the_proof_is_said() -> None:
    bench = Bench(capacity="4 KiB")
    with pytest.raises(BackendUnavailable, match="no room for 3 blocks of 4096 bytes"):
        bench.attach()
    bench.close()


def test_a_device_nobody_has_registered_is_a_wrong_setting(bench: Bench) -> None:
    kv = replace(bench.kv, place=DevicePlace("tay", 0, lambda: 0))
    with pytest.raises(ConfigError, match="no device named 'tay'"):
        bench.tier.attach(Namespace(model="m"), LAYOUT, kv)


def test_a_space_made_by_hand_cannot_copy_from_a_device(bench: Bench) -> None:
    with pytest.raises(LayoutMismatch, match=r"KVTier\.attach"):
        Space(Namespace(model="m"), LAYOUT, bench.kv)


def test_a_device_is_opened_once_and_closed_with_the_tier() -> None:
    bench = Bench()
    bench.attach()
    bench.tier.attach(Namespace(model="other"), LAYOUT, bench.kv)
    assert [memory.nbytes for memory in bench.device.registered] == [4 << 20]
    bench.close()
    assert bench.device.closed


def test_stores_on_their_way_are_published_by_close(bench: Bench) -> None:
    space = bench.attach()
    release = bench.block_device(bench.device.out)
    store = bench.tier.start_store(space, PROMPT, range(32))
    store.finish()
    assert not store.done()
    threading.Timer(0.05, release).start()
    bench.tier.close()
    assert store.result().stored_tokens == 512


def test_another_namespace_shares_the_pages_and_nothing_else(bench: Bench) -> None:
    space = bench.attach()
    other = space.beside(Namespace(model="m", salt="tenant"))
    assert bench.tier.store(space, PROMPT, range(32)).stored_tokens == 512
    assert bench.tier.lookup(other, PROMPT).tokens == 0
    assert bench.tier.store(other, PROMPT, range(32)).stored_tokens == 512
    hit = bench.tier.lookup(other, PROMPT)
    assert hit.tokens == 512
    bench.tier.release(hit)
