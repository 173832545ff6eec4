"""A device made of threads: streams that work late, so that whoever does not wait for one sees it.

`ToyDevice` is the smallest `kvtier.device.Device`. Its memory is host memory, its streams are
threads that do one thing after the other, each after a short random time; nothing else orders them.
For tests of what stands on the contract; give it to `KVTier.open(devices={"toy": ...})`.
"""

from __future__ import annotations

import errno
import itertools
import queue
import random
import threading
from collections.abc import Callable
from functools import partial

from kvtier._core import CopyPlan, CopyPool
from kvtier.device import Batch, Device, DeviceCopies, DeviceMove, Paging
from kvtier.errors import BackendUnavailable
from kvtier.types import Region

DELAY_MAX_S = 0.002


class ToyStreams:
    """Streams by number, as an engine and a device share them."""

    def __init__(self, seed: int = 0) -> None:
        self._chance = random.Random(seed)
        self._numbers = itertools.count(1)
        self._queues: dict[int, queue.SimpleQueue[Callable[[], object] | None]] = {}
        self._threads: list[threading.Thread] = []

    def create(self) -> int:
        """A new stream."""
        number = next(self._numbers)
        self._queues[number] = queue.SimpleQueue()
        thread = threading.Thread(
            target=self._run, args=(self._queues[number], self._chance.random()), daemon=True
        )
        self._threads.append(thread)
        thread.start()
        return number

    def add(self, stream: int, work: Callable[[], object]) -> None:
        """Have `work` done after everything that is on the stream now."""
        self._queues[stream].put(work)

    def record(self, stream: int) -> threading.Event:
        """An event that is set when the stream has done what is on it now."""
        event = threading.Event()
        self.add(stream, event.set)
        return event

    def synchronize(self, stream: int) -> None:
        """Return when the stream has done what is on it now."""
        self.record(stream).wait()

    def close(self) -> None:
        """Do what is waiting, then end."""
        for waiting in self._queues.values():
            waiting.put(None)
        for thread in self._threads:
            thread.join()

    @staticmethod
    def _run(waiting: queue.SimpleQueue[Callable[[], object] | None], seed: float) -> None:
        chance, pause = random.Random(seed), threading.Event()
        while (work := waiting.get()) is not None:
            pause.wait(chance.random() * DELAY_MAX_S)
            work()


class ToyMove(DeviceMove):
    """Waves of copies on a stream of the device's."""

    def __init__(self, device: ToyDevice, nbytes: int, waves: list[threading.Event]) -> None:
        self._device = device
        self._nbytes = nbytes
        self._waves = waves

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def order_after(self, stream: int, wave: int = -1) -> None:
        self._device.check()
        self._device.streams.add(stream, self._waves[wave].wait)

    def is_done(self, wave: int = -1) -> bool:
        self._device.check()
        return self._waves[wave].is_set()

    def wait(self, timeout_s: float) -> bool:
        ended = self._waves[-1].wait(timeout_s)
        self._device.check()
        return ended


class ToyDevice(Device):
    """Copies on two streams of its own, one for each direction."""

    def __init__(self, streams: ToyStreams) -> None:
        self.streams = streams
        self.pool = CopyPool(1)
        self.out, self.into = streams.create(), streams.create()
        self.registered: list[Region] = []
        self.closed = False
        self._failure = ""

    @property
    def failure(self) -> str:
        return self._failure

    def fail(self, words: str) -> None:
        """From now on it is as a device after an error that does not go away."""
        self._failure = words

    def check(self) -> None:
        """Raise OSError if it has failed."""
        if self._failure:
            raise OSError(errno.EIO, self._failure)

    def register(self, memory: Region) -> None:
        if self._failure:
            raise BackendUnavailable(self._failure)
        self.registered.append(memory)

    def copies(self, paging: Paging) -> ToyCopies:
        return ToyCopies(self, paging)

    def close(self) -> None:
        for stream in (self.out, self.into):
            self.streams.synchronize(stream)
        self.closed = True


class ToyCopies(DeviceCopies):
    """One engine's pages on a `ToyDevice`."""

    def __init__(self, device: ToyDevice, paging: Paging) -> None:
        self._device = device
        self._paging = paging
        self._plan = CopyPlan(
            paging.plane_addresses,
            paging.page_count,
            paging.page_stride,
            paging.rows,
            paging.row_stride,
            paging.cols,
            paging.col_stride,
            paging.run_bytes,
        )

    def gather(self, batch: Batch, stream: int) -> ToyMove:
        return self._begin(self._plan.gather, batch, stream, self._device.out)

    def scatter(self, batch: Batch, stream: int) -> ToyMove:
        return self._begin(self._plan.scatter, batch, stream, self._device.into)

    def _begin(self, copy: Callable[..., int], batch: Batch, stream: int, own: int) -> ToyMove:
        device = self._device
        device.check()
        self._check(batch)
        device.streams.add(own, device.streams.record(stream).wait)
        waves = []
        for segments, (first, count) in zip(batch.segments, batch.waves, strict=True):
            work = partial(
                copy, device.pool, batch.page_ids, batch.page_offsets, segments, first, count
            )
            device.streams.add(own, partial(self._run, work))
            waves.append(device.streams.record(own))
        pages = int((batch.page_ids >= 0).sum())
        planes = sum(count for _, count in batch.waves)
        return ToyMove(device, pages * planes * self._plan.plane_bytes, waves)

    def _run(self, work: Callable[[], int]) -> None:
        if not self._device.failure:
            work()

    def _check(self, batch: Batch) -> None:
        """A copy to memory that the device was not told of would be a fault of its."""
        for address in batch.segments.reshape(-1).tolist():
            if not any(
                memory.address <= address < memory.address + memory.nbytes
                for memory in self._device.registered
            ):
                raise ValueError(f"a segment at {address:#x} lies in no registered memory")
