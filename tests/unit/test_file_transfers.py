"""What is special to `PosixTransfers`: paths, room, alignment, durability, either side."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvtier._core import Completions
from kvtier.backends.file_regions import FileHandle
from kvtier.backends.posix_transfers import PosixTransfers
from kvtier.testing.transfer_scene import Bytes, End, Ends, bytes_at, dram
from kvtier.transfer import Op, Pieces, Side, Unsuitable
from kvtier.types import Region, RegionKind

PAGE = 4096


class Stage:
    """A backend, and one region of memory to go with whatever files a test makes."""

    def __init__(self, nbytes: int = 64 * PAGE, **options: Any) -> None:
        completions = Completions()
        self.ends = Ends(completions)
        self.backend = PosixTransfers(completions, **options)
        self._place = dram(nbytes)
        self.bytes: Bytes = bytes_at(self._place.region)
        self.bytes[:] = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
        self._memory = self.backend.register(*self._place)
        self._ticket = 0

    def register(
        self, path: Any, nbytes: int, start: int = 0, kind: RegionKind = RegionKind.FILE
    ) -> Any:
        return self.backend.register(Region(kind, start, nbytes), path)

    def pieces(
        self, op: Op, memory_at: Any, file_at: Any, lengths: Any, *files: Any, swap: bool = False
    ) -> Pieces:
        count = len(lengths)
        memory = Side((self._memory,), np.zeros(count, np.uint32), np.array(memory_at, np.uint64))
        which = np.arange(count, dtype=np.uint32) % len(files)
        file = Side(files, which, np.array(file_at, np.uint64))
        sides = (file, memory) if swap else (memory, file)
        return Pieces(op, *sides, np.array(lengths, np.uint64))

    def move(self, op: Op, *where: Any, swap: bool = False) -> End:
        prepared = self.backend.prepare(self.pieces(op, *where, swap=swap), None)
        self._ticket += 1
        self.backend.start(prepared, self._ticket, 60.0)
        return self.ends.wait_quiet(self._ticket)


@pytest.fixture(params=["auto", "threads"])
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    stage = Stage(method=request.param)
    yield stage
    stage.backend.close()


def content(path: Path) -> npt.NDArray[np.uint8]:
    return np.frombuffer(path.read_bytes(), np.uint8)


def test_pieces_of_any_alignment_go_both_ways(stage: Stage, tmp_path: Path) -> None:
    """Aligned ones past the page cache, the others through it, side by side in one file."""
    path = tmp_path / "file"
    file = stage.register(path, 32 * PAGE)
    before = stage.bytes.copy()
    memory_at = [0, PAGE, 2 * PAGE + 1, 4 * PAGE, 9 * PAGE + 7]
    file_at = [0, PAGE, 2 * PAGE, 3 * PAGE + 512, 8 * PAGE + 3]
    lengths = [PAGE, PAGE - 1, PAGE, 4 * PAGE, 6 * PAGE + 5]
    assert stage.move(Op.WRITE, memory_at, file_at, lengths, file).results.tolist() == lengths
    written = content(path)
    for source, target, length in zip(memory_at, file_at, lengths, strict=True):
        assert (written[target : target + length] == before[source : source + length]).all()
    stage.bytes[:] = 0
    assert stage.move(Op.READ, memory_at, file_at, lengths, file).results.tolist() == lengths
    for source, length in zip(memory_at, lengths, strict=True):
        assert (stage.bytes[source : source + length] == before[source : source + length]).all()
    assert stage.bytes.sum(dtype=np.int64) == sum(
        before[source : source + length].sum(dtype=np.int64)
        for source, length in zip(memory_at, lengths, strict=True)
    )


def test_both_views_of_a_file_are_the_same(stage: Stage, tmp_path: Path) -> None:
    """Cached and direct pieces of the same bytes, in turns, with no sync between."""
    stage.backend.close()
    stage = Stage(durable=False)
    file = stage.register(tmp_path / "file", 8 * PAGE)
    first, second = stage.bytes[: 8 * PAGE].copy(), stage.bytes[8 * PAGE + 1 : 16 * PAGE + 1].copy()
    for _ in range(20):
        for at, want in ((0, first), (8 * PAGE + 1, second)):  # aligned, then not
            stage.move(Op.WRITE, [at], [0], [8 * PAGE], file)
            for target in (32 * PAGE, 41 * PAGE + 1):
                stage.bytes[target : target + 8 * PAGE] = 0
                stage.move(Op.READ, [target], [0], [8 * PAGE], file)
                assert (stage.bytes[target : target + 8 * PAGE] == want).all()
    stage.backend.close()


def test_the_file_may_be_the_local_side(stage: Stage, tmp_path: Path) -> None:
    path = tmp_path / "file"
    file = stage.register(path, 2 * PAGE)
    end = stage.move(Op.READ, [5 * PAGE], [PAGE], [PAGE], file, swap=True)
    assert end.results.tolist() == [PAGE]
    assert (content(path)[PAGE:] == stage.bytes[5 * PAGE : 6 * PAGE]).all()
    stage.move(Op.WRITE, [0], [PAGE], [PAGE], file, swap=True)
    assert (stage.bytes[:PAGE] == stage.bytes[5 * PAGE : 6 * PAGE]).all()


def test_one_transfer_spans_files(stage: Stage, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "abc"]
    files = [stage.register(path, 4 * PAGE) for path in paths]
    at = np.arange(12) * PAGE
    end = stage.move(Op.WRITE, at, at // (3 * PAGE) * PAGE, [PAGE] * 12, *files)
    assert end.results.tolist() == [PAGE] * 12
    pages = stage.bytes[: 12 * PAGE].reshape(4, 3, PAGE)
    for number, path in enumerate(paths):
        assert (content(path).reshape(4, PAGE) == pages[:, number]).all()


def test_a_new_file_is_its_owners_and_has_room(stage: Stage, tmp_path: Path) -> None:
    path = tmp_path / "file"
    stage.register(str(path), 100 * PAGE)
    status = path.stat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_size == 100 * PAGE
    assert status.st_blocks * 512 >= 100 * PAGE


def test_a_region_is_a_part_of_its_file(stage: Stage, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 3000)
    region = stage.register(path, PAGE, start=2 * PAGE)
    assert path.stat().st_size == 3 * PAGE
    assert stage.move(Op.WRITE, [0], [10], [100], region).results.tolist() == [100]
    written = path.read_bytes()
    assert written[:3000] == b"x" * 3000
    assert written[2 * PAGE + 10 : 2 * PAGE + 110] == stage.bytes[:100].tobytes()
    stage.register(path, PAGE)  # a region that ends sooner cuts nothing off
    assert path.read_bytes() == written


def test_what_cannot_be_used_is_refused_with_the_reason(stage: Stage, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "short").write_bytes(b"x" * 10)
    blk = RegionKind.BLK
    for path, nbytes, kind, reason in [
        (tmp_path, PAGE, RegionKind.FILE, "EISDIR"),
        (tmp_path / "none" / "file", PAGE, RegionKind.FILE, "ENOENT"),
        (tmp_path / "pipe", PAGE, RegionKind.FILE, "no file and no block device"),
        ("/dev/full", PAGE, RegionKind.FILE, "no file and no block device"),
        (tmp_path / "none", PAGE, blk, "ENOENT"),
        (tmp_path / "short", PAGE, blk, "has 10 bytes, the region ends at 4096"),
        (sys.executable, 1 << 40, RegionKind.FILE, r"has \d+ bytes, the region ends at \d+"),
        (tmp_path / "huge", 1 << 63, RegionKind.FILE, "past what a file can hold"),
        (b"\0", PAGE, RegionKind.FILE, "null byte"),
        (7, PAGE, RegionKind.FILE, "a path, not int"),
        (None, PAGE, RegionKind.VRAM, "not vram"),
        (None, PAGE, RegionKind.OBJ, "not obj"),
    ]:
        with pytest.raises(Unsuitable, match=reason):
            stage.register(path, nbytes, kind=kind)
    assert sorted(os.listdir(tmp_path)) == ["pipe", "short"]


def test_a_file_that_may_not_be_written_can_be_read(stage: Stage) -> None:
    """The interpreter that runs: nobody may write to it, not even root."""
    path = Path(sys.executable).resolve()
    file = stage.register(path, path.stat().st_size)
    assert stage.move(Op.READ, [0, PAGE + 1], [PAGE, 5], [PAGE, 100], file).results.tolist() == [
        PAGE,
        100,
    ]
    start = path.read_bytes()[: 2 * PAGE]
    assert stage.bytes[:PAGE].tobytes() == start[PAGE:]
    assert stage.bytes[PAGE + 1 : PAGE + 101].tobytes() == start[5:105]
    with pytest.raises(Unsuitable, match="for reading only"):
        stage.backend.prepare(stage.pieces(Op.WRITE, [0], [0], [1], file), None)


def test_sides_of_one_kind_are_refused(stage: Stage, tmp_path: Path) -> None:
    file = stage.register(tmp_path / "file", PAGE)
    pieces = stage.pieces(Op.READ, [0], [0], [1], file)
    for local, remote in ((pieces.local, pieces.local), (pieces.remote, pieces.remote)):
        with pytest.raises(Unsuitable, match="on one side and files on the other"):
            stage.backend.prepare(replace(pieces, local=local, remote=remote), None)


def test_a_path_is_opened_once(stage: Stage, tmp_path: Path) -> None:
    """A file of the same name that comes later is another file."""
    path = tmp_path / "file"
    file = stage.register(path, PAGE)
    path.rename(tmp_path / "moved")
    path.write_bytes(b"x" * PAGE)
    assert stage.move(Op.WRITE, [0], [0], [PAGE], file).results.tolist() == [PAGE]
    assert path.read_bytes() == b"x" * PAGE
    assert (content(tmp_path / "moved") == stage.bytes[:PAGE]).all()


class _Watched:
    """The engine, with a list of what was called."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.calls.append(name)
        return getattr(self._engine, name)


@pytest.mark.parametrize("durable", [True, False])
def test_durable_is_a_sync_before_the_end(tmp_path: Path, durable: bool) -> None:
    stage = Stage(durable=durable)
    assert stage.backend.reach.durable is durable
    file = stage.register(tmp_path / "file", PAGE)
    watched = _Watched(stage.backend._engine)
    stage.backend._engine = watched
    stage.backend._disk = watched  # type: ignore[assignment]
    stage.move(Op.WRITE, [0], [0], [PAGE], file)
    stage.move(Op.READ, [0], [0], [PAGE], file)
    assert watched.calls == (["write", "sync", "read"] if durable else ["write", "read"])
    stage.backend.close()


def test_what_refuses_direct_access_is_moved_through_the_cache(
    stage: Stage, tmp_path: Path
) -> None:
    """A descriptor for reading that answers EINVAL to every read stands for such a file system."""
    path = tmp_path / "file"
    file = stage.register(path, 4 * PAGE)
    assert isinstance(file, FileHandle)
    with open("/proc/self/ns/mnt", "rb", buffering=0) as refusing:
        with pytest.raises(OSError, match=os.strerror(errno.EINVAL)):
            os.pread(refusing.fileno(), 1, 0)
        broken = replace(file, direct=refusing.fileno())
        prepared = stage.backend.prepare(
            stage.pieces(Op.READ, [0, PAGE], [0, PAGE], [PAGE, 100], broken), None
        )
        path.write_bytes(stage.bytes[8 * PAGE : 12 * PAGE].tobytes())
        stage.backend.start(prepared, 100, 60.0)
        assert stage.ends.wait_quiet(100).results.tolist() == [PAGE, 100]
        assert (stage.bytes[:PAGE] == stage.bytes[8 * PAGE : 9 * PAGE]).all()
        assert set(prepared.fds.tolist()) == {file.buffered}


@contextlib.contextmanager
def device(path: Path, nbytes: int) -> Iterator[str]:
    """A block device over a file, or the file itself where this process may not make one."""
    path.write_bytes(bytes(nbytes))
    made = subprocess.run(
        ["losetup", "--find", "--show", path], capture_output=True, text=True, check=False
    )
    if made.returncode != 0:
        yield str(path)
        return
    try:
        yield made.stdout.strip()
    finally:
        subprocess.run(["losetup", "--detach", made.stdout.strip()], check=True)


def test_a_block_device_is_read_and_written(stage: Stage, tmp_path: Path) -> None:
    path = tmp_path / "disk"
    with device(path, 1 << 20) as name:
        disk = stage.register(name, 1 << 20, kind=RegionKind.BLK)
        with pytest.raises(Unsuitable, match="has 1048576 bytes"):
            stage.register(name, (1 << 20) + 1, kind=RegionKind.BLK)
        before = stage.bytes.copy()
        memory_at, disk_at, lengths = [0, 8 * PAGE, 20], [40 * PAGE, 0, 9 * PAGE + 5], [PAGE] * 3
        end = stage.move(Op.WRITE, memory_at, disk_at, lengths, disk)
        assert end.results.tolist() == lengths
        stage.bytes[:] = 0
        assert stage.move(Op.READ, memory_at, disk_at, lengths, disk).results.tolist() == lengths
        for at in memory_at:
            assert (stage.bytes[at : at + PAGE] == before[at : at + PAGE]).all()
        stage.backend.deregister(disk)
    assert (content(path)[40 * PAGE : 41 * PAGE] == before[:PAGE]).all()


def test_four_thousand_pieces_are_prepared_at_once(stage: Stage, tmp_path: Path) -> None:
    """Array work: 16 ms would be 4 us of Python for each piece."""
    files = [stage.register(tmp_path / name, 32 * PAGE) for name in "ab"]
    at = np.arange(4096) % 32 * PAGE
    pieces = stage.pieces(Op.READ, at, at, np.full(4096, PAGE), *files)
    costs_s = []
    for _ in range(10):
        begin_s = time.perf_counter()
        stage.backend.prepare(pieces, None)
        costs_s.append(time.perf_counter() - begin_s)
    assert min(costs_s) < 0.004
