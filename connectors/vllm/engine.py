"""What the scheduler's and the worker's side of one vLLM engine share in their process.

vLLM builds the connector twice, worker first. Both must look at one `KVTier`: its memory is in this
process, and its folders belong to one process at a time. Engines of one process with equal settings
share a `KVTier` too.
"""

from __future__ import annotations

import atexit
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvtier import ConfigError, KVTier, Namespace, Space
from kvtier.connectors.vllm.pages import Pages
from kvtier.connectors.vllm.settings import VllmSettings, split_settings

WORKER, SCHEDULER = "worker", "scheduler"
SPACES_MAX = 1024  # tenants and adapters remembered at once; a forgotten one is built again

_lock = threading.Lock()
_tiers: dict[str, _Shared] = {}
_engines: dict[str, Engine] = {}


@dataclass(slots=True)
class _Shared:
    tier: KVTier
    users: list[tuple[str, str]] = field(default_factory=list)
    """Engine id and side of everybody who has it open."""


class Engine:
    """One engine's cache, as both of its sides see it."""

    def __init__(self, tier: KVTier, settings: VllmSettings, namespace: Namespace) -> None:
        self.tier = tier
        self.settings = settings
        self.namespace = namespace
        self.pages: Pages | None = None
        self._first: Space | None = None
        self._spaces: dict[tuple[str, str], Space] = {}

    def bind(self, pages: Pages) -> None:
        """The engine's KV memory is known now; proves its layout.

        Raises:
            LayoutMismatch: copying through it does not give back what was there.
            BackendUnavailable: it lies on a device that kvtier cannot use here.
        """
        self._first = self.tier.attach(
            self.namespace, pages.layout, pages.kv, read_page=pages.read_page
        )
        self.pages = pages

    def need_pages(self) -> Pages:
        """The engine's KV memory; it is bound before the first request."""
        assert self.pages is not None, "register_kv_caches comes before any request"
        return self.pages

    def space(self, adapter: str, salt: str) -> Space:
        """Where the chunks of a LoRA adapter and a tenant's salt are looked up and stored."""
        space = self._spaces.get((adapter, salt))
        if space is None:
            if len(self._spaces) >= SPACES_MAX:
                self._spaces.pop(next(iter(self._spaces)))
            # Not `attach`: its proof borrows pages, which are in use by now.
            assert self._first is not None, "register_kv_caches comes before any request"
            space = self._first.beside(replace(self.namespace, adapter=adapter, salt=salt))
            self._spaces[adapter, salt] = space
        return space


def open_engine(
    engine_id: str, extra: Mapping[str, Any], namespace_of: Callable[[VllmSettings], Namespace]
) -> Engine:
    """The worker's side: open (or share) the tier for a new engine.

    Raises:
        ConfigError: the settings are wrong.
        BackendUnavailable: a folder cannot be used, or another process has it.
    """
    tree, settings = split_settings(extra)
    namespace = namespace_of(settings)
    key = json.dumps(tree, sort_keys=True, default=str)
    with _lock:
        shared = _tiers.get(key)
        if shared is None:
            shared = _tiers[key] = _Shared(KVTier.open(tree))
        engine = _engines[engine_id] = Engine(shared.tier, settings, namespace)
        shared.users.append((engine_id, WORKER))
        return engine


def join_engine(engine_id: str) -> Engine:
    """The scheduler's side: the engine that the worker opened.

    Raises:
        ConfigError: the worker is not in this process.
    """
    with _lock:
        engine = _engines.get(engine_id)
        if engine is None or engine.pages is None:
            raise ConfigError(
                "vLLM's scheduler and worker run in different processes, and kvtier's memory is in "
                "one; on the CPU backend set VLLM_ENABLE_V1_MULTIPROCESSING=0, which keeps the two "
                "together (several processes need the node daemon, which this version lacks)"
            )
        for shared in _tiers.values():
            if shared.tier is engine.tier:
                shared.users.append((engine_id, SCHEDULER))
        return engine


def leave_engine(engine_id: str, side: str) -> None:
    """One side is done; the last one closes the tier. Again: does nothing."""
    with _lock:
        for key, shared in list(_tiers.items()):
            if (engine_id, side) in shared.users:
                shared.users.remove((engine_id, side))
                if not shared.users:
                    del _tiers[key]
                    shared.tier.close()
        if not any(user == engine_id for shared in _tiers.values() for user, _ in shared.users):
            _engines.pop(engine_id, None)


def open_tiers() -> list[KVTier]:
    """What the engines of this process have open now."""
    with _lock:
        return [shared.tier for shared in _tiers.values()]


@atexit.register
def _close_all() -> None:
    """vLLM does not always shut its connectors down; what is stored must still reach the disk."""
    with _lock:
        for shared in _tiers.values():
            shared.tier.close()
        _tiers.clear()
        _engines.clear()
