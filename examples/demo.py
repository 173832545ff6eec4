"""A real engine, restarted, finds its KV cache in the tiers.

Asks SmolLM2-135M under vLLM's CPU build about a long document: without kvtier, cold, with the KV
cache in host memory, after a restart with the KV cache on disk, and then another question about
the same document. Prints a table, and fails unless every answer is, word for word, the one given
without kvtier.

    python examples/demo.py [--tokens 7000] [--answer-tokens 32] [--threads 1] [--json FILE]

Each engine is a process of its own (this file again, told to be one), so that a restart is one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
QUESTIONS = {
    "first": "What is this document about? Answer in two sentences.",
    "second": "Which conditions does the document name? Answer in two sentences.",
}
PATIENCE_S = 1800.0  # for one answer, on a slow machine


# The engine's process ------------------------------------------------------------------------------


def serve(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Run a vLLM engine; the first result says it is ready, then one for each request of the job."""
    from vllm import LLM, SamplingParams

    from kvtier.connectors.vllm import open_tiers

    connector = {
        "kv_connector": "KVTierConnector",
        "kv_connector_module_path": "kvtier.connectors.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": job["kvtier"],
    }
    engine = LLM(
        job["model"],
        dtype="float32",  # in bfloat16 greedy text changes with the batch's shape alone
        max_model_len=job["model_tokens"],
        max_num_batched_tokens=job["model_tokens"],
        max_num_seqs=4,
        enforce_eager=True,
        enable_prefix_caching=False,  # every hit shown here is kvtier's
        disable_log_stats=False,
        kv_transfer_config=connector if job["kvtier"] else None,
    )
    sampling = SamplingParams(temperature=0, max_tokens=job["answer_tokens"], ignore_eos=True)
    warm_up = SamplingParams(temperature=0, max_tokens=2)
    engine.generate([{"prompt_token_ids": [1, 2, 3]}], warm_up, use_tqdm=False)
    yield {"ready": True}
    (tier,) = open_tiers() or (None,)
    for prompt in job["prompts"]:
        before = tier.stat()["metrics"] if tier else {}
        (output,) = engine.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        if tier is not None:
            tier.flush()
        after = tier.stat()["metrics"] if tier else {}
        moved = {name: after[name] - before.get(name, 0) for name in after}
        yield {
            "text": output.outputs[0].text,
            "tokens": len(prompt),
            "cached": output.num_cached_tokens,
            "tier": _tier_of(moved),
            "ttft_s": output.metrics.first_token_latency,
            "moved_bytes": int(moved.get("loaded_bytes", 0)),
            "moved_s": moved.get("load_seconds_sum", 0.0),
        }
    engine.llm_engine.engine_core.shutdown()


def _tier_of(moved: dict[str, float]) -> str:
    if not moved.get("loaded_tokens"):
        return "-"
    return "disk" if moved.get("read_bytes_disk") else "memory"


def be_an_engine() -> None:
    """Results go to the file descriptor in DEMO_RESULTS: vLLM writes to the standard output too."""
    job = json.loads(sys.stdin.readline())
    with os.fdopen(int(os.environ["DEMO_RESULTS"]), "w", buffering=1) as results:
        for result in serve(job):
            results.write(json.dumps(result) + "\n")


# The demonstration ---------------------------------------------------------------------------------


class Progress:
    """A line that says what is going on and for how long; on a terminal it ticks."""

    def __init__(self) -> None:
        self._begin_s = time.monotonic()
        self._is_terminal = sys.stderr.isatty()

    def tick(self, what: str, since_s: float) -> None:
        """Show it again, if it is shown over the line before."""
        if self._is_terminal:
            print(f"\r\033[K{what} {time.monotonic() - since_s:.0f} s", end="", file=sys.stderr)

    def done(self, what: str, since_s: float) -> None:
        """Leave a line behind."""
        start = "\r\033[K" if self._is_terminal else ""
        now_s = time.monotonic()
        print(
            f"{start}[{now_s - self._begin_s:4.0f} s] {what}: {now_s - since_s:.1f} s",
            file=sys.stderr,
            flush=True,
        )


def run_engine(
    job: dict[str, Any], names: list[str], threads: int, log: Path, progress: Progress
) -> list[dict[str, Any]]:
    """Start an engine, put the prompts of `job` to it, end it.

    Raises:
        RuntimeError: the process ended early; with the end of its log.
    """
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # scheduler and worker in one process
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    reading, writing = os.pipe()
    with log.open("ab") as stream:
        process = subprocess.Popen(
            [sys.executable, "-P", __file__, "--engine"],
            stdin=subprocess.PIPE,
            stdout=stream,
            stderr=stream,
            pass_fds=[writing],
            env={**environment, "DEMO_RESULTS": str(writing)},
        )
    os.close(writing)
    assert process.stdin is not None
    results: list[dict[str, Any]] = []
    try:
        process.stdin.write(json.dumps(job).encode() + b"\n")
        process.stdin.close()
        with os.fdopen(reading, "rb") as lines:
            for name in names:
                begin_s = time.monotonic()
                while not select.select([lines], [], [], 1.0)[0]:
                    progress.tick(name, begin_s)
                    if time.monotonic() - begin_s > PATIENCE_S:
                        raise RuntimeError(f"{name}: nothing for {PATIENCE_S:.0f} s")
                line = lines.readline()
                if not line:
                    tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
                    raise RuntimeError(f"{name}: the engine's process ended\n{tail}")
                progress.done(name, begin_s)
                results.append(json.loads(line))
        if process.wait(120) != 0:
            raise RuntimeError(f"the engine ended with status {process.returncode}; see {log}")
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()
    return results[1:]


def make_prompts(model: Path, tokens: int) -> dict[str, list[int]]:
    """Both questions about the project's own documents, cut so that a prompt has about `tokens`."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    parts = [ROOT / "LICENSE", ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    document = tokenizer.encode("\n\n".join(part.read_text() for part in parts)).ids
    opening = tokenizer.encode("<|im_start|>user\nRead this document.\n\n").ids
    prompts = {}
    for name, question in QUESTIONS.items():
        ending = f"\n\n{question}<|im_end|>\n<|im_start|>assistant\n"
        closing = tokenizer.encode(ending).ids
        room = tokens - len(opening) - 40  # the same for both questions: they share the document
        if not 0 < room <= len(document):
            limit = len(document) + len(opening) + 40
            raise SystemExit(f"--tokens {tokens}: from {len(opening) + 41} to {limit}")
        prompts[name] = opening + document[:room] + closing
    return prompts


def show_table(rows: list[tuple[str, dict[str, Any], float]]) -> None:
    """One row a request: name, result, and the time to first token without a cache."""
    head = ("request", "tokens", "cached", "tier", "TTFT s", "MB", "GB/s", "speed-up")
    lines = [head]
    for name, result, cold_s in rows:
        moved = result["moved_bytes"]
        lines.append(
            (
                name,
                f"{result['tokens']:,}",
                f"{result['cached']:,}",
                result["tier"],
                f"{result['ttft_s']:.2f}",
                f"{moved / 1e6:.0f}" if moved else "-",
                f"{moved / result['moved_s'] / 1e9:.1f}" if moved else "-",
                f"{cold_s / result['ttft_s']:.1f}x",
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    for line in lines:
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        print("  ".join(cells).rstrip())


def main() -> int:
    """Exit status 0 if every answer is the one given without kvtier."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=7000, help="length of the prompts")
    parser.add_argument("--answer-tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1, help="threads that vLLM computes with")
    parser.add_argument("--json", type=Path, help="write the results to this file as well")
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        be_an_engine()
        return 0

    sys.path.insert(0, str(Path(__file__).parent))
    from smollm2 import model_folder

    progress = Progress()
    begin_s = time.monotonic()
    model = model_folder()
    prompts = make_prompts(model, options.tokens)
    progress.done("model and prompts", begin_s)
    first, second = prompts["first"], prompts["second"]
    with tempfile.TemporaryDirectory(prefix="demo-", dir=ROOT / ".cache") as scratch:
        tiers = [
            {"kind": "memory", "capacity": "2 GiB"},
            {"kind": "posix", "name": "disk", "capacity": "8 GiB", "path": scratch + "/kv"},
        ]

        def ask(kvtier: dict[str, Any] | None, asked: list[list[int]], *names: str) -> Any:
            job = {
                "model": str(model),
                "model_tokens": options.tokens + options.answer_tokens + 64,
                "answer_tokens": options.answer_tokens,
                "kvtier": kvtier,
                "prompts": asked,
            }
            log = Path(scratch) / "log"
            return run_engine(job, list(names), options.threads, log, progress)

        without = ask(
            None,
            [first, second],
            "engine without kvtier starts",
            "first question",
            "second question",
        )
        cold, host = ask(
            {"tiers": tiers}, [first, first], "engine with kvtier starts", "cold", "from memory"
        )
        disk, other = ask(
            {"tiers": tiers}, [first, second], "engine restarts", "from disk", "second question"
        )
    rows = [
        ("first question, no kvtier", without[0], without[0]["ttft_s"]),
        ("second question, no kvtier", without[1], without[1]["ttft_s"]),
        ("first question, cold", cold, without[0]["ttft_s"]),
        ("first question, again", host, without[0]["ttft_s"]),
        ("engine restarted", disk, without[0]["ttft_s"]),
        ("second question", other, without[1]["ttft_s"]),
    ]
    print(f"\nSmolLM2-135M-Instruct, float32, {options.threads} thread(s)")
    show_table(rows)
    right = [without[0], without[1], without[0], without[0], without[0], without[1]]
    wrong = [
        name
        for (name, result, _), expected in zip(rows, right, strict=True)
        if result["text"] != expected["text"]
    ]
    if options.json:
        options.json.write_text(
            json.dumps({"rows": {name: result for name, result, _ in rows}, "wrong": wrong}) + "\n"
        )
    print(f"\nfirst question, all answers: {without[0]['text'].strip()!r}")
    if wrong:
        print(f"DIFFERENT TEXT: {', '.join(wrong)}")
        return 1
    if not (host["cached"] and disk["cached"] and other["cached"]):
        print("NO HIT where there should be one")
        return 1
    print("Every answer is, word for word, the one given without kvtier.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
