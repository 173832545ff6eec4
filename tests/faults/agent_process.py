"""An agent in a process of its own, told what to do line by line; both ends of the wire.

Run as a script it is the child: one JSON object a line on standard input, one answer a line on
standard output. `AgentProcess` is the parent's side.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np

from kvtier import Agent, Op, Peer, Transfer, TransferTimeout
from kvtier.shared_pool import SharedPool

ANSWER_S = 60.0


def pattern(nbytes: int, seed: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Bytes that a seed names."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def make_memory(nbytes: int, shared: bool, seed: int) -> tuple[Any, Any]:
    """What to register, and its bytes, which are those of the seed."""
    pool = SharedPool(nbytes) if shared else None
    memory = bytearray(nbytes) if pool is None else pool.view(0, nbytes)
    np.frombuffer(memory, np.uint8)[:] = pattern(nbytes, seed)
    return pool or memory, memory


def digest(memory: Any) -> str:
    """What two memories share exactly if they are equal."""
    return hashlib.sha256(memory).hexdigest()


class AgentProcess:
    """A child with an agent; ended by its process id."""

    def __init__(self, name: str, environment: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).resolve()), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        self.pid = self._process.pid

    def send(self, do: str, **how: Any) -> None:
        """Tell it to do something, without waiting."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **how}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """What it says to the oldest order not answered yet."""
        assert self._process.stdout is not None
        watchdog = threading.Timer(ANSWER_S, self._process.kill)
        watchdog.start()
        try:
            line = self._process.stdout.readline()
        finally:
            watchdog.cancel()
        if not line:
            raise EOFError("the child is gone")
        found = json.loads(line)
        if isinstance(found, dict) and "error" in found:
            raise RuntimeError(found["error"])
        return found

    def ask(self, do: str, **how: Any) -> Any:
        """Tell it to do something, and what it says."""
        self.send(do, **how)
        return self.answer()

    def metadata(self) -> bytes:
        return bytes.fromhex(self.ask("metadata"))

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(ANSWER_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


class _Child:
    def __init__(self, name: str) -> None:
        self.agent = Agent(name)
        self.memory: list[Any] = []
        self.regions: list[Any] = []
        self.peers: list[Peer] = []
        self.transfers: list[Transfer] = []

    def backends(self) -> Any:
        return self.agent.backends()

    def register(self, nbytes: int, shared: bool, seed: int) -> Any:
        source, memory = make_memory(nbytes, shared, seed)
        self.memory.append(memory)
        self.regions.append(self.agent.register(source))
        return self.regions[-1].number

    def deregister(self, index: int, timeout_s: float) -> Any:
        try:
            self.agent.deregister(self.regions[index], timeout_s)
        except TransferTimeout as error:
            return str(error)
        return ""

    def digest(self, index: int) -> Any:
        return digest(self.memory[index])

    def metadata(self) -> Any:
        return self.agent.metadata().hex()

    def connect(self, metadata: str) -> Any:
        self.peers.append(self.agent.connect(bytes.fromhex(metadata)))
        return len(self.peers) - 1

    def prepare(self, op: str, local: Any, remote: Any, peer: int, backend: str = "") -> Any:
        here, there = np.array(local, np.uint64), np.array(remote, np.uint64)
        transfer = self.agent.prepare(Op(op), here, there, self.peers[peer], backend=backend)
        self.transfers.append(transfer)
        return len(self.transfers) - 1

    def post(self, transfer: int, deadline_s: float) -> Any:
        self.transfers[transfer].post(deadline_s)
        return None

    def wait(self, transfer: int) -> Any:
        self.transfers[transfer].wait()
        return sorted({outcome.status.value for outcome in self.transfers[transfer].outcomes()})

    def again_and_again(self, transfer: int, deadline_s: float) -> Any:
        """Post without end, until the process is ended."""
        print("null", flush=True)
        while True:
            self.transfers[transfer].post(deadline_s)
            self.transfers[transfer].wait()

    def notifications(self) -> Any:
        return [(n.peer, n.kind.value, n.payload.hex()) for n in self.agent.notifications()]


def _serve(name: str) -> None:
    child = _Child(name)
    for line in sys.stdin:
        order = json.loads(line)
        action: Callable[..., Any] = getattr(child, order.pop("do"))
        try:
            answer = action(**order)
        except Exception as error:  # noqa: BLE001 - the parent raises it
            answer = {"error": repr(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1])
