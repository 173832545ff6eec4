"""Requests to one bucket over kept connections, each of them bounded in time.

A body goes from the socket into the caller's memory and from there to the socket, without a copy in
between. What passes (a lost connection, 500, 503) is tried again until the request's time is over; an
answer that came whole is given back as it is, for `s3_objects` to read.
"""

from __future__ import annotations

import http.client
import io
import queue
import random
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import unescape
from typing import TypeVar

from kvtier.backends.s3_place import Place
from kvtier.errors import BackendUnavailable, Closed
from kvtier.transfer import Stop

T = TypeVar("T")

BODY_BYTES_MAX = 16 << 20  # of an answer that is read as text; 1000 names take less than 1 MiB
_SEND_BYTES = 4 << 20  # between two looks at the clock
_WAKE_BYTES = 512 << 10  # so much comes before the kernel wakes a reader: saves a third of its time
_LOOK_S = 0.5  # how soon a wait notices that it should end
_IDLE_S = 20.0  # a connection that rested longer is not used again: servers close them about then
_BACKOFF_S, _BACKOFF_S_MAX = 0.05, 2.0
_SLOW_DOWN_S = 0.5  # first wait after being told to slow down
_CLOSE_S = 2.0

_PASSING = {408, 429, 500, 502, 503, 504}
_PASSING_CODES = {
    "ConditionalRequestConflict",  # somebody writes the same object now: ask again who won
    "InternalError",
    "OperationAborted",
    "RequestTimeout",
}
_SLOW_CODES = {"SlowDown", "RequestLimitExceeded", "Throttling", "ThrottlingException"}
_CODE = re.compile(rb"<Code>([^<]{1,200})</Code>")
_MESSAGE = re.compile(rb"<Message>([^<]{1,300})</Message>")


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked; `body` is sent as it lies in memory, `targets` are filled one after another."""

    method: str
    name: str
    """The object's whole name; empty for the bucket."""
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Sequence[memoryview] = ()
    targets: Sequence[memoryview] = ()


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer that came whole, or why none did."""

    status: int
    """As HTTP has it; 0 if no answer came."""
    headers: Mapping[str, str]
    """Names in lower case."""
    filled: int = 0
    """Bytes of the targets."""
    body: bytes = b""
    code: str = ""
    """The server's name for the fault."""
    detail: str = ""
    passing: bool = False
    """The same request may succeed later."""


class Client:
    """Connections, retries and threads for one bucket. Any thread; close it when done."""

    def __init__(self, place: Place, concurrency: int, name: str = "s3") -> None:
        self.place = place
        self.workers = Workers(name, concurrency)
        self._gate = Gate(concurrency)
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._idle: list[tuple[float, socket.socket]] = []
        self._tls: ssl.SSLContext | None = None
        if place.is_tls:
            self._tls = ssl.create_default_context(cafile=place.ca_file)

    @property
    def concurrency(self) -> float:
        """Requests that may be under way now; less than asked for while the server is overloaded."""
        return self._gate.limit

    def request(self, request: Request, stop: Stop) -> Reply:
        """Ask until an answer came or `stop` says that time is over; never raises for a fault."""
        attempt = 0
        reply = Reply(0, {}, detail="no time was left", passing=True)
        while not self._is_over(stop):
            if not self._gate.enter(stop):
                break
            try:
                reply = self._try(request, stop)
            finally:
                self._gate.leave()
            if not reply.passing:
                self._gate.went_well()
                return reply
            is_slow = reply.status in (429, 503) or reply.code in _SLOW_CODES
            if is_slow:
                self._gate.shrink()
            pause_s = _pause_s(reply, attempt, is_slow)
            if pause_s >= stop.left_s() or stop.wait(pause_s):
                break
            attempt += 1
        if self._closing.is_set():
            return Reply(0, {}, detail="closed", passing=True)
        return reply

    def close(self) -> None:
        """End what is under way, then release connections and threads; again, it does nothing."""
        self._closing.set()
        with self._lock:
            idle, self._idle = self._idle, []
        for _, connection in idle:
            connection.close()
        self.workers.close(_CLOSE_S)

    def _is_over(self, stop: Stop) -> bool:
        return stop.is_set() or self._closing.is_set()

    def _try(self, request: Request, stop: Stop) -> Reply:
        path = self.place.path(request.name, request.query)
        length = sum(part.nbytes for part in request.body)
        try:
            signed = self.place.sign(request.method, path, request.headers)
        except BackendUnavailable as error:
            return Reply(0, {}, detail=str(error), passing=True)
        lines = [f"{request.method} {path} HTTP/1.1", f"Host: {self.place.host}"]
        if length or request.method in ("PUT", "POST"):
            lines.append(f"Content-Length: {length}")
        lines.append("Accept-Encoding: identity")
        lines += [f"{name}: {value}" for name, value in signed.items()]
        head = memoryview("\r\n".join([*lines, "", ""]).encode("latin-1"))
        # Half of the time, so that one silent connection leaves some for a second try; a store is
        # not begun twice while its server may still be at it.
        is_read = request.method in ("GET", "HEAD")
        silence_s = max(0.0, stop.left_s() / 2) if is_read else float("inf")
        while True:
            connection = self._take_idle()
            is_used = connection is not None
            exchange: _Exchange | None = None
            try:
                connection = connection or self._connect(min(stop.left_s(), silence_s))
                exchange = _Exchange(
                    _Wire(connection, lambda: self._is_over(stop), stop, silence_s)
                )
                reply = exchange.run(request, [head, *request.body])
            except ssl.SSLCertVerificationError as error:
                return Reply(0, {}, detail=_reason(error))
            except (OSError, http.client.HTTPException) as error:
                if connection is not None:
                    connection.close()
                is_stale = is_used and exchange is not None and not exchange.heard
                if is_stale and not isinstance(error, TimeoutError):
                    continue  # the server had closed it while it rested
                return Reply(0, {}, detail=_reason(error), passing=True)
            except BaseException:
                if connection is not None:
                    connection.close()
                raise
            self._give_back(connection, exchange.can_go_on)
            return reply

    def _connect(self, timeout_s: float) -> socket.socket:
        connection = socket.create_connection(self.place.address, max(0.001, timeout_s))
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                host = self.place.address[0]
                connection = self._tls.wrap_socket(connection, server_hostname=host)
        except BaseException:
            connection.close()
            raise
        return connection

    def _take_idle(self) -> socket.socket | None:
        stale: list[socket.socket] = []
        found = None
        with self._lock:
            while self._idle and found is None:
                since_s, connection = self._idle.pop()
                if time.monotonic() - since_s > _IDLE_S:
                    stale.append(connection)
                else:
                    found = connection
        for connection in stale:
            connection.close()
        return found

    def _give_back(self, connection: socket.socket, can_go_on: bool) -> None:
        with self._lock:
            if can_go_on and not self._closing.is_set():
                self._idle.append((time.monotonic(), connection))
                return
        connection.close()


class _Exchange:
    """One request and its answer on one connection."""

    def __init__(self, wire: _Wire) -> None:
        self._wire = wire
        self.can_go_on = False
        """Whether the connection is at the start of a new exchange."""

    @property
    def heard(self) -> bool:
        """Whether anything came back."""
        return self._wire.heard

    def run(self, request: Request, parts: Sequence[memoryview]) -> Reply:
        try:
            for part in parts:
                self._wire.send(part)
            was_sent = True
        except (BrokenPipeError, ConnectionResetError):
            was_sent = False  # a server that refuses says so before the body is through
        # HTTPResponse only ever calls `makefile`.
        response = http.client.HTTPResponse(self._wire, method=request.method)  # type: ignore[arg-type]
        try:
            response.begin()
            headers = {name.lower(): value for name, value in response.getheaders()}
            if request.targets and response.status in (200, 206):
                return self._fill(response, headers, request.targets)
            body = response.read(BODY_BYTES_MAX)
            if response.length:
                detail = f"an answer of {len(body) + response.length} bytes ended after {len(body)}"
                return Reply(0, {}, detail=detail, passing=True)
            self.can_go_on = was_sent and response.isclosed() and not response.will_close
            return _read_reply(response, headers, body)
        finally:
            response.close()

    def _fill(
        self,
        response: http.client.HTTPResponse,
        headers: Mapping[str, str],
        targets: Sequence[memoryview],
    ) -> Reply:
        promised = response.length
        if promised is None:
            return Reply(0, {}, detail="an answer without a length", passing=True)
        filled = 0
        for target in targets:
            wanted = min(promised - filled, target.nbytes)
            count = response.readinto(target[:wanted]) if wanted else 0
            filled += count
            if count < wanted:
                detail = f"the body ended after {filled} of {promised} bytes"
                return Reply(0, {}, detail=detail, passing=True)
        self.can_go_on = filled == promised and not response.will_close
        return Reply(response.status, headers, filled)


class _Wire(io.RawIOBase):
    """A socket whose every wait is bounded by one deadline, however slowly bytes trickle."""

    def __init__(
        self,
        connection: socket.socket,
        is_over: Callable[[], bool],
        stop: Stop,
        silence_s_max: float,
    ) -> None:
        super().__init__()
        self._socket = connection
        self._is_over = is_over
        self._stop = stop
        self._silence_s_max = silence_s_max
        # 0: whatever the exchange before this one left.
        self._wake_bytes: int | None = None if isinstance(connection, ssl.SSLSocket) else 0
        self.heard = False

    def makefile(self, mode: str) -> io.BufferedReader:
        """As `HTTPResponse` wants it."""
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        silent_since_s = time.monotonic()
        while True:
            self._set_timeout()
            self._set_wake_bytes(len(buffer))
            try:
                count = self._socket.recv_into(buffer)
            except TimeoutError:
                if time.monotonic() - silent_since_s < self._silence_s_max:
                    continue
                raise
            self.heard = self.heard or count > 0
            return count

    def send(self, part: memoryview) -> None:
        """Send all of it."""
        part = part.cast("B") if part.nbytes else part
        at = 0
        while at < part.nbytes:
            self._set_timeout()
            try:
                at += self._socket.send(part[at : at + _SEND_BYTES])
            except TimeoutError:
                continue

    def _set_wake_bytes(self, wanted: int) -> None:
        """Be woken for many bytes at a time, but never for more than will come.

        What TLS lies in between is cut otherwise than what is wanted of it, so it is left alone.
        """
        wake_bytes = min(wanted, _WAKE_BYTES) if wanted > io.DEFAULT_BUFFER_SIZE else 1
        if self._wake_bytes not in (None, wake_bytes):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wake_bytes)
            self._wake_bytes = wake_bytes

    def _set_timeout(self) -> None:
        if self._is_over():
            raise TimeoutError("no answer in time")
        self._socket.settimeout(max(0.001, min(_LOOK_S, self._stop.left_s())))


class Gate:
    """How many requests may be under way: fewer after an overload, slowly more again."""

    def __init__(self, limit: int) -> None:
        self._most = limit
        self._limit = float(limit)
        self._inside = 0
        self._shrunk_s = float("-inf")
        self._changed = threading.Condition()

    @property
    def limit(self) -> float:
        """At this time."""
        return self._limit

    def enter(self, stop: Stop) -> bool:
        """Wait for a place; False when time is over first."""
        with self._changed:
            while self._inside >= int(self._limit):
                if stop.is_set():
                    return False
                self._changed.wait(max(0.0, min(_LOOK_S, stop.left_s())))
            self._inside += 1
            return True

    def leave(self) -> None:
        """Make way for the next one."""
        with self._changed:
            self._inside -= 1
            self._changed.notify()

    def shrink(self) -> None:
        """The server has too much to do; halves the limit once for all that hear of it together."""
        with self._changed:
            now_s = time.monotonic()
            if now_s - self._shrunk_s >= _SLOW_DOWN_S:
                self._shrunk_s = now_s
                self._limit = max(1.0, self._limit / 2)

    def went_well(self) -> None:
        """One more after as many good answers as may be under way, as TCP grows its window."""
        if self._limit < self._most:
            with self._changed:
                self._limit = min(float(self._most), self._limit + 1 / self._limit)
                self._changed.notify()


class Workers:
    """Threads for requests that wait at the same time; started when first needed, daemons."""

    def __init__(self, name: str, count: int) -> None:
        self.count = count
        self._name = name
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._closed = False

    def run(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """Results of all jobs, in order; the calling thread does one that comes alone.

        Jobs must not call this. What a job raises is raised here once all have ended.
        """
        if len(jobs) <= 1:
            return [job() for job in jobs]
        group = _Group(jobs)
        with self._lock:
            if self._closed:
                raise Closed("the client is closed")
            while len(self._threads) < min(self.count, len(jobs)):
                name = f"kvtier-{self._name}-{len(self._threads)}"
                thread = threading.Thread(target=self._work, name=name, daemon=True)
                thread.start()
                self._threads.append(thread)
            for number in range(len(jobs)):
                self._queue.put(lambda number=number: group.do(number))  # type: ignore[misc]
        return group.wait()

    def close(self, timeout_s: float) -> None:
        """End the threads once they have done what is queued; one that is stuck is left behind."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for _ in self._threads:
                self._queue.put(None)
        ends_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, ends_s - time.monotonic()))

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            job()
            del job  # else it keeps its caller's memory until the next one comes


class _Group:
    """Jobs of one `run`."""

    def __init__(self, jobs: Sequence[Callable[[], object]]) -> None:
        self._jobs = jobs
        self._results: list[object] = [None] * len(jobs)
        self._error: BaseException | None = None
        self._left = len(jobs)
        self._lock = threading.Lock()
        self._done = threading.Event()

    def do(self, number: int) -> None:
        try:
            self._results[number] = self._jobs[number]()
        except BaseException as error:  # noqa: BLE001 - raised again by `wait`
            self._error = error
        with self._lock:
            self._left -= 1
            if self._left == 0:
                self._done.set()

    def wait(self) -> list[T]:
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._results  # type: ignore[return-value]


def _read_reply(
    response: http.client.HTTPResponse, headers: Mapping[str, str], body: bytes
) -> Reply:
    status = response.status
    code, detail = "", ""
    # An upload that fails at its end does so with 200, behind the blanks that kept it waiting.
    if status >= 300 or b"<Error>" in body.lstrip()[:200]:
        found, message = _CODE.search(body), _MESSAGE.search(body)
        code = unescape(found[1].decode(errors="replace")) if found else ""
        said = unescape(message[1].decode(errors="replace")) if message else ""
        detail = f"{status} {code or response.reason}{f': {said}' if said else ''}"
    is_passing = status in _PASSING or code in _PASSING_CODES or code in _SLOW_CODES
    return Reply(status, headers, body=body, code=code, detail=detail, passing=is_passing)


def _pause_s(reply: Reply, attempt: int, is_slow: bool) -> float:
    """Full jitter: clients that failed together do not come back together."""
    first_s = _SLOW_DOWN_S if is_slow else _BACKOFF_S
    pause_s = random.uniform(0, min(_BACKOFF_S_MAX, first_s * 2**attempt))
    wanted = reply.headers.get("retry-after", "")
    return max(pause_s, float(wanted)) if wanted.isdigit() else pause_s


def _reason(error: Exception) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
