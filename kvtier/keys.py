"""Names of chunks: who a namespace is, and how tokens become keys.

A chunk's key depends on every token before it and on everything else that changes K or V, and on
nothing of the process, platform or engine that computed it. Golden vectors in `tests/golden` hold
the formula still.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvtier import _core
from kvtier.errors import ConfigError
from kvtier.types import KEY_BYTES, ChunkKey

Tokens = Sequence[int] | npt.NDArray[np.integer]
"""Token ids from the start of the prompt: a list, or a one-dimensional integer array."""

CHUNK_TOKENS = 256  # large enough for PCIe, SSD and network, small enough to be shared by prompts
WAVES = 8  # layer groups per record: layer 0 can start after an eighth of the copy


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """Everything beside tokens and layout that changes K or V, or must keep tenants apart.

    Raises:
        ConfigError: there is no model id, or a number is out of range.
    """

    model: str
    revision: str = ""
    dtype: str = ""
    adapter: str = ""
    """LoRA or other adapter id; empty for the base model."""
    salt: str = ""
    """Tenant or cache salt: equal prompts under different salts share nothing."""
    secret: bytes = field(default=b"", repr=False)
    """Tenant secret: without it nobody can compute, and so probe, this tenant's keys."""
    chunk_tokens: int = CHUNK_TOKENS
    waves: int = WAVES
    """Layer groups, each one segment of a stored record."""
    extra: tuple[tuple[str, str], ...] = ()
    """Anything else that changes K or V, as name and value pairs."""

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("a namespace without a model id would mix the KV of different models")
        if not 1 <= self.chunk_tokens <= 65536:
            raise ConfigError(f"chunk_tokens {self.chunk_tokens}, expected 1 to 65536")
        if not 1 <= self.waves <= 64:
            raise ConfigError(f"waves {self.waves}, expected 1 to 64")

    def root(self, layout_fingerprint: bytes) -> bytes:
        """The 32 bytes that the first chunk's key is chained to."""
        fields: list[bytes] = [
            self.model.encode(),
            self.revision.encode(),
            self.dtype.encode(),
            self.adapter.encode(),
            self.salt.encode(),
            str(self.chunk_tokens).encode(),
            str(self.waves).encode(),
            layout_fingerprint,
        ]
        for name, value in sorted(self.extra):
            fields += [name.encode(), value.encode()]
        message = b"kvtier namespace 1" + b"".join(struct.pack("<I", len(f)) + f for f in fields)
        return hmac.digest(self.secret or bytes(32), message, "sha256")


def namespace_id(root: bytes) -> bytes:
    """16 bytes that name a namespace in manifests without giving its root away."""
    return hashlib.sha256(b"kvtier namespace id" + root).digest()[:16]


@dataclass(frozen=True, slots=True)
class Extra:
    """Content that tokens do not show, such as an image behind placeholder tokens."""

    start: int
    """First token it covers."""
    stop: int
    """First token it no longer covers."""
    digest: bytes
    """Hash of the content."""


def extra_bytes(extras: Sequence[Extra], start: int, stop: int) -> bytes:
    """What the extras contribute to the key of the chunk of tokens `[start, stop)`."""
    parts = [
        struct.pack("<qqI", extra.start - start, extra.stop - start, len(extra.digest))
        + extra.digest
        for extra in sorted(extras, key=lambda e: (e.start, e.stop, e.digest))
        if extra.start < stop and extra.stop > start
    ]
    return b"".join(parts)


def chunk_keys(
    root: bytes, tokens: Tokens, chunk_tokens: int, extras: Sequence[Extra] = ()
) -> list[ChunkKey]:
    """Keys of all whole chunks of `tokens`, in order.

    ``key[i] = SHA-256(key[i-1] || tokens of chunk i as little-endian uint32 || extra i)``, with
    `root` before the first; the extra part is length-prefixed and absent when empty.

    Raises:
        ValueError: a token is negative or does not fit 32 bits.
    """
    if not extras:
        joined = _core.chain_keys(root, tokens, chunk_tokens)
        return [ChunkKey(joined[i : i + KEY_BYTES]) for i in range(0, len(joined), KEY_BYTES)]
    keys: list[ChunkKey] = []
    parent = root
    for start in range(0, len(tokens) - chunk_tokens + 1, chunk_tokens):
        stop = start + chunk_tokens
        parent = _core.chain_key(parent, tokens[start:stop], extra_bytes(extras, start, stop))
        keys.append(ChunkKey(parent))
    return keys


def partial_key(
    parent: bytes, tokens: Tokens, start: int, stop: int, extras: Sequence[Extra] = ()
) -> ChunkKey:
    """Key of the unfinished chunk of tokens `[start, stop)` that follows the chunk `parent`."""
    return ChunkKey(_core.chain_key(parent, tokens[start:stop], extra_bytes(extras, start, stop)))
