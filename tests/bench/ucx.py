"""Reads and writes of a peer's memory through UCX, against NIXL and, over TCP, a raw stream.

Two processes for each, which take turns; processor time is that of both. NIXL lives in an
environment of its own. Its two lines are its default settings, and those that serve it best here.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from result import GB, Result, Sample, Setting, Work, take_turns

from kvtier.errors import KvtierError

PEERS = Path(__file__).parent / "peers"
BYTES = {"paged": 4096 * (64 << 10), "large": 64 * (32 << 20)}
ROUNDS = {"paged": 9, "large": 5}
OPS = ("read", "write")
NIXL = {
    "default": "as it is installed",
    "best": "with its best settings here",
}
# Over TCP UCX's larger segments, which are our own defaults; between processes no progress thread,
# which would take one of the cores.
NIXL_BEST: dict[str, tuple[str, dict[str, str]]] = {
    "tcp": ("default", {"UCX_TCP_TX_SEG_SIZE": "512K", "UCX_TCP_RX_SEG_SIZE": "512K"}),
    "cma": ("polled", {}),
}
TLS = {"ucx": {"tcp": "tcp", "cma": "tcp,cma"}, "nixl": {"tcp": "tcp", "cma": "posix,cma"}}


class Pair:
    """Two processes that move bytes on command, and stand still meanwhile.

    Some poll even when they have nothing to do, which would cost whoever has his turn.
    """

    def __init__(self, python: Path, program: str, *arguments: str, **environment: str) -> None:
        self._name = " ".join([program, *arguments])
        self._process = subprocess.Popen(
            [python, PEERS / f"{program}.py", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
            start_new_session=True,  # a process group, so that both can be stopped
        )
        self.version: str = self._answer()["version"]
        os.killpg(self._process.pid, signal.SIGSTOP)

    def do(self, command: str) -> Sample:
        """Have it do one thing; what that cost both processes."""
        assert self._process.stdin is not None, "opened with pipes"
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        os.killpg(self._process.pid, signal.SIGCONT)
        answer = self._answer()
        os.killpg(self._process.pid, signal.SIGSTOP)
        if not answer["right"]:
            raise KvtierError(f"{self._name}: {command} went wrong")
        return Sample(answer["wall_s"], answer["cpu_s"])

    def check(self, op: str) -> None:
        """Move once between regions of known bytes, and compare them all."""
        self.do("clear")
        self.do(op)
        self.do(f"check {op}")

    def close(self) -> None:
        """End both processes."""
        assert self._process.stdin is not None, "opened with pipes"
        self._process.stdin.close()
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None, "opened with pipes"
        line = self._process.stdout.readline()
        if not line:
            raise KvtierError(f"{self._name} ended; its words are above")
        answer: dict[str, Any] = json.loads(line)
        return answer


def run(wanted: set[str], setting: Setting) -> Iterator[Result]:
    for name in sorted(wanted):
        _, way, workload = name.split("_")
        yield from _run(name, way, workload, setting.nixl_python)


def _run(name: str, way: str, workload: str, nixl_python: Path | None) -> Iterator[Result]:
    with ExitStack() as stack:

        def start(python: Path, program: str, *arguments: str, **environment: str) -> Pair:
            pair = Pair(python, program, workload, *arguments, **environment)
            stack.callback(pair.close)
            return pair

        own_python = Path(sys.executable)
        ours = start(own_python, "ucx_pair", UCX_TLS=TLS["ucx"][way])
        pairs = {"ours": ours}
        if nixl_python is not None:
            quiet = {"UCX_TLS": TLS["nixl"][way], "UCX_DEBUG_SIGNO": "0", "UCX_LOG_LEVEL": "error"}
            pairs["default"] = start(nixl_python, "nixl_pair", "default", **quiet)
            settings, environment = NIXL_BEST[way]
            pairs["best"] = start(nixl_python, "nixl_pair", settings, **quiet, **environment)
        stream = start(own_python, "socket_pair") if way == "tcp" else None
        for pair in pairs.values():
            for op in OPS:
                pair.check(op)
        works = {
            f"{pair_name} {op}": Work(lambda pair=pair, op=op: pair.do(op))
            for pair_name, pair in pairs.items()
            for op in OPS
        }
        if stream is not None:
            works["stream"] = Work(lambda: stream.do("write"))
        rounds = ROUNDS[workload]
        times = take_turns(works, rounds)
        nbytes = BYTES[workload]
        for op in OPS:
            cost = times[f"ours {op}"]
            more: dict[str, Any] = {"op": op, "ucx": ours.version}

            def result(
                limit: Sample | None, limit_is: str, cost: Sample = cost, more: Any = more
            ) -> Result:
                cpu = {} if limit is None else {"limit_cpu_s_per_gb": _per_gb(limit.cpu_s, nbytes)}
                return Result(
                    bench=name,
                    value=nbytes / cost.wall_s / GB,
                    unit="GB/s",
                    higher_is_better=True,
                    limit=None if limit is None else nbytes / limit.wall_s / GB,
                    limit_is=limit_is,
                    cpu_s_per_gb=cost.cpu_s / nbytes * GB,
                    rounds=rounds,
                    more={**more, **cpu},
                )

            if nixl_python is None:
                yield result(None, "peer not given (--nixl-python)")
            for settings, meaning in NIXL.items():
                if settings in pairs:
                    yield result(
                        times[f"{settings} {op}"], f"NIXL {pairs[settings].version} {meaning}"
                    )
            if stream is not None:
                yield result(times["stream"], "raw TCP stream of as many bytes, in order")


def _per_gb(cpu_s: float, nbytes: int) -> float:
    return float(f"{cpu_s / nbytes * GB:.4g}")
