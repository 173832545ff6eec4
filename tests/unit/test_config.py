"""Settings: defaults, TOML, mapping, environment; wrong ones are named with what was meant."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier import BackendUnavailable, Config, ConfigError, KVTier, load_config
from kvtier.config import parse_size

TWO = {
    "tiers": [
        {"kind": "memory", "capacity": "1 GiB"},
        {"kind": "posix", "capacity": "2 GiB", "path": "/nowhere"},
    ]
}


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("64 GiB", 64 * 2**30),
        ("1.5TB", 1_500_000_000_000),
        ("4096", 4096),
        ("10 k", 10240),
        (7, 7),
        ("0 B", 0),
    ],
)
def test_sizes_are_read(text: str | int, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 parsec", "1 2"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size"):
        parse_size(text)


@given(st.integers(0, 2**50), st.sampled_from(["", " B", "KiB", " MiB", "gib", "TB"]))
def test_whole_numbers_with_a_unit_are_exact(number: int, unit: str) -> None:
    assert parse_size(f"{number}{unit}") % max(number, 1) == 0


def test_nothing_gives_the_defaults() -> None:
    assert load_config(None, {}) == Config()


def test_toml_and_mapping_agree(tmp_path: Path) -> None:
    file = tmp_path / "kvtier.toml"
    file.write_text(
        'lease_s = 5\n[[tiers]]\nkind = "memory"\ncapacity = "1 GiB"\n'
        '[[tiers]]\nkind = "posix"\ncapacity = "2 GiB"\npath = "/nowhere"\n'
    )
    assert load_config(file, {}) == load_config({**TWO, "lease_s": 5.0}, {})


def test_the_environment_comes_last_and_reaches_into_lists() -> None:
    environ = {
        "KVTIER__TIERS__1__CAPACITY": "5 GiB",
        "KVTIER__LEASE_S": "2.5",
        "KVTIER__SELF_TEST": "false",
        "KVTIER__TIERS__1__PATH": "/elsewhere",
        "OTHER": "x",
    }
    config = load_config(TWO, environ)
    assert config.tiers[1].capacity == 5 * 2**30
    assert config.tiers[1].options == {"path": "/elsewhere"}
    assert (config.lease_s, config.self_test) == (2.5, False)
    assert TWO["tiers"][1]["capacity"] == "2 GiB", "the caller's mapping was changed"


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"lease_t": 5}, r"lease_t: no such setting; did you mean 'lease_s'"),
        ({"tiers": [{"kind": "memory", "capasity": 1}]}, r"tiers\.0\.capacity: missing.*capasity"),
        ({"tiers": [{"kind": "memory"}]}, r"tiers\.0\.capacity: missing"),
        ({"tiers": []}, "at least one"),
        ({"tiers": {}}, "expected a list"),
        ({"tiers": [{"kind": "memory", "capacity": "1 furlong"}]}, r"tiers\.0\.capacity: .*size"),
        ({"tiers": [{"kind": "memory", "capacity": 0}]}, "expected more than 0"),
        ({"lease_s": "soon"}, "lease_s|float"),
        ({"lease_s": -1}, "lease_s: -1"),
        ({"tiers": [{"kind": "memory", "capacity": 1}] * 2}, "give each a name"),
    ],
)
def test_wrong_settings_are_named(tree: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(tree, {})


@pytest.mark.parametrize(
    ("tier", "message"),
    [
        ({"kind": "memry", "capacity": "1 MiB"}, r"tiers\.0: .*'memry'; did you mean 'memory'"),
        (
            {"kind": "memory", "capacity": "1 MiB", "prefalt": True},
            r"tiers\.0\.prefalt: .*'prefault'",
        ),
        ({"kind": "memory", "capacity": "1 MiB", "policy": "lri"}, "did you mean 'lru'"),
    ],
)
def test_wrong_names_inside_a_tier_are_named_when_it_opens(
    tier: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        KVTier.open({"tiers": [tier]})


def test_the_first_tier_must_be_memory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be of kind 'memory'"):
        KVTier.open({"tiers": [{"kind": "posix", "capacity": "1 MiB", "path": str(tmp_path)}]})


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    tiers = [
        {"kind": "memory", "capacity": "1 MiB"},
        {"kind": "posix", "capacity": "1 MiB", "path": str(tmp_path / "file" / "kv")},
    ]
    with pytest.raises(BackendUnavailable, match="file/kv"):
        KVTier.open({"tiers": tiers})


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("KVTIER__LEASE_T", "did you mean 'lease_s'"),
        ("KVTIER__TIERS__7__CAPACITY", "no entry '7'"),
        ("KVTIER__TIERS__0", "names a whole entry"),
        ("KVTIER__TIRES__0__CAPACITY", "did you mean 'tiers'"),
    ],
)
def test_wrong_variables_are_named(variable: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(TWO, {variable: "1"})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*absent\.toml"):
        load_config(tmp_path / "absent.toml")


def test_a_file_that_is_no_toml_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text("tiers = [")
    with pytest.raises(ConfigError, match="is not TOML"):
        load_config(tmp_path / "x.toml")
