"""kvtier: KV-cache tiering for LLM serving. Keeps the KV of long prompts in host memory and on disk.

Open a `KVTier`, `attach` an engine's pages, then `lookup`, `load` and `store` by tokens.
"""

from kvtier.agent import Agent
from kvtier.config import Config, TierConfig, load_config
from kvtier.control import CleanupResult, Hit, KVTier
from kvtier.device import DevicePlace
from kvtier.errors import (
    BackendUnavailable,
    Closed,
    ConfigError,
    CorruptChunk,
    KvtierError,
    LayoutMismatch,
    LeaseExpired,
    TransferTimeout,
)
from kvtier.events import Event, EventKind
from kvtier.keys import Extra, Namespace
from kvtier.layout import KvLayout, PagedKv
from kvtier.load import Load, LoadResult
from kvtier.peers import Notification, NotificationKind, Peer
from kvtier.shared_pool import SharedPool
from kvtier.space import Space
from kvtier.store import Store, StoreResult
from kvtier.transfer import Op
from kvtier.transfers import Transfer
from kvtier.types import ChunkKey, Descriptor, Outcome, Region, RegionKind, Status

__all__ = [
    "Agent",
    "BackendUnavailable",
    "ChunkKey",
    "CleanupResult",
    "Closed",
    "Config",
    "ConfigError",
    "CorruptChunk",
    "Descriptor",
    "DevicePlace",
    "Event",
    "EventKind",
    "Extra",
    "Hit",
    "KVTier",
    "KvLayout",
    "KvtierError",
    "LayoutMismatch",
    "LeaseExpired",
    "Load",
    "LoadResult",
    "Namespace",
    "Notification",
    "NotificationKind",
    "Op",
    "Outcome",
    "PagedKv",
    "Peer",
    "Region",
    "RegionKind",
    "SharedPool",
    "Space",
    "Status",
    "Store",
    "StoreResult",
    "TierConfig",
    "Transfer",
    "TransferTimeout",
    "load_config",
]
