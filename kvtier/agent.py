"""The transfer agent: registers memory of every kind, knows its peers, and runs transfers.

    with Agent("decode-0") as agent:
        pages = agent.register(tensor)
        peer = agent.connect(metadata_of_the_other_one)
        fetch = agent.prepare(Op.READ, local, remote, peer=peer)
        fetch.post(deadline_s=2.0)
        fetch.wait()

Nothing here blocks but `wait`, `deregister` and `close`, each with a bound. Backends move the bytes
on their own threads; what ended is seen through `fileno`, `done` or `wait`, in the caller's thread.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self
from weakref import WeakSet

from kvtier import descriptors
from kvtier._core import Completions
from kvtier.channel import (
    Broken,
    Channel,
    Connection,
    Wire,
    abstract_listener,
    tcp_listener,
)
from kvtier.descriptors import DescriptorList, Select
from kvtier.errors import BackendUnavailable, Closed, TransferTimeout
from kvtier.memory_regions import Source, describe
from kvtier.metadata import (
    ID_BYTES,
    MESSAGE_BYTES_MAX,
    REGIONS_MAX,
    Hello,
    Message,
    Metadata,
    Notify,
    Refused,
    RegionEntry,
    Welcome,
    Withdraw,
    Withdrawn,
    check_payload,
    decode_message,
    decode_metadata,
    encode_message,
    encode_metadata,
    this_host,
)
from kvtier.peers import Held, Notification, NotificationKind, Peer
from kvtier.postings import Postings
from kvtier.registry import transfer_backends
from kvtier.routing import Router
from kvtier.transfer import Op, TransferBackend, TransferBackendFactory, Unsuitable
from kvtier.transfers import Transfer
from kvtier.types import Descriptor, Region, RegionKind

WIRE = Wire(encode_message, decode_message, MESSAGE_BYTES_MAX)
log = logging.getLogger("kvtier.agent")

IN_FLIGHT_BYTES_MAX = 8 << 30
NOTIFICATIONS_MAX = 65536
_CLOSE_S = 5.0

_left_behind: list[Transfer] = []
"""Transfers whose memory was not quiet when their agent closed: it must not be freed, ever."""

_open: WeakSet[Agent] = WeakSet()


@atexit.register
def _close_all() -> None:
    """Backends' threads must not move bytes while the interpreter takes memory away."""
    for agent in list(_open):
        agent.close()


class Agent:
    """Owns regions, peers and backends. Any thread.

    Transfers that touch a region keep it, so its memory cannot go before they are quiet.
    """

    def __init__(
        self,
        name: str = "",
        *,
        listen: str = "",
        backends: Mapping[str, TransferBackendFactory] | Sequence[str] | None = None,
        in_flight_bytes_max: int = IN_FLIGHT_BYTES_MAX,
        notifications_max: int = NOTIFICATIONS_MAX,
    ) -> None:
        """Open every backend that works here.

        `listen` (``host:port``, port 0 for any) lets peers on other hosts connect. `backends` are
        names of installed ones, or factories by name; all installed ones if not given. Transfers
        beyond `in_flight_bytes_max` wait for those before; a peer whose notifications nobody
        fetches is no longer listened to at `notifications_max`.

        Raises:
            ConfigError: a named backend is not installed.
            OSError: the address to listen on cannot be had.
        """
        self.name = name or f"agent-{os.getpid()}-{secrets.token_hex(4)}"
        if len(self.name) > 200:
            raise ValueError(f"a name of {len(self.name)} characters, at most 200")
        self._id = secrets.token_bytes(ID_BYTES)
        self._token = secrets.token_bytes(ID_BYTES)
        self._host = this_host()
        self._lock = threading.RLock()
        self._completions = Completions()
        self._backends: dict[str, TransferBackend] = {}
        self._absent: dict[str, str] = {}
        self._router = Router(self._backends)
        self._regions: dict[int, Held] = {}
        self._next_region = 0
        self._generation = 0
        self._peers: dict[bytes, Peer] = {}
        self._inbound: dict[Connection, tuple[str, bytes]] = {}
        self._leaving: dict[int, set[Connection]] = {}  # region -> who has not said Withdrawn
        self._given_up: set[Connection] = set()  # peers that may live on and touch our regions
        self._notifications: deque[Notification] = deque()
        self._notifications_max = notifications_max
        self._paused: set[Connection] = set()
        self.listeners: set[Callable[[], None]] = set()
        """kvtier's own, called from any thread when something ended or was said; they only wake."""
        self._closed = False
        factories = backends if isinstance(backends, Mapping) else transfer_backends(backends)
        unix, self._unix = abstract_listener()
        listeners = [unix]
        self._tcp = ""
        if listen:
            try:
                tcp, self._tcp = tcp_listener(listen)
            except BaseException:
                unix.close()
                raise
            listeners.append(tcp)
        self._channel = Channel(self, WIRE, listeners)
        self._postings = Postings(
            self._lock,
            self._completions,
            self._backends,
            self._router,
            in_flight_bytes_max,
            lambda wanted: self._channel.watch(self._completions.fileno(), wanted),
            self._channel.wake,
            self._answer_withdrawals,
            lambda: [listener() for listener in list(self.listeners)],
        )
        self._open_backends(factories)
        self._channel.start()
        _open.add(self)

    def _open_backends(self, factories: Mapping[str, TransferBackendFactory]) -> None:
        for name, factory in factories.items():
            try:
                self._backends[name] = factory(self._completions)
            except Unsuitable as reason:
                self._absent[name] = str(reason)
            except Exception as error:  # another package's code: the agent works without it
                log.exception("kvtier: transfer backend %s cannot be opened", name)
                self._absent[name] = repr(error)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def backends(self) -> dict[str, str]:
        """Every backend asked for: an empty string for one that works here, else why it does not."""
        return dict.fromkeys(self._backends, "") | self._absent

    # Regions -------------------------------------------------------------------------------------

    def register(
        self, source: Source, *, kind: RegionKind | None = None, nbytes: int | None = None
    ) -> Region:
        """Make memory or a place usable in transfers.

        `source` is a buffer (bytes-like, numpy, torch or CuPy array), a `SharedPool`, an
        ``(address, bytes)`` pair that the caller keeps alive, a path of a file or block device, or ``"s3://bucket/key"``.
        `nbytes` bounds a file, which grows to it if it may, or an object that is to be written.
        Buffers are kept alive until `deregister`.

        Raises:
            ValueError: the source is empty, not contiguous, or of no known kind.
            BackendUnavailable: no backend serves it here; says what each one's reason is.
        """
        self._check_open()
        found = describe(source, kind, nbytes)
        if not found.nbytes:
            found = found.of_length(self._length(found.source))
        with self._lock:
            if len(self._regions) >= REGIONS_MAX:
                raise ValueError(f"{len(self._regions)} regions are registered, and no more may be")
            number = self._next_region
            self._next_region += 1
        region = found.region(number)
        held = Held(region, found.keep, found.writable)
        for name, backend in self._backends.items():
            try:
                held.handles[name] = backend.register(region, found.source)
            except Unsuitable as reason:
                held.refused[name] = str(reason)
        if not held.handles:
            reasons = held.refused | self._absent
            raise BackendUnavailable(
                f"nothing here serves {region.kind.value} {source!r:.80}: "
                + "; ".join(f"{name}: {why}" for name, why in reasons.items())
            )
        with self._lock:
            self._regions[number] = held
            self._generation += 1
        return region

    def _length(self, source: Any) -> int:
        """How long a place is that was named without its length."""
        for backend in self._backends.values():
            try:
                if nbytes := backend.length(source):
                    return nbytes
            except Unsuitable as reason:
                raise ValueError(f"{source!r:.200}: {reason}") from reason
        raise ValueError(f"{source!r:.200} is empty or absent: give nbytes to make room for it")

    def deregister(self, region: Region, timeout_s: float = 5.0) -> None:
        """Let go of a region, once nothing touches it any more, here or from a peer.

        From now on no transfer begins on it. When this returns, its memory may be freed.

        Raises:
            ValueError: it is not registered.
            TransferTimeout: something still uses it; the memory must stay. Call again later.
        """
        with self._lock:
            held = self._regions.get(region.number)
            if held is None or held.region != region:
                raise ValueError(f"region {region.number} is not registered")
            held.leaving = True
            if region.number not in self._leaving:
                self._leaving[region.number] = self._given_up | {
                    connection
                    for connection in self._inbound
                    if connection.send(Withdraw(region.number)) or not connection.gone
                }
        ends_s = time.monotonic() + timeout_s
        while True:
            seen = self._completions.generation
            self._postings.look()
            with self._lock:
                users, asked = held.uses, len(self._leaving.get(region.number, ()))
                if not users and not asked:
                    if self._regions.pop(region.number, None) is None:
                        return  # another thread was as quick
                    self._leaving.pop(region.number, None)
                    self._generation += 1
                    break
            left_s = ends_s - time.monotonic()
            if left_s <= 0:
                raise TransferTimeout(
                    f"region {region.number}: {users} transfers here and {asked} peers still use it"
                )
            self._completions.wait(seen, left_s)
        for name, handle in held.handles.items():
            self._backends[name].deregister(handle)

    # Peers ---------------------------------------------------------------------------------------

    def metadata(self) -> bytes:
        """What another agent needs to connect to this one and to reach its regions as of now."""
        with self._lock:
            regions = [held for held in self._regions.values() if not held.leaving]
            generation = self._generation
        return encode_metadata(
            Metadata(
                name=self.name,
                agent=self._id,
                generation=generation,
                token=self._token,
                host=self._host,
                pid=os.getpid(),
                unix=self._unix.removeprefix("\0"),
                tcp=self._tcp,
                backends={name: b.address() for name, b in self._backends.items() if b.address()},
                regions=[self._entry(held) for held in regions],
            )
        )

    def _entry(self, held: Held) -> RegionEntry:
        region = held.region
        exports = {n: self._backends[n].export(handle) for n, handle in held.handles.items()}
        return RegionEntry(
            number=region.number,
            kind=region.kind,
            address=region.address,
            nbytes=region.nbytes,
            device=region.device,
            exports={name: data for name, data in exports.items() if data},
        )

    def connect(self, metadata: bytes) -> Peer:
        """The peer whose agent gave `metadata`; newer metadata of a known one update it.

        Returns at once: transfers wait for the connection, within their deadlines. A peer that is
        lost comes back by connecting anew, as another `Peer`.

        Raises:
            ValueError: the bytes are no metadata, are this agent's own, or older than known ones.
        """
        self._check_open()
        decoded = decode_metadata(metadata)
        if decoded.agent == self._id:
            raise ValueError("these are this agent's own metadata")
        with self._lock:
            peer = self._peers.get(decoded.agent)
            if peer is not None and peer.alive:
                peer.update(decoded)
                return peer
            here = decoded.host == self._host
            peer = Peer(decoded, decoded.pid if here else None)
            self._peers[decoded.agent] = peer
            peer.connection = self._channel.connect(
                "\0" + decoded.unix if here else "", decoded.tcp
            )
            peer.say(Hello(self.name, self._id, peer.agent, peer.token))
            return peer

    def disconnect(self, peer: Peer) -> None:
        """Part from a peer: what runs with it fails with ECONNRESET, and nothing more is said."""
        with self._lock:
            if peer.connection is not None:
                self._channel.drop(peer.connection, "disconnected")

    def view(self, peer: Peer, descriptor: Descriptor) -> memoryview:
        """The bytes of a peer on this host themselves, if they lie in a `SharedPool`: no copy.

        Valid for as long as it is kept, also after the peer's end. The peer may change the bytes,
        and will once it is told that nobody needs them.

        Raises:
            ValueError: the descriptor is not within a region of the peer.
            BackendUnavailable: the memory is not shared; says why.
        """
        self._check_open()
        table = peer.region_table()
        (region,) = descriptors.read_list("remote", [descriptor], None, table).regions
        with self._lock:
            held = peer.held(region)
        whole = self._router.view(peer, held)
        return whole[descriptor.offset : descriptor.offset + descriptor.nbytes]

    def send(self, peer: Peer, payload: bytes) -> None:
        """A notification of its own, after those of transfers that ended before.

        Raises:
            ValueError: the payload is too long.
            BackendUnavailable: the peer is lost, or has not read for too long.
        """
        self._check_open()
        check_payload(payload)
        with self._lock:
            if not peer.say(Notify(payload, "")):
                raise BackendUnavailable(f"{peer.name}: {peer.lost or 'does not read'}")

    def notifications(self) -> list[Notification]:
        """What peers have said since the last call, in the order it came."""
        self._postings.look()
        with self._lock:
            found = list(self._notifications)
            self._notifications.clear()
            for connection in self._paused:
                connection.pause(False)
            self._paused.clear()
        return found

    # Transfers -----------------------------------------------------------------------------------

    def prepare(
        self,
        op: Op,
        local: DescriptorList,
        remote: DescriptorList,
        peer: Peer | None = None,
        *,
        local_select: Select | None = None,
        remote_select: Select | None = None,
        backend: str = "",
    ) -> Transfer:
        """Check and compile a transfer, to be posted any number of times.

        Each side is a list of `Descriptor` or an N x 3 uint64 array of (region number, offset,
        bytes); `*_select` picks and orders rows by index. `remote` is in the peer's regions, or in
        this agent's own without a peer. The backend is the one expected to be quickest, by what was
        measured; `Transfer.reason` says so. `backend` asks for one by name.

        Raises:
            ValueError: the lists do not fit each other or their regions, or a target is read-only.
            BackendUnavailable: nothing moves these bytes here; says each one's reason.
        """
        self._check_open()
        if peer is not None and not peer.alive:
            raise BackendUnavailable(f"{peer.name} is lost: {peer.lost}")
        with self._lock:
            mine = {n: held.region for n, held in self._regions.items() if not held.leaving}
        theirs = mine if peer is None else peer.region_table()
        here = descriptors.read_list("local", local, local_select, mine)
        there = descriptors.read_list("remote", remote, remote_select, theirs)
        with self._lock:
            ours = [self._held(region) for region in here.regions]
            others = [
                self._held(region) if peer is None else peer.held(region)
                for region in there.regions
            ]
        targets = ours if op is Op.READ else others
        for held in targets:
            if not held.writable:
                raise ValueError(f"region {held.region.number} is read-only")
        choice = self._router.choose(op, here, there, ours, others, peer, backend)
        return Transfer(self._postings, op, choice, (*ours, *others), peer)

    def progress(self) -> list[Transfer]:
        """Transfers that ended since the last call; makes `fileno` wait for what comes next."""
        self.clear()
        self._postings.look()
        return self._postings.ended()

    def clear(self) -> None:
        """Make `fileno` wait for what comes next, for those who look at transfers one by one."""
        self._completions.clear_fd()

    def fileno(self) -> int:
        """An eventfd, readable when a transfer ended or a notification came, until `progress`."""
        return self._completions.fileno()

    def close(self) -> None:
        """Cancel what runs, wait a bounded time until memory is quiet, and release everything.

        Memory that a transfer may still touch after that is never freed by kvtier, and a warning
        says so.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            _open.discard(self)
        rest = self._postings.close(_CLOSE_S)
        self._channel.close()
        for backend in self._backends.values():
            backend.close()
        rest = self._postings.close(0.0) if rest else rest
        with self._lock:
            if rest:
                log.warning("kvtier: %d transfers still touch memory, which is kept", len(rest))
                _left_behind.extend(rest)
            for held in self._regions.values():
                if not held.uses:
                    held.keep = None
        self._heed()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # Inside --------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"agent {self.name} is closed")

    def _held(self, region: Region) -> Held:
        held = self._regions.get(region.number)
        if held is None or held.leaving:
            raise ValueError(f"region {region.number} was deregistered")
        return held

    def _answer_withdrawals(self, transfer: Transfer) -> None:
        """Tell the peer of regions that it wants back and that nothing of ours touches any more."""
        if (peer := transfer.peer) is None:
            return
        for held in transfer.held:
            if held.leaving and not held.uses and peer.owns(held):
                self._give_up(peer, held)

    def _give_up(self, peer: Peer, held: Held) -> None:
        handles, held.handles = held.handles, {}  # `prepare` may be adding one meanwhile
        for name, handle in handles.items():
            self._backends[name].deregister(handle)
        peer.forget(held)
        peer.say(Withdrawn(held.region.number))

    # The channel's thread ------------------------------------------------------------------------

    def on_tick(self) -> float:
        """`Handler.on_tick`."""
        return self._postings.tick()

    def on_message(self, connection: Connection, message: Message) -> None:
        """`Handler.on_message`."""
        with self._lock:
            if isinstance(message, Hello):
                self._greet(connection, message)
            elif not connection.greeted:
                self._take_answer(connection, message)
            elif isinstance(message, Notify):
                kind = NotificationKind.FAILED if message.failure else NotificationKind.MESSAGE
                self._tell(connection, kind, message.payload, message.failure)
            elif isinstance(message, Withdraw):
                self._withdraw(connection, message.region)
            elif isinstance(message, Withdrawn):
                self._leaving.get(message.region, set()).discard(connection)
            else:
                raise Broken(f"unexpected {type(message).__name__}")
        self._heed()

    def on_lost(self, connection: Connection, reason: str) -> None:
        """`Handler.on_lost`."""
        links: dict[str, Any] = {}
        lost: list[Peer] = []
        with self._lock:
            self._paused.discard(connection)
            known = self._inbound.pop(connection, None)
            if connection.gone:
                for asked in self._leaving.values():
                    asked.discard(connection)
            elif known is not None:
                self._given_up.add(connection)
            for peer in self._peers.values():
                if peer.connection is connection:
                    links = peer.lose(reason)
                    lost = [peer]
                    known = (peer.name, peer.agent)
                    del self._peers[peer.agent]
                    break
            if known is not None and not self._closed:
                self._notifications.append(
                    Notification(known[0], b"", NotificationKind.LOST, reason)
                )
            self._postings.start_waiting()
        for name, link in links.items():
            self._backends[name].disconnect(link)
        with self._lock:
            for peer in lost:
                for held in peer.unused():  # the others go when they are quiet
                    self._give_up(peer, held)
        self._heed()

    def _heed(self) -> None:
        self._completions.signal()
        for listener in list(self.listeners):
            listener()

    def _greet(self, connection: Connection, hello: Hello) -> None:
        if connection.outbound or connection.greeted:
            raise Broken("a greeting out of turn")
        if hello.target != self._id or not secrets.compare_digest(hello.token, self._token):
            connection.send(Refused("the metadata are of another agent, which is gone"))
            raise Broken("a greeting for another agent")
        connection.greeted = True
        self._inbound[connection] = (hello.name, hello.agent)
        standing = [number for number, held in self._regions.items() if not held.leaving]
        connection.send(Welcome(standing))

    def _take_answer(self, connection: Connection, message: Message) -> None:
        if isinstance(message, Refused):
            raise Broken(f"refused: {message.reason}")
        if not isinstance(message, Welcome) or not connection.outbound:
            raise Broken("no greeting first")
        connection.greeted = True
        for peer in self._peers.values():
            if peer.connection is connection:
                peer.welcome(set(message.regions))
        self._postings.start_waiting()

    def _withdraw(self, connection: Connection, number: int) -> None:
        for peer in self._peers.values():
            if peer.connection is connection and (held := peer.leave(number)) is not None:
                if held.uses:
                    self._postings.await_quiet(held)
                else:
                    self._give_up(peer, held)
                return
        connection.send(Withdrawn(number))

    def _tell(
        self, connection: Connection, kind: NotificationKind, payload: bytes, detail: str
    ) -> None:
        name = next(
            (p.name for p in self._peers.values() if p.connection is connection),
            self._inbound.get(connection, ("", b""))[0],
        )
        self._notifications.append(Notification(name, payload, kind, detail))
        if len(self._notifications) >= self._notifications_max:
            connection.pause(True)
            self._paused.add(connection)
