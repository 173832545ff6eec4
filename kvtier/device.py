"""The one statement of what a device is: what copies between engine pages on it and memory segments.

Dependencies point here: the core calls `Device`, `kvtier.backends.cuda_pages` implements it, and the
registry finds implementations by the name that a `DevicePlace` gives.

Nothing here lets the host wait for a device, except what says so: work is put in order by streams,
and a stream is the engine's own handle of one (of CUDA, the integer of a ``CUstream``).
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvtier.types import Region

PageIds = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DevicePlace:
    """Where an engine's pages lie when they do not lie in host memory."""

    kind: str
    """The name under which the device's implementation is registered, such as ``cuda``."""
    ordinal: int
    stream: Callable[[], int]
    """The stream on which the engine computes now, asked anew each time, on the engine's thread."""


@dataclass(frozen=True, slots=True, eq=False)
class Paging:
    """Where one engine's pages lie, as native copies take it; sizes and strides in bytes.

    Byte `x` of (plane `p`, page `g`, row `t`, column `h`) is at
    ``plane_addresses[p] + g * page_stride + t * row_stride + h * col_stride + x``.
    """

    plane_addresses: npt.NDArray[np.uint64]
    page_count: int
    page_stride: int
    rows: int
    row_stride: int
    cols: int
    col_stride: int
    run_bytes: int
    owner: Any = None
    """What keeps the memory where it is."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """What one call of a native copy takes for all waves of some chunks."""

    page_ids: PageIds
    page_offsets: npt.NDArray[np.uint32]
    """Chunk `c` has the pages from ``page_offsets[c]`` up to ``page_offsets[c + 1]``."""
    segments: npt.NDArray[np.uint64]
    """[wave, chunk] addresses."""
    waves: tuple[tuple[int, int], ...]
    """First plane and plane count of each wave."""

    def part(self, first: int, stop: int) -> Batch:
        """The waves from `first` up to `stop`."""
        segments = np.ascontiguousarray(self.segments[first:stop])
        return Batch(self.page_ids, self.page_offsets, segments, self.waves[first:stop])


class DeviceMove(Protocol):
    """Copies under way on a device, wave by wave in order. Any thread.

    Records and pages stay until it is done: whoever began it sees to that.
    """

    @property
    def nbytes(self) -> int:
        """Bytes moved when it is done."""

    def order_after(self, stream: int, wave: int = -1) -> None:
        """What is put on `stream` from now on waits for that wave, or for all; the host does not.

        Of a gather it waits for the pages to be read, not for the bytes to be in memory. OSError
        when the device has failed.
        """

    def is_done(self, wave: int = -1) -> bool:
        """Whether the bytes of that wave, or of all, are in place; OSError when the device failed."""

    def wait(self, timeout_s: float) -> bool:
        """Let the host wait for all of it; False when the time is over first. Raises as `is_done`."""


class DeviceCopies(abc.ABC):
    """Copies between one engine's pages and block-first segments of registered memory. Any thread."""

    @abc.abstractmethod
    def gather(self, batch: Batch, stream: int) -> DeviceMove:
        """Begin to copy pages into segments, after what is on `stream` now; returns at once.

        Raises:
            ValueError: the batch does not fit the pages or the memory; nothing has begun.
            OSError: the device has failed; nothing is touched any more.
        """

    @abc.abstractmethod
    def scatter(self, batch: Batch, stream: int) -> DeviceMove:
        """Begin to copy segments into pages, as `gather` does."""


class Device(abc.ABC):
    """One device as kvtier uses it, opened once for each `KVTier`. Any thread."""

    @property
    @abc.abstractmethod
    def failure(self) -> str:
        """Why nothing can be copied with it any more; empty while it works."""

    @abc.abstractmethod
    def register(self, memory: Region) -> None:
        """Make host memory ready for copies by the device itself, until `close`.

        Raises:
            BackendUnavailable: the system refuses; says what to change.
        """

    @abc.abstractmethod
    def copies(self, paging: Paging) -> DeviceCopies:
        """The copies of an engine whose pages lie on this device.

        Raises:
            ValueError: the addresses are not memory of this device all over, or sizes are absurd.
            BackendUnavailable: the device cannot copy them, or has failed; says why.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Wait for what is under way, then let go of everything; again, do nothing."""


DeviceFactory = Callable[[int], Device]
"""What an entry point of the group ``kvtier.devices`` names; takes the ordinal, and raises
BackendUnavailable, with the reason, on a machine where it cannot work."""
