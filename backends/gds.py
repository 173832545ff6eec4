"""Pieces between GPU or host memory and files by cuFile: GPUDirect Storage.

Plain cuFile calls on threads of the engine's own, over registered memory and files. Files that
cuFile does not serve, and machines without it, are refused with cuFile's reason; host memory then
goes by the `posix` backend. Operations ordered on a CUDA stream (cuFileReadAsync) are not used.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from kvtier._core import Completions, FileEngine, GdsEngine, StopFlag
from kvtier.backends.file_regions import FileHandle, MemoryHandle
from kvtier.backends.file_transfers import Engine, FileTransfers, Prepared, routes_between
from kvtier.transfer import Results, Unsuitable
from kvtier.types import Region, RegionKind

THREADS = 16  # calls in flight, of all transfers together
SEGMENT_BYTES = 4 << 20  # of one call
_OWN_CODES_FROM = 5000  # of cuFile; below are errnos


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
        threads: int = THREADS,
        segment_bytes: int = SEGMENT_BYTES,
        fallback: bool = False,
    ) -> None:
        """Open cuFile's driver.

        Where that fails, `fallback` serves host memory by direct I/O instead of raising.

        Raises:
            Unsuitable: there is no cuFile, or it does not work here.
        """
        self._gds: GdsEngine | None = None
        self._reason = ""
        try:
            self._gds = GdsEngine(threads, segment_bytes, _wheel_path())
        except OSError as error:
            if not fallback:
                raise Unsuitable(error.strerror or repr(error)) from error
            self._reason = error.strerror or repr(error)
        disk = FileEngine(threads if self._gds is None else 4, segment_bytes)  # 4: for syncs
        engine: Engine = disk if self._gds is None else self._gds
        memory = (RegionKind.DRAM,) if self._gds is None else (RegionKind.DRAM, RegionKind.VRAM)
        routes = routes_between(memory, (RegionKind.FILE,))
        super().__init__(completions, engine, disk, routes, durable=durable, bytes_per_s=5e9)

    def register_memory(self, region: Region) -> MemoryHandle:
        if region.kind not in (RegionKind.DRAM, RegionKind.VRAM):
            raise Unsuitable(f"gds moves between memory and files, not {region.kind.value}")
        if self._gds is None:
            if region.kind is RegionKind.VRAM:
                raise Unsuitable(f"CUDA is not available here: {self._reason}")
            return MemoryHandle(region.address)
        try:
            is_registered = self._gds.add_memory(region.address, region.nbytes)
        except OSError as error:
            raise Unsuitable(error.strerror or repr(error)) from error
        return MemoryHandle(region.address, is_registered)

    def deregister_memory(self, handle: MemoryHandle) -> None:
        if self._gds is not None and handle.is_registered:
            self._gds.remove_memory(handle.address)

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
        if self._gds is None:
            return super().settle(prepared, moved, flag)
        words = {}
        for result in np.unique(moved[moved <= -_OWN_CODES_FROM]).tolist():
            code, meaning = GdsEngine.meaning(-result)
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
