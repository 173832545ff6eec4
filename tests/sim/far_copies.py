"""Copies over more memory than 32 bits of offset reach; on the simulator, whose memory may be sparse."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from copies import bulk_shared_bytes
from machine import SimMachine

from kvtier.backends.cuda_arguments import CopyArgs, FastDiv

GIB = 1 << 30
STRIDE = 3 * GIB
"""Two of them do not fit 32 bits, one no 31 bits and a sign."""
COUNT = 3
RUN = 16
_NORESERVE = 0x4000  # Linux's MAP_NORESERVE, which Python names from 3.13 on


def check_far(machine: SimMachine, kernel: str) -> None:
    """One extent after the other has parts 3 GiB apart on either side: `v16` or `bulk` kernels."""
    with _sparse() as paged, _sparse() as stored:
        for extent in ("page", "plane", "row", "col"):
            for is_gather in (True, False):
                _copy(machine, kernel, extent, is_gather, paged, stored)


def _copy(
    machine: SimMachine, kernel: str, extent: str, is_gather: bool, paged: int, stored: int
) -> None:
    counts = {each: COUNT if each == extent else 1 for each in ("page", "plane", "row", "col")}
    strides = {each: STRIDE if each == extent else RUN for each in counts}
    source, target = (paged, stored) if is_gather else (stored, paged)
    rng = np.random.default_rng(len(extent))
    expected = rng.integers(0, 256, (COUNT, RUN), dtype=np.uint8)
    for number, run in enumerate(expected):
        ctypes.memmove(source + number * STRIDE, run.ctypes.data, RUN)
        ctypes.memset(target + number * STRIDE, 0, RUN)
    planes = paged + np.arange(counts["plane"], dtype=np.uint64) * np.uint64(strides["plane"])
    offsets = np.arange(counts["page"], dtype=np.uint64) * np.uint64(strides["page"])
    pages = np.stack([offsets, stored + offsets], axis=1)
    arguments = CopyArgs(
        planes=machine.put(planes.astype(np.uint64)),
        pages=machine.put(pages.astype(np.uint64)),
        row_stride=strides["row"],
        col_stride=strides["col"],
        stored_plane_stride=strides["plane"],
        stored_row_stride=strides["row"],
        stored_col_stride=strides["col"],
        total=COUNT,
        run_bytes=RUN,
        vectors=FastDiv(1),
        cols=FastDiv(counts["col"]),
        rows=FastDiv(counts["row"]),
        plane_count=FastDiv(counts["plane"]),
    )
    kind = "gather" if is_gather else "scatter"
    if kernel == "bulk":
        machine.launch(f"kvtier_bulk_{kind}", 1, 32, bulk_shared_bytes(1, 128), bytes(arguments))
    else:
        machine.launch(f"kvtier_{kind}_{kernel}", 1, 32, 0, bytes(arguments))
    machine.clear()
    found = [ctypes.string_at(target + number * STRIDE, RUN) for number in range(COUNT)]
    assert found == [run.tobytes() for run in expected], f"{kernel}, {kind}, {extent}"


def check_large_grid(machine: SimMachine) -> None:
    """A CTA's next tile lies 2^32 vectors on: there is none."""
    memory = np.arange(RUN, dtype=np.uint8)
    source, target = machine.put(memory), machine.put(np.zeros_like(memory))
    one = FastDiv(1)
    arguments = CopyArgs(
        planes=machine.put(np.array([source], np.uint64)),
        pages=machine.put(np.array([0, target], np.uint64)),
        total=1,
        run_bytes=RUN,
        vectors=one,
        cols=one,
        rows=one,
        plane_count=one,
    )
    machine.launch_part("kvtier_gather_v16", 1 << 21, 512, 0, bytes(arguments), 0, 1)
    assert np.array_equal(machine.get(target), memory)
    machine.clear()


@contextmanager
def _sparse() -> Iterator[int]:
    """Address of zeros that reach further than any copy; what nobody touches takes no memory."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    memory = mmap.mmap(-1, COUNT * STRIDE, flags=flags)
    view = (ctypes.c_char * COUNT).from_buffer(memory)
    yield ctypes.addressof(view)
    del view
    memory.close()
