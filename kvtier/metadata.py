"""What agents say to each other, as bytes: metadata to connect by, and messages between peers.

msgpack, versioned, bounded. Everything here may come from anywhere, so nothing is trusted before
`decode_metadata` or `decode_message` has looked at it; both raise ValueError and nothing else.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from kvtier.types import RegionKind

MAGIC = b"kvtier agent\x00"
VERSION = 1
METADATA_BYTES_MAX = 64 << 20
MESSAGE_BYTES_MAX = 1 << 20
PAYLOAD_BYTES_MAX = 256 << 10
REGIONS_MAX = 1 << 16
ID_BYTES = 16

_Id = Annotated[bytes, Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
_Name = Annotated[str, Meta(min_length=1, max_length=200)]
_Word = Annotated[str, Meta(max_length=200)]
_Blob = Annotated[bytes, Meta(max_length=1 << 20)]
# msgpack's integers reach 2^64 - 1, msgspec's bounds only 2^63 - 1: of addresses the sum is checked.
_Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class RegionEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One region, as others may reach it."""

    number: Annotated[int, Meta(ge=0, lt=1 << 32)]
    kind: RegionKind
    address: _Number
    nbytes: Annotated[int, Meta(ge=1, le=(1 << 62))]
    device: Annotated[int, Meta(ge=0, lt=1 << 16)]
    exports: dict[_Word, _Blob]
    """By backend: what it needs to reach the region."""


class Metadata(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An agent at one moment: who it is, where it listens, which regions it has."""

    name: _Name
    agent: _Id
    """Random, of this run of the agent: a restarted one has another."""
    generation: _Number
    """Counts changes of its regions: of two, the higher is the newer."""
    token: _Id
    """Who shows it was given the metadata."""
    host: _Id
    pid: Annotated[int, Meta(ge=1, lt=1 << 31)]
    unix: _Word
    """Abstract Unix socket of the control channel."""
    tcp: _Word
    """``host:port`` of it; empty if it listens on this host only."""
    backends: dict[_Word, _Blob]
    regions: Annotated[list[RegionEntry], Meta(max_length=REGIONS_MAX)]


def encode_metadata(metadata: Metadata) -> bytes:
    """Bytes for `decode_metadata` on another machine."""
    return MAGIC + bytes([VERSION]) + msgspec.msgpack.encode(metadata)


def decode_metadata(data: bytes) -> Metadata:
    """The metadata in bytes from anywhere.

    Raises:
        ValueError: they are not metadata, of another version, or out of bounds.
    """
    if len(data) > METADATA_BYTES_MAX:
        raise ValueError(f"metadata of {len(data)} bytes, at most {METADATA_BYTES_MAX}")
    if data[: len(MAGIC)] != MAGIC:
        raise ValueError("not the metadata of a kvtier agent")
    version = data[len(MAGIC) : len(MAGIC) + 1]
    if version != bytes([VERSION]):
        raise ValueError(f"metadata of version {version.hex()}, this is version {VERSION:02x}")
    try:
        metadata = msgspec.msgpack.decode(data[len(MAGIC) + 1 :], type=Metadata)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"damaged metadata: {error}") from error
    numbers = {region.number for region in metadata.regions}
    if len(numbers) != len(metadata.regions):
        raise ValueError("damaged metadata: two regions of one number")
    for region in metadata.regions:
        if region.address + region.nbytes > 1 << 63:
            raise ValueError(f"damaged metadata: region {region.number} reaches past all memory")
    return metadata


def check_payload(payload: bytes) -> None:
    """Refuse a notification that is too long.

    Raises:
        ValueError: it is.
    """
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise ValueError(f"a notification of {len(payload)} bytes, at most {PAYLOAD_BYTES_MAX}")


class Hello(msgspec.Struct, frozen=True, tag=1, array_like=True, forbid_unknown_fields=True):
    """First word of who connects: who it is, and whom by what token it means to reach."""

    name: _Name
    agent: _Id
    target: _Id
    token: _Id


class Welcome(msgspec.Struct, frozen=True, tag=2, array_like=True, forbid_unknown_fields=True):
    """Answer to `Hello`: these regions still stand."""

    regions: Annotated[list[_Number], Meta(max_length=REGIONS_MAX)]


class Refused(msgspec.Struct, frozen=True, tag=3, array_like=True, forbid_unknown_fields=True):
    """Answer to `Hello`: go away, and why; the connection ends."""

    reason: Annotated[str, Meta(max_length=1000)]


class Notify(msgspec.Struct, frozen=True, tag=4, array_like=True, forbid_unknown_fields=True):
    """Bytes for the application: of a transfer that ended, or of their own."""

    payload: Annotated[bytes, Meta(max_length=PAYLOAD_BYTES_MAX)]
    failure: Annotated[str, Meta(max_length=1000)]
    """Why the transfer that should have brought them failed; empty if it did not."""


class Withdraw(msgspec.Struct, frozen=True, tag=5, array_like=True, forbid_unknown_fields=True):
    """The sender's region is to go: begin nothing on it, and say when nothing runs on it."""

    region: _Number


class Withdrawn(msgspec.Struct, frozen=True, tag=6, array_like=True, forbid_unknown_fields=True):
    """Answer to `Withdraw`: nothing of ours touches the region any more."""

    region: _Number


Message: TypeAlias = Hello | Welcome | Refused | Notify | Withdraw | Withdrawn

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode_message(message: Message) -> bytes:
    """One frame: its length in 4 bytes, little-endian, then the message."""
    body = _encoder.encode(message)
    if len(body) > MESSAGE_BYTES_MAX:
        raise ValueError(f"a message of {len(body)} bytes, at most {MESSAGE_BYTES_MAX}")
    return len(body).to_bytes(4, "little") + body


def decode_message(body: bytes | memoryview) -> Message:
    """The message in one frame's body.

    Raises:
        ValueError: it is none, or out of bounds.
    """
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"damaged message: {error}") from error


def this_host() -> bytes:
    """16 bytes that two processes share exactly if they can reach each other by process id."""
    parts = [_text("/proc/sys/kernel/random/boot_id"), str(os.getuid())]
    for space in ("pid", "user"):
        try:
            parts.append(os.readlink(f"/proc/self/ns/{space}"))
        except OSError:
            parts.append("")
    return hashlib.sha256("|".join(parts).encode()).digest()[:ID_BYTES]


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
