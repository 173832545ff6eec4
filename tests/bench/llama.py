"""Paged KV of the shape of Llama-3-8B, and plain copies of as many bytes: what most benchmarks use.

32 layers of 8 heads of 128 elements in bfloat16: 128 KiB a token, 32 MiB a chunk of 256 tokens. The
pages of a prompt lie in no order, as in an engine that has run for a while.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import torch
from result import Sample, Work, fastest

from kvtier import KVTier, Namespace, Space
from kvtier._core import CopyPool, Slab
from kvtier.backends.memory import MemoryBackend
from kvtier.connectors.torch import TorchPages
from kvtier.errors import KvtierError

LAYERS, HEADS, DIM, PAGE_TOKENS, CHUNK_TOKENS = 32, 8, 128, 16, 256
PLANE_BYTES = PAGE_TOKENS * HEADS * DIM * 2
CHUNK_PAGES = CHUNK_TOKENS // PAGE_TOKENS
CHUNK_BYTES = LAYERS * 2 * CHUNK_PAGES * PLANE_BYTES
RECORD_BYTES = CHUNK_BYTES + 4096  # with its header


def huge_memory(nbytes: int) -> Slab:
    """Memory on huge pages, all of it real: else the first round would measure page faults."""
    slab = Slab(nbytes)
    wait_until_real(slab, slab.capacity_bytes)
    return slab


def wait_until_real(memory: Slab | MemoryBackend, capacity_bytes: int) -> None:
    """Wait for the background thread that faults `memory` in."""
    end_s = time.monotonic() + 60
    while memory.prefaulted_bytes < capacity_bytes and time.monotonic() < end_s:
        time.sleep(0.01)


def as_array(slab: Slab, nbytes: int) -> np.ndarray:
    """The slab's first bytes; keeps it alive."""
    slab.allocate(nbytes)
    return np.frombuffer(slab.memory(0, nbytes), dtype=np.uint8)


class PagedLlama:
    """KV of one prompt of `chunk_count` chunks in tensors ``[K|V, page, token, head, element]``."""

    def __init__(self, chunk_count: int) -> None:
        self.nbytes = chunk_count * CHUNK_BYTES
        self.page_count = chunk_count * CHUNK_PAGES
        self.bytes = as_array(huge_memory(self.nbytes), self.nbytes)
        self.tensors = [
            torch.from_numpy(part)
            .view(torch.bfloat16)
            .view(2, self.page_count, PAGE_TOKENS, HEADS, DIM)
            for part in np.split(self.bytes, LAYERS)
        ]
        self.pages = TorchPages(self.tensors, "KNTHD", LAYERS)
        self.order = np.random.default_rng(0).permutation(self.page_count)
        self.tokens = np.random.default_rng(3).integers(
            0, 128000, chunk_count * CHUNK_TOKENS, dtype=np.uint32
        )
        self.fill()
        self._checksums = self._checksum()

    def fill(self) -> None:
        """Bytes that differ between planes, pages and tokens."""
        words = self.bytes.view(np.uint16).reshape(LAYERS, -1)
        words[0] = np.random.default_rng(1).integers(0, 1 << 16, words.shape[1], dtype=np.uint16)
        for layer in range(1, LAYERS):
            np.add(words[0], np.uint16(layer), out=words[layer])

    def wipe(self) -> None:
        """Forget the content, so that a load that does nothing is seen."""
        self.bytes[:] = 0

    def check(self) -> None:
        """Raise unless the content is what `fill` made."""
        if self._checksum() != self._checksums:
            raise KvtierError("the benchmark's data is not what it was: its figures mean nothing")

    def _checksum(self) -> bytes:
        base = self.bytes.ctypes.data
        step = self.nbytes // LAYERS
        return CopyPool(2).checksum(
            np.arange(base, base + self.nbytes, step, dtype=np.uint64),
            np.full(LAYERS, step, dtype=np.uint64),
        )

    def attach(self, tier: KVTier) -> Space:
        """A space of this KV on `tier`."""
        return tier.attach(
            Namespace(model="llama-3-8b-shaped", dtype="bfloat16"),
            self.pages.layout,
            self.pages.kv,
            read_page=self.pages.read_page,
        )


@contextmanager
def plain_copies(
    targets: np.ndarray, sources: np.ndarray, threads: int
) -> Iterator[Mapping[str, Work]]:
    """Every way of copying `sources` to `targets` that this process has, with `threads` threads."""
    nbytes = sources.nbytes
    pool = CopyPool(threads)
    starts = np.arange(0, nbytes, CHUNK_BYTES, dtype=np.uint64)
    lengths = np.full(len(starts), CHUNK_BYTES, dtype=np.uint64)
    to, of = starts + np.uint64(targets.ctypes.data), starts + np.uint64(sources.ctypes.data)
    bounds = np.linspace(0, nbytes, threads + 1, dtype=np.int64) // 4096 * 4096
    bounds[-1] = nbytes
    parts = list(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True))
    with ThreadPoolExecutor(threads) as executor:

        def each(copy_part) -> None:
            if threads == 1:
                copy_part((0, nbytes))
            else:
                list(executor.map(copy_part, parts))

        def numpy_part(part: tuple[int, int]) -> None:
            np.copyto(targets[part[0] : part[1]], sources[part[0] : part[1]])

        def memmove_part(part: tuple[int, int]) -> None:
            ctypes.memmove(
                targets.ctypes.data + part[0], sources.ctypes.data + part[0], part[1] - part[0]
            )

        yield {
            **{
                f"plain copy ({mode})": Work(lambda m=mode: pool.copy(to, of, lengths, m))
                for mode in CopyPool.modes()
                if mode != "auto"
            },
            "plain copy (numpy)": Work(lambda: each(numpy_part)),
            "plain copy (memmove)": Work(lambda: each(memmove_part)),
        }


def best_plain_copy(times: Mapping[str, Sample]) -> tuple[str, float]:
    """What the limit is, and its seconds."""
    name, seconds = fastest({each: times[each] for each in times if each.startswith("plain copy")})
    return f"best {name} with as many threads", seconds
