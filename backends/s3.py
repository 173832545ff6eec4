"""Records as objects in a bucket of S3 or of any store that speaks its protocol.

``prefix/ab/abcd….kvc``: one object a record, named by its key, so that whoever knows the key finds it
without a list. Objects are stored with ``If-None-Match: *``, are never changed afterwards, and appear
whole. Many processes may share a bucket.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections.abc import Iterator, Sequence
from typing import ClassVar

from kvtier.backend import (
    HEAD_BYTES,
    Backend,
    BackendOptions,
    Capabilities,
    StoredChunk,
    check_batch,
    check_get,
)
from kvtier.backends.s3_client import Client
from kvtier.backends.s3_objects import (
    Read,
    Write,
    head_many,
    list_all,
    read_many,
    remove_many,
    write_many,
)
from kvtier.backends.s3_place import Addressing, open_place, split_url
from kvtier.errors import Closed, ConfigError
from kvtier.transfer import Stop
from kvtier.types import KEY_BYTES, ChunkKey, Outcome, Status

_CAPABILITIES = Capabilities(persistent=True, shared=True)
_ASK_FIRST_BYTES = 1 << 20  # from here on a question costs less than sending what is held already
_REASONS_MAX = 8  # log lines of one bad time
_NAME = re.compile(r"([0-9a-f]{2})/([0-9a-f]{64})\.kvc")

_log = logging.getLogger("kvtier.s3")


class S3Options(BackendOptions, frozen=True, kw_only=True):
    """Which bucket, and how it is talked to. Credentials come from where boto3 finds them."""

    url: str
    """``s3://bucket/prefix``; the bucket must exist."""
    endpoint: str = ""
    """The server, like ``http://10.0.0.7:8333``; empty for what boto3 finds, else Amazon's."""
    region: str = ""
    """Empty for what boto3 finds."""
    profile: str = ""
    """A profile of the AWS configuration; empty for what boto3 finds."""
    addressing: Addressing = "auto"
    """Bucket in the URL's path or in its host; ``auto`` is by path where an endpoint is given."""
    concurrency: int = 16
    """Most requests at a time, each on its own connection and thread."""
    timeout_s: float = 20.0
    """Time of one request, further tries included; then it is a passing fault."""
    segment: int = 32 * 1024**2
    """Longer reads are made of ranges of about this many bytes, at the same time."""


class S3Backend(Backend):
    """Objects under one prefix: durable, shared with other processes, bounded by nothing here."""

    Options: ClassVar[type[BackendOptions]] = S3Options

    def __init__(self, options: S3Options) -> None:
        """Find server and credentials; nothing is asked of the server, which may come up later.

        Raises:
            ConfigError: the URL is none of a bucket, or a number is not positive.
            BackendUnavailable: boto3 is not installed or finds no credentials.
        """
        bucket, prefix = split_url(options.url)
        for name in ("concurrency", "timeout_s", "segment"):
            if getattr(options, name) <= 0:
                raise ConfigError(f"{name}: {getattr(options, name)}, expected more than 0")
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._timeout_s = options.timeout_s
        self._segment_bytes = options.segment
        place = open_place(
            bucket,
            endpoint=options.endpoint,
            region=options.region,
            profile=options.profile,
            addressing=options.addressing,
        )
        self._client = Client(place, options.concurrency)
        self._told: set[str] = set()
        self._changed = threading.Condition()
        self._call_count = 0
        self._is_closed = False

    @property
    def capabilities(self) -> Capabilities:
        return _CAPABILITIES

    def put(self, keys: Sequence[ChunkKey], sources: Sequence[memoryview]) -> list[Outcome]:
        check_batch(_CAPABILITIES.batch_max, keys, sources)
        names = [self._name(key) for key in keys]
        with self._call():
            outcomes: list[Outcome | None] = [None] * len(keys)
            large = [n for n, source in enumerate(sources) if source.nbytes >= _ASK_FIRST_BYTES]
            asked = head_many(self._client, [names[n] for n in large], self._limit)
            for number, found in zip(large, asked, strict=True):
                if found.ok:
                    outcomes[number] = Outcome(Status.OK)
                elif found.status is Status.RETRY:  # nor would the server take the bytes
                    outcomes[number] = found
            left = [number for number, outcome in enumerate(outcomes) if outcome is None]
            writes = [Write(names[number], [_bytes(sources[number])]) for number in left]
            stored = write_many(self._client, writes, self._limit, replacing=False)
            for number, outcome in zip(left, stored, strict=True):
                outcomes[number] = outcome
        return [outcome for outcome in outcomes if outcome is not None]

    def get(
        self, keys: Sequence[ChunkKey], targets: Sequence[memoryview], offset: int = 0
    ) -> list[Outcome]:
        check_get(_CAPABILITIES.batch_max, keys, targets, offset)
        reads = [
            Read(self._name(key), offset, [_bytes(target)])
            for key, target in zip(keys, targets, strict=True)
        ]
        with self._call():
            return read_many(self._client, reads, self._limit, self._segment_bytes)

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        check_batch(_CAPABILITIES.batch_max, keys)
        names = [self._name(key) for key in keys]
        with self._call():
            found = head_many(self._client, names, self._limit)
        self._tell(found)
        return [outcome.ok for outcome in found]

    def remove(self, keys: Sequence[ChunkKey]) -> list[Outcome]:
        check_batch(_CAPABILITIES.batch_max, keys)
        names = [self._name(key) for key in keys]
        with self._call():
            outcomes = head_many(self._client, names, self._limit)  # DELETE finds nothing missing
            there = dict.fromkeys(
                name for name, found in zip(names, outcomes, strict=True) if found.ok
            )
            removed = remove_many(self._client, list(there), self._limit)
        left = dict(zip(there, removed, strict=True))
        return [
            left.pop(name, Outcome(Status.MISSING)) if found.ok else found
            for name, found in zip(names, outcomes, strict=True)
        ]

    def scan(self) -> Iterator[StoredChunk]:
        """In the order of keys: an object store does not know what was used when."""
        with self._call():
            pages = list_all(self._client, self._prefix, self._limit)
        while True:
            with self._call():
                page = next(pages, None)
                if page is None:
                    return
                found = []
                for listed in page:
                    match = _NAME.fullmatch(listed.name.removeprefix(self._prefix))
                    if match and match[2].startswith(match[1]):  # all else is not ours
                        found.append((listed, ChunkKey(bytes.fromhex(match[2]))))
                heads = [memoryview(bytearray(min(HEAD_BYTES, o.nbytes))) for o, _ in found]
                reads = [Read(o.name, 0, [head]) for (o, _), head in zip(found, heads, strict=True)]
                outcomes = read_many(self._client, reads, self._limit)
            for (listed, key), head, outcome in zip(found, heads, outcomes, strict=True):
                if outcome.ok:  # else it was removed meanwhile, or the server does not give it
                    yield StoredChunk(key, listed.nbytes, bytes(head[: outcome.nbytes]))

    def close(self) -> None:
        """Give calls in progress one request's time to end; what takes longer ends as RETRY."""
        with self._changed:
            self._is_closed = True
            self._changed.wait_for(lambda: self._call_count == 0, self._timeout_s)
        self._client.close()

    def _name(self, key: ChunkKey) -> str:
        if len(key) != KEY_BYTES:
            raise ValueError(f"key of {len(key)} bytes, must be {KEY_BYTES}")
        name = key.hex()
        return f"{self._prefix}{name[:2]}/{name}.kvc"

    def _limit(self) -> Stop:
        return Stop(time.monotonic() + self._timeout_s)

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        with self._changed:
            if self._is_closed:
                raise Closed(f"the s3 backend of {self._client.place.bucket} is closed")
            self._call_count += 1
        try:
            yield
        finally:
            with self._changed:
                self._call_count -= 1
                self._changed.notify_all()

    def _tell(self, found: Sequence[Outcome]) -> None:
        """Why nothing is found, where the answer is only a bool; each reason once in a bad time."""
        for outcome in found:
            if outcome.ok:
                self._told.clear()
            elif outcome.detail and outcome.detail not in self._told:
                if len(self._told) < _REASONS_MAX:
                    _log.warning("s3://%s: %s", self._client.place.bucket, outcome.detail)
                self._told.add(outcome.detail)


def _bytes(view: memoryview) -> memoryview:
    """The same memory, counted in bytes."""
    return view.cast("B") if view.nbytes else memoryview(b"")
