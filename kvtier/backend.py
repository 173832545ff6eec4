"""The one statement of what a storage backend is.

Dependencies point here: the hierarchy and the agent call `Backend`, implementations under
`kvtier.backends` subclass it, and `kvtier.testing.backend_suite` checks them. A new backend adds
one module, one entry point in pyproject.toml and one ten-line test module, and nothing else.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import msgspec

from kvtier.types import ChunkKey, Descriptor, Outcome, Region

HEAD_BYTES = 192
"""How much of each record's start `Backend.scan` gives back: the manifest's fixed part."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an implementation can do; constant over its life."""

    persistent: bool
    """Chunks outlive `close()` and the process."""
    alignment: int = 1
    """Buffers at multiples of this many bytes avoid a bounce copy; others still work."""
    batch_max: int = 1024
    """Most keys in one call."""
    shared: bool = False
    """Others store here too, so what it holds is found by asking for keys, not by `scan`."""


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """One record that a backend holds, as `Backend.scan` reports it."""

    key: ChunkKey
    nbytes: int
    """Room the record takes in the place, the number that quotas count."""
    head: bytes
    """The record's first `HEAD_BYTES` bytes (fewer if it is shorter)."""


class BackendOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every backend's own options; sizes are bytes, already parsed."""


class Backend(abc.ABC):
    """A place that keeps records by key.

    Calls block, let go of the GIL while bytes move, and are safe from several threads at once;
    the agent supplies the threads. A call answers for every key in its batch, in order, and one
    key's fault never spoils another's. Faults of the place (no room, I/O error) are outcomes.
    A batch that is not well formed raises ValueError before anything is done: `check_batch` and
    `check_get` are the first lines of every method. After `close`, `scan` and whatever
    takes keys raise `Closed`.
    """

    Options: ClassVar[type[BackendOptions]] = BackendOptions

    @property
    @abc.abstractmethod
    def capabilities(self) -> Capabilities:
        """Constant description of this instance."""

    @abc.abstractmethod
    def put(self, keys: Sequence[ChunkKey], sources: Sequence[memoryview]) -> list[Outcome]:
        """Store `sources[i]` under `keys[i]`.

        All or nothing per key: a reader never sees a part-written record, also after a crash, and
        on a persistent backend OK means durable. Storing a key that is held is OK and leaves its
        bytes as they are, since a key names its content.

        Raises:
            ValueError: what `check_batch` says.
            Closed: after `close`.
        """

    @abc.abstractmethod
    def get(
        self, keys: Sequence[ChunkKey], targets: Sequence[memoryview], offset: int = 0
    ) -> list[Outcome]:
        """Fill `targets[i]` with the record under `keys[i]`, from byte `offset` of the record on.

        Reads as much as the target has room for; `Outcome.nbytes` says how much there was. A
        record shorter than asked is OK with fewer bytes, `MISSING` leaves the target untouched,
        any other fault may have overwritten a part of it.

        Raises:
            ValueError: what `check_get` says; no target is touched then.
            Closed: after `close`.
        """

    @abc.abstractmethod
    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Say for each key whether `get` would find it now."""

    @abc.abstractmethod
    def remove(self, keys: Sequence[ChunkKey]) -> list[Outcome]:
        """Forget the keys and give their room back; one that is absent is `MISSING`."""

    @abc.abstractmethod
    def scan(self) -> Iterator[StoredChunk]:
        """Every record held, oldest use first as far as the place knows; for rebuilding an index.

        A persistent backend has cleared away half-written and foreign files before this.
        """

    def quarantine(self, keys: Sequence[ChunkKey]) -> list[Outcome]:
        """Take damaged records out of service; a place may keep a bounded few for inspection.

        Quarantined records are not held: not in `contains`, not in `scan`, not in any quota; `get`
        finds them `MISSING`, and a later `put` stores the key anew. One that is absent is `MISSING`.
        """
        return self.remove(keys)

    def remember_use(self, keys: Sequence[ChunkKey]) -> None:  # noqa: B027 - optional hook
        """Note that these were used now, the last most recently; those not held are ignored.

        `scan` follows it, after a restart too. The default forgets; its suite then says
        `knows_use_order = False`, and eviction after a restart begins in any order.
        """

    def free_bytes(self) -> int | None:
        """Room left in the place for anybody, or None where that has no meaning."""
        return None

    def close(self) -> None:  # noqa: B027 - optional hook
        """Wait for calls in progress, then release handles and threads; again, it does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class AddressableBackend(Backend):
    """A backend whose records lie in memory and are filled and read in place.

    Store is *reserve, fill, commit*; load is *locate, read* under a lease that the index keeps.
    """

    @abc.abstractmethod
    def reserve(self, nbytes: int) -> Descriptor | None:
        """Room for one record, 4 KiB-aligned; None when there is no run of that size.

        The caller owns it until `commit` or `cancel`.
        """

    @abc.abstractmethod
    def commit(self, key: ChunkKey, record: Descriptor) -> bool:
        """Publish a filled reservation under `key`; False, and the room is freed, if `key` is held."""

    @abc.abstractmethod
    def cancel(self, record: Descriptor) -> None:
        """Give a reservation back unused."""

    @abc.abstractmethod
    def locate(self, keys: Sequence[ChunkKey]) -> list[Descriptor | None]:
        """Where each record lies; valid until the key is removed, so hold a lease meanwhile."""

    @abc.abstractmethod
    def view(self, record: Descriptor) -> memoryview:
        """The record's bytes, writable, without a copy."""

    @property
    @abc.abstractmethod
    def region(self) -> Region:
        """All of the memory that records lie in; the same until `close`."""

    @property
    @abc.abstractmethod
    def used_bytes(self) -> int:
        """Bytes of all records and reservations."""


def check_batch(
    limit: int, keys: Sequence[ChunkKey], buffers: Sequence[memoryview] | None = None
) -> None:
    """What every backend refuses in any batch; its first line.

    Raises:
        ValueError: more than `limit` keys, not as many buffers as keys, or a buffer with gaps.
    """
    if buffers is not None and len(keys) != len(buffers):
        raise ValueError(f"{len(keys)} keys for {len(buffers)} buffers")
    if len(keys) > limit:
        raise ValueError(f"{len(keys)} keys in one batch, at most {limit}")
    if buffers is not None and not all(buffer.c_contiguous for buffer in buffers):
        raise ValueError("a buffer must be contiguous")


def check_get(
    limit: int, keys: Sequence[ChunkKey], targets: Sequence[memoryview], offset: int
) -> None:
    """What every backend refuses in a `get`; its first line.

    Raises:
        ValueError: what `check_batch` says, a target that is read-only, or a negative offset.
    """
    check_batch(limit, keys, targets)
    if offset < 0:
        raise ValueError(f"offset of {offset} bytes, at least 0")
    if any(target.readonly for target in targets):
        raise ValueError("a target must be writable")
