"""kvtier: KV-cache tiering for LLM serving. Keeps the KV of long prompts in host memory and on disk.

Open a `KVTier`, `attach` an engine's pages, then `lookup`, `load` and `store` by tokens.
"""

from kvtier.config import Config, TierConfig, load_config
from kvtier.control import CleanupResult, Hit, KVTier
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
from kvtier.loading import Load, LoadResult
from kvtier.space import Space
from kvtier.storing import StoreResult
from kvtier.types import ChunkKey, Outcome, Status

__all__ = [
    "BackendUnavailable",
    "ChunkKey",
    "CleanupResult",
    "Closed",
    "Config",
    "ConfigError",
    "CorruptChunk",
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
    "Outcome",
    "PagedKv",
    "Space",
    "Status",
    "StoreResult",
    "TierConfig",
    "TransferTimeout",
    "load_config",
]
