"""`KVTier` beyond what every connector sees: leases, moving, cleaning, quotas, events, closing."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier import (
    Closed,
    ConfigError,
    EventKind,
    Extra,
    KvLayout,
    KVTier,
    LayoutMismatch,
    LeaseExpired,
    Namespace,
    PagedKv,
    Space,
)
from kvtier.backends.memory import MemoryBackend, MemoryOptions
from kvtier.clock import ManualClock
from kvtier.manifest import NO_PARENT, decode_head
from kvtier.testing.connector_suite import ConnectorSuite, toy_kv
from kvtier.types import ChunkKey, Outcome

LAYERS, PAGE, ROW, PAGES = 4, 16, 64, 200
LAYOUT = KvLayout.per_token(
    layers=LAYERS, planes=1, page_tokens=PAGE, heads=1, head_bytes=ROW, dtype="u1"
)
RECORD = 4096 + 4 * 16384  # a whole chunk: header and four waves of one layer each
prompt = ConnectorSuite.prompt


class Engine:
    """Numpy pages [layer, page, token, byte] attached to a tier."""

    def __init__(self, tier: KVTier, namespace: Namespace | None = None) -> None:
        self.memory = np.zeros((LAYERS, PAGES, PAGE, ROW), dtype=np.uint8)
        self.tier = tier
        self.space = tier.attach(namespace or Namespace(model="m", waves=4), LAYOUT, self.kv())

    def kv(self) -> PagedKv:
        return PagedKv(
            plane_addresses=np.array([layer.ctypes.data for layer in self.memory], dtype=np.uint64),
            page_count=PAGES,
            page_stride=PAGE * ROW,
            row_stride=ROW,
            col_stride=ROW,
            owner=self.memory,
        )

    def store(self, tokens: list[int], first_token: int = 0, **options: Any) -> int:
        """Compute `tokens` into pages from 0 on and store what lies from `first_token` on."""
        count = -(-len(tokens) // PAGE)
        kv = toy_kv(tokens, LAYERS, 1, ROW)[:, 0]
        padded = np.zeros((LAYERS, count * PAGE, ROW), dtype=np.uint8)
        padded[:, : len(tokens)] = kv
        self.memory[:, :count] = padded.reshape(LAYERS, count, PAGE, ROW)
        pages = list(range(first_token // PAGE, count))
        result = self.tier.store(self.space, tokens, pages, first_token=first_token, **options)
        return result.stored_tokens

    def right(self, tokens: list[int]) -> int:
        """Look up, load into other pages, compare; how many tokens came back, all of them right."""
        hit = self.tier.lookup(self.space, tokens)
        pages = list(range(PAGES - hit.tokens // PAGE, PAGES))
        result = self.tier.load(hit, pages).wait()
        self.tier.release(hit)
        assert result is not None
        got = self.memory[:, pages].reshape(LAYERS, -1, ROW)[:, : result.tokens]
        assert np.array_equal(got, toy_kv(tokens, LAYERS, 1, ROW)[:, 0, : result.tokens])
        return result.tokens


def memory_only(capacity: int = 64 * 2**20, **settings: Any) -> dict[str, Any]:
    return {"tiers": [{"kind": "memory", "capacity": capacity}], **settings}


def with_disk(
    root: Path, memory: int = 64 * 2**20, disk: int = 2**30, **settings: Any
) -> dict[str, Any]:
    return {
        "tiers": [
            {"kind": "memory", "capacity": memory},
            {"kind": "posix", "name": "disk", "capacity": disk, "path": str(root / "kv")},
        ],
        **settings,
    }


@pytest.fixture
def tier() -> Iterator[KVTier]:
    with KVTier.open(memory_only()) as tier:
        yield tier


@pytest.fixture
def engine(tier: KVTier) -> Engine:
    return Engine(tier)


# Lookup and partial chunks ------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 255, 256, 257, 271, 272, 512, 600])
def test_every_whole_page_of_a_prompt_comes_back(engine: Engine, length: int) -> None:
    tokens = prompt(length)
    assert engine.store(tokens) == length // PAGE * PAGE
    assert engine.right(tokens) == length // PAGE * PAGE


def test_a_hit_may_be_longer_than_what_the_engine_takes(engine: Engine) -> None:
    """An exact repeat of a stored prompt: the engine must compute one token, so it takes less."""
    tokens = prompt(512)
    engine.store(tokens)
    hit = engine.tier.lookup(engine.space, tokens)
    assert hit.tokens == 512
    pages = list(range(100, 100 + 511 // PAGE))
    result = engine.tier.load(hit, pages).wait()
    assert result is not None
    assert result.failed_pages == ()
    got = engine.memory[:, pages].reshape(LAYERS, -1, ROW)
    assert np.array_equal(got, toy_kv(tokens, LAYERS, 1, ROW)[:, 0, : len(pages) * PAGE])


def test_a_load_may_begin_inside_a_chunk(engine: Engine) -> None:
    """The engine's own prefix cache had the first pages; kvtier brings only the rest."""
    tokens = prompt(512)
    engine.store(tokens)
    engine.memory[:, 100:200] = 7
    hit = engine.tier.lookup(engine.space, tokens)
    result = engine.tier.load(hit, list(range(110, 131)), first_token=160).wait()
    assert result is not None
    assert all(outcome.ok for outcome in result.outcomes)
    got = engine.memory[:, 110:131].reshape(LAYERS, -1, ROW)
    assert np.array_equal(got, toy_kv(tokens, LAYERS, 1, ROW)[:, 0, 160 : 160 + 21 * PAGE])
    assert (engine.memory[:, 100:110] == 7).all()
    assert (engine.memory[:, 131:] == 7).all()


def test_a_shorter_prompt_keeps_its_tail_when_a_longer_one_comes(engine: Engine) -> None:
    """Generated tokens fill the prompt's last chunk; asked again, the prompt must still hit."""
    tokens = prompt(512)
    engine.store(tokens[:300])
    engine.store(tokens)
    assert engine.right([*tokens[:300], 5, 6, 7]) == 288
    assert engine.right(tokens) == 512


def test_decoded_tokens_are_stored_as_their_chunks_fill(engine: Engine) -> None:
    tokens = prompt(600)
    engine.store(tokens[:300])
    assert engine.store(tokens[:512], first_token=256) == 256
    assert engine.right(tokens) == 512


def test_a_chunk_without_its_prefix_is_dropped_and_counted(engine: Engine) -> None:
    tokens = prompt(512)
    result = engine.tier.store(engine.space, tokens, list(range(16)), first_token=256)
    assert (result.stored_tokens, result.dropped_tokens) == (0, 512)
    assert engine.tier.lookup(engine.space, tokens).tokens == 0


def test_images_with_equal_placeholders_do_not_meet(engine: Engine) -> None:
    tokens = [9] * 512
    engine.store(tokens, extras=[Extra(10, 300, b"cat")])
    tier, space = engine.tier, engine.space
    assert tier.lookup(space, tokens, extras=[Extra(10, 300, b"cat")]).tokens == 512
    assert tier.lookup(space, tokens, extras=[Extra(10, 300, b"dog")]).tokens == 0
    assert tier.lookup(space, tokens).tokens == 0


def test_a_partial_chunk_with_an_image_is_found(engine: Engine) -> None:
    tokens, extras = [9] * 300, [Extra(290, 310, b"cat")]
    assert engine.store(tokens, extras=extras) == 288
    assert engine.tier.lookup(engine.space, tokens, extras=extras).tokens == 288


def test_spaces_of_equal_namespace_share_and_others_do_not(tier: KVTier) -> None:
    writer = Engine(tier)
    tokens = prompt(300)
    writer.store(tokens)
    assert tier.lookup(tier.attach(Namespace(model="m", waves=4), LAYOUT), tokens).tokens == 288
    for other in (
        Namespace(model="m", waves=4, salt="tenant"),
        Namespace(model="m", waves=4, dtype="float16"),
        Namespace(model="m", waves=4, chunk_tokens=128),
    ):
        assert tier.lookup(tier.attach(other, LAYOUT), tokens).tokens == 0


# Leases -------------------------------------------------------------------------------------------


def test_leased_chunks_survive_pressure_and_released_ones_do_not() -> None:
    with KVTier.open(memory_only(4 * RECORD)) as tier:
        engine = Engine(tier)
        kept = prompt(256, seed=1)
        engine.store(kept)
        lease = tier.pin(engine.space, kept, ttl_s=1000)
        for seed in range(2, 12):
            engine.store(prompt(256, seed=seed))
        assert engine.right(kept) == 256
        assert tier.release(lease)
        assert not tier.release(lease), "a second release must change nothing"
        for seed in range(20, 30):
            engine.store(prompt(256, seed=seed))
        assert engine.right(kept) == 0


def test_a_lease_ends_by_itself() -> None:
    clock = ManualClock()
    with KVTier.open(memory_only(2 * RECORD), clock=clock) as tier:
        engine = Engine(tier)
        first = prompt(512, seed=1)
        engine.store(first)
        hit = tier.lookup(engine.space, first, lease_s=10)
        assert engine.store(prompt(256, seed=2)) == 0
        assert tier.stat()["leases"] == 1
        clock.advance(11)
        assert engine.store(prompt(256, seed=2)) == 256
        assert tier.stat()["leases"] == 0
        with pytest.raises(LeaseExpired):
            tier.load(hit, list(range(32)))


def test_a_store_that_finds_no_room_is_dropped_and_counted() -> None:
    with KVTier.open(memory_only(2 * RECORD)) as tier:
        engine = Engine(tier)
        assert engine.store(prompt(5 * 256)) == 512
        assert tier.metrics.count("store_dropped_tokens") == 3 * 256
        assert tier.stat()["tiers"]["memory"]["used_bytes"] == 2 * RECORD


# Eviction -----------------------------------------------------------------------------------------


def test_eviction_takes_the_tail_of_the_oldest_prompt_first() -> None:
    with KVTier.open(memory_only(4 * RECORD)) as tier:
        engine = Engine(tier)
        first, second = prompt(3 * 256, seed=1), prompt(2 * 256, seed=2)
        engine.store(first)
        engine.store(second)
        assert engine.right(first) == 2 * 256
        assert engine.right(second) == 2 * 256


def test_what_memory_evicts_is_still_served_from_disk(tmp_path: Path) -> None:
    with KVTier.open(with_disk(tmp_path, memory=4 * RECORD)) as tier:
        engine = Engine(tier)
        prompts = [prompt(512, seed=seed) for seed in range(6)]
        for tokens in prompts:
            engine.store(tokens)
            assert tier.flush()
        for tokens in prompts:
            assert engine.right(tokens) == 512
        assert tier.stat()["tiers"]["disk"]["used_bytes"] == 12 * RECORD
        assert tier.stat()["tiers"]["memory"]["used_bytes"] <= 4 * RECORD


def test_the_disk_quota_is_exact_and_its_files_are_what_it_counts(tmp_path: Path) -> None:
    with KVTier.open(with_disk(tmp_path, disk=5 * RECORD)) as tier:
        engine = Engine(tier)
        for seed in range(6):
            engine.store(prompt(512, seed=seed))
            assert tier.flush()
            sizes = [file.stat().st_size for file in (tmp_path / "kv").rglob("*.kvc")]
            assert sum(sizes) == tier.stat()["tiers"]["disk"]["used_bytes"] <= 5 * RECORD


def test_a_smaller_quota_after_a_restart_is_kept(tmp_path: Path) -> None:
    with KVTier.open(with_disk(tmp_path)) as tier:
        engine = Engine(tier)
        for seed in range(4):
            engine.store(prompt(512, seed=seed))
    with KVTier.open(with_disk(tmp_path, disk=3 * RECORD)) as tier:
        assert tier.flush()
        assert tier.stat()["tiers"]["disk"]["used_bytes"] <= 3 * RECORD
        files = list((tmp_path / "kv").rglob("*.kvc"))
        assert len(files) == tier.stat()["tiers"]["disk"]["chunks"] == 3


def test_recency_outlives_a_restart(tmp_path: Path) -> None:
    with KVTier.open(with_disk(tmp_path)) as tier:
        engine = Engine(tier)
        prompts = [prompt(256, seed=seed) for seed in range(3)]
        for tokens in prompts:
            engine.store(tokens)
        assert tier.flush()
        assert engine.right(prompts[0]) == 256
    with KVTier.open(with_disk(tmp_path, disk=2 * RECORD)) as tier:
        held = [tier.lookup(engine.space, tokens, lease_s=0).tokens for tokens in prompts]
        assert held == [256, 0, 256]


# Moving and cleaning ------------------------------------------------------------------------------


def test_moving_down_frees_memory_and_moving_up_brings_it_back(tmp_path: Path) -> None:
    with KVTier.open(with_disk(tmp_path)) as tier:
        engine = Engine(tier)
        tokens = prompt(600)
        engine.store(tokens)
        assert tier.move(engine.space, tokens, "disk") == 592
        assert tier.stat()["tiers"]["memory"]["used_bytes"] == 0
        assert tier.lookup(engine.space, tokens).tiers == ["disk"] * 3
        assert tier.move(engine.space, tokens, "memory") == 592
        hit = tier.lookup(engine.space, tokens)
        assert (hit.in_memory, hit.tokens_by_tier()) == (True, {"memory": 592})
        assert engine.right(tokens) == 592


def test_move_writes_down_what_write_back_was_told_not_to(tmp_path: Path) -> None:
    with KVTier.open(with_disk(tmp_path, write_back=False)) as tier:
        engine = Engine(tier)
        tokens = prompt(512)
        engine.store(tokens)
        assert tier.stat()["tiers"]["disk"]["chunks"] == 0
        assert tier.move(engine.space, tokens, "disk") == 512
        assert engine.right(tokens) == 512


def test_an_unknown_tier_is_named(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="no tier named 'ssd'; there are memory"):
        engine.tier.move(engine.space, [1], "ssd")


def test_cleanup_of_everything_leaves_nothing_anywhere(tmp_path: Path) -> None:
    with KVTier.open(with_disk(tmp_path)) as tier:
        engine = Engine(tier)
        tokens = prompt(600)
        engine.store(tokens)
        assert tier.cleanup().dropped == 3
        assert tier.lookup(engine.space, tokens).tokens == 0
        stat = tier.stat()
        assert stat["chunks"] == 0
        assert [t["used_bytes"] for t in stat["tiers"].values()] == [0, 0]
        assert list((tmp_path / "kv").rglob("*.kvc")) == []
    with KVTier.open(with_disk(tmp_path)) as tier:
        assert tier.lookup(engine.space, tokens).tokens == 0


def test_cleanup_of_one_space_or_prompt_leaves_the_others(tier: KVTier) -> None:
    one, two = Engine(tier), Engine(tier, Namespace(model="n", waves=4))
    prompts = [prompt(512, seed=seed) for seed in range(2)]
    for engine in (one, two):
        for tokens in prompts:
            engine.store(tokens)
    tier.cleanup(one.space, prompts[0])
    assert [one.right(tokens) for tokens in prompts] == [0, 512]
    tier.cleanup(two.space)
    assert [two.right(tokens) for tokens in prompts] == [0, 0]
    assert one.right(prompts[1]) == 512


def test_cleanup_of_memory_leaves_the_disk(tmp_path: Path) -> None:
    with KVTier.open(with_disk(tmp_path)) as tier:
        engine = Engine(tier)
        tokens = prompt(512)
        engine.store(tokens)
        tier.cleanup(tier="memory")
        assert tier.stat()["tiers"]["memory"]["used_bytes"] == 0
        assert engine.right(tokens) == 512


def test_cleanup_of_a_tier_takes_along_what_it_makes_unreachable(tmp_path: Path) -> None:
    """The first chunks are on disk only, the last one in memory too."""
    with KVTier.open(with_disk(tmp_path)) as tier:
        engine = Engine(tier)
        engine.store(prompt(512))
        assert tier.move(engine.space, prompt(512), "disk") == 512
        engine.store(prompt(768), first_token=512)
        tier.cleanup(tier="disk")
        assert tier.stat()["chunks"] == 0
        assert tier.stat()["tiers"]["memory"]["used_bytes"] == 0


def test_a_tier_orders_only_what_it_holds(tmp_path: Path) -> None:
    """A chunk that continues what only memory holds goes to disk; the disk was cleaned before."""
    tier = KVTier.open(with_disk(tmp_path))
    engine = Engine(tier)
    engine.store(prompt(256))
    tier.cleanup(tier="disk")
    engine.store(prompt(512))
    assert tier.flush()
    assert tier.stat()["tiers"]["disk"]["chunks"] == 1
    tier.move(engine.space, prompt(512), "disk")
    tier.cleanup(tier="disk")
    tier.close()


def test_a_prefix_is_as_recent_as_what_continues_it() -> None:
    """Else the prefix would be the first to go, and take its new continuation along."""
    with KVTier.open(memory_only(3 * RECORD)) as tier:
        engine = Engine(tier)
        engine.store(prompt(256, seed=1))
        engine.store(prompt(256, seed=2))
        engine.store(prompt(512, seed=1))
        engine.store(prompt(256, seed=3))
        held = [tier.lookup(engine.space, prompt(512, s), lease_s=0).tokens for s in (1, 2, 3)]
        assert held == [512, 0, 256]


def test_a_leased_chunk_whose_prefix_left_is_still_cleaned_with_its_space(tmp_path: Path) -> None:
    with KVTier.open(with_disk(tmp_path)) as tier:
        engine = Engine(tier)
        engine.store(prompt(512))
        assert tier.flush()
        tier.cleanup(tier="memory")
        hit = tier.lookup(engine.space, prompt(512))
        for file in (tmp_path / "kv").rglob("*.kvc"):
            if decode_head(file.read_bytes()[:192]).parent == NO_PARENT:
                file.write_bytes(bytes(file.stat().st_size))
        result = tier.load(hit, list(range(32))).wait()
        assert result is not None
        assert result.tokens == 0
        tier.release(hit)
        assert tier.stat()["chunks"] == 1
        assert tier.cleanup(engine.space).dropped == 1
        assert tier.stat()["chunks"] == 0


def test_what_a_finished_load_held_can_be_cleaned_at_once(engine: Engine) -> None:
    engine.store(prompt(512))
    for _ in range(20):
        hit = engine.tier.lookup(engine.space, prompt(512), lease_s=0)
        assert engine.tier.load(hit, list(range(100, 132))).wait() is not None
        assert engine.tier.cleanup().leased == 0
        engine.store(prompt(512))


def test_cleanup_of_a_prompt_leaves_none_of_its_shorter_forms(engine: Engine) -> None:
    """Partial chunks that a longer one hides from a lookup, at the first chunk and later."""
    tokens = prompt(600)
    for length in (32, 64, 300, 400, 600):
        engine.store(tokens[:length])
    engine.store([*tokens[:32], 7])
    assert engine.tier.cleanup(engine.space, tokens[:310]).leased == 0
    assert engine.tier.lookup(engine.space, tokens).tokens == 0
    assert engine.tier.stat()["chunks"] == 0


def test_cleanup_leaves_what_is_leased(engine: Engine) -> None:
    tokens = prompt(512)
    engine.store(tokens)
    hit = engine.tier.pin(engine.space, tokens, ttl_s=1000)
    assert (engine.tier.cleanup().leased, engine.right(tokens)) == (2, 512)
    engine.tier.release(hit)
    assert (engine.tier.cleanup().dropped, engine.right(tokens)) == (2, 0)


def test_tokens_without_a_space_are_refused(engine: Engine) -> None:
    with pytest.raises(ValueError, match="within a space"):
        engine.tier.cleanup(tokens=[1, 2])


# Events, waves, edges -----------------------------------------------------------------------------


def test_events_tell_where_chunks_are(tmp_path: Path) -> None:
    with KVTier.open(with_disk(tmp_path)) as tier:
        engine = Engine(tier)
        engine.store(prompt(512))
        tier.flush()
        tier.cleanup()
        events, lost = tier.events()
        seen = [(event.kind, event.tier, len(event.keys)) for event in events]
        assert lost == 0
        assert (EventKind.STORED, "memory", 2) in seen
        assert sum(n for kind, name, n in seen if (kind, name) == (EventKind.STORED, "disk")) == 2
        assert sum(n for kind, _, n in seen if kind is EventKind.REMOVED) == 4
        assert tier.events() == ([], 0)


def test_undrained_events_are_bounded_and_counted() -> None:
    with KVTier.open(memory_only(events_max=3)) as tier:
        engine = Engine(tier)
        for seed in range(5):
            engine.store(prompt(256, seed=seed))
        events, lost = tier.events()
        assert (len(events), lost) == (3, 2)


def test_layers_arrive_in_order(engine: Engine) -> None:
    tokens = prompt(512)
    engine.store(tokens)
    hit = engine.tier.lookup(engine.space, tokens)
    load = engine.tier.load(hit, list(range(100, 132)))
    for layer in range(LAYERS):
        assert load.wait_layer(layer)
        got = engine.memory[layer, 100:132].reshape(-1, ROW)
        assert np.array_equal(got, toy_kv(tokens, LAYERS, 1, ROW)[layer, 0])


def test_a_cancelled_load_says_which_pages_are_not_right(engine: Engine) -> None:
    tokens = prompt(512)
    engine.store(tokens)
    hit = engine.tier.lookup(engine.space, tokens)
    load = engine.tier.load(hit, list(range(100, 132)), timeout_s=0.0)
    result = load.wait()
    assert result is not None
    assert (result.tokens, result.failed_pages) == (0, tuple(range(100, 132)))
    assert not load.wait_layer(0)


@pytest.mark.parametrize("page", [-2, PAGES])
def test_a_page_out_of_range_is_refused_and_nothing_is_kept(engine: Engine, page: int) -> None:
    tokens = prompt(256)
    with pytest.raises(ValueError, match="page"):
        engine.tier.store(engine.space, tokens, [*range(15), page])
    assert engine.tier.stat()["tiers"]["memory"]["used_bytes"] == 0
    engine.store(tokens)
    hit = engine.tier.lookup(engine.space, tokens)
    with pytest.raises(ValueError, match="page"):
        engine.tier.load(hit, [*range(15), page])


def test_a_store_of_a_page_that_the_engine_has_not_is_refused(engine: Engine) -> None:
    with pytest.raises(ValueError, match="page"):
        engine.tier.store(engine.space, prompt(256), [*range(15), -1])
    assert engine.tier.stat()["chunks"] == 0


def test_a_store_in_parts_is_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.storing.STORE_PART_BYTES", 2 * RECORD)
    with KVTier.open(with_disk(tmp_path)) as tier:
        engine, tokens = Engine(tier), prompt(5 * 256 + 32)
        assert engine.store(tokens) == len(tokens)
        assert tier.flush()
        assert tier.stat()["leases"] == 0
        assert engine.right(tokens) == len(tokens)
    with KVTier.open(with_disk(tmp_path)) as tier:
        assert Engine(tier).right(tokens) == len(tokens)


def test_a_store_that_fails_between_parts_keeps_what_it_had_and_nothing_else(
    tier: KVTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.storing.STORE_PART_BYTES", 2 * RECORD)
    engine, tokens = Engine(tier), prompt(5 * 256)
    gather, calls = tier.loader.gather, iter(range(2))

    def fail_at_the_second(*arguments: Any) -> int:
        if next(calls):
            raise MemoryError
        return gather(*arguments)

    monkeypatch.setattr(tier.loader, "gather", fail_at_the_second)
    with pytest.raises(MemoryError):
        engine.store(tokens)
    assert tier.stat()["tiers"]["memory"]["used_bytes"] == 2 * RECORD
    assert engine.right(tokens) == 512
    tier.cleanup()
    assert tier.stat()["tiers"]["memory"]["used_bytes"] == 0  # nobody's lease was left behind


def test_a_first_token_inside_a_page_is_refused(engine: Engine) -> None:
    with pytest.raises(ValueError, match="no multiple of 16-token pages"):
        engine.tier.store(engine.space, prompt(256), [0], first_token=3)


def test_chunks_must_be_whole_pages(tier: KVTier) -> None:
    with pytest.raises(ConfigError, match="not whole pages"):
        Space(Namespace(model="m", chunk_tokens=100), LAYOUT)


def test_a_space_without_memory_only_looks_up(tier: KVTier) -> None:
    space = tier.attach(Namespace(model="m"), LAYOUT)
    with pytest.raises(LayoutMismatch, match="only look up"):
        tier.store(space, prompt(256), list(range(16)))


def test_attach_puts_the_engines_memory_back(tier: KVTier) -> None:
    engine = Engine(tier)
    engine.memory[:] = 5
    tier.attach(Namespace(model="m"), LAYOUT, engine.kv())
    assert (engine.memory == 5).all()


def test_after_close_every_call_says_so(tmp_path: Path) -> None:
    tier = KVTier.open(with_disk(tmp_path))
    engine = Engine(tier)
    tier.close()
    tier.close()
    with pytest.raises(Closed):
        tier.lookup(engine.space, [1])
    with pytest.raises(Closed):
        engine.store(prompt(256))


# Write-back --------------------------------------------------------------------------------------


class LowerBackend(MemoryBackend):
    """The tier below; its first put ends only after another one, or after ten seconds."""

    def __init__(self) -> None:
        super().__init__(MemoryOptions(capacity=64 * RECORD, prefault=False))
        self.another = threading.Event()
        self.overlapped = False
        self.used_bytes_max = 0
        self._calls = 0

    def put(self, keys: Sequence[ChunkKey], sources: Sequence[memoryview]) -> list[Outcome]:
        self._calls += 1
        if self._calls == 1:
            self.overlapped = self.another.wait(10)
            return super().put(keys, sources)
        outcomes = super().put(keys, sources)
        self.used_bytes_max = max(self.used_bytes_max, self.used_bytes)
        self.another.set()
        return outcomes


def open_tiers(lower: LowerBackend, capacity: int) -> KVTier:
    tiers = [
        {"kind": "memory", "capacity": 64 * RECORD},
        {"kind": "memory", "name": "lower", "capacity": capacity},
    ]
    return KVTier.open({"tiers": tiers}, backends={"lower": lower})


def test_a_batch_is_stored_while_the_one_before_it_still_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvtier.writeback.BATCH_BYTES", 1)
    lower = LowerBackend()
    with open_tiers(lower, 64 * RECORD) as tier:
        engine = Engine(tier)
        engine.store(prompt(3 * 256))
        assert tier.flush()
        assert lower.overlapped
        assert tier.stat()["tiers"]["lower"]["chunks"] == 3
        tier.cleanup(tier="memory")
        assert engine.right(prompt(3 * 256)) == 3 * 256


def test_a_quota_counts_what_is_being_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.writeback.BATCH_BYTES", 1)
    lower = LowerBackend()
    lower.another.set()
    with open_tiers(lower, 2 * RECORD) as tier:
        engine = Engine(tier)
        for seed in range(6):
            engine.store(prompt(256, seed))
        assert tier.flush()
        assert lower.used_bytes_max <= 2 * RECORD
        assert tier.stat()["tiers"]["lower"]["used_bytes"] == lower.used_bytes == 2 * RECORD
