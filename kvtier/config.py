"""One frozen tree of settings, its defaults, and how TOML, a mapping and the environment fill it.

Order: defaults, then the file or mapping, then `KVTIER__`-variables, whose double underscores are
the path: ``KVTIER__TIERS__1__CAPACITY="200 GiB"``. Unknown names are errors that say what is near.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import msgspec

from kvtier.errors import ConfigError

_UNITS = {"": 1, "b": 1}
for _i, _letter in enumerate("kmgtp", start=1):
    _UNITS[_letter + "ib"] = _UNITS[_letter] = 1024**_i
    _UNITS[_letter + "b"] = 1000**_i
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")

ENV_PREFIX = "KVTIER__"


class TierConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One level of the hierarchy, the fastest first."""

    kind: str
    """Name of the backend: ``memory``, ``posix``, or what another package registers."""
    capacity: int
    """Most bytes the tier holds, records and their headers included; like ``"64 GiB"``."""
    name: str = ""
    """Name in metrics and results; the kind's if empty."""
    policy: str = "lru"
    """Name of the eviction policy."""
    options: dict[str, Any] = {}
    """The backend's own settings; in files they stand beside the others."""


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of one `KVTier`."""

    tiers: tuple[TierConfig, ...] = (TierConfig(kind="memory", capacity=1024**3),)
    """The first is memory: chunks are filled and read there."""
    copy_threads: int = 0
    """Threads per copy, the caller's included; 0 takes half the processors, 1 to 4."""
    load_timeout_s: float = 10.0
    """A load that is not done by then is a miss."""
    lease_s: float = 60.0
    """How long a lookup's hit stays put unless released sooner."""
    ask_timeout_s: float = 0.2
    """How long a lookup waits for tiers that others store in too; 0 never asks them."""
    write_back: bool = True
    """Copy every stored chunk in the background to the next tier and to all that others share."""
    write_back_queue: int = 2 * 1024**3
    """Most bytes waiting to be written down, per tier; beyond it chunks stay in memory only."""
    load_queue_max: int = 64
    """Most loads waiting; beyond it a load is a miss at once."""
    close_timeout_s: float = 30.0
    """How long `close` waits for what is still to be written down."""
    events_max: int = 4096
    """Most undrained events kept; the oldest are dropped and counted."""
    self_test: bool = True
    """Prove the layout of engine memory at attach, before anything is cached."""


def parse_size(value: str | int) -> int:
    """Bytes from ``"64 GiB"``, ``"1.5 TB"``, ``"4096"`` or a plain number.

    Raises:
        ConfigError: it is none of these.
    """
    if isinstance(value, int):
        return value
    match = _SIZE.fullmatch(value)
    if match is None or match[2].lower() not in _UNITS:
        raise ConfigError(f"{value!r} is not a size; write it like '64 GiB', '500 MB' or '4096'")
    unit = _UNITS[match[2].lower()]
    return int(match[1]) * unit if match[1].isdigit() else int(float(match[1]) * unit)


def load_config(
    source: Config | Mapping[str, Any] | str | Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> Config:
    """The settings from a TOML file, a mapping or nothing, with the environment's on top.

    Raises:
        ConfigError: a name is unknown (the nearest known one is named), or a value does not fit.
    """
    if isinstance(source, Config):
        return _check(source)
    if source is None:
        tree: dict[str, Any] = {}
    elif isinstance(source, Mapping):
        tree = _plain(source)
    else:
        try:
            tree = tomllib.loads(Path(source).read_text())
        except OSError as error:
            raise ConfigError(f"cannot read {source}: {error.strerror}") from error
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{source} is not TOML: {error}") from error
    _overlay(tree, os.environ if environ is None else environ)
    if "tiers" in tree:
        if not isinstance(tree["tiers"], list):
            raise ConfigError("tiers: expected a list, one entry a tier")
        tree["tiers"] = [_tier(entry, f"tiers.{i}") for i, entry in enumerate(tree["tiers"])]
    return _check(convert(tree, Config, ""))


StructT = TypeVar("StructT", bound=msgspec.Struct)


def convert(tree: Mapping[str, Any], kind: type[StructT], path: str) -> StructT:
    """`tree` as a `kind`; strings become sizes and numbers where the field is one.

    Raises:
        ConfigError: names the key, and the nearest known one if it is unknown.
    """
    hints = get_type_hints(kind)
    clean: dict[str, Any] = {}
    for name, value in tree.items():
        where = f"{path}.{name}" if path else name
        if name not in hints:
            raise ConfigError(_unknown(where, name, list(hints)))
        if hints[name] is int and isinstance(value, str):
            try:
                value = parse_size(value)
            except ConfigError as error:
                raise ConfigError(f"{where}: {error}") from error
        clean[name] = value
    try:
        return msgspec.convert(clean, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path or 'config'}: {error}") from error


def _unknown(where: str, name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(known))}"
    return f"{where}: no such setting{hint}"


def _tier(entry: Any, path: str) -> TierConfig:
    if isinstance(entry, TierConfig):
        return entry
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{path}: expected a table of settings")
    own = set(TierConfig.__struct_fields__) - {"options"}
    for required in ("kind", "capacity"):
        if required not in entry:
            near = difflib.get_close_matches(required, entry.keys(), n=1, cutoff=0.6)
            hint = f"; is {near[0]!r} meant for it?" if near else ""
            raise ConfigError(f"{path}.{required}: missing{hint}")
    fields: dict[str, Any] = {name: value for name, value in entry.items() if name in own}
    fields["options"] = {name: value for name, value in entry.items() if name not in own}
    return convert(fields, TierConfig, path)


def _check(config: Config) -> Config:
    if not config.tiers:
        raise ConfigError("tiers: at least one is needed")
    names = [tier.name or tier.kind for tier in config.tiers]
    if len(set(names)) != len(names):
        raise ConfigError(f"tiers: two are named {max(names, key=names.count)!r}; give each a name")
    if len(names) > 8:
        raise ConfigError(f"tiers: {len(names)}, at most 8")
    for i, tier in enumerate(config.tiers):
        if tier.capacity <= 0:
            raise ConfigError(f"tiers.{i}.capacity: {tier.capacity}, expected more than 0")
    for name in ("load_timeout_s", "lease_s", "ask_timeout_s", "close_timeout_s"):
        if getattr(config, name) < 0:
            raise ConfigError(f"{name}: {getattr(config, name)}, expected 0 or more")
    for name in ("copy_threads", "write_back_queue", "load_queue_max", "events_max"):
        if getattr(config, name) < 0:
            raise ConfigError(f"{name}: {getattr(config, name)}, expected 0 or more")
    return config


def _plain(value: Any) -> Any:
    """Mappings and sequences as fresh dicts and lists, so that the overlay changes no caller's."""
    if isinstance(value, Mapping):
        return {str(name): _plain(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value


def _overlay(tree: dict[str, Any], environ: Mapping[str, str]) -> None:
    for variable in sorted(environ):
        if not variable.startswith(ENV_PREFIX):
            continue
        path = variable[len(ENV_PREFIX) :].lower().split("__")
        node: Any = tree
        for step, part in enumerate(path):
            last = step == len(path) - 1
            if isinstance(node, list):
                if not part.isdigit() or int(part) >= len(node):
                    raise ConfigError(
                        f"{variable}: there is no entry {part!r}, the list has {len(node)}"
                    )
                if last:
                    raise ConfigError(f"{variable}: names a whole entry, not a setting of it")
                node = node[int(part)]
            elif isinstance(node, dict):
                if last:
                    node[part] = environ[variable]
                elif part in node:
                    node = node[part]
                else:
                    known = [name for name, value in node.items() if isinstance(value, list | dict)]
                    raise ConfigError(_unknown(variable, part, known or list(node)))
            else:
                raise ConfigError(f"{variable}: {'.'.join(path[:step])} is a single value")
