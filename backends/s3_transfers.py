"""Pieces between this process's memory and objects in S3 or any store that speaks its protocol.

A region is one object. Reads take any ranges of it, neighbours by one request even where their
memory lies apart. A store writes objects whole or not at all, so what is written must cover an object
from its start without a gap.
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

_RUN_BYTES = 16 << 20  # of one request of a read; several are under way at a time
_LENGTH_S = 10.0  # for a server to say how long an object is
_REACH = Reach(
    routes=frozenset(
        {Route(RegionKind.DRAM, RegionKind.OBJ), Route(RegionKind.OBJ, RegionKind.DRAM)}
    ),
    piece_bytes_max=_RUN_BYTES,
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
class _Group:
    """Requests of one client: reads or writes, each of a run of pieces that follow each other."""

    client: Client
    reads: list[Read]
    writes: list[Write]
    pieces: list[list[int]]
    """Of each request, by number."""


@dataclass(frozen=True, slots=True)
class _Prepared:
    lengths: list[int]
    groups: list[_Group]


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

    def length(self, source: Any) -> int:
        if not isinstance(source, str) or not source.startswith("s3://"):
            return 0
        found = self._find(source)
        (outcome,) = head_many(
            found.client, [found.name], lambda: Stop(time.monotonic() + _LENGTH_S)
        )
        if not outcome.ok:
            raise Unsuitable(f"{source}: {outcome.detail or 'there is no such object'}")
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
        objects, memory, is_read = pieces.remote, pieces.local, pieces.op is Op.READ
        if any(isinstance(handle, _Object) for handle in memory.handles):
            objects, memory, is_read = memory, objects, not is_read
        if any(isinstance(handle, _Memory) for handle in objects.handles):
            raise Unsuitable("s3 moves between memory on one side and objects on the other")
        lengths: list[int] = pieces.lengths.tolist()
        views = [
            memory.handles[which].view[offset : offset + length]
            for which, offset, length in zip(
                memory.which.tolist(), memory.offsets.tolist(), lengths, strict=True
            )
        ]
        offsets: list[int] = objects.offsets.tolist()
        members: dict[tuple[Client, str], list[int]] = {}
        for number, which in enumerate(objects.which.tolist()):
            target = objects.handles[which]
            members.setdefault((target.client, target.name), []).append(number)
        groups: dict[Client, _Group] = {}
        for (client, name), numbers in members.items():
            numbers.sort(key=lambda number: offsets[number])
            runs = _runs(numbers, offsets, lengths, _RUN_BYTES if is_read else 1 << 62)
            if not is_read and (len(runs) > 1 or offsets[numbers[0]] > 0):
                gap = offsets[runs[-1][0]]
                raise Unsuitable(f"{name} is written whole, so what is before byte {gap} as well")
            group = groups.setdefault(client, _Group(client, [], [], []))
            for run in runs:
                parts = [views[number] for number in run]
                group.pieces.append(run)
                if is_read:
                    group.reads.append(Read(name, offsets[run[0]], parts))
                else:
                    group.writes.append(Write(name, parts))
        return _Prepared(lengths, list(groups.values()))

    def piece_count(self, prepared: _Prepared) -> int:
        return len(prepared.lengths)

    def move(self, prepared: _Prepared, results: Results, stop: Stop) -> str:
        detail = ""
        for group in prepared.groups:
            outcomes = (
                read_many(group.client, group.reads, lambda: stop)
                if group.reads
                else write_many(group.client, group.writes, lambda: stop, replacing=True)
            )
            for run, outcome in zip(group.pieces, outcomes, strict=True):
                left = outcome.nbytes
                for piece in run:
                    results[piece] = _result(outcome, prepared.lengths[piece], left, stop)
                    if results[piece] < 0 and not detail:
                        detail = outcome.detail or f"the object ends after {outcome.nbytes} bytes"
                    left -= prepared.lengths[piece]
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


def _runs(
    numbers: Sequence[int], offsets: Sequence[int], lengths: Sequence[int], nbytes_max: int
) -> list[list[int]]:
    """Pieces of one object, in its order, in runs without gaps of about `nbytes_max` at most."""
    runs: list[list[int]] = []
    end, room = -1, 0
    for number in numbers:
        if offsets[number] != end or room < lengths[number]:
            runs.append([])
            room = nbytes_max
        runs[-1].append(number)
        end = offsets[number] + lengths[number]
        room -= lengths[number]
    return runs


def _result(outcome: Outcome, nbytes: int, left: int, stop: Stop) -> int:
    """Of a piece of a run; `left` bytes of the run came from this piece on."""
    if outcome.ok:
        return nbytes if left >= nbytes else -errno.ENODATA
    if outcome.status is Status.RETRY and stop.left_s() <= 0:
        return -errno.ETIMEDOUT
    if outcome.status is Status.RETRY and stop.is_set():
        return -errno.ECANCELED
    return -_CODES.get(outcome.status, errno.EIO)
