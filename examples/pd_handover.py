"""A prefill process hands a request over to a decode process, layer by layer, on one machine.

A small transformer in numpy. Prefill keeps its KV in pages of 16 tokens, decode in pages of 32, in
another order of dimensions. Prints when each layer was computed, when it had arrived, and when
decode had used it; then the tokens, which must be those that one process alone generates.

    python examples/pd_handover.py [--tokens 768] [--new-tokens 16] [--json FILE]

Each side is a process of its own (this file again, told to be decode). The words between them that
a router would carry, an introduction and a ticket, go over the child's standard streams.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier import Agent, KvLayout, PagedKv
from kvtier.handover import HandoverReceiver, HandoverSender
from kvtier.shared_pool import SharedPool

LAYERS, HEADS, HEAD_DIM, VOCABULARY = 12, 4, 32, 512
WIDTH = HEADS * HEAD_DIM
MODEL = "numpy toy, seed 7"
PATIENCE_S = 60.0

Array = npt.NDArray[np.float32]


# The model -----------------------------------------------------------------------------------------


class Model:
    """Weights, and one layer's forward pass over KV that lies in pages."""

    def __init__(self) -> None:
        random = np.random.default_rng(7)

        def weights(*shape: int) -> Array:
            scaled: Array = (random.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)
            return scaled

        self.embedding = weights(VOCABULARY, WIDTH)
        self.places = weights(VOCABULARY, WIDTH)
        self.head = weights(WIDTH, VOCABULARY)
        self.project = [weights(WIDTH, 3 * WIDTH) for _ in range(LAYERS)]
        self.mix = [weights(WIDTH, WIDTH) for _ in range(LAYERS)]
        self.grow = [weights(WIDTH, 4 * WIDTH) for _ in range(LAYERS)]
        self.shrink = [weights(4 * WIDTH, WIDTH) for _ in range(LAYERS)]

    def embed(self, tokens: list[int], first: int) -> Array:
        """What the first layer sees of tokens at places `first` and on."""
        places = np.arange(first, first + len(tokens)) % VOCABULARY
        return self.embedding[tokens] + self.places[places]

    def forward(self, layer: int, x: Array, first: int, cache: Cache) -> Array:
        """Tokens `first` and on, given the KV of those before; puts theirs in the cache."""
        q, k, v = np.split(_norm(x) @ self.project[layer], 3, axis=1)
        end = first + len(x)
        cache.write(layer, first, k, v)
        keys, values = cache.read(layer, end)
        out = np.empty_like(x)
        ahead = np.arange(end)[None, :] > np.arange(first, end)[:, None]
        for head in range(HEADS):
            at = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
            scores = q[:, at] @ keys[:, head].T / np.float32(np.sqrt(HEAD_DIM))
            scores[ahead] = -np.inf
            scores = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[:, at] = scores / scores.sum(axis=1, keepdims=True) @ values[:, head]
        x = x + out @ self.mix[layer]
        result: Array = x + np.maximum(_norm(x) @ self.grow[layer], 0) @ self.shrink[layer]
        return result

    def pick(self, x: Array) -> int:
        """The most likely next token."""
        return int(np.argmax(_norm(x[-1:]) @ self.head))


def _norm(x: Array) -> Array:
    size: Array = np.sqrt((x * x).mean(axis=1, keepdims=True) + np.float32(1e-6))
    return x / size


@dataclass
class Cache:
    """Paged KV of one request in shared memory: what kvtier needs to know is `layout` and `kv`."""

    page_tokens: int
    tokens_max: int
    head_major: bool
    pages: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        count = -(-self.tokens_max // self.page_tokens)
        inner = (HEADS, self.page_tokens) if self.head_major else (self.page_tokens, HEADS)
        shape = (LAYERS, 2, count, *inner, HEAD_DIM)
        nbytes = int(np.prod(shape)) * 4
        self._pool = SharedPool(nbytes)
        array = np.frombuffer(self._pool.view(0, nbytes), np.float32).reshape(shape)
        if self.head_major:
            array = array.transpose(0, 1, 2, 4, 3, 5)
        self._array = array  # [layer, K or V, page, token, head, dim], whatever lies in memory
        self.pages = np.random.default_rng(self.page_tokens).permutation(count).tolist()
        self.layout = KvLayout.per_token(
            layers=LAYERS,
            planes=2,
            page_tokens=self.page_tokens,
            heads=HEADS,
            head_bytes=HEAD_DIM * 4,
            dtype="float32",
        )
        starts = [array[layer, plane].ctypes.data for layer in range(LAYERS) for plane in (0, 1)]
        self.kv = PagedKv(
            plane_addresses=np.array(starts, np.uint64),
            page_count=count,
            page_stride=array.strides[2],
            row_stride=array.strides[3],
            col_stride=array.strides[4],
            owner=self._pool,
        )

    def pages_of(self, tokens: int) -> list[int]:
        """The pages that hold so many tokens."""
        return self.pages[: -(-tokens // self.page_tokens)]

    def write(self, layer: int, first: int, k: Array, v: Array) -> None:
        """Keep K and V of tokens `first` and on."""
        at = np.arange(first, first + len(k))
        pages = np.array(self.pages)[at // self.page_tokens]
        for plane, values in enumerate((k, v)):
            shaped = values.reshape(-1, HEADS, HEAD_DIM)
            self._array[layer, plane, pages, at % self.page_tokens] = shaped

    def read(self, layer: int, tokens: int) -> tuple[Array, Array]:
        """K and V of all tokens, as [token, head, dim]."""
        held = self._array[layer][:, self.pages_of(tokens)]
        k, v = held.reshape(2, -1, HEADS, HEAD_DIM)[:, :tokens]
        return k, v


def prompt_of(tokens: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(1).integers(0, VOCABULARY, tokens)]


# The decode process --------------------------------------------------------------------------------


def generate(model: Model, cache: Cache, text: list[int], count: int) -> list[int]:
    """Go on from `text`, of which all but the last token's KV is in the cache."""
    new: list[int] = []
    while len(new) < count:
        known = text + new
        x = model.embed(known[-1:], len(known) - 1)
        for layer in range(LAYERS):
            x = model.forward(layer, x, len(known) - 1, cache)
        new.append(model.pick(x))
    return new


def be_decode(prompt: list[int], count: int) -> None:
    """Answers on standard output: metadata, a ticket, then what was seen and generated."""
    model = Model()
    cache = Cache(page_tokens=32, tokens_max=len(prompt) + count, head_major=True)
    with Agent("decode") as agent:
        receiver = HandoverReceiver(agent, cache, model=MODEL)
        _say({"metadata": agent.metadata().hex()})
        source = receiver.connect(bytes.fromhex(_hear()["introduction"]))
        # The last token's KV is computed here: it is on the way to the first new token anyway.
        known = len(prompt) - 1
        model.forward(0, model.embed(prompt[-1:], known), known, cache)  # warms numpy up
        offer = receiver.expect(
            "request 1", cache.pages_of(known), known, [source], deadline_s=PATIENCE_S
        )
        _say({"ticket": offer.ticket.hex()})
        ready_s, used_s = [], []
        x = model.embed(prompt[-1:], known)
        for layer in range(LAYERS):
            if not offer.wait_layer(layer):
                raise SystemExit(f"hand-over failed: {offer.result()}; here it would recompute")
            ready_s.append(time.monotonic())
            x = model.forward(layer, x, known, cache)
            used_s.append(time.monotonic())
        first = model.pick(x)
        first_token_s = time.monotonic()
        tokens = [first, *generate(model, cache, [*prompt, first], count - 1)]
        result = offer.wait()
        receiver.close()
    _say(
        {
            "ready_s": ready_s,
            "used_s": used_s,
            "first_token_s": first_token_s,
            "tokens": tokens,
            "status": result.status.value if result else "none",
        }
    )


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def _hear() -> dict[str, Any]:
    heard: dict[str, Any] = json.loads(sys.stdin.readline())
    return heard


# The prefill process, which is also the router -----------------------------------------------------


def alone(prompt: list[int], count: int) -> list[int]:
    """What one process generates without any hand-over."""
    model = Model()
    cache = Cache(page_tokens=16, tokens_max=len(prompt) + count, head_major=False)
    x = model.embed(prompt[:-1], 0)
    for layer in range(LAYERS):
        x = model.forward(layer, x, 0, cache)
    return generate(model, cache, prompt, count)


def hand_over(prompt: list[int], count: int) -> dict[str, Any]:
    """Prefill here, decode there; the times at which things happened."""
    model = Model()
    cache = Cache(page_tokens=16, tokens_max=len(prompt), head_major=False)
    child = subprocess.Popen(
        [sys.executable, __file__, "--be-decode", str(len(prompt)), str(count)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )
    with child, Agent("prefill") as agent:
        assert child.stdin is not None
        assert child.stdout is not None
        sender = HandoverSender(agent, cache, model=MODEL)
        peer = agent.connect(bytes.fromhex(json.loads(child.stdout.readline())["metadata"]))
        child.stdin.write(json.dumps({"introduction": sender.introduction().hex()}) + "\n")
        child.stdin.flush()
        ticket = bytes.fromhex(json.loads(child.stdout.readline())["ticket"])

        known = len(prompt) - 1
        push = sender.begin(
            "request 1", [(peer, ticket)], cache.pages_of(known), known, deadline_s=PATIENCE_S
        )
        begin_s, computed_s = time.monotonic(), []
        x = model.embed(prompt[:-1], 0)
        for layer in range(LAYERS):
            x = model.forward(layer, x, 0, cache)
            computed_s.append(time.monotonic())
            push.layer_done(layer)
        result = push.finish()
        if not result.ok:
            raise SystemExit(f"hand-over failed: {result}")
        seen: dict[str, Any] = json.loads(child.stdout.readline())
        sender.close()
    return {"begin_s": begin_s, "computed_s": computed_s, **seen}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=768, help="length of the prompt")
    parser.add_argument("--new-tokens", type=int, default=16, help="how many to generate")
    parser.add_argument("--json", type=Path, help="write what was measured here")
    parser.add_argument("--be-decode", type=int, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.be_decode:
        tokens, count = arguments.be_decode
        be_decode(prompt_of(tokens), count)
        return 0
    prompt = prompt_of(arguments.tokens)
    seen = hand_over(prompt, arguments.new_tokens)
    begin_s: float = seen["begin_s"]

    def ms(moment_s: float) -> float:
        return (moment_s - begin_s) * 1e3

    print("ms since prefill began; layer  computed   arrived  used by decode")
    for layer, moments in enumerate(
        zip(seen["computed_s"], seen["ready_s"], seen["used_s"], strict=True)
    ):
        print(f"{layer:29d} " + " ".join(f"{ms(moment):9.2f}" for moment in moments))
    exposed_ms = ms(seen["ready_s"][-1]) - ms(seen["computed_s"][-1])
    first_ms = ms(seen["first_token_s"]) - ms(seen["computed_s"][-1])
    print(f"exposed after the last layer: {exposed_ms:.2f} ms; first token {first_ms:.2f} ms after")
    without = alone(prompt, arguments.new_tokens)
    print(f"with hand-over: {seen['tokens']}\nwithout:        {without}")
    is_same = seen["tokens"] == without
    print("the same tokens" if is_same else "OTHER TOKENS")
    if arguments.json:
        arguments.json.write_text(json.dumps({**seen, "without": without}))
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
