"""Runs benchmarks: ``python tests/bench/run.py [--only name,name] [--folder FOLDER]``.

Each prints one JSON line on standard output (`result.Result`), and one more for each peer that it
is compared with; progress is on standard error. `docs/benchmarks.md` says what each shows.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
import traceback
from pathlib import Path

from result import progress

ROOT = Path(__file__).resolve().parents[2]

MODULES = {
    "copies": ("copy_gather", "copy_scatter", "copy_vs_torch"),
    "host": ("host_store", "host_load"),
    "host_peer": ("host_vs_lmcache",),
    "disk": ("disk_store", "disk_load"),
    "lookup": ("lookup_hit_array", "lookup_hit_list", "lookup_miss"),
    "index_memory": ("index_bytes",),
    "engine": ("ttft_host", "ttft_disk", "decode_overhead", "ttft_vs_own"),
    "engine_peer": ("ttft_vs_lmcache",),
}
"""Each module has `run(wanted, folder)`, which yields the results of the wanted ones of its names."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="names, comma-separated; all if not given")
    parser.add_argument(
        "--folder",
        type=Path,
        default=ROOT / ".cache" / "bench",
        help="where scratch files go: the disk that the disk benchmarks measure",
    )
    arguments = parser.parse_args()
    known = [name for names in MODULES.values() for name in names]
    wanted = set(filter(None, arguments.only.split(","))) or set(known)
    if unknown := sorted(wanted - set(known)):
        parser.error(f"no such benchmark: {', '.join(unknown)}; known: {', '.join(known)}")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    for module, names in MODULES.items():
        chosen = [name for name in names if name in wanted]
        if not chosen:
            continue
        progress(f"{', '.join(chosen)} ...")
        begin_s = time.monotonic()
        try:
            for result in importlib.import_module(module).run(set(chosen), arguments.folder):
                print(result.line(), flush=True)
        except Exception:  # one subject's fault must not cost the other results
            traceback.print_exc()
            failed += 1
        progress(f"{', '.join(chosen)}: {time.monotonic() - begin_s:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
