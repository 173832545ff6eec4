"""The folder that a disk tier would lie in: may we write, past the page cache, and how fast."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kvtier._core import FileEngine, Slab
from kvtier.doctor.report import Asked, Figure, Finding, Verdict, in_gb_s

_SAMPLE_BYTES = 256 << 20
_PIECE_BYTES = 4 << 20
_DEPTH = 16


def disk(asked: Asked) -> Finding:
    """Write a file until it is durable and read it back, by direct I/O where that is to be had."""
    nbytes = asked.sample_bytes(_SAMPLE_BYTES)
    place = os.statvfs(asked.folder)
    free_bytes = place.f_bavail * place.f_frsize
    figures: dict[str, Figure] = {
        "folder": str(Path(asked.folder).resolve()),
        "file_system": file_system(asked.folder),
        "free_bytes": free_bytes,
    }
    where = f"{figures['folder']} ({figures['file_system']}, {free_bytes >> 30} GiB free)"
    if free_bytes < 2 * nbytes:
        says = f"{where}: too little room to try"
        return Finding(verdict=Verdict.FAILED, says=says, figures=figures)
    try:
        with scratch(asked.folder) as folder:
            fd, is_direct = _open(folder / "disk")
            try:
                write_s, read_s = _measure(fd, nbytes)
            finally:
                os.close(fd)
    except OSError as error:
        says = f"{where}: {error}"
        return Finding(verdict=Verdict.FAILED, says=says, figures=figures)
    figures["direct"] = is_direct
    figures["write_gb_s"] = in_gb_s(nbytes, write_s)
    figures["read_gb_s"] = in_gb_s(nbytes, read_s)
    how = (
        "direct I/O" if is_direct else "no direct I/O (O_DIRECT is refused): the page cache's speed"
    )
    says = f"{where}: writes {figures['write_gb_s']}, reads {figures['read_gb_s']} GB/s, {how}"
    return Finding(verdict=Verdict.OK, says=says, figures=figures)


@contextlib.contextmanager
def scratch(folder: str) -> Iterator[Path]:
    """A folder of this process's own below it, removed at the end."""
    path = Path(folder, scratch_name(os.getpid()))
    path.mkdir()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def scratch_name(pid: int) -> str:
    """By which whoever started the process finds what it left when it was ended."""
    return f".kvtier-doctor-{pid}"


def file_system(folder: str) -> str:
    """Type of the file system that the folder lies on, as mounted."""
    resolved = Path(folder).resolve()
    best, kind = "", "unknown"
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mounts").read_text().splitlines():
            target, found = line.split(" ")[1:3]
            if resolved.is_relative_to(target) and len(target) >= len(best):
                best, kind = target, found
    return kind


def _open(path: Path) -> tuple[int, bool]:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600), True
    except OSError:
        return os.open(path, flags, 0o600), False


def _measure(fd: int, nbytes: int) -> tuple[float, float]:
    """Seconds to write and sync, and to read."""
    memory = Slab(nbytes)
    np.frombuffer(memory.memory(0, nbytes), np.uint8)[:] = 0x5A
    offsets = np.arange(0, nbytes, _PIECE_BYTES, dtype=np.uint64)
    fds = np.full(len(offsets), fd, np.int32)
    lengths = np.full(len(offsets), _PIECE_BYTES, np.uint64)
    addresses = offsets + np.uint64(memory.address)
    engine = FileEngine(_DEPTH, 1 << 20)
    try:
        begin_s = time.perf_counter()
        _require(engine.write(fds, offsets, addresses, lengths), lengths)
        _require(engine.sync(fds[:1]), np.zeros(1, np.uint64))
        write_s = time.perf_counter() - begin_s
        begin_s = time.perf_counter()
        _require(engine.read(fds, offsets, addresses, lengths), lengths)
        return write_s, time.perf_counter() - begin_s
    finally:
        engine.close()


def _require(results: np.ndarray, expected: np.ndarray) -> None:
    wrong = np.flatnonzero(results != expected.astype(np.int64))
    if wrong.size:
        code = -int(results[wrong[0]])
        raise OSError(code, os.strerror(code) if code > 0 else "fewer bytes than asked")
