"""Transfers to peers by UCX: RDMA where there is a device for it, TCP, and copies between processes.

Peers on this host are reached by copies between processes, if the kernel lets us; peers with an
RDMA device in common by that; others by messages over TCP between the two engines. UCX is found when the process runs: what `KVTIER_UCX_LIBRARY` names, the system's, or that of the
``libucx`` packages, which are built without RDMA. The user's ``UCX_*`` environment variables win
over the settings given here.

What goes to peers (addresses and keys of memory) is UCX's own bytes, which its readers trust. So
they travel in an envelope that says what they are and that they are whole; anything else is
refused. That stops accidents, not attackers: who can send forged envelopes or reach UCX's ports is
trusted, as with any RDMA.
"""

from __future__ import annotations

import importlib.util
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from kvtier._core import (
    Completions,
    UcxEngine,
    UcxLink,
    UcxMemory,
    UcxPrepared,
    UcxRemote,
    xxh3_128,
)
from kvtier.copying import map_region
from kvtier.transfer import Op, Pieces, Reach, Route, Side, TransferBackend, Unsuitable
from kvtier.types import Region, RegionKind

SETTINGS: dict[str, str] = {
    "TCP_TX_SEG_SIZE": "1088K",  # a message in one piece; with the usual 8 KiB, a third of the speed
    "TCP_RX_SEG_SIZE": "1088K",
    "TCP_CONN_NB": "y",  # connecting to a peer that is gone must hold up nobody
    "WARN_INVALID_CONFIG": "n",
}
"""UCX settings, without ``UCX_``, unless the environment has them: what differs from UCX's own."""

_REACH = Reach(
    routes=frozenset({Route(RegionKind.DRAM, RegionKind.DRAM, peer=True)}),
    latency_s=1e-4,
    bytes_per_s=2e9,
)

_COPY_THREADS_MAX = 2  # one leaves half of the memory's speed unused, three gain little

_MAGIC = b"kvux"
_VERSION = 1
_HEAD = struct.Struct("<4sBBI")  # magic, version, kind, bytes of the body
_SUM_BYTES = 16
_BODY_BYTES_MAX = 64 << 10
_ADDRESS = struct.Struct("<IIQQ")  # UCX major and minor, segments sent and received
_EXPORT = struct.Struct("<QQ?")  # address, bytes, whether it may be written
_ADDRESS_KIND, _EXPORT_KIND = 1, 2
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


@dataclass(frozen=True, slots=True, eq=False)
class _Local:
    """A handle of this process's memory."""

    address: int
    nbytes: int
    is_writable: bool
    memory: UcxMemory


@dataclass(frozen=True, slots=True, eq=False)
class _Remote:
    """A handle of a peer's memory."""

    address: int
    nbytes: int
    is_writable: bool
    memory: UcxRemote


@dataclass(frozen=True, slots=True, eq=False)
class _Prepared:
    native: UcxPrepared
    kept: tuple[Any, ...]
    """The handles: what they stand for stays registered."""


class UcxTransfers(TransferBackend):
    """This process's memory to and from peers' memory, one-sided, on one native thread.

    `UCX_TLS` narrows the choice of transports. After a transfer that ran into its deadline or was
    cancelled, requests have a second to end; then the connection is taken down, which fails what
    else is on it with ECONNRESET, and the next transfer connects anew. A connection that failed by
    itself, or whose process ended, stays failed.

    Quiet speaks of this process's memory: what a write had sent before may still arrive at the
    peer.
    """

    name: ClassVar[str] = "ucx"

    def __init__(
        self,
        completions: Completions,
        *,
        rdma: Literal["auto", "required"] = "auto",
        settings: dict[str, str] | None = None,
        window_bytes: int = 8 << 20,
        window_requests: int = 128,
        request_bytes_max: int = 1 << 20,
        message_bytes_max: int = 1 << 20,
    ) -> None:
        """Load UCX and start its thread.

        `settings` add to `SETTINGS`. At most `window_bytes` and `window_requests` are in flight to
        one peer; longer pieces are cut to `request_bytes_max`, or `message_bytes_max` where UCX
        has to send messages.

        Raises:
            Unsuitable: UCX is not there, does not work here, or has no RDMA and that is required.
        """
        self._settings = SETTINGS | (settings or {})
        try:
            self._engine = UcxEngine(
                completions,
                _wheel_library(),
                list(self._settings.items()),
                may_copy_on_host=_may_copy_on_host(os.environ.get("UCX_TLS", "all")),
                copy_threads=min(_COPY_THREADS_MAX, len(os.sched_getaffinity(0))),
                window_bytes=window_bytes,
                window_requests=window_requests,
                request_bytes_max=request_bytes_max,
                message_bytes_max=message_bytes_max,
            )
        except RuntimeError as error:
            raise Unsuitable(str(error)) from error
        if rdma == "required" and not self._engine.has_rdma:
            reason = f"{self.describe()}: no RDMA device, or a UCX that was built without"
            self._engine.close()
            raise Unsuitable(reason)
        self._address = self._make_address()

    @property
    def reach(self) -> Reach:
        return _REACH

    @property
    def transports(self) -> list[str]:
        """What UCX can use here, as transport/device."""
        return self._engine.transports

    def describe(self) -> str:
        """Which UCX this is, and what it can use here."""
        engine = self._engine
        return f"UCX {engine.version} ({engine.library_path}) with {', '.join(engine.transports)}"

    def register(self, region: Region, source: Any) -> _Local:
        mapped = map_region(region, source)
        try:
            memory = self._engine.map(mapped.address, mapped.nbytes, mapped.is_writable)
            self._engine.pack(memory)  # what cannot be exported is not registered in truth
        except RuntimeError as error:
            raise Unsuitable(str(error)) from error
        return _Local(mapped.address, mapped.nbytes, mapped.is_writable, memory)

    def deregister(self, handle: _Local | _Remote) -> None:
        if isinstance(handle, _Local):
            self._engine.unmap(handle.memory)
        else:
            self._engine.forget_remote(handle.memory)

    def address(self) -> bytes:
        return self._address

    def export(self, handle: _Local) -> bytes:
        head = _EXPORT.pack(handle.address, handle.nbytes, handle.is_writable)
        return _seal(_EXPORT_KIND, head + self._engine.pack(handle.memory))

    def connect(self, address: bytes, host_pid: int | None) -> UcxLink:
        body = _open(_ADDRESS_KIND, address, _ADDRESS.size)
        major, minor, sent, received = _ADDRESS.unpack_from(body)
        self._check_peer(major, minor, sent, received)
        try:
            return self._engine.connect(body[_ADDRESS.size :], -1 if host_pid is None else host_pid)
        except (RuntimeError, OSError) as error:
            raise Unsuitable(str(error)) from error

    def import_region(self, link: UcxLink, region: Region, exported: bytes) -> _Remote:
        body = _open(_EXPORT_KIND, exported, _EXPORT.size)
        address, nbytes, is_writable = _EXPORT.unpack_from(body)
        if (address, nbytes) != (region.address, region.nbytes):
            raise Unsuitable(
                f"the key is of {nbytes} bytes at {address:#x}, "
                f"not of {region.nbytes} at {region.address:#x}"
            )
        try:
            memory = self._engine.import_remote(link, body[_EXPORT.size :])
        except RuntimeError as error:
            raise Unsuitable(str(error)) from error
        return _Remote(address, nbytes, is_writable, memory)

    def disconnect(self, link: UcxLink) -> None:
        self._engine.disconnect(link)

    def prepare(self, pieces: Pieces, link: UcxLink) -> _Prepared:
        target = pieces.local if pieces.op is Op.READ else pieces.remote
        for index in np.unique(target.which):
            if not target.handles[index].is_writable:
                raise Unsuitable(f"region {index} of the target is read-only")
        try:
            native = self._engine.prepare(
                pieces.op is Op.READ,
                link,
                [handle.memory for handle in pieces.local.handles],
                np.ascontiguousarray(pieces.local.which, np.uint32),
                _addresses(pieces.local),
                [handle.memory for handle in pieces.remote.handles],
                np.ascontiguousarray(pieces.remote.which, np.uint32),
                _addresses(pieces.remote),
                np.ascontiguousarray(pieces.lengths, np.uint64),
            )
        except (TypeError, ValueError) as error:
            raise Unsuitable(str(error)) from error
        return _Prepared(native, (*pieces.local.handles, *pieces.remote.handles))

    def start(self, prepared: _Prepared, ticket: int, deadline_s: float) -> None:
        self._engine.start(prepared.native, ticket, deadline_s)

    def cancel(self, ticket: int) -> None:
        self._engine.cancel(ticket)

    def progress(self, ticket: int) -> int:
        return self._engine.progress(ticket)

    def close(self) -> None:
        self._engine.close()

    def _make_address(self) -> bytes:
        major, minor, _ = (int(part) for part in self._engine.version.split("."))
        sent, received = (self._setting_bytes(f"TCP_{way}_SEG_SIZE") for way in ("TX", "RX"))
        head = _ADDRESS.pack(major, minor, sent, received)
        return _seal(_ADDRESS_KIND, head + self._engine.address())

    def _setting_bytes(self, name: str) -> int:
        """The setting in force, in bytes; 0 where it is not a plain size."""
        text = os.environ.get(f"UCX_{name}", self._settings[name]).lower().removesuffix("b")
        number = text.rstrip("kmg")
        unit = _UNITS.get(text[len(number) :])
        return int(number) * unit if unit is not None and number.isdecimal() else 0

    def _check_peer(self, major: int, minor: int, sent: int, received: int) -> None:
        """UCX does not check these itself: a message too long for its receiver hangs or breaks it."""
        ours = self._engine.version
        if f"{major}.{minor}" != ".".join(ours.split(".")[:2]):
            raise Unsuitable(f"the peer has UCX {major}.{minor}, this process {ours}")
        own_sent, own_received = (
            self._setting_bytes(f"TCP_{way}_SEG_SIZE") for way in ("TX", "RX")
        )
        if own_sent > received or sent > own_received:
            raise Unsuitable(
                f"TCP segments sent and received: the peer's of {sent} and {received} bytes do "
                f"not fit this process's of {own_sent} and {own_received} (UCX_TCP_*_SEG_SIZE)"
            )


def _wheel_library() -> str:
    """The library of an installed ``libucx`` package; empty if there is none."""
    spec = importlib.util.find_spec("libucx")
    if spec is None or spec.origin is None:
        return ""
    path = Path(spec.origin).parent / "lib" / "libucp.so.0"
    return str(path) if path.exists() else ""


def _may_copy_on_host(allowed: str) -> bool:
    """Whether the user's `UCX_TLS` allows what is called cma there, and is done here without UCX."""
    names = {name.strip().lstrip("\\") for name in allowed.removeprefix("^").split(",")}
    return bool(names & {"all", "shm", "sm", "cma"}) != allowed.startswith("^")


def _addresses(side: Side) -> npt.NDArray[np.uint64]:
    starts = np.array([handle.address for handle in side.handles], np.uint64)
    return starts[side.which] + side.offsets


def _seal(kind: int, body: bytes) -> bytes:
    if len(body) > _BODY_BYTES_MAX:
        raise Unsuitable(f"UCX gives {len(body)} bytes for a peer, at most {_BODY_BYTES_MAX}")
    envelope = _HEAD.pack(_MAGIC, _VERSION, kind, len(body)) + body
    return envelope + xxh3_128(envelope)


def _open(kind: int, envelope: bytes, least: int) -> bytes:
    """The body of what `_seal` made of it, at least `least` bytes and more."""
    if (
        not _HEAD.size + least + _SUM_BYTES
        < len(envelope)
        <= (_HEAD.size + _BODY_BYTES_MAX + _SUM_BYTES)
    ):
        raise Unsuitable(f"{len(envelope)} bytes are nothing that a peer's UCX backend gives")
    magic, version, its_kind, length = _HEAD.unpack_from(envelope)
    if (magic, version, its_kind) != (_MAGIC, _VERSION, kind):
        raise Unsuitable("not what a peer's UCX backend gives, or of another version")
    content, checksum = envelope[:-_SUM_BYTES], envelope[-_SUM_BYTES:]
    if length != len(content) - _HEAD.size or xxh3_128(content) != checksum:
        raise Unsuitable("what the peer's UCX backend gave is damaged")
    return content[_HEAD.size :]
