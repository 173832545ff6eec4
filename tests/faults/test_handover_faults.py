"""Prefill and decode ranks as processes of their own: what decode generates, whoever dies or hangs.

Never other text than one engine gives, never a wait without end, nothing held for ever.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.handover import Shard
from kvtier.testing.handover_engine import ToyRank, generate

LAYERS, HEADS = 6, 4
BOUND_S = 30.0  # far above what a machine under load takes
SCRIPT = Path(__file__).with_name("handover_process.py")
PROMPT = [int(token) for token in np.random.default_rng(5).integers(0, 32000, 75)]
NEW_TOKENS = 4
PREFILL_SEED, DECODE_SEED = 1, 2


class RankProcess:
    """A process that is one rank at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        self.tell(do, **arguments)
        return self.answer()

    def tell(self, do: str, **arguments: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the process is gone"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)
        if number is signal.SIGKILL:
            self._process.wait(BOUND_S)
            self.stop()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        if self.alive:
            self._process.send_signal(signal.SIGCONT)
            try:
                self._process.wait(BOUND_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                raise
            assert self._process.returncode == 0
        assert self._process.stdout is not None
        self._process.stdout.close()


@pytest.fixture(scope="module")
def processes() -> Iterator[list[RankProcess]]:
    """Started once: each of them imports torch."""
    started = [RankProcess() for _ in range(3)]
    yield started
    for process in started:
        process.stop()


def shards(ranks: int) -> list[Shard]:
    per = HEADS // ranks
    return [Shard(per, LAYERS, HEADS, LAYERS, rank * per, 0, rank) for rank in range(ranks)]


class Split:
    """Prefill ranks and decode ranks, connected, in as many processes."""

    def __init__(
        self,
        processes: list[RankProcess],
        prefill: int,
        decode: int,
        prefill_pages: dict[str, Any] | None = None,
        decode_pages: dict[str, Any] | None = None,
    ) -> None:
        for at, process in enumerate(processes):
            if not process.alive:
                processes[at] = RankProcess()
        self.prefill = processes[:prefill]
        self.decode = processes[prefill : prefill + decode]
        pages = {"order": "KNTHD", "page_tokens": 16, "page_count": 32, "shared": True}
        sides = [("prefill", self.prefill, prefill_pages), ("decode", self.decode, decode_pages)]
        known: dict[str, list[str]] = {}
        for side, ranks, own in sides:
            for at, (rank, shard) in enumerate(zip(ranks, shards(len(ranks)), strict=True)):
                rank.tell(
                    "build",
                    side=side,
                    name=f"{side}-{at}",
                    shard={name: getattr(shard, name) for name in shard.__struct_fields__},
                    **(pages | (own or {})),
                )
        for side, ranks, _ in sides:
            known[side] = [rank.answer()["known"] for rank in ranks]
        for rank in self.prefill:
            rank.ask("meet", known=known["decode"])
        for rank in self.decode:
            rank.ask("meet", known=known["prefill"])

    def begin(
        self, request: str = "r", tokens: int = len(PROMPT), deadline_s: float = BOUND_S
    ) -> None:
        tickets = [
            rank.ask(
                "expect", request=request, tokens=tokens, seed=DECODE_SEED, deadline_s=deadline_s
            )["ticket"]
            for rank in self.decode
        ]
        for rank in self.prefill:
            rank.ask(
                "begin",
                request=request,
                tickets=tickets,
                tokens=tokens,
                seed=PREFILL_SEED,
                deadline_s=BOUND_S,
            )

    def layer(self, layer: int, request: str = "r", prompt: list[int] = PROMPT) -> None:
        for rank in self.prefill:
            rank.ask("layer", request=request, prompt=prompt, seed=PREFILL_SEED, layer=layer)

    def wait_layer(self, layer: int, request: str = "r") -> bool:
        return all(
            rank.ask("wait_layer", request=request, layer=layer, timeout_s=BOUND_S)["ready"]
            for rank in self.decode
        )

    def attend(self, tokens: int, layer: int) -> int:
        for rank in self.decode:
            rank.tell("attend", tokens=tokens, seed=DECODE_SEED, layer=layer)
        return sum(rank.answer()["sum"] for rank in self.decode)

    def compute(self, text: list[int], first_token: int) -> None:
        for rank in self.decode:
            for layer in range(LAYERS):
                rank.ask(
                    "compute", text=text, seed=DECODE_SEED, layer=layer, first_token=first_token
                )

    def generate(self) -> list[int]:
        """Decode from the KV in the decode ranks' pages."""
        return generate(
            PROMPT,
            NEW_TOKENS,
            self.attend,
            lambda text: self.compute(list(text), len(text) - 1),
            LAYERS,
        )

    def finish(self, request: str = "r") -> list[str]:
        return [
            rank.ask("finish", request=request, deadline_s=BOUND_S)["status"]
            for rank in self.prefill
        ]

    def results(self, request: str = "r") -> list[str]:
        return [
            rank.ask("wait", request=request, timeout_s=BOUND_S)["status"] for rank in self.decode
        ]


def expected() -> list[int]:
    """What one engine generates alone."""
    rank = ToyRank(shards(1)[0])
    pages = rank.request_pages(len(PROMPT) + NEW_TOKENS)
    for layer in range(LAYERS):
        rank.compute(PROMPT, pages, layer)

    def append(text: Any) -> None:
        for layer in range(LAYERS):
            rank.compute(text, pages, layer, first_token=len(text) - 1)

    def attend(tokens: int, layer: int) -> int:
        return rank.attend(tokens, pages[: -(-tokens // rank.page_tokens)], layer)

    return generate(PROMPT, NEW_TOKENS, attend, append, LAYERS)


@pytest.mark.parametrize(
    ("prefill", "decode", "decode_pages"),
    [
        (1, 1, {"page_tokens": 32}),
        (2, 1, {"order": "NKHTD"}),
        (1, 2, {"page_tokens": 32, "order": "NLKTHD"}),
        (1, 1, {"page_tokens": 32, "shared": False}),  # ordinary memory, by UCX
    ],
)
def test_decode_begins_before_prefill_ends_and_generates_the_same(
    processes: list[RankProcess], prefill: int, decode: int, decode_pages: dict[str, Any]
) -> None:
    split = Split(processes, prefill, decode, decode_pages=decode_pages)
    split.begin()
    first = None
    for layer in range(LAYERS):
        split.layer(layer)
        if layer == 0:
            assert split.wait_layer(0)
            first = split.attend(len(PROMPT), 0)  # no later layer is computed, let alone sent
    assert split.results() == ["ok"] * decode
    assert split.finish() == ["ok"] * prefill
    assert first == split.attend(len(PROMPT), 0)
    assert split.generate() == expected()
    split.decode[0].ask("corrupt", tokens=len(PROMPT), seed=DECODE_SEED)
    assert split.generate() != expected(), "the control: the text depends on what was sent"


def test_when_prefill_is_killed_decode_knows_at_once_and_recomputes(
    processes: list[RankProcess],
) -> None:
    split = Split(processes, 2, 1)
    split.begin()
    split.layer(0)
    assert split.wait_layer(0)
    split.prefill[0].signal(signal.SIGKILL)
    answer = split.decode[0].ask("wait", request="r", timeout_s=BOUND_S)
    assert answer["status"] == "failed"
    assert split.decode[0].ask("wait_quiet", request="r", timeout_s=BOUND_S)["quiet"]
    # The other rank was told to stop, and its memory is free.
    assert split.prefill[1].ask("wait_quiet", request="r", timeout_s=BOUND_S)["quiet"]
    split.compute(PROMPT, 0)
    assert split.generate() == expected()


def test_when_decode_is_killed_prefill_fails_and_has_its_memory_back(
    processes: list[RankProcess],
) -> None:
    split = Split(processes, 1, 2)
    split.begin()
    split.layer(0)
    assert split.wait_layer(0)
    split.decode[0].signal(signal.SIGKILL)
    for layer in range(1, LAYERS):
        split.layer(layer)
    assert split.finish() == ["failed"]
    assert split.prefill[0].ask("wait_quiet", request="r", timeout_s=BOUND_S)["quiet"]
    assert split.prefill[0].ask("stat")["under_way"] == 0
    assert split.decode[1].ask("wait", request="r", timeout_s=BOUND_S)["status"] == "failed"
    assert split.prefill[0].ask("end") == {}, "its regions can be let go of"


def test_pages_stay_set_aside_while_a_stopped_prefill_might_write(
    processes: list[RankProcess],
) -> None:
    split = Split(processes, 1, 1)
    split.begin(deadline_s=2.0)
    split.layer(0)
    assert split.wait_layer(0)
    split.prefill[0].signal(signal.SIGSTOP)
    answer = split.decode[0].ask("wait", request="r", timeout_s=BOUND_S)
    assert (answer["status"], answer["quiet"]) == ("deadline", False)
    split.prefill[0].signal(signal.SIGCONT)
    assert split.decode[0].ask("wait_quiet", request="r", timeout_s=BOUND_S)["quiet"]
    assert split.finish() == ["failed"]


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_either_side_aborts_and_both_are_free_for_the_next_request(
    processes: list[RankProcess], side: str
) -> None:
    split = Split(processes, 1, 1)
    split.begin("aborted")
    split.layer(0, "aborted")
    assert split.wait_layer(0, "aborted")
    getattr(split, side)[0].ask("cancel", request="aborted")
    assert split.decode[0].ask("wait_quiet", request="aborted", timeout_s=BOUND_S)["quiet"]
    assert split.prefill[0].ask("wait_quiet", request="aborted", timeout_s=BOUND_S)["quiet"]
    split.begin()
    for layer in range(LAYERS):
        split.layer(layer)
    assert split.results() == ["ok"]
    assert split.generate() == expected()


def test_a_hundred_requests_leave_nothing_behind(processes: list[RankProcess]) -> None:
    split = Split(processes, 1, 1)
    prompt = PROMPT[:20]

    def hand_over(number: int) -> None:
        request = f"request {number}"
        split.begin(request, len(prompt))
        for layer in range(
            LAYERS if number % 10 else 2
        ):  # every tenth is never computed to its end
            split.layer(layer, request, prompt)
        wanted = ["ok"] if number % 10 else ["failed"]
        for rank in split.prefill:
            rank.tell("finish", request=request, deadline_s=BOUND_S)
        assert split.results(request) == wanted
        assert [rank.answer()["status"] for rank in split.prefill] == wanted
        for rank in (*split.prefill, *split.decode):
            assert rank.ask("wait_quiet", request=request, timeout_s=BOUND_S)["quiet"]
            rank.ask("forget", request=request)

    hand_over(0)
    hand_over(1)
    before = [rank.ask("stat") for rank in (*split.prefill, *split.decode)]
    for number in range(100):
        hand_over(number)
    for rank, then in zip((*split.prefill, *split.decode), before, strict=True):
        now = rank.ask("stat")
        assert now["under_way"] == 0
        assert (
            now["threads"] <= then["threads"] + 8
        )  # another backend may have been tried meanwhile
        assert now["fds"] < then["fds"] + 50
