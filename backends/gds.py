"""Pieces between GPU or host memory and files by cuFile: GPUDirect Storage.

Plain cuFile calls on threads of the engine's own, or operations on CUDA streams of its own, over
registered memory and files. Files that cuFile does not serve, and machines without it, are refused
with cuFile's reason; host memory then goes by the `posix` backend.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from kvtier._core import Completions, FileEngine, GdsEngine, StopFlag
from kvtier.backends.file_regions import FileHandle, MemoryHandle
from kvtier.backends.file_transfers import Engine, FileTransfers, Prepared, routes_between
from kvtier.transfer import Results, Unsuitable
from kvtier.types import Region, RegionKind

DEPTH = 16  # calls in flight
SEGMENT_BYTES = 4 << 20  # of one call
_OWN_CODES_FROM = 5000  # of cuFile and CUDA; below are errnos


class GdsTransfers(FileTransfers):
    """VRAM and DRAM to and from files by cuFile.

    Files are those of `PosixTransfers`.
    """

    name: ClassVar[str] = "gds"

    def __init__(
        self,
        completions: Completions,
        *,
        durable: bool = True,
        mode: Literal["threads", "async"] = "threads",
        depth: int = DEPTH,
        segment_bytes: int = SEGMENT_BYTES,
        fallback: bool = False,
    ) -> None:
        """Open cuFile's driver.

        `depth` calls of at most `segment_bytes` are in flight: with "threads" of all transfers
        together, with "async" of each on two streams of its own. "async" serves VRAM only.
        Where cuFile fails, `fallback` serves host memory by direct I/O instead of raising.

        Raises:
            Unsuitable: there is no cuFile, it does not work here or cannot do `mode`.
        """
        self._gds: GdsEngine | None = None
        self._reason = ""
        try:
            self._gds = GdsEngine(depth, segment_bytes, _wheel_path(), mode)
        except OSError as error:
            if not fallback:
                raise Unsuitable(error.strerror or repr(error)) from error
            self._reason = error.strerror or repr(error)
        else:
            self._reason = self._gds.no_cuda
        disk = FileEngine(depth if self._gds is None else 4, segment_bytes)  # 4: for syncs
        engine: Engine = disk if self._gds is None else self._gds
        memory = [RegionKind.DRAM] if self._gds is None or mode == "threads" else []
        if not self._reason:
            memory.append(RegionKind.VRAM)
        self._memory_kinds = tuple(memory)
        routes = routes_between(self._memory_kinds, (RegionKind.FILE,))
        super().__init__(completions, engine, disk, routes, durable=durable, bytes_per_s=5e9)

    def register_memory(self, region: Region) -> MemoryHandle:
        if region.kind is RegionKind.VRAM and self._reason:
            raise Unsuitable(f"no GPU memory can be served here: {self._reason}")
        if region.kind not in self._memory_kinds:
            kinds = " or ".join(kind.value for kind in self._memory_kinds)
            raise Unsuitable(f"gds moves between {kinds} and files here, not {region.kind.value}")
        if self._gds is None:
            return MemoryHandle(region.address)
        device = region.device if region.kind is RegionKind.VRAM else None
        try:
            number = self._gds.add_memory(region.address, region.nbytes, device)
        except OSError as error:
            raise Unsuitable(error.strerror or repr(error)) from error
        return MemoryHandle(region.address, number)

    def deregister_memory(self, handle: MemoryHandle) -> None:
        if self._gds is not None:
            self._gds.remove_memory(handle.address, handle.number)

    def add_file(self, handle: FileHandle) -> None:
        if self._gds is None:
            return
        try:
            self._gds.add_file(handle.direct)
        except OSError as error:
            raise Unsuitable(f"{handle.path}: {error.strerror}") from error

    def remove_file(self, handle: FileHandle) -> None:
        if self._gds is not None:
            self._gds.remove_file(handle.direct)

    def choose(
        self,
        direct: npt.NDArray[np.int32],
        buffered: npt.NDArray[np.int32],
        is_aligned: npt.NDArray[np.bool_],
    ) -> npt.NDArray[np.int32]:
        if self._gds is None:
            return super().choose(direct, buffered, is_aligned)
        return direct  # cuFile itself sees to pieces that are not aligned

    def settle(self, prepared: Prepared, moved: Results, flag: StopFlag) -> dict[int, str]:
        if (gds := self._gds) is None:
            return super().settle(prepared, moved, flag)
        words = {}
        for result in np.unique(moved[moved <= -_OWN_CODES_FROM]).tolist():
            code, meaning = gds.meaning(-result)
            moved[moved == result] = -code
            words[code] = meaning
        return words


def _wheel_path() -> str:
    """The library of the package nvidia-cufile-cu12, if it is installed; else nothing."""
    try:
        found = importlib.util.find_spec("nvidia.cufile")
    except (ImportError, ValueError):
        return ""
    for folder in (found.submodule_search_locations or ()) if found else ():
        path = Path(folder) / "lib" / "libcufile.so.0"
        if path.exists():
            return str(path)
    return ""
