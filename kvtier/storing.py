"""The way in: chunks that are not held are gathered, published in memory and queued for below."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.hierarchy import Hierarchy, numbers
from kvtier.index import NONE
from kvtier.keys import Extra, Tokens
from kvtier.loading import Loader
from kvtier.manifest import NO_PARENT
from kvtier.planner import ChunkMove, chunk_pages
from kvtier.policy import ChunkNumbers
from kvtier.space import Space
from kvtier.types import ChunkKey, Descriptor
from kvtier.writeback import Pending, WriteBack

STORE_PART_BYTES = 64 * 1024**2  # gathered in 5 ms: so little does the first write wait


@dataclass(frozen=True, slots=True)
class StoreResult:
    """What became of the tokens of one `store`, in tokens and bytes."""

    stored_tokens: int
    held_tokens: int
    """Of chunks that were held already."""
    dropped_tokens: int
    """Of chunks for which there was no room, or whose prefix is not held."""
    nbytes: int


class Storer:
    """Stores runs of chunks; any thread, as `KVTier.store`. All `below` get what is stored."""

    def __init__(self, hierarchy: Hierarchy, loader: Loader, below: Sequence[WriteBack]) -> None:
        self._hierarchy = hierarchy
        self._loader = loader
        self._below = below

    def store_missing(
        self,
        space: Space,
        tokens: Tokens,
        keys: list[ChunkKey],
        sizes: list[int],
        held: list[bool],
        found: list[int],
        page_ids: npt.NDArray[np.int64],
        first_token: int,
        extras: Sequence[Extra],
    ) -> StoreResult:
        """Reserve, gather and publish every chunk from the first one that is not held on."""
        first = held.index(False) if False in held else len(held)
        held_tokens = sum(size for size, is_held in zip(sizes, held, strict=True) if is_held)
        missing_tokens = sum(sizes) - held_tokens
        start = first * space.chunk_tokens
        if first == len(keys) or start < first_token:
            return StoreResult(0, held_tokens, missing_tokens, 0)
        moves: list[ChunkMove] = []
        records: list[Descriptor | None] = []
        for i in range(first, len(keys)):
            parent = keys[i - 1] if i else NO_PARENT
            head = space.head(keys[i], parent, sizes[i])
            pages = chunk_pages(space, page_ids, first_token, i * space.chunk_tokens, sizes[i])
            record = None if held[i] else self._hierarchy.reserve(head.record_bytes)
            if record is None and not held[i]:
                break  # what follows could not be reached without this one
            moves.append(ChunkMove(0, head, space.shape(head.pages), pages))
            records.append(record)
        if not moves:
            return StoreResult(0, held_tokens, missing_tokens, 0)
        before = found[first - 1] if first else NONE
        return self._fill_and_commit(space, moves, records, before, held_tokens, missing_tokens)

    def _fill_and_commit(
        self,
        space: Space,
        moves: list[ChunkMove],
        records: list[Descriptor | None],
        parent: int,
        held_tokens: int,
        missing_tokens: int,
    ) -> StoreResult:
        """Gather and publish a run, part by part: the way down begins while the rest is gathered."""
        stored_tokens, nbytes, at = 0, 0, 0
        done: list[ChunkNumbers] = []  # leased, so that what continues them finds them
        try:
            for count in _part_counts(moves):
                part = slice(at, at + count)
                fresh = [
                    (move, record)
                    for move, record in zip(moves[part], records[part], strict=True)
                    if record is not None
                ]
                nbytes += self._loader.gather(space, [m for m, _ in fresh], [r for _, r in fresh])
                chunks = self._hierarchy.commit(
                    space.id, parent, [move.head for move in moves[part]], records[part]
                )
                at += count
                with self._hierarchy.index.lock:
                    self._hierarchy.index.table.lease(chunks)
                done.append(chunks)
                parent = int(chunks[-1])
                self._after_commit(space, moves[part], records[part], chunks)
                stored_tokens += sum(move.head.tokens for move, _ in fresh)
        finally:
            self._hierarchy.cancel([record for record in records[at:] if record is not None])
            with self._hierarchy.index.lock:
                self._hierarchy.index.table.release(
                    numbers(chunk for run in done for chunk in run.tolist())
                )
        return StoreResult(stored_tokens, held_tokens, missing_tokens - stored_tokens, nbytes)

    def _after_commit(
        self,
        space: Space,
        moves: Sequence[ChunkMove],
        records: Sequence[Descriptor | None],
        chunks: ChunkNumbers,
    ) -> None:
        """Queue the way down, with a lease for each; those that `commit` took end here."""
        items = [
            Pending(chunk, move.head, move.shape, record)
            for chunk, move, record in zip(chunks.tolist(), moves, records, strict=True)
            if record is not None and self._hierarchy.memory.locate([move.head.key])[0] == record
        ]
        table, lock = self._hierarchy.index.table, self._hierarchy.index.lock
        for writer in self._below:
            with lock:
                table.lease(numbers(item.number for item in items))
            refused = writer.offer(items)
            with lock:
                table.release(numbers(item.number for item in refused))
        with lock:
            table.release(chunks)


def _part_counts(moves: Sequence[ChunkMove]) -> list[int]:
    """How many chunks each part has: enough for `STORE_PART_BYTES`, the last one what is left."""
    counts: list[int] = []
    room = 0
    for move in moves:
        if room <= 0:
            counts.append(0)
            room = STORE_PART_BYTES
        counts[-1] += 1
        room -= move.shape.record_bytes
    return counts
