"""An HTTP proxy on loopback that spoils answers on command: what object storage is tested through.

with FaultProxy(server.port) as proxy:
    proxy.inject(Fault.TRUNCATED, count=2)
    backend = S3Backend(S3Options(url=url, endpoint=proxy.endpoint))
"""

from __future__ import annotations

import contextlib
import enum
import http.client
import io
import socket
import ssl
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

_TRICKLE_S = 0.05
_HANG_S_MAX = 60.0  # a hanging answer ends by itself, and the test fails on its own words
_NO_LINGER = struct.pack("ii", 1, 0)  # close sends RST, not FIN

Wanted = Callable[[str, str], bool]
"""(method, path with query) -> whether a fault strikes this request."""


class Fault(enum.Enum):
    """What becomes of a request."""

    ERROR = "error"
    """500 in place of the answer; the server never hears of it."""
    SLOW_DOWN = "slow down"
    """503 SlowDown; the server never hears of it."""
    TRUNCATED = "truncated"
    """Half of the answer's body, then the end of the connection."""
    TRICKLE = "trickle"
    """Half of the answer's body, then a byte now and then."""
    TRICKLED_HEAD = "trickled head"
    """The answer's head, a byte now and then."""
    RESET = "reset"
    """The connection is reset; the server never hears of it."""
    RESET_IN_BODY = "reset in body"
    """Half of the answer's body, then a reset."""
    LOST = "lost"
    """The server does it; its answer is lost in a reset."""
    HANG = "hang"
    """The request is read, and nothing comes back."""
    GARBLED = "garbled"
    """The answer's body with one bit flipped."""


@dataclass(slots=True)
class _Rule:
    fault: Fault
    left: int | None
    wanted: Wanted
    headers: dict[str, str]


@dataclass(slots=True)
class _Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass(slots=True)
class _Answer:
    status: int
    reason: str
    headers: dict[str, str]
    body: bytes
    length: int = field(default=-1)  # that of the body unless it is told otherwise: HEAD

    def head(self) -> bytes:
        lines = [f"HTTP/1.1 {self.status} {self.reason}"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        length = self.length if self.length >= 0 else len(self.body)
        if self.status != 204:
            lines.append(f"Content-Length: {length}")
        return "\r\n".join([*lines, "", ""]).encode("latin-1")


class FaultProxy:
    """Stands before a server on loopback; a thread a connection, all ended by `close`."""

    def __init__(self, server_port: int, tls: ssl.SSLContext | None = None) -> None:
        self._server_port = server_port
        self._tls = tls
        self._lock = threading.Lock()
        self._rules: list[_Rule] = []
        self._closing = threading.Event()
        self._connections: set[socket.socket] = set()
        self.requests: list[tuple[str, str]] = []
        """(method, path) of every request so far."""
        self.requests_at_once_max = 0
        """Most requests that were here at the same time since `heal`."""
        self._inside = 0
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._threads: set[threading.Thread] = set()
        self._acceptor = threading.Thread(target=self._accept, name="fault-proxy", daemon=True)
        self._acceptor.start()

    @property
    def port(self) -> int:
        """Where it listens."""
        port: int = self._listener.getsockname()[1]
        return port

    @property
    def endpoint(self) -> str:
        """What clients are given."""
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"

    def inject(
        self,
        fault: Fault,
        *,
        count: int | None = None,
        wanted: Wanted = lambda method, path: True,
        headers: dict[str, str] | None = None,
    ) -> None:
        """From now on `fault` strikes the requests that are `wanted`, `count` times.

        `headers` come with an answer that the proxy makes up.
        """
        with self._lock:
            self._rules.append(_Rule(fault, count, wanted, headers or {}))

    def heal(self) -> None:
        """No faults any more, and nothing counted yet."""
        with self._lock:
            self._rules.clear()
            self.requests.clear()
            self.requests_at_once_max = 0

    def close(self) -> None:
        """End all connections and threads."""
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._acceptor.join()
        with self._lock:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            threads = list(self._threads)
        for thread in threads:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            with self._lock:
                self._threads.add(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_side=True)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._connections.add(connection)
            with contextlib.closing(
                http.client.HTTPConnection("127.0.0.1", self._server_port, timeout=_HANG_S_MAX)
            ) as server:
                source = connection.makefile("rb")
                with source:
                    while not self._closing.is_set() and (request := _read_request(source)):
                        if not self._answer(connection, server, request):
                            return
        except (OSError, http.client.HTTPException):
            pass  # either side went away: so does this connection
        finally:
            connection.close()
            with self._lock:
                self._connections.discard(connection)
                self._threads.discard(threading.current_thread())

    def _answer(
        self, connection: socket.socket, server: http.client.HTTPConnection, request: _Request
    ) -> bool:
        """Whether the connection goes on."""
        with self._lock:
            self.requests.append((request.method, request.path))
            self._inside += 1
            self.requests_at_once_max = max(self.requests_at_once_max, self._inside)
            rule = self._draw(request)
        try:
            return self._spoil(connection, server, request, rule)
        finally:
            with self._lock:
                self._inside -= 1

    def _spoil(
        self,
        connection: socket.socket,
        server: http.client.HTTPConnection,
        request: _Request,
        rule: _Rule | None,
    ) -> bool:
        fault = rule.fault if rule is not None else None
        if fault is Fault.HANG:
            self._closing.wait(_HANG_S_MAX)
            return False
        if fault is Fault.RESET:
            return _reset(connection)
        if rule is not None and fault in (Fault.ERROR, Fault.SLOW_DOWN):
            answer = _made_up(fault, rule.headers, request.method)
            connection.sendall(answer.head() + answer.body)
            return True
        answer = _ask(server, request)
        if fault is Fault.LOST:
            return _reset(connection)
        if fault is Fault.GARBLED and answer.body:
            middle = len(answer.body) // 2
            flipped = bytes([answer.body[middle] ^ 1])
            answer.body = answer.body[:middle] + flipped + answer.body[middle + 1 :]
        head, half = answer.head(), len(answer.body) // 2
        if fault is Fault.TRICKLED_HEAD:
            return self._trickle(connection, head)
        connection.sendall(head)
        if fault in (Fault.TRUNCATED, Fault.TRICKLE, Fault.RESET_IN_BODY):
            connection.sendall(answer.body[:half])
            if fault is Fault.RESET_IN_BODY:
                return _reset(connection)
            return fault is Fault.TRICKLE and self._trickle(connection, answer.body[half:])
        connection.sendall(answer.body)
        return True

    def _trickle(self, connection: socket.socket, rest: bytes) -> bool:
        for byte in rest:
            if self._closing.wait(_TRICKLE_S):
                return False
            connection.sendall(bytes([byte]))
        return True

    def _draw(self, request: _Request) -> _Rule | None:
        for rule in self._rules:
            if rule.left != 0 and rule.wanted(request.method, request.path):
                if rule.left is not None:
                    rule.left -= 1
                return rule
        return None


def _read_request(source: io.BufferedReader) -> _Request | None:
    first = source.readline()
    if not first:
        return None
    method, path, _ = first.decode("latin-1").split(" ")
    headers: dict[str, str] = {}
    while (line := source.readline()) not in (b"\r\n", b""):
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip()] = value.strip()
    length = int({name.lower(): v for name, v in headers.items()}.get("content-length", "0"))
    return _Request(method, path, headers, source.read(length))


def _ask(server: http.client.HTTPConnection, request: _Request) -> _Answer:
    server.putrequest(request.method, request.path, skip_host=True, skip_accept_encoding=True)
    for name, value in request.headers.items():
        server.putheader(name, value)
    server.endheaders(request.body or None)
    response = server.getresponse()
    body = response.read()
    headers = {
        name: value
        for name, value in response.getheaders()
        if name.lower() not in ("content-length", "transfer-encoding", "connection")
    }
    answer = _Answer(response.status, response.reason, headers, body)
    if request.method == "HEAD":
        answer.length = int(response.getheader("content-length") or 0)
    return answer


def _made_up(fault: Fault, headers: dict[str, str], method: str) -> _Answer:
    status, reason, code = (
        (500, "Internal Server Error", "InternalError")
        if fault is Fault.ERROR
        else (503, "Service Unavailable", "SlowDown")
    )
    body = f"<Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
    return _Answer(status, reason, headers, b"" if method == "HEAD" else body, len(body))


def _reset(connection: socket.socket) -> bool:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    connection.close()
    return False
