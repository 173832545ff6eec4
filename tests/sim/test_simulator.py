"""The simulator sees what a GPU would do wrong in silence: its own small kernels, right and wrong."""

from __future__ import annotations

import ctypes
import enum
import functools
import re
from pathlib import Path
from typing import Any

import fake_build
import numpy as np
import numpy.typing as npt
import pytest
from machine import LaunchFailed, SimMachine

CORE = tuple(
    fake_build.SIMULATOR / f"{name}.cpp" for name in ("sim_bulk", "sim_fibers", "sim_kernels")
)
PROBES = Path(__file__).with_name("probes.cpp")
SHARED_BYTES = 256
SEEDS = range(40)
Words = npt.NDArray[np.uint32]


class Mistake(enum.IntEnum):
    """As probes.cpp."""

    NONE = 0
    NO_BARRIER = 1
    BARRIER_AFTER_EXIT = 2
    TWO_BARRIERS = 3
    MASK_WITHOUT_CALLER = 4
    TWO_MASKS = 5
    LANE_THAT_EXITED = 6
    HALF_AT_COLLECTIVE = 7
    SHUFFLE_WIDTH = 8
    NO_MBARRIER = 9
    MBARRIER_FOR_NOBODY = 10
    MBARRIER_ALIGNMENT = 11
    NO_FENCE = 12
    TWO_ARRIVALS = 13
    ENDLESS_PHASE = 14
    SHORT_LOAD = 15
    LOAD_BEYOND_SHARED = 16
    LOAD_UNDER_END = 17
    STORE_UNDER_END = 18
    MISALIGNED_VECTOR = 19
    STOP = 20
    BARRIER_ALONE = 21


class ProbeArgs(ctypes.Structure):
    """As probes.cpp."""

    _fields_ = (
        ("target", ctypes.c_uint64),
        ("source", ctypes.c_uint64),
        ("mistake", ctypes.c_uint32),
        ("padding", ctypes.c_uint32),
    )


SOURCE = np.arange(1024, dtype=np.uint16).astype(np.uint8)


@functools.cache
def library() -> Path:
    return fake_build.build("probes", (*CORE, PROBES))


def run(
    name: str,
    mistake: Mistake = Mistake.NONE,
    *,
    seed: int = 1,
    grid: int = 1,
    block: int = 64,
    shared_bytes: int = SHARED_BYTES,
) -> Words:
    """What a probe writes."""
    machine = SimMachine(library(), seed=seed)
    target = machine.put(np.zeros(64, np.uint32))
    arguments = ProbeArgs(target, machine.put(SOURCE), mistake, 0)
    machine.launch(name, grid, block, shared_bytes, bytes(arguments))
    found: Words = machine.get(target).view(np.uint32)
    machine.clear()
    return found


def failure_of(name: str, mistake: Mistake) -> str:
    """The words of the first seed for which it fails."""
    for seed in SEEDS:
        try:
            run(name, mistake, seed=seed)
        except LaunchFailed as error:
            return str(error)
    return ""


def test_a_missing_barrier_is_seen_for_some_seed() -> None:
    right = (np.arange(64, dtype=np.uint32) + 32) % 64 + 1
    assert all(np.array_equal(run("exchange", seed=seed), right) for seed in SEEDS)
    found = [run("exchange", Mistake.NO_BARRIER, seed=seed) for seed in range(6)]
    assert not all(np.array_equal(each, right) for each in found)


@pytest.mark.parametrize(
    ("name", "mistake", "words"),
    [
        ("exchange", Mistake.BARRIER_AFTER_EXIT, "__syncthreads after some threads have exited"),
        ("exchange", Mistake.TWO_BARRIERS, "threads meet in different __syncthreads"),
        ("collectives", Mistake.MASK_WITHOUT_CALLER, "whose mask leaves out the caller"),
        ("collectives", Mistake.TWO_MASKS, "leaves out the caller|with different masks"),
        ("collectives", Mistake.LANE_THAT_EXITED, "a warp collective with a lane that has exited"),
        ("collectives", Mistake.HALF_AT_COLLECTIVE, "lanes meet in different warp collectives"),
        ("collectives", Mistake.SHUFFLE_WIDTH, "a shuffle's width"),
        ("bulk", Mistake.NO_MBARRIER, "no mbarrier is there, or no more"),
        ("bulk", Mistake.MBARRIER_FOR_NOBODY, "an mbarrier for nobody"),
        ("bulk", Mistake.MBARRIER_ALIGNMENT, "an mbarrier's alignment"),
        ("bulk", Mistake.NO_FENCE, "an mbarrier that no fence has shown to copies"),
        ("bulk", Mistake.TWO_ARRIVALS, "more arrivals than the mbarrier's phase has"),
        ("bulk", Mistake.ENDLESS_PHASE, "an mbarrier whose phase never ends"),
        ("bulk", Mistake.SHORT_LOAD, "a bulk load of no multiple of 16 bytes"),
        ("bulk", Mistake.LOAD_BEYOND_SHARED, "a bulk copy beyond dynamic shared memory"),
        ("bulk", Mistake.LOAD_UNDER_END, "the CTA ended under a bulk load"),
        ("bulk", Mistake.STORE_UNDER_END, "the CTA ended while a bulk store read its memory"),
        ("alone", Mistake.MISALIGNED_VECTOR, "aligned"),
        ("alone", Mistake.STOP, "the kernel stopped itself"),
        ("alone", Mistake.BARRIER_ALONE, "threads meet, but the kernel's traits say they do not"),
    ],
)
def test_a_mistake_ends_the_launch(name: str, mistake: Mistake, words: str) -> None:
    failure = failure_of(name, mistake)
    assert failure.startswith("719: thread "), failure
    assert re.search(words, failure), failure


def test_every_mistake_is_made() -> None:
    words = re.search(r"enum Mistake[^{]*{([^}]*)}", PROBES.read_text())
    assert words
    names = [name.removeprefix("k").lower() for name in re.split(r"[,\s]+", words[1].strip(" ,\n"))]
    assert names == [each.name.replace("_", "").lower() for each in Mistake]


def test_collectives_give_what_lanes_have() -> None:
    thirds = sum(1 << lane for lane in range(0, 32, 3))
    for seed in SEEDS:
        found = run("collectives", seed=seed)
        assert found[:8].tolist() == [109, 106, 103, 105, 105, thirds, 1, 0]


def test_bulk_copies_bring_what_the_source_has() -> None:
    for seed in SEEDS:
        assert np.array_equal(run("bulk", seed=seed).view(np.uint8)[:128], SOURCE[:128])


def test_shared_memory_begins_as_garbage() -> None:
    """Of either kind, and not always the same: who reads it first is seen sooner or later."""
    for part in (slice(0, 32), slice(32, 64)):
        found = [run("begin", seed=seed)[part] for seed in SEEDS]
        assert all(each.all() for each in found)
        assert len({each.tobytes() for each in found}) > 1


def test_every_thread_of_every_cta_runs_once() -> None:
    found = run("alone", grid=9, block=50)
    assert found[0] == 50 * 1000 * sum(range(9)) + 9 * sum(range(50))
    assert found[1] == 8


def test_only_chosen_ctas_of_a_huge_grid_run() -> None:
    machine = SimMachine(library())
    target = machine.put(np.zeros(64, np.uint32))
    arguments = bytes(ProbeArgs(target, machine.put(SOURCE), Mistake.NONE, 0))
    machine.launch_part("alone", 1 << 30, 1, 0, arguments, (1 << 30) - 2, 2)
    assert machine.get(target).view(np.uint32)[1] == (1 << 30) - 1
    with pytest.raises(LaunchFailed, match="no such CTAs"):
        machine.launch_part("alone", 4, 1, 0, arguments, 3, 2)


def test_launches_that_cuda_refuses_are_refused() -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"block": 65}, "1: alone: a block of 65 threads, at most 64"),
        ({"block": 0}, "1: alone: a block of 0 threads"),
        ({"grid": 0}, "1: alone: a grid of 0"),
        ({"shared_bytes": (227 << 10) + 1}, "bytes of shared memory, at most"),
    ]
    for changes, words in refused:
        with pytest.raises(LaunchFailed, match=words):
            run("alone", Mistake.NONE, **changes)
    with pytest.raises(LaunchFailed, match="500: no kernel nobody"):
        run("nobody")


def test_an_argument_of_another_size_is_refused() -> None:
    with pytest.raises(LaunchFailed, match="alone takes 24 bytes, not 16"):
        SimMachine(library()).launch("alone", 1, 1, 0, bytes(16))


def test_a_write_beside_an_array_is_seen() -> None:
    machine = SimMachine(library())
    target = machine.put(np.zeros(0, np.uint32))
    arguments = bytes(ProbeArgs(target, machine.put(SOURCE), Mistake.NONE, 0))
    machine.launch("alone", 1, 2, 0, arguments)
    with pytest.raises(AssertionError, match="beside an array of 0"):
        machine.clear()


def test_a_seed_is_one_run() -> None:
    found = [run("exchange", Mistake.NO_BARRIER, seed=5) for _ in range(3)]
    assert all(np.array_equal(each, found[0]) for each in found)
