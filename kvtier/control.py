"""`KVTier`: the library's face. Everything a connector or a person does with the cache is here."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from kvtier.asking import Asker
from kvtier.backend import Backend
from kvtier.clock import Clock, SystemClock
from kvtier.config import Config, TierConfig, load_config
from kvtier.connector import ReadPage, prove_layout
from kvtier.device import Device, DeviceFactory, DevicePlace
from kvtier.errors import Closed, ConfigError, LeaseExpired
from kvtier.events import Event, EventLog
from kvtier.hierarchy import MEMORY, Hierarchy, Removals, Tier, numbers, split_keys
from kvtier.index import NONE, Lease
from kvtier.keys import Extra, Namespace, Tokens
from kvtier.layout import KvLayout, PagedKv
from kvtier.load import Load
from kvtier.loading import Loader
from kvtier.metrics import Metrics
from kvtier.planner import page_array, plan_load
from kvtier.policy import ChunkNumbers
from kvtier.registry import find_device, open_backend, open_policy
from kvtier.space import Space
from kvtier.store import Store, StoreResult
from kvtier.storing import Storer, Wanted
from kvtier.types import ChunkKey
from kvtier.writeback import Pending, WriteBack

log = logging.getLogger("kvtier")

Pages = Sequence[int] | npt.NDArray[np.integer]


@dataclass(frozen=True, eq=False)
class Hit:
    """The longest held prefix of some tokens, leased until it is released or its time is over."""

    space: Space
    tokens: int
    """Length of the prefix; 0 is a miss."""
    run: ChunkNumbers
    """Its chunks by index number."""
    tier_masks: npt.NDArray[np.uint8]
    tier_names: tuple[str, ...]
    chunk_sizes: npt.NDArray[np.uint32]
    lease: Lease | None

    @cached_property
    def tiers(self) -> list[str]:
        """For each chunk, the fastest tier that holds it."""
        fastest = (self.tier_masks & -self.tier_masks.astype(np.int16)).astype(np.uint8)
        return [self.tier_names[mask.bit_length() - 1] for mask in fastest.tolist()]

    @property
    def in_memory(self) -> bool:
        """Whether all of it is in the memory tier."""
        return bool((self.tier_masks & (1 << MEMORY)).all())

    def tokens_by_tier(self) -> dict[str, int]:
        """Tokens per fastest tier."""
        totals: dict[str, int] = {}
        for name, tokens in zip(self.tiers, self.chunk_sizes.tolist(), strict=True):
            totals[name] = totals.get(name, 0) + tokens
        return totals


@dataclass(frozen=True, slots=True)
class CleanupResult:
    """What `cleanup` did, in chunks."""

    dropped: int
    leased: int
    """Left in place, since somebody holds a lease on them."""


class KVTier:
    """A hierarchy of tiers for KV chunks. Any thread; close it when done.

    Made by `open`. A miss, a full tier or a slow disk never raises; wrong use does.
    """

    def __init__(
        self,
        config: Config,
        clock: Clock,
        backends: Mapping[str, Backend],
        devices: Mapping[str, DeviceFactory],
    ) -> None:
        self.config = config
        self._device_factories = devices
        self.metrics = Metrics()
        self._clock = clock
        self._events = EventLog(max(1, config.events_max))
        self._closed = False
        self._close_lock = threading.Lock()
        self._devices: dict[tuple[str, int], Device] = {}
        self._devices_lock = threading.Lock()
        self._load_leases: dict[int, ChunkNumbers] = {}
        tiers: list[Tier] = []
        try:
            for i, wanted in enumerate(config.tiers):
                tiers.append(_open_tier(i, wanted, backends.get(wanted.name or wanted.kind)))
            self.hierarchy = Hierarchy(tiers, clock, self._events, self.metrics, self._apply)
            for opened in tiers[MEMORY + 1 :]:
                if opened.backend.capabilities.persistent and not opened.is_shared:
                    self.hierarchy.rebuild(opened)
        except BaseException:
            for opened in tiers:
                opened.backend.close()
            raise
        self._index = self.hierarchy.index
        self._tier_names = tuple(tier.name for tier in tiers)
        self.loader = Loader(
            self.hierarchy,
            clock,
            self.metrics,
            config.copy_threads or _default_copy_threads(),
            max(1, config.load_queue_max),
            self._damaged,
            self._load_left,
        )
        self._writers = {
            tier.number: WriteBack(
                self.hierarchy,
                tier,
                self.loader.pool,
                self.metrics,
                config.write_back_queue,
                self._remove_below,
            )
            for tier in tiers[MEMORY + 1 :]
        }
        below = [
            self._writers[tier.number]
            for tier in tiers[MEMORY + 1 :]
            if config.write_back and (tier.number == MEMORY + 1 or tier.is_shared)
        ]
        self._storer = Storer(self.hierarchy, self.loader, below, self.metrics)
        self._asker = Asker(self.hierarchy, clock, self.metrics, config.ask_timeout_s)
        self._trim()

    @classmethod
    def open(
        cls,
        config: Config | Mapping[str, Any] | str | Path | None = None,
        *,
        clock: Clock | None = None,
        backends: Mapping[str, Backend] | None = None,
        devices: Mapping[str, DeviceFactory] | None = None,
    ) -> Self:
        """Open the tiers; a persistent one brings back what it held.

        `backends` gives ready ones by tier name, in place of those that the config names: for
        wrappers and tests. They are closed with the `KVTier`. `devices` adds kinds of device to
        those that are registered.

        Raises:
            ConfigError: a setting is unknown or does not fit.
            BackendUnavailable: a place cannot be opened, or another process has it open.
        """
        return cls(load_config(config), clock or SystemClock(), backends or {}, devices or {})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # Engines ------------------------------------------------------------------------------------

    def attach(
        self,
        namespace: Namespace,
        layout: KvLayout,
        kv: PagedKv | None = None,
        *,
        read_page: ReadPage | None = None,
    ) -> Space:
        """Open a namespace with an engine's layout; `kv` says where its pages lie.

        With `kv`, and unless the setting `self_test` is off, the layout is proved on three pages
        before anything else: the engine must not be using them yet.

        Pages on a device are copied by it, to and from the memory tier, which the device makes
        ready for that once.

        Raises:
            LayoutMismatch: the memory is not laid out as declared.
            ConfigError: chunks are not whole pages, or there is no such kind of device.
            BackendUnavailable: the device cannot work here, or the memory cannot be made ready.
        """
        self._check_open()
        device = self._device(kv.place) if kv is not None and kv.place is not None else None
        space = Space(namespace, layout, kv, device)
        if kv is not None and self.config.self_test:
            prove_layout(space, self.loader.pool, self.hierarchy, read_page)
        return space

    def lookup(
        self,
        space: Space,
        tokens: Tokens,
        *,
        extras: Sequence[Extra] = (),
        lease_s: float | None = None,
        owner: str = "",
    ) -> Hit:
        """The longest prefix of `tokens` that is held: whole chunks, then whole pages of one more.

        What it finds is leased for `lease_s` seconds (default: the setting; 0 takes no lease), so
        that a load soon after finds it. Cost: one hash a chunk up to the first miss. Tiers that others
        store in as well are asked for what follows, for `ask_timeout_s` at most.

        Raises:
            ValueError: a token is negative or does not fit 32 bits.
        """
        self._check_open()
        if space.failure:  # nothing could be loaded: the engine computes
            self.metrics.add("lookup_misses")
            return Hit(space, 0, _NO_RUN, _NO_MASKS, self._tier_names, _NO_SIZES, None)
        ttl_s = self.config.lease_s if lease_s is None else lease_s
        self._asker.ask(space, tokens, extras)
        with self._index.lock:
            table = self._index.table
            run = space.find_run(table, tokens, extras)
            if not len(run):
                self.metrics.add("lookup_misses")
                return Hit(space, 0, run, _NO_MASKS, self._tier_names, _NO_SIZES, None)
            masks, sizes = table.tiers(run), table.tokens(run)
            for tier in self.hierarchy.tiers:
                tier.touch(run)
            lease = self._index.lease(run, ttl_s, owner) if ttl_s > 0 else None
        hit = Hit(space, int(sizes.sum()), run, masks, self._tier_names, sizes, lease)
        self.metrics.add("lookup_hits")
        self.metrics.add("lookup_hit_tokens", hit.tokens)
        return hit

    def pin(self, space: Space, tokens: Tokens, *, ttl_s: float, owner: str = "") -> Hit:
        """Look up and hold what is found for `ttl_s` seconds: a long lease.

        Raises:
            ValueError: `ttl_s` is not positive.
        """
        if ttl_s <= 0:
            raise ValueError(f"ttl_s {ttl_s}, expected more than 0")
        return self.lookup(space, tokens, lease_s=ttl_s, owner=owner)

    def release(self, held: Hit | Lease) -> bool:
        """End a lease; False if it had ended already."""
        lease = held.lease if isinstance(held, Hit) else held
        if lease is None:
            return False
        with self._index.lock:
            return self._index.release(lease)

    def store(
        self,
        space: Space,
        tokens: Tokens,
        pages: Pages,
        *,
        first_token: int = 0,
        extras: Sequence[Extra] = (),
    ) -> StoreResult:
        """Keep the KV of `tokens`, which lies in `pages`; the pages are free when this returns.

        `tokens` begins at the start of the prompt; `pages` holds those from `first_token` on, a
        multiple of the page size. Whole chunks are stored, and of the last one its whole pages.
        Chunks that are held already cost a lookup. Bytes are copied into memory here; what goes
        further down goes on kvtier's threads. Lack of room is no error: the rest is dropped and
        counted. A partial chunk stays beside the longer one that a continued prompt stores, for
        whoever asks for the shorter prompt again; unused, it is the first of its run to be evicted.

        Raises:
            ValueError: `first_token` is no page boundary, or a page number is out of range.
            LayoutMismatch: the space was attached without memory.
        """
        store = self.start_store(space, tokens, pages, first_token=first_token, extras=extras)
        store.finish()
        return store.wait()

    def start_store(
        self,
        space: Space,
        tokens: Tokens,
        pages: Pages,
        *,
        first_token: int = 0,
        extras: Sequence[Extra] = (),
    ) -> Store:
        """Begin a store whose pages are filled layer by layer; see `store` for what it takes.

        Makes room and copies nothing: `Store.filled` says which layers can be copied, `Store.finish`
        that all can. Every store must be finished or cancelled; until then it holds its room.

        Raises:
            ValueError: `first_token` is no page boundary, or a page number is out of range.
            LayoutMismatch: the space was attached without memory.
        """
        self._check_open()
        page_ids = _checked_pages(space, pages, first_token, lowest=0)  # all before any
        length = min(len(tokens), first_token + len(page_ids) * space.page_tokens)
        tokens = tokens[:length]
        keys, sizes = space.keys_of(tokens, extras)
        begin_s = self._clock.now_s()
        with self._index.lock:
            table = self._index.table
            found = table.find(b"".join(keys))
            held = np.zeros(len(found), dtype=bool)
            known = found != NONE
            held[known] = table.tiers(found[known]) != 0
            leased = found[held]
            table.lease(leased)
        try:
            return self._storer.begin(
                space,
                Wanted(keys, sizes, held.tolist(), leased),
                page_ids,
                first_token,
                lambda store: self._stored(store, begin_s),
            )
        except BaseException:
            with self._index.lock:
                table.release(leased)
            raise

    def load(
        self,
        hit: Hit,
        pages: Pages,
        *,
        first_token: int = 0,
        timeout_s: float | None = None,
    ) -> Load:
        """Begin to bring a hit's KV into `pages`, whose first one begins at `first_token`.

        Returns at once; see `Load` for waiting, by layer or whole. Pages of a failed chunk hold
        nothing of use: the engine recomputes them. The hit's lease may be released any time after
        this; the load holds its own.

        Raises:
            ValueError: `first_token` is no page boundary.
            LeaseExpired: the hit's lease is over, so its chunks may be gone.
        """
        self._check_open()
        space = hit.space
        page_ids = _checked_pages(space, pages, first_token, lowest=-1)
        return self._start_load(hit, page_ids, first_token, timeout_s)

    # People and routers -------------------------------------------------------------------------

    def move(self, space: Space, tokens: Tokens, to: str, *, timeout_s: float = 60.0) -> int:
        """Have the held prefix of `tokens` in tier `to` and nowhere above; tokens that are so now.

        Moving up copies (the tiers below keep theirs); moving down waits until the bytes are
        durable, then frees the memory of what nobody leases.

        Raises:
            ConfigError: there is no such tier.
        """
        target = self._tier_named(to)
        hit = self.lookup(space, tokens, owner="move")
        try:
            if not hit.tokens:
                return 0
            if target.number == MEMORY:
                nothing = np.full(hit.tokens // space.page_tokens, -1, dtype=np.int64)
                result = self._start_load(hit, nothing, 0, timeout_s).wait()
                return result.tokens if result is not None else 0
            self._write_down(space, hit, target)
            self._writers[target.number].flush(timeout_s)
        finally:
            self.release(hit)
        with self._index.lock:
            table = self._index.table
            run = table.lookup(space.root, tokens, space.chunk_tokens, space.page_tokens)
            there = run[(table.tiers(run) & (1 << target.number)) != 0]
            removals = Removals()
            for tier in self.hierarchy.tiers[: target.number]:
                here = there[(table.tiers(there) & (1 << tier.number)) != 0]
                if tier.number == MEMORY:
                    here = here[table.leases(here) == 0]
                for number, keys in self.hierarchy.withdraw(
                    tier, here[::-1], "moved"
                ).keys_by_tier.items():
                    removals.add(number, keys)
            tokens_there = int(table.tokens(there).sum())
            self._apply(removals)
        return tokens_there

    def cleanup(
        self,
        space: Space | None = None,
        tokens: Tokens | None = None,
        *,
        tier: str | None = None,
        timeout_s: float = 60.0,
    ) -> CleanupResult:
        """Forget chunks: all, or those of a space, or of a prompt's prefix and its continuations.

        With `tier` only that tier forgets them. What is leased stays and is counted. When this
        returns the bytes are gone from the tiers, unless that takes longer than `timeout_s`.

        Raises:
            ValueError: tokens without a space.
            ConfigError: there is no such tier.
        """
        self._check_open()
        if tokens is not None and space is None:
            raise ValueError("tokens name a prefix only within a space")
        where = self._tier_named(tier) if tier is not None else None
        self.flush(timeout_s)
        wanted = space.findable_keys(tokens) if space is not None and tokens is not None else []
        with self._index.lock:
            table = self._index.table
            if space is None:
                chunks = np.unique(
                    np.concatenate([table.held(each.number) for each in self.hierarchy.tiers])
                )
            elif tokens is None:
                chunks = self._index.namespace_chunks(space.id)
            else:
                found = table.find(b"".join(wanted))
                every: dict[int, None] = {}
                for chunk in found[found != NONE].tolist():
                    if chunk not in every:
                        every |= dict.fromkeys([chunk, *table.suffix(chunk).tolist()])
                chunks = numbers(every)
            dropped, leased, removals = self.hierarchy.drop(chunks, "cleanup", tier=where)
            self._apply(removals)
        for writer in self._writers.values():
            writer.flush(timeout_s)
        return CleanupResult(dropped, leased)

    def flush(self, timeout_s: float = 60.0) -> bool:
        """Wait until everything stored so far is durable below; False if that took longer."""
        return all(writer.flush(timeout_s) for writer in self._writers.values())

    def stat(self) -> dict[str, Any]:
        """What is where: per tier its chunks, bytes and capacity; leases; what waits; counters."""
        with self._index.lock:
            self._index.expire()
            tiers = {}
            for tier in self.hierarchy.tiers:
                used = (
                    self.hierarchy.memory.used_bytes if tier.number == MEMORY else tier.used_bytes
                )
                tiers[tier.name] = {
                    "chunks": len(tier.policy) + len(tier.found),
                    "used_bytes": used,
                    "capacity_bytes": tier.capacity_bytes,
                    "pending_bytes": self._writers[tier.number].pending_bytes
                    if tier.number in self._writers
                    else 0,
                }
            return {
                "chunks": len(self._index.table),
                "index_bytes": self._index.table.memory_bytes,
                "leases": self._index.lease_count,
                "namespaces": {
                    name.hex(): count for name, count in self._index.namespaces().items()
                },
                "tiers": tiers,
                "metrics": self.metrics.snapshot(),
            }

    def events(self) -> tuple[list[Event], int]:
        """Events since the last call, oldest first, and how many were lost before them."""
        return self._events.drain()

    def close(self) -> None:
        """Write down what waits (up to `close_timeout_s`), then let everything go. Twice is fine."""
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
        self._storer.close()
        self.loader.close()
        for device in self._devices.values():  # before the memory that it copies to
            device.close()
        for writer in self._writers.values():
            if not writer.close(self.config.close_timeout_s):
                log.warning("kvtier: closed before everything was written down")
        for tier in self.hierarchy.tiers:
            with self._index.lock:
                order = tier.policy.victims(len(tier.policy))
                used = split_keys(self._index.table.keys(order))
            if tier.backend.capabilities.persistent:
                tier.backend.remember_use(used)
            tier.backend.close()

    # Parts --------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("this KVTier is closed")

    def _tier_named(self, name: str) -> Tier:
        for tier in self.hierarchy.tiers:
            if tier.name == name:
                return tier
        raise ConfigError(f"no tier named {name!r}; there are {', '.join(self._tier_names)}")

    def _device(self, place: DevicePlace) -> Device:
        """The device, opened and made ready for the memory tier when first asked for."""
        with self._devices_lock:
            device = self._devices.get((place.kind, place.ordinal))
            if device is None:
                factory = self._device_factories.get(place.kind) or find_device(place.kind)
                device = factory(place.ordinal)
                try:
                    device.register(self.hierarchy.memory.region)
                except BaseException:
                    device.close()
                    raise
                self._devices[place.kind, place.ordinal] = device
            return device

    def _stored(self, store: Store, begin_s: float) -> None:
        result = store.result()
        self.metrics.observe("store_seconds", self._clock.now_s() - begin_s)
        self.metrics.add("stored_tokens", result.stored_tokens)
        self.metrics.add("stored_bytes", result.nbytes)
        if result.dropped_tokens:
            self.metrics.add("store_dropped_tokens", result.dropped_tokens)

    def _start_load(
        self,
        hit: Hit,
        page_ids: npt.NDArray[np.int64],
        first_token: int,
        timeout_s: float | None,
    ) -> Load:
        limit_s = self.config.load_timeout_s if timeout_s is None else timeout_s
        with self._index.lock:
            self._index.expire()
            if hit.lease is not None and not hit.lease.active:
                raise LeaseExpired("the hit's lease is over: look up again")
            table = self._index.table
            plan = plan_load(
                hit.space, hit.run, hit.space.heads(table, hit.run), page_ids, first_token
            )
            table.lease(hit.run)
            load = Load(plan, self._clock, self._clock.now_s() + limit_s)
            self._load_leases[id(load)] = hit.run
        self.loader.start(load)
        return load

    def _load_left(self, load: Load) -> None:
        """The lane is done with a load: its own lease ends before anybody hears that it has."""
        try:
            with self._index.lock:
                run = self._load_leases.pop(id(load), None)
                if run is not None:
                    for tier in self.hierarchy.tiers:
                        tier.touch(run)
                    self._index.table.release(run)
        finally:
            load.finish()
        result = load.result()
        if result is not None:
            self.metrics.observe("load_seconds", result.seconds)
            self.metrics.add("loaded_tokens", result.tokens)
            self.metrics.add("loaded_bytes", result.nbytes)
            if result.failed_pages:
                self.metrics.add("load_failed_pages", len(result.failed_pages))

    def _write_down(self, space: Space, hit: Hit, target: Tier) -> None:
        """Queue for `target` what of the hit lies in memory and not there yet."""
        with self._index.lock:
            table = self._index.table
            masks = table.tiers(hit.run)
            wanted = hit.run[((masks & 1) != 0) & ((masks & (1 << target.number)) == 0)]
            heads = space.heads(table, wanted)
            records = self.hierarchy.memory.locate([head.key for head in heads])
            items = [
                Pending(chunk, head, space.shape(head.pages), record)
                for chunk, head, record in zip(wanted.tolist(), heads, records, strict=True)
                if record is not None
            ]
            table.lease(numbers(item.number for item in items))
        refused = self._writers[target.number].offer(items)
        with self._index.lock:
            self._index.table.release(numbers(item.number for item in refused))

    def _damaged(self, tier: Tier, chunks: Sequence[int], keys: Sequence[ChunkKey]) -> None:
        """Stored bytes turned out wrong or unreadable: out of the books, file into quarantine."""
        with self._index.lock:
            wanted = numbers(chunks)
            here = wanted[(self._index.table.tiers(wanted) & (1 << tier.number)) != 0]
            removals = self.hierarchy.withdraw(tier, here, "damaged")
            damaged = set(keys)
            self._writers[tier.number].remove(keys, quarantine=True)
            for number, lost in removals.keys_by_tier.items():
                rest = [key for key in lost if number != tier.number or key not in damaged]
                if rest:
                    self._remove_below(number, rest)

    def _remove_below(self, number: int, keys: Sequence[ChunkKey]) -> None:
        self._writers[number].remove(keys)

    def _apply(self, removals: Removals) -> None:
        """Queue removals, under the index's lock: what is stored anew is then queued behind them."""
        for number, keys in removals.keys_by_tier.items():
            if keys:
                self._remove_below(number, keys)

    def _trim(self) -> None:
        """A tier that came back larger than its capacity is cut to it."""
        for tier in self.hierarchy.tiers[MEMORY + 1 :]:
            self._apply(self.hierarchy.room_below(tier, 0).removals)


_NO_RUN: ChunkNumbers = np.empty(0, dtype=np.uint32)
_NO_MASKS: npt.NDArray[np.uint8] = np.empty(0, dtype=np.uint8)
_NO_SIZES: npt.NDArray[np.uint32] = np.empty(0, dtype=np.uint32)


def _checked_pages(
    space: Space, pages: Pages, first_token: int, lowest: int
) -> npt.NDArray[np.int64]:
    space.need_memory()
    page_ids = page_array(pages)
    if first_token % space.page_tokens or first_token < 0:
        raise ValueError(
            f"first_token {first_token} is no multiple of {space.page_tokens}-token pages"
        )
    space.check_pages(page_ids, lowest)
    return page_ids


def _open_tier(number: int, config: TierConfig, ready: Backend | None) -> Tier:
    path = f"tiers.{number}"
    order = open_policy(config.policy, f"{path}.policy")
    options = dict(config.options)
    if number == MEMORY and config.kind == "memory":
        options.setdefault("capacity", config.capacity)
    backend = ready or open_backend(config.kind, options, path)
    return Tier(number, config.name or config.kind, backend, order, config.capacity)


def _default_copy_threads() -> int:
    return max(1, min(4, len(os.sched_getaffinity(0)) // 2))
