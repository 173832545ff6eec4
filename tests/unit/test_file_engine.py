from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvtier._core import FileEngine, StopFlag

PAGE = 4096
METHODS = ["auto", "threads"]


@pytest.fixture(params=METHODS)
def engine(request: pytest.FixtureRequest) -> Iterator[FileEngine]:
    engine = FileEngine(depth=4, segment_bytes=PAGE, method=request.param)
    yield engine
    engine.close()


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


def descriptors(*fds: int) -> npt.NDArray[np.int32]:
    return np.array(fds, np.int32)


def sizes(*values: int) -> npt.NDArray[np.uint64]:
    return np.array(values, np.uint64)


def address(array: npt.NDArray[np.uint8]) -> int:
    return int(array.__array_interface__["data"][0])


def noise(count: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(count).integers(0, 256, count, dtype=np.uint8)


def results(array: npt.NDArray[np.int64]) -> Sequence[int]:
    values: Sequence[int] = array.tolist()
    return values


def test_what_was_written_is_read_back(engine: FileEngine, fd: int) -> None:
    data, target = noise(20 * PAGE + 7), np.zeros(20 * PAGE + 7, np.uint8)
    one = (descriptors(fd), sizes(3))
    assert results(engine.write(*one, sizes(address(data)), sizes(data.size))) == [data.size]
    assert results(engine.sync(descriptors(fd))) == [0]
    assert results(engine.read(*one, sizes(address(target)), sizes(data.size))) == [data.size]
    assert (target == data).all()
    assert os.fstat(fd).st_size == data.size + 3


def test_a_read_ends_where_the_file_does(engine: FileEngine, fd: int) -> None:
    os.write(fd, b"x" * (2 * PAGE + 5))
    target = np.zeros(8 * PAGE, np.uint8)
    answer = engine.read(
        descriptors(fd, fd, fd),
        sizes(0, 2 * PAGE, 9 * PAGE),
        sizes(*[address(target)] * 3),
        sizes(8 * PAGE, 8 * PAGE, 10),
    )
    assert results(answer) == [2 * PAGE + 5, 5, 0]


def test_a_direct_read_ends_at_an_odd_length(engine: FileEngine, tmp_path: Path) -> None:
    """The kernel refuses to go on at the odd offset where such a file ends; that is its end."""
    path = tmp_path / "odd"
    path.write_bytes(b"x" * (2 * PAGE + 5))
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    memory = np.frombuffer(mmap.mmap(-1, 4 * PAGE), np.uint8)
    whole = FileEngine(depth=1, segment_bytes=4 * PAGE, method=engine.method)
    for reader in (engine, whole):
        answer = reader.read(descriptors(fd), sizes(0), sizes(address(memory)), sizes(4 * PAGE))
        assert results(answer) == [2 * PAGE + 5]
    os.close(fd)


def test_one_bad_item_spoils_no_other(engine: FileEngine, fd: int) -> None:
    data, target = noise(3 * PAGE), np.zeros(3 * PAGE, np.uint8)
    full = os.open("/dev/full", os.O_WRONLY)
    answer = engine.write(
        descriptors(full, fd, -1),
        sizes(0, 0, 0),
        sizes(*[address(data)] * 3),
        sizes(*[data.size] * 3),
    )
    assert results(answer) == [-errno.ENOSPC, data.size, -errno.EBADF]
    answer = engine.read(
        descriptors(full, fd), sizes(0, 0), sizes(*[address(target)] * 2), sizes(*[data.size] * 2)
    )
    assert results(answer) == [-errno.EBADF, data.size]
    assert (target == data).all()
    os.close(full)


def test_an_address_that_is_not_ours_is_a_fault_of_its_item(engine: FileEngine, fd: int) -> None:
    os.write(fd, b"x" * PAGE)
    target = np.zeros(PAGE, np.uint8)
    answer = engine.read(
        descriptors(fd, fd), sizes(0, 0), sizes(0, address(target)), sizes(PAGE, PAGE)
    )
    assert results(answer) == [-errno.EFAULT, PAGE]


def test_room_is_allocated_ahead(engine: FileEngine, fd: int) -> None:
    assert results(engine.allocate(descriptors(fd, -1), sizes(5 * PAGE, 1))) == [0, -errno.EBADF]
    status = os.fstat(fd)
    assert status.st_size == 5 * PAGE
    assert status.st_blocks * 512 >= 5 * PAGE


def test_a_folder_can_be_synced(engine: FileEngine, tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    assert results(engine.sync(descriptors(fd, -1), data_only=False)) == [0, -errno.EBADF]
    os.close(fd)


def test_an_empty_batch_gives_nothing(engine: FileEngine) -> None:
    assert results(engine.read(descriptors(), sizes(), sizes(), sizes())) == []
    assert results(engine.sync(descriptors())) == []


def test_other_threads_run_while_a_read_waits(engine: FileEngine) -> None:
    """A pipe answers only when the main thread, which needs the GIL, writes to it. Through threads
    it answers at once that it has no offsets, and the test shows nothing."""
    reader, writer = os.pipe()
    target = np.zeros(5, np.uint8)
    started = threading.Event()

    def read() -> Sequence[int]:
        started.set()
        return results(engine.read(descriptors(reader), sizes(0), sizes(address(target)), sizes(5)))

    with ThreadPoolExecutor(1) as thread:
        pending = thread.submit(read)
        assert started.wait(60)
        os.write(writer, b"hello")
        os.close(writer)
        assert pending.result(60) in ([5], [-errno.ESPIPE])
    os.close(reader)


def test_a_stopped_batch_begins_nothing_more(tmp_path: Path) -> None:
    """The pipe holds the first read until the flag is set, so the second must not begin. Through
    threads it answers at once that it has no offsets, and the flag may be late for the second."""
    engine = FileEngine(depth=1, segment_bytes=PAGE)
    (tmp_path / "file").write_bytes(b"x" * PAGE)
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    reader, writer = os.pipe()
    targets, stop = np.zeros(2 * PAGE, np.uint8), StopFlag()
    started = threading.Event()

    def read() -> Sequence[int]:
        started.set()
        at = address(targets)
        return results(
            engine.read(
                descriptors(reader, fd), sizes(0, 0), sizes(at, at + PAGE), sizes(5, PAGE), stop
            )
        )

    with ThreadPoolExecutor(1) as thread:
        pending = thread.submit(read)
        assert started.wait(60)
        stop.set()
        os.write(writer, b"hello")
        if engine.method == "uring":
            assert pending.result(60)[1] == -errno.ECANCELED
            assert not targets[PAGE:].any()
        else:
            assert pending.result(60)[1] in (PAGE, -errno.ECANCELED)
    assert stop.is_set
    for each in (fd, reader, writer):
        os.close(each)


def test_a_batch_tells_how_many_bytes_it_moved(engine: FileEngine, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * (PAGE + 10))
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    targets, stop = np.zeros(4 * PAGE, np.uint8), StopFlag()
    at = address(targets)
    moved = engine.read(
        descriptors(fd, fd, -1),
        sizes(0, PAGE, 0),
        sizes(at, at + PAGE, at + 2 * PAGE),
        sizes(PAGE, PAGE, PAGE),
        stop,
    )
    assert results(moved) == [PAGE, 10, -errno.EBADF]
    assert stop.moved_bytes == PAGE + 10
    os.close(fd)


def test_threads_share_an_engine(engine: FileEngine, tmp_path: Path) -> None:
    def work(number: int) -> None:
        data, target = noise(10 * PAGE + number), np.zeros(10 * PAGE + number, np.uint8)
        fd = os.open(tmp_path / str(number), os.O_RDWR | os.O_CREAT)
        for _ in range(20):
            target[:] = 0
            for call, array in ((engine.write, data), (engine.read, target)):
                answer = call(descriptors(fd), sizes(0), sizes(address(array)), sizes(array.size))
                assert results(answer) == [array.size]
            assert (target == data).all()
        os.close(fd)

    with ThreadPoolExecutor(12) as threads:  # more than calls that run at a time
        list(threads.map(work, range(12)))


def test_mistakes_are_refused(engine: FileEngine) -> None:
    with pytest.raises(ValueError, match="1 descriptors, 2 offsets"):
        engine.read(descriptors(0), sizes(0, 0), sizes(0), sizes(0))
    with pytest.raises(ValueError, match="past what a file can hold"):
        engine.read(descriptors(0), sizes(2**63), sizes(0), sizes(0))
    with pytest.raises(TypeError):
        engine.read(sizes(0), sizes(0), sizes(0), sizes(0))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="depth of 0"):
        FileEngine(depth=0)
    with pytest.raises(ValueError, match="segments of 1000 bytes"):
        FileEngine(segment_bytes=1000)
    with pytest.raises(ValueError, match="'aio': auto, uring or threads"):
        FileEngine(method="aio")


def test_a_closed_engine_refuses(engine: FileEngine) -> None:
    engine.close()
    engine.close()
    with pytest.raises(ValueError, match="closed"):
        engine.sync(descriptors())


def test_closing_waits_for_calls_in_progress(tmp_path: Path) -> None:
    for method in METHODS:
        engine = FileEngine(depth=2, segment_bytes=PAGE, method=method)
        fd = os.open(tmp_path / method, os.O_RDWR | os.O_CREAT)
        data = noise(500 * PAGE)
        started = threading.Event()

        def write(
            engine: FileEngine = engine,
            fd: int = fd,
            data: npt.NDArray[np.uint8] = data,
            started: threading.Event = started,
        ) -> Sequence[int]:
            started.set()
            return results(
                engine.write(descriptors(fd), sizes(0), sizes(address(data)), sizes(data.size))
            )

        with ThreadPoolExecutor(1) as thread:
            pending = thread.submit(write)
            assert started.wait(60)
            engine.close()
            try:
                assert pending.result(60) == [data.size]
            except ValueError:  # closed before it began, and nothing was written
                assert os.fstat(fd).st_size == 0
        os.close(fd)
