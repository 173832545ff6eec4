"""What a missing, broken, failing or hanging cuFile comes to, told by a stand-in for its library:
a reason, an errno for each piece, in time, and nothing left registered."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_cufile import Call, FakeCufile, build

from kvtier._core import Completions, GdsEngine
from kvtier.backends.gds import GdsTransfers
from kvtier.testing.transfer_scene import Bytes, End, Ends, bytes_at, dram
from kvtier.transfer import Op, Pieces, Side, Unsuitable
from kvtier.types import Region, RegionKind

PAGE = 4096
SOON_S = 10.0
THREADS = 4


class Stage:
    """A backend with one region of "GPU" memory."""

    def __init__(self, nbytes: int = 64 * PAGE, **options: Any) -> None:
        completions = Completions()
        self.ends = Ends(completions)
        self.backend = GdsTransfers(completions, threads=THREADS, segment_bytes=PAGE, **options)
        self._place = dram(nbytes)
        self.bytes: Bytes = bytes_at(self._place.region)
        self.bytes[:] = np.random.default_rng(1).integers(0, 256, nbytes, np.uint8)
        self.region = Region(RegionKind.VRAM, self._place.region.address, nbytes)
        self.memory = self.backend.register(self.region, self._place.source)
        self._ticket = 0

    def register(self, path: Path, nbytes: int) -> Any:
        return self.backend.register(Region(RegionKind.FILE, 0, nbytes), path)

    def start(
        self, op: Op, file: Any, at: Sequence[int], lengths: Sequence[int], deadline_s: float = 60.0
    ) -> int:
        """Pieces with the same offset in memory as in the file."""
        which = np.zeros(len(lengths), np.uint32)
        memory, files = (
            Side((handle,), which, np.array(at, np.uint64)) for handle in (self.memory, file)
        )
        pieces = Pieces(op, memory, files, np.array(lengths, np.uint64))
        self._ticket += 1
        self.backend.start(self.backend.prepare(pieces, None), self._ticket, deadline_s)
        return self._ticket

    def move(self, *arguments: Any) -> End:
        return self.ends.wait_quiet(self.start(*arguments))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCufile]:
    """The stand-in; at the end nothing may be open and nothing was done wrong."""
    monkeypatch.setenv("KVTIER_CUFILE_LIBRARY", str(build()))
    fake = FakeCufile()
    before = fake.counts()
    yield fake
    fake.reset()
    counts = fake.counts()
    assert counts[:3] == before[:3]
    assert counts.mistakes == before.mistakes


@pytest.fixture
def stage(fake: FakeCufile) -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.backend.close()


# Machines without it -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (5001, "cuFile's driver does not open: cuFile 5001: the nvidia-fs driver is not loaded"),
        (5011, r"cuFile 5011: the CUDA driver failed \(CUDA error 100\)"),
        (5033, "cuFile 5033: the driver cannot be initialised"),
        (5099, "cuFile 5099: an unknown error"),
    ],
)
def test_a_driver_that_does_not_open_is_unsuitable(
    fake: FakeCufile, code: int, reason: str
) -> None:
    fake.fail(Call.DRIVER_OPEN, code)
    with pytest.raises(Unsuitable, match=reason):
        GdsTransfers(Completions())


def test_a_missing_library_is_unsuitable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_CUFILE_LIBRARY", "/nonexistent/libcufile.so")
    with pytest.raises(Unsuitable, match=r"no usable cuFile library: /nonexistent/libcufile\.so"):
        GdsTransfers(Completions())
    monkeypatch.setenv("KVTIER_CUFILE_LIBRARY", "libm.so.6")
    with pytest.raises(Unsuitable, match=r"libm\.so\.6: it has no cuFileDriverOpen"):
        GdsTransfers(Completions())


def test_the_fallback_serves_host_memory_and_says_why_no_other(
    fake: FakeCufile, tmp_path: Path
) -> None:
    fake.fail(Call.DRIVER_OPEN, 5001)
    backend = GdsTransfers(Completions(), fallback=True)
    assert {route.local for route in backend.reach.routes} == {RegionKind.DRAM, RegionKind.FILE}
    region, memory = dram(PAGE)
    backend.deregister(backend.register(region, memory))
    with pytest.raises(Unsuitable, match=r"CUDA is not available here: .* nvidia-fs"):
        backend.register(Region(RegionKind.VRAM, region.address, PAGE), memory)
    backend.close()


def test_a_driver_that_somebody_else_opened_is_left_open(fake: FakeCufile, tmp_path: Path) -> None:
    other = GdsEngine(1, PAGE)
    fake.fail(Call.DRIVER_OPEN, 5026)
    stage = Stage()
    file = stage.register(tmp_path / "file", PAGE)
    assert stage.move(Op.WRITE, file, [0], [PAGE]).results.tolist() == [PAGE]
    stage.backend.close()
    assert fake.counts().drivers == 1
    other.close()


# Registrations -----------------------------------------------------------------------------------


def test_files_and_memory_are_registered_once_and_forgotten(
    fake: FakeCufile, stage: Stage, tmp_path: Path
) -> None:
    before = fake.counts()
    assert before[:3] == (1, 0, 1)
    path = tmp_path / "file"
    files = [stage.register(path, PAGE) for _ in range(3)]
    again = [stage.backend.register(stage.region, None) for _ in range(3)]
    counts = fake.counts()
    assert counts[:3] == (1, 3, 1)
    for _ in range(3):
        stage.move(Op.WRITE, files[0], [0], [PAGE])
    assert fake.counts().calls[Call.BUFFER_REGISTER] == before.calls[Call.BUFFER_REGISTER]
    for handle in (*files, *files, *again):  # a file again does nothing
        stage.backend.deregister(handle)
    assert fake.counts()[:3] == (1, 0, 1)
    stage.backend.deregister(stage.memory)
    assert fake.counts()[:3] == (1, 0, 0)


def test_closing_forgets_what_is_still_registered(fake: FakeCufile, tmp_path: Path) -> None:
    open_before = len(os.listdir("/proc/self/fd"))
    stage = Stage()
    for name in "abc":
        stage.register(tmp_path / name, PAGE)
    stage.backend.close()
    stage.backend.close()
    assert fake.counts()[:3] == (0, 0, 0)
    assert len(os.listdir("/proc/self/fd")) <= open_before + 1  # the end of `stage.ends`


def test_memory_within_other_memory_works_without(
    fake: FakeCufile, stage: Stage, tmp_path: Path
) -> None:
    file = stage.register(tmp_path / "file", 4 * PAGE)
    whole = stage.memory
    inner = Region(RegionKind.VRAM, stage.region.address + PAGE, 2 * PAGE)
    longer = Region(RegionKind.VRAM, stage.region.address, stage.region.nbytes + 1)
    for region, shift in ((inner, PAGE), (longer, 0)):
        stage.memory = stage.backend.register(region, None)
        assert fake.counts().buffers == 1
        end = stage.move(Op.WRITE, file, [0, 2 * PAGE], [PAGE, 100])
        assert end.results.tolist() == [PAGE, 100]
        assert (tmp_path / "file").read_bytes()[:PAGE] == (
            stage.bytes[shift : shift + PAGE].tobytes()
        )
        stage.backend.deregister(stage.memory)
    stage.memory = whole
    assert fake.counts().buffers == 1


def test_what_cufile_does_not_serve_is_refused_with_its_reason(
    fake: FakeCufile, stage: Stage, tmp_path: Path
) -> None:
    open_before = len(os.listdir("/proc/self/fd"))
    for code, reason in ((5008, "no GPUDirect Storage for this file"), (5027, "cuFile 5027")):
        fake.fail(Call.HANDLE_REGISTER, code)
        with pytest.raises(Unsuitable, match=f"file: the file cannot be registered: .*{reason}"):
            stage.register(tmp_path / "file", PAGE)
    fake.fail(Call.BUFFER_REGISTER, 5036)
    other, memory = dram(PAGE)
    with pytest.raises(Unsuitable, match="no GPU memory could be pinned"):
        stage.backend.register(other, memory)
    with pytest.raises(Unsuitable, match="not obj"):
        stage.backend.register(Region(RegionKind.OBJ, 0, PAGE), "name")
    assert len(os.listdir("/proc/self/fd")) == open_before
    assert fake.counts()[:3] == (1, 0, 1)


# Transfers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1000, PAGE - 1])
def test_short_calls_are_completed(
    fake: FakeCufile, stage: Stage, tmp_path: Path, most: int
) -> None:
    path = tmp_path / "file"
    file = stage.register(path, 32 * PAGE)
    want = stage.bytes.copy()
    at, lengths = [0, 8 * PAGE, 20 * PAGE + 3], [6 * PAGE, 5001, 2 * PAGE]
    fake.move_at_most(most)
    calls = fake.counts().calls[Call.WRITE]
    assert stage.move(Op.WRITE, file, at, lengths).results.tolist() == lengths
    assert fake.counts().calls[Call.WRITE] - calls >= sum(lengths) // most
    stage.bytes[:] = 0
    assert stage.move(Op.READ, file, at, lengths).results.tolist() == lengths
    for start, length in zip(at, lengths, strict=True):
        part = slice(start, start + length)
        assert (stage.bytes[part] == want[part]).all()


def test_a_read_past_the_end_is_an_error(fake: FakeCufile, stage: Stage, tmp_path: Path) -> None:
    path = tmp_path / "file"
    file = stage.register(path, 8 * PAGE)
    os.truncate(path, 2 * PAGE + 10)
    end = stage.move(Op.READ, file, [0, 2 * PAGE, PAGE, 4 * PAGE], [PAGE, 10, 2 * PAGE, PAGE])
    assert end.results.tolist() == [PAGE, 10, -errno.ENODATA, -errno.ENODATA]


@pytest.mark.parametrize("op", list(Op))
@pytest.mark.parametrize(
    ("code", "error", "words"),
    [
        (5010, errno.EIO, "cuFile 5010: the nvidia-fs driver failed"),
        (5012, errno.EFAULT, "cuFile 5012: no device memory at this address"),
        (5015, errno.EINVAL, "cuFile 5015: another CUDA context is current"),
        (5037, errno.EAGAIN, "cuFile 5037: "),
        (errno.EIO, errno.EIO, os.strerror(errno.EIO)),
        (errno.ENOSPC, errno.ENOSPC, os.strerror(errno.ENOSPC)),
    ],
)
def test_a_failed_call_is_an_errno_of_its_piece_with_words(
    fake: FakeCufile, stage: Stage, tmp_path: Path, op: Op, code: int, error: int, words: str
) -> None:
    file = stage.register(tmp_path / "file", 8 * PAGE)
    fake.fail(Call.READ if op is Op.READ else Call.WRITE, code, skip=1)
    end = stage.move(op, file, [0, PAGE, 2 * PAGE], [PAGE, PAGE, PAGE])
    assert sorted(end.results.tolist()) == [-error, PAGE, PAGE]
    name = errno.errorcode[error]
    where = f"1 of 3 pieces; the first: {tmp_path}/file: {name}: "
    assert end.detail.startswith(where + words)


def test_an_interrupted_call_is_repeated(fake: FakeCufile, stage: Stage, tmp_path: Path) -> None:
    file = stage.register(tmp_path / "file", PAGE)
    fake.fail(Call.READ, errno.EINTR, count=3)
    assert stage.move(Op.READ, file, [0], [PAGE]).results.tolist() == [PAGE]


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_a_call_that_hangs_ends_in_time_and_nothing_more_is_begun(
    fake: FakeCufile, stage: Stage, tmp_path: Path, is_cancelled: bool
) -> None:
    file = stage.register(tmp_path / "file", 16 * PAGE)
    calls = fake.counts().calls[Call.READ]
    with fake.held():
        deadline_s = 60.0 if is_cancelled else 0.2
        ticket = stage.start(Op.READ, file, [i * PAGE for i in range(16)], [PAGE] * 16, deadline_s)
        fake.wait_held(THREADS)
        if is_cancelled:
            stage.backend.cancel(ticket)
        end = stage.ends.wait(ticket, SOON_S)
        code = errno.ECANCELED if is_cancelled else errno.ETIMEDOUT
        assert (end.results.tolist(), end.is_quiet) == ([-code] * 16, False)
        assert not stage.ends.is_quiet(ticket)
    stage.ends.wait_quiet(ticket, SOON_S)
    assert fake.counts().calls[Call.READ] - calls == THREADS


def test_a_call_that_hangs_does_not_hold_up_close(fake: FakeCufile, tmp_path: Path) -> None:
    """What it uses stays registered as long as it may be used."""
    stage = Stage()
    file = stage.register(tmp_path / "file", PAGE)
    with fake.held():
        ticket = stage.start(Op.READ, file, [0], [PAGE])
        fake.wait_held()
        stage.backend.close()
        assert stage.ends.wait(ticket, SOON_S).results.tolist() == [-errno.ECANCELED]
        assert fake.counts()[:3] == (1, 1, 1)
    stage.ends.wait_quiet(ticket, SOON_S)
    stage.backend._engine.close()
    file.close()


def test_a_thousand_failures_leave_nothing_behind(
    fake: FakeCufile, stage: Stage, tmp_path: Path
) -> None:
    file = stage.register(tmp_path / "file", PAGE)

    def fail() -> None:
        fake.fail(Call.READ, 5012)
        assert stage.move(Op.READ, file, [0], [PAGE]).results.tolist() == [-errno.EFAULT]
        fake.fail(Call.HANDLE_REGISTER, 5008)
        with pytest.raises(Unsuitable):
            stage.register(tmp_path / "other", PAGE)
        fake.fail(Call.DRIVER_OPEN, 5001)
        with pytest.raises(Unsuitable):
            GdsTransfers(Completions())

    for _ in range(30):
        fail()
    counts = fake.counts()[:4]
    fds, threads = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    resident = resident_bytes()
    for _ in range(334):
        fail()
    assert fake.counts()[:4] == counts
    assert len(os.listdir("/proc/self/fd")) == fds
    assert len(os.listdir("/proc/self/task")) <= threads + 16  # joined ones fade a moment later
    assert resident_bytes() - resident < 4 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
