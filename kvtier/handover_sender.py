"""The prefill side of a hand-over: writes each layer into decode ranks' pages as it is computed.

The compute thread only says which layer is done. One daemon thread of the sender prepares the
transfers ahead of it, posts them, and hears how they ended and what decode ranks say; it is the
only one that touches transfers.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvtier.agent import Agent
from kvtier.errors import BackendUnavailable, Closed, LayoutMismatch, TransferTimeout
from kvtier.geometry import Geometry, Pages, Part, Shape, Shard, extents, place, plan
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
    unpack_pages,
)
from kvtier.peers import NotificationKind, Peer
from kvtier.slices import LayerSlices, PageIds, page_ids
from kvtier.transfer import Op
from kvtier.transfers import Transfer
from kvtier.types import Region

log = logging.getLogger("kvtier.handover")

PUSHES_MAX = 1024
IN_FLIGHT_MAX = 8  # transfers of one sender; layers beyond it wait for those before
PREPARED_AHEAD_MAX = 4  # transfers of one target, compiled before their layer is computed
CLOSE_S = 5.0
_SLEEP_S = 1.0
_UNQUIET_SLEEP_S = 0.02


class _Bell:
    """Wakes one thread; ringing costs less than a microsecond and never gives up the GIL.

    Any other way to wake a thread would: then the compute thread would have to wait for the GIL
    until the woken one lets go of it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def ring(self) -> None:
        """Have the thread look."""
        with contextlib.suppress(RuntimeError):  # it has been rung and not yet heard
            self._lock.release()

    def wait(self, timeout_s: float) -> None:
        """Sleep until it is rung, or was since the last time."""
        self._lock.acquire(timeout=max(0.0, timeout_s))


class _Target:
    """One decode rank's part in one push; the sender's thread alone changes it."""

    def __init__(
        self,
        peer: Peer,
        ticket: Ticket,
        ticket_digest: bytes,
        parts: tuple[Part, ...],
        pages: PageIds,
    ) -> None:
        self.peer = peer
        self.ticket = ticket
        self.digest = ticket_digest
        self.parts = parts
        self.pages = pages
        self.layers = sorted({p.first_layer + i for p in parts for i in range(p.layers)})
        self.slices: LayerSlices | None = None
        self.claimed = False
        self.may_write = False
        self.prepared: dict[int, Transfer] = {}
        self.flying: dict[int, Transfer] = {}
        self.left = set(self.layers)  # not in place yet
        self.told = False  # that it is done, or that it failed


class Push:
    """One request's KV on its way to the decode side; made by `HandoverSender.begin`. Any thread.

    The request's pages must stay as they are until the result is OK, or `is_quiet`.
    """

    def __init__(
        self,
        sender: HandoverSender,
        request_id: str,
        targets: list[_Target],
        pages: PageIds,
        ends_s: float,
    ) -> None:
        self.request_id = request_id
        self.layers = tuple(sorted({layer for target in targets for layer in target.layers}))
        """Layers of the model that go anywhere from here; others may be said to be done too."""
        self._sender = sender
        self._targets = targets
        self._pages = pages
        self._ends_s = ends_s
        self._computed: dict[int, None] = {}  # in the order in which they were
        self._result: HandoverResult | None = None
        self._is_quiet = False

    def layer_done(self, layer: int) -> None:
        """The KV of `layer` of the model is in the pages: send it. Costs microseconds; twice is fine.

        The bytes must be there for every reader, so on a GPU after the layer's event.
        """
        shard = self._sender.shape.shard
        if not shard.first_layer <= layer < shard.first_layer + shard.layers:
            raise ValueError(
                f"layer {layer}, this rank has {shard.layers} from {shard.first_layer} on"
            )
        self._computed[layer] = None
        self._sender._bell.ring()

    def finish(self, deadline_s: float | None = None) -> HandoverResult:
        """Wait until all has arrived, at most `deadline_s` and never past the push's deadline.

        A push of which a layer was never done fails here.
        """
        if missing := sorted(set(self.layers) - self._computed.keys()):
            self._sender._end(self, HandoverStatus.FAILED, f"layers {missing} were never done")
        ends_s = self._ends_s
        if deadline_s is not None:
            ends_s = min(ends_s, time.monotonic() + deadline_s)
        self._sender._wait_until(lambda: self._result is not None, ends_s)
        return self._sender._end(self, HandoverStatus.DEADLINE, "deadline passed")

    def result(self) -> HandoverResult | None:
        """The result if it has ended."""
        if self._result is None and time.monotonic() >= self._ends_s:
            self._sender._end(self, HandoverStatus.DEADLINE, "deadline passed")
        return self._result

    def cancel(self) -> None:
        """Send no more of it; decode ranks are told. The pages are free when `is_quiet`."""
        self._sender._end(self, HandoverStatus.CANCELLED, "cancelled by the prefill side")

    @property
    def is_quiet(self) -> bool:
        """Whether nothing reads the pages any more."""
        return self._is_quiet

    def wait_quiet(self, timeout_s: float) -> bool:
        """Wait until nothing reads the pages any more."""
        self._sender._wait_until(lambda: self._is_quiet, time.monotonic() + timeout_s)
        return self._is_quiet


class HandoverSender:
    """One prefill rank: its pages and the pushes under way. The agent's notifications belong to it."""

    def __init__(
        self,
        agent: Agent,
        pages: Pages,
        *,
        model: str,
        shard: Shard | None = None,
        regions: Sequence[Region] | None = None,
        in_flight_max: int = IN_FLIGHT_MAX,
    ) -> None:
        """Take part with `pages`; arguments as in `HandoverReceiver`."""
        self.shape = Shape.of(pages.layout, model, shard)
        self._agent = agent
        self._engine_pages = pages  # kept alive: transfers read them
        self._registered: list[Region] = []
        if regions is None:
            regions = self._registered = [
                agent.register(e) for e in extents(pages.layout, pages.kv)
            ]
        self._geometry = place(self.shape, pages.kv, regions)
        self._in_flight_max = in_flight_max
        self._changed = threading.Condition()
        self._pushes: dict[int, Push] = {}
        self._offers: dict[bytes, tuple[Push, _Target]] = {}
        self._closed = False
        self._bell = _Bell()
        agent.listeners.add(self._bell.ring)
        self._thread = threading.Thread(target=self._run, name="kvtier-handover", daemon=True)
        self._thread.start()

    def introduction(self) -> bytes:
        """What decode ranks give to `HandoverReceiver.connect`; they must have it before tickets."""
        return encode(Introduction(self._agent.name, self._agent.metadata(), self.shape))

    def begin(
        self,
        request_id: str,
        targets: Sequence[tuple[Peer, bytes]],
        page_ids: Sequence[int] | npt.NDArray[np.integer],
        tokens: int,
        *,
        deadline_s: float,
    ) -> Push:
        """Start to hand a request over to decode ranks: a peer and its ticket for each.

        Call it before the first layer is computed: until decode ranks have answered, and the first
        transfers are compiled, nothing is sent.

        Raises:
            LayoutMismatch: a ticket is damaged, for other pages, or says another shard of this rank.
            ValueError: pages and tokens do not fit.
            BackendUnavailable: too many pushes are under way.
        """
        tickets = [(peer, decode(ticket, Ticket), digest(ticket)) for peer, ticket in targets]
        try:
            ids = _checked_pages(page_ids, tokens, self._geometry)
            parted = [self._target(request_id, tokens, *ticket) for ticket in tickets]
        except ValueError as error:
            for peer, ticket, _ in tickets:
                self._say(peer, Failed(ticket.offer, str(error)[:1000]))
            raise
        push = Push(self, request_id, parted, ids, time.monotonic() + deadline_s)
        with self._changed:
            if self._closed:
                raise Closed("the sender is closed")
            if len(self._pushes) >= PUSHES_MAX:
                raise BackendUnavailable(f"{PUSHES_MAX} pushes are under way")
            offers = {target.ticket.offer: (push, target) for target in parted if target.parts}
            if len(offers) != sum(bool(t.parts) for t in parted) or offers.keys() & self._offers:
                raise ValueError("a ticket is used twice")
            self._offers |= offers
            self._pushes[id(push)] = push
        self._bell.ring()
        return push

    def _target(
        self, request_id: str, tokens: int, peer: Peer, read: Ticket, ticket_digest: bytes
    ) -> _Target:
        if (read.request, read.tokens, read.target) != (request_id, tokens, peer.name):
            raise LayoutMismatch(
                f"a ticket of {read.target} for {read.tokens} tokens of {read.request!r}, not of "
                f"{peer.name} for {tokens} of {request_id!r}"
            )
        self.shape.check_sends_to(read.geometry.shape)
        parts = plan([shard for _, shard in read.sources], read.geometry.shape.shard)
        mine = [i for i, (name, _) in enumerate(read.sources) if name == self._agent.name]
        if len(mine) != 1 or read.sources[mine[0]][1] != self.shape.shard:
            raise LayoutMismatch(
                f"{peer.name} does not know {self._agent.name} as a rank of {self.shape.shard}"
            )
        try:
            pages = page_ids(unpack_pages(read.pages), tokens, read.geometry)
        except ValueError as error:
            raise LayoutMismatch(f"ticket of {peer.name}: {error}") from error
        return _Target(peer, read, ticket_digest, parts[mine[0]], pages)

    def close(self) -> None:
        """Cancel every push, wait a moment until all is quiet, and let go of own regions.

        Raises:
            TransferTimeout: pages may still be read: they must stay.
        """
        with self._changed:
            if self._closed:
                return
            pushes = list(self._pushes.values())
        for push in pushes:
            self._end(push, HandoverStatus.CANCELLED, "the sender is closed")
        self._wait_until(lambda: not self._pushes, time.monotonic() + CLOSE_S)
        with self._changed:
            self._closed = True
            rest = len(self._pushes)
        self._bell.ring()
        self._thread.join(CLOSE_S)
        self._agent.listeners.discard(self._bell.ring)
        if rest or self._thread.is_alive():
            raise TransferTimeout(f"{rest} pushes are not quiet")
        with contextlib.suppress(Closed):
            for region in self._registered:
                self._agent.deregister(region)

    # Any thread ----------------------------------------------------------------------------------

    def _end(self, push: Push, status: HandoverStatus, detail: str) -> HandoverResult:
        """The first word counts; the thread does the rest."""
        with self._changed:
            if push._result is None:
                push._result = HandoverResult(status, detail)
                self._changed.notify_all()
                self._bell.ring()
            return push._result

    def _wait_until(self, is_over: Callable[[], bool], ends_s: float) -> None:
        with self._changed:
            self._changed.wait_for(is_over, max(0.0, ends_s - time.monotonic()))

    # The sender's thread -------------------------------------------------------------------------

    def _run(self) -> None:
        why = "the sender is closed"
        try:
            while not self._closed:
                self._agent.progress()  # else it would keep transfers that ended
                self._hear()
                if not self._advance():
                    self._sleep()
        except Closed as error:
            why = str(error)
        except Exception as error:  # outermost frame of the thread
            log.exception("kvtier: hand-over: the sender failed")
            why = repr(error)
        with self._changed:
            self._closed = True  # no push begins that nobody would see through
            left = list(self._pushes.values())
        for push in left:
            self._end(push, HandoverStatus.FAILED, why)
            self._forget(push)

    def _sleep(self) -> None:
        with self._changed:
            pushes = list(self._pushes.values())
        ends = [push._ends_s for push in pushes if push._result is None]
        # Nobody rings when what has ended becomes quiet.
        bound_s = _SLEEP_S if len(ends) == len(pushes) else _UNQUIET_SLEEP_S
        self._bell.wait(min([*ends, time.monotonic() + bound_s]) - time.monotonic())

    def _hear(self) -> None:
        for notification in self._agent.notifications():
            if notification.kind is not NotificationKind.MESSAGE:
                continue  # transfers and `Peer.alive` tell the same
            try:
                message = decode_message(notification.payload)
            except ValueError as error:
                log.warning("kvtier: hand-over: message of %s: %s", notification.peer, error)
                continue
            if not isinstance(message, Go | Stop):
                continue
            push, target = self._offers.get(message.offer, (None, None))
            if push is None or target is None or target.peer.name != notification.peer:
                continue
            if isinstance(message, Go):
                target.may_write = True
            else:
                self._end(
                    push, HandoverStatus.FAILED, f"{notification.peer} stopped: {message.detail}"
                )

    def _advance(self) -> bool:
        """One round over all pushes; whether there may be more to do at once."""
        with self._changed:
            pushes = list(self._pushes.values())
        for push in pushes:
            if push._result is None and time.monotonic() >= push._ends_s:
                self._end(push, HandoverStatus.DEADLINE, "deadline passed")
            for target in push._targets:
                if push._result is None:
                    self._reap(push, target)
        in_flight = sum(len(target.flying) for push in pushes for target in push._targets)
        busy = False
        for push in pushes:
            for target in push._targets:
                if push._result is None:
                    in_flight += self._post(push, target, in_flight)
                if push._result is None:
                    busy |= self._prepare(push, target)
            if push._result is None and not any(target.left for target in push._targets):
                self._finish(push)
            if push._result is not None and not push._is_quiet:
                self._wind_up(push)
        return busy

    def _reap(self, push: Push, target: _Target) -> None:
        """See what became of transfers and of the peer."""
        for layer, transfer in list(target.flying.items()):
            if transfer.done():
                if not transfer.ok:
                    why = f"{target.peer.name}: layer {layer}: {transfer.failure}"
                    self._end(push, HandoverStatus.FAILED, why)
                    return
                del target.flying[layer]
                target.left.discard(layer)
        if target.left and not target.peer.alive:
            self._end(push, HandoverStatus.FAILED, f"{target.peer.name}: {target.peer.lost}")

    def _post(self, push: Push, target: _Target, in_flight: int) -> int:
        """Claim, then send what is computed and prepared; how many were sent."""
        if target.left and not target.claimed and target.peer.connected:
            target.claimed = self._say(target.peer, Claim(target.ticket.offer, target.digest))
        count = 0
        if target.may_write:
            for layer in list(push._computed):
                if in_flight + count >= self._in_flight_max:
                    break
                if layer in target.prepared:
                    transfer = target.prepared.pop(layer)
                    target.flying[layer] = transfer
                    transfer.post(
                        push._ends_s - time.monotonic(),
                        encode(LayerDone(target.ticket.offer, layer)),
                    )
                    count += 1
        return count

    def _prepare(self, push: Push, target: _Target) -> bool:
        """Compile the next transfer, of what is computed first; False if none is needed now."""
        if not target.layers:
            return False
        computed = list(push._computed)
        wanted = [
            layer
            for layer in [*computed, *target.layers]
            if layer in target.left and layer not in target.prepared and layer not in target.flying
        ]
        if not wanted:
            return False
        ready = len(target.prepared.keys() & push._computed.keys())
        if (ready if wanted[0] in push._computed else len(target.prepared)) >= PREPARED_AHEAD_MAX:
            return False
        try:
            if target.slices is None:
                target.slices = LayerSlices(
                    self._geometry,
                    target.ticket.geometry,
                    target.parts,
                    push._pages,
                    target.pages,
                    target.ticket.tokens,
                )
            local, remote = target.slices.layer(wanted[0])
            target.prepared[wanted[0]] = self._agent.prepare(
                Op.WRITE, local, remote, peer=target.peer
            )
        except (ValueError, BackendUnavailable) as error:
            self._end(push, HandoverStatus.FAILED, f"{target.peer.name}: {error}")
            return False
        return True

    def _finish(self, push: Push) -> None:
        for target in push._targets:
            if target.layers:
                self._say(target.peer, Done(target.ticket.offer))
                target.told = True
        self._forget(push)  # first, so that who sees the result may use the pages
        self._end(push, HandoverStatus.OK, "")

    def _wind_up(self, push: Push) -> None:
        """After the result: end what flies, tell the decode side, and forget it once all is quiet."""
        assert push._result is not None, "it has ended"
        for target in push._targets:
            target.prepared.clear()
            if not target.told:
                for transfer in target.flying.values():
                    transfer.cancel()
                if target.layers:
                    self._say(target.peer, Failed(target.ticket.offer, push._result.detail[:1000]))
                target.told = True
        if self._forget(push) and not push._result.ok:
            for target in push._targets:
                if target.layers:
                    self._say(target.peer, Quiet(target.ticket.offer))

    def _forget(self, push: Push) -> bool:
        """Let go of an ended push if none of its transfers touches memory any more."""
        for target in push._targets:
            for transfer in target.flying.values():
                if not (transfer.done() and transfer.is_quiet):
                    return False
        with self._changed:
            del self._pushes[id(push)]
            for target in push._targets:
                self._offers.pop(target.ticket.offer, None)
            push._is_quiet = True
            self._changed.notify_all()
        return True

    def _say(self, peer: Peer, message: Message) -> bool:
        try:
            self._agent.send(peer, encode(message))
        except BackendUnavailable:
            return False  # lost: nobody waits for the word
        return True


def _checked_pages(
    given: Sequence[int] | npt.NDArray[np.integer], tokens: int, geometry: Geometry
) -> PageIds:
    return page_ids(given, tokens, geometry)
