"""A process with a UCX backend and one region, told by JSON lines what to do: half of a fault test.

`Party` starts one and speaks to it; run as a program, this file is one. It is a process of its own
so that it can be killed and stopped, and because UCX reads its environment once.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import Any, Self

import numpy as np

SLOT_BYTES = 64 << 10
SLOTS = 512  # 32 MiB: more than any window, so that a transfer is caught on its way
ANSWER_S = 60.0


class Party:
    """The other end of such a process; every method waits for its answer, a bounded time."""

    def __init__(self, **environment: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-X", "faulthandler", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | environment,
        )
        self.pid = self._process.pid
        self.offer: dict[str, Any] = {}
        self._unread = b""

    def __enter__(self) -> Self:
        self.offer = self._answer()
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.communicate()

    def ask(self, do: str, **arguments: Any) -> Any:
        """Have it do one thing; gives what that gave."""
        assert self._process.stdin is not None, "opened with pipes"
        self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        self._process.stdin.flush()
        return self._answer()

    def meet(self, other: Party, name: str, *, on_host: bool) -> None:
        """Connect to the other and import its region."""
        pid = other.pid if on_host else None
        assert self.ask("meet", name=name, offer=other.offer, host_pid=pid) == ""

    def start(self, op: str, peer: str, deadline_s: float, rounds: int = 1) -> int:
        """Begin to move all slots, in an order of no order, `rounds` times; gives the ticket."""
        ticket: int = self.ask("start", op=op, peer=peer, deadline_s=deadline_s, rounds=rounds)
        return ticket

    def start_and_see_it_run(self, op: str, peer: str, deadline_s: float) -> int:
        """Begin to move far more than can have arrived when this returns; some of it has."""
        ticket = self.start(op, peer, deadline_s, rounds=400)
        ends_s = time.monotonic() + ANSWER_S
        while not self.ask("progress", ticket=ticket):
            assert time.monotonic() < ends_s, "nothing moves"
        return ticket

    def move(self, op: str, peer: str, deadline_s: float = 30.0) -> dict[str, Any]:
        """Move all slots once, and hear how that ended."""
        end: dict[str, Any] = self.ask("wait", ticket=self.start(op, peer, deadline_s))
        return end

    def stop(self) -> None:
        """Let it stand still, as a process that is swapped out or debugged does."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED)  # all of its threads stand still now

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout is not None, "opened with pipes"
        ends_s = time.monotonic() + ANSWER_S
        while b"\n" not in self._unread:
            left_s = ends_s - time.monotonic()
            assert left_s > 0, f"process {self.pid} does not answer"
            if select.select([self._process.stdout], [], [], left_s)[0]:
                part = os.read(self._process.stdout.fileno(), 1 << 16)
                assert part, f"process {self.pid} ended by itself: {self._process.wait()}"
                self._unread += part
        line, self._unread = self._unread.split(b"\n", 1)
        return json.loads(line)


def slots(seed: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Bytes of a region that was filled with `seed`, one row a slot."""
    return np.random.default_rng(seed).integers(0, 256, (SLOTS, SLOT_BYTES), np.uint8)


def order() -> np.ndarray[Any, np.dtype[np.int64]]:
    """Which remote slot belongs to each local one."""
    return np.random.default_rng(0).permutation(SLOTS)


def _forgetful(completions: Any) -> Any:
    """Ends that can be told to forget, lest they are what grows."""
    from kvtier.testing.transfer_scene import Ends

    class Forgetful(Ends):
        def forget(self) -> None:
            self._drain()
            self._ends.clear()
            self._quiet.clear()

    return Forgetful(completions)


class _Played:
    """The process's own side."""

    def __init__(self) -> None:
        from kvtier._core import Completions
        from kvtier.backends.ucx import UcxTransfers
        from kvtier.testing.transfer_scene import bytes_at, dram

        self.place = dram(SLOTS * SLOT_BYTES)
        self.bytes = bytes_at(self.place.region).reshape(SLOTS, SLOT_BYTES)
        completions = Completions()
        self.backend = UcxTransfers(completions)
        self.ends = _forgetful(completions)
        self.handle = self.backend.register(*self.place)
        self.peers: dict[str, tuple[Any, Any]] = {}
        self.prepared: dict[tuple[str, str, int], Any] = {}
        self.tickets = 0

    def offer(self) -> dict[str, Any]:
        return {
            "address": self.backend.address().hex(),
            "export": self.backend.export(self.handle).hex(),
            "at": self.place.region.address,
            "pid": os.getpid(),
            "transports": self.backend.transports,
        }

    def meet(self, name: str, offer: dict[str, Any], host_pid: int | None) -> str:
        from kvtier.transfer import Unsuitable
        from kvtier.types import Region, RegionKind

        try:
            link = self.backend.connect(bytes.fromhex(offer["address"]), host_pid)
            region = Region(RegionKind.DRAM, offer["at"], SLOTS * SLOT_BYTES)
            remote = self.backend.import_region(link, region, bytes.fromhex(offer["export"]))
        except Unsuitable as reason:
            return str(reason)
        self.peers[name] = link, remote
        return ""

    def leave(self, name: str) -> None:
        link, remote = self.peers.pop(name)
        self.prepared = {key: kept for key, kept in self.prepared.items() if key[1] != name}
        self.backend.disconnect(link)
        self.backend.deregister(remote)

    def start(self, op: str, peer: str, deadline_s: float, rounds: int) -> int:
        key = (op, peer, rounds)
        if key not in self.prepared:
            self.prepared[key] = self._prepare(*key)
        self.tickets += 1
        self.backend.start(self.prepared[key], self.tickets, deadline_s)
        return self.tickets

    def _prepare(self, op: str, peer: str, rounds: int) -> Any:
        from kvtier.transfer import Op, Pieces, Side

        link, remote = self.peers[peer]
        which = np.zeros(SLOTS * rounds, np.uint32)
        ours = np.tile(np.arange(SLOTS, dtype=np.uint64), rounds) * np.uint64(SLOT_BYTES)
        theirs = np.tile(order().astype(np.uint64), rounds) * np.uint64(SLOT_BYTES)
        pieces = Pieces(
            Op(op),
            Side((self.handle,), which, ours),
            Side((remote,), which, theirs),
            np.full(SLOTS * rounds, SLOT_BYTES, np.uint64),
        )
        return self.backend.prepare(pieces, link)

    def progress(self, ticket: int) -> int:
        assert not self.ends.has_ended(ticket), "it was meant to take longer"
        return self.backend.progress(ticket)

    def cancel(self, ticket: int) -> None:
        self.backend.cancel(ticket)

    def wait(self, ticket: int) -> dict[str, Any]:
        """How it ended: slots that are whole as it says, and the codes of the others."""
        end = self.ends.wait(ticket)
        whole = np.flatnonzero(end.results == SLOT_BYTES)
        return {
            "whole": sorted({int(piece) % SLOTS for piece in whole}),
            "whole_count": len(whole),
            "codes": sorted({-int(code) for code in end.results if code < 0}),
            "count": len(end.results),
            "short": int(((end.results >= 0) & (end.results != SLOT_BYTES)).sum()),
            "started": end.started,
            "is_quiet": end.is_quiet,
            "detail": end.detail,
        }

    def wait_quiet(self, ticket: int) -> None:
        self.ends.wait_quiet(ticket)

    def is_quiet(self, ticket: int) -> bool:
        return bool(self.ends.is_quiet(ticket))

    def fill(self, seed: int) -> None:
        self.bytes[:] = slots(seed)

    def wipe(self) -> None:
        self.bytes[:] = 0

    def differ(self, seed: int, of: Iterable[int], inverse: bool) -> list[int]:
        """Which of our slots are not what a peer filled with `seed` has in, or has put into, them."""
        source = np.argsort(order()) if inverse else order()
        expected = slots(seed)[source]
        return [slot for slot in of if (self.bytes[slot] != expected[slot]).any()]

    def is_all(self, value: int) -> bool:
        return bool((self.bytes == value).all())

    def fail_often(self, offer: dict[str, Any], peer: str, on_host: bool, count: int) -> None:
        """Each way to fail that costs little, `count` times."""
        from kvtier.transfer import Unsuitable

        address = bytes.fromhex(offer["address"])
        for _ in range(count):
            self.ends.forget()
            for deadline_s in (0.0, 30.0):  # over before it began; cancelled
                ticket = self.start("read", peer, deadline_s, 1)
                self.backend.cancel(ticket)
                assert (self.ends.wait(ticket).results <= SLOT_BYTES).all()
                self.ends.wait_quiet(ticket)
            for bad in (b"", address[:-1], address[::-1]):
                try:
                    self.backend.connect(bad, None)
                except Unsuitable:
                    continue
                raise AssertionError("a bad address was taken")
            assert self.meet("again", offer, offer["pid"] if on_host else None) == ""
            tickets = [self.start(op, "again", 30.0, 1) for op in ("read", "write")]
            self.leave("again")
            for ticket in tickets:
                self.ends.wait_quiet(ticket)

    def wait_until_held(self, before: dict[str, int], resident_max: int) -> str:
        """Empty once we hold no more than before; else what we still do, after a while."""
        ends_s = time.monotonic() + 10.0
        while True:
            held = self.held()
            grown = {name: held[name] - count for name, count in before.items()}
            if (
                grown["resident"] <= resident_max
                and max(grown["threads"], grown["fds"], grown["mappings"] - 8) <= 0
            ):
                return ""
            if time.monotonic() > ends_s:
                return json.dumps(grown)
            time.sleep(0.01)

    def held(self) -> dict[str, int]:
        """Threads, files and memory of this process."""
        with open("/proc/self/statm") as file:
            fields = file.read().split()
        return {
            "threads": len(os.listdir("/proc/self/task")),
            "fds": len(os.listdir("/proc/self/fd")),
            "resident": int(fields[1]) * os.sysconf("SC_PAGE_SIZE"),
            "mappings": sum(1 for _ in open("/proc/self/maps")),
        }


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    played = _Played()

    def answer(value: Any) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    answer(played.offer())
    for line in sys.stdin:
        command = json.loads(line)
        answer(getattr(played, command.pop("do"))(**command))
    played.backend.close()


if __name__ == "__main__":
    main()
