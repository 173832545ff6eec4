"""vLLM's OpenAI-compatible server with the connector found by its plug-in name alone."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from engine import ENVIRONMENT, START_TIMEOUT_S

PROMPT = Path(__file__).parents[2].joinpath("LICENSE").read_text()[:4000]


class Server:
    """The server on a free port of the loopback interface."""

    def __init__(self, model: Path, folder: Path, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        tiers = [
            {"kind": "memory", "capacity": "1 GiB"},
            {"kind": "posix", "path": str(folder), "capacity": "2 GiB"},
        ]
        connector = {
            "kv_connector": "KVTierConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"tiers": tiers},
        }
        with log.open("ab") as stream:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server"),
                    *("--host", "127.0.0.1", "--port", str(self._port), "--model", str(model)),
                    *("--served-model-name", "smollm2", "--dtype", "float32", "--enforce-eager"),
                    *("--max-model-len", "2048", "--no-enable-prefix-caching"),
                    *("--enable-prompt-tokens-details",),
                    *("--kv-transfer-config", json.dumps(connector)),
                ],
                stdout=stream,
                stderr=stream,
                env={**os.environ, **ENVIRONMENT},
            )
        self._wait(log)

    def _wait(self, log: Path) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self._port}/health", timeout=5).close()
            except (urllib.error.URLError, OSError):
                if self.process.poll() is not None or time.monotonic() > deadline_s:
                    self.end(signal.SIGKILL)
                    pytest.fail(log.read_text(errors="replace")[-4000:])
                time.sleep(0.2)
            else:
                return

    def ask(self) -> tuple[str, int]:
        """The answer to the prompt, and how many of its tokens came from a cache."""
        body = {"model": "smollm2", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            answer = json.load(response)
        details = answer["usage"]["prompt_tokens_details"] or {}
        return answer["choices"][0]["text"], details.get("cached_tokens") or 0

    def end(self, how: signal.Signals) -> None:
        """End the server's process; it ends its engine's."""
        self.process.send_signal(how)
        self.process.wait(60)


def test_a_server_hits_also_after_it_was_restarted(model: Path, logs: Path, tmp_path: Path) -> None:
    answers = []
    for _ in range(2):
        server = Server(model, tmp_path, logs / "server")
        try:
            answers += [server.ask(), server.ask()]
        finally:
            server.end(signal.SIGTERM)
    texts, cached = zip(*answers, strict=True)
    assert len(set(texts)) == 1
    assert cached[0] == 0
    assert cached[1] == cached[2] == cached[3] >= 640
