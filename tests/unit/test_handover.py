"""Hand-overs between agents of one process, over a transport that moves bytes when it is told to."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, ClassVar, Self

import numpy as np
import pytest

from kvtier import LayoutMismatch
from kvtier._core import Completions
from kvtier.agent import Agent
from kvtier.handover import (
    HandoverReceiver,
    HandoverSender,
    HandoverStatus,
    Offer,
    Push,
    Shard,
)
from kvtier.handover_protocol import MAGIC, Done, LayerDone, Ticket, decode, encode
from kvtier.peers import Notification, NotificationKind
from kvtier.testing.handover_engine import ToyRank, generate
from kvtier.transfer import BlockingTransfers, Pieces, Reach, Results, Route, Stop
from kvtier.types import Region, RegionKind

LAYERS, HEADS = 5, 4
BOUND_S = 20.0  # far above what a machine under load takes
PROMPT = [int(token) for token in np.random.default_rng(3).integers(0, 32000, 37)]


class Gate:
    """Lets transfers through: all of them, or as many as it is told."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._allowed = 1 << 30
        self.begun = 0
        self.fails = False

    def allow(self, count: int) -> None:
        """Let `count` more begin, from now on."""
        with self._changed:
            self._allowed = self.begun + count
            self._changed.notify_all()

    def enter(self, stop: Stop) -> bool:
        with self._changed:
            while self.begun >= self._allowed:
                if stop.is_set():
                    return False
                self._changed.wait(0.01)
            self.begun += 1
        return not self.fails


class Copies(BlockingTransfers):
    """Copies to a peer in this process."""

    name: ClassVar[str] = "copies"
    threads: ClassVar[int] = 1

    def __init__(self, completions: Completions, gate: Gate) -> None:
        super().__init__(completions)
        self._gate = gate

    @property
    def reach(self) -> Reach:
        return Reach(frozenset({Route(RegionKind.DRAM, RegionKind.DRAM, peer=True)}))

    def register(self, region: Region, source: Any) -> int:
        return region.address

    def deregister(self, handle: Any) -> None:
        pass

    def address(self) -> bytes:
        return b"here"

    def export(self, handle: Any) -> bytes:
        return b"exported"

    def connect(self, address: bytes, host_pid: int | None) -> Any:
        return object()

    def import_region(self, link: Any, region: Region, exported: bytes) -> int:
        return region.address

    def prepare(self, pieces: Pieces, link: Any) -> Pieces:
        return pieces

    def piece_count(self, prepared: Pieces) -> int:
        return len(prepared.lengths)

    def move(self, prepared: Pieces, results: Results, stop: Stop) -> str:
        if not self._gate.enter(stop):
            results[:] = -5
            return "the gate is shut"
        local, remote = prepared.local, prepared.remote
        for i, nbytes in enumerate(prepared.lengths.tolist()):
            ctypes.memmove(
                remote.handles[remote.which[i]] + int(remote.offsets[i]),
                local.handles[local.which[i]] + int(local.offsets[i]),
                nbytes,
            )
            results[i] = nbytes
        return ""


def shards(ranks: int) -> list[Shard]:
    """`HEADS` heads over `ranks` ranks, replicated if there are more ranks."""
    if ranks > HEADS:
        return [Shard(1, LAYERS, HEADS, LAYERS, r * HEADS // ranks, 0, r) for r in range(ranks)]
    per = HEADS // ranks
    return [Shard(per, LAYERS, HEADS, LAYERS, rank * per, 0, rank) for rank in range(ranks)]


class Cluster:
    """Prefill and decode ranks, connected; `gate` is what prefill ranks' bytes go through."""

    def __init__(
        self,
        prefill: list[ToyRank],
        decode: list[ToyRank],
        model: str = "toy",
        decode_model: str = "toy",
    ) -> None:
        self.prefill, self.decode = prefill, decode
        self.gate = Gate()
        with ExitStack() as stack:
            self._agents = [
                stack.enter_context(
                    Agent(
                        f"{side}-{i}",
                        backends={"copies": lambda completions: Copies(completions, self.gate)},
                    )
                )
                for side, ranks in (("prefill", prefill), ("decode", decode))
                for i in range(len(ranks))
            ]
            self.prefill_agents = self._agents[: len(prefill)]
            self.decode_agents = self._agents[len(prefill) :]
            self.senders = []
            for agent, rank in zip(self.prefill_agents, prefill, strict=True):
                self.senders.append(
                    HandoverSender(agent, rank.pages, model=model, shard=rank.shard)
                )
                stack.callback(self.senders[-1].close)
            self.receivers = [
                HandoverReceiver(agent, rank.pages, model=decode_model, shard=rank.shard)
                for agent, rank in zip(self.decode_agents, decode, strict=True)
            ]
            self.sources = [
                [receiver.connect(sender.introduction()) for sender in self.senders]
                for receiver in self.receivers
            ]
            self.peers = [
                [agent.connect(other.metadata()) for other in self.decode_agents]
                for agent in self.prefill_agents
            ]
            self._open = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for receiver in self.receivers:
            receiver.close()
        self._open.close()

    def begin(
        self,
        request: str = "r",
        tokens: int = len(PROMPT),
        deadline_s: float = BOUND_S,
        offer_deadline_s: float = BOUND_S,
    ) -> tuple[list[Push], list[Offer]]:
        offers = [
            receiver.expect(
                request,
                rank.request_pages(tokens, seed=7),
                tokens,
                sources,
                deadline_s=offer_deadline_s,
            )
            for receiver, rank, sources in zip(
                self.receivers, self.decode, self.sources, strict=True
            )
        ]
        pushes = [
            sender.begin(
                request,
                [(peer, offer.ticket) for peer, offer in zip(peers, offers, strict=True)],
                rank.request_pages(tokens),
                tokens,
                deadline_s=deadline_s,
            )
            for sender, rank, peers in zip(self.senders, self.prefill, self.peers, strict=True)
        ]
        return pushes, offers

    def compute(self, pushes: list[Push], layer: int, prompt: list[int] = PROMPT) -> None:
        for rank, push in zip(self.prefill, pushes, strict=True):
            rank.compute(prompt, rank.request_pages(len(prompt)), layer)
            push.layer_done(layer)

    def hand_over(self, request: str = "r", prompt: list[int] = PROMPT) -> list[Offer]:
        pushes, offers = self.begin(request, len(prompt))
        for layer in range(LAYERS):
            self.compute(pushes, layer, prompt)
        drive = [threading.Thread(target=offer.wait) for offer in offers]
        for thread in drive:
            thread.start()
        results = [push.finish() for push in pushes]
        for thread in drive:
            thread.join()
        assert all(result.ok for result in results), results
        return offers


def text_of(ranks: list[ToyRank], tokens: list[int], pages_seed: int) -> list[int]:
    """What `ranks` generate from the KV in their pages."""
    pages = [rank.request_pages(len(tokens) + 8, seed=pages_seed) for rank in ranks]

    def append(text: Any) -> None:
        for rank, mine in zip(ranks, pages, strict=True):
            for layer in range(LAYERS):
                rank.compute(text, mine, layer, first_token=len(text) - 1)

    def attend(count: int, layer: int) -> int:
        owners: dict[int, ToyRank] = {rank.shard.first_head: rank for rank in ranks}
        of = {id(rank): mine for rank, mine in zip(ranks, pages, strict=True)}
        return sum(
            rank.attend(count, of[id(rank)][: -(-count // rank.page_tokens)], layer)
            for rank in owners.values()
        )

    return generate(tokens, 5, attend, append, LAYERS)


def text_without(prompt: list[int] = PROMPT) -> list[int]:
    """What one engine generates alone."""
    rank = ToyRank(shards(1)[0], noise=9)
    for layer in range(LAYERS):
        rank.compute(prompt, rank.request_pages(len(prompt) + 8), layer)
    return text_of([rank], prompt, pages_seed=0)


@pytest.fixture
def pair() -> Iterator[Cluster]:
    """One rank on each side, of different page sizes."""
    with Cluster([ToyRank(shards(1)[0])], [ToyRank(shards(1)[0], page_tokens=32)]) as cluster:
        yield cluster


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ((1, "KNTHD", 16), (1, "KNTHD", 16)),
        ((2, "KNTHD", 16), (1, "NKHTD", 32)),
        ((1, "NKTHD", 32), (2, "NHTD", 16)),
        ((4, "NLKTHD", 8), (2, "KNTHD", 16)),
        ((2, "NTHD", 16), (4, "NKHTD", 8)),
        ((8, "NTHD", 16), (2, "KNTHD", 16)),
    ],
)
def test_decode_generates_what_one_engine_would(
    prefill: tuple[int, str, int], decode: tuple[int, str, int]
) -> None:
    def build(side: tuple[int, str, int]) -> list[ToyRank]:
        return [
            ToyRank(shard, order=side[1], page_tokens=side[2], page_count=96 // side[2] + 4)
            for shard in shards(side[0])
        ]

    with Cluster(build(prefill), build(decode)) as cluster:
        cluster.hand_over()
        for rank in cluster.decode:
            assert rank.matches(PROMPT, rank.request_pages(len(PROMPT), seed=7))
        assert text_of(cluster.decode, PROMPT, pages_seed=7) == text_without()


def test_a_flipped_bit_changes_the_text(pair: Cluster) -> None:
    """The control: what decode generates depends on the KV that was handed over."""
    pair.hand_over()
    (rank,) = pair.decode
    rank.corrupt(rank.request_pages(len(PROMPT), seed=7)[0])
    assert text_of([rank], PROMPT, pages_seed=7) != text_without()


def test_a_latent_cache_comes_from_one_of_the_ranks_that_hold_it() -> None:
    latent = [Shard(1, LAYERS, 1, LAYERS, rank=rank) for rank in range(4)]
    prefill = [ToyRank(shard, order="NTD") for shard in latent[:2]]
    decode = [ToyRank(shard, order="NLTD") for shard in latent[:3]]
    with Cluster(prefill, decode) as cluster:
        offers = cluster.hand_over()
        assert [offer.sources for offer in offers] == [
            ("prefill-0",),
            ("prefill-1",),
            ("prefill-0",),
        ]
        for rank in decode:
            assert rank.matches(PROMPT, rank.request_pages(len(PROMPT), seed=7))


def test_a_layer_can_be_used_before_the_last_one_is_computed(pair: Cluster) -> None:
    (push,), (offer,) = pair.begin()
    assert offer.layers_ready == 0
    pair.compute([push], 0)
    assert offer.wait_layer(0, BOUND_S)
    assert offer.layers_ready == 1
    assert not offer.wait_layer(1, 0.0)
    assert push.result() is None
    for layer in range(1, LAYERS):
        pair.compute([push], layer)
    assert offer.wait(BOUND_S) == push.finish()
    assert offer.layers_ready == LAYERS
    assert offer.is_quiet


def test_layers_come_in_any_order_and_twice(pair: Cluster) -> None:
    (push,), (offer,) = pair.begin()
    for layer in [4, 4, 2, 3, 1]:
        pair.compute([push], layer)
    assert offer.wait_layer(4, BOUND_S)
    assert offer.layers_ready == 0
    pair.compute([push], 0)
    result = offer.wait(BOUND_S)
    assert result is not None
    assert result.ok
    assert push.finish().ok


def test_saying_that_a_layer_is_done_never_waits(pair: Cluster) -> None:
    """With a transport that stands still, as with one that runs."""
    pair.gate.allow(0)
    (push,), (offer,) = pair.begin()
    costs = []
    for layer in range(LAYERS):
        begin_s = time.perf_counter()
        push.layer_done(layer)
        costs.append(time.perf_counter() - begin_s)
    assert sorted(costs)[LAYERS // 2] < 200e-6
    push.cancel()
    assert offer.wait(BOUND_S) is not None


def test_no_more_transfers_are_in_flight_than_allowed() -> None:
    with Cluster([ToyRank(shards(1)[0])], [ToyRank(shards(1)[0])]) as cluster:
        cluster.senders[0]._in_flight_max = 2
        cluster.gate.allow(0)
        (push,), (offer,) = cluster.begin()
        for layer in range(LAYERS):
            cluster.compute([push], layer)
        watch_until(cluster, lambda: len(push._targets[0].flying) == 2)
        cluster.gate.allow(1 << 20)
        assert cluster.receivers[0].poll() == []
        assert offer.wait(BOUND_S) == push.finish()


def watch_until(cluster: Cluster, is_over: Any) -> None:
    """Poll the decode side, as its engine does once a step."""
    ends_s = time.monotonic() + BOUND_S
    while not is_over():
        assert time.monotonic() < ends_s
        for receiver in cluster.receivers:
            receiver.poll()


def test_a_failed_transfer_fails_both_sides_at_once(pair: Cluster) -> None:
    pair.gate.fails = True
    (push,), (offer,) = pair.begin()
    pair.compute([push], 0)
    result = offer.wait(BOUND_S)
    assert result is not None
    assert (result.status, "gate is shut" in result.detail) == (HandoverStatus.FAILED, True)
    assert push.finish().status is HandoverStatus.FAILED
    assert offer.wait_quiet(BOUND_S)
    assert push.wait_quiet(BOUND_S)
    assert not offer.wait_layer(0)


def test_a_push_that_is_not_finished_fails(pair: Cluster) -> None:
    (push,), (offer,) = pair.begin()
    pair.compute([push], 0)
    result = push.finish()
    assert (result.status, result.detail) == (
        HandoverStatus.FAILED,
        "layers [1, 2, 3, 4] were never done",
    )
    told = offer.wait(BOUND_S)
    assert told is not None
    assert told.status is HandoverStatus.FAILED


def test_decode_stops_prefill_and_has_its_pages_back(pair: Cluster) -> None:
    pair.gate.allow(0)
    (push,), (offer,) = pair.begin()
    pair.compute([push], 0)
    watch_until(pair, lambda: push._targets[0].flying)
    offer.cancel()
    assert not offer.is_quiet, "prefill was told to go and has not answered"
    result = offer.result()
    assert result is not None
    assert result.status is HandoverStatus.CANCELLED
    assert offer.wait_quiet(BOUND_S)
    assert push.finish().status is HandoverStatus.FAILED
    assert push.wait_quiet(BOUND_S)


def test_prefill_that_never_comes_costs_the_deadline_and_no_page(pair: Cluster) -> None:
    (rank,), (receiver,), (sources,) = pair.decode, pair.receivers, pair.sources
    offer = receiver.expect("r", rank.request_pages(37), 37, sources, deadline_s=0.05)
    result = offer.wait()
    assert result is not None
    assert result.status is HandoverStatus.DEADLINE
    assert offer.is_quiet


def test_a_ticket_that_comes_too_late_writes_nothing(pair: Cluster) -> None:
    """Decode has given the pages to somebody else by then."""
    (rank,), (receiver,), (sources,) = pair.decode, pair.receivers, pair.sources
    offer = receiver.expect("r", rank.request_pages(37), 37, sources, deadline_s=BOUND_S)
    offer.cancel()
    assert offer.is_quiet
    before = [tensor.clone() for tensor in rank.tensors]
    push = pair.senders[0].begin(
        "r", [(pair.peers[0][0], offer.ticket)], list(range(3)), 37, deadline_s=BOUND_S
    )
    pair.compute([push], 0)
    watch_until(pair, lambda: push.result() is not None)
    result = push.result()
    assert result is not None
    assert (result.status, "over" in result.detail) == (HandoverStatus.FAILED, True)
    assert all(np.array_equal(a, b) for a, b in zip(before, rank.tensors, strict=True))


def test_prefill_gives_up_by_its_deadline_and_decode_hears_of_it(pair: Cluster) -> None:
    pair.gate.allow(0)
    (push,), (offer,) = pair.begin(deadline_s=0.2)
    pair.compute([push], 0)
    result = offer.wait(BOUND_S)
    assert result is not None
    assert result.status is HandoverStatus.FAILED
    ended = push.result()
    assert ended is not None
    assert not ended.ok
    assert offer.wait_quiet(BOUND_S)
    assert push.wait_quiet(BOUND_S)


def test_the_end_of_the_prefill_side_fails_the_offer_at_once(pair: Cluster) -> None:
    (push,), (offer,) = pair.begin()
    pair.compute([push], 0)
    assert offer.wait_layer(0, BOUND_S)
    pair.senders[0].close()
    pair.prefill_agents[0].close()
    result = offer.wait(BOUND_S)
    assert result is not None
    assert result.status is HandoverStatus.FAILED
    assert offer.wait_quiet(BOUND_S)
    lost: list[Notification] = []
    while not lost:
        lost = pair.receivers[0].poll()
    assert {n.kind for n in lost} == {NotificationKind.LOST}


def test_the_end_of_the_decode_side_fails_the_push_at_once(pair: Cluster) -> None:
    (push,), (offer,) = pair.begin()
    pair.compute([push], 0)
    assert offer.wait_layer(0, BOUND_S)
    pair.receivers[0].close()
    pair.decode_agents[0].close()
    assert push.wait_quiet(BOUND_S)
    result = push.result()
    assert result is not None
    assert result.status is HandoverStatus.FAILED


def test_words_about_other_offers_and_from_strangers_change_nothing(pair: Cluster) -> None:
    (push,), (offer,) = pair.begin()
    offer_id = decode(offer.ticket, Ticket).offer
    receiver = pair.receivers[0]
    with Agent("stranger", backends={}) as stranger:
        peer = stranger.connect(pair.decode_agents[0].metadata())
        watch_until(pair, lambda: peer.connected)
        stranger.send(peer, encode(Done(offer_id)))
        stranger.send(peer, encode(LayerDone(bytes(16), 0)))
        stranger.send(peer, MAGIC + b"\xc1 not a message")
        stranger.send(peer, b"of another subject")
        heard: list[Notification] = []
        ends_s = time.monotonic() + BOUND_S
        while not heard:
            assert time.monotonic() < ends_s
            heard = receiver.poll()
        assert [n.payload for n in heard] == [b"of another subject"]
    assert receiver.refused_messages == 2
    assert offer.result() is None
    for layer in range(LAYERS):
        pair.compute([push], layer)
    assert offer.wait(BOUND_S) == push.finish()


def test_repeated_words_are_harmless(pair: Cluster) -> None:
    (push,), (offer,) = pair.begin()
    offer_id = decode(offer.ticket, Ticket).offer
    pair.compute([push], 0)
    assert offer.wait_layer(0, BOUND_S)
    for _ in range(3):
        pair.prefill_agents[0].send(pair.peers[0][0], encode(LayerDone(offer_id, 0)))
    for layer in range(1, LAYERS):
        pair.compute([push], layer)
    assert offer.wait(BOUND_S) == push.finish()
    pair.prefill_agents[0].send(pair.peers[0][0], encode(Done(offer_id)))
    pair.receivers[0].poll()
    assert pair.receivers[0].refused_messages == 0


def test_another_model_is_refused_at_the_door() -> None:
    ranks = [ToyRank(shards(1)[0]) for _ in range(2)]
    with pytest.raises(LayoutMismatch, match="model"):
        Cluster(ranks[:1], ranks[1:], decode_model="other")


def test_a_ticket_for_another_request_is_refused_and_decode_is_told(pair: Cluster) -> None:
    (rank,), (receiver,), (sources,) = pair.decode, pair.receivers, pair.sources
    offer = receiver.expect("r", rank.request_pages(37), 37, sources, deadline_s=BOUND_S)
    watch_until(pair, lambda: pair.peers[0][0].connected)
    with pytest.raises(LayoutMismatch, match="36 of 'r'"):
        pair.senders[0].begin(
            "r", [(pair.peers[0][0], offer.ticket)], [0, 1, 2], 36, deadline_s=BOUND_S
        )
    result = offer.wait(BOUND_S)
    assert result is not None
    assert result.status is HandoverStatus.FAILED
    assert offer.is_quiet


def test_a_damaged_ticket_writes_nothing(pair: Cluster) -> None:
    """Whichever byte of it is wrong: page numbers would lead into other requests' pages."""
    (rank,), (receiver,), (sources,) = pair.decode, pair.receivers, pair.sources
    offer = receiver.expect("r", rank.request_pages(37), 37, sources, deadline_s=BOUND_S)
    before = [tensor.clone() for tensor in rank.tensors]
    begun = 0
    for at in range(len(MAGIC), len(offer.ticket)):
        damaged = bytearray(offer.ticket)
        damaged[at] ^= 0x15
        try:
            push = pair.senders[0].begin(
                "r", [(pair.peers[0][0], bytes(damaged))], [0, 1, 2], 37, deadline_s=BOUND_S
            )
        except LayoutMismatch:
            continue
        begun += 1
        pair.compute([push], 0)
        wrong_name = damaged.find(decode(offer.ticket, Ticket).offer) < 0
        watch_until(pair, lambda: push.result() is not None or wrong_name)  # noqa: B023
        push.cancel()
        assert push.wait_quiet(BOUND_S)
    assert begun
    assert all(np.array_equal(a, b) for a, b in zip(before, rank.tensors, strict=True))


def test_a_hundred_requests_leave_nothing_behind(pair: Cluster) -> None:
    pair.hand_over("warm up")
    held = []
    for number in range(100):
        (offer,) = pair.hand_over(f"request {number}", PROMPT[: 1 + number % 37])
        held.append(weakref.ref(offer))
        del offer
    assert not pair.receivers[0]._offers
    assert not pair.senders[0]._pushes
    assert not pair.senders[0]._offers
    gc.collect()
    assert not [ref for ref in held if ref() is not None]


def test_many_threads_wait_while_one_polls(pair: Cluster) -> None:
    (push,), (offer,) = pair.begin()
    seen = []
    threads = [
        threading.Thread(target=lambda layer=layer: seen.append(offer.wait_layer(layer, BOUND_S)))
        for layer in range(LAYERS)
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for layer in range(LAYERS):
        pair.receivers[0].poll()
        pair.compute([push], layer)
    for thread in threads:
        thread.join(BOUND_S)
    assert seen == [True] * 3 * LAYERS
    assert push.finish().ok


def test_closing_ends_waits(pair: Cluster) -> None:
    (push,), (offer,) = pair.begin()
    results: list[Any] = []
    waiting = threading.Thread(target=lambda: results.append(offer.wait_layer(0, BOUND_S)))
    waiting.start()
    pair.receivers[0].close()
    waiting.join(BOUND_S)
    assert results == [False]
    assert not push.finish(BOUND_S).ok
