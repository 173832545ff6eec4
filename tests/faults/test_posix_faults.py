"""What a failing disk, a full one, and damaged files come to: an outcome per key, and nothing left
behind. The faults are the kernel's own where any user can have it make them (size and descriptor
limits, names in the way), and stand-ins for its answers where not (a full or broken disk)."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.backends.posix import PosixBackend, PosixOptions
from kvtier.testing.backend_suite import KEYS, get, put, record
from kvtier.types import ALIGN_BYTES, Status


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[PosixBackend]:
    with PosixBackend(PosixOptions(path=str(tmp_path))) as backend:
        yield backend


@contextlib.contextmanager
def limited(kind: int, value: int) -> Iterator[None]:
    """The process under a lower limit of its own; beyond file sizes the kernel answers EFBIG."""
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


def files(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("[0-9a-f][0-9a-f]/*"))


def file_of(root: Path, index: int) -> Path:
    return root / KEYS[index].hex()[:2] / f"{KEYS[index].hex()}.kvc"


class _FailingDisk:
    """The engine, with the kernel's answer of one operation replaced for the second file on."""

    def __init__(self, engine: Any, operation: str, error: int) -> None:
        self._engine, self._operation, self._error = engine, operation, error

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._engine, name)
        if name != self._operation:
            return operation

        def fail(fds: Any, *arguments: Any, **options: Any) -> Any:
            results = operation(fds, *arguments, **options)
            return np.where(np.arange(len(results)) > 0, -self._error, results)

        return fail


@pytest.mark.parametrize("operation", ["allocate", "write", "sync"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT])
def test_a_failed_write_is_an_outcome_and_leaves_nothing_behind(
    backend: PosixBackend, tmp_path: Path, operation: str, error: int, monkeypatch: Any
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(backend, "_engine", _FailingDisk(backend._engine, operation, error))
        data = [memoryview(record(key)) for key in KEYS[:3]]
        outcomes = backend.put(KEYS[:3], data)
    failed = Status.FAILED
    # A sync that fails on the second folder spoils what is in it; which one that is, is open.
    if operation != "sync":
        assert [outcome.status for outcome in outcomes] == [Status.OK, failed, failed]
    for outcome in outcomes:
        if not outcome.ok:
            assert (outcome.status, outcome.nbytes) == (failed, 0)
            assert outcome.detail.startswith(f"{errno.errorcode[error]}: ")
    held = [outcome.ok for outcome in outcomes]
    assert not all(held)
    assert backend.contains(KEYS[:3]) == held
    assert len(files(tmp_path)) == len(list(backend.scan())) == sum(held)
    assert put(backend, KEYS[:3]) == [Status.OK] * 3  # the disk has room again
    assert [get(backend, key)[1] for key in KEYS[:3]] == [record(key) for key in KEYS[:3]]


@pytest.mark.parametrize("method", ["auto", "threads"])
def test_a_record_too_large_for_the_system_spoils_no_other(tmp_path: Path, method: str) -> None:
    """The kernel's own refusal, after a part of the record is written or before."""
    options = PosixOptions(path=str(tmp_path), method=method)  # type: ignore[arg-type]
    with PosixBackend(options) as backend:
        sources = [
            memoryview(record(key, n)) for key, n in zip(KEYS, (100, 2 << 20, 4096), strict=False)
        ]
        with limited(resource.RLIMIT_FSIZE, 1 << 20):
            outcomes = backend.put(KEYS[:3], sources)
        assert [outcome.status for outcome in outcomes] == [Status.OK, Status.FAILED, Status.OK]
        assert outcomes[1].detail == "EFBIG: File too large"
        assert len(files(tmp_path)) == 2
        assert backend.put(KEYS[1:2], sources[1:2])[0].ok
        assert get(backend, KEYS[1], 2 << 20)[1] == sources[1]


def test_running_out_of_descriptors_passes(backend: PosixBackend) -> None:
    put(backend, KEYS[:1])
    used = max(int(name) for name in os.listdir("/proc/self/fd"))
    with limited(resource.RLIMIT_NOFILE, used + 1):
        spare = []
        with contextlib.suppress(OSError):
            while True:
                spare.append(os.open("/dev/null", os.O_RDONLY))
        try:
            assert put(backend, KEYS[1:2]) == [Status.RETRY]
            outcome, _ = get(backend, KEYS[0])
            assert outcome.status is Status.RETRY
            assert outcome.detail.startswith("EMFILE: ")
        finally:
            for fd in spare:
                os.close(fd)
    assert put(backend, KEYS[1:2]) == [Status.OK]
    assert get(backend, KEYS[0])[1] == record(KEYS[0])


def test_a_folder_in_the_way_is_a_fault_of_its_keys_only(
    backend: PosixBackend, tmp_path: Path
) -> None:
    put(backend, KEYS[:1])
    file_of(tmp_path, 1).parent.write_text("a file where the folder should be")
    file_of(tmp_path, 2).mkdir(parents=True)  # a folder where the record should be
    targets = [bytearray(5000) for _ in range(3)]
    outcomes = backend.get(KEYS[:3], [memoryview(target) for target in targets])
    assert [o.status for o in outcomes] == [Status.OK, Status.FAILED, Status.FAILED]
    assert targets[0] == record(KEYS[0])
    assert [o.detail.split(":")[0] for o in outcomes[1:]] == ["ENOTDIR", "EISDIR"]
    assert put(backend, [KEYS[1], KEYS[3]]) == [Status.FAILED, Status.OK]
    statuses = [outcome.status for outcome in backend.remove([KEYS[1], KEYS[3]])]
    assert statuses == [Status.FAILED, Status.OK]


def test_a_removed_folder_comes_back_with_the_next_record(
    backend: PosixBackend, tmp_path: Path
) -> None:
    put(backend, KEYS[:1])
    file_of(tmp_path, 0).unlink()
    file_of(tmp_path, 0).parent.rmdir()
    assert get(backend, KEYS[0])[0].status is Status.MISSING
    assert put(backend, KEYS[:1]) == [Status.OK]
    assert get(backend, KEYS[0])[1] == record(KEYS[0])


@pytest.mark.parametrize("nbytes", [5000, 4 * ALIGN_BYTES])
def test_a_truncated_record_gives_what_is_left_of_it(
    backend: PosixBackend, tmp_path: Path, nbytes: int
) -> None:
    """Telling that it is damaged is the manifest's part; the backend must only not invent bytes."""
    put(backend, KEYS[:1], nbytes)
    for left in (nbytes - 1, ALIGN_BYTES, 10, 0):
        os.truncate(file_of(tmp_path, 0), left)
        outcome, found = get(backend, KEYS[0], nbytes)
        assert (outcome.status, outcome.nbytes) == (Status.OK, left)
        assert found == record(KEYS[0], nbytes)[:left]


def test_a_full_index_fails_no_record(backend: PosixBackend, tmp_path: Path) -> None:
    """The index cannot grow past the limit; the records are there, and are noted afterwards."""
    with limited(resource.RLIMIT_FSIZE, 8192):
        assert put(backend, KEYS[:4], 100) == [Status.OK] * 4
        assert [get(backend, key, 100)[1] for key in KEYS[:4]] == [
            record(key, 100) for key in KEYS[:4]
        ]
        backend.remove(KEYS[3:4])
    assert {stored.key for stored in backend.scan()} == set(KEYS[:3])
    assert put(backend, KEYS[3:4], 100) == [Status.OK]
    backend.close()
    with PosixBackend(PosixOptions(path=str(tmp_path))) as again:
        assert {stored.key for stored in again.scan()} == set(KEYS[:4])
