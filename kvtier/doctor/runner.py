"""Runs the checks in a process that can be given up, one after the other.

The child does the checks in order and writes one line of JSON for each to a pipe. A check that is
late or crashes costs its child; the next check gets a new one.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points, version
from pathlib import Path

import msgspec

from kvtier.doctor import disk, machine, objects, paths
from kvtier.doctor.report import Asked, Finding, Report, Verdict

Check = Callable[[Asked], Finding]

TOTAL_S = {False: 18.0, True: 4.0}
"""For all checks together, by `Asked.quick`."""
LIMIT_S = {False: 6.0, True: 2.0}
"""For one check."""
_START_S = 5.0  # for the process to be ready: interpreter and imports on a busy machine
_STDERR_BYTES = 300  # of what a crashed process said last

_CHECKS: dict[str, Check] = {
    "processor": machine.processor,
    "memory": machine.memory,
    "limits": machine.limits,
    "packages": machine.packages,
    "huge pages": machine.huge_pages,
    "shared memory": machine.shared_memory,
    "io_uring": machine.io_uring,
    "disk": disk.disk,
    "rdma": machine.rdma,
    "cuda": machine.cuda,
    "cufile": machine.cufile,
    "object store": objects.object_store,
}
_TRANSFER = "transfer "  # before the name of a transfer backend


def examine(asked: Asked) -> Report:
    """Run all checks; ends in 20 s, or 5 s if `asked.quick`, whatever hangs."""
    begin_s = time.monotonic()
    installed = sorted(_transfer_names())
    names = [*_CHECKS, *(_TRANSFER + name for name in installed)]
    names += [_TRANSFER + name for name, way in paths.WAYS.items() if way.backend in installed]
    findings: list[Finding] = []
    ends_s = begin_s + TOTAL_S[asked.quick]
    while len(findings) < len(names):
        left = names[len(findings) :]
        if time.monotonic() >= ends_s:
            findings += [_not_done(name) for name in left]
            break
        findings += _run_some(asked, left, ends_s)
    return Report(
        kvtier=version("kvtier"),
        quick=asked.quick,
        seconds=round(time.monotonic() - begin_s, 2),
        checks=findings,
    )


def run_check(name: str, asked: Asked) -> Finding:
    """One check, here and now; whatever it raises is a finding."""
    begin_s = time.monotonic()
    try:
        if name.startswith(_TRANSFER):
            finding = paths.transfer(name.removeprefix(_TRANSFER), asked)
        else:
            finding = _CHECKS[name](asked)
    except Exception as error:  # noqa: BLE001 - anybody's; it must not cost the others
        says = f"{type(error).__name__}: {error}"
        finding = Finding(verdict=Verdict.FAILED, says=says)
    return msgspec.structs.replace(finding, name=name, seconds=round(time.monotonic() - begin_s, 3))


def _transfer_names() -> set[str]:
    return {entry.name for entry in entry_points(group="kvtier.transfers")}


def _run_some(asked: Asked, names: Sequence[str], ends_s: float) -> list[Finding]:
    """What one child finds: of all names, or up to the one that was late or crashed."""
    findings: list[Finding] = []
    read, write = os.pipe()
    with tempfile.TemporaryFile() as errors:
        command = [sys.executable, "-P", "-m", "kvtier.doctor.child", str(write), *names]
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,  # libraries talk
            stderr=errors,
            pass_fds=[write],
            env={**os.environ, "KVTIER_DOCTOR_ASKED": msgspec.json.encode(asked).decode()},
        )
        os.close(write)
        try:
            lines = _Lines(read)
            is_ready = lines.next(min(_START_S, max(0.5, ends_s - time.monotonic())))
            for name in names:
                limit_s = min(LIMIT_S[asked.quick], max(0.5, ends_s - time.monotonic()))
                line = lines.next(limit_s) if is_ready else is_ready
                if line:
                    findings.append(msgspec.json.decode(line, type=Finding))
                    continue
                findings.append(
                    _late(name, limit_s) if line is None else _crashed(name, child, errors.fileno())
                )
                break
        finally:
            os.close(read)
            _end(child)
    _clean(asked, child.pid)
    return findings


class _Lines:
    """Lines out of a pipe, none waited for longer than told."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._rest = b""

    def next(self, timeout_s: float) -> bytes | None:
        """The next line; empty at the end; None when the time is over first."""
        ends_s = time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            left_s = ends_s - time.monotonic()
            if left_s <= 0 or not select.select([self._fd], [], [], left_s)[0]:
                return None
            part = os.read(self._fd, 65536)
            if not part:
                return b""
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        return line


def _end(child: subprocess.Popen[bytes]) -> None:
    """Let it go, or end it; one that hangs in the kernel is left to it."""
    assert child.stdin is not None
    with contextlib.suppress(OSError):
        child.stdin.close()  # what it has started ends with this too
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(0.5)
    if child.poll() is None:
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(0.5)
    if child.returncode is None:
        child.returncode = -signal.SIGKILL  # nobody waits for it any more


def _clean(asked: Asked, pid: int) -> None:
    """Remove what a child that was ended has left, unless the disk is what hangs."""
    left = Path(asked.folder, disk.scratch_name(pid))
    if not _exists_soon(left):
        return
    shutil.rmtree(left, ignore_errors=True)


def _exists_soon(path: Path) -> bool:
    """Whether it is there, asked by a process that may hang in our stead."""
    asker = subprocess.Popen(["test", "-e", str(path)])
    try:
        return asker.wait(1.0) == 0
    except subprocess.TimeoutExpired:
        asker.kill()
        asker.returncode = -signal.SIGKILL
        return False


def _late(name: str, limit_s: float) -> Finding:
    says = f"no answer in {limit_s:.3g} s"
    return Finding(name=name, verdict=Verdict.SILENT, says=says, seconds=round(limit_s, 3))


def _not_done(name: str) -> Finding:
    return Finding(
        name=name, verdict=Verdict.SILENT, says="not tried: the others took all the time"
    )


def _crashed(name: str, child: subprocess.Popen[bytes], errors: int) -> Finding:
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(1.0)
    size = os.fstat(errors).st_size
    tail = os.pread(errors, _STDERR_BYTES, max(0, size - _STDERR_BYTES))
    last = (tail.decode(errors="replace").strip().splitlines() or ["said nothing"])[-1]
    says = f"the check ended its process (status {child.returncode}): {last}"
    return Finding(name=name, verdict=Verdict.FAILED, says=says)
