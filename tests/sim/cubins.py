"""Reads what a cubin, an ELF file, tells of its architecture and its kernels."""

from __future__ import annotations

import importlib.util
import struct
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

SOURCES = Path(__file__).parents[2] / "csrc" / "cuda"
_CUDA = 190  # an ELF file's machine
_SYMBOLS = 2  # a section's type
_KERNEL = 0x12  # a symbol's: a global function
_MAX_THREADS = 5  # an attribute of a kernel's
_SIZED = 4  # its form: two bytes of size, then the value


class _Section(NamedTuple):
    name: str
    kind: int
    content: bytes
    link: int


class Cubin:
    """Its architecture (90: sm_90), and its kernels with the threads of their launch bounds."""

    def __init__(self, image: bytes) -> None:
        machine, flags = struct.unpack_from("<18xH28xI", image)
        assert image[:5] == b"\x7fELF\x02"
        assert machine == _CUDA
        # The eighth version of the format moved the architecture up by a byte.
        self.architecture: int = flags >> 8 & 0xFF if image[8] >= 8 else flags & 0xFF
        sections = _sections(image)
        attributes = {one.name: one.content for one in sections}
        self.threads: dict[str, int | None] = {
            name: _threads(attributes.get(f".nv.info.{name}", b"")) for name in _kernels(sections)
        }


def _sections(image: bytes) -> list[_Section]:
    offset, entry_bytes, count, names_index = struct.unpack_from("<40xQ10xHHH", image)
    entries = [
        struct.unpack_from("<IIQQQQII", image, offset + entry_bytes * i) for i in range(count)
    ]
    names_offset = entries[names_index][4]
    sections = []
    for name, kind, _, _, start, nbytes, link, _ in entries:
        content = (
            image[start : start + nbytes] if kind != 8 else b""
        )  # 8: takes no room in the file
        sections.append(_Section(_string(image, names_offset + name), kind, content, link))
    return sections


def _kernels(sections: list[_Section]) -> list[str]:
    names = []
    for section in sections:
        if section.kind != _SYMBOLS:
            continue
        strings = sections[section.link].content
        for name, info in struct.iter_unpack("<IB19x", section.content):
            if info == _KERNEL:
                names.append(_string(strings, name))
    return names


def _threads(attributes: bytes) -> int | None:
    at = 0
    while at < len(attributes):
        form, attribute, size = struct.unpack_from("<BBH", attributes, at)
        value = at + 4
        if attribute == _MAX_THREADS and form == _SIZED:
            x, y, z = struct.unpack_from("<III", attributes, value)
            return int(x * y * z)
        at = value + (size if form == _SIZED else 0)
    return None


def _string(content: bytes, start: int) -> str:
    return content[start : content.index(b"\0", start)].decode()


def compiler() -> ModuleType:
    """csrc/cuda/compile.py, which the build calls."""
    spec = importlib.util.spec_from_file_location("compile_kernels", SOURCES / "compile.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sources() -> dict[str, bytes]:
    """All that the kernels are compiled from, by name."""
    paths = [path for path in SOURCES.iterdir() if path.suffix in (".cu", ".h")]
    return {path.name: path.read_bytes() for path in paths}
