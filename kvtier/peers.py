"""What an agent knows of its regions' use and of other agents; all under the agent's lock."""

from __future__ import annotations

import enum
import threading
from dataclasses import dataclass, field
from typing import Any

from kvtier.channel import Connection
from kvtier.metadata import Message, Metadata, RegionEntry
from kvtier.types import Region


class NotificationKind(enum.Enum):
    """What a notification says."""

    MESSAGE = "message"
    """The peer's transfer is done and its bytes are in place, or it just sent the payload."""
    FAILED = "failed"
    """The peer's transfer that should have brought the payload failed; `detail` says why."""
    LOST = "lost"
    """The peer is gone: nothing more will come from it."""


@dataclass(frozen=True, slots=True)
class Notification:
    """Something that a peer said, or its end."""

    peer: str
    payload: bytes
    kind: NotificationKind = NotificationKind.MESSAGE
    detail: str = ""


@dataclass(slots=True, eq=False)
class Held:
    """A region and who uses it."""

    region: Region
    keep: Any = None
    """What keeps its memory alive."""
    writable: bool = True
    handles: dict[str, Any] = field(default_factory=dict)
    """By backend."""
    refused: dict[str, str] = field(default_factory=dict)
    """By backend: why it does not serve the region."""
    uses: int = 0
    """Transfers that may touch it now."""
    leaving: bool = False
    """Nothing new begins on it."""
    exports: dict[str, bytes] = field(default_factory=dict)
    """Of a peer's region: what each backend needs to reach it."""


class Peer:
    """Another agent, as of its last metadata. Made by `Agent.connect`; any thread."""

    def __init__(self, metadata: Metadata, host_pid: int | None) -> None:
        self.name = metadata.name
        self.agent = metadata.agent
        self.token = metadata.token
        self.host_pid = host_pid
        """Its process id if it runs on this host."""
        self.generation = metadata.generation
        self.addresses = dict(metadata.backends)
        self.connection: Connection | None = None
        self.connected = False
        self.lost = ""
        """Why it is lost; empty while it is not."""
        self.links: dict[str, Any] = {}
        self.importing = threading.Lock()
        """Held while links and handles are made, which may take longer than the agent's lock may."""
        self._held = {entry.number: _held(entry) for entry in metadata.regions}

    @property
    def alive(self) -> bool:
        """Whether it is connected or still may be."""
        return not self.lost

    @property
    def gone(self) -> bool:
        """Whether its agent or process has ended: one that only cannot be reached may still write."""
        return self.connection is not None and self.connection.gone

    @property
    def regions(self) -> tuple[Region, ...]:
        """Its regions that can be used."""
        return tuple(held.region for held in self._held.values() if not held.leaving)

    def region(self, number: int) -> Region:
        """One of its regions by number.

        Raises:
            ValueError: it has none of that number.
        """
        return self.held(number).region

    # For the agent -------------------------------------------------------------------------------

    def update(self, metadata: Metadata) -> None:
        """Take newer metadata of the same agent."""
        if metadata.generation < self.generation:
            raise ValueError(
                f"metadata of {self.name} of generation {metadata.generation}, "
                f"known is {self.generation}"
            )
        self.generation = metadata.generation
        standing = {entry.number for entry in metadata.regions}
        for number, held in self._held.items():
            held.leaving = held.leaving or number not in standing
        for entry in metadata.regions:
            if entry.number not in self._held:
                self._held[entry.number] = _held(entry)

    def welcome(self, standing: set[int]) -> None:
        """It is connected, and of its regions only these still stand."""
        self.connected = True
        for number, held in self._held.items():
            if number not in standing:
                held.leaving = True

    def lose(self, reason: str) -> dict[str, Any]:
        """It is gone; gives the links to cut."""
        self.lost = self.lost or reason or "lost"
        self.connected = False
        for held in self._held.values():
            held.leaving = True
        links, self.links = self.links, {}
        return links

    def unused(self) -> list[Held]:
        """Regions that nothing of ours touches."""
        return [held for held in self._held.values() if not held.uses]

    def region_table(self) -> dict[int, Region]:
        """Its usable regions by number."""
        return {n: held.region for n, held in list(self._held.items()) if not held.leaving}

    def held(self, region: Region | int) -> Held:
        """The books of one of its regions."""
        number = region if isinstance(region, int) else region.number
        held = self._held.get(number)
        if held is None or held.leaving:
            raise ValueError(f"{self.name} has no region {number}, or has withdrawn it")
        return held

    def leave(self, number: int) -> Held | None:
        """It wants the region back: nothing more begins on it."""
        held = self._held.get(number)
        if held is not None:
            held.leaving = True
        return held

    def forget(self, held: Held) -> None:
        """Nothing of ours touches the region any more."""
        self._held.pop(held.region.number, None)

    def owns(self, held: Held) -> bool:
        """Whether the region is one of its own."""
        return self._held.get(held.region.number) is held

    def say(self, message: Message) -> bool:
        """Send a message; False if it cannot be."""
        return self.connection is not None and not self.lost and self.connection.send(message)


def _held(entry: RegionEntry) -> Held:
    region = Region(entry.kind, entry.address, entry.nbytes, entry.device, entry.number)
    return Held(region, exports=dict(entry.exports))
