from __future__ import annotations

import gc
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvtier._core import Slab

PAGE = 4096


def test_runs_are_whole_pages_and_counted() -> None:
    slab = Slab(8 * PAGE, prefault=False)
    assert (slab.allocate(1), slab.allocate(PAGE + 1)) == (0, PAGE)
    assert (slab.used_bytes, slab.largest_free_bytes) == (3 * PAGE, 5 * PAGE)
    slab.free(0)
    assert slab.used_bytes == 2 * PAGE


def test_a_capacity_is_rounded_up_to_pages() -> None:
    assert Slab(PAGE + 1, prefault=False).capacity_bytes == 2 * PAGE


def test_the_best_fitting_run_is_taken() -> None:
    slab = Slab(10 * PAGE, prefault=False)
    wide, _, narrow, _ = (slab.allocate(pages * PAGE) for pages in (3, 1, 2, 1))
    slab.free(wide)
    slab.free(narrow)
    assert slab.allocate(2 * PAGE) == narrow
    assert slab.allocate(3 * PAGE) == wide


def test_a_full_slab_says_minus_one() -> None:
    slab = Slab(2 * PAGE, prefault=False)
    assert slab.allocate(3 * PAGE) == -1
    assert slab.allocate(2 * PAGE) == 0
    assert slab.allocate(1) == -1
    assert slab.largest_free_bytes == 0


def test_mistakes_are_value_errors() -> None:
    slab = Slab(2 * PAGE, prefault=False)
    with pytest.raises(ValueError, match="at least 1"):
        slab.allocate(0)
    with pytest.raises(ValueError, match="nothing is allocated at offset 4096"):
        slab.free(PAGE)
    with pytest.raises(ValueError, match="1 bytes at offset 8192"):
        slab.memory(2 * PAGE, 1)
    with pytest.raises(ValueError, match="0 bytes"):
        Slab(0)


def test_more_memory_than_there_can_be_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match="cannot map"):
        Slab(1 << 46)


def test_memory_is_one_writable_page_aligned_run_of_bytes() -> None:
    slab = Slab(4 * PAGE, prefault=False)
    assert slab.address % (2 << 20) == 0
    whole = slab.memory(0, 4 * PAGE)
    part = slab.memory(PAGE, 3)
    part[:] = b"abc"
    assert bytes(whole[PAGE - 1 : PAGE + 4]) == b"\0abc\0"
    assert (part.format, part.readonly, part.nbytes) == ("B", False, 3)
    array = np.frombuffer(part, np.uint8)
    assert array.__array_interface__["data"] == (slab.address + PAGE, False)


def test_memory_keeps_the_slab_mapped() -> None:
    slab = Slab(PAGE, prefault=False)
    view = slab.memory(0, PAGE)[10:20]
    slab.close()
    del slab
    gc.collect()
    view[:] = b"0123456789"
    assert bytes(view) == b"0123456789"


def test_a_closed_slab_refuses() -> None:
    slab = Slab(PAGE)
    offset = slab.allocate(1)
    slab.close()
    slab.close()
    with pytest.raises(ValueError, match="closed"):
        slab.allocate(1)
    with pytest.raises(ValueError, match="closed"):
        slab.memory(0, 1)
    slab.free(offset)  # what was handed out may still be given back
    assert slab.address == 0


def test_memory_is_given_back_once_nobody_looks() -> None:
    def resident_bytes() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    slab = Slab(64 << 20, prefault=False)
    before = resident_bytes()
    np.frombuffer(slab.memory(0, 64 << 20), np.uint8)[:] = 1
    assert resident_bytes() > before + (48 << 20)
    slab.close()
    gc.collect()
    assert resident_bytes() < before + (16 << 20)


def test_threads_share_a_slab() -> None:
    slab = Slab(64 * PAGE, prefault=True)

    def work(number: int) -> None:
        for _ in range(300):
            offset = slab.allocate(3 * PAGE)
            if offset < 0:
                continue
            view = np.frombuffer(slab.memory(offset, 3 * PAGE), np.uint8)
            view[:] = number
            assert (view == number).all()
            slab.free(offset)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(1, 5)))
    assert (slab.used_bytes, slab.largest_free_bytes) == (0, 64 * PAGE)
