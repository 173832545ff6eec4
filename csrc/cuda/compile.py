"""Compiles the device kernels to a cubin with NVRTC; needs no nvcc, no GPU and no driver.

The build calls it once for each architecture (images.cmake). `src/device_jit.cpp` does the same
when the program runs, with the same sources and options. What the compiler only warns of fails
here.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NoReturn

VERSION = (12, 9)  # knows all architectures; drivers of CUDA 12 and 13 load what it makes
MAIN = "kernels.cu"  # the one translation unit; the other sources are what it includes


def main() -> None:
    """Compile, or with `--version` only say which NVRTC there is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--version", action="store_true", help="print NVRTC's version and end")
    parser.add_argument("--architecture", type=int, help="such as 90, for sm_90")
    parser.add_argument("--output", type=Path, help="the cubin")
    parser.add_argument("--option", action="append", default=[], help="one of NVRTC's; repeatable")
    parser.add_argument("sources", nargs="*", type=Path, help=f"{MAIN} and all that it includes")
    arguments = parser.parse_args()
    nvrtc = Nvrtc(library_path())
    if arguments.version:
        print(".".join(map(str, nvrtc.version)))
        return
    sources = {path.name: path.read_bytes() for path in arguments.sources}
    cubin = nvrtc.compile(sources, f"sm_{arguments.architecture}", arguments.option)
    partial = arguments.output.with_suffix(".partial")  # an interrupted build leaves no half file
    partial.write_bytes(cubin)
    partial.replace(arguments.output)


class Nvrtc:
    """The part of NVRTC that is needed."""

    def __init__(self, path: Path) -> None:
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            _fail(str(error))
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = (major.value, minor.value)
        if self.version != VERSION:
            found, wanted = (".".join(map(str, version)) for version in (self.version, VERSION))
            _fail(f"NVRTC {found} in {path}, {wanted} is needed")

    def compile(self, sources: dict[str, bytes], target: str, options: Sequence[str]) -> bytes:
        """Give the cubin of `target`; on an error or a warning end with the compiler's words."""
        headers = {name: text for name, text in sources.items() if name != MAIN}
        program = ctypes.c_void_p()
        self._check(
            "nvrtcCreateProgram",
            ctypes.byref(program),
            sources[MAIN],
            MAIN.encode(),
            len(headers),
            _strings(headers.values()),
            _strings(name.encode() for name in headers),
        )
        given = [f"--gpu-architecture={target}", *options]
        result = self._library.nvrtcCompileProgram(
            program, len(given), _strings(option.encode() for option in given)
        )
        words = self._bytes("ProgramLog", program).rstrip(b"\0").decode().strip()
        if result != 0 or words:
            _fail(f"{target}: {words or self._words(result)}")
        return self._bytes("CUBIN", program)

    def _bytes(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._check(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        content = ctypes.create_string_buffer(size.value)
        self._check(f"nvrtcGet{what}", program, content)
        return content.raw

    def _check(self, name: str, *arguments: object) -> None:
        result = getattr(self._library, name)(*arguments)
        if result != 0:
            _fail(f"{name}: {self._words(result)}")

    def _words(self, result: int) -> str:
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        return str(self._library.nvrtcGetErrorString(result).decode())


def _strings(values: Iterable[bytes]) -> ctypes.Array[ctypes.c_char_p]:
    strings = list(values)
    return (ctypes.c_char_p * len(strings))(*strings)


def library_path() -> Path:
    """KVTIER_NVRTC_LIBRARY, else the one of the package nvidia-cuda-nvrtc-cu12."""
    if chosen := os.environ.get("KVTIER_NVRTC_LIBRARY"):
        return Path(chosen)
    try:
        spec = importlib.util.find_spec("nvidia.cuda_nvrtc")
    except ModuleNotFoundError:
        spec = None
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder, "lib", "libnvrtc.so.12")
        if path.exists():
            return path
    _fail("the package nvidia-cuda-nvrtc-cu12 is not installed")


def _fail(words: str) -> NoReturn:
    sys.exit(words)


if __name__ == "__main__":
    main()
