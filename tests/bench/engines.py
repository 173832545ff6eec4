"""What the benchmarks with a real vLLM share: its engines, the model and prompts of real prose.

Needs vLLM and the demo's model package (`tests/engine/install.sh`); nothing else here does.
"""

from __future__ import annotations

import functools
import importlib.util
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from result import Setting

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "engine"), str(ROOT / "examples")]

from engine import Engine
from smollm2 import model_folder

PAGE = 128  # vLLM's block on its CPU backend
CHUNK = 256
KV_BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 4  # layers, K and V, heads, head size, float32
ANSWER_TOKENS = 8
"""What is compared, to see that a hit changes no text."""

__all__ = [
    "ANSWER_TOKENS",
    "CHUNK",
    "KV_BYTES_PER_TOKEN",
    "PAGE",
    "Engine",
    "cached_of",
    "open_engine",
    "prompt_of",
    "scratch",
    "tiers",
]


@functools.cache
def model() -> Path:
    """The demo's model in float32, so that texts can be compared.

    Raises:
        ModuleNotFoundError: this environment has no vLLM.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ModuleNotFoundError("no vLLM here: `make bench` sets up an environment that has it")
    return model_folder()


@functools.cache
def _prose() -> list[int]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model() / "tokenizer.json"))
    files = [ROOT / "LICENSE", *sorted((ROOT / "docs").glob("*.md"))]
    return list(tokenizer.encode("\n\n".join(file.read_text() for file in files)).ids)


def prompt_of(tokens: int, begin: int) -> list[int]:
    """`tokens` of the licence and the documents from token `begin` on, starting over at the end.

    Prompts with different beginnings share no chunk: a chunk's key depends on all before it.
    """
    prose = _prose()
    return [prose[(begin + i) % len(prose)] for i in range(tokens)]


def cached_of(tokens: int) -> int:
    """What a full hit leaves of a prompt to compute is at least a token, and less than a page."""
    return (tokens - 1) // PAGE * PAGE


@contextmanager
def scratch(setting: Setting) -> Iterator[Path]:
    """A folder of its own on the disk that is measured."""
    folder = Path(tempfile.mkdtemp(prefix="engine-", dir=setting.folder))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def tiers(folder: Path) -> dict[str, Any]:
    """kvtier's configuration: memory and a disk."""
    return {
        "tiers": [
            {"kind": "memory", "capacity": "2 GiB"},
            {"kind": "posix", "name": "disk", "capacity": "16 GiB", "path": str(folder / "kv")},
        ]
    }


def open_engine(folder: Path, name: str, kvtier: dict[str, Any] | None, **options: Any) -> Engine:
    """An engine with room for the longest prompts here, warmed up; its log goes to `folder`."""
    vllm = {"max_model_len": 8192, "max_num_batched_tokens": 8192, **options}
    engine = Engine(model(), kvtier, log=folder / f"{name}.log", **vllm)
    try:
        engine.generate([1, 2, 3], max_tokens=2)
    except BaseException:
        engine.kill()
        raise
    return engine
