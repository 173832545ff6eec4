"""Runs benchmarks: ``python tests/bench/run.py [--only NAME,...]``; ``--help`` has the options.

Each prints one JSON line on standard output (`result.Result`), and one for each peer that it is
compared with; progress is on standard error. `docs/benchmarks.md` says what each shows.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
import time
from pathlib import Path

from result import Setting, progress

log = logging.getLogger("bench")

ROOT = Path(__file__).resolve().parents[2]

BENCHES = {
    "copy_gather": "copies:run",
    "copy_scatter": "copies:run",
    "copy_vs_torch": "copies:run",
    "host_store": "host:run",
    "host_load": "host:run",
    "host_vs_lmcache": "host_peer:run",
    "disk_store": "disk:run",
    "disk_load": "disk:run",
    "shm_pool": "shm:run",
    "file_read": "files:run",
    "file_write": "files:run",
    "file_vs_nixl": "files:run",
    "s3_get": "s3:run",
    "s3_put": "s3:run",
    "lookup_hit_array": "lookup:run",
    "lookup_hit_list": "lookup:run",
    "lookup_miss": "lookup:run",
    "index_bytes": "index_memory:run",
    "ucx_tcp_paged": "ucx:run",
    "ucx_tcp_large": "ucx:run",
    "ucx_cma_paged": "ucx:run",
    "ucx_cma_large": "ucx:run",
    "ttft_host": "ttft:run_restart",
    "ttft_disk": "ttft:run_restart",
    "ttft_vs_own": "ttft:run_side_by_side",
    "ttft_vs_lmcache": "ttft:run_side_by_side",
    "decode_overhead": "decode:run",
    "agent_prepare": "agent:run",
    "agent_post": "agent:run",
    "agent_completion": "agent:run",
    "handover_exposed": "handover:run",
    "handover_layer_done": "handover:run",
    "gpu_d2h": "gpu:run",
    "gpu_h2d": "gpu:run",
    "gpu_duplex": "gpu:run",
    "gpu_gather": "gpu:run",
    "gpu_scatter": "gpu:run",
    "gpu_pipeline_exposed": "gpu:run",
    "gpu_interference": "gpu:run",
    "gpu_quant": "gpu:run",
    "gpu_hot": "gpu:run",
}
"""Name -> module and function. A function gets all of its names that are wanted at once, with a
`Setting`, and yields results; its module is imported only then, so none needs what others need."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="names, comma-separated; all if not given")
    parser.add_argument(
        "--folder",
        type=Path,
        default=ROOT / ".cache" / "bench",
        help="where scratch files go: the disk that the disk benchmarks measure",
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=min(4, len(os.sched_getaffinity(0))),
        help="copy threads of both sides (default: one for each core, at most 4)",
    )
    parser.add_argument(
        "--lmcache-python",
        type=Path,
        default=os.environ.get("KVTIER_LMCACHE_PYTHON"),
        help="interpreter of an environment with LMCache (or KVTIER_LMCACHE_PYTHON)",
    )
    parser.add_argument(
        "--lmcache-engine-python",
        type=Path,
        default=os.environ.get("KVTIER_LMCACHE_ENGINE_PYTHON"),
        help="interpreter of one with vLLM and LMCache (or KVTIER_LMCACHE_ENGINE_PYTHON)",
    )
    parser.add_argument(
        "--nixl-python",
        type=Path,
        default=os.environ.get("KVTIER_NIXL_PYTHON"),
        help="interpreter of an environment with NIXL (or KVTIER_NIXL_PYTHON)",
    )
    parser.add_argument(
        "--gpu-scale",
        choices=("full", "smallest"),
        default="full",
        help="smallest only shows that the gpu_ benchmarks run",
    )
    arguments = parser.parse_args()
    wanted = [name for name in arguments.only.split(",") if name] or list(BENCHES)
    if unknown := sorted(set(wanted) - set(BENCHES)):
        parser.error(f"no such benchmark: {', '.join(unknown)}; known: {', '.join(BENCHES)}")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    setting = Setting(
        arguments.folder,
        arguments.threads,
        arguments.lmcache_python,
        arguments.lmcache_engine_python,
        arguments.nixl_python,
        arguments.gpu_scale,
    )
    names_of: dict[str, set[str]] = {}
    for name, target in BENCHES.items():
        if name in wanted:
            names_of.setdefault(target, set()).add(name)
    failed = 0
    for target, names in names_of.items():
        module, function = target.split(":")
        progress(f"{', '.join(sorted(names))} ...")
        begin_s = time.monotonic()
        try:
            for result in getattr(importlib.import_module(module), function)(names, setting):
                print(result.line(), flush=True)
        except Exception:  # one subject's fault must not cost the other results
            log.exception("%s failed", target)
            failed += 1
        progress(f"{', '.join(sorted(names))}: {time.monotonic() - begin_s:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
