"""What a missing, broken, failing or hanging cuFile or CUDA comes to, told by stand-ins for both:
a reason, an errno for each piece, in time, and nothing left registered."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_gds import Call, FakeCufile, build

from kvtier._core import Completions, GdsEngine
from kvtier.backends.gds import GdsTransfers
from kvtier.testing.transfer_scene import Bytes, End, Ends, bytes_at, dram
from kvtier.transfer import Op, Pieces, Side, Unsuitable
from kvtier.types import Region, RegionKind

PAGE = 4096
SOON_S = 10.0
DEPTH = 4
MODES = ("threads", "async")


class Stage:
    """A backend with one region of memory, a GPU's unless told otherwise."""

    def __init__(self, nbytes: int = 64 * PAGE, *, is_vram: bool = True, **options: Any) -> None:
        completions = Completions()
        self.ends = Ends(completions)
        self.backend = GdsTransfers(completions, depth=DEPTH, segment_bytes=PAGE, **options)
        self._place = dram(nbytes)
        self.bytes: Bytes = bytes_at(self._place.region)
        self.bytes[:] = np.random.default_rng(1).integers(0, 256, nbytes, np.uint8)
        self.region = self._place.region
        if is_vram:
            self.region = FakeCufile().own(self.region, 0)
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
    """The stand-ins; at the end nothing may be open and nothing was done wrong."""
    FakeCufile.install(monkeypatch)
    fake = FakeCufile()
    before = fake.held_now(), fake.mistakes()
    yield fake
    fake.reset()
    assert (fake.held_now(), fake.mistakes()) == before


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def stage(fake: FakeCufile, mode: str) -> Iterator[Stage]:
    stage = Stage(mode=mode)
    yield stage
    stage.backend.close()


@pytest.fixture
def streams(fake: FakeCufile) -> Iterator[Stage]:
    stage = Stage(mode="async")
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
    FakeCufile.install(monkeypatch)
    monkeypatch.setenv("KVTIER_CUFILE_LIBRARY", "/nonexistent/libcufile.so")
    with pytest.raises(Unsuitable, match=r"no usable cuFile library: /nonexistent/libcufile\.so"):
        GdsTransfers(Completions())
    monkeypatch.setenv("KVTIER_CUFILE_LIBRARY", "libm.so.6")
    with pytest.raises(Unsuitable, match=r"libm\.so\.6: it has no cuFileDriverOpen"):
        GdsTransfers(Completions())


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (0, "no CUDA driver: /nonexistent/libcuda"),
        (100, "CUDA does not start: CUDA 100: CUDA_ERROR_NO_DEVICE"),
    ],
)
def test_without_cuda_host_memory_is_served_and_no_other(
    fake: FakeCufile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int, reason: str
) -> None:
    if code:
        fake.fail(Call.CUDA_INIT, code, count=2)
    else:
        monkeypatch.setenv("KVTIER_CUDA_LIBRARY", "/nonexistent/libcuda.so.1")
    stage = Stage(is_vram=False)
    assert {route.local for route in stage.backend.reach.routes} == {
        RegionKind.DRAM,
        RegionKind.FILE,
    }
    with pytest.raises(Unsuitable, match=f"no GPU memory can be served here: {reason}"):
        stage.backend.register(Region(RegionKind.VRAM, stage.region.address, PAGE), None)
    file = stage.register(tmp_path / "file", PAGE)
    assert stage.move(Op.WRITE, file, [0], [PAGE]).results.tolist() == [PAGE]
    stage.backend.close()
    with pytest.raises(Unsuitable, match=reason):
        GdsTransfers(Completions(), mode="async")


def test_a_library_is_not_looked_for_without_cuda(
    fake: FakeCufile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVIDIA's own would load, write a log file where the process runs, and fail."""
    monkeypatch.delenv("KVTIER_CUFILE_LIBRARY")
    fake.fail(Call.CUDA_INIT, 100)
    with pytest.raises(Unsuitable, match="CUDA does not start: CUDA 100: CUDA_ERROR_NO_DEVICE"):
        GdsTransfers(Completions())


def test_a_library_without_operations_on_streams_serves_by_threads_only(
    fake: FakeCufile, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeCufile.install(monkeypatch, build(with_streams=False))
    with pytest.raises(Unsuitable, match=r"no operations on streams: .* has no cuFileReadAsync"):
        GdsTransfers(Completions(), mode="async")
    GdsTransfers(Completions()).close()


def test_the_fallback_serves_host_memory_and_says_why_no_other(
    fake: FakeCufile, tmp_path: Path
) -> None:
    fake.fail(Call.DRIVER_OPEN, 5001)
    backend = GdsTransfers(Completions(), fallback=True)
    assert {route.local for route in backend.reach.routes} == {RegionKind.DRAM, RegionKind.FILE}
    region, memory = dram(PAGE)
    backend.deregister(backend.register(region, memory))
    with pytest.raises(Unsuitable, match=r"no GPU memory can be served here: .* nvidia-fs"):
        backend.register(Region(RegionKind.VRAM, region.address, PAGE), memory)
    backend.close()


def test_a_driver_that_somebody_else_opened_is_left_open(fake: FakeCufile, tmp_path: Path) -> None:
    other = GdsEngine(1, PAGE)
    fake.fail(Call.DRIVER_OPEN, 5026)
    stage = Stage()
    file = stage.register(tmp_path / "file", PAGE)
    assert stage.move(Op.WRITE, file, [0], [PAGE]).results.tolist() == [PAGE]
    stage.backend.close()
    assert fake.held_now().drivers == 1
    other.close()


# Registrations -----------------------------------------------------------------------------------


def test_files_and_memory_are_registered_once_and_forgotten(
    fake: FakeCufile, stage: Stage, tmp_path: Path
) -> None:
    registered = fake.calls(Call.BUFFER_REGISTER)
    assert fake.held_now()[:3] == (1, 0, 1)
    path = tmp_path / "file"
    files = [stage.register(path, PAGE) for _ in range(3)]
    again = [stage.backend.register(stage.region, None) for _ in range(3)]
    assert fake.held_now()[:3] == (1, 3, 1)
    for _ in range(3):
        stage.move(Op.WRITE, files[0], [0], [PAGE])
    assert fake.calls(Call.BUFFER_REGISTER) == registered
    for handle in (*files, *files, *again):  # a file again does nothing
        stage.backend.deregister(handle)
    assert fake.held_now()[:3] == (1, 0, 1)
    stage.backend.deregister(stage.memory)
    assert fake.held_now()[:3] == (1, 0, 0)


def test_closing_forgets_what_is_still_registered(fake: FakeCufile, tmp_path: Path) -> None:
    open_before = len(os.listdir("/proc/self/fd"))
    stage = Stage()
    for name in "abc":
        stage.register(tmp_path / name, PAGE)
    stage.backend.close()
    stage.backend.close()
    assert fake.held_now()[:3] == (0, 0, 0)
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
        assert fake.held_now().buffers == 1
        end = stage.move(Op.WRITE, file, [0, 2 * PAGE], [PAGE, 100])
        assert end.results.tolist() == [PAGE, 100]
        assert (tmp_path / "file").read_bytes()[:PAGE] == (
            stage.bytes[shift : shift + PAGE].tobytes()
        )
        stage.backend.deregister(stage.memory)
    stage.memory = whole
    assert fake.held_now().buffers == 1


def test_what_cufile_does_not_serve_is_refused_with_its_reason(
    fake: FakeCufile, stage: Stage, tmp_path: Path
) -> None:
    open_before = len(os.listdir("/proc/self/fd"))
    for code, reason in ((5008, "no GPUDirect Storage for this file"), (5027, "cuFile 5027")):
        fake.fail(Call.HANDLE_REGISTER, code)
        with pytest.raises(Unsuitable, match=f"file: the file cannot be registered: .*{reason}"):
            stage.register(tmp_path / "file", PAGE)
    other, memory = dram(PAGE)
    fake.fail(Call.BUFFER_REGISTER, 5036)
    with pytest.raises(Unsuitable, match="no GPU memory could be pinned; there is no staging"):
        stage.backend.register(fake.own(other, 1), memory)
    with pytest.raises(Unsuitable, match="not obj"):
        stage.backend.register(Region(RegionKind.OBJ, 0, PAGE), "name")
    assert len(os.listdir("/proc/self/fd")) == open_before
    assert fake.held_now()[:3] == (1, 0, 1)


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
    calls = fake.calls(Call.WRITE)
    assert stage.move(Op.WRITE, file, at, lengths).results.tolist() == lengths
    assert fake.calls(Call.WRITE) - calls >= sum(lengths) // most
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
    fake: FakeCufile,
    stage: Stage,
    mode: str,
    tmp_path: Path,
    op: Op,
    code: int,
    error: int,
    words: str,
) -> None:
    if mode == "async" and code < 5000:  # a stream tells no errno
        error, words = errno.EIO, os.strerror(errno.EIO)
    file = stage.register(tmp_path / "file", 8 * PAGE)
    fake.fail(Call.READ if op is Op.READ else Call.WRITE, code, skip=1)
    end = stage.move(op, file, [0, PAGE, 2 * PAGE], [PAGE, PAGE, PAGE])
    assert sorted(end.results.tolist()) == [-error, PAGE, PAGE]
    name = errno.errorcode[error]
    where = f"1 of 3 pieces; the first: {tmp_path}/file: {name}: "
    assert end.detail.startswith(where + words)


def test_an_interrupted_call_is_repeated(fake: FakeCufile, tmp_path: Path) -> None:
    stage = Stage()
    file = stage.register(tmp_path / "file", PAGE)
    fake.fail(Call.READ, errno.EINTR, count=3)
    assert stage.move(Op.READ, file, [0], [PAGE]).results.tolist() == [PAGE]
    stage.backend.close()


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_a_call_that_hangs_ends_in_time_and_nothing_more_is_begun(
    fake: FakeCufile, stage: Stage, mode: str, tmp_path: Path, is_cancelled: bool
) -> None:
    """What was handed to a stream runs, as it cannot be taken back."""
    file = stage.register(tmp_path / "file", 16 * PAGE)
    stage.move(Op.READ, file, [0], [PAGE])  # threads and streams are there: the rest is quick
    calls = fake.calls(Call.READ)
    with fake.held():
        deadline_s = 60.0 if is_cancelled else 1.0
        ticket = stage.start(Op.READ, file, [i * PAGE for i in range(16)], [PAGE] * 16, deadline_s)
        fake.wait_held(DEPTH if mode == "threads" else 2)  # a stream has one at a time
        if is_cancelled:
            stage.backend.cancel(ticket)
        end = stage.ends.wait(ticket, SOON_S)
        code = errno.ECANCELED if is_cancelled else errno.ETIMEDOUT
        assert (end.results.tolist(), end.is_quiet) == ([-code] * 16, False)
        assert not stage.ends.is_quiet(ticket)
    stage.ends.wait_quiet(ticket, SOON_S)
    assert fake.calls(Call.READ) - calls == DEPTH


def test_a_call_that_hangs_does_not_hold_up_close(
    fake: FakeCufile, stage: Stage, tmp_path: Path
) -> None:
    """What it uses stays registered as long as it may be used."""
    file = stage.register(tmp_path / "file", PAGE)
    with fake.held():
        ticket = stage.start(Op.READ, file, [0], [PAGE])
        fake.wait_held()
        stage.backend.close()
        assert stage.ends.wait(ticket, SOON_S).results.tolist() == [-errno.ECANCELED]
        assert fake.held_now()[:3] == (1, 1, 1)
    stage.ends.wait_quiet(ticket, SOON_S)
    for thread in stage.backend._threads:
        thread.join(SOON_S)  # closing again, at the end, gives back the rest


def test_the_bytes_of_ended_calls_are_seen_while_others_run(
    fake: FakeCufile, tmp_path: Path
) -> None:
    stage = Stage()
    file = stage.register(tmp_path / "file", 16 * PAGE)
    with fake.held(after=3):
        ticket = stage.start(Op.READ, file, [i * PAGE for i in range(16)], [PAGE] * 16)
        fake.wait_held(DEPTH)  # each thread tells of its last call before the next
        assert stage.backend.progress(ticket) == 3 * PAGE
    stage.ends.wait_quiet(ticket)
    stage.backend.close()


# Contexts and streams ----------------------------------------------------------------------------


def test_a_gpu_without_a_context_is_unsuitable(fake: FakeCufile, stage: Stage) -> None:
    other, memory = dram(PAGE)
    fake.fail(Call.CONTEXT_RETAIN, 2)
    with pytest.raises(Unsuitable, match="GPU 1 has no context: CUDA 2: CUDA_ERROR_OUT_OF_MEMORY"):
        stage.backend.register(fake.own(other, 1), memory)
    with pytest.raises(Unsuitable, match="GPU 9 has no context: CUDA 101: CUDA_ERROR_INVALID"):
        stage.backend.register(Region(RegionKind.VRAM, other.address, PAGE, 9), memory)
    fake.fail(Call.CONTEXT_PUSH, 201)
    with pytest.raises(Unsuitable, match="no context on this thread: CUDA 201"):
        stage.backend.register(fake.own(other, 1), memory)
    assert fake.held_now()[:3] == (1, 0, 1)


def test_the_memory_of_two_gpus_goes_to_one_file(
    fake: FakeCufile, stage: Stage, tmp_path: Path
) -> None:
    """Each call is made in the context of its memory's GPU, which the stand-in demands."""
    place = dram(4 * PAGE)
    other = fake.own(place.region, 1)
    bytes_at(other)[:] = 7
    memory = stage.memory, stage.backend.register(other, None)
    file = stage.register(tmp_path / "file", 8 * PAGE)
    which = np.array([0, 1] * 4, np.uint32)
    at = np.array([i * PAGE for i in (0, 0, 1, 1, 2, 2, 3, 3)], np.uint64)
    to = Side((file,), np.zeros(8, np.uint32), np.arange(8, dtype=np.uint64) * PAGE)
    lengths = np.full(8, PAGE, np.uint64)
    pieces = Pieces(Op.WRITE, Side(memory, which, at), to, lengths)
    stage.backend.start(stage.backend.prepare(pieces, None), 99, 60.0)
    assert stage.ends.wait_quiet(99).results.tolist() == [PAGE] * 8
    found = np.frombuffer((tmp_path / "file").read_bytes(), np.uint8).reshape(8, PAGE)
    assert (found[1::2] == 7).all()
    assert (found[::2].ravel() == stage.bytes[: 4 * PAGE]).all()


def test_a_context_that_cannot_be_used_fails_its_piece(
    fake: FakeCufile, stage: Stage, tmp_path: Path
) -> None:
    file = stage.register(tmp_path / "file", 4 * PAGE)
    stage.move(Op.READ, file, [0], [PAGE])
    fake.fail(Call.CONTEXT_PUSH, 201)
    end = stage.move(Op.READ, file, [0, PAGE], [PAGE, PAGE])
    assert sorted(end.results.tolist()) == [-errno.EIO, PAGE]
    assert "EIO: CUDA 201: CUDA_ERROR_INVALID_CONTEXT" in end.detail


@pytest.mark.parametrize(
    ("call", "code", "error", "words"),
    [
        (Call.STREAM_CREATE, 2, errno.ENOMEM, "CUDA 2: CUDA_ERROR_OUT_OF_MEMORY"),
        (Call.STREAM_REGISTER, 5038, errno.EOPNOTSUPP, "cuFile 5038: no operations on streams"),
        (Call.READ_ASYNC, 5011, errno.EIO, "CUDA 700: CUDA_ERROR_ILLEGAL_ADDRESS"),
        (Call.READ_ASYNC, 5022, errno.EINVAL, "cuFile 5022: invalid arguments"),
        (Call.READ, 5012, errno.EFAULT, "cuFile 5012: no device memory at this address"),
    ],
)
def test_one_piece_of_a_stream_fails_alone(
    fake: FakeCufile, streams: Stage, tmp_path: Path, call: Call, code: int, error: int, words: str
) -> None:
    want = streams.bytes[: 16 * PAGE].copy()
    (tmp_path / "file").write_bytes(want.tobytes())
    file = streams.register(tmp_path / "file", 16 * PAGE)
    at, lengths = [i * PAGE for i in range(16)], [PAGE] * 16
    streams.bytes[:] = 0
    fake.fail(call, code, skip=0 if call in (Call.STREAM_CREATE, Call.STREAM_REGISTER) else 7)
    end = streams.move(Op.READ, file, at, lengths)
    assert sorted(end.results.tolist()) == [-error, *([PAGE] * 15)]
    assert words in end.detail
    for start, result in zip(at, end.results.tolist(), strict=True):
        part = slice(start, start + PAGE)
        assert (streams.bytes[part] == (want[part] if result == PAGE else 0)).all()
    assert streams.move(Op.READ, file, at, lengths).results.tolist() == lengths


def test_a_stream_that_breaks_fails_what_it_had_and_is_not_used_again(
    fake: FakeCufile, streams: Stage, tmp_path: Path
) -> None:
    file = streams.register(tmp_path / "file", 16 * PAGE)
    at, lengths = [i * PAGE for i in range(16)], [PAGE] * 16
    streams.move(Op.WRITE, file, at, lengths)
    for broken in range(1, 10):
        fake.fail(Call.STREAM_SYNCHRONIZE, 700, skip=1)
        end = streams.move(Op.READ, file, at, lengths)
        assert set(end.results.tolist()) <= {-errno.EIO, PAGE}
        assert (end.results == -errno.EIO).any()
        if broken <= 8:
            assert "CUDA 700: CUDA_ERROR_ILLEGAL_ADDRESS" in end.detail
            assert fake.held_now().streams == 2 * broken
    assert "all CUDA streams broke" in end.detail  # a bound, as each stays until the end
    streams.backend.close()


def test_a_hundred_transfers_use_the_same_streams(
    fake: FakeCufile, streams: Stage, tmp_path: Path
) -> None:
    file = streams.register(tmp_path / "file", 16 * PAGE)
    at, lengths = [i * PAGE for i in range(16)], [PAGE] * 16
    created = fake.calls(Call.STREAM_CREATE)
    for _ in range(100):
        assert streams.move(Op.READ, file, at, lengths).results.tolist() == lengths
    assert fake.held_now()[3:] == (2, 1, 0, 2)
    assert fake.calls(Call.STREAM_CREATE) - created == 2


# Staging -----------------------------------------------------------------------------------------


def test_host_memory_that_is_not_registered_goes_through_buffers_that_are(
    fake: FakeCufile, tmp_path: Path
) -> None:
    fake.fail(Call.BUFFER_REGISTER, 5016)
    stage = Stage(is_vram=False)
    assert fake.held_now().buffers == 1
    file = stage.register(tmp_path / "file", 64 * PAGE)
    want = stage.bytes.copy()
    at, lengths = [0, 9 * PAGE + 1, 20 * PAGE, 40 * PAGE + 5], [8 * PAGE, 5001, 9 * PAGE, 3]
    fake.move_at_most(3000)
    assert stage.move(Op.WRITE, file, at, lengths).results.tolist() == lengths
    stage.bytes[:] = 0
    assert stage.move(Op.READ, file, at, lengths).results.tolist() == lengths
    part = np.zeros(len(want), np.bool_)
    for start, length in zip(at, lengths, strict=True):
        part[start : start + length] = True
    assert (stage.bytes == np.where(part, want, 0)).all()
    assert fake.held_now().buffers <= DEPTH
    stage.backend.deregister(stage.memory)
    stage.backend.close()
    assert fake.held_now().buffers == 0


def test_one_buffer_is_enough_where_no_more_can_be_had(fake: FakeCufile, tmp_path: Path) -> None:
    fake.fail(Call.BUFFER_REGISTER, 5016)
    stage = Stage(is_vram=False)
    fake.fail(Call.BUFFER_REGISTER, 5016, count=1000)
    file = stage.register(tmp_path / "file", 16 * PAGE)
    at, lengths = [i * PAGE for i in range(16)], [PAGE] * 16
    assert stage.move(Op.WRITE, file, at, lengths).results.tolist() == lengths
    assert (tmp_path / "file").read_bytes() == stage.bytes[: 16 * PAGE].tobytes()
    assert fake.held_now().buffers == 1
    stage.backend.close()


def test_host_memory_without_any_buffer_is_refused(fake: FakeCufile) -> None:
    backend = GdsTransfers(Completions())
    region, memory = dram(PAGE)
    fake.fail(Call.BUFFER_REGISTER, 5016, count=2)
    with pytest.raises(Unsuitable, match="the memory cannot be registered: cuFile 5016"):
        backend.register(region, memory)
    backend.close()


# Leaks -------------------------------------------------------------------------------------------


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
    counts = fake.held_now()
    fds, threads = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    resident = resident_bytes()
    for _ in range(334):
        fail()
    assert fake.held_now() == counts
    assert len(os.listdir("/proc/self/fd")) == fds
    assert len(os.listdir("/proc/self/task")) <= threads + 16  # joined ones fade a moment later
    assert resident_bytes() - resident < 4 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
