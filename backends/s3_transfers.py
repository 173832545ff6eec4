"""Pieces between this process's memory and objects in S3 or any store that speaks its protocol.

A region is one object. Reads take any ranges of it; a store writes objects whole or not at all, so a
write must cover a region's object from its start without a gap.
"""

from __future__ import annotations

import ctypes
import errno
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvtier._core import Completions
from kvtier.backends.s3_client import Client
from kvtier.backends.s3_objects import Read, Write, head_many, read_many, write_many
from kvtier.backends.s3_place import Addressing, open_place, split_url
from kvtier.errors import BackendUnavailable, ConfigError
from kvtier.transfer import BlockingTransfers, Op, Pieces, Reach, Results, Route, Stop, Unsuitable
from kvtier.types import Outcome, Region, RegionKind, Status

_REACH = Reach(
    routes=frozenset({Route(RegionKind.DRAM, RegionKind.OBJ)}),
    piece_bytes_max=32 << 20,  # of a read: one request, several of them at a time
    durable=True,
    latency_s=0.01,
    bytes_per_s=1e9,
)
_CODES = {Status.MISSING: errno.ENOENT, Status.RETRY: errno.EAGAIN}


@dataclass(frozen=True, slots=True, eq=False)
class _Memory:
    view: memoryview


@dataclass(frozen=True, slots=True, eq=False)
class _Object:
    client: Client
    name: str


@dataclass(frozen=True, slots=True)
class _Reads:
    """Of one client; `pieces[i]` is the number of `reads[i]` in the transfer."""

    client: Client
    reads: list[Read]
    pieces: list[int]


@dataclass(frozen=True, slots=True)
class _Writes:
    """Of one client; all of `pieces[i]` become the object `writes[i]`."""

    client: Client
    writes: list[Write]
    pieces: list[list[int]]


@dataclass(frozen=True, slots=True)
class _Prepared:
    lengths: list[int]
    groups: list[_Reads] | list[_Writes]


class S3Transfers(BlockingTransfers):
    """Objects named by ``s3://bucket/name``; server and credentials as boto3 finds them.

    A write that is OK has replaced the whole object by its bytes.
    """

    name = "s3"
    threads: ClassVar[int] = 4

    def __init__(
        self,
        completions: Completions,
        *,
        endpoint: str = "",
        region: str = "",
        profile: str = "",
        addressing: Addressing = "auto",
        concurrency: int = 16,
    ) -> None:
        """Nothing is asked of the server yet; `concurrency` requests at a time go to each bucket.

        Raises:
            Unsuitable: boto3 is not installed.
        """
        try:
            import boto3  # noqa: F401 - its absence is to be told here and not at the first region
        except ImportError as error:
            raise Unsuitable("boto3 is not installed: pip install 'kvtier[s3]'") from error
        self._endpoint = endpoint
        self._region = region
        self._profile = profile
        self._addressing: Addressing = addressing
        self._concurrency = concurrency
        self._lock = threading.Lock()
        self._clients: dict[str, Client] = {}
        super().__init__(completions)

    @property
    def reach(self) -> Reach:
        return _REACH

    def object_bytes(self, url: str, timeout_s: float = 10.0) -> int | None:
        """How long the object is, None if there is none; for who registers it. Asks the server.

        Raises:
            OSError: the server does not say.
        """
        found = self._find(url)
        (outcome,) = head_many(
            found.client, [found.name], lambda: Stop(time.monotonic() + timeout_s)
        )
        if outcome.status is Status.MISSING:
            return None
        if not outcome.ok:
            raise OSError(f"{url}: {outcome.detail}")
        return outcome.nbytes

    def register(self, region: Region, source: Any) -> _Memory | _Object:
        if region.kind is RegionKind.DRAM:
            memory = (ctypes.c_char * region.nbytes).from_address(region.address)
            return _Memory(memoryview(memory).cast("B"))
        if region.kind is not RegionKind.OBJ:
            raise Unsuitable(f"s3 knows no regions of kind {region.kind.value}")
        if not isinstance(source, str):
            raise Unsuitable(f"an object is named by its URL, not by a {type(source).__name__}")
        return self._find(source)

    def deregister(self, handle: Any) -> None:
        pass  # clients stay: another object of the bucket comes soon

    def prepare(self, pieces: Pieces, link: Any) -> _Prepared:
        if link is not None:
            raise Unsuitable("s3 reaches no peers")
        local = [
            pieces.local.handles[which].view[offset : offset + length]
            for which, offset, length in zip(
                pieces.local.which.tolist(),
                pieces.local.offsets.tolist(),
                pieces.lengths.tolist(),
                strict=True,
            )
        ]
        remote = [pieces.remote.handles[which] for which in pieces.remote.which.tolist()]
        offsets: list[int] = pieces.remote.offsets.tolist()
        lengths: list[int] = pieces.lengths.tolist()
        if pieces.op is Op.WRITE:
            return _Prepared(lengths, _plan_writes(local, remote, offsets))
        reads: dict[Client, _Reads] = {}
        for number, (view, source, offset) in enumerate(zip(local, remote, offsets, strict=True)):
            group = reads.setdefault(source.client, _Reads(source.client, [], []))
            group.reads.append(Read(source.name, offset, view))
            group.pieces.append(number)
        return _Prepared(lengths, list(reads.values()))

    def piece_count(self, prepared: _Prepared) -> int:
        return len(prepared.lengths)

    def move(self, prepared: _Prepared, results: Results, stop: Stop) -> str:
        detail = ""
        for group in prepared.groups:
            if stop.is_set():
                break
            if isinstance(group, _Reads):
                outcomes = read_many(group.client, group.reads, lambda: stop)
                for piece, outcome in zip(group.pieces, outcomes, strict=True):
                    wanted = prepared.lengths[piece]
                    if outcome.ok and outcome.nbytes < wanted:
                        results[piece] = -errno.ENODATA
                        detail = detail or f"{outcome.nbytes} of {wanted} bytes are in the object"
                    else:
                        results[piece] = _result(outcome, wanted, stop)
                        detail = detail or outcome.detail
                continue
            outcomes = write_many(group.client, group.writes, lambda: stop, replacing=True)
            for members, outcome in zip(group.pieces, outcomes, strict=True):
                for piece in members:
                    results[piece] = _result(outcome, prepared.lengths[piece], stop)
                detail = detail or outcome.detail
        return detail

    def close(self) -> None:
        super().close()
        with self._lock:
            clients = list(self._clients.values())
        for client in clients:
            client.close()

    def _find(self, url: str) -> _Object:
        try:
            bucket, name = split_url(url)
            if not name:
                raise Unsuitable(f"{url} names a bucket and no object")
            with self._lock:
                client = self._clients.get(bucket)
                if client is None:
                    place = open_place(
                        bucket,
                        endpoint=self._endpoint,
                        region=self._region,
                        profile=self._profile,
                        addressing=self._addressing,
                    )
                    client = self._clients[bucket] = Client(place, self._concurrency, "s3-request")
        except (BackendUnavailable, ConfigError) as error:
            raise Unsuitable(str(error)) from error
        return _Object(client, name)


def _plan_writes(
    local: Sequence[memoryview], remote: Sequence[_Object], offsets: Sequence[int]
) -> list[_Writes]:
    members: dict[tuple[Client, str], list[int]] = {}
    for number, target in enumerate(remote):
        members.setdefault((target.client, target.name), []).append(number)
    groups: dict[Client, _Writes] = {}
    for (client, name), numbers in members.items():
        order = sorted(numbers, key=lambda number: offsets[number])
        at = 0
        for number in order:
            if offsets[number] != at:
                raise Unsuitable(
                    f"an object is written whole: of {name} bytes {at} to {offsets[number]} are not"
                )
            at += local[number].nbytes
        group = groups.setdefault(client, _Writes(client, [], []))
        group.writes.append(Write(name, [local[number] for number in order]))
        group.pieces.append(order)
    return list(groups.values())


def _result(outcome: Outcome, nbytes: int, stop: Stop) -> int:
    if outcome.ok:
        return nbytes
    if outcome.status is Status.RETRY and stop.left_s() <= 0:
        return -errno.ETIMEDOUT
    if outcome.status is Status.RETRY and stop.is_set():
        return -errno.ECANCELED
    return -_CODES.get(outcome.status, errno.EIO)
