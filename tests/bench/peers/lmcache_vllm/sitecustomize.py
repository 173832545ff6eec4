"""Python imports this at start when the folder is on PYTHONPATH: LMCache in vLLM's CPU build.

vLLM's search for kernels calls `vars(value).get` on every value of every loaded module, which among
what LMCache imports are some whose `vars` has no `get`. Here such values are passed over.
"""

from __future__ import annotations

import builtins
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from typing import Any

DISPATCHER = "vllm.triton_utils.dispatcher"


def _vars(*values: Any) -> Any:
    found = builtins.vars(*values)
    return found if hasattr(found, "get") else {}


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != DISPATCHER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                module.vars = _vars
                run(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder())
