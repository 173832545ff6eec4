"""The decode side of a hand-over: offers pages, and knows which layers have arrived.

No thread of its own: `poll`, and every wait, take what peers said since. Whoever waits first sleeps
on the agent's eventfd for all the others. State lies under one lock, held for dict work and for
handing small messages to the agent.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.agent import Agent
from kvtier.errors import BackendUnavailable, Closed, TransferTimeout
from kvtier.geometry import Geometry, Pages, Shape, Shard, extents, place, plan
from kvtier.handover_protocol import (
    Claim,
    Done,
    Failed,
    Go,
    HandoverResult,
    HandoverStatus,
    Introduction,
    LayerDone,
    Message,
    Quiet,
    Stop,
    Ticket,
    decode,
    decode_message,
    digest,
    encode,
    new_offer,
    pack_pages,
)
from kvtier.peers import Notification, NotificationKind, Peer
from kvtier.slices import page_ids
from kvtier.types import Region

log = logging.getLogger("kvtier.handover")

OFFERS_MAX = 4096
FOREIGN_MAX = 4096  # notifications of other things, kept for `poll`; the oldest go first
CLOSE_S = 5.0
_SLEEP_S = 1.0  # a bound on one sleep, not on a wait


@dataclass(frozen=True, slots=True)
class Source:
    """A prefill rank that KV may come from; made by `HandoverReceiver.connect`."""

    peer: Peer
    shape: Shape


class _Sender:
    """One prefill rank's part in one offer."""

    def __init__(self, peer: Peer, layers: set[int]) -> None:
        self.peer = peer
        self.missing = layers
        self.claimed = False
        self.over = False  # it is done, or said that it writes no more, or is dead


class Offer:
    """One request's pages, on offer to the prefill side; made by `expect`. Any thread.

    `ticket` goes to every prefill rank, through whatever routes requests. Until the result is OK,
    or `is_quiet`, the pages must be given to nothing else.
    """

    def __init__(
        self,
        receiver: HandoverReceiver,
        request_id: str,
        ticket: Ticket,
        layers: range,
        senders: dict[str, _Sender],
        ends_s: float,
    ) -> None:
        self.request_id = request_id
        self.ticket = encode(ticket)
        self._id = ticket.offer
        self._receiver = receiver
        self._layers = layers
        self._senders = senders
        self._ends_s = ends_s
        self._result: HandoverResult | None = None
        self._ready = layers.start

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the prefill ranks that send a part."""
        return tuple(self._senders)

    @property
    def layers_ready(self) -> int:
        """How many layers are in place, counted from the rank's first one without a gap."""
        return self._ready - self._layers.start

    def wait_layer(self, layer: int, timeout_s: float | None = None) -> bool:
        """Wait until `layer` of the model is in place; False if it is not, or never will be.

        Without `timeout_s` the offer's deadline is the bound.
        """
        if layer not in self._layers:
            raise ValueError(f"layer {layer} is not one of {self._layers}")
        self._receiver._wait(lambda: self._has(layer) or self._result is not None, timeout_s)
        return self._has(layer)

    def wait(self, timeout_s: float | None = None) -> HandoverResult | None:
        """The result, or None if it is not there after `timeout_s` (default: by the deadline)."""
        self._receiver._wait(lambda: self._result is not None, timeout_s)
        return self._result

    def result(self) -> HandoverResult | None:
        """The result if the hand-over has ended, as of the last `poll` or wait, or by deadline."""
        self._receiver._look_at_clock()
        return self._result

    @property
    def is_quiet(self) -> bool:
        """Whether nothing writes to the pages any more, as of the last `poll` or wait."""
        return self._result is not None and self._all_over()

    def wait_quiet(self, timeout_s: float) -> bool:
        """Wait until nothing writes to the pages any more."""
        self._receiver._wait(lambda: self.is_quiet, timeout_s)
        return self.is_quiet

    def cancel(self) -> None:
        """Want it no more; the pages are free again when `is_quiet`."""
        self._receiver._cancel(self)

    def _has(self, layer: int) -> bool:
        return all(layer not in sender.missing for sender in self._senders.values())

    def _all_over(self) -> bool:
        """A rank that has claimed nothing will be refused, so it cannot write either."""
        return all(sender.over or not sender.claimed for sender in self._senders.values())

    def _arrived(self, sender: _Sender, layers: set[int]) -> None:
        sender.missing -= layers
        while self._ready < self._layers.stop and self._has(self._ready):
            self._ready += 1


class HandoverReceiver:
    """One decode rank: its pages, the prefill ranks it knows, and the offers it has made.

    The agent's notifications belong to it; what is about other things `poll` gives back.
    """

    def __init__(
        self,
        agent: Agent,
        pages: Pages,
        *,
        model: str,
        shard: Shard | None = None,
        regions: Sequence[Region] | None = None,
    ) -> None:
        """Take part with `pages`, which are registered with the agent unless `regions` hold them.

        `model` names weights and all else that changes K or V; it must be equal on both sides.

        Raises:
            LayoutMismatch: the pages are not what `shard` says, or lie in none of `regions`.
        """
        self.shape = Shape.of(pages.layout, model, shard)
        self._agent = agent
        self._pages = pages
        self._registered: list[Region] = []
        if regions is None:
            regions = self._registered = [
                agent.register(e) for e in extents(pages.layout, pages.kv)
            ]
        self._geometry = place(self.shape, pages.kv, regions)
        self._changed = threading.Condition()
        self._offers: dict[bytes, Offer] = {}
        self._known: dict[str, Peer] = {}
        self._unsent: deque[tuple[Peer, bytes]] = deque()
        self._foreign: deque[Notification] = deque(maxlen=FOREIGN_MAX)
        self._leading = False
        self._closed = False
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(agent.fileno(), select.POLLIN)
        self._poll.register(self._wake_fd, select.POLLIN)
        self.refused_messages = 0
        """Messages that were damaged, or from a peer that has no part in their offer."""

    def connect(self, introduction: bytes) -> Source:
        """Get to know a prefill rank by its `HandoverSender.introduction()`.

        Raises:
            LayoutMismatch: its KV is not what these pages hold, or the bytes are no introduction.
        """
        known = decode(introduction, Introduction)
        known.shape.check_sends_to(self.shape)
        try:
            peer = self._agent.connect(known.metadata)
        except ValueError as error:
            raise BackendUnavailable(f"{known.name}: {error}") from error
        with self._changed:
            self._known[peer.name] = peer
        return Source(peer, known.shape)

    def expect(
        self,
        request_id: str,
        page_ids: Sequence[int] | npt.NDArray[np.integer],
        tokens: int,
        sources: Sequence[Source],
        *,
        deadline_s: float,
    ) -> Offer:
        """Offer the pages of a request to the prefill ranks `sources`, for `deadline_s` seconds.

        `sources` are all ranks of one prefill instance, in an order that is the same for every
        decode rank; which of them send, and what, follows from their shards.

        Raises:
            LayoutMismatch: the sources together do not hold all that these pages need.
            ValueError: pages and tokens do not fit, or two sources have one name.
            BackendUnavailable: too many offers are not over yet.
        """
        ids = _checked_pages(page_ids, tokens, self._geometry)
        names = [source.peer.name for source in sources]
        if len(set(names)) != len(names):
            raise ValueError("two sources of one name")
        parts = plan([source.shape.shard for source in sources], self.shape.shard)
        senders = {
            source.peer.name: _Sender(
                source.peer, {p.first_layer + i for p in mine for i in range(p.layers)}
            )
            for source, mine in zip(sources, parts, strict=True)
            if mine
        }
        ticket = Ticket(
            request=request_id,
            offer=new_offer(),
            target=self._agent.name,
            geometry=self._geometry,
            tokens=tokens,
            pages=pack_pages(ids),
            sources=tuple((s.peer.name, s.shape.shard) for s in sources),
        )
        first = self.shape.shard.first_layer
        layers = range(first, first + self.shape.shard.layers)
        offer = Offer(self, request_id, ticket, layers, senders, time.monotonic() + deadline_s)
        with self._changed:
            if self._closed:
                raise Closed("the receiver is closed")
            if len(self._offers) >= OFFERS_MAX:
                raise BackendUnavailable(f"{OFFERS_MAX} hand-overs are not over yet")
            self._offers[ticket.offer] = offer
            for name, sender in senders.items():
                if not sender.peer.alive:
                    self._end(offer, HandoverStatus.FAILED, f"{name} is lost")
        return offer

    def poll(self) -> list[Notification]:
        """Take what peers said; gives what was not about hand-overs, and who was lost.

        Call it once a step, or have a thread of yours in some wait: a prefill rank begins to send
        only after it was answered here.
        """
        self._take()
        with self._changed:
            foreign = list(self._foreign)
            self._foreign.clear()
        return foreign

    def close(self) -> None:
        """Cancel every offer, wait a moment until all is quiet, and let go of own regions.

        Raises:
            TransferTimeout: pages may still be written to: they must stay.
        """
        with self._changed:
            if self._closed:
                return
            self._closed = True
            for offer in list(self._offers.values()):
                self._end(offer, HandoverStatus.CANCELLED, "the receiver is closed")
            self._changed.notify_all()
        os.eventfd_write(self._wake_fd, 1)
        # An agent that is closed has parted with its peers: nobody will say any more.
        patience_s = 0.0 if self._agent.closed else CLOSE_S
        self._wait(lambda: not self._offers, patience_s, even_closed=True)
        with self._changed:
            self._changed.wait_for(lambda: not self._leading, 2 * _SLEEP_S)
            if self._offers:
                raise TransferTimeout(f"{len(self._offers)} offers are not quiet")
        with contextlib.suppress(Closed):
            for region in self._registered:
                self._agent.deregister(region)
        os.close(self._wake_fd)

    # Waits ---------------------------------------------------------------------------------------

    def _wait(
        self, is_over: Callable[[], bool], timeout_s: float | None, even_closed: bool = False
    ) -> None:
        """Sleep until `is_over`, in turns: one thread on the agent's eventfd, others behind it."""
        ends_s = time.monotonic() + (timeout_s if timeout_s is not None else 1e9)
        while True:
            with self._changed:
                self._expire()
                now_s = time.monotonic()
                if is_over() or now_s >= ends_s or (self._closed and not even_closed):
                    return
                next_s = min([ends_s, *(o._ends_s for o in self._running())])
                left_s = max(0.0, min(next_s - now_s, _SLEEP_S))
                if self._leading:
                    self._changed.wait(left_s)
                    continue
                self._leading = True
            try:
                self._sleep(left_s)
                self._take(leads=True)
            finally:
                with self._changed:
                    self._leading = False
                    self._changed.notify_all()

    def _sleep(self, left_s: float) -> None:
        for fd, _ in self._poll.poll(left_s * 1000 + 0.5):
            if fd == self._wake_fd:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(fd)

    def _running(self) -> list[Offer]:
        return [offer for offer in self._offers.values() if offer._result is None]

    def _look_at_clock(self) -> None:
        with self._changed:
            self._expire()

    def _expire(self) -> None:
        now_s = time.monotonic()
        for offer in self._running():
            if now_s >= offer._ends_s:
                self._end(offer, HandoverStatus.DEADLINE, "deadline passed")

    # What peers say ------------------------------------------------------------------------------

    def _take(self, leads: bool = False) -> None:
        self._agent.progress()
        with self._changed:  # notifications are taken and handled in one order
            for notification in self._agent.notifications():
                self._hear(notification)
            self._expire()
            self._send_unsent()
            self._changed.notify_all()
            if self._leading and not leads:
                os.eventfd_write(self._wake_fd, 1)  # it may sleep on an eventfd that was cleared

    def _hear(self, notification: Notification) -> None:
        name = notification.peer
        if notification.kind is NotificationKind.LOST:
            self._foreign.append(notification)
            if (known := self._known.get(name)) is not None and not known.alive:
                del self._known[name]
            for each in list(self._offers.values()):
                if (sender := each._senders.get(name)) is not None and not sender.over:
                    sender.over = sender.peer.gone
                    self._end(each, HandoverStatus.FAILED, f"{name}: {notification.detail}")
            return
        try:
            message = decode_message(notification.payload)
        except ValueError as error:
            self._refuse(name, str(error))
            return
        if message is None:
            self._foreign.append(notification)
            return
        offer = self._offers.get(message.offer)
        if offer is None:
            if isinstance(message, Claim) and name in self._known:
                self._say(self._known[name], Stop(message.offer, "the offer is over"))
            return
        sender = offer._senders.get(name)
        if sender is None:
            self._refuse(name, f"has no part in {offer.request_id!r}")
        elif notification.kind is NotificationKind.FAILED:
            self._end(offer, HandoverStatus.FAILED, f"{name}: {notification.detail}")
        else:
            self._follow(offer, name, sender, message)

    def _follow(self, offer: Offer, name: str, sender: _Sender, message: Message) -> None:
        if isinstance(message, Claim):
            if message.digest != digest(offer.ticket):
                self._refuse(name, "claims by another ticket than was given out")
                self._say(sender.peer, Stop(offer._id, "the ticket was damaged on its way"))
            elif offer._result is not None:
                self._say(sender.peer, Stop(offer._id, offer._result.detail[:1000]))
            else:
                sender.claimed = True
                self._say(sender.peer, Go(offer._id))
        elif isinstance(message, LayerDone):
            if message.layer in sender.missing:
                offer._arrived(sender, {message.layer})
        elif isinstance(message, Done):
            sender.over = True
            offer._arrived(sender, set(sender.missing))
            if all(s.over and not s.missing for s in offer._senders.values()):
                self._end(offer, HandoverStatus.OK, "")
            self._forget(offer)
        elif isinstance(message, Failed):
            self._end(offer, HandoverStatus.FAILED, f"{name}: {message.detail}")
        elif isinstance(message, Quiet):
            sender.over = True
            self._end(offer, HandoverStatus.FAILED, f"{name} stopped")
        else:
            self._refuse(name, f"said {type(message).__name__}")

    def _end(self, offer: Offer, status: HandoverStatus, detail: str) -> None:
        """The first word counts; those who may still write are told to stop. Under the lock."""
        if offer._result is None:
            offer._result = HandoverResult(status, detail)
            for sender in offer._senders.values():
                if sender.claimed and not sender.over:
                    self._say(sender.peer, Stop(offer._id, detail[:1000]))
        self._forget(offer)
        self._changed.notify_all()

    def _forget(self, offer: Offer) -> None:
        if offer.is_quiet:
            self._offers.pop(offer._id, None)

    def _cancel(self, offer: Offer) -> None:
        with self._changed:
            self._end(offer, HandoverStatus.CANCELLED, "cancelled")

    def _refuse(self, name: str, why: str) -> None:
        self.refused_messages += 1
        if self.refused_messages.bit_count() == 1:  # ever more seldom: it may be noise without end
            log.warning("kvtier: hand-over: refused a message of %s: %s", name, why)

    def _say(self, peer: Peer, message: Message) -> None:
        self._unsent.append((peer, encode(message)))
        self._send_unsent()

    def _send_unsent(self) -> None:
        """Give messages to the agent, in order; those to peers still being connected wait."""
        for _ in range(len(self._unsent)):
            peer, payload = self._unsent.popleft()
            if peer.alive and not peer.connected:
                self._unsent.append((peer, payload))
            else:
                with contextlib.suppress(BackendUnavailable, Closed):  # lost: it cannot write
                    self._agent.send(peer, payload)


def _checked_pages(
    given: Sequence[int] | npt.NDArray[np.integer], tokens: int, geometry: Geometry
) -> npt.NDArray[np.int64]:
    ids = page_ids(given, tokens, geometry)
    if len(np.unique(ids)) != len(ids):
        raise ValueError("a page is named twice")
    return ids
