"""A store under way, as its caller sees it: what is filled, what may be reused, and how it ended.

Pages in host memory are copied by `finish`, on the caller's thread. Pages on a device are copied by
the device, each wave as soon as its layers are filled, in the order of the engine's stream.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvtier.device import Batch, DeviceMove
from kvtier.device_moves import DEVICE_WAIT_S, wait_for
from kvtier.planner import ChunkMove, batch_of
from kvtier.policy import ChunkNumbers
from kvtier.space import Space
from kvtier.types import ChunkKey, Descriptor

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class StoreResult:
    """What became of the tokens of one `store`, in tokens and bytes."""

    stored_tokens: int
    held_tokens: int
    """Of chunks that were held already."""
    dropped_tokens: int
    """Of chunks for which there was no room, or whose prefix is not held."""
    nbytes: int


class Publisher(Protocol):
    """Who sees a store through: `kvtier.storing.Storer`."""

    def finish(self, store: Store) -> None:
        """All pages are filled."""

    def give_up(self, store: Store) -> None:
        """Nothing of it is wanted."""


class Store:
    """A store under way; made by `KVTier.start_store`.

    `filled`, `finish` and `cancel` belong to the engine's thread, the rest to any.
    """

    def __init__(
        self,
        space: Space,
        moves: list[ChunkMove],
        records: list[Descriptor | None],
        nothing: StoreResult,
        leased: ChunkNumbers,
        publisher: Publisher,
        on_end: Callable[[Store], None],
    ) -> None:
        self.space = space
        self.moves = moves
        self.records = records
        """Room for each chunk of `moves`; None for one that is held already."""
        self.coming: list[ChunkKey] = [
            move.head.key for move, record in zip(moves, records, strict=True) if record is not None
        ]
        """Chunks that were not held and have room."""
        self.leased = leased
        self._nothing = nothing
        self._result: StoreResult | None = None
        self._publisher = publisher
        self._on_end = on_end
        self._ended = threading.Event()
        self._finished = False
        self._batch: Batch | None = None
        self._layers_left: list[set[int]] = []
        self._begun: list[DeviceMove] = []
        self._failure: OSError | None = None

    # For callers --------------------------------------------------------------------------------

    def filled(self, layer: int) -> None:
        """The KV of `layer` is computed once the engine's stream has done what is on it now.

        A device begins to copy a wave when all its layers are; host memory is copied by `finish`.
        Layers that share their KV may say so twice.
        """
        if self._finished or not self._is_on_device():
            return
        self._plan()
        wave = self.space.wave_of_layer[layer]
        self._layers_left[wave].discard(layer)
        while len(self._begun) < len(self._layers_left) and not self._layers_left[len(self._begun)]:
            if not self._gather(len(self._begun), len(self._begun) + 1):
                return

    def finish(self) -> None:
        """All layers are filled: copy what has not been copied, and publish it.

        Afterwards the pages may be reused: of host memory at once, on a device by what the engine
        puts on its stream from now on. Again, it does nothing.

        Raises:
            ValueError: the engine's stream is not one of its device; nothing is stored.
        """
        if self._finished:
            return
        self._finished = True
        try:
            if self._is_on_device():
                self._plan()
                if len(self._begun) < len(self._layers_left):
                    self._gather(len(self._begun), len(self._layers_left))
                self._free_pages()
        except BaseException:  # the caller's mistake, such as a stream of another device
            self._publisher.give_up(self)
            raise
        self._publisher.finish(self)

    def cancel(self) -> None:
        """Store nothing; when this returns no page is read any more. After `finish`, too late."""
        if not self._finished:
            self._finished = True
            self._publisher.give_up(self)

    def done(self) -> bool:
        """Whether it has ended."""
        return self._ended.is_set()

    def wait(self, timeout_s: float = 2 * DEVICE_WAIT_S) -> StoreResult:
        """The result, when it is there; that nothing was stored if it is not by `timeout_s`."""
        self._ended.wait(timeout_s)
        return self.result()

    def result(self) -> StoreResult:
        """What was stored; nothing as long as it has not ended."""
        return self._result or self._nothing

    # For the storer -----------------------------------------------------------------------------

    def stored(self, tokens: int, nbytes: int) -> None:
        """So much is published."""
        missing = self._nothing.dropped_tokens
        self._result = StoreResult(tokens, self._nothing.held_tokens, missing - tokens, nbytes)

    def cut(self, count: int) -> list[Descriptor]:
        """Leave only the first `count` chunks; the room of the others, which is the caller's now."""
        rest = [record for record in self.records[count:] if record is not None]
        del self.moves[count:], self.records[count:]
        return rest

    def wait_moves(self) -> None:
        """Return when no device copies for it any more; OSError if not all has been copied."""
        failure = self._failure
        for move in self._begun:
            try:
                wait_for(move)
            except OSError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def end(self) -> None:
        """Whoever waits learns the result."""
        try:
            self._on_end(self)
        finally:
            self._ended.set()

    # Parts --------------------------------------------------------------------------------------

    def _is_on_device(self) -> bool:
        return self.space.copies is not None and bool(self.moves)

    def _plan(self) -> None:
        if self._batch is not None:
            return
        fresh = [
            (move, record)
            for move, record in zip(self.moves, self.records, strict=True)
            if record is not None
        ]
        self._batch = batch_of(self.space, [m for m, _ in fresh], [r for _, r in fresh])
        self._layers_left = [set() for _ in self._batch.waves]
        for layer, wave in enumerate(self.space.wave_of_layer):
            self._layers_left[wave].add(layer)

    def _gather(self, first: int, stop: int) -> bool:
        assert self._batch is not None, "_plan came before"
        assert self.space.copies is not None, "asked for pages on a device only"
        if self._failure is not None:
            return False
        try:
            batch = self._batch.part(first, stop)
            self._begun.append(self.space.copies.gather(batch, self.space.stream()))
        except OSError as error:
            self._failure = error
            return False
        return True

    def _free_pages(self) -> None:
        stream = self.space.stream()
        try:
            for move in self._begun:
                move.order_after(stream)
        except OSError as error:
            self._failure = self._failure or error
