"""What tests of transfer backends stand on: regions with a model of their bytes, and an ear.

`Ends` hears what a `Completions` tells and checks that each transfer ends once. `Scene` registers
regions of both sides, draws pieces between them, and after a transfer compares every byte of every
region with what it ought to be.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier._core import Completions
from kvtier.transfer import Op, Pieces, Results, Side, TransferBackend
from kvtier.types import Region, RegionKind

WAIT_S = 60.0  # bound of every wait; far beyond what anything here takes
GIVEN_UP = (-errno.ECANCELED, -errno.ETIMEDOUT)

Bytes = npt.NDArray[np.uint8]


class Place(NamedTuple):
    """One region and what it was made of, as `TransferBackend.register` takes them."""

    region: Region
    source: Any


def dram(nbytes: int) -> Place:
    """Zeroed memory of this process, at a page's start, kept alive by its `source`."""
    memory = memoryview(mmap.mmap(-1, nbytes))
    return Place(Region(RegionKind.DRAM, address_of(memory), nbytes), memory)


def address_of(memory: memoryview) -> int:
    """Address of the first byte."""
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def bytes_at(region: Region) -> Bytes:
    """The bytes of a region in this process's memory, themselves, not a copy."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * region.nbytes).from_address(region.address))


@dataclass(frozen=True, slots=True)
class End:
    """What a backend said at the end of one transfer."""

    ticket: int
    results: Results
    started: int
    is_quiet: bool
    detail: str


class Ends:
    """Collects what comes out of a `Completions`; raises AssertionError when one ends twice."""

    def __init__(self, completions: Completions) -> None:
        self._completions = completions
        self._ends: dict[int, End] = {}
        self._quiet: set[int] = set()

    def wait(self, ticket: int, timeout_s: float = WAIT_S) -> End:
        """The end of the transfer, as soon as it is there."""
        self._listen(lambda: ticket in self._ends, timeout_s, f"no end of {ticket}")
        return self._ends[ticket]

    def wait_quiet(self, ticket: int, timeout_s: float = WAIT_S) -> End:
        """Its end, as soon as nothing touches its memory any more."""
        self._listen(lambda: ticket in self._quiet, timeout_s, f"{ticket} is not quiet")
        return self._ends[ticket]

    def has_ended(self, ticket: int) -> bool:
        """Whether the end has been told by now."""
        self._drain()
        return ticket in self._ends

    def is_quiet(self, ticket: int) -> bool:
        """Whether it has been told by now that nothing touches its memory any more."""
        self._drain()
        return ticket in self._quiet

    def _listen(self, is_there: Callable[[], bool], timeout_s: float, failure: str) -> None:
        ends_s = time.monotonic() + timeout_s
        while True:
            seen = self._completions.generation
            self._drain()
            if is_there():
                return
            left_s = ends_s - time.monotonic()
            assert left_s > 0, f"{failure} after {timeout_s:g} s"
            self._completions.wait(seen, left_s)

    def _drain(self) -> None:
        ended, quiet = self._completions.drain()
        for ticket, results, started, is_quiet, detail in ended:
            assert ticket not in self._ends, f"{ticket} ended twice"
            self._ends[ticket] = End(ticket, results, started, is_quiet, detail)
            if is_quiet:
                self._quiet.add(ticket)
        for ticket in quiet:
            assert ticket in self._ends, f"{ticket} became quiet before it ended"
            assert ticket not in self._quiet, f"{ticket} became quiet twice"
            self._quiet.add(ticket)


class Reader(NamedTuple):
    """How a test looks at the bytes of one side's regions, past the backend."""

    read: Callable[[Place, int, int], bytes]
    write: Callable[[Place, int, bytes], None]


class Field:
    """The regions of one side, and what each ought to hold."""

    def __init__(self, places: Sequence[Place], reader: Reader) -> None:
        self.places = places
        self.handles: list[Any] = []
        self.model = [np.zeros(place.region.nbytes, np.uint8) for place in places]
        self._reader = reader

    def fill(self, seed: int) -> None:
        """Give every region new bytes, no two the same."""
        for position, place in enumerate(self.places):
            chance = np.random.default_rng([seed, position])
            self.model[position] = chance.integers(0, 256, place.region.nbytes, np.uint8)
            self._reader.write(place, 0, self.model[position].tobytes())

    def look(self, position: int) -> Bytes:
        """What one region holds now."""
        place = self.places[position]
        return np.frombuffer(self._reader.read(place, 0, place.region.nbytes), np.uint8)


@dataclass(frozen=True, slots=True)
class Drawn:
    """Pieces as numbers; `Scene.pieces` makes them what a backend takes."""

    op: Op
    local_which: list[int]
    local_offsets: list[int]
    remote_which: list[int]
    remote_offsets: list[int]
    lengths: list[int]

    def __len__(self) -> int:
        return len(self.lengths)


class Scene:
    """A backend with regions of both sides, registered, filled and known to the last byte.

    With `peer` the remote regions are that backend's, exported by it and imported here. Regions
    are cut in slots of `slot_bytes`, of which no two pieces of a draw share one on the target side.
    """

    def __init__(
        self,
        backend: TransferBackend,
        completions: Completions,
        local: Field,
        remote: Field,
        *,
        slot_bytes: int,
        writes_whole_regions: bool = False,
        peer: TransferBackend | None = None,
        host_pid: int | None = None,
    ) -> None:
        self.backend = backend
        self.ends = Ends(completions)
        self.local = local
        self.remote = remote
        self.unit = backend.reach.alignment
        self.link: Any = None
        self.slot_bytes = slot_bytes
        self._whole = writes_whole_regions
        self._peer = peer
        self._peer_handles: list[Any] = []
        self._tickets = 0
        assert slot_bytes % self.unit == 0, f"slots of {slot_bytes} B, pieces of {self.unit} B"
        local.handles = [backend.register(*place) for place in local.places]
        if peer is None:
            remote.handles = [backend.register(*place) for place in remote.places]
        else:
            self._peer_handles = [peer.register(*place) for place in remote.places]
            self.link = backend.connect(peer.address(), host_pid)
            remote.handles = [
                backend.import_region(self.link, place.region, peer.export(handle))
                for place, handle in zip(remote.places, self._peer_handles, strict=True)
            ]
        self.refill(0)

    def exported(self, position: int) -> bytes:
        """What the peer says of one of its regions."""
        assert self._peer is not None
        return self._peer.export(self._peer_handles[position])

    def refill(self, seed: int) -> None:
        """New bytes everywhere."""
        self.local.fill(2 * seed)
        self.remote.fill(2 * seed + 1)

    def close(self) -> None:
        """Deregister everything, then close; only when all transfers are quiet.

        A test may have closed the backend before: deregistering then does no harm.
        """
        for handle in (*self.remote.handles, *self.local.handles):
            self.backend.deregister(handle)
        if self._peer is not None:
            self.backend.disconnect(self.link)
        self.backend.close()
        if self._peer is not None:
            for handle in self._peer_handles:
                self._peer.deregister(handle)
            self._peer.close()

    # Pieces --------------------------------------------------------------------------------------

    def draw(
        self, op: Op, seed: int, count: int = 1 << 30, regions: Sequence[int] | None = None
    ) -> Drawn:
        """At most `count` pieces in any order, of any length, within the slots of `regions`.

        If writes must cover whole regions they do, one piece to a slot.
        """
        chance = random.Random(seed)
        slots = self._slots(regions)
        count = min(count, len(slots))
        if self._whole and op is Op.WRITE:
            return self.whole(op, seed, regions)
        pairs = zip(chance.sample(slots, count), chance.sample(slots, count), strict=True)
        units = self.slot_bytes // self.unit
        drawn = Drawn(op, [], [], [], [], [])
        for (local, local_at), (remote, remote_at) in pairs:
            length = chance.choice((1, chance.randint(1, units), units))
            shifts = [chance.randint(0, units - length) * self.unit for _ in range(2)]
            drawn.local_which.append(local)
            drawn.local_offsets.append(local_at + shifts[0])
            drawn.remote_which.append(remote)
            drawn.remote_offsets.append(remote_at + shifts[1])
            drawn.lengths.append(length * self.unit)
        return drawn

    def whole(self, op: Op, seed: int, regions: Sequence[int] | None = None) -> Drawn:
        """Pieces of one slot that cover the regions of both sides, in any order."""
        chance = random.Random(seed)
        slots = self._slots(regions)
        return self._of_slots(
            op, chance.sample(slots, len(slots)), chance.sample(slots, len(slots))
        )

    def adjacent(self, op: Op, regions: Sequence[int] | None = None) -> Drawn:
        """Pieces of one slot, one after the other on both sides."""
        slots = self._slots(regions)
        return self._of_slots(op, slots, slots)

    def _slots(self, regions: Sequence[int] | None) -> list[tuple[int, int]]:
        numbers = range(len(self.remote.places)) if regions is None else regions
        return [
            (number, at)
            for number in numbers
            for at in range(0, self.remote.places[number].region.nbytes, self.slot_bytes)
        ]

    def _of_slots(
        self, op: Op, local: Sequence[tuple[int, int]], remote: Sequence[tuple[int, int]]
    ) -> Drawn:
        return Drawn(
            op,
            [which for which, _ in local],
            [at for _, at in local],
            [which for which, _ in remote],
            [at for _, at in remote],
            [self.slot_bytes] * len(local),
        )

    def pieces(self, drawn: Drawn) -> Pieces:
        """What `TransferBackend.prepare` takes."""
        return Pieces(
            drawn.op,
            _side(self.local, drawn.local_which, drawn.local_offsets),
            _side(self.remote, drawn.remote_which, drawn.remote_offsets),
            np.array(drawn.lengths, np.uint64),
        )

    # Transfers -----------------------------------------------------------------------------------

    def prepare(self, drawn: Drawn) -> Any:
        """The backend's own form of the pieces."""
        return self.backend.prepare(self.pieces(drawn), self.link)

    def start(self, prepared: Any, deadline_s: float = WAIT_S) -> int:
        """Start it under a new ticket, which is returned."""
        self._tickets += 1
        self.backend.start(prepared, self._tickets, deadline_s)
        return self._tickets

    def move(self, drawn: Drawn) -> End:
        """Prepare, start and wait; every piece must be OK and every byte in its place."""
        end = self.ends.wait_quiet(self.start(self.prepare(drawn)))
        assert end.results.tolist() == drawn.lengths, end.detail
        self.check([(drawn, end)])
        return end

    def check(self, moved: Iterable[tuple[Drawn, End]] = ()) -> None:
        """Compare every byte of both sides with the models, after these transfers have ended.

        An OK piece must have arrived; a failed one may have written any part of itself, unless the
        end says that it was not begun.
        """
        for drawn, end in moved:
            self._expect(drawn, end)
        for side, field in (("local", self.local), ("remote", self.remote)):
            for position, model in enumerate(field.model):
                wrong = np.flatnonzero(field.look(position) != model)
                assert not wrong.size, (
                    f"{wrong.size} bytes of {side} region {position} are wrong, "
                    f"from {wrong[0]} to {wrong[-1]}"
                )

    def _expect(self, drawn: Drawn, end: End) -> None:
        assert len(end.results) == len(drawn), "one result for each piece"
        assert 0 <= end.started <= len(drawn)
        local = (self.local, drawn.local_which, drawn.local_offsets)
        remote = (self.remote, drawn.remote_which, drawn.remote_offsets)
        source, target = (remote, local) if drawn.op is Op.READ else (local, remote)
        seen: dict[int, Bytes] = {}
        for i, (length, result) in enumerate(zip(drawn.lengths, end.results.tolist(), strict=True)):
            assert result == length or result < 0, f"piece {i} of {length} B: {result}"
            which, at = target[1][i], target[2][i]
            part = _part(target[0], which, at, length)
            if result == length:
                part[:] = _part(source[0], source[1][i], source[2][i], length)
            elif i < end.started:
                if which not in seen:
                    seen[which] = target[0].look(which)
                part[:] = seen[which][at : at + length]


def _part(field: Field, which: int, at: int, length: int) -> Bytes:
    """One piece of a field's model, itself."""
    return field.model[which][at : at + length]


def _side(field: Field, which: list[int], offsets: list[int]) -> Side:
    return Side(tuple(field.handles), np.array(which, np.uint32), np.array(offsets, np.uint64))
