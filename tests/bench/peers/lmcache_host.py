"""LMCache's engine with its CPU tier, driven line by line by `host_peer`; runs in its environment.

Standard input has ``store``, ``load``, ``clear``, ``wipe``, ``check`` or a connector's name;
each is answered by one JSON line: seconds of wall and processor time, or whether all is right.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import sys
import time

os.environ.setdefault("PYTHONHASHSEED", "0")
os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # whatever the peer prints goes to standard error

import lmcache
import numpy as np
import torch
from lmcache import device_ops
from lmcache.lmcache_native import EngineKVFormat, TransferDirection
from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.gpu_connector.mock_gpu_connector import MockGPUConnector
from lmcache.v1.metadata import LMCacheMetadata

LAYERS, HEADS, DIM, PAGE_TOKENS, CHUNK_TOKENS = 32, 8, 128, 16, 256
HIDDEN = HEADS * DIM


class Pages:
    """The KV of one prompt, on huge pages, its pages in no order."""

    def __init__(self, tokens: int) -> None:
        self.count = tokens // PAGE_TOKENS
        layer_bytes = 2 * tokens * HIDDEN * 2
        self.memory = mmap.mmap(-1, LAYERS * layer_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = np.frombuffer(self.memory, dtype=np.uint8)
        self.layers = [
            torch.from_numpy(part).view(torch.bfloat16).view(2, self.count, PAGE_TOKENS, HEADS, DIM)
            for part in np.split(self.bytes, LAYERS)
        ]
        self.by_slot = [layer.view(2, tokens, HIDDEN) for layer in self.layers]
        self.by_page = [
            part.view(np.int64).reshape(2, self.count, -1) for part in np.split(self.bytes, LAYERS)
        ]
        self.order = np.random.default_rng(0).permutation(self.count)
        self.slots = torch.from_numpy(
            (self.order[:, None] * PAGE_TOKENS + np.arange(PAGE_TOKENS)).reshape(-1)
        )
        words = self.bytes.view(np.uint16).reshape(LAYERS, -1)
        words[0] = np.random.default_rng(1).integers(0, 1 << 16, words.shape[1], dtype=np.uint16)
        for layer in range(1, LAYERS):
            np.add(words[0], np.uint16(layer), out=words[layer])
        self.sums = self.checksums()

    def checksums(self) -> list[int]:
        return [int(part.view(np.uint64).sum()) for part in np.split(self.bytes, LAYERS)]


class Connector(MockGPUConnector):
    """Copies between pages and LMCache's memory, in the way that `way` names.

    ``shipped`` is LMCache's own kernel for CPUs. ``paged`` is the best that numpy gives: a gather
    or scatter of whole pages for each layer and plane.
    """

    def __init__(self, pages: Pages) -> None:
        super().__init__((LAYERS, 2, CHUNK_TOKENS, HEADS, DIM))
        self.pages = pages
        self.way = "shipped"

    def get_shape(self, num_tokens: int | None = None) -> torch.Size:
        return torch.Size([2, LAYERS, num_tokens or CHUNK_TOKENS, HIDDEN])

    def from_gpu(self, memory_obj, start: int, end: int, **_) -> None:
        self._copy(memory_obj.tensor, start, end, to_pages=False)

    def to_gpu(self, memory_obj, start: int, end: int, **_) -> None:
        self._copy(memory_obj.tensor, start, end, to_pages=True)

    def batched_from_gpu(self, memory_objs, starts, ends, **_) -> None:
        for each in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(*each)

    def batched_to_gpu(self, memory_objs, starts, ends, **_) -> None:
        for each in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(*each)

    def _copy(self, stored: torch.Tensor, start: int, end: int, *, to_pages: bool) -> None:
        if self.way == "shipped":
            device_ops.multi_layer_kv_transfer(
                stored,
                self.pages.by_slot,
                self.pages.slots[start:end],
                torch.device("cpu"),
                self.pages.count * PAGE_TOKENS,
                TransferDirection.H2D if to_pages else TransferDirection.D2H,
                EngineKVFormat.NL_X_TWO_NB_BS_NH_HS,
                block_size=PAGE_TOKENS,
            )
            return
        ids = self.pages.order[start // PAGE_TOKENS : end // PAGE_TOKENS]
        words = stored.view(-1).view(torch.int64).numpy().reshape(2, LAYERS, len(ids), -1)
        for layer, paged in enumerate(self.pages.by_page):
            for plane in (0, 1):
                if to_pages:
                    paged[plane][ids] = words[plane, layer]
                else:
                    np.take(paged[plane], ids, axis=0, out=words[plane, layer], mode="clip")


def main() -> None:
    chunks, threads = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(threads)
    logging.disable(logging.WARNING)
    tokens_count = chunks * CHUNK_TOKENS
    pages = Pages(tokens_count)
    connector = Connector(pages)
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=CHUNK_TOKENS,
        local_cpu=True,
        max_local_cpu_size=pages.bytes.nbytes / 2**30 + 0.5,
    )
    metadata = LMCacheMetadata(
        "llama-3-8b-shaped",
        1,
        1,
        0,
        0,
        torch.bfloat16,
        connector.kv_shape,
        chunk_size=CHUNK_TOKENS,
    )
    engine = LMCacheEngineBuilder.get_or_create(
        "bench", config, metadata, connector, lambda *_: None, lambda value, _: value
    )
    engine.post_init()
    tokens = torch.from_numpy(np.random.default_rng(3).integers(0, 128000, tokens_count))
    answer({"ready": True, "version": lmcache.__version__})
    for line in sys.stdin:
        command = line.strip()
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        right = True
        if command == "store":
            engine.store(tokens)
        elif command == "load":
            right = engine.lookup(tokens) == int(engine.retrieve(tokens).sum()) == tokens_count
        elif command == "clear":
            engine.clear()
        elif command == "wipe":
            pages.bytes[:] = 0
        elif command == "check":
            right = pages.checksums() == pages.sums
        else:
            connector.way = command
        answer(
            {
                "right": right,
                "wall_s": time.perf_counter() - wall_s,
                "cpu_s": time.process_time() - cpu_s,
            }
        )
    ANSWERS.flush()
    os._exit(0)  # its threads do not end by themselves


def answer(fields: dict) -> None:
    ANSWERS.write(json.dumps(fields) + "\n")
    ANSWERS.flush()


if __name__ == "__main__":
    main()
