"""The stand-in for libcuda sees what the real driver would not forgive, or would leave unsaid."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fake_cuda
import numpy as np
import pytest
from fake_cuda import Call, FakeCuda, Setting
from gpu_calls import Bytes, DriverError, Gpu

NBYTES = 4096
STREAM, DURING_CALL, ANY = 1, 2, 3
DEVICE, HOST = 2, 1


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    """At the end nothing is left open, and every mistake was asked for."""
    fake = FakeCuda()
    fake.reset()
    fake.mistake_words()
    before = fake.held_now()
    yield fake
    fake.reset()
    assert fake.held_now() == before
    assert fake.mistake_words() == []


@pytest.fixture
def gpu(fake: FakeCuda) -> Iterator[Gpu]:
    """A context of device 0; what a test leaves in it is freed, and no mistake is kept of that."""
    gpu = Gpu(fake)
    yield gpu
    left = fake.mistake_words()
    gpu.close()
    fake.mistake_words()
    assert left == []


def address_of(bytes_: Bytes) -> int:
    return int(bytes_.ctypes.data)


def fails(code: int) -> pytest.RaisesExc[DriverError]:
    return pytest.RaisesExc(DriverError, match=f"^{code}$")


# Order -------------------------------------------------------------------------------------------


def chain(gpu: Gpu, *, with_wait: bool) -> bool:
    """Up on one stream and down on another: whether the right bytes came."""
    up, down, event = gpu.stream(), gpu.stream(), gpu.event()
    source, target = gpu.pinned(NBYTES), gpu.pinned(NBYTES)
    source[:] = 7
    place = gpu.allocate(NBYTES)
    gpu.copy(place, address_of(source), NBYTES, up)
    gpu.record(event, up)
    if with_wait:
        gpu.wait(down, event)
    gpu.copy(address_of(target), place, NBYTES, down)
    gpu.synchronize(down)
    gpu.synchronize(up)
    return bool((target == 7).all())


def test_a_missing_wait_is_seen_for_some_seed(gpu: Gpu) -> None:
    seen = []
    for seed in range(12):
        gpu.fake.set(Setting.SEED, seed)
        seen.append(chain(gpu, with_wait=False))
    assert False in seen


def test_with_the_wait_the_bytes_are_right_for_every_seed(gpu: Gpu) -> None:
    for seed in range(12):
        gpu.fake.set(Setting.SEED, seed)
        assert chain(gpu, with_wait=True)


def test_nothing_begins_before_the_event_that_its_stream_waits_for(gpu: Gpu) -> None:
    first, second, event = gpu.stream(), gpu.stream(), gpu.event()
    place = gpu.allocate(NBYTES)
    with gpu.fake.held():
        gpu.call("cuMemsetD8Async", place, 1, NBYTES, first)
        gpu.fake.wait_held()
        gpu.record(event, first)
        gpu.wait(second, event)
        gpu.call("cuMemsetD8Async", place, 2, NBYTES, second)
        with fails(600):
            gpu.call("cuStreamQuery", second)
        with fails(600):
            gpu.call("cuEventQuery", event)
    gpu.synchronize(second)
    gpu.call("cuEventQuery", event)
    assert ctypes.string_at(place, NBYTES) == b"\2" * NBYTES


def test_a_wait_is_for_the_record_before_it_and_not_for_a_later_one(gpu: Gpu) -> None:
    first, second, event = gpu.stream(), gpu.stream(), gpu.event()
    place = gpu.allocate(NBYTES)
    gpu.record(event, first)
    gpu.wait(second, event)
    with gpu.fake.held():
        gpu.call("cuMemsetD8Async", place, 1, NBYTES, first)
        gpu.fake.wait_held()
        gpu.record(event, first)
        gpu.synchronize(second)
        with fails(600):
            gpu.call("cuEventQuery", event)
    gpu.call("cuEventSynchronize", event)


def test_two_streams_work_at_once(gpu: Gpu) -> None:
    up, down = gpu.stream(), gpu.stream()
    host, place = gpu.pinned(2 * NBYTES), gpu.allocate(2 * NBYTES)
    with gpu.fake.held():
        gpu.copy(place, address_of(host), NBYTES, up)
        gpu.copy(address_of(host) + NBYTES, place + NBYTES, NBYTES, down)
        gpu.fake.wait_held(2)
    gpu.synchronize(up)
    gpu.synchronize(down)


def test_a_wait_for_an_event_that_was_never_recorded_is_a_mistake(gpu: Gpu) -> None:
    stream, event = gpu.stream(), gpu.event()
    gpu.wait(stream, event)
    gpu.synchronize(stream)
    assert gpu.fake.mistake_words() == ["cuStreamWaitEvent on an event that was never recorded"]


def test_events_tell_the_time_between_them_once_they_are_over(gpu: Gpu) -> None:
    stream, start, end, untimed = gpu.stream(), gpu.event(0), gpu.event(0), gpu.event()
    place, elapsed_ms = gpu.allocate(NBYTES), ctypes.c_float()
    at = ctypes.addressof(elapsed_ms)
    with fails(400):
        gpu.call("cuEventElapsedTime", at, start, end)
    with gpu.fake.held():
        gpu.record(start, stream)
        gpu.call("cuMemsetD8Async", place, 1, NBYTES, stream)
        gpu.record(end, stream)
        with fails(600):
            gpu.call("cuEventElapsedTime", at, start, end)
    gpu.record(untimed, stream)
    gpu.synchronize(stream)
    gpu.call("cuEventElapsedTime", at, start, end)
    assert elapsed_ms.value > 0
    with fails(400):
        gpu.call("cuEventElapsedTime", at, start, untimed)


def test_a_stream_that_is_destroyed_with_work_is_a_mistake(gpu: Gpu) -> None:
    gpu.fake.set(Setting.DELAY_MAX_US, 20_000)
    stream, place = gpu.stream(), gpu.allocate(NBYTES)
    for _ in range(6):
        gpu.call("cuMemsetD8Async", place, 1, NBYTES, stream)
    gpu.call("cuStreamDestroy_v2", stream)
    assert gpu.fake.mistake_words() == ["a stream was destroyed before its work was over"]


# Memory ------------------------------------------------------------------------------------------


def test_new_memory_is_poisoned(gpu: Gpu) -> None:
    assert ctypes.string_at(gpu.allocate(NBYTES), NBYTES) == b"\xcd" * NBYTES


def test_memory_that_is_freed_while_work_uses_it_is_a_mistake(gpu: Gpu) -> None:
    stream, place = gpu.stream(), gpu.allocate(NBYTES)
    host = gpu.pinned(NBYTES)
    with gpu.fake.held():
        gpu.copy(place, address_of(host), NBYTES, stream)
        gpu.call("cuMemFree_v2", place)
        gpu.call("cuMemFreeHost", address_of(host))
    gpu.synchronize(stream)
    assert gpu.fake.mistake_words() == [
        "cuMemFree of memory that enqueued work uses",
        "cuMemFreeHost of memory that enqueued work uses",
    ]


def test_memory_that_is_freed_after_a_wait_is_none(gpu: Gpu) -> None:
    stream, place = gpu.stream(), gpu.allocate(NBYTES)
    gpu.call("cuMemsetD8Async", place, 1, NBYTES, stream)
    gpu.synchronize(stream)
    gpu.call("cuMemFree_v2", place)
    assert gpu.fake.held_now().allocations == 0


def test_a_second_free_is_a_mistake(gpu: Gpu) -> None:
    place = gpu.allocate(NBYTES)
    gpu.call("cuMemFree_v2", place)
    with fails(1):
        gpu.call("cuMemFree_v2", place)
    assert gpu.fake.mistake_words() == ["cuMemFree of memory that was freed already"]


def test_a_free_of_a_place_within_memory_is_a_mistake(gpu: Gpu) -> None:
    place = gpu.allocate(NBYTES)
    with fails(1):
        gpu.call("cuMemFree_v2", place + 256)
    assert gpu.fake.mistake_words() == ["cuMemFree of what is no allocation"]


def test_a_copy_of_freed_memory_is_a_mistake(gpu: Gpu) -> None:
    stream, place, host = gpu.stream(), gpu.allocate(NBYTES), gpu.pinned(NBYTES)
    gpu.call("cuMemFree_v2", place)
    with fails(1):
        gpu.copy(address_of(host), place + 8, 8, stream)
    assert gpu.fake.mistake_words() == ["a copy of memory that was freed"]


def test_a_kernel_that_writes_to_freed_memory_is_a_mistake(gpu: Gpu) -> None:
    stream, place, other = gpu.stream(), gpu.allocate(NBYTES), gpu.allocate(NBYTES)
    with gpu.fake.held():
        gpu.launch(gpu.function("fake_copy"), struct.pack("QQQ", place, other, 8), stream)
        gpu.call("cuMemFree_v2", place)
    gpu.synchronize(stream)
    assert gpu.fake.mistake_words() == ["a write to memory after it was freed"]


@pytest.mark.parametrize("start", [-8, NBYTES])
def test_a_kernel_that_writes_beyond_memory_is_a_mistake(gpu: Gpu, start: int) -> None:
    stream, place, other = gpu.stream(), gpu.allocate(NBYTES), gpu.allocate(NBYTES)
    gpu.launch(gpu.function("fake_copy"), struct.pack("QQQ", place + start, other, 8), stream)
    gpu.synchronize(stream)
    gpu.call("cuMemFree_v2", place)
    assert gpu.fake.mistake_words() == ["a write before or beyond an allocation"]


def test_what_a_context_leaves_behind_is_a_mistake(fake: FakeCuda) -> None:
    gpu = Gpu(fake)
    gpu.allocate(NBYTES)
    gpu.pinned(16)
    page = np.zeros(NBYTES, np.uint8)
    gpu.call("cuMemHostRegister_v2", address_of(page), NBYTES, 3)
    gpu.stream()
    gpu.event()
    gpu.function("fake_copy")
    gpu.close()
    assert sorted(fake.mistake_words()) == [
        "context released with 1 events",
        "context released with 1 modules",
        "context released with 1 streams",
        "context released with 16 B of pinned memory",
        "context released with 4096 B of device memory",
        "context released with 4096 B of registered memory",
    ]


def test_allocations_end_at_the_devices_memory(gpu: Gpu) -> None:
    gpu.fake.set(Setting.MEMORY_BYTES, 3 * NBYTES)
    place = gpu.allocate(2 * NBYTES)
    with fails(2):
        gpu.allocate(NBYTES + 1)
    gpu.call("cuMemFree_v2", place)
    gpu.allocate(3 * NBYTES)


def test_an_address_tells_what_it_is(gpu: Gpu) -> None:
    place, host, owned = gpu.allocate(NBYTES), gpu.pinned(NBYTES), np.zeros(NBYTES, np.uint8)
    gpu.fake.driver().fake_own(ctypes.c_size_t(address_of(owned)), ctypes.c_size_t(NBYTES), 1)
    assert gpu.attribute(2, place + 5) == DEVICE
    assert gpu.attribute(11, place + 5) == place
    assert gpu.attribute(12, place + 5) == NBYTES
    assert gpu.attribute(2, address_of(host)) == HOST
    assert gpu.attribute(3, address_of(host) + 5) == address_of(host) + 5
    assert (gpu.attribute(2, address_of(owned)), gpu.attribute(9, address_of(owned))) == (DEVICE, 1)
    assert gpu.attribute(8, address_of(owned)) == 0
    gpu.fake.driver().fake_manage(ctypes.c_size_t(address_of(owned)), ctypes.c_size_t(NBYTES), 0)
    assert gpu.attribute(8, address_of(owned)) == 1
    with fails(1):
        gpu.attribute(2, address_of(np.zeros(8, np.uint8)))
    with fails(1):
        gpu.attribute(2, place + NBYTES)


# Host memory -------------------------------------------------------------------------------------


def test_memory_that_is_registered_already_is_refused(gpu: Gpu) -> None:
    pages = np.zeros(4 * NBYTES, np.uint8)
    gpu.call("cuMemHostRegister_v2", address_of(pages), 2 * NBYTES, 3)
    for offset, nbytes in ((0, NBYTES), (NBYTES, 2 * NBYTES), (2 * NBYTES - 1, 1)):
        with fails(712):
            gpu.call("cuMemHostRegister_v2", address_of(pages) + offset, nbytes, 3)
    gpu.call("cuMemHostRegister_v2", address_of(pages) + 2 * NBYTES, NBYTES, 3)


def test_what_may_be_page_locked_has_a_bound(gpu: Gpu) -> None:
    gpu.fake.set(Setting.PINNED_BYTES, 2 * NBYTES)
    pages = np.zeros(2 * NBYTES, np.uint8)
    gpu.pinned(1)
    with fails(2):
        gpu.call("cuMemHostRegister_v2", address_of(pages), 2 * NBYTES, 3)
    gpu.call("cuMemHostRegister_v2", address_of(pages), NBYTES, 3)
    with fails(2):
        gpu.pinned(NBYTES)
    gpu.call("cuMemHostUnregister", address_of(pages))


def test_memory_that_is_unregistered_while_work_uses_it_is_a_mistake(gpu: Gpu) -> None:
    stream, place, pages = gpu.stream(), gpu.allocate(NBYTES), np.zeros(NBYTES, np.uint8)
    gpu.call("cuMemHostRegister_v2", address_of(pages), NBYTES, 3)
    with gpu.fake.held():
        gpu.copy(place, address_of(pages), NBYTES, stream)
        gpu.call("cuMemHostUnregister", address_of(pages))
    gpu.synchronize(stream)
    with fails(713):
        gpu.call("cuMemHostUnregister", address_of(pages))
    assert gpu.fake.mistake_words() == [
        "cuMemHostUnregister of memory that enqueued work uses",
        "cuMemHostUnregister of what is not registered",
    ]


@pytest.mark.parametrize("flags", [mmap.MAP_SHARED, mmap.MAP_PRIVATE])
def test_registered_memory_can_be_elsewhere_for_devices(gpu: Gpu, flags: int) -> None:
    gpu.fake.set(Setting.IS_ALIASING, 1)
    pages = np.frombuffer(mmap.mmap(-1, 3 * NBYTES, flags | mmap.MAP_ANONYMOUS), np.uint8)
    pages[:] = np.arange(len(pages)) % 251
    before = pages.copy()
    host, stream = address_of(pages) + 100, gpu.stream()
    gpu.call("cuMemHostRegister_v2", host, 2 * NBYTES, 3)
    place = gpu.made("cuMemHostGetDevicePointer_v2", host + 8, 0)
    assert abs(place - host) > 2 * NBYTES
    assert gpu.attribute(4, place) == host + 8
    assert gpu.attribute(3, host + 8) == place
    # Twelve bytes at the device's address are those at the host's.
    gpu.launch(gpu.function("fake_copy"), struct.pack("QQQ", place, place + 4096, 12), stream)
    gpu.synchronize(stream)
    before[108:120] = before[4204:4216]
    assert (pages == before).all()
    gpu.call("cuMemHostUnregister", host)
    assert (pages == before).all()


def test_a_copy_of_pageable_memory_is_counted_and_over_when_the_call_is(gpu: Gpu) -> None:
    stream, place, pages = gpu.stream(), gpu.allocate(NBYTES), np.full(NBYTES, 5, np.uint8)
    gpu.copy(place, address_of(pages), NBYTES, stream)
    assert ctypes.string_at(place, NBYTES) == b"\5" * NBYTES
    assert gpu.fake.counters().pageable_copies == 1


# Copies ------------------------------------------------------------------------------------------


def test_a_copy_across_the_end_of_memory_is_refused(gpu: Gpu) -> None:
    stream, place, host = gpu.stream(), gpu.allocate(NBYTES), gpu.pinned(NBYTES)
    for target, source in (
        (place + 1, address_of(host)),
        (place, address_of(host) + 1),
        (place - 8, address_of(host)),
    ):
        with fails(1):
            gpu.copy(target, source, NBYTES, stream)
    assert (
        gpu.batch([(place, address_of(host), 8), (place, address_of(host) + 1, NBYTES)], stream)
        == 1
    )


def test_copies_need_a_stream_of_the_current_context(fake: FakeCuda, gpu: Gpu) -> None:
    place, host, theirs = gpu.allocate(NBYTES), gpu.pinned(NBYTES), 0
    other = Gpu(fake, 1)
    theirs = other.stream()
    with fails(400):
        other.copy(place, address_of(host), NBYTES, gpu.stream() + 1000)
    other.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_uint64()))
    with fails(400):
        gpu.copy(place, address_of(host), NBYTES, theirs)
    other.call("cuCtxPushCurrent_v2", other.context)
    other.call("cuStreamDestroy_v2", theirs)
    other.copy(place, address_of(host), NBYTES, 0)
    other.synchronize(0)
    assert fake.mistake_words() == ["a copy of another device's memory"]
    other.call("cuStreamCreate", ctypes.byref(ctypes.c_uint64()), 1)
    other.close()
    fake.mistake_words()


def test_without_a_context_calls_are_refused(fake: FakeCuda) -> None:
    gpu = Gpu(fake)
    gpu.close()
    with fails(201):
        gpu.allocate(NBYTES)
    with fails(201):
        gpu.call("cuCtxPushCurrent_v2", gpu.context)


def test_a_batch_moves_all_its_copies(gpu: Gpu) -> None:
    stream, place, host = gpu.stream(), gpu.allocate(NBYTES), gpu.pinned(NBYTES)
    host[:] = np.random.default_rng(1).integers(0, 256, NBYTES, np.uint8)
    copies = [
        (place + (NBYTES - 64 - at), address_of(host) + at, 64) for at in range(0, NBYTES, 64)
    ]
    assert gpu.batch(copies, stream) == -1
    gpu.synchronize(stream)
    want = host.reshape(-1, 64)[::-1].tobytes()
    assert ctypes.string_at(place, NBYTES) == want
    counters = gpu.fake.counters()
    assert (counters.batches, counters.batch_copies) == (1, len(copies))


def test_a_batch_whose_sources_are_read_in_any_order_may_read_them_too_early(gpu: Gpu) -> None:
    stream, place, host = gpu.stream(), gpu.allocate(NBYTES), gpu.pinned(NBYTES)

    def is_right(order: int) -> bool:
        host[:] = 0
        gpu.call("cuMemsetD8Async", place, 1, NBYTES, stream)
        gpu.synchronize(stream)
        gpu.call("cuMemsetD8Async", place, 2, NBYTES, stream)
        gpu.batch([(address_of(host), place, NBYTES)], stream, order)
        gpu.synchronize(stream)
        return bool((host == 2).all())

    assert all(is_right(STREAM) for _ in range(8))
    assert not all(is_right(ANY) for _ in range(20))
    with fails(1):
        gpu.batch([(address_of(host), place, NBYTES)], stream, 0)
    with fails(1):
        gpu.batch([(address_of(host), place, NBYTES)], 0)


def test_a_driver_before_12_8_has_no_batches(gpu: Gpu) -> None:
    gpu.fake.set(Setting.DRIVER_VERSION, 12020)
    with fails(1):
        gpu.batch_function(12080)
    gpu.fake.set(Setting.DRIVER_VERSION, 13000)
    assert gpu.batch_function(12080) != 0
    assert gpu.batch_function(13000) == 0
    assert len(gpu.fake.mistake_words()) == 1


# Kernels -----------------------------------------------------------------------------------------


def test_arguments_are_taken_at_the_launch(gpu: Gpu) -> None:
    stream, place, host = gpu.stream(), gpu.allocate(NBYTES), gpu.pinned(NBYTES)
    host[:] = 9
    arguments = ctypes.create_string_buffer(struct.pack("QQQ", place, address_of(host), NBYTES), 24)
    with gpu.fake.held():
        gpu.launch(gpu.function("fake_copy"), arguments, stream)
        ctypes.memset(arguments, 0, 24)
    gpu.synchronize(stream)
    assert ctypes.string_at(place, NBYTES) == b"\t" * NBYTES
    assert gpu.fake.counters().launches == 1


def test_a_launch_beyond_the_limits_is_refused(gpu: Gpu) -> None:
    stream, function, nothing = gpu.stream(), gpu.function("fake_copy"), bytes(24)
    for limits in ({"grid": 0}, {"block": 0}, {"block": 1025}, {"shared_bytes": (48 << 10) + 1}):
        with fails(1):
            gpu.launch(function, nothing, stream, **limits)
    with fails(701):  # the kernel's own bound
        gpu.launch(function, nothing, stream, block=513)
    gpu.call("cuFuncSetAttribute", function, 8, 100 << 10)
    gpu.launch(function, nothing, stream, shared_bytes=100 << 10)
    with fails(1):
        gpu.call("cuFuncSetAttribute", function, 8, (227 << 10) + 1)
    gpu.synchronize(stream)


def test_images_are_for_a_compute_capability(gpu: Gpu) -> None:
    def image(capability: int, machine: int = 190, abi: int = 7) -> bytes:
        head = b"\177ELF\2\1\1\x33" + bytes([abi]) + bytes(7) + struct.pack("HH", 2, machine)
        flags = capability if abi < 8 else capability << 8
        return head.ljust(48, b"\1") + struct.pack("I", flags) + bytes(12)

    gpu.made("cuModuleLoadData", image(90))
    gpu.made("cuModuleLoadData", image(90, abi=8))
    gpu.fake.set(Setting.CAPABILITY, 86)
    gpu.made("cuModuleLoadData", image(80))
    for other in (90, 89, 100):
        with fails(209):
            gpu.made("cuModuleLoadData", image(other))
    with fails(200):
        gpu.made("cuModuleLoadData", image(86, machine=62))
    with fails(200):
        gpu.made("cuModuleLoadData", b"//\n.version 8.0")
    with fails(500):
        gpu.function("no_such_kernel")


def test_a_module_that_is_unloaded_with_kernels_enqueued_is_a_mistake(gpu: Gpu) -> None:
    stream, module = gpu.stream(), gpu.made("cuModuleLoadData", b"kvtier-sim")
    function = gpu.function("fake_copy", module)
    with gpu.fake.held():
        gpu.launch(function, bytes(24), stream)
        gpu.call("cuModuleUnload", module)
    gpu.synchronize(stream)
    assert gpu.fake.mistake_words() == ["cuModuleUnload with kernels of it enqueued"]


def test_a_kernel_of_ours_runs_on_the_device_s_memory(gpu: Gpu) -> None:
    """Two pages of 64 bytes, gathered from one plane in the other order."""
    stream, plane, block = gpu.stream(), gpu.allocate(256), gpu.allocate(128)
    tables = gpu.pinned(64)
    host = gpu.pinned(256)
    host[:] = np.arange(256)
    table = address_of(tables)
    tables[:40] = np.frombuffer(struct.pack("QqQqQ", plane, 128, block, 0, block + 64), np.uint8)
    gpu.copy(plane, address_of(host), 256, stream)
    one, four = (1, 0, 0), fast_div(4)
    arguments = struct.pack(
        "QQ5qII12I", table, table + 8, 64, 64, 64, 64, 64, 8, 64, *four, *one, *one, *one
    )
    gpu.launch(gpu.function("kvtier_gather_v16"), arguments, stream, grid=2, block=512)
    gpu.synchronize(stream)
    want = host[128:192].tobytes() + host[:64].tobytes()
    assert ctypes.string_at(block, 128) == want
    assert gpu.fake.calls(Call.LAUNCH) >= 1


def fast_div(divisor: int) -> tuple[int, int, int]:
    """As csrc/cuda/types.h makes it."""
    log2_up = (divisor - 1).bit_length()
    return divisor, -(-(1 << (31 + log2_up)) // divisor) & 0xFFFFFFFF, log2_up - 1


def test_kernels_are_only_where_the_gpu_has_what_they_need(gpu: Gpu) -> None:
    gpu.function("fake_fail")
    gpu.fake.set(Setting.CAPABILITY, 75)
    gpu.function("fake_copy")
    with fails(500):
        gpu.function("fake_fail")


# Failures ----------------------------------------------------------------------------------------


def test_a_call_fails_as_told_and_the_next_does_not(gpu: Gpu) -> None:
    gpu.fake.fail(Call.MEMORY_ALLOCATE, 2, skip=1)
    gpu.allocate(8)
    with fails(2):
        gpu.allocate(8)
    gpu.allocate(8)


def test_after_a_lasting_error_all_fails_with_it_and_work_is_dropped(gpu: Gpu) -> None:
    stream, place, host = gpu.stream(), gpu.allocate(NBYTES), gpu.pinned(NBYTES)
    with gpu.fake.held():
        gpu.call("cuMemsetD8Async", place, 1, NBYTES, stream)
        gpu.fake.wait_held()
        gpu.call("cuMemsetD8Async", place, 2, NBYTES, stream)
        gpu.fake.fail(Call.COPY, 700)
        with fails(700):
            gpu.copy(place, address_of(host), NBYTES, stream)
    for call in (
        lambda: gpu.synchronize(stream),
        lambda: gpu.call("cuStreamQuery", stream),
        lambda: gpu.allocate(8),
        lambda: gpu.call("cuMemFree_v2", place),
    ):
        with fails(700):
            call()
    gpu.fake.reset()
    assert gpu.fake.held_now().streams == 0
    gpu.stream()


@pytest.mark.parametrize(("call", "code"), [(Call.KERNEL_RUN, 716), (Call.COPY_RUN, 700)])
def test_work_that_fails_is_told_by_later_calls(gpu: Gpu, call: Call, code: int) -> None:
    stream, place = gpu.stream(), gpu.allocate(NBYTES)
    gpu.fake.fail(call, code)
    gpu.call("cuMemsetD8Async", place, 1, NBYTES, stream)
    gpu.launch(gpu.function("fake_copy"), bytes(24), stream)
    with fails(code):
        gpu.synchronize(stream)
    with fails(code):
        gpu.event()


def test_a_kernel_that_fails_loses_the_context(gpu: Gpu) -> None:
    stream = gpu.stream()
    gpu.launch(gpu.function("fake_fail"), bytes(24), stream)
    with fails(719):
        gpu.synchronize(stream)
    assert gpu.fake.mistake_words() == ["fake_fail: it fails"]


def test_another_device_is_not_lost_with_the_first(fake: FakeCuda, gpu: Gpu) -> None:
    fake.fail(Call.MEMORY_ALLOCATE, 719)
    with fails(719):
        gpu.allocate(8)
    other = Gpu(fake, 1)
    other.call("cuMemFree_v2", other.allocate(8))
    other.close()


def test_there_may_be_no_device(fake: FakeCuda) -> None:
    fake.set(Setting.DEVICE_COUNT, 0)
    with fails(100):
        Gpu(fake)


# Sanitizers --------------------------------------------------------------------------------------

OVERRUN = """
import struct, sys
from pathlib import Path
from fake_cuda import FakeCuda
from gpu_calls import Gpu
gpu = Gpu(FakeCuda(Path(sys.argv[1])))
stream, place, other = gpu.stream(), gpu.allocate(100), gpu.allocate(200)
gpu.launch(gpu.function("fake_copy"), struct.pack("QQQ", place, other, 100 + int(sys.argv[2])), stream)
gpu.synchronize(stream)
print("survived")
"""


def test_with_the_address_sanitizer_a_write_beyond_memory_ends_the_process() -> None:
    compiler = os.environ.get("CXX", "c++")
    found = subprocess.run(
        [compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not Path(found).is_absolute():
        pytest.skip("there is no address sanitizer")
    library = fake_cuda.build(fake_cuda.SANITIZE, with_kernels=False)

    def run(beyond: int) -> subprocess.CompletedProcess[str]:
        environment = {
            **os.environ,
            "LD_PRELOAD": found,
            "ASAN_OPTIONS": "detect_leaks=0",
            "PYTHONPATH": str(Path(fake_cuda.__file__).parent),
        }
        command = [sys.executable, "-c", OVERRUN, str(library), str(beyond)]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=60, check=False
        )

    assert run(0).stdout == "survived\n"
    assert "heap-buffer-overflow" in run(1).stderr
