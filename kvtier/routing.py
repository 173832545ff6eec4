"""Which backend moves a transfer: those that can, ranked by what such transfers have cost so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.descriptors import Cut, Ends, cut, is_aligned
from kvtier.errors import BackendUnavailable
from kvtier.peers import Held, Peer
from kvtier.transfer import Op, Pieces, Route, Side, TransferBackend, Unsuitable

_NEWEST_WEIGHT = 0.25  # of the last transfer in the moving average of its like


@dataclass(frozen=True, slots=True)
class Choice:
    """A backend, what it made of the pieces, and why it was taken."""

    backend: str
    reason: str
    prepared: Any
    cut: Cut
    descriptor_lengths: npt.NDArray[np.uint64]
    like: tuple[object, ...]
    """What transfers it is compared with when its cost is learned."""


class Router:
    """Ranks backends; learns from every transfer that went well. Under no lock: values only."""

    def __init__(self, backends: Mapping[str, TransferBackend]) -> None:
        self._backends = backends
        self._seconds_per_byte: dict[tuple[object, ...], float] = {}

    def choose(
        self,
        op: Op,
        local: Ends,
        remote: Ends,
        ours: list[Held],
        theirs: list[Held],
        peer: Peer | None,
        wanted: str,
    ) -> Choice:
        """The backend expected to be quickest, with the transfer prepared.

        Raises:
            ValueError: the sides do not fit each other.
            BackendUnavailable: none can; says each one's reason.
        """
        if wanted and wanted not in self._backends:
            raise BackendUnavailable(f"there is no transfer backend {wanted!r} here")
        routes = {
            Route(a.kind, b.kind, peer is not None) for a in local.regions for b in remote.regions
        }
        nbytes = int(local.lengths.sum())
        refused: dict[str, str] = {}
        ranked: list[tuple[float, str, str, Cut, tuple[object, ...]]] = []
        for name, backend in self._backends.items():
            if wanted and name != wanted:
                continue
            if missing := routes - backend.reach.routes:
                refused[name] = f"does not move {', '.join(sorted(map(str, missing)))}"
                continue
            pieces = cut(local, remote, backend.reach.piece_bytes_max)
            if not is_aligned(pieces, backend.reach.alignment):
                refused[name] = f"needs multiples of {backend.reach.alignment} bytes"
                continue
            like: tuple[object, ...] = (
                name,
                op,
                frozenset(routes),
                nbytes.bit_length(),
                len(pieces.lengths) > 64,
            )
            expected_s, how = self._expect(like, backend, nbytes)
            ranked.append((expected_s, name, how, pieces, like))
        ranked.sort(key=lambda entry: entry[0])
        for expected_s, name, how, pieces, like in ranked:
            try:
                prepared = self._prepare(name, op, pieces, ours, theirs, peer)
            except Unsuitable as unsuitable:
                refused[name] = str(unsuitable)
                continue
            others = [
                f"{other}: {seconds * 1e3:.3g} ms expected ({why})"
                for seconds, other, why, _, _ in ranked
                if other != name and other not in refused
            ]
            reason = "; ".join(
                [
                    f"{name}: {expected_s * 1e3:.3g} ms expected ({how})",
                    *others,
                    *(f"{other}: {why}" for other, why in refused.items()),
                ]
            )
            return Choice(name, reason, prepared, pieces, local.lengths, like)
        cut(local, remote, 1 << 40)  # sides that do not fit are the caller's mistake, said first
        told = "; ".join(f"{name}: {why}" for name, why in refused.items())
        raise BackendUnavailable(f"nothing moves these bytes here: {told or 'no backend works'}")

    def view(self, peer: Peer, held: Held) -> memoryview:
        """A peer's region where some backend has it mapped here.

        Raises:
            BackendUnavailable: none has; says each one's reason.
        """
        refused: dict[str, str] = {}
        for name, backend in self._backends.items():
            try:
                return backend.view(
                    _imported(name, backend, _link(name, backend, peer), held, peer)
                )
            except Unsuitable as unsuitable:
                refused[name] = str(unsuitable)
        told = "; ".join(f"{name}: {why}" for name, why in refused.items())
        raise BackendUnavailable(f"{peer.name}'s region {held.region.number} is not mapped: {told}")

    def learn(self, choice: Choice, seconds: float, *, ok: bool) -> None:
        """Take the cost of a transfer into account."""
        nbytes = int(choice.descriptor_lengths.sum())
        if not ok or not nbytes:
            return
        newest = seconds / nbytes
        known = self._seconds_per_byte.get(choice.like, newest)
        self._seconds_per_byte[choice.like] = known + _NEWEST_WEIGHT * (newest - known)

    def _expect(
        self, like: tuple[object, ...], backend: TransferBackend, nbytes: int
    ) -> tuple[float, str]:
        measured = self._seconds_per_byte.get(like)
        if measured is not None:
            return nbytes * measured, f"measured {1e-9 / max(measured, 1e-18):.3g} GB/s"
        reach = backend.reach
        return reach.latency_s + nbytes / reach.bytes_per_s, "not measured yet"

    def _prepare(
        self,
        name: str,
        op: Op,
        pieces: Cut,
        ours: list[Held],
        theirs: list[Held],
        peer: Peer | None,
    ) -> Any:
        backend = self._backends[name]
        link = None if peer is None else _link(name, backend, peer)
        local = Side(
            tuple(_handle(name, held) for held in ours), pieces.local_which, pieces.local_offsets
        )
        remote = Side(
            tuple(
                _handle(name, held) if peer is None else _imported(name, backend, link, held, peer)
                for held in theirs
            ),
            pieces.remote_which,
            pieces.remote_offsets,
        )
        return backend.prepare(Pieces(op, local, remote, pieces.lengths), link)


def _handle(name: str, held: Held) -> Any:
    if name not in held.handles:
        why = held.refused.get(name, "not registered with it")
        raise Unsuitable(f"region {held.region.number}: {why}")
    return held.handles[name]


def _link(name: str, backend: TransferBackend, peer: Peer) -> Any:
    with peer.importing:
        if (link := peer.links.get(name)) is not None:
            return link
        if peer.lost:
            raise Unsuitable(f"{peer.name} is lost: {peer.lost}")
        if name not in peer.addresses:
            raise Unsuitable(f"{peer.name} does not have it")
        link = peer.links[name] = backend.connect(peer.addresses[name], peer.host_pid)
        if peer.lost:  # meanwhile: whoever cut its links may not have seen this one
            if peer.links.pop(name, None) is not None:
                backend.disconnect(link)
            raise Unsuitable(f"{peer.name} is lost: {peer.lost}")
        return link


def _imported(name: str, backend: TransferBackend, link: Any, held: Held, peer: Peer) -> Any:
    if name not in held.exports:
        raise Unsuitable(f"the peer does not offer region {held.region.number} by it")
    with peer.importing:
        if (handle := held.handles.get(name)) is not None:
            return handle
        handle = backend.import_region(link, held.region, held.exports[name])
        held.handles[name] = handle
        if held.leaving:  # meanwhile: whoever gave it up may not have seen this handle
            if held.handles.pop(name, None) is not None:
                backend.deregister(handle)
            raise Unsuitable(f"region {held.region.number} was withdrawn")
        return handle
