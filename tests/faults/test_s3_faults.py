"""Whatever a server or the way to it does: no wrong byte is OK, no wait outlasts its time, and the
server's own word for it is in the outcome."""

from __future__ import annotations

import datetime
import gc
import os
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import boto3
import pytest
import trustme

from kvtier.backends import s3_objects
from kvtier.backends.s3 import S3Backend, S3Options
from kvtier.backends.s3_client import Gate
from kvtier.errors import BackendUnavailable, ConfigError
from kvtier.testing.backend_suite import KEYS, get, put, record
from kvtier.testing.fault_proxy import Fault, FaultProxy
from kvtier.testing.seaweedfs import SeaweedFS
from kvtier.transfer import Stop
from kvtier.types import ChunkKey, Outcome, Status

LIMIT_S = 0.4  # time of one request where it is meant to run out
BOUND_S = 5.0  # far above it on a machine under load
SPOILERS = [
    Fault.ERROR,
    Fault.SLOW_DOWN,
    Fault.TRUNCATED,
    Fault.TRICKLE,
    Fault.TRICKLED_HEAD,
    Fault.RESET,
    Fault.RESET_IN_BODY,
    Fault.HANG,
]


@pytest.fixture
def proxy(seaweedfs: SeaweedFS) -> Iterator[FaultProxy]:
    with FaultProxy(seaweedfs.port) as proxy:
        yield proxy


def open_s3(endpoint: str, root: Path, *, bucket: str = "", **options: object) -> S3Backend:
    url = f"s3://{bucket or SeaweedFS.bucket}{root}"
    return S3Backend(S3Options(url=url, endpoint=endpoint, **options))  # type: ignore[arg-type]


def key(number: int) -> ChunkKey:
    return ChunkKey(number.to_bytes(32, "big"))


# ---- what passes


@pytest.mark.parametrize(
    "fault",
    [fault for fault in SPOILERS if fault not in (Fault.TRICKLE, Fault.TRICKLED_HEAD)],
    ids=lambda fault: fault.value,
)
def test_a_passing_fault_costs_time_and_nothing_else(
    proxy: FaultProxy, tmp_path: Path, fault: Fault
) -> None:
    with open_s3(proxy.endpoint, tmp_path, timeout_s=2.0) as backend:
        assert put(backend, KEYS[:2]) == [Status.OK] * 2
        proxy.heal()
        proxy.inject(fault, count=1)
        outcome, found = get(backend, KEYS[0])
        assert (outcome.status, found) == (Status.OK, record(KEYS[0]))
        assert len(proxy.requests) == 2
        proxy.inject(fault, count=1)
        assert backend.contains(KEYS[:3]) == [True, True, False]


@pytest.mark.parametrize(
    "fault", [Fault.ERROR, Fault.SLOW_DOWN, Fault.RESET, Fault.LOST], ids=lambda fault: fault.value
)
def test_a_store_that_was_cut_off_is_made_whole(
    proxy: FaultProxy, tmp_path: Path, fault: Fault
) -> None:
    with open_s3(proxy.endpoint, tmp_path) as backend:
        proxy.inject(fault, count=1)
        assert put(backend, KEYS[:1]) == [Status.OK]
        assert get(backend, KEYS[0])[1] == record(KEYS[0])


@pytest.mark.parametrize("fault", SPOILERS, ids=lambda fault: fault.value)
def test_a_fault_that_stays_is_an_outcome_in_time(
    proxy: FaultProxy, tmp_path: Path, fault: Fault
) -> None:
    with open_s3(proxy.endpoint, tmp_path, timeout_s=10.0) as backend:
        assert put(backend, KEYS[:2]) == [Status.OK] * 2
    with open_s3(proxy.endpoint, tmp_path, timeout_s=LIMIT_S) as backend:
        proxy.inject(fault)
        begin_s = time.monotonic()
        outcome, _ = get(backend, KEYS[0])
        assert outcome.status is Status.RETRY, outcome
        assert outcome.detail
        assert time.monotonic() - begin_s < BOUND_S
        if fault in (Fault.ERROR, Fault.SLOW_DOWN, Fault.RESET, Fault.HANG):
            (outcome,) = backend.put([KEYS[5]], [memoryview(record(KEYS[5]))])
            assert outcome.status is Status.RETRY, outcome
            assert backend.contains(KEYS[:2]) == [False, False]
            assert {o.status for o in backend.remove(KEYS[:2])} == {Status.RETRY}
        assert time.monotonic() - begin_s < 4 * BOUND_S
        proxy.heal()
        assert get(backend, KEYS[0])[1] == record(KEYS[0])


def test_one_keys_fault_spoils_no_other(proxy: FaultProxy, tmp_path: Path) -> None:
    with open_s3(proxy.endpoint, tmp_path, timeout_s=LIMIT_S) as backend:
        put(backend, KEYS)
        proxy.inject(Fault.TRUNCATED, wanted=lambda _, path: KEYS[3].hex() in path)
        targets = [bytearray(5000) for _ in KEYS]
        outcomes = backend.get(KEYS, [memoryview(target) for target in targets])
        for one, outcome, target in zip(KEYS, outcomes, targets, strict=True):
            assert outcome.status is (Status.RETRY if one == KEYS[3] else Status.OK)
            assert not outcome.ok or target == record(one)


def test_a_hanging_server_holds_a_whole_batch_up_once(proxy: FaultProxy, tmp_path: Path) -> None:
    with open_s3(proxy.endpoint, tmp_path, timeout_s=LIMIT_S, concurrency=4) as backend:
        proxy.inject(Fault.HANG)
        begin_s = time.monotonic()
        keys = [key(number) for number in range(200)]
        outcomes = backend.get(keys, [memoryview(bytearray(100)) for _ in keys])
        assert {outcome.status for outcome in outcomes} == {Status.RETRY}
        assert time.monotonic() - begin_s < BOUND_S


def test_an_overload_shrinks_the_crowd_for_a_while(proxy: FaultProxy, tmp_path: Path) -> None:
    keys = [key(number) for number in range(64)]
    with open_s3(proxy.endpoint, tmp_path, concurrency=16) as backend:
        assert not any(backend.contains(keys))
        assert proxy.requests_at_once_max > 4
        proxy.inject(Fault.SLOW_DOWN, count=8)
        assert not any(backend.contains(keys[:8]))
        assert backend._client.concurrency < 12
        for _ in range(4):
            backend.contains(keys)
        assert backend._client.concurrency == 16


def test_no_more_go_in_than_the_gate_allows() -> None:
    at_once = Stop(time.monotonic())
    gate = Gate(8)
    gate.shrink()
    gate.shrink()  # told together, shrunk once
    assert [gate.enter(at_once) for _ in range(5)] == [True] * 4 + [False]
    gate.leave()
    assert gate.enter(at_once)
    for _ in range(100):
        gate.went_well()
    assert gate.limit == 8


def test_retry_after_is_honoured(proxy: FaultProxy, tmp_path: Path) -> None:
    with open_s3(proxy.endpoint, tmp_path, timeout_s=30.0) as backend:
        put(backend, KEYS[:1])
        proxy.inject(Fault.SLOW_DOWN, count=1, headers={"Retry-After": "1"})
        begin_s = time.monotonic()
        assert get(backend, KEYS[0])[0].ok
        assert time.monotonic() - begin_s >= 1.0
        proxy.inject(Fault.SLOW_DOWN, count=1, headers={"Retry-After": "3600"})
        begin_s = time.monotonic()
        outcome, _ = get(backend, KEYS[0])
        assert (outcome.status, "503 SlowDown" in outcome.detail) == (Status.RETRY, True)
        assert time.monotonic() - begin_s < BOUND_S, "it waits although time will be over first"


def test_a_connection_that_rested_too_long_is_replaced(proxy: FaultProxy, tmp_path: Path) -> None:
    with open_s3(proxy.endpoint, tmp_path, timeout_s=30.0) as backend:
        put(backend, KEYS[:1])
        for connection in list(proxy._connections):  # as a server does that is tired of waiting
            connection.shutdown(2)
        proxy.heal()
        assert get(backend, KEYS[0])[0].ok
        assert len(proxy.requests) == 1


# ---- what stays


def test_wrong_credentials_are_told_in_the_servers_words(
    seaweedfs: SeaweedFS, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with open_s3(seaweedfs.endpoint, tmp_path) as backend:
        told = [*backend.put(KEYS[:1], [memoryview(b"x")]), get(backend, KEYS[0])[0]]
        assert [outcome.status for outcome in told] == [Status.FAILED] * 2
        assert all("403 SignatureDoesNotMatch" in outcome.detail for outcome in told), told
        assert backend.contains(KEYS[:1]) == [False]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    with open_s3(seaweedfs.endpoint, tmp_path) as backend:
        outcome, _ = get(backend, KEYS[0])
        assert (outcome.status, "InvalidAccessKeyId" in outcome.detail) == (Status.FAILED, True)


def test_a_missing_bucket_is_told_in_the_servers_words(
    seaweedfs: SeaweedFS, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_s3(seaweedfs.endpoint, tmp_path, bucket="nobodys") as backend:
        outcome, _ = get(backend, KEYS[0])
        assert (outcome.status, "404 NoSuchBucket" in outcome.detail) == (Status.FAILED, True)
        with pytest.raises(OSError, match="NoSuchBucket"):
            list(backend.scan())


def test_a_wrong_clock_is_told_in_the_servers_words(seaweedfs: SeaweedFS, tmp_path: Path) -> None:
    real = datetime.datetime.now(datetime.UTC).replace(tzinfo=None)
    shifted = real - datetime.timedelta(hours=2)
    with (
        open_s3(seaweedfs.endpoint, tmp_path) as backend,
        patch("botocore.auth.get_current_datetime", lambda *_: shifted),
    ):
        outcome, _ = get(backend, KEYS[0])
        assert outcome.status is Status.FAILED
        assert "403 RequestTimeTooSkewed" in outcome.detail


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"url": "http://bucket/x"}, ConfigError, "s3://bucket/prefix"),
        ({"url": "s3://B/x"}, ConfigError, "s3://bucket/prefix"),
        ({"concurrency": 0}, ConfigError, "concurrency: 0"),
        ({"timeout_s": 0.0}, ConfigError, "timeout_s: 0"),
        ({"profile": "nobody"}, BackendUnavailable, "nobody"),
        ({"endpoint": "not a url"}, BackendUnavailable, "not a url"),
    ],
)
def test_what_cannot_be_opened_says_why(
    seaweedfs: SeaweedFS, options: dict[str, object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        S3Backend(S3Options(**{"url": "s3://bucket/x", **options}))  # type: ignore[arg-type]


def test_no_credentials_and_no_boto3_are_told_at_once(
    seaweedfs: SeaweedFS, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as without:
        without.delenv("AWS_ACCESS_KEY_ID")
        with pytest.raises(BackendUnavailable, match="no credentials"):
            open_s3(seaweedfs.endpoint, tmp_path)
    with (
        patch.dict("sys.modules", {"boto3": None}),
        pytest.raises(BackendUnavailable, match=r"kvtier\[s3\]"),
    ):
        open_s3(seaweedfs.endpoint, tmp_path)


# ---- TLS


def test_tls_goes_the_same_way_and_is_verified(
    seaweedfs: SeaweedFS, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = trustme.CA()
    certificate = str(tmp_path / "authority.pem")
    authority.cert_pem.write_to_path(certificate)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1", "localhost").configure_cert(context)
    with FaultProxy(seaweedfs.port, tls=context) as proxy:
        with open_s3(proxy.endpoint, tmp_path) as backend:
            outcome, _ = get(backend, KEYS[0])
            assert (outcome.status, "CERTIFICATE" in outcome.detail) == (Status.FAILED, True)
        monkeypatch.setenv("AWS_CA_BUNDLE", certificate)
        with open_s3(proxy.endpoint, tmp_path, timeout_s=20.0) as backend:
            assert put(backend, KEYS[:2], 9 << 20) == [Status.OK] * 2
            targets = [bytearray(9 << 20), bytearray(9 << 20)]
            backend.get(KEYS[:2], [memoryview(target) for target in targets])
            assert targets == [record(key, 9 << 20) for key in KEYS[:2]]
            proxy.inject(Fault.TRUNCATED, count=1)
            assert get(backend, KEYS[0], 9 << 20)[1] == record(KEYS[0], 9 << 20)
        with open_s3(proxy.endpoint, tmp_path, timeout_s=LIMIT_S) as backend:
            proxy.inject(Fault.TRICKLE)
            begin_s = time.monotonic()
            assert get(backend, KEYS[0], 9 << 20)[0].status is Status.RETRY
            assert time.monotonic() - begin_s < BOUND_S


# ---- large objects


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_objects, "MULTIPART_BYTES_MIN", 10 << 20)
    monkeypatch.setattr(s3_objects, "_PART_BYTES", 5 << 20)


def uploads_left(server: SeaweedFS, root: Path) -> int:
    client = boto3.client("s3", endpoint_url=server.endpoint)
    answer = client.list_multipart_uploads(Bucket=server.bucket, Prefix=str(root)[1:])
    client.close()
    return len(answer.get("Uploads", []))


LARGE = (12 << 20) + 12345


def test_a_large_record_goes_in_parts_and_appears_whole(
    proxy: FaultProxy, seaweedfs: SeaweedFS, tmp_path: Path, small_parts: None
) -> None:
    with open_s3(proxy.endpoint, tmp_path, segment=3 << 20) as backend:
        proxy.inject(Fault.ERROR, count=1, wanted=lambda _, path: "partNumber=2" in path)
        assert put(backend, KEYS[:2], LARGE) == [Status.OK] * 2
        assert sum("partNumber" in path for _, path in proxy.requests) == 5
        proxy.heal()
        target = memoryview(bytearray(LARGE + 100))
        (outcome,) = backend.get(KEYS[:1], [target])
        assert (outcome.status, outcome.nbytes) == (Status.OK, LARGE)
        assert target[:LARGE] == record(KEYS[0], LARGE)
        assert len(proxy.requests) == 4
        assert backend.contains(KEYS[:3]) == [True, True, False]
        assert uploads_left(seaweedfs, tmp_path) == 0


def test_a_large_record_that_is_held_stays_as_it_is(
    seaweedfs: SeaweedFS, tmp_path: Path, small_parts: None
) -> None:
    """Also when it came while the parts were on their way."""
    with open_s3(seaweedfs.endpoint, tmp_path) as backend:
        put(backend, KEYS[:1], 100)
        with patch("kvtier.backends.s3._ASK_FIRST_BYTES", 1 << 40):
            (outcome,) = backend.put(KEYS[:1], [memoryview(record(KEYS[0], LARGE))])
        assert outcome == Outcome(Status.OK)
        assert get(backend, KEYS[0], 200)[1] == record(KEYS[0], 100)
        assert uploads_left(seaweedfs, tmp_path) == 0


@pytest.mark.parametrize("step", ["partNumber=2", "uploads=", "uploadId"])
def test_a_large_record_that_fails_leaves_nothing(
    proxy: FaultProxy, seaweedfs: SeaweedFS, tmp_path: Path, small_parts: None, step: str
) -> None:
    def strikes(method: str, path: str) -> bool:
        is_end = step == "uploadId" and method == "POST" and "uploads" not in path
        return is_end or (step != "uploadId" and step in path)

    with open_s3(proxy.endpoint, tmp_path, timeout_s=1.0) as backend:
        proxy.inject(Fault.ERROR, wanted=strikes)
        (outcome,) = backend.put(KEYS[:1], [memoryview(record(KEYS[0], LARGE))])
        assert (outcome.status, "500" in outcome.detail) == (Status.RETRY, True)
        assert backend.contains(KEYS[:1]) == [False]
        assert uploads_left(seaweedfs, tmp_path) == 0


def test_a_large_record_whose_last_answer_was_lost_is_held(
    proxy: FaultProxy, tmp_path: Path, small_parts: None
) -> None:
    with open_s3(proxy.endpoint, tmp_path) as backend:
        proxy.inject(
            Fault.LOST, count=1, wanted=lambda method, path: method == "POST" and "Id=" in path
        )
        assert put(backend, KEYS[:1], LARGE) == [Status.OK]
        assert get(backend, KEYS[0], LARGE)[1] == record(KEYS[0], LARGE)


# ---- the server itself


def test_a_server_that_dies_hangs_or_comes_later_is_a_passing_fault(tmp_path: Path) -> None:
    nbytes = 16 << 20
    server = SeaweedFS(tmp_path / "server")
    with pytest.MonkeyPatch.context() as environment:
        for name, value in server.environ.items():
            environment.setenv(name, value)
        with open_s3(server.endpoint, tmp_path, timeout_s=LIMIT_S) as backend:
            assert get(backend, KEYS[0])[0].status is Status.RETRY
            assert backend.contains(KEYS[:1]) == [False]
            server.start()
            try:
                with open_s3(server.endpoint, tmp_path, timeout_s=30.0) as patient:
                    assert put(patient, KEYS[:4], nbytes) == [Status.OK] * 4
                right = [record(key, nbytes) for key in KEYS[:4]]
                for stop in (server.pause, server.kill):
                    targets = [bytearray(nbytes) for _ in KEYS[:4]]
                    views = [memoryview(target) for target in targets]
                    timer = threading.Timer(0.02, stop)  # no synchronisation: amid the transfer
                    timer.start()
                    begin_s = time.monotonic()
                    outcomes = backend.get(KEYS[:4], views)
                    assert time.monotonic() - begin_s < BOUND_S
                    timer.join()
                    for outcome, target, data in zip(outcomes, targets, right, strict=True):
                        assert outcome.status in (Status.OK, Status.RETRY)
                        assert not outcome.ok or target == data
                    (outcome,) = backend.put(KEYS[4:5], [memoryview(right[0])])
                    assert outcome.status is Status.RETRY
                    if stop == server.pause:
                        server.resume()
                server.start()
                with open_s3(server.endpoint, tmp_path, timeout_s=30.0) as patient:
                    targets = [bytearray(nbytes) for _ in KEYS[:4]]
                    outcomes = patient.get(KEYS[:4], [memoryview(target) for target in targets])
                    assert [outcome.status for outcome in outcomes] == [Status.OK] * 4
                    assert targets == right
            finally:
                server.kill()


# ---- nothing is left behind


def test_closing_ends_what_hangs(proxy: FaultProxy, tmp_path: Path) -> None:
    backend = open_s3(proxy.endpoint, tmp_path, timeout_s=1.0, concurrency=4)
    proxy.inject(Fault.HANG)
    outcomes: list[Outcome] = []
    keys = [key(number) for number in range(50)]

    def read() -> None:
        outcomes.extend(backend.get(keys, [memoryview(bytearray(100)) for _ in keys]))

    reader = threading.Thread(target=read)
    reader.start()
    begin_s = time.monotonic()
    backend.close()
    reader.join(BOUND_S)
    assert time.monotonic() - begin_s < BOUND_S
    assert len(outcomes) in (0, 50)  # 0 where it was closed before it began
    assert not any(outcome.ok for outcome in outcomes)


def test_a_thousand_failures_leave_nothing_behind(proxy: FaultProxy, tmp_path: Path) -> None:
    def usage() -> tuple[int, int, int]:
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[1])
        return len(os.listdir("/proc/self/fd")), threading.active_count(), pages * 4096

    keys = [key(number) for number in range(50)]
    targets = [memoryview(bytearray(64 << 10)) for _ in keys]
    with open_s3(proxy.endpoint, tmp_path, timeout_s=0.05, concurrency=4) as backend:
        before = None
        failed = 0
        for turn in range(24):
            proxy.heal()
            proxy.inject(Fault.RESET if turn % 2 else Fault.ERROR)
            outcomes = backend.get(keys, targets) if turn % 3 else backend.put(keys, targets)
            failed += sum(not outcome.ok for outcome in outcomes)
            if turn == 3:
                gc.collect()
                before = usage()
        gc.collect()
        after = usage()
    assert before is not None
    assert failed >= 1000
    assert after[0] <= before[0] + 8, "descriptors"  # both ends of a few connections
    assert after[1] <= before[1] + 8, "threads"
    assert after[2] <= before[2] + (16 << 20), "memory"
