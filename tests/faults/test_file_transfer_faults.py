"""What full, failing, shrinking and hanging files come to: an errno for each piece, in time, and
nothing left behind. The faults are the kernel's own where a process can have it make them, and
stand-ins for its answers where not."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier._core import Completions
from kvtier.backends.file_regions import FileHandle
from kvtier.backends.posix_transfers import PosixTransfers
from kvtier.testing.faults import Gate
from kvtier.testing.transfer_scene import Bytes, End, Ends, bytes_at, dram
from kvtier.transfer import Op, Pieces, Side, Unsuitable
from kvtier.types import Region, RegionKind

PAGE = 4096
SOON_S = 10.0
METHODS = ("auto", "threads")


class Stage:
    """A backend with one region of memory."""

    def __init__(self, nbytes: int = 64 * PAGE, **options: Any) -> None:
        completions = Completions()
        self.ends = Ends(completions)
        self.backend = PosixTransfers(completions, **options)
        self._place = dram(nbytes)
        self.bytes: Bytes = bytes_at(self._place.region)
        self.bytes[:] = np.random.default_rng(1).integers(0, 256, nbytes, np.uint8)
        self._memory = self.backend.register(*self._place)
        self._ticket = 0

    def register(self, path: Path | str, nbytes: int) -> Any:
        return self.backend.register(Region(RegionKind.FILE, 0, nbytes), path)

    def start(
        self,
        op: Op,
        file_at: Sequence[int],
        lengths: Sequence[int],
        *files: Any,
        deadline_s: float = 60.0,
    ) -> int:
        """Pieces of memory one after the other, each on a page; file by file in turns."""
        count = len(lengths)
        starts = np.cumsum([0, *(-(-length // PAGE) * PAGE for length in lengths[:-1])])
        memory = Side((self._memory,), np.zeros(count, np.uint32), starts.astype(np.uint64))
        which = np.arange(count, dtype=np.uint32) % len(files)
        file = Side(files, which, np.array(file_at, np.uint64))
        pieces = Pieces(op, memory, file, np.array(lengths, np.uint64))
        self._ticket += 1
        self.backend.start(self.backend.prepare(pieces, None), self._ticket, deadline_s)
        return self._ticket

    def move(self, *arguments: Any) -> End:
        return self.ends.wait_quiet(self.start(*arguments))


@pytest.fixture(params=METHODS)
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    stage = Stage(method=request.param)
    yield stage
    stage.backend.close()


def opened(path: Path | str, flags: int = os.O_RDWR) -> FileHandle:
    """What the backend would never open itself, in the place of a file that went bad later."""
    fd = os.open(path, flags)
    return FileHandle(str(path), fd, fd, 0, True)


# Full disks --------------------------------------------------------------------------------------

FULL = f"""
import json, os, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from test_file_transfer_faults import PAGE, Op, Stage, Unsuitable
folder, method = Path(sys.argv[1]), sys.argv[2]
stage = Stage(64 * PAGE, method=method)
sparse = folder / "sparse"
if not sparse.exists():
    with open(sparse, "wb") as file:
        file.truncate(64 * PAGE)
region = stage.register(sparse, 64 * PAGE)
before = sorted(os.listdir(folder)), os.statvfs(folder).f_bfree
try:
    stage.register(folder / "new", 64 * PAGE)
    refusal = ""
except Unsuitable as refused:
    refusal = str(refused)
after = sorted(os.listdir(folder)), os.statvfs(folder).f_bfree
held = stage.move(Op.WRITE, [0], [4 * PAGE], region).results.tolist()
end = stage.move(Op.WRITE, [0, 4 * PAGE, PAGE, 2 * PAGE + 70], [PAGE, 48 * PAGE, PAGE, 100], region)
print(json.dumps([refusal, before == after, held, end.results.tolist(), end.detail]))
stage.backend.close()
"""


@pytest.mark.parametrize("method", METHODS)
def test_a_full_file_system_fails_what_finds_no_room(tmp_path: Path, method: str) -> None:
    """A file system of 128 KiB of our own, in a mount namespace; where that is not allowed, a
    limit on file sizes, which the kernel answers with another errno."""
    mount = f'mount -t tmpfs -o size={32 * PAGE} tmpfs {tmp_path} && exec "$@"'
    runs = [
        ["unshare", *namespaces, "sh", "-c", mount, "sh"]
        for namespaces in (["--mount"], ["--user", "--map-root-user", "--mount"])
    ]
    runs.append(["sh", "-c", f'ulimit -f {32 * PAGE // 512} && exec "$@"', "sh"])
    code = errno.EFBIG
    for prefix in runs:
        probe = subprocess.run([*prefix, "true"], capture_output=True, check=False)
        if probe.returncode == 0:
            code = errno.EFBIG if "ulimit" in prefix[2] else errno.ENOSPC
            break
    if code == errno.EFBIG:
        (tmp_path / "sparse").write_bytes(b"")
        os.truncate(tmp_path / "sparse", 64 * PAGE)
    run = subprocess.run(
        [*prefix, sys.executable, "-P", "-c", FULL, str(tmp_path), method],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    refusal, is_as_before, held, results, detail = json.loads(run.stdout)
    name = errno.errorcode[code]
    assert name in refusal
    assert is_as_before
    assert held == [4 * PAGE]
    assert results == [PAGE, -code, PAGE, 100]
    assert detail.startswith("1 of 4 pieces; the first: ")
    assert f"sparse: {name}: " in detail


def test_a_full_device_spoils_no_other_file(stage: Stage, tmp_path: Path) -> None:
    full = opened("/dev/full")
    file = stage.register(tmp_path / "file", 8 * PAGE)
    end = stage.move(Op.WRITE, [0, 0, 5, PAGE], [PAGE] * 4, full, file)
    assert end.results.tolist() == [-errno.ENOSPC, PAGE, -errno.ENOSPC, PAGE]
    assert end.detail.startswith("2 of 4 pieces; the first: /dev/full: ENOSPC: No space left")
    assert (tmp_path / "file").read_bytes()[: 2 * PAGE] == (
        stage.bytes[PAGE : 2 * PAGE].tobytes() + stage.bytes[3 * PAGE : 4 * PAGE].tobytes()
    )
    full.close()


# Failing disks -----------------------------------------------------------------------------------


def test_a_read_error_spoils_no_other_piece(stage: Stage) -> None:
    """The kernel's own EIO: a process's memory as a file, where nothing is mapped."""
    memory = opened("/proc/self/mem", os.O_RDONLY)
    source = np.random.default_rng(2).integers(0, 256, PAGE, np.uint8)
    end = stage.move(Op.READ, [0, source.ctypes.data, PAGE], [PAGE, PAGE, 100], memory)
    assert end.results.tolist() == [-errno.EIO, PAGE, -errno.EIO]
    assert "/proc/self/mem: EIO: " in end.detail
    assert (stage.bytes[PAGE : 2 * PAGE] == source).all()
    memory.close()


class _FailingSync:
    """The engine, with EIO for the sync of one descriptor."""

    def __init__(self, engine: Any, fd: int) -> None:
        self._engine, self._fd = engine, fd

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def sync(self, fds: Any) -> Any:
        results = self._engine.sync(fds)
        results[fds == self._fd] = -errno.EIO
        return results


def test_a_failed_sync_fails_the_writes_to_its_file_only(stage: Stage, tmp_path: Path) -> None:
    files = [stage.register(tmp_path / name, 4 * PAGE) for name in "ab"]
    stage.backend._disk = _FailingSync(  # type: ignore[assignment]
        stage.backend._disk, files[1].buffered
    )
    end = stage.move(Op.WRITE, [0, 0, PAGE, 5000], [PAGE, PAGE, 10, 10], *files)
    assert end.results.tolist() == [PAGE, -errno.EIO, 10, -errno.EIO]
    assert stage.move(Op.READ, [0, 0], [PAGE, PAGE], *files).results.tolist() == [PAGE, PAGE]


def test_a_file_that_shrank_gives_no_bytes_that_are_not_there(stage: Stage, tmp_path: Path) -> None:
    """Neither a piece past the new end nor one across it is OK, whichever way it is read."""
    path = tmp_path / "file"
    file = stage.register(path, 16 * PAGE)
    os.truncate(path, 5 * PAGE + 100)
    at = [0, 4 * PAGE, 5 * PAGE, 5 * PAGE, 8 * PAGE, 9 * PAGE + 1]
    lengths = [4 * PAGE, 4 * PAGE, PAGE, 100, PAGE, 10]
    end = stage.move(Op.READ, at, lengths, file)
    gone = -errno.ENODATA
    assert end.results.tolist() == [4 * PAGE, gone, gone, 100, gone, gone]
    assert f"{path}: ENODATA: " in end.detail
    some, whole = [0, 4 * PAGE, 8 * PAGE, 9 * PAGE + 1], [4 * PAGE, 4 * PAGE, PAGE, 10]
    assert stage.move(Op.WRITE, some, whole, file).results.tolist() == whole  # it grows again
    assert stage.move(Op.READ, some, whole, file).results.tolist() == whole


def test_a_removed_file_serves_on(stage: Stage, tmp_path: Path) -> None:
    path = tmp_path / "file"
    file = stage.register(path, 4 * PAGE)
    path.unlink()
    want = stage.bytes[: 4 * PAGE].copy()
    assert stage.move(Op.WRITE, [0], [4 * PAGE], file).results.tolist() == [4 * PAGE]
    stage.bytes[:] = 0
    assert stage.move(Op.READ, [0], [4 * PAGE], file).results.tolist() == [4 * PAGE]
    assert (stage.bytes[: 4 * PAGE] == want).all()
    assert not path.exists()


def test_a_write_across_a_limit_is_an_error_of_its_piece(stage: Stage, tmp_path: Path) -> None:
    """The kernel writes what fits, which is a short write, and refuses to go on."""
    path = tmp_path / "file"
    file = stage.register(path, 16 * PAGE)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6 * PAGE, before[1]))
    try:
        end = stage.move(Op.WRITE, [4 * PAGE, 0, 7 * PAGE], [4 * PAGE, PAGE, 10], file)
        with pytest.raises(Unsuitable, match="EFBIG"):
            stage.register(tmp_path / "new", 8 * PAGE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert end.results.tolist() == [-errno.EFBIG, PAGE, -errno.EFBIG]
    assert os.listdir(tmp_path) == ["file"]
    written = path.read_bytes()
    assert written[4 * PAGE : 6 * PAGE] == stage.bytes[: 2 * PAGE].tobytes()
    assert written[6 * PAGE :] == bytes(10 * PAGE)


# Hanging disks -----------------------------------------------------------------------------------


class HeldEngine:
    """The engine, behind a gate."""

    def __init__(self, engine: Any) -> None:
        self._engine, self.gate = engine, Gate()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def read(self, *arguments: Any) -> Any:
        self.gate.pass_through()
        return self._engine.read(*arguments)

    def close(self) -> None:
        self.gate.open()
        self._engine.close()


def hold(stage: Stage) -> HeldEngine:
    held = HeldEngine(stage.backend._engine)
    stage.backend._engine = held
    return held


def test_a_read_that_hangs_ends_at_its_deadline_and_is_quiet_later(
    stage: Stage, tmp_path: Path
) -> None:
    """When it goes on it begins nothing: the memory stays as the caller last saw it."""
    file = stage.register(tmp_path / "file", 4 * PAGE)
    stage.move(Op.READ, [0], [PAGE], file)  # its threads are there: the next one begins in time
    held = hold(stage)
    ticket = stage.start(Op.READ, [0, PAGE], [PAGE, PAGE], file, deadline_s=1.0)
    end = stage.ends.wait(ticket, SOON_S)
    assert held.gate.wait_reached()
    assert end.results.tolist() == [-errno.ETIMEDOUT] * 2
    assert not end.is_quiet
    before = stage.bytes.copy()
    held.gate.open()
    stage.ends.wait_quiet(ticket, SOON_S)
    assert (stage.bytes == before).all()


def test_a_cancelled_transfer_begins_nothing_more(stage: Stage, tmp_path: Path) -> None:
    file = stage.register(tmp_path / "file", 4 * PAGE)
    held = hold(stage)
    ticket = stage.start(Op.READ, [0, PAGE], [PAGE, PAGE], file)
    assert held.gate.wait_reached()
    stage.backend.cancel(ticket)
    end = stage.ends.wait(ticket, SOON_S)
    assert (end.results.tolist(), end.is_quiet) == ([-errno.ECANCELED] * 2, False)
    before = stage.bytes.copy()
    held.gate.open()
    stage.ends.wait_quiet(ticket, SOON_S)
    assert (stage.bytes == before).all()


def test_a_cancelled_write_leaves_the_file(stage: Stage, tmp_path: Path) -> None:
    """The read before it holds the only thread, so the write has not begun when it ends."""
    stage.backend.close()
    slow = type("Slow", (PosixTransfers,), {"threads": 1})
    completions = Completions()
    stage.ends, stage.backend = Ends(completions), slow(completions)
    path = tmp_path / "file"
    file = stage.register(path, 4 * PAGE)
    held = hold(stage)
    reading = stage.start(Op.READ, [0], [PAGE], file)
    assert held.gate.wait_reached()
    writing = stage.start(Op.WRITE, [0], [PAGE], file)
    stage.backend.cancel(writing)
    end = stage.ends.wait(writing, SOON_S)
    assert (end.results.tolist(), end.started, end.is_quiet) == ([-errno.ECANCELED], 0, True)
    held.gate.open()
    assert stage.ends.wait_quiet(reading).results.tolist() == [PAGE]
    assert path.read_bytes() == bytes(4 * PAGE)
    stage.backend.close()


def test_a_file_that_waits_in_the_kernel_ends_at_its_deadline(tmp_path: Path) -> None:
    """A pipe in a file's place holds an io_uring read for good; threads are told that it has no
    offsets, at once."""
    stage = Stage()
    os.mkfifo(tmp_path / "pipe")
    pipe = opened(tmp_path / "pipe")
    ticket = stage.start(Op.READ, [0], [PAGE], pipe, deadline_s=0.05)
    end = stage.ends.wait(ticket, SOON_S)
    if stage.backend._disk.method == "uring":
        assert (end.results.tolist(), end.is_quiet) == ([-errno.ETIMEDOUT], False)
        os.write(pipe.buffered, bytes(PAGE))
    else:
        assert end.results.tolist() == [-errno.ESPIPE]
    stage.ends.wait_quiet(ticket, SOON_S)
    stage.backend.close()
    pipe.close()


STUCK = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from test_file_transfer_faults import PAGE, SOON_S, Op, Stage, hold
stage = Stage()
file = stage.register(Path(sys.argv[1]) / "file", PAGE)
held = hold(stage)
ticket = stage.start(Op.READ, [0], [PAGE], file)
assert held.gate.wait_reached()
stage.backend.close()
print(stage.ends.wait(ticket, SOON_S).results.tolist(), flush=True)
"""


def test_a_read_that_hangs_holds_up_neither_close_nor_the_process(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-P", "-c", STUCK, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=SOON_S,
        check=False,
    )
    assert (run.returncode, run.stdout) == (0, f"[{-errno.ECANCELED}]\n"), run.stderr


# Many failures -----------------------------------------------------------------------------------


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def held_count() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def test_a_thousand_failures_leave_nothing_behind(stage: Stage, tmp_path: Path) -> None:
    full = opened("/dev/full")
    path = tmp_path / "file"
    file = stage.register(path, 8 * PAGE)
    os.truncate(path, PAGE)
    os.mkfifo(tmp_path / "pipe")

    def fail() -> None:
        end = stage.move(Op.WRITE, [0, 7], [PAGE, 50], full)
        assert end.results.tolist() == [-errno.ENOSPC] * 2
        end = stage.move(Op.READ, [2 * PAGE, 7 * PAGE + 1], [PAGE, 50], file)
        assert end.results.tolist() == [-errno.ENODATA] * 2
        for name, nbytes in (("pipe", PAGE), ("none/file", PAGE), ("huge", 1 << 60)):
            with pytest.raises(Unsuitable):
                stage.register(tmp_path / name, nbytes)

    for _ in range(50):  # queues and rings take their size
        fail()
    before, (fds, threads) = resident_bytes(), held_count()
    for _ in range(250):  # two transfers and three regions each
        fail()
    assert held_count()[0] == fds
    assert held_count()[1] <= threads + 16  # the kernel's own for io_uring come and go
    assert resident_bytes() - before < 4 << 20
    assert sorted(os.listdir(tmp_path)) == ["file", "pipe"]
    full.close()


KILLED = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from test_file_transfer_faults import PAGE, Op, Stage
stage = Stage()
file = stage.register(Path(sys.argv[1]) / "file", 64 * PAGE)
for turn in range(1, 10**6):
    stage.bytes[:] = turn % 251
    end = stage.move(Op.WRITE, [0], [64 * PAGE], file)
    assert end.results.tolist() == [64 * PAGE]
    print(turn, flush=True)
"""


def test_a_killed_writer_leaves_what_was_acknowledged(tmp_path: Path) -> None:
    """Each page holds what an acknowledged write or the one after it put there."""
    with subprocess.Popen(
        [sys.executable, "-P", "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        for _ in range(5):
            done = int(writer.stdout.readline())
        os.kill(writer.pid, signal.SIGKILL)
        done = max([done, *(int(line) for line in writer.stdout if line.endswith("\n"))])
    pages = np.frombuffer((tmp_path / "file").read_bytes(), np.uint8).reshape(64, PAGE)
    assert set(pages.ravel().tolist()) <= {done % 251, (done + 1) % 251}
