"""A namespace with its layout, open on a `KVTier`: what every lookup, store and load is about."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvtier import _core
from kvtier.device import Device, DeviceCopies
from kvtier.errors import ConfigError, LayoutMismatch
from kvtier.index import NONE
from kvtier.keys import Extra, Namespace, Tokens, chunk_keys, namespace_id, partial_key
from kvtier.layout import KvLayout, PagedKv
from kvtier.manifest import NO_PARENT, Head, RecordShape, record_shape
from kvtier.policy import ChunkNumbers
from kvtier.types import KEY_BYTES, ChunkKey


class Space:
    """Built by `KVTier.attach`. Equal namespaces and layouts share their chunks.

    Without `kv` it can look up, pin and clean up, but not move bytes. Of pages on a device, `device`
    is what copies them; it belongs to the `KVTier`.

    Raises:
        ConfigError: chunks are not whole pages.
        LayoutMismatch: the addresses of `kv` do not fit the layout.
    """

    def __init__(
        self,
        namespace: Namespace,
        layout: KvLayout,
        kv: PagedKv | None = None,
        device: Device | None = None,
    ) -> None:
        if namespace.chunk_tokens % layout.page_tokens:
            raise ConfigError(
                f"chunks of {namespace.chunk_tokens} tokens are not whole pages of "
                f"{layout.page_tokens}"
            )
        self.namespace = namespace
        self.layout = layout
        self.kv = kv
        self.device = device
        self.plan: _core.CopyPlan | None = None
        """How host memory is copied."""
        self.copies: DeviceCopies | None = None
        """How a device's memory is copied; one of the two, if there are pages."""
        if kv is not None and device is not None:
            self.copies = kv.device_copies(layout, device)
        elif kv is not None and kv.place is not None:
            raise LayoutMismatch("pages on a device are copied by it: use KVTier.attach")
        elif kv is not None:
            self.plan = kv.copy_plan(layout)
        self.root = namespace.root(layout.fingerprint)
        self.id = namespace_id(self.root)
        self.chunk_tokens = namespace.chunk_tokens
        self.page_tokens = layout.page_tokens

    def beside(self, namespace: Namespace) -> Space:
        """The same pages under another namespace, such as another adapter's or tenant's."""
        other = Space(namespace, self.layout)
        other.kv, other.device = self.kv, self.device
        other.plan, other.copies = self.plan, self.copies
        return other

    @property
    def failure(self) -> str:
        """Why nothing can be copied any more; empty while it can."""
        return self.device.failure if self.device is not None else ""

    def stream(self) -> int:
        """The stream on which the engine of pages on a device computes now."""
        place = self.kv.place if self.kv is not None else None
        assert place is not None, "asked of spaces on a device only"
        return place.stream()

    def shape(self, pages: int) -> RecordShape:
        """The stored form of a chunk of `pages` pages."""
        return record_shape(self.layout, pages, self.namespace.waves)

    @cached_property
    def wave_of_layer(self) -> list[int]:
        """For each layer, the wave that brings it."""
        shape = self.shape(1)
        return [wave for wave, count in enumerate(shape.layer_counts) for _ in range(count)]

    def head(self, key: ChunkKey, parent: bytes, tokens: int) -> Head:
        """The manifest's fixed part that a chunk of this space must have."""
        pages = tokens // self.page_tokens
        shape = self.shape(pages)
        return Head(
            key=key,
            parent=parent,
            namespace_id=self.id,
            fingerprint=self.layout.fingerprint,
            tokens=tokens,
            pages=pages,
            record_bytes=shape.record_bytes,
            payload_bytes=shape.payload_bytes,
            segment_count=len(shape.segment_offsets),
            layers=self.layout.layers,
        )

    def heads(self, table: _core.ChunkIndex, chunks: ChunkNumbers) -> list[Head]:
        """Heads of held chunks of this space; the caller holds the index's lock."""
        keys = table.keys(chunks)
        parents = np.array([table.parent(chunk) for chunk in chunks.tolist()], dtype=np.uint32)
        known = parents != NONE
        parent_keys = table.keys(parents[known])
        tokens = table.tokens(chunks).tolist()
        heads, at = [], 0
        for i, has_parent in enumerate(known.tolist()):
            parent = parent_keys[at : at + KEY_BYTES] if has_parent else NO_PARENT
            at += KEY_BYTES * has_parent
            key = ChunkKey(keys[i * KEY_BYTES : (i + 1) * KEY_BYTES])
            heads.append(self.head(key, parent, tokens[i]))
        return heads

    def keys_of(
        self, tokens: Tokens, extras: Sequence[Extra] = ()
    ) -> tuple[list[ChunkKey], list[int]]:
        """Keys and sizes of the whole chunks and of the last one's whole pages."""
        keys = chunk_keys(self.root, tokens, self.chunk_tokens, extras)
        sizes = [self.chunk_tokens] * len(keys)
        start = len(keys) * self.chunk_tokens
        tail = (len(tokens) - start) // self.page_tokens * self.page_tokens
        if tail:
            parent = keys[-1] if keys else self.root
            keys.append(partial_key(parent, tokens, start, start + tail, extras))
            sizes.append(tail)
        return keys, sizes

    def findable_keys(self, tokens: Tokens) -> list[ChunkKey]:
        """Keys of everything a lookup of `tokens` could ever find: each whole chunk and each partial."""
        whole = chunk_keys(self.root, tokens, self.chunk_tokens)
        keys = list(whole)
        for i, parent in enumerate([self.root, *whole]):
            start = i * self.chunk_tokens
            longest = min(len(tokens) - start, self.chunk_tokens - 1)
            keys.extend(
                partial_key(parent, tokens, start, start + tail)
                for tail in range(self.page_tokens, longest + 1, self.page_tokens)
            )
        return keys

    def find_run(
        self, table: _core.ChunkIndex, tokens: Tokens, extras: Sequence[Extra]
    ) -> ChunkNumbers:
        """The longest held run of `tokens`; the caller holds the index's lock."""
        if not extras:
            return table.lookup(self.root, tokens, self.chunk_tokens, self.page_tokens)
        keys = chunk_keys(self.root, tokens, self.chunk_tokens, extras)
        found = table.find(b"".join(keys))
        run: list[int] = []
        for chunk in found.tolist():
            if chunk == NONE or not table.tiers(np.array([chunk], dtype=np.uint32))[0]:
                break
            run.append(chunk)
        start = len(run) * self.chunk_tokens
        parent = keys[len(run) - 1] if run else self.root
        longest = min(len(tokens) - start, self.chunk_tokens - 1)
        for tail in range(longest // self.page_tokens * self.page_tokens, 0, -self.page_tokens):
            key = partial_key(parent, tokens, start, start + tail, extras)
            chunk = int(table.find(key)[0])
            if chunk != NONE and table.tiers(np.array([chunk], dtype=np.uint32))[0]:
                run.append(chunk)
                break
        return np.array(run, dtype=np.uint32)

    def check_pages(self, page_ids: npt.NDArray[np.int64], lowest: int) -> None:
        """Raise ValueError if a page is none of the engine's; `lowest` is -1 where that means none."""
        assert self.kv is not None, "a space with a plan has memory"
        page_count = self.kv.page_count
        if len(page_ids) and not lowest <= int(page_ids.min()) <= int(page_ids.max()) < page_count:
            raise ValueError(f"page number outside {lowest} to {page_count - 1}")

    def need_memory(self) -> None:
        """Raise LayoutMismatch if the space was attached without memory."""
        if self.plan is None and self.copies is None:
            raise LayoutMismatch("this space was attached without KV memory: it can only look up")

    def need_plan(self) -> _core.CopyPlan:
        """The copy plan of pages in host memory; raises as `need_memory`."""
        self.need_memory()
        assert self.plan is not None, "pages on a device have `copies` instead"
        return self.plan
