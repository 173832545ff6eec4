"""What runs kernels in tests: the simulator here; a GPU has the same interface."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path
from typing import Protocol

import fake_build
import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
ALIGNMENT = 256
"""Of what `put` gives; a GPU's allocations have it, too."""
GUARD_FILL = 0x6B
SOURCES = tuple(sorted(fake_build.SIMULATOR.glob("sim_*.cpp")))
SANITIZE = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


class LaunchFailed(RuntimeError):
    """A launch was refused or went wrong; the words say where."""


class Machine(Protocol):
    """Memory, and kernels that work on it."""

    def put(self, array: npt.NDArray[np.generic]) -> int:
        """The address of a copy of its bytes, at a multiple of `ALIGNMENT`, until `clear`."""

    def get(self, address: int) -> Bytes:
        """The bytes that lie there now; the address is one that `put` gave."""

    def launch(self, name: str, grid: int, block: int, shared_bytes: int, arguments: bytes) -> None:
        """Run a kernel to its end.

        Raises:
            LaunchFailed: it was refused, or went wrong.
        """

    def clear(self) -> None:
        """Let go of all memory; AssertionError if anybody wrote beside it."""


class SimMachine:
    """The simulator. Addresses are the process's own; each launch has a seed of its own.

    Around every array lie `guard_bytes` that nobody may write. With AddressSanitizer there are
    none: its own guard begins at the array's very end.
    """

    def __init__(
        self, library: Path | None = None, *, seed: int = 1, guard_bytes: int = ALIGNMENT
    ) -> None:
        self.seed = seed
        self._guard_bytes = guard_bytes
        self._arrays: dict[int, tuple[ctypes.c_void_p, int]] = {}
        self._library = _open(str(library or default_library()))

    def __del__(self) -> None:
        for memory, _ in self._arrays.values():
            _libc().free(memory)

    def put(self, array: npt.NDArray[np.generic]) -> int:
        memory, guard = ctypes.c_void_p(), self._guard_bytes
        size = ctypes.c_size_t(array.nbytes + 2 * guard)
        if _libc().posix_memalign(ctypes.byref(memory), ctypes.c_size_t(ALIGNMENT), size):
            raise MemoryError
        assert memory.value is not None
        address = memory.value + guard
        self._arrays[address] = memory, array.nbytes
        _view(memory.value, array.nbytes + 2 * guard).fill(GUARD_FILL)
        _view(address, array.nbytes)[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return address

    def get(self, address: int) -> Bytes:
        return _view(address, self._arrays[address][1]).copy()

    def launch(self, name: str, grid: int, block: int, shared_bytes: int, arguments: bytes) -> None:
        self.launch_part(name, grid, block, shared_bytes, arguments, 0, 0)

    def launch_part(
        self,
        name: str,
        grid: int,
        block: int,
        shared_bytes: int,
        arguments: bytes,
        first_cta: int,
        cta_count: int,
    ) -> None:
        """Only some CTAs of a grid that is too large to run whole; 0 are all."""
        expected = self._library.kvtier_sim_argument_bytes(name.encode())
        if expected not in (0, len(arguments)):
            raise LaunchFailed(f"{name} takes {expected} bytes, not {len(arguments)}")
        self.seed += 1
        code = self._library.kvtier_sim_launch_part(
            name.encode(),
            grid,
            block,
            ctypes.c_size_t(shared_bytes),
            arguments,
            ctypes.c_uint64(self.seed),
            ctypes.c_uint64(first_cta),
            ctypes.c_uint64(cta_count),
        )
        if code:
            raise LaunchFailed(f"{code}: {self._library.kvtier_sim_error().decode()}")

    def clear(self) -> None:
        arrays, self._arrays = self._arrays, {}
        guard = self._guard_bytes
        torn = []
        for address, (memory, nbytes) in arrays.items():
            for begin in (address - guard, address + nbytes):
                if not bool((_view(begin, guard) == GUARD_FILL).all()):
                    torn.append(f"bytes beside an array of {nbytes} were written")
            _libc().free(memory)
        assert not torn, torn

    def kernel_names(self) -> list[str]:
        """All that are built in."""
        names: list[str] = []
        while name := self._library.kvtier_sim_kernel_name(ctypes.c_size_t(len(names))):
            names.append(name.decode())
        return names


@functools.cache
def default_library() -> Path:
    """KVTIER_SIM_LIBRARY, else one that is built now, if it is not yet."""
    chosen = os.environ.get("KVTIER_SIM_LIBRARY")
    return Path(chosen) if chosen else build()


def build(options: tuple[str, ...] = fake_build.FAST) -> Path:
    """The simulator, with every kernel."""
    return fake_build.build("sim", SOURCES, options)


@functools.cache
def _open(path: str) -> ctypes.CDLL:
    library = ctypes.CDLL(path)
    library.kvtier_sim_error.restype = ctypes.c_char_p
    library.kvtier_sim_kernel_name.restype = ctypes.c_char_p
    library.kvtier_sim_argument_bytes.restype = ctypes.c_size_t
    return library


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _view(address: int, nbytes: int) -> Bytes:
    if nbytes == 0:
        return np.empty(0, np.uint8)
    return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_uint8)), (nbytes,))
