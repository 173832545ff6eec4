"""The decode side of the hand-over benchmark: a process that takes JSON lines, one answer each.

Also where both sides have their pages from: 30 layers of K and V in pages of 16 tokens, 8 heads of
128 two-byte elements, which hold one word each so that any page in a wrong place is seen.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np

from kvtier import Agent, KvLayout, PagedKv
from kvtier.handover import HandoverReceiver
from kvtier.shared_pool import SharedPool

LAYERS, PLANES, PAGES, PAGE_TOKENS, HEADS, HEAD_BYTES = 30, 2, 128, 16, 8, 256
TOKENS = PAGES * PAGE_TOKENS
PAGE_BYTES = PAGE_TOKENS * HEADS * HEAD_BYTES
NBYTES = LAYERS * PLANES * PAGES * PAGE_BYTES
PATIENCE_S = 60.0


class BenchPages:
    """KV in memory that processes share, in an order of pages of its own."""

    def __init__(self, seed: int) -> None:
        self._pool = SharedPool(NBYTES)
        shape = (LAYERS, PLANES, PAGES, PAGE_BYTES // 8)
        self.words = np.frombuffer(self._pool.view(0, NBYTES), np.uint64).reshape(shape)
        self.words[:] = 0
        self.order = np.random.default_rng(seed).permutation(PAGES)
        self.layout = KvLayout.per_token(
            layers=LAYERS,
            planes=PLANES,
            page_tokens=PAGE_TOKENS,
            heads=HEADS,
            head_bytes=HEAD_BYTES,
            dtype="bfloat16",
        )
        self.kv = PagedKv(
            plane_addresses=self._pool.address
            + np.arange(LAYERS * PLANES, dtype=np.uint64) * np.uint64(PAGES * PAGE_BYTES),
            page_count=PAGES,
            page_stride=PAGE_BYTES,
            row_stride=HEADS * HEAD_BYTES,
            col_stride=HEAD_BYTES,
            owner=self._pool,
        )

    def fill(self, turn: int) -> None:
        """Put this turn's words in place."""
        self.words[:, :, self.order] = self._expected(turn)

    def holds(self, turn: int) -> bool:
        """Whether each page has this turn's word throughout."""
        expected = self._expected(turn)
        return all(
            bool((layer[:, self.order] == expected[at]).all())
            for at, layer in enumerate(self.words)
        )

    @staticmethod
    def _expected(turn: int) -> np.ndarray:
        places = np.arange(LAYERS * PLANES * PAGES, dtype=np.uint64)
        return (places + np.uint64(turn * 1_000_003 + 1)).reshape(LAYERS, PLANES, PAGES, 1)


def main() -> None:
    pages = BenchPages(seed=2)
    with Agent("bench-decode") as agent:
        receiver = HandoverReceiver(agent, pages, model="bench")
        print(json.dumps({"metadata": agent.metadata().hex()}), flush=True)
        source = receiver.connect(bytes.fromhex(json.loads(sys.stdin.readline())["known"]))
        for line in sys.stdin:
            command = json.loads(line)
            if "check" in command:
                print(json.dumps({"right": pages.holds(command["check"])}), flush=True)
                continue
            offer = receiver.expect(
                command["request"], pages.order, TOKENS, [source], deadline_s=PATIENCE_S
            )
            print(json.dumps({"ticket": offer.ticket.hex()}), flush=True)
            cpu_s = time.process_time()
            result = offer.wait()
            answer = {
                "ok": bool(result and result.ok),
                "at_s": time.monotonic(),
                "cpu_s": time.process_time() - cpu_s,
            }
            print(json.dumps(answer), flush=True)
        receiver.close()


if __name__ == "__main__":
    main()
