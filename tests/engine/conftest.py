"""What the engine tests share: the model, a text, and what vLLM says without kvtier.

They run where vLLM is installed (`make test` sets that up); elsewhere nothing here is collected.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(HERE), str(ROOT / "examples")]

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]

Reference = Callable[..., list[list[int]]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="session")
def model() -> Path:
    """SmolLM2-135M in float32, so that greedy tokens do not depend on how a batch is cut."""
    from smollm2 import model_folder

    return model_folder()


@pytest.fixture(scope="session")
def text(model: Path) -> list[int]:
    """About 2,500 tokens of real prose; slices that begin elsewhere share no chunk."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return list(tokenizer.encode((ROOT / "LICENSE").read_text()).ids)


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="session")
def reference(model: Path, logs: Path) -> Iterator[Reference]:
    """Greedy tokens of each prompt from a vLLM that knows nothing of kvtier."""
    from engine import Engine

    known: dict[tuple[int, ...], list[int]] = {}
    with Engine(model, None, log=logs / "reference") as engine:

        def tokens_of(*prompts: list[int], max_tokens: int = 8) -> list[list[int]]:
            missing = [
                prompt for prompt in prompts if len(known.get(tuple(prompt), [])) < max_tokens
            ]
            for prompt in missing:  # one by one: no batch may lend another its numerics
                known[tuple(prompt)] = engine.generate(prompt, max_tokens=max_tokens)[0]["tokens"][
                    0
                ]
            return [known[tuple(prompt)][:max_tokens] for prompt in prompts]

        yield tokens_of
