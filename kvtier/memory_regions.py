"""What may be registered: buffers, addresses, arrays of other libraries, paths and object names."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from kvtier.arrays import ArrayView, is_array, view_of
from kvtier.shared_pool import SharedPool
from kvtier.types import Region, RegionKind

Source: TypeAlias = tuple[int, int] | str | Path | Any
"""Or any buffer or array, which have no common type."""


@dataclass(frozen=True, slots=True)
class Described:
    """What a source is, before it has a number."""

    kind: RegionKind
    address: int
    nbytes: int
    """0: a place whose length a backend must say."""
    device: int
    writable: bool
    source: Any
    """For backends: the buffer, the absolute path, the object's name."""
    keep: Any
    """Whatever must live as long as the region."""

    def region(self, number: int) -> Region:
        """The region under its number."""
        return Region(self.kind, self.address, self.nbytes, self.device, number)

    def of_length(self, nbytes: int) -> Described:
        """The same with its length."""
        return replace(self, nbytes=nbytes)


def describe(source: Source, kind: RegionKind | None, nbytes: int | None) -> Described:
    """Find out what `source` is; `kind` and `nbytes` say what cannot be found out.

    Raises:
        ValueError: it is nothing that can be a region.
    """
    if nbytes is not None and not 0 < nbytes < 1 << 62:
        raise ValueError(f"a region of {nbytes} bytes")
    if isinstance(source, (str, Path)):
        found = _place(source, kind, nbytes)
    elif isinstance(source, tuple):
        found = _addresses(source, kind or RegionKind.DRAM)
    else:
        found = _memory(source)
    if kind is not None and kind is not found.kind:
        raise ValueError(f"{source!r:.80} is {found.kind.value}, not {kind.value}")
    if found.kind in (RegionKind.DRAM, RegionKind.VRAM):
        if nbytes is not None and nbytes != found.nbytes:
            raise ValueError(f"memory of {found.nbytes} bytes, said to have {nbytes}")
        if not found.nbytes:
            raise ValueError("memory of 0 bytes")
    return found


def _place(source: str | Path, kind: RegionKind | None, nbytes: int | None) -> Described:
    text = str(source)
    if isinstance(source, str) and "://" in text:
        return Described(RegionKind.OBJ, 0, nbytes or 0, 0, True, text, None)
    path = os.path.abspath(text)
    try:
        status = os.stat(path)
    except FileNotFoundError:
        if nbytes is None:
            raise ValueError(f"{path} is absent: give nbytes to make it") from None
        return Described(kind or RegionKind.FILE, 0, nbytes, 0, True, path, None)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    writable = os.access(path, os.W_OK)
    if stat.S_ISBLK(status.st_mode):
        with open(path, "rb") as device:
            size = device.seek(0, os.SEEK_END)
        return Described(RegionKind.BLK, 0, nbytes or size, 0, writable, path, None)
    if stat.S_ISDIR(status.st_mode):
        raise ValueError(f"{path} is a folder")
    return Described(kind or RegionKind.FILE, 0, nbytes or status.st_size, 0, writable, path, None)


def _addresses(source: tuple[Any, ...], kind: RegionKind) -> Described:
    if len(source) != 2 or not all(isinstance(part, int) for part in source):
        raise ValueError(f"{source!r:.80} is not (address, bytes)")
    address, nbytes = source
    if not (address > 0 and nbytes > 0 and address + nbytes <= 1 << 63):
        raise ValueError(f"{nbytes} bytes at address {address:#x}")
    return Described(kind, address, nbytes, 0, True, source, None)


def _memory(source: Any) -> Described:
    if isinstance(source, SharedPool):
        view = source.view(0, source.capacity_bytes)
        whole = (source.address, source.capacity_bytes, 0, source.is_writable)
        return Described(RegionKind.DRAM, *whole, view, (source, view))
    if hasattr(source, "data_ptr") or (is_array(source) and not _is_buffer(source)):
        return _array(view_of(source))
    try:
        view = memoryview(source)
    except TypeError:
        raise ValueError(f"{source!r:.80} is no buffer, path, address or object name") from None
    if not view.c_contiguous:
        raise ValueError("a buffer with gaps is no region")
    if not view.nbytes:
        raise ValueError("memory of 0 bytes")
    address = np.frombuffer(view.cast("B"), np.uint8).ctypes.data
    return Described(RegionKind.DRAM, address, view.nbytes, 0, not view.readonly, source, view)


def _array(view: ArrayView) -> Described:
    if not view.is_dense:
        raise ValueError("an array with gaps is no region: register its storage")
    kind = RegionKind.DRAM if view.device is None else RegionKind.VRAM
    device = view.device or 0
    return Described(
        kind, view.address, view.nbytes, device, view.is_writable, view.owner, view.owner
    )


def _is_buffer(source: Any) -> bool:
    try:
        memoryview(source).release()
    except (TypeError, BufferError):
        return False
    return True
