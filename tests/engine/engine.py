"""Starts real vLLM engines for tests, each in a process of its own, and talks to them."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

HERE = Path(__file__).parent
START_TIMEOUT_S = 180.0
COMMAND_TIMEOUT_S = 240.0

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # scheduler and worker in one process
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Pinned and spinning OpenMP threads make a small busy machine many times slower.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


class EngineError(Exception):
    """The engine's process answered with an error, or ended."""


class Engine:
    """A vLLM engine; `kvtier` is the connector's configuration, None for none.

    `python` is the interpreter of an environment with vLLM, by default this process's own;
    `connector` names the class and its module.
    """

    def __init__(
        self,
        model: Path,
        kvtier: dict[str, Any] | None,
        *,
        log: Path,
        environment: dict[str, str] | None = None,
        python: Path | None = None,
        connector: tuple[str, str] = ("KVTierConnector", "kvtier.connectors.vllm"),
        **vllm: Any,
    ) -> None:
        reading, writing = os.pipe()
        self.log = log
        with log.open("ab") as stream:
            self.process = subprocess.Popen(
                [str(python or sys.executable), str(HERE / "engine_process.py")],
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=subprocess.STDOUT,
                pass_fds=[writing],
                env={
                    **os.environ,
                    **ENVIRONMENT,
                    "ENGINE_REPLIES": str(writing),
                    **(environment or {}),
                },
            )
        os.close(writing)
        self._replies = os.fdopen(reading, "rb", buffering=0)
        self._unread = b""
        try:
            job = {"vllm": {"model": str(model), **vllm}, "kvtier": kvtier, "connector": connector}
            self._send(job)
            self.ready = self._answer(START_TIMEOUT_S)
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self.kill()

    def ask(self, command: str, **arguments: Any) -> Any:
        """The answer to one command of `engine_process.Commands`."""
        self.tell(command, **arguments)
        return self._answer(COMMAND_TIMEOUT_S)

    def tell(self, command: str, **arguments: Any) -> None:
        """Send a command without waiting for its answer."""
        self._send([command, arguments])

    def generate(self, *prompts: list[int], max_tokens: int = 8, **sampling: Any) -> list[Any]:
        """One result a prompt: its `tokens` (a list a completion), and how many were `cached`."""
        return list(self.ask("generate", prompts=list(prompts), max_tokens=max_tokens, **sampling))

    def close(self) -> None:
        """End the engine in order; what it stored is on disk afterwards."""
        self.ask("close")
        self._close_pipes()
        status = self.process.wait(60)
        if status != 0:
            raise EngineError(f"exit status {status}\n{self._tail()}")

    def kill(self) -> None:
        """End the process at once, as a crash would."""
        self.process.kill()
        self.process.wait()
        self._close_pipes()

    def _close_pipes(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self._replies.close()

    def _send(self, message: Any) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError as error:
            raise EngineError(f"the engine is gone\n{self._tail()}") from error

    def _answer(self, timeout_s: float) -> Any:
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self._replies], [], [], timeout_s)
            part = self._replies.read(1 << 16) if ready else b""
            if not part:
                state = "is gone" if ready else f"did not answer in {timeout_s} s"
                raise EngineError(f"the engine {state}\n{self._tail()}")
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            raise EngineError(answer["error"])
        return answer["value"]

    def _tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])
