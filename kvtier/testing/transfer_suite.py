"""Conformance of a transfer backend: subclass `TransferSuite`, give `make` and `remote`.

    class TestMyTransfers(TransferSuite):
        def make(self, completions: Completions, root: Path) -> MyTransfers:
            return MyTransfers(completions)

        def remote(self, nbytes: int, root: Path) -> Place:
            return dram(nbytes)

The regions of a test lie under one `root`, a folder of the test's own. Where a region is not
memory of this process, `read_remote` and `write_remote` say how a test gets at its bytes.
"""

from __future__ import annotations

import abc
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier._core import Completions
from kvtier.testing.transfer_scene import (
    GIVEN_UP,
    WAIT_S,
    Drawn,
    Field,
    Place,
    Reader,
    Scene,
    bytes_at,
    dram,
)
from kvtier.transfer import Op, Route, TransferBackend, Unsuitable
from kvtier.types import Region, RegionKind

_SOON_S = 10.0  # what "soon" and "at once" must mean even on a busy machine
_PREPARE_S_MAX = 2.0  # of 4096 pieces; a vectorised one takes a thousandth of it
_THREAD_COUNT = 4
_LEAKED_MAX = 16  # threads or fds that may come with use, of pools that fill as they are needed


class TransferSuite(abc.ABC):
    """Every `kvtier.transfer.TransferBackend` passes these, once for each route that it serves."""

    ops: ClassVar[tuple[Op, ...]] = (Op.READ, Op.WRITE)
    """What the route can do."""
    is_peer: ClassVar[bool] = False
    """The remote regions are another agent's: a second backend that `make_peer` gives."""
    writes_whole_regions: ClassVar[bool] = False
    """The pieces of a write cover each remote region that they touch, as an object store needs."""
    region_count: ClassVar[int] = 3
    """Regions of each side, three or more."""
    slot_bytes: ClassVar[int] = 16 << 10
    """Longest piece of the tests with many; a multiple of the alignment."""
    slots: ClassVar[int] = 12
    """Such pieces in a region."""
    big_bytes: ClassVar[int] = 8 << 20
    """Of the regions for large pieces, of which there are two on each side."""
    model_examples: ClassVar[int] = 25
    """Random transfers that are compared with arrays."""

    @abc.abstractmethod
    def make(self, completions: Completions, root: Path) -> TransferBackend:
        """A new backend that tells its ends to `completions`."""

    @abc.abstractmethod
    def remote(self, nbytes: int, root: Path) -> Place:
        """A new region of the remote kind, of `nbytes` zeros."""

    def local(self, nbytes: int) -> Place:
        """A new region of the local kind, of `nbytes` zeros."""
        return dram(nbytes)

    def read_remote(self, place: Place, offset: int, nbytes: int) -> bytes:
        """Bytes of a remote region, past the backend."""
        return bytes_at(place.region)[offset : offset + nbytes].tobytes()

    def write_remote(self, place: Place, offset: int, data: bytes) -> None:
        """Change bytes of a remote region, past the backend."""
        bytes_at(place.region)[offset : offset + len(data)] = np.frombuffer(data, np.uint8)

    def read_local(self, place: Place, offset: int, nbytes: int) -> bytes:
        """Bytes of a local region, past the backend."""
        return bytes_at(place.region)[offset : offset + nbytes].tobytes()

    def write_local(self, place: Place, offset: int, data: bytes) -> None:
        """Change bytes of a local region, past the backend."""
        bytes_at(place.region)[offset : offset + len(data)] = np.frombuffer(data, np.uint8)

    def make_peer(self, completions: Completions, root: Path) -> TransferBackend:
        """The backend on the other side of a peer route."""
        return self.make(completions, root)

    def host_pid(self) -> int | None:
        """The peer's process as `connect` is told of it."""
        return os.getpid()

    def unsuitable(self, backend: TransferBackend, root: Path) -> Sequence[Place]:
        """Regions that the backend must refuse; more of its own are welcome."""
        routes = backend.reach.routes
        kinds = {route.local for route in routes} | {route.remote for route in routes}
        memory = dram(4096)
        return [
            Place(Region(kind, memory.region.address, 4096), memory.source)
            for kind in RegionKind
            if kind not in kinds
        ]

    # ---- what the tests stand on

    @contextlib.contextmanager
    def scene(self, root: Path, region_count: int = 0, nbytes: int = 0) -> Iterator[Scene]:
        """A backend with registered regions of both sides; closed at the end."""
        region_count = region_count or self.region_count
        nbytes = nbytes or self.slots * self.slot_bytes
        completions = Completions()
        local = Field(
            [self.local(nbytes) for _ in range(region_count)],
            Reader(self.read_local, self.write_local),
        )
        remote = Field(
            [self.remote(nbytes, root) for _ in range(region_count)],
            Reader(self.read_remote, self.write_remote),
        )
        scene = Scene(
            self.make(completions, root),
            completions,
            local,
            remote,
            slot_bytes=min(self.slot_bytes, nbytes),
            writes_whole_regions=self.writes_whole_regions,
            peer=self.make_peer(Completions(), root) if self.is_peer else None,
            host_pid=self.host_pid(),
        )
        try:
            yield scene
        finally:
            scene.close()

    @pytest.fixture
    def stage(self, tmp_path: Path) -> Iterator[Scene]:
        """A scene of the usual size."""
        with self.scene(tmp_path) as scene:
            yield scene

    @pytest.fixture
    def big(self, tmp_path: Path) -> Iterator[Scene]:
        """A scene of two large regions on each side, one piece each."""
        with self.scene(tmp_path, 2, self.big_bytes) as scene:
            scene.slot_bytes = min(
                self.big_bytes, scene.backend.reach.piece_bytes_max // scene.unit * scene.unit
            )
            yield scene

    # ---- bytes

    def test_the_route_is_one_that_the_backend_claims(self, stage: Scene) -> None:
        kinds = stage.local.places[0].region.kind, stage.remote.places[0].region.kind
        assert Route(*kinds, peer=self.is_peer) in stage.backend.reach.routes
        assert stage.backend.reach == stage.backend.reach
        assert stage.backend.name

    def test_shuffled_pieces_of_many_regions_arrive(self, stage: Scene) -> None:
        for seed, op in enumerate(self.ops):
            stage.refill(seed)
            end = stage.move(stage.draw(op, seed))
            assert (end.is_quiet, end.detail) == (True, "")

    def test_adjacent_pieces_arrive(self, stage: Scene) -> None:
        for seed, op in enumerate(self.ops):
            stage.refill(seed)
            stage.move(stage.adjacent(op))

    def test_one_smallest_piece_arrives_and_its_neighbours_stay(self, stage: Scene) -> None:
        unit = stage.unit
        last = stage.local.places[-1].region.nbytes - unit
        for op in self.ops:
            if self.writes_whole_regions and op is Op.WRITE:
                continue
            for local_at, remote_at in ((0, 0), (last, unit), (unit, last)):
                stage.move(Drawn(op, [1], [local_at], [0], [remote_at], [unit]))

    def test_large_pieces_arrive(self, big: Scene) -> None:
        for seed, op in enumerate(self.ops):
            big.refill(seed)
            big.move(big.whole(op, seed))

    def test_one_source_may_fill_many_targets(self, stage: Scene) -> None:
        """Pieces may share bytes on the side that is only read."""
        for op in self.ops:
            drawn = stage.whole(op, 1)
            first = [0] * len(drawn)
            if op is Op.READ:
                stage.move(replace(drawn, remote_which=first, remote_offsets=first))
            else:
                stage.move(replace(drawn, local_which=first, local_offsets=first))

    def test_a_prepared_transfer_can_be_started_again(self, stage: Scene) -> None:
        for op in self.ops:
            drawn = stage.draw(op, 5)
            prepared = stage.prepare(drawn)
            for seed in range(3):
                stage.refill(seed)
                end = stage.ends.wait_quiet(stage.start(prepared))
                assert end.results.tolist() == drawn.lengths
                stage.check([(drawn, end)])

    def test_two_at_once_do_not_disturb_each_other(self, stage: Scene) -> None:
        for first, second in ((a, b) for a in self.ops for b in self.ops):
            drawn = [stage.draw(first, 1, regions=[0]), stage.draw(second, 2, regions=[1, 2])]
            tickets = [stage.start(prepared) for prepared in map(stage.prepare, drawn)]
            ends = [stage.ends.wait_quiet(ticket) for ticket in tickets]
            assert [end.results.tolist() for end in ends] == [each.lengths for each in drawn]
            stage.check(zip(drawn, ends, strict=True))

    def test_threads_may_start_at_the_same_time(self, stage: Scene) -> None:
        op = self.ops[0]
        drawn = [stage.draw(op, seed, regions=[seed % 3]) for seed in range(3)]
        with ThreadPoolExecutor(_THREAD_COUNT) as threads:
            prepared = list(threads.map(stage.prepare, drawn))
            tickets = range(1001, 1001 + len(prepared))
            started = [
                threads.submit(stage.backend.start, each, ticket, WAIT_S)
                for each, ticket in zip(prepared, tickets, strict=True)
            ]
            for done in started:
                done.result(_SOON_S)
        ends = [stage.ends.wait_quiet(ticket) for ticket in tickets]
        stage.check(zip(drawn, ends, strict=True))
        assert [end.results.tolist() for end in ends] == [each.lengths for each in drawn]

    def test_agrees_with_arrays(self, stage: Scene) -> None:
        """Any pieces give what assignments between numpy arrays give."""

        @settings(max_examples=self.model_examples, deadline=None)
        @given(
            op=st.sampled_from(self.ops),
            seed=st.integers(0, 1 << 30),
            count=st.integers(1, self.slots * self.region_count),
            regions=st.sets(st.integers(0, self.region_count - 1), min_size=1),
        )
        def agrees(op: Op, seed: int, count: int, regions: set[int]) -> None:
            stage.refill(seed)
            stage.move(stage.draw(op, seed, count, sorted(regions)))

        agrees()

    # ---- ends

    def test_a_deadline_in_the_past_ends_it_untouched(self, stage: Scene) -> None:
        for op in self.ops:
            drawn = stage.whole(op, 3)
            prepared = stage.prepare(drawn)
            for deadline_s in (0.0, -1.0):
                ticket = stage.start(prepared, deadline_s)
                end = stage.ends.wait(ticket, _SOON_S)
                assert set(end.results.tolist()) <= set(GIVEN_UP)
                assert len(end.results) == len(drawn)
                stage.ends.wait_quiet(ticket)
                stage.check()
        stage.move(stage.draw(self.ops[0], 4))

    def test_a_cancelled_transfer_ends_soon(self, big: Scene) -> None:
        for seed, op in enumerate(self.ops):
            big.refill(seed)
            drawn = big.whole(op, seed)
            ticket = big.start(big.prepare(drawn))
            big.backend.cancel(ticket)
            end = big.ends.wait(ticket, _SOON_S)
            assert set(end.results.tolist()) <= {*drawn.lengths, *GIVEN_UP}
            big.check([(drawn, big.ends.wait_quiet(ticket))])
            big.backend.cancel(ticket)  # it is over: nothing happens
            big.move(drawn)

    def test_cancelling_many_ends_each_once(self, big: Scene) -> None:
        drawn = [big.whole(op, 1, [0]) for op in (self.ops[0],) * 8]
        tickets = [big.start(prepared) for prepared in map(big.prepare, drawn)]
        for ticket in reversed(tickets):
            big.backend.cancel(ticket)
        ends = [big.ends.wait(ticket, _SOON_S) for ticket in tickets]
        for ticket in tickets:
            big.ends.wait_quiet(ticket)
        big.check(zip(drawn, ends, strict=True))

    def test_unknown_tickets_are_over(self, stage: Scene) -> None:
        stage.backend.cancel(12345)
        stage.move(stage.draw(self.ops[0], 1))
        assert not stage.ends.has_ended(12345)

    # ---- regions

    def test_what_it_cannot_serve_is_refused_with_a_reason(
        self, stage: Scene, tmp_path: Path
    ) -> None:
        refused = self.unsuitable(stage.backend, tmp_path)
        assert refused
        for place in refused:
            with pytest.raises(Unsuitable, match=r"\w"):
                stage.backend.register(*place)

    def test_a_region_can_be_registered_twice_and_again(self, stage: Scene) -> None:
        place = stage.local.places[0]
        first, second = (stage.backend.register(*place) for _ in range(2))
        stage.backend.deregister(first)
        before = stage.local.handles[0]
        stage.local.handles[0] = second
        stage.move(stage.draw(self.ops[0], 1))
        stage.backend.deregister(second)
        stage.local.handles[0] = before
        stage.move(stage.draw(self.ops[0], 2))

    def test_foreign_addresses_and_exports_are_refused_or_borne(self, stage: Scene) -> None:
        """Whatever bytes come: a link or a handle, or Unsuitable with a reason."""
        if not self.is_peer:
            with pytest.raises(Unsuitable, match=r"\w"):
                stage.backend.connect(b"anything", None)
            with pytest.raises(Unsuitable, match=r"\w"):
                stage.backend.import_region(None, stage.remote.places[0].region, b"anything")
            return
        backend, region = stage.backend, stage.remote.places[0].region

        @settings(max_examples=50, deadline=None)
        @given(foreign=st.binary(max_size=200))
        def borne(foreign: bytes) -> None:
            _refused_or_borne(
                lambda address: backend.disconnect(backend.connect(address, self.host_pid())),
                foreign,
            )
            _refused_or_borne(
                lambda part: backend.deregister(backend.import_region(stage.link, region, part)),
                foreign,
            )

        borne()
        exported = stage.exported(0)
        for cut in {0, 1, len(exported) // 2, len(exported) - 1}:
            _refused_or_borne(
                lambda part: backend.deregister(backend.import_region(stage.link, region, part)),
                exported[:cut],
            )
        with pytest.raises(Unsuitable, match=r"\w"):
            backend.import_region(stage.link, region, b"")
        stage.move(stage.draw(self.ops[0], 1))

    def test_many_pieces_are_prepared_quickly(self, tmp_path: Path) -> None:
        with self.scene(tmp_path, 2, 2048 * self._unit(tmp_path)) as scene:
            scene.slot_bytes = scene.unit
            for op in self.ops:
                pieces = scene.pieces(scene.whole(op, 1))
                assert len(pieces.lengths) == 4096
                begin_s = time.monotonic()
                scene.backend.prepare(pieces, scene.link)
                assert time.monotonic() - begin_s < _PREPARE_S_MAX

    def _unit(self, root: Path) -> int:
        backend = self.make(Completions(), root)
        try:
            return backend.reach.alignment
        finally:
            backend.close()

    # ---- life

    def test_closing_ends_what_is_in_flight(self, tmp_path: Path) -> None:
        with self.scene(tmp_path, 2, self.big_bytes) as scene:
            drawn = [scene.whole(self.ops[0], seed, [seed % 2]) for seed in range(2)]
            tickets = [scene.start(prepared) for prepared in map(scene.prepare, drawn)]
            scene.backend.close()
            ends = [scene.ends.wait(ticket, _SOON_S) for ticket in tickets]
            for ticket in tickets:
                scene.ends.wait_quiet(ticket)
            scene.check(zip(drawn, ends, strict=True))

    def test_a_start_after_close_ends_with_an_error(self, stage: Scene) -> None:
        drawn = stage.whole(self.ops[0], 1)
        prepared = stage.prepare(drawn)
        stage.backend.close()
        stage.backend.close()
        end = stage.ends.wait_quiet(stage.start(prepared), _SOON_S)
        assert (end.results < 0).all()
        assert len(end.results) == len(drawn)
        stage.check()

    def test_a_hundred_starts_leave_nothing_behind(self, stage: Scene) -> None:
        drawn = stage.draw(self.ops[0], 1, 4)
        prepared = stage.prepare(drawn)
        stage.ends.wait_quiet(stage.start(prepared))
        before = _held()
        for turn in range(100):
            if turn % 10 == 0:
                prepared = stage.prepare(drawn)
            stage.ends.wait_quiet(stage.start(prepared))
        assert _held() <= before + _LEAKED_MAX
        stage.check([(drawn, stage.ends.wait_quiet(1))])

    def test_a_closed_backend_holds_no_threads_or_files(self, tmp_path: Path) -> None:
        def use() -> None:
            with self.scene(tmp_path) as scene:
                scene.move(scene.draw(self.ops[0], 1, 4))

        use()
        before = _held()
        for _ in range(_LEAKED_MAX + 1):
            use()
        _until(lambda: _held() <= before + _LEAKED_MAX)


def _refused_or_borne(call: Callable[[bytes], object], foreign: bytes) -> None:
    with contextlib.suppress(Unsuitable):
        call(foreign)


def _held() -> int:
    """Threads, native ones too, and open files of this process."""
    return len(os.listdir("/proc/self/task")) + len(os.listdir("/proc/self/fd"))


def _until(is_so: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + _SOON_S
    while not is_so():  # the kernel takes a thread from the list a moment after it was joined
        assert time.monotonic() < ends_s
        threading.Event().wait(0.01)
