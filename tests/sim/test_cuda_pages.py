"""Pages on a CUDA device, on a stand-in for the driver whose streams work late and at random."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_cuda import Call, FakeCuda, Setting

from kvtier import (
    Agent,
    BackendUnavailable,
    Descriptor,
    DevicePlace,
    KvLayout,
    KVTier,
    LayoutMismatch,
    Namespace,
    Op,
    PagedKv,
    Region,
    RegionKind,
    Space,
)
from kvtier._core import CudaDevice
from kvtier.backends import cuda_paths
from kvtier.backends.cuda_pages import CudaCopies
from kvtier.device import Paging

LAYERS, PAGE_TOKENS, PAGES, PAGE_BYTES = 6, 16, 64, 512
LAYOUT = KvLayout.opaque(
    layers=LAYERS, page_tokens=PAGE_TOKENS, page_bytes=PAGE_BYTES, dtype="u8", packing="test"
)
PROMPT = list(range(16 * 20))
TIERS = {"tiers": [{"kind": "memory", "capacity": "4 MiB"}]}


@pytest.fixture(scope="module")
def library() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def cuda(library: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    library.install(monkeypatch)
    library.reset()
    mistakes = library.mistakes()
    yield library
    held = library.held_now()
    words = library.mistake_words()
    library.reset()
    assert not any(held), held
    assert library.mistakes() == mistakes, words


class Engine:
    """Pages in memory that is said to be a device's; block-first where `joined`."""

    def __init__(self, cuda: FakeCuda, device: CudaDevice, *, joined: bool = False) -> None:
        shape = (PAGES, LAYERS, PAGE_BYTES) if joined else (LAYERS, PAGES, PAGE_BYTES)
        self.raw = np.random.default_rng(2).integers(0, 256, shape, dtype=np.uint8)
        self.memory = self.raw.transpose(1, 0, 2) if joined else self.raw  # [layer, page, byte]
        cuda.own(Region(RegionKind.DRAM, self.raw.ctypes.data, self.raw.nbytes), 0)
        self.stream = device.create_stream()
        self.kv = PagedKv(
            plane_addresses=np.array([m.ctypes.data for m in self.memory], dtype=np.uint64),
            page_count=PAGES,
            page_stride=self.memory.strides[1],
            owner=self.raw,
            place=DevicePlace("cuda", 0, lambda: self.stream),
        )

    def put(self, cuda: FakeCuda, content: np.ndarray[Any, Any]) -> None:
        """Compute: the pages become `content` when the engine's stream comes to it."""
        cuda.own(Region(RegionKind.DRAM, content.ctypes.data, content.nbytes), 0)  # else it waits
        cuda.copy_on(self.stream, self.raw.ctypes.data, content)

    def see(self, cuda: FakeCuda, device: CudaDevice) -> np.ndarray[Any, Any]:
        """The pages as what the engine puts on its stream now finds them."""
        seen = np.empty_like(self.raw)
        cuda.copy_from(self.stream, seen, self.raw.ctypes.data)
        device.synchronize(self.stream)
        return seen


def make(tier: KVTier, engine: Engine) -> Space:
    return tier.attach(Namespace(model="m"), LAYOUT, engine.kv)


@pytest.fixture(params=["dma", "staged", "direct", "staged_bulk", "direct_bulk"])
def path(request: pytest.FixtureRequest, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every way there is, one after the other."""
    monkeypatch.setenv("KVTIER_CUDA_PATH", request.param)
    return str(request.param)


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("version", [12080, 12020], ids=["batches", "one by one"])
@pytest.mark.parametrize("seed", range(2))
def test_kv_comes_back_from_memory(
    cuda: FakeCuda, path: str, joined: bool, version: int, seed: int
) -> None:
    cuda.set(Setting.DRIVER_VERSION, version)
    cuda.set(Setting.SEED, seed)
    device = CudaDevice(0)
    assert device.has_batch_copy == (version >= 12080)
    engine = Engine(cuda, device, joined=joined)
    with KVTier.open(TIERS) as tier:
        space = make(tier, engine)
        expected = engine.memory[:, :20].copy()
        assert tier.store(space, PROMPT, range(20)).stored_tokens == len(PROMPT)
        hit = tier.lookup(space, PROMPT)
        load = tier.load(hit, range(30, 50))
        for layer in range(LAYERS):
            assert load.wait_layer(layer)
        device.synchronize(engine.stream)
        assert np.array_equal(engine.memory[:, 30:50], expected)
        result = load.wait()
        assert result is not None
        assert result.tokens == len(PROMPT)
        tier.release(hit)
    device.close()


@pytest.mark.parametrize("seed", range(4))
def test_copies_keep_the_order_of_the_engines_stream(cuda: FakeCuda, path: str, seed: int) -> None:
    """The engine computes late and goes on at once: what is stored is what was computed between."""
    cuda.set(Setting.SEED, seed)
    cuda.set(Setting.DELAY_MAX_US, 3000)
    device = CudaDevice(0)
    engine = Engine(cuda, device)
    chance = np.random.default_rng(seed)
    computed, other = chance.integers(0, 256, (2, *engine.raw.shape), dtype=np.uint8)
    with KVTier.open(TIERS) as tier:
        space = make(tier, engine)
        engine.put(cuda, computed)
        store = tier.start_store(space, PROMPT, range(20))
        for layer in range(LAYERS):
            store.filled(layer)
            store.filled(layer)  # as layers do that share their KV
        store.finish()
        engine.put(cuda, other)  # the pages are another request's
        assert store.wait().stored_tokens == len(PROMPT)
        hit = tier.lookup(space, PROMPT)
        load = tier.load(hit, range(30, 50))
        for layer in range(LAYERS):
            assert load.wait_layer(layer)
        seen = engine.see(cuda, device)
        assert np.array_equal(seen[:, 30:50], computed[:, :20])
        assert np.array_equal(seen[:, :30], other[:, :30])
        assert load.wait() is not None
        tier.release(hit)
    device.close()


def test_a_device_that_cannot_start_leaves_nothing(cuda: FakeCuda) -> None:
    cuda.fail(Call.STREAM_CREATE, 2, skip=1)
    with pytest.raises(OSError, match="OUT_OF_MEMORY"):
        CudaDevice(0)


def test_neighbours_go_in_one_piece(cuda: FakeCuda) -> None:
    """Blocks of all layers together, in pages that follow each other: a descriptor a wave."""
    device = CudaDevice(0)
    engine = Engine(cuda, device, joined=True)
    with KVTier.open({**TIERS, "self_test": False}) as tier:
        space = tier.attach(Namespace(model="m", waves=1), LAYOUT, engine.kv)
        before = cuda.counters().batch_copies
        tier.store(space, PROMPT[:256], range(16))
        assert cuda.counters().batch_copies - before == 1
    device.close()


def test_a_sticky_error_leaves_the_engine_to_recompute(cuda: FakeCuda, path: str) -> None:
    device = CudaDevice(0)
    engine = Engine(cuda, device)
    with KVTier.open(TIERS) as tier:
        space = make(tier, engine)
        tier.store(space, PROMPT, range(20))
        hit = tier.lookup(space, PROMPT)
        cuda.fail(Call.KERNEL_RUN if "direct" in path else Call.COPY_RUN, 700)
        result = tier.load(hit, range(30, 50)).wait()
        assert result is not None
        assert result.tokens == 0
        assert set(result.failed_pages) == set(range(30, 50))
        assert "ILLEGAL_ADDRESS" in space.failure
        assert tier.lookup(space, PROMPT).tokens == 0
        assert tier.store(space, PROMPT[:64], range(4)).stored_tokens == 0
        tier.release(hit)
    device.close()
    cuda.reset()  # what a lost context had goes with it


def test_pages_that_are_no_memory_of_the_device_are_refused(cuda: FakeCuda) -> None:
    device = CudaDevice(0)
    engine = Engine(cuda, device)
    host = np.zeros((PAGES, PAGE_BYTES), np.uint8)
    with KVTier.open(TIERS) as tier:
        addresses = engine.kv.plane_addresses.copy()
        addresses[3] = host.ctypes.data
        with pytest.raises(LayoutMismatch, match="plane 3 is no memory of the device"):
            tier.attach(Namespace(model="m"), LAYOUT, replace(engine.kv, plane_addresses=addresses))
        longer = replace(engine.kv, page_count=PAGES * LAYERS + 1)
        with pytest.raises(LayoutMismatch, match=r"beyond the end|not of one kind"):
            tier.attach(Namespace(model="m"), LAYOUT, longer)
    device.close()


def test_a_stream_of_another_device_is_refused(cuda: FakeCuda) -> None:
    device, other = CudaDevice(0), CudaDevice(1)
    engine = Engine(cuda, device)
    with KVTier.open(TIERS) as tier:
        space = make(tier, engine)
        engine.stream = other.create_stream()
        with pytest.raises(ValueError, match="is not one of device 0"):
            tier.store(space, PROMPT, range(20))
        stat = tier.stat()
        assert (stat["tiers"]["memory"]["used_bytes"], stat["leases"]) == (0, 0)
        engine.stream = device.create_stream()
        assert tier.store(space, PROMPT, range(20)).stored_tokens == len(PROMPT)
    device.close()
    other.close()


def test_what_is_missing_is_said(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    device = CudaDevice(0)
    engine = Engine(cuda, device)
    with KVTier.open(TIERS) as tier:
        monkeypatch.setenv("KVTIER_CUDA", "off")
        with pytest.raises(BackendUnavailable, match="switched off"):
            make(tier, engine)
        monkeypatch.delenv("KVTIER_CUDA")
        cuda.set(Setting.PINNED_BYTES, 1 << 20)
        with pytest.raises(BackendUnavailable, match="page-locked"):
            make(tier, engine)
        cuda.set(Setting.PINNED_BYTES, 1 << 30)
        make(tier, engine)
    device.close()
    monkeypatch.setenv("KVTIER_CUDA_LIBRARY", "/nowhere.so")
    assert CudaDevice.count() == 0
    assert "no CUDA driver" in CudaDevice.missing()
    with pytest.raises(OSError, match="no CUDA driver") as found:
        CudaDevice(0)
    assert found.value.errno == errno.ENODEV


def test_what_is_asked_for_is_one_of_what_there_is(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = CudaDevice(0)
    engine = Engine(cuda, device)
    for name, value, words in [
        ("KVTIER_CUDA", "on", "expected one of auto, off, jit"),
        ("KVTIER_CUDA_CTAS", "many", "KVTIER_CUDA_CTAS is 'many'"),
        ("KVTIER_CUDA_CTAS", "5000", "expected 1 to 1024"),
        ("KVTIER_CUDA_PATH", "fast", "expected auto or one of dma, staged, direct"),
    ]:
        with KVTier.open(TIERS) as tier, monkeypatch.context() as patch:
            patch.setenv(name, value)
            with pytest.raises(BackendUnavailable, match=words):
                make(tier, engine)
    device.close()


def test_where_staging_finds_no_memory_another_way_is_taken(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("KVTIER_CUDA_PATH", "auto")
    device = CudaDevice(0)
    engine = Engine(cuda, device)
    costs = {"staged": 1e-12, "direct": 2e-12, "dma": 9e-12}
    keep_costs(device, costs, costs)
    with KVTier.open(TIERS) as tier:
        cuda.set(Setting.MEMORY_BYTES, 32 << 20)
        space = make(tier, engine)
        assert isinstance(space.copies, CudaCopies)
        assert {space.copies.way(each, 1).path for each in cuda_paths.DIRECTIONS} == {"direct"}
        assert tier.store(space, PROMPT, range(20)).stored_tokens == len(PROMPT)
    device.close()


# What ways cost ----------------------------------------------------------------------------------


def keep_costs(device: CudaDevice, gather: dict[str, float], scatter: dict[str, float]) -> None:
    """As if they had been measured; the same for all run sizes."""
    sizes = len(cuda_paths.RUN_SIZES)
    sides = [{way: (cost,) * sizes for way, cost in each.items()} for each in (gather, scatter)]
    cuda_paths.write(cuda_paths._file_of(device), cuda_paths.Costs(cuda_paths.VERSION, *sides))


def test_what_was_measured_is_kept_and_decides(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("KVTIER_CUDA_PATH", "auto")
    monkeypatch.setattr(cuda_paths, "measure", lambda device: cuda_paths_measure(device, 16384))
    device = CudaDevice(0)
    engine = Engine(cuda, device)
    costs = cuda_paths.costs_of(device)
    held = cuda.held_now()
    assert held.allocations == held.pinned  # tables have one of each: the staging was given back
    assert set(costs.gather) == set(costs.scatter) == {"dma", "staged", "direct", "staged_bulk"}
    (file,) = (tmp_path / "kvtier").iterdir()
    kept = file.read_bytes()
    cuda.fail(Call.MEMORY_ALLOCATE, 2, count=100)  # it would need memory to measure again
    assert cuda_paths.costs_of(device) == costs
    cuda.fail(Call.MEMORY_ALLOCATE, 0, count=0)
    for damaged in (b"", kept[:-1], kept.replace(b'"version":1', b'"version":2'), b'{"a":1}'):
        file.write_bytes(damaged)
        cuda_paths.costs_of(device)
        assert len(file.read_bytes()) > len(damaged) // 2
    keep_costs(device, {"dma": 2e-12, "direct": 1e-12}, {"dma": 1.1e-12, "staged": 1e-12})
    with KVTier.open(TIERS) as tier:
        space = make(tier, engine)
        assert isinstance(space.copies, CudaCopies)
        assert space.copies.way("gather", 1) == ("direct", False)
        assert space.copies.way("scatter", 1) == ("dma", False)  # little is gained by the kernel
        assert tier.store(space, PROMPT, range(20)).stored_tokens == len(PROMPT)
    device.close()


def test_planes_that_lie_together_are_long_runs(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Block-first, a wave of many planes is one piece, which the copy engines take; a few are not."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("KVTIER_CUDA_PATH", "auto")
    device = CudaDevice(0)
    sizes = [size <= 2048 for size in cuda_paths.RUN_SIZES]
    costs = {"dma": tuple(9e-12 if s else 1e-12 for s in sizes), "direct": (2e-12,) * len(sizes)}
    cuda_paths.write(
        cuda_paths._file_of(device), cuda_paths.Costs(cuda_paths.VERSION, costs, costs)
    )
    run, planes = 2048, 8
    memory = np.zeros((4, planes, run), np.uint8)
    for order, ways in [("joined", ["direct", "dma"]), ("apart", ["direct", "direct"])]:
        view = memory if order == "joined" else memory.reshape(planes, 4, run).transpose(1, 0, 2)
        cuda.own(Region(RegionKind.DRAM, memory.ctypes.data, memory.nbytes), 0)
        addresses = np.array([view[0, p].ctypes.data for p in range(planes)], np.uint64)
        copies = CudaCopies(device, Paging(addresses, 4, view.strides[0], 1, 0, 1, 0, run))
        assert [copies.way("gather", count).path for count in (1, planes)] == ways
        del copies
    device.close()


cuda_paths_measure = cuda_paths.measure


@pytest.mark.parametrize("op", [Op.READ, Op.WRITE])
def test_an_agent_moves_pieces_between_device_and_host(cuda: FakeCuda, op: Op) -> None:
    on_device = np.random.default_rng(4).integers(0, 256, 1 << 16, dtype=np.uint8)
    host = np.zeros(1 << 16, np.uint8)
    cuda.own(Region(RegionKind.DRAM, on_device.ctypes.data, on_device.nbytes), 0)
    source = on_device if op is Op.READ else host
    source[:] = np.arange(1 << 16) % 251
    with Agent("a", backends=["cuda"]) as agent:
        local = agent.register(host)
        remote = agent.register((on_device.ctypes.data, on_device.nbytes), kind=RegionKind.VRAM)
        pieces = [(0, 1000), (5000, 4096), (20000, 30000)]
        transfer = agent.prepare(
            op,
            [Descriptor(local, at, n) for at, n in pieces],
            [Descriptor(remote, at + 7, n) for at, n in pieces],
        )
        transfer.post(deadline_s=10.0)
        assert transfer.wait()
        assert transfer.ok, transfer.failure
    for at, n in pieces:
        mine, theirs = host[at : at + n], on_device[at + 7 : at + 7 + n]
        assert np.array_equal(mine, theirs)
