"""Control channels: sockets, frames, and the one thread that serves them.

No bytes of KV pass here, only small messages: between agents, and between a daemon and its clients.
A peer that is killed closes its socket, on this host or another, so its end is known at once.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

log = logging.getLogger("kvtier")

OUTBOX_BYTES_MAX = 64 << 20  # a peer that reads nothing any more; beyond it nothing more is sent
CONNECTIONS_MAX = 4096
GREETING_S = 5.0  # for the first message of who connects, and for a connection to be made
_READ_BYTES = 256 << 10
_STOP_S = 2.0


class Broken(Exception):
    """The peer does not keep to the protocol, or refuses; the connection ends."""


@dataclass(frozen=True, slots=True)
class Wire:
    """How messages of one protocol become bytes; both sides of a connection have the same."""

    encode: Callable[[Any], bytes]
    """A frame: the length of the body in 4 bytes, little-endian, then the body."""
    decode: Callable[[bytes], Any]
    """The message in one frame's body; raises ValueError and nothing else."""
    message_bytes_max: int


class Connection:
    """One socket to one peer. `send` from any thread; all else on the channel's thread."""

    def __init__(self, channel: Channel, sock: socket.socket, *, outbound: bool) -> None:
        self.outbound = outbound
        self.greeted = False
        self.lost = ""
        self.gone = False
        """The other side ended it, so its agent or process is no more; else we gave it up."""
        self.local = sock.family == socket.AF_UNIX
        self.ends_s = time.monotonic() + GREETING_S
        self._channel = channel
        self._socket = sock
        self._inbox = bytearray()
        self._outbox = bytearray()
        self._lock = threading.Lock()
        self._connected = not outbound
        self._paused = False

    @property
    def peer_pid(self) -> int:
        """The process at the other end of a Unix socket."""
        return _credentials(self._socket)[0]

    def send(self, message: Any, descriptor: int | None = None) -> bool:
        """Give a message on its way; False if the peer is lost or has not read for too long.

        A file `descriptor` may go along with the first message of a Unix socket.
        """
        frame = self._channel.wire.encode(message)
        with self._lock:
            if not self.lost and len(self._outbox) + len(frame) > OUTBOX_BYTES_MAX:
                self.lost = "the peer does not read"
                self._channel.wake()
            if self.lost:
                return False
            if descriptor is not None:
                assert not self._outbox, "a descriptor goes with a connection's first message"
                try:
                    sent = socket.send_fds(self._socket, [frame], [descriptor])
                except OSError as error:  # the reading side will say what it was
                    log.debug("kvtier: cannot hand a descriptor over: %s", error)
                    return False
                frame = frame[sent:]
            self._outbox += frame
            if self._connected and len(self._outbox) == len(frame):
                self._push_out()
            waiting = bool(self._outbox)
        if waiting:
            self._channel.wake()
        return True

    def pause(self, paused: bool) -> None:
        """Whether to leave what comes in the socket, so that the peer feels it."""
        if paused != self._paused:
            self._paused = paused
            self._channel.wake()

    def _push_out(self) -> None:
        """Write what the socket takes; under the lock."""
        try:
            while self._outbox:
                sent = self._socket.send(self._outbox, socket.MSG_NOSIGNAL)
                del self._outbox[:sent]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:  # the reading side will say what it was
            self._outbox.clear()


class Handler(Protocol):
    """What the channel tells, on its own thread."""

    def on_message(self, connection: Connection, message: Any) -> None:
        """A message came. Raising `Broken` ends the connection."""

    def on_lost(self, connection: Connection, reason: str) -> None:
        """A connection ended, whoever ended it."""

    def on_tick(self) -> float:
        """Look after whatever is due; gives the seconds until the next time."""


class Channel:
    """Listens, connects, reads and writes, on one daemon thread."""

    def __init__(
        self, handler: Handler, wire: Wire, listeners: Sequence[socket.socket] = ()
    ) -> None:
        """Serve whoever connects to the `listeners`, which are the channel's from now on.

        Raises:
            OSError: the system has no descriptor left.
        """
        self.wire = wire
        self._handler = handler
        self._connections: dict[int, Connection] = {}
        self._listeners = {listener.fileno(): listener for listener in listeners}
        self._lock = threading.Lock()
        self._new: list[Connection] = []
        self._closing = False
        self._interest: dict[int, int] = {}
        self._edges: dict[int, bool] = {}
        with contextlib.ExitStack() as undo:
            for listener in listeners:
                undo.callback(listener.close)
            self._epoll = undo.enter_context(contextlib.closing(select.epoll()))
            self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            undo.callback(os.close, self._wake_fd)
            self._epoll.register(self._wake_fd, select.EPOLLIN)
            for fd in self._listeners:
                self._epoll.register(fd, select.EPOLLIN)
            undo.pop_all()
        self._thread = threading.Thread(target=self._run, name="kvtier-channel", daemon=True)

    def start(self) -> None:
        """Begin to serve; the handler must be ready."""
        self._thread.start()

    def connect(self, unix: str, tcp: str) -> Connection:
        """Begin a connection: `unix` if given, else `tcp`; the handler hears if it fails.

        `unix` is a path, or begins with a zero byte. What is sent meanwhile goes out once it stands.
        """
        family = socket.AF_UNIX if unix else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        connection = Connection(self, sock, outbound=True)
        try:
            if unix:
                sock.connect(unix)
            else:
                host, _, port = tcp.rpartition(":")
                if not _is_address(host) or not port.isdigit():
                    raise OSError(errno.EADDRNOTAVAIL, f"{tcp!r} is no address and port")
                _tune(sock)
                sock.connect((host, int(port)))
        except BlockingIOError:
            if unix:  # not on its way, as over TCP, but refused: the backlog is full
                connection.lost = "cannot connect: the peer is too busy"
        except (OSError, OverflowError) as error:
            connection.lost = f"cannot connect: {error}"
        with self._lock:
            self._new.append(connection)
        self.wake()
        return connection

    def drop(self, connection: Connection, reason: str) -> None:
        """End a connection; the handler hears of it."""
        connection.lost = connection.lost or reason
        self.wake()

    def watch(self, fd: int, watched: bool) -> None:
        """Whether each write to the eventfd `fd` makes a tick; it is left readable for others."""
        if self._edges.get(fd, False) != watched:
            self._edges[fd] = watched
            if watched:
                self._epoll.register(fd, select.EPOLLIN | select.EPOLLET)
            else:
                self._epoll.unregister(fd)

    def wake(self) -> None:
        """Have the thread look at once."""
        with self._lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """End all connections and the thread."""
        self._closing = True
        self.wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_STOP_S)

    # The thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                self._take_new()
                self._settle()
                left_s = self._handler.on_tick()
                for fd, events in self._epoll.poll(max(0.0, min(left_s, self._next_s()))):
                    if fd == self._wake_fd:
                        os.eventfd_read(fd)
                    elif fd in self._listeners:
                        self._accept(self._listeners[fd])
                    elif fd in self._connections:
                        self._serve(self._connections[fd], events)
        except (
            Exception
        ):  # outermost frame of the thread: peers are lost, transfers end by deadline
            log.exception("kvtier: the control channel failed")
        finally:
            self._end()

    def _next_s(self) -> float:
        waiting = [c.ends_s for c in self._connections.values() if not c.greeted]
        return min(waiting) - time.monotonic() if waiting else 3600.0

    def _take_new(self) -> None:
        with self._lock:
            new, self._new = self._new, []
        for connection in new:
            self._add(connection)

    def _add(self, connection: Connection) -> None:
        fd = connection._socket.fileno()
        self._connections[fd] = connection
        self._epoll.register(fd, 0)
        self._interest[fd] = 0

    def _settle(self) -> None:
        """Drop what is lost or overdue, and ask for what each connection waits for."""
        now_s = time.monotonic()
        for fd, connection in list(self._connections.items()):
            if not connection.greeted and now_s >= connection.ends_s and not connection.lost:
                connection.lost = f"no greeting within {GREETING_S:g} s"
            if connection.lost:
                self._remove(fd, connection)
                continue
            wanted = 0 if connection._paused else select.EPOLLIN
            if connection._outbox or not connection._connected:
                wanted |= select.EPOLLOUT
            if wanted != self._interest[fd]:
                self._epoll.modify(fd, wanted)
                self._interest[fd] = wanted

    def _remove(self, fd: int, connection: Connection) -> None:
        self._epoll.unregister(fd)
        del self._connections[fd], self._interest[fd]
        with connection._lock:
            with contextlib.suppress(OSError):
                connection._push_out()  # a last word, if it fits
            connection._socket.close()
        self._handler.on_lost(connection, connection.lost)

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError as error:  # gone again, or no descriptor left: the next one may do better
            log.warning("kvtier: cannot accept a peer: %s", error)
            time.sleep(0.01)  # descriptors are out: the listener stays readable, so do not spin
            return
        sock.setblocking(False)
        if len(self._connections) >= CONNECTIONS_MAX or not _is_own_user(sock):
            sock.close()
            return
        if sock.family != socket.AF_UNIX:
            _tune(sock)
        self._add(Connection(self, sock, outbound=False))

    def _serve(self, connection: Connection, events: int) -> None:
        if not connection._connected and events & (
            select.EPOLLOUT | select.EPOLLERR | select.EPOLLHUP
        ):
            code = connection._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                connection.lost = f"cannot connect: {os.strerror(code)}"
                return
            connection._connected = True
        if events & select.EPOLLOUT:
            with connection._lock:
                connection._push_out()
        if events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
            self._read(connection)

    def _read(self, connection: Connection) -> None:
        try:
            received = connection._socket.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            connection.gone = connection.gone or error.errno == errno.ECONNRESET
            connection.lost = connection.lost or f"connection lost: {error.strerror}"
            return
        if not received:
            connection.gone = True
            connection.lost = connection.lost or "the peer is gone"
            return
        inbox = connection._inbox
        inbox += received
        at = 0
        try:
            while len(inbox) - at >= 4 and not connection.lost:
                nbytes = int.from_bytes(inbox[at : at + 4], "little")
                if nbytes > self.wire.message_bytes_max:
                    raise ValueError(f"a message of {nbytes} bytes")
                if len(inbox) - at - 4 < nbytes:
                    break
                body = bytes(inbox[at + 4 : at + 4 + nbytes])
                at += 4 + nbytes
                self._handler.on_message(connection, self.wire.decode(body))
        except (ValueError, Broken) as error:
            connection.lost = connection.lost or f"the peer does not keep to the protocol: {error}"
        del inbox[:at]

    def _end(self) -> None:
        self._take_new()
        for fd, connection in list(self._connections.items()):
            connection.lost = connection.lost or "closed"
            with contextlib.suppress(OSError):
                self._remove(fd, connection)
        for listener in self._listeners.values():
            listener.close()
        self._epoll.close()
        with self._lock:  # a late wake must not reach whoever gets the number next
            os.close(self._wake_fd)
            self._wake_fd = -1


def abstract_listener() -> tuple[socket.socket, str]:
    """A Unix socket of a random name, and how to connect to it; a crash leaves nothing behind.

    Raises:
        OSError: the system has no descriptor left.
    """
    name = f"\0kvtier-{secrets.token_hex(16)}"
    return _listener(socket.AF_UNIX, name), name


def tcp_listener(listen: str) -> tuple[socket.socket, str]:
    """A socket at `listen` (``host:port``, of which the port may be 0), and where that is.

    Raises:
        ValueError: it is no address of one interface and a port.
        OSError: the address cannot be had.
    """
    host, _, port = listen.rpartition(":")
    if not _is_address(host) or not port.isdigit() or host == "0.0.0.0":
        raise ValueError(f"listen on {listen!r}: give the address peers use, and a port")
    sock = _listener(socket.AF_INET, (host, int(port)))
    return sock, f"{host}:{sock.getsockname()[1]}"


def path_listener(path: str) -> socket.socket:
    """A Unix socket at a path, for this user alone.

    Raises:
        OSError: it cannot be had there; somebody may be listening.
    """
    umask = os.umask(0o177)
    try:
        return _listener(socket.AF_UNIX, path)
    finally:
        os.umask(umask)


def _listener(family: socket.AddressFamily, address: str | tuple[str, int]) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        sock.bind(address)
        sock.listen(1024)
    except BaseException:
        sock.close()
        raise
    return sock


def _tune(sock: socket.socket) -> None:
    """Small messages at once, and a host that is switched off noticed within half a minute."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def _credentials(sock: socket.socket) -> tuple[int, int]:
    """Process and user at the other end of a Unix socket."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", credentials)
    return pid, uid


def _is_own_user(sock: socket.socket) -> bool:
    """An abstract socket has no mode: who connects must be of the same user. TCP has the token."""
    return sock.family != socket.AF_UNIX or _credentials(sock)[1] == os.getuid()


def _is_address(host: str) -> bool:
    """A name would be looked up, which may take long; agents write down addresses."""
    try:
        socket.inet_aton(host)
    except OSError:
        return False
    return True
