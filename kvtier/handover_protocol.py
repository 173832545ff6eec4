"""What the two sides of a hand-over say to each other, and how it may end.

msgpack, versioned, bounded; all of it may come from anywhere. An *offer* is one request's pages on
one decode rank, named by 16 random bytes, so that words about an older try of the same request
fall on no ears. Before its first byte a prefill rank claims the offer, and is told `Go`: from then
on until `Done`, `Quiet` or its death it may write, and the pages are not the engine's to reuse.
"""

from __future__ import annotations

import enum
import hashlib
import secrets
from dataclasses import dataclass
from typing import Annotated, TypeAlias, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from kvtier.errors import LayoutMismatch
from kvtier.geometry import PLANES_MAX, RANKS_MAX, Geometry, Shape, Shard
from kvtier.slices import PageIds

MAGIC = b"kvtier hand-over\x00\x01"  # the last byte is the version
TICKET_BYTES_MAX = 16 << 20
OFFER_BYTES = 16
REQUEST_CHARS_MAX = 512
PAGES_MAX = 1 << 20

_Offer = Annotated[bytes, Meta(min_length=OFFER_BYTES, max_length=OFFER_BYTES)]
_Name = Annotated[str, Meta(min_length=1, max_length=200)]
_Detail = Annotated[str, Meta(max_length=1000)]


class HandoverStatus(enum.Enum):
    """How a hand-over ended."""

    OK = "ok"
    """Every layer of every token is in the decode side's pages."""
    FAILED = "failed"
    """It never will be: recompute."""
    DEADLINE = "deadline"
    """It was not there in time: recompute."""
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class HandoverResult:
    """The end of a hand-over, as one side knows it."""

    status: HandoverStatus
    detail: str = ""

    @property
    def ok(self) -> bool:
        """Whether all KV arrived."""
        return self.status is HandoverStatus.OK


class Introduction(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A prefill rank, as decode ranks need to know it."""

    name: _Name
    metadata: Annotated[bytes, Meta(max_length=64 << 20)]
    shape: Shape


class Ticket(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a request's KV may be written: goes from a decode rank through the router."""

    request: Annotated[str, Meta(max_length=REQUEST_CHARS_MAX)]
    offer: _Offer
    target: _Name
    """Name of the decode rank's agent."""
    geometry: Geometry
    tokens: Annotated[int, Meta(ge=1, lt=2**31)]
    pages: Annotated[bytes, Meta(max_length=4 * PAGES_MAX)]
    """Little-endian uint32 page numbers."""
    sources: Annotated[tuple[tuple[_Name, Shard], ...], Meta(min_length=1, max_length=RANKS_MAX)]
    """All prefill ranks, in the order in which both sides plan."""


class Claim(msgspec.Struct, frozen=True, tag=1, array_like=True, forbid_unknown_fields=True):
    """Prefill: let me write where the ticket of this digest says."""

    offer: _Offer
    digest: _Offer


class Go(msgspec.Struct, frozen=True, tag=2, array_like=True, forbid_unknown_fields=True):
    """Decode: write."""

    offer: _Offer


class Stop(msgspec.Struct, frozen=True, tag=3, array_like=True, forbid_unknown_fields=True):
    """Decode: write no more, or do not begin; answered by `Quiet` if it was told to go."""

    offer: _Offer
    detail: _Detail


class LayerDone(msgspec.Struct, frozen=True, tag=4, array_like=True, forbid_unknown_fields=True):
    """Prefill: my part of this layer of the model is in place."""

    offer: _Offer
    layer: Annotated[int, Meta(ge=0, lt=PLANES_MAX)]


class Done(msgspec.Struct, frozen=True, tag=5, array_like=True, forbid_unknown_fields=True):
    """Prefill: all of my part is in place, and I write no more."""

    offer: _Offer


class Failed(msgspec.Struct, frozen=True, tag=6, array_like=True, forbid_unknown_fields=True):
    """Prefill: the rest will not come; writing may go on until `Quiet`."""

    offer: _Offer
    detail: _Detail


class Quiet(msgspec.Struct, frozen=True, tag=7, array_like=True, forbid_unknown_fields=True):
    """Prefill: nothing of mine writes any more."""

    offer: _Offer


Message: TypeAlias = Claim | Go | Stop | LayerDone | Done | Failed | Quiet
_T = TypeVar("_T", Introduction, Ticket)

_encoder = msgspec.msgpack.Encoder()
_messages = msgspec.msgpack.Decoder(Message)


def encode(value: Message | Introduction | Ticket) -> bytes:
    """Bytes for `decode_message` or `decode` on the other side."""
    return MAGIC + _encoder.encode(value)


def decode_message(payload: bytes) -> Message | None:
    """The message in a notification; None if it is about something else.

    Raises:
        ValueError: it is damaged.
    """
    if not payload.startswith(MAGIC):
        return None
    try:
        return _messages.decode(memoryview(payload)[len(MAGIC) :])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"damaged message: {error}") from error


def decode(payload: bytes, kind: type[_T]) -> _T:
    """A ticket or an introduction from bytes of anywhere.

    Raises:
        LayoutMismatch: it is none, of another version, or out of bounds.
    """
    if len(payload) > TICKET_BYTES_MAX or not payload.startswith(MAGIC):
        raise LayoutMismatch(f"{len(payload)} bytes that are no {kind.__name__.lower()}")
    try:
        return msgspec.msgpack.decode(memoryview(payload)[len(MAGIC) :], type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LayoutMismatch(f"damaged {kind.__name__.lower()}: {error}") from error


def digest(ticket: bytes) -> bytes:
    """Tells a ticket that was damaged on its way from the one that was given out."""
    return hashlib.sha256(ticket).digest()[:OFFER_BYTES]


def new_offer() -> bytes:
    """A name that nobody guesses."""
    return secrets.token_bytes(OFFER_BYTES)


def pack_pages(pages: PageIds) -> bytes:
    """Page numbers as a ticket carries them."""
    if len(pages) > PAGES_MAX:
        raise ValueError(f"{len(pages)} pages in one hand-over, at most {PAGES_MAX}")
    return pages.astype("<u4").tobytes()


def unpack_pages(packed: bytes) -> PageIds:
    """The page numbers of a ticket.

    Raises:
        LayoutMismatch: not whole numbers.
    """
    if len(packed) % 4:
        raise LayoutMismatch(f"{len(packed)} bytes of page numbers")
    return np.frombuffer(packed, "<u4").astype(np.int64)
