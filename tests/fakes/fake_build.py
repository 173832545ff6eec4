"""Compiles the stand-ins for libraries, once for each state of their sources."""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SIMULATOR = ROOT / "csrc" / "sim"
CACHE = ROOT / ".cache" / "fakes"
WARNINGS = ("-Wall", "-Wextra", "-Wconversion", "-Werror")
# A product and a sum stay two roundings, as in the kernels.
OPTIONS = ("-std=c++20", *WARNINGS, "-fPIC", "-pthread", "-ffp-contract=off")
FAST = ("-O1", "-g1")
KEPT_MAX = 200
"""Files in the cache; of more, the oldest are removed."""


@functools.cache
def build(name: str, sources: tuple[Path, ...], options: tuple[str, ...] = FAST) -> Path:
    """The library `name` of these sources; what did not change comes from the cache.

    Definitions among the options are for the last source alone, so that libraries share objects.
    Safe when several processes build at once: a finished file takes its place in one step.
    """
    built = objects(sources, options)
    flags = _flags(options)
    target = CACHE / f"lib{name}-{_digest([*flags, *built], [])}.so"
    library = _made(target, [*flags, "-shared", *built])
    _trim()
    return library


@functools.cache
def objects(sources: tuple[Path, ...], options: tuple[str, ...] = FAST) -> tuple[Path, ...]:
    """The object of each source, as for `build`."""
    flags = _flags(options)
    CACHE.mkdir(parents=True, exist_ok=True)
    seed = _digest(flags, _included())
    defined = [option for option in options if option.startswith("-D")]

    def compiled(source: Path) -> Path:
        own = [*flags, *(defined if source == sources[-1] else [])]
        target = CACHE / f"{source.stem}-{_digest([seed, *own], [source])}.o"
        return _made(target, [*own, "-c", source])

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return tuple(pool.map(compiled, sources))


def compiler() -> str:
    """The C++ compiler."""
    return os.environ.get("CXX", "c++")


def _flags(options: Sequence[str]) -> list[str]:
    common = [option for option in options if not option.startswith("-D")]
    folders = [f"-I{SIMULATOR}", f"-I{ROOT / 'csrc' / 'cuda'}"]
    return [compiler(), *OPTIONS, *folders, *common]


def _included() -> list[Path]:
    """All headers and kernels that the sources may include."""
    suffixes = (".h", ".hpp", ".cu", ".cuh")
    folders = [ROOT / "csrc" / name for name in ("sim", "cuda", "shim")]
    return sorted(path for at in folders for path in at.iterdir() if path.suffix in suffixes)


def _digest(words: Sequence[str | Path], files: Sequence[Path]) -> str:
    digest = hashlib.sha256(repr([str(word) for word in words]).encode())
    for path in files:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _made(target: Path, command: Sequence[str | Path]) -> Path:
    """The file, by the command with `-o` where there is none yet."""
    if target.exists():
        target.touch()
        return target
    with tempfile.TemporaryDirectory(dir=CACHE, prefix="build-") as folder:
        built = Path(folder) / target.name
        done = subprocess.run([*command, "-o", built], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        built.rename(target)
    return target


def _trim() -> None:
    """Never what a process may just have been given: the newest stay."""
    files = sorted((path.stat().st_mtime, path) for path in CACHE.glob("*.*"))
    for _, path in files[:-KEPT_MAX]:
        path.unlink(missing_ok=True)
