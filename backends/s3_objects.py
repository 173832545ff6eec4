"""What is said to an object store: read, store, ask, remove and list objects, many at a time.

Calls answer for every item, in order, and give each request the time that the caller's `Limit` says.
"""

from __future__ import annotations

import re
import time
import xml.etree.ElementTree as xml
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape, unescape
from itertools import pairwise
from urllib.parse import unquote

from kvtier.backends.s3_client import Client, Reply, Request
from kvtier.transfer import Stop
from kvtier.types import Outcome, Status

MULTIPART_BYTES_MIN = 64 << 20  # below it one request is as quick, and its object appears at once
_PART_BYTES = 32 << 20
_PARTS_MAX = 10_000  # what S3 allows
_ABORT_S = 5.0  # for giving up an upload after its time is over, else its parts are kept and billed
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
_TOTAL = re.compile(r"bytes \*/(\d+)")
_UPLOAD_ID = re.compile(rb"<UploadId>([^<]+)</UploadId>")

Limit = Callable[[], Stop]
"""How long one request may take; called when it begins."""


@dataclass(frozen=True, slots=True)
class Read:
    """One range of an object, and the pieces of memory that it fills, in order."""

    name: str
    offset: int
    targets: Sequence[memoryview]

    @property
    def nbytes(self) -> int:
        """The range's length."""
        return sum(target.nbytes for target in self.targets)


@dataclass(frozen=True, slots=True)
class Write:
    """A whole object, in one or more pieces of memory."""

    name: str
    pieces: Sequence[memoryview]

    @property
    def nbytes(self) -> int:
        """Its length."""
        return sum(piece.nbytes for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Listed:
    """One object of a listing."""

    name: str
    nbytes: int


def read_many(
    client: Client, reads: Sequence[Read], limit: Limit, segment_bytes: int = 1 << 40
) -> list[Outcome]:
    """Fill each read's targets; longer ones by ranges of about `segment_bytes`, at the same time.

    OK with fewer bytes says that the object ends there.
    """
    pieces = [
        (number, piece) for number, read in enumerate(reads) for piece in _cut(read, segment_bytes)
    ]
    outcomes = _each(client, [partial(_read, client, piece) for _, piece in pieces], limit)
    whole: list[Outcome | None] = [None] * len(reads)
    for (number, _), outcome in zip(pieces, outcomes, strict=True):
        before = whole[number]
        if before is None or (before.ok and not outcome.ok):
            whole[number] = outcome
        elif before.ok:
            whole[number] = Outcome(Status.OK, before.nbytes + outcome.nbytes)
    return [outcome or Outcome(Status.OK) for outcome in whole]


def write_many(
    client: Client, writes: Sequence[Write], limit: Limit, *, replacing: bool
) -> list[Outcome]:
    """Store whole objects; nobody sees a part of one.

    Unless `replacing`, an object that is there already stays as it is: OK with 0 bytes.
    """
    outcomes: list[Outcome | None] = [None] * len(writes)
    small = [n for n, write in enumerate(writes) if write.nbytes <= MULTIPART_BYTES_MIN]
    large = [n for n, write in enumerate(writes) if write.nbytes > MULTIPART_BYTES_MIN]
    stored = _each(
        client, [partial(_write, client, writes[number], replacing) for number in small], limit
    )
    for number, outcome in zip(small, stored, strict=True):
        outcomes[number] = outcome
    uploads = [_Upload(client, writes[number], replacing) for number in large]
    for number, outcome in zip(large, _upload_all(client, uploads, limit), strict=True):
        outcomes[number] = outcome
    return [outcome or Outcome(Status.OK) for outcome in outcomes]


def head_many(client: Client, names: Sequence[str], limit: Limit) -> list[Outcome]:
    """For each object OK with its length, or MISSING."""
    return _each(client, [partial(_head, client, name) for name in names], limit)


def remove_many(client: Client, names: Sequence[str], limit: Limit) -> list[Outcome]:
    """Remove objects; OK also for one that is not there, as S3 has it."""
    return _each(client, [partial(_remove, client, name) for name in names], limit)


def list_all(client: Client, prefix: str, limit: Limit) -> Iterator[list[Listed]]:
    """Every object whose name begins with `prefix`, a thousand at a time, in order of name.

    Raises:
        OSError: the server does not give the list.
    """
    query = {"list-type": "2", "prefix": prefix, "encoding-type": "url"}
    while True:
        reply = client.request(Request("GET", "", query=query), limit())
        if reply.status != 200:
            raise OSError(f"s3://{client.place.bucket}: cannot be listed: {reply.detail}")
        try:
            tree = xml.fromstring(reply.body)
            space = tree.tag.partition("}")[0] + "}" if tree.tag.startswith("{") else ""
            found = _listed(tree, space)
        except (xml.ParseError, ValueError) as error:
            raise OSError(f"s3://{client.place.bucket}: not a list: {error}") from error
        yield found
        token = tree.findtext(f"{space}NextContinuationToken")
        if tree.findtext(f"{space}IsTruncated") != "true" or not token:
            return
        query = {**query, "continuation-token": token}


def _listed(tree: xml.Element, space: str) -> list[Listed]:
    return [
        Listed(
            unquote(entry.findtext(f"{space}Key", "")),
            int(entry.findtext(f"{space}Size", "0")),
        )
        for entry in tree.iter(f"{space}Contents")
    ]


def _each(client: Client, jobs: Sequence[Callable[[Stop], Outcome]], limit: Limit) -> list[Outcome]:
    """Run jobs at the same time, each with time of its own.

    Once as many in a row as may wait together ran out of it, the rest are not begun: a server that
    hangs holds a call up for one request's time, however many keys it has.
    """
    lost: list[Outcome] = []

    def run(job: Callable[[Stop], Outcome]) -> Outcome:
        recent = list(lost)
        if len(recent) >= client.workers.count:
            return recent[0]
        outcome = job(limit())
        if outcome.status is Status.RETRY:
            lost.append(outcome)
        else:
            lost.clear()
        return outcome

    return client.workers.run([partial(run, job) for job in jobs])


def _cut(read: Read, segment_bytes: int) -> list[Read]:
    count = max(1, round(read.nbytes / segment_bytes))
    bounds = [read.nbytes * i // count for i in range(count + 1)]
    return [
        Read(read.name, read.offset + start, _slice(read.targets, start, end))
        for start, end in pairwise(bounds)
    ]


def _read(client: Client, read: Read, stop: Stop) -> Outcome:
    nbytes = read.nbytes
    if nbytes == 0:
        found = _head(client, read.name, stop)
        return Outcome(Status.OK) if found.ok else found
    wanted = f"bytes={read.offset}-{read.offset + nbytes - 1}"
    request = Request("GET", read.name, headers={"Range": wanted}, targets=read.targets)
    reply = client.request(request, stop)
    if reply.status == 416:  # begins at or after the end
        total = _TOTAL.fullmatch(reply.headers.get("content-range", ""))
        if total and int(total[1]) > read.offset:
            return Outcome(Status.FAILED, detail=f"no bytes from {read.offset} on of {total[1]}")
        return Outcome(Status.OK)
    if reply.status == 200 and read.offset == 0:  # the whole object, or what there was room for
        return Outcome(Status.OK, reply.filled)
    if reply.status != 206:
        return _fault(reply)
    said = reply.headers.get("content-range", "nothing")
    given = _RANGE.fullmatch(said)
    if given is None or int(given[1]) != read.offset:
        return Outcome(Status.FAILED, detail=f"asked for {wanted}, got {said}")
    end = int(given[2]) + 1
    is_whole = reply.filled == nbytes or given[3] in ("*", str(end))
    if end - read.offset != reply.filled or not is_whole:
        return Outcome(Status.RETRY, detail=f"{reply.filled} bytes came of {said}")
    return Outcome(Status.OK, reply.filled)


def _write(client: Client, write: Write, replacing: bool, stop: Stop) -> Outcome:
    headers = {} if replacing else {"If-None-Match": "*"}
    reply = client.request(Request("PUT", write.name, headers=headers, body=write.pieces), stop)
    if reply.status == 200:
        return Outcome(Status.OK, write.nbytes)
    if reply.status == 412 and not replacing:
        return Outcome(Status.OK)
    return _fault(reply)


def _head(client: Client, name: str, stop: Stop) -> Outcome:
    reply = client.request(Request("HEAD", name), stop)
    length = reply.headers.get("content-length", "")
    if reply.status == 200 and length.isdecimal():
        return Outcome(Status.OK, int(length))
    return _fault(reply)


def _remove(client: Client, name: str, stop: Stop) -> Outcome:
    reply = client.request(Request("DELETE", name), stop)
    return Outcome(Status.OK) if reply.status in (200, 204) else _fault(reply)


class _Upload:
    """One object on its way in parts."""

    def __init__(self, client: Client, write: Write, replacing: bool) -> None:
        self._client = client
        self._write = write
        self._replacing = replacing
        self._id = ""
        count = min(_PARTS_MAX, round(write.nbytes / _PART_BYTES))
        bounds = [write.nbytes * i // count for i in range(count + 1)]
        self._parts = list(pairwise(bounds))
        self._etags = [""] * count
        self.outcome = Outcome(Status.OK)

    @property
    def part_count(self) -> int:
        return len(self._parts)

    @property
    def is_open(self) -> bool:
        """Whether the server keeps parts of it."""
        return bool(self._id)

    def begin(self, stop: Stop) -> Outcome:
        reply = self._client.request(Request("POST", self._write.name, query={"uploads": ""}), stop)
        found = _UPLOAD_ID.search(reply.body)
        if reply.status != 200 or found is None:
            return self._note(_fault(reply))
        self._id = unescape(found[1].decode())
        return self.outcome

    def send(self, part: int, stop: Stop) -> Outcome:
        if not self.outcome.ok or not self._id:
            return self.outcome
        start, end = self._parts[part]
        query = {"partNumber": str(part + 1), "uploadId": self._id}
        body = _slice(self._write.pieces, start, end)
        reply = self._client.request(Request("PUT", self._write.name, query=query, body=body), stop)
        if reply.status != 200 or "etag" not in reply.headers:
            return self._note(_fault(reply))
        self._etags[part] = reply.headers["etag"]
        return self.outcome

    def complete(self, stop: Stop) -> Outcome:
        if not self.outcome.ok or not self._id or not all(self._etags):
            return self.outcome
        parts = "".join(
            f"<Part><PartNumber>{number}</PartNumber><ETag>{escape(etag)}</ETag></Part>"
            for number, etag in enumerate(self._etags, start=1)
        )
        body = f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>".encode()
        reply = self._client.request(
            Request(
                "POST",
                self._write.name,
                query={"uploadId": self._id},
                headers={} if self._replacing else {"If-None-Match": "*"},
                body=[memoryview(body)],
            ),
            stop,
        )
        if reply.status == 200 and not reply.code:
            self._id = ""
            return self._note(Outcome(Status.OK, self._write.nbytes))
        if reply.status == 412 and not self._replacing:
            return self._note(Outcome(Status.OK))
        if reply.code == "NoSuchUpload":  # an earlier try went through and its answer was lost
            self._id = ""
            found = _head(self._client, self._write.name, stop)
            if found.ok and found.nbytes == self._write.nbytes:
                return self._note(Outcome(Status.OK, self._write.nbytes))
        return self._note(_fault(reply))

    def abort(self, stop: Stop) -> Outcome:
        request = Request("DELETE", self._write.name, query={"uploadId": self._id})
        self._client.request(request, stop)
        return self.outcome

    def _note(self, outcome: Outcome) -> Outcome:
        if self.outcome.ok:
            self.outcome = outcome
        return outcome


def _upload_all(client: Client, uploads: Sequence[_Upload], limit: Limit) -> list[Outcome]:
    """All parts of all objects at the same time."""
    if not uploads:
        return []
    begun = _each(client, [upload.begin for upload in uploads], limit)
    sends = [partial(upload.send, part) for upload in uploads for part in range(upload.part_count)]
    sent = _each(client, sends, limit)
    ended = _each(client, [upload.complete for upload in uploads], limit)
    left = [upload.abort for upload in uploads if upload.is_open]
    _each(client, left, _abort_limit)
    outcomes = []
    at = 0
    for upload, first, last in zip(uploads, begun, ended, strict=True):
        steps = [first, *sent[at : at + upload.part_count], last]
        at += upload.part_count
        # One that `_each` did not begin was never told to the upload.
        outcomes.append(next((step for step in steps if not step.ok), upload.outcome))
    return outcomes


def _abort_limit() -> Stop:
    return Stop(time.monotonic() + _ABORT_S)


def _slice(pieces: Sequence[memoryview], start: int, end: int) -> list[memoryview]:
    """Bytes `start` to `end` of all pieces one after the other."""
    found, at = [], 0
    for piece in pieces:
        low, high = max(start - at, 0), min(end - at, piece.nbytes)
        if low < high:
            found.append(piece[low:high])
        at += piece.nbytes
    return found


def _fault(reply: Reply) -> Outcome:
    if reply.passing:
        return Outcome(Status.RETRY, detail=reply.detail)
    # HEAD has no body, so that a missing bucket looks like a missing object.
    if reply.status == 404 and reply.code in ("", "NoSuchKey"):
        return Outcome(Status.MISSING)
    return Outcome(Status.FAILED, detail=reply.detail or f"unexpected answer {reply.status}")
