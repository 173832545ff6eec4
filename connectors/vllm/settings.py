"""Settings of the vLLM connector: what stands under ``vllm`` in its extra configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from kvtier.config import convert
from kvtier.errors import ConfigError
from kvtier.keys import CHUNK_TOKENS

LoadMode = Literal["auto", "layerwise", "before", "async"]


class VllmSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the connector behaves inside vLLM."""

    load: LoadMode = "auto"
    """When a hit is copied: during the forward pass, each layer waiting for its own bytes
    (``layerwise``); before it (``before``); or between steps while other requests go on
    (``async``). ``auto`` is layerwise for hits in host memory and async for those below it."""
    store_decoded: bool = True
    """Keep the KV of generated tokens as well, for the next turn of a conversation."""
    chunk_tokens: int = CHUNK_TOKENS
    """Tokens per chunk, a multiple of vLLM's block size."""
    model: str = ""
    """Names the weights, in place of a fingerprint of their files."""
    warn_after_lookups: int = 200
    """Say so once when this many lookups found nothing although chunks were stored."""


def split_settings(extra: Mapping[str, Any]) -> tuple[dict[str, Any], VllmSettings]:
    """kvtier's own configuration, and the connector's.

    Raises:
        ConfigError: an unknown name or an unfit value under ``vllm``.
    """
    tree = dict(extra)
    own = tree.pop("vllm", {})
    if not isinstance(own, Mapping):
        raise ConfigError(f"vllm: expected a table of settings, got {own!r}")
    return tree, convert(own, VllmSettings, "vllm")
