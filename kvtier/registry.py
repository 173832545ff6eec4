"""Find implementations of the contracts by name through entry points, built-in or not."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any

from kvtier.backend import Backend
from kvtier.config import convert
from kvtier.device import DeviceFactory
from kvtier.errors import ConfigError
from kvtier.policy import Policy
from kvtier.transfer import TransferBackendFactory


def open_backend(name: str, options: Mapping[str, Any], path: str) -> Backend:
    """Build the backend registered as `name`; `path` is where its options stand, for errors.

    Raises:
        ConfigError: nothing is registered under that name, or an option is wrong.
        BackendUnavailable: the place cannot be opened.
    """
    kind = _load("kvtier.backends", name, path)
    if not issubclass(kind, Backend):
        raise ConfigError(f"{path}: {name!r} is not a kvtier Backend")
    backend: Backend = kind(convert(options, kind.Options, path))
    return backend


def open_policy(name: str, path: str) -> Policy:
    """Build the policy registered as `name`.

    Raises:
        ConfigError: nothing is registered under that name.
    """
    kind = _load("kvtier.policies", name, path)
    if not issubclass(kind, Policy):
        raise ConfigError(f"{path}: {name!r} is not a kvtier Policy")
    policy: Policy = kind()
    return policy


def find_device(name: str) -> DeviceFactory:
    """What opens the devices registered as `name`; the factory says if it works here.

    Raises:
        ConfigError: nothing is registered under that name.
    """
    factory: DeviceFactory = _load("kvtier.devices", name, "place")
    return factory


def transfer_backends(wanted: Sequence[str] | None = None) -> dict[str, TransferBackendFactory]:
    """The installed transfer backends by name, or the `wanted` ones; each says if it works here.

    Raises:
        ConfigError: a wanted one is not installed, or two packages claim one name.
    """
    names = wanted or sorted({entry.name for entry in entry_points(group="kvtier.transfers")})
    return {name: _load("kvtier.transfers", name, "transfers") for name in names}


def _load(group: str, name: str, path: str) -> Any:
    found = tuple(entry_points(group=group, name=name))
    if not found:
        known = sorted({e.name for e in entry_points(group=group)})
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{path}: no {group[7:-1]} named {name!r}{hint} (installed: {known})")
    if len({e.value for e in found}) > 1:
        raise ConfigError(f"{path}: {name!r} is claimed by {', '.join(e.value for e in found)}")
    kind: Any = found[0].load()
    return kind
