"""Store to and load from host memory, against LMCache's engine with its CPU tier.

LMCache lives in an environment of its own and takes its turns in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from host import load, open_host_tier, store
from llama import PagedLlama
from result import GB, Result, Sample, Setting, Work, take_turns

from kvtier.errors import KvtierError

CHUNKS = 8  # 256 MiB: LMCache's shipped connector takes a second for it, each way
ROUNDS = 11
CONNECTORS = {
    "shipped": "its shipped CPU connector",
    "paged": "the best connector for it (whole pages, numpy)",
}
SCRIPT = Path(__file__).parent / "peers" / "lmcache_host.py"


class Peer:
    """LMCache in its process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.version: str = self._answer()["version"]

    def do(self, command: str) -> Sample:
        """Have it do one thing; what that cost there."""
        assert self._process.stdin is not None, "opened with pipes"
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        if not answer["right"]:
            raise KvtierError(f"LMCache: {command} went wrong")
        return Sample(answer["wall_s"], answer["cpu_s"])

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None, "opened with pipes"
        line = self._process.stdout.readline()
        if not line:
            raise KvtierError("LMCache's process ended; its words are above")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def start_peer(python: Path, threads: int) -> Iterator[Peer]:
    """LMCache in `python`'s environment."""
    with subprocess.Popen(
        [python, SCRIPT, str(CHUNKS), str(threads)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield Peer(process)
        finally:
            process.kill()


def run(wanted: set[str], setting: Setting) -> Iterator[Result]:
    if setting.lmcache_python is None:
        yield Result(
            bench="host_vs_lmcache",
            value=None,
            unit="GB/s",
            higher_is_better=True,
            limit=None,
            limit_is="peer not given (--lmcache-python)",
            rounds=0,
        )
        return
    paged = PagedLlama(CHUNKS)
    with (
        start_peer(setting.lmcache_python, setting.threads) as peer,
        open_host_tier(CHUNKS, setting.threads) as tier,
    ):
        space = paged.attach(tier)
        for way, meaning in CONNECTORS.items():
            peer.do(way)
            times = take_turns(
                {
                    "our store": Work(lambda: store(tier, space, paged), before=tier.cleanup),
                    "our load": Work(lambda: load(tier, space, paged)),
                    "LMCache's store": Work(
                        lambda: peer.do("store"), before=lambda: peer.do("clear")
                    ),
                    "LMCache's load": Work(lambda: peer.do("load")),
                },
                ROUNDS,
                in_order=True,
            )
            for wipe, bring, check in (
                (paged.wipe, lambda: load(tier, space, paged), paged.check),
                (
                    lambda: peer.do("wipe"),
                    lambda: peer.do("load"),
                    lambda: peer.do("check"),
                ),
            ):
                wipe()
                bring()
                check()
            ours = _sum(times["our store"], times["our load"])
            theirs = _sum(times["LMCache's store"], times["LMCache's load"])
            nbytes = 2 * paged.nbytes
            yield Result(
                bench="host_vs_lmcache",
                value=nbytes / ours.wall_s / GB,
                unit="GB/s",
                higher_is_better=True,
                limit=nbytes / theirs.wall_s / GB,
                limit_is=f"LMCache {peer.version} with {meaning}, store and load of the same KV",
                cpu_s_per_gb=ours.cpu_s / nbytes * GB,
                rounds=ROUNDS,
                more={
                    "threads": setting.threads,
                    "connector": way,
                    "store_ratio": _ratio(times["LMCache's store"], times["our store"]),
                    "load_ratio": _ratio(times["LMCache's load"], times["our load"]),
                },
            )


def _sum(first: Sample, second: Sample) -> Sample:
    return Sample(first.wall_s + second.wall_s, first.cpu_s + second.cpu_s)


def _ratio(theirs: Sample, ours: Sample) -> float:
    return round(theirs.wall_s / ours.wall_s, 3)
