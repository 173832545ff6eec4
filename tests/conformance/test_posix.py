from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from kvtier.backends.posix import PosixBackend, PosixOptions
from kvtier.errors import BackendUnavailable
from kvtier.testing.backend_suite import KEYS, BackendSuite, get, put, record
from kvtier.types import ALIGN_BYTES, ChunkKey, Outcome, Status


def open_posix(root: Path, **options: object) -> PosixBackend:
    return PosixBackend(PosixOptions(path=str(root), **options))  # type: ignore[arg-type]


def open_without_direct(root: Path, **options: object) -> PosixBackend:
    """As on a file system that refuses O_DIRECT."""
    real_open = os.open

    def refuse_direct(path: str, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, *rest)

    with patch("os.open", refuse_direct):
        backend = open_posix(root, **options)
    assert not backend.is_direct
    return backend


def file_of(root: Path, key: ChunkKey) -> Path:
    return root / key.hex()[:2] / f"{key.hex()}.kvc"


def names(root: Path) -> list[str]:
    """Of all files that are records or their drafts."""
    return sorted(path.name for path in root.glob("[0-9a-f][0-9a-f]/*"))


class TestPosixBackend(BackendSuite):
    def make(self, root: Path) -> PosixBackend:
        return open_posix(root)


class TestPosixBackendThroughThreads(BackendSuite):
    model_examples = 5

    def make(self, root: Path) -> PosixBackend:
        backend = open_posix(root, method="threads", segment=ALIGN_BYTES, depth=3, durable=False)
        assert backend.method == "threads"
        return backend


class TestPosixBackendThroughThePageCache(BackendSuite):
    model_examples = 5

    def make(self, root: Path) -> PosixBackend:
        return open_without_direct(root, durable=False)


# ---- crashes

CRASHES = {
    "while writing": "posix.FileEngine = lambda *options: Dying(FileEngine(*options), 'write')",
    "before the sync": "posix.FileEngine = lambda *options: Dying(FileEngine(*options), 'sync')",
    "before the rename": "os.rename = die",
    "before the index knows": "posix.PosixIndex.note = die_if_asked",
}


@pytest.mark.parametrize("moment", CRASHES)
def test_a_killed_writer_leaves_whole_records_or_none(tmp_path: Path, moment: str) -> None:
    with open_posix(tmp_path) as backend:
        put(backend, KEYS[:1])
    child = f"""
        import os, signal
        from kvtier.backends import posix
        from kvtier.testing.backend_suite import KEYS, put
        FileEngine = posix.FileEngine
        is_open = False

        class Dying:
            def __init__(self, inner, operation):
                self.inner, self.operation = inner, operation
            def __getattr__(self, name):
                return die if name == self.operation and is_open else getattr(self.inner, name)

        def die(*arguments, **options):
            os.kill(os.getpid(), signal.SIGKILL)

        def die_if_asked(index, files):
            if files:
                die()

        {CRASHES[moment]}
        backend = posix.PosixBackend(posix.PosixOptions(path={str(tmp_path)!r}))
        is_open = True
        put(backend, KEYS[1:4])
        """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(child)], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(names(tmp_path)) > 1, "the crash left nothing, so it came too early"
    with open_posix(tmp_path) as backend:
        held = backend.contains(KEYS[:4])
        assert held == [True, *([moment == "before the index knows"] * 3)]
        assert [stored.key for stored in backend.scan()] == [
            key for key, is_held in zip(KEYS, held, strict=False) if is_held
        ]
        for key, is_held in zip(KEYS, held, strict=False):
            assert not is_held or get(backend, key)[1] == record(key)
        assert len(names(tmp_path)) == sum(held), "drafts are cleared away"


def test_what_was_acknowledged_survives_a_kill(tmp_path: Path) -> None:
    """A writer is killed at whatever moment it is in; all it had said OK to is there."""
    child = f"""
        from kvtier.backends.posix import PosixBackend, PosixOptions
        from kvtier.testing.backend_suite import put
        backend = PosixBackend(PosixOptions(path={str(tmp_path)!r}))
        for number in range(100_000):
            put(backend, [number.to_bytes(32, "big")], 4096)
            print(number, flush=True)
        """
    for acknowledged_count in (1, 50):
        writer = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(child)], stdout=subprocess.PIPE
        )
        with writer:
            assert writer.stdout is not None
            for _ in range(acknowledged_count):
                assert writer.stdout.readline()
            writer.kill()
        keys = [ChunkKey(number.to_bytes(32, "big")) for number in range(acknowledged_count)]
        with open_posix(tmp_path) as backend:
            for key in keys:
                assert get(backend, key, 4096)[1] == record(key, 4096)
            held = [stored.key for stored in backend.scan()]
            assert set(held) >= set(keys)
            backend.remove(held)


# ---- the folder and its index

DAMAGE: dict[str, Callable[[Path], object]] = {
    "index gone": shutil.rmtree,
    "index emptied": lambda index: (index / "data.mdb").write_bytes(b""),
    "index is noise": lambda index: (index / "data.mdb").write_bytes(random.randbytes(40_000)),
    "index cut short": lambda index: os.truncate(index / "data.mdb", 3 * ALIGN_BYTES),
    "state gone": lambda index: (index / "state").unlink(),
    "state is noise": lambda index: (index / "state").write_bytes(b"\xff\xfe"),
    "machine went down": lambda index: (index / "state").write_text("boot of another time"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_index_is_rebuilt_from_the_records(tmp_path: Path, damage: str) -> None:
    with open_posix(tmp_path) as backend:
        for key in KEYS:
            put(backend, [key])
        before = list(backend.scan())
    for age, key in enumerate(KEYS):  # files' times order what the index no longer does
        os.utime(file_of(tmp_path, key), (1000 + age, 1000 + age))
    DAMAGE[damage](tmp_path / "index")
    with open_posix(tmp_path) as backend:
        assert list(backend.scan()) == before
        assert put(backend, KEYS) == [Status.OK] * len(KEYS)
    with open_posix(tmp_path) as backend:
        assert list(backend.scan()) == before


def test_no_flipped_bit_of_the_index_misleads_anybody(tmp_path: Path) -> None:
    with open_posix(tmp_path) as backend:
        put(backend, KEYS)
        before = sorted(backend.scan(), key=lambda stored: stored.key)
    data = tmp_path / "index" / "data.mdb"
    seed = 5
    chance = random.Random(seed)
    for _ in range(30):
        content = bytearray(data.read_bytes())
        position = chance.randrange(8 * len(content))
        content[position // 8] ^= 1 << position % 8
        data.write_bytes(content)
        with open_posix(tmp_path) as backend:
            found = sorted(backend.scan(), key=lambda stored: stored.key)
            assert found == before, f"bit {position}, seed {seed}"


def test_files_that_came_changed_or_went_are_found_out(tmp_path: Path) -> None:
    with open_posix(tmp_path) as backend:
        put(backend, KEYS[:3])
    file_of(tmp_path, KEYS[0]).unlink()
    file_of(tmp_path, KEYS[1]).write_bytes(b"short")
    file_of(tmp_path, KEYS[3]).parent.mkdir()
    file_of(tmp_path, KEYS[3]).write_bytes(record(KEYS[3]))
    with open_posix(tmp_path) as backend:
        assert {stored.key: stored.head for stored in backend.scan()} == {
            KEYS[1]: b"short",
            KEYS[2]: record(KEYS[2])[:192],
            KEYS[3]: record(KEYS[3])[:192],
        }
        assert backend.contains(KEYS[:4]) == [False, True, True, True]


def test_foreign_names_are_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_posix(tmp_path) as backend:
        put(backend, KEYS[:1])
    folder = file_of(tmp_path, KEYS[0]).parent
    hex_name = KEYS[1].hex()
    foreign = [
        tmp_path / "notes.txt",
        folder / "notes.txt",
        folder / f"{hex_name}.kvc",  # a record's name in the wrong folder
        folder / f"{KEYS[0].hex()}.kvc.bak",
    ]
    for path in foreign:
        path.write_bytes(b"not ours")
    (folder / f"{KEYS[0].hex()[:2]}{'ab' * 31}.kvc").mkdir()  # a record's name, but a folder
    draft = folder / f"{KEYS[0].hex()}.17.tmp"
    draft.write_bytes(b"half a record")
    with open_posix(tmp_path) as backend:
        assert [stored.key for stored in backend.scan()] == KEYS[:1]
        assert not backend.contains(KEYS[1:2])[0]
    assert not draft.exists()
    assert all(path.read_bytes() == b"not ours" for path in foreign)
    assert [r.message for r in caplog.records] == [f"{tmp_path}: 5 foreign names left alone"]


def test_room_is_what_the_file_takes(tmp_path: Path) -> None:
    sizes = {KEYS[0]: 1, KEYS[1]: ALIGN_BYTES, KEYS[2]: ALIGN_BYTES + 1, KEYS[3]: 1 << 20}
    with open_posix(tmp_path) as backend:
        for key, size in sizes.items():
            put(backend, [key], size)
        for stored in backend.scan():
            blocks_bytes = file_of(tmp_path, stored.key).stat().st_blocks * 512
            rounded = -(-sizes[stored.key] // ALIGN_BYTES) * ALIGN_BYTES
            assert stored.nbytes == max(blocks_bytes, rounded)


def test_min_free_is_left_to_others(tmp_path: Path) -> None:
    with open_posix(tmp_path / "a", min_free=1 << 60) as backend:
        assert backend.free_bytes() == 0
    with open_posix(tmp_path / "b") as backend:
        room = os.statvfs(tmp_path)
        assert 0 < backend.free_bytes() <= room.f_blocks * room.f_frsize


def test_quarantine_keeps_the_latest_four_files(tmp_path: Path) -> None:
    with open_posix(tmp_path) as backend:
        put(backend, KEYS)
        for key in KEYS:
            backend.quarantine([key])
        kept = sorted(path.name for path in (tmp_path / "quarantine").iterdir())
        assert len(kept) == 4
        assert f"{KEYS[-1].hex()}.kvc" in kept
        assert names(tmp_path) == []


def test_records_are_for_their_owner_only(tmp_path: Path) -> None:
    with open_posix(tmp_path / "new") as backend:
        put(backend, KEYS[:1])
    file = file_of(tmp_path / "new", KEYS[0])
    assert file.stat().st_mode & 0o077 == 0
    assert (tmp_path / "new").stat().st_mode & 0o077 == 0


def test_a_key_of_another_length_is_refused(tmp_path: Path) -> None:
    with open_posix(tmp_path) as backend:
        for key in (b"", b"../../etc/passwd", b"k" * 33):
            with pytest.raises(ValueError, match=f"key of {len(key)} bytes, must be 32"):
                backend.contains([ChunkKey(key)])


# ---- opening


def test_a_second_opening_names_the_first(tmp_path: Path) -> None:
    by_us = f"in use by process {os.getpid()} "
    with open_posix(tmp_path), pytest.raises(BackendUnavailable, match=by_us):
        open_posix(tmp_path)
    open_posix(tmp_path).close()


def test_another_process_is_kept_out_until_the_first_dies(tmp_path: Path) -> None:
    child = f"""
        from kvtier.backends.posix import PosixBackend, PosixOptions
        backend = PosixBackend(PosixOptions(path={str(tmp_path)!r}))
        print("open", flush=True)
        input()
        """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(child)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"open\n"
        with pytest.raises(BackendUnavailable, match=f"process {first.pid} .* since "):
            open_posix(tmp_path)
        first.kill()
        first.wait(60)
        open_posix(tmp_path).close()


def test_a_failed_opening_lets_go_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "index").write_text("in the way")
    with pytest.raises(BackendUnavailable, match=str(tmp_path)):
        open_posix(tmp_path)
    (tmp_path / "index").unlink()
    open_posix(tmp_path).close()


@pytest.mark.parametrize("where", ["/dev/null/cache", "/proc/kvtier-cache", "file/cache", "file"])
def test_a_folder_that_cannot_be_used_is_named_with_the_reason(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("")
    root = tmp_path / where
    with pytest.raises(BackendUnavailable, match=f"{root} cannot be used: [A-Z]"):
        open_posix(root)


@pytest.fixture
def memory_folder() -> Iterator[Path]:
    """A folder of a file system in memory, which many kernels do not read past the page cache."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def test_a_file_system_in_memory_works(memory_folder: Path) -> None:
    with open_posix(memory_folder) as backend:
        put(backend, KEYS, 3 * ALIGN_BYTES)
    with open_posix(memory_folder) as backend:
        for key in KEYS:
            assert get(backend, key, 3 * ALIGN_BYTES)[1] == record(key, 3 * ALIGN_BYTES)
            assert get(backend, key, 100, 50)[1] == record(key, 3 * ALIGN_BYTES)[50:150]
        assert backend.remove(KEYS) == [Outcome(Status.OK)] * len(KEYS)


def test_records_of_either_kind_of_opening_are_the_same(tmp_path: Path) -> None:
    with open_without_direct(tmp_path) as backend:
        put(backend, KEYS[:1], 2 * ALIGN_BYTES)
        put(backend, KEYS[1:2], 5000)
    with open_posix(tmp_path) as backend:
        assert get(backend, KEYS[0], 2 * ALIGN_BYTES)[1] == record(KEYS[0], 2 * ALIGN_BYTES)
        assert get(backend, KEYS[1])[1] == record(KEYS[1])
