"""LMCache's daemon for a vLLM engine, in an environment of its own that has both.

Over shared memory with its CPU tier, chunks of 256 tokens: what LMCache calls multiprocess mode.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 120.0
TOLERANCE = Path(__file__).parent / "lmcache_vllm"


@dataclass(frozen=True, slots=True)
class Daemon:
    """How an engine finds it."""

    connector: dict[str, Any]
    """vLLM's `kv_transfer_config`."""
    environment: dict[str, str]
    """Of the engine's process."""


@contextmanager
def open_daemon(python: Path, log: Path) -> Iterator[Daemon]:
    """Start the daemon and wait until it listens; it ends with the context.

    Raises:
        RuntimeError: it ended, or does not listen; with the end of its log.
    """
    port, http_port = _free_port(), _free_port()
    # The last two options: without them the engine's start waits for five minutes, and fails.
    command = [
        str(python.parent / "lmcache"),
        "server",
        *("--host", "127.0.0.1", "--port", str(port), "--http-port", str(http_port)),
        *("--l1-size-gb", "3", "--eviction-policy", "LRU", "--chunk-size", "256"),
        *("--supported-transfer-mode", "auto", "--shm-name", f"bench-{os.getpid()}"),
    ]
    with log.open("ab") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT)
    try:
        _wait_until_open(process, http_port, log)
        yield Daemon(
            {
                "kv_connector": "LMCacheMPConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "lmcache.mp.host": "tcp://127.0.0.1",
                    "lmcache.mp.port": port,
                },
            },
            {"PYTHONPATH": str(TOLERANCE), "LMCACHE_LOG_LEVEL": "WARNING"},
        )
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _wait_until_open(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
            return
        except OSError:
            time.sleep(0.2)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
    raise RuntimeError(f"LMCache's daemon does not listen\n{tail}")
