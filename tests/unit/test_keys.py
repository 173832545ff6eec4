"""Namespaces and keys: everything that changes K or V changes the key, and nothing else does."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier import ConfigError, Extra, Namespace
from kvtier.keys import chunk_keys, partial_key

FINGERPRINT = bytes(16)
BASE = Namespace(model="m")


@pytest.mark.parametrize(
    "change",
    [
        {"model": "n"},
        {"revision": "2"},
        {"dtype": "float16"},
        {"adapter": "lora"},
        {"salt": "tenant"},
        {"secret": b"s"},
        {"chunk_tokens": 128},
        {"waves": 1},
        {"extra": (("rope", "yarn"),)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_field_of_a_namespace_changes_its_root(change: dict[str, object]) -> None:
    other = dataclasses.replace(BASE, **change)  # type: ignore[arg-type]
    assert other.root(FINGERPRINT) != BASE.root(FINGERPRINT)


def test_the_layout_changes_the_root() -> None:
    assert BASE.root(bytes(16)) != BASE.root(bytes([1] * 16))


def test_moving_text_between_fields_changes_the_root() -> None:
    one, two = Namespace(model="ab", revision="c"), Namespace(model="a", revision="bc")
    assert one.root(FINGERPRINT) != two.root(FINGERPRINT)


def test_a_namespace_without_a_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="without a model"):
        Namespace(model="")


@pytest.mark.parametrize("field", ["chunk_tokens", "waves"])
def test_numbers_out_of_range_are_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field} 0"):
        Namespace(model="m", **{field: 0})  # type: ignore[arg-type]


def test_the_secret_is_not_shown() -> None:
    assert "hunter2" not in repr(Namespace(model="m", secret=b"hunter2"))


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 9))
def test_lists_and_arrays_of_any_width_have_equal_keys(tokens: list[int], chunk: int) -> None:
    root = BASE.root(FINGERPRINT)
    keys = chunk_keys(root, tokens, chunk)
    assert len(keys) == len(tokens) // chunk
    for dtype in (np.uint32, np.int64, np.uint64):
        assert chunk_keys(root, np.array(tokens, dtype=dtype), chunk) == keys


@given(st.lists(st.integers(0, 1000), min_size=8, max_size=32), st.data())
def test_a_key_depends_on_every_token_before_it(tokens: list[int], data: st.DataObject) -> None:
    root = BASE.root(FINGERPRINT)
    at = data.draw(st.integers(0, len(tokens) - 1))
    changed = [*tokens[:at], tokens[at] + 1, *tokens[at + 1 :]]
    for i, (a, b) in enumerate(
        zip(chunk_keys(root, tokens, 4), chunk_keys(root, changed, 4), strict=True)
    ):
        assert (a == b) == (at >= (i + 1) * 4)


@pytest.mark.parametrize("bad", [-1, 2**32])
def test_a_token_that_does_not_fit_is_named(bad: int) -> None:
    with pytest.raises(ValueError, match="2"):
        chunk_keys(bytes(32), [0, 1, bad, 3], 4)


def test_a_partial_chunk_of_all_tokens_has_the_whole_chunks_key() -> None:
    root, tokens = BASE.root(FINGERPRINT), list(range(8))
    whole = chunk_keys(root, tokens, 4)
    assert partial_key(whole[0], tokens, 4, 8) == whole[1]


def test_an_image_changes_the_chunks_it_touches_and_those_after() -> None:
    root, tokens = BASE.root(FINGERPRINT), [7] * 16
    plain = chunk_keys(root, tokens, 4)
    one = chunk_keys(root, tokens, 4, [Extra(5, 6, b"cat")])
    two = chunk_keys(root, tokens, 4, [Extra(5, 6, b"dog")])
    assert one[0] == plain[0]
    assert len({one[1], two[1], plain[1], one[2], two[2], plain[2]}) == 6


def test_keys_do_not_depend_on_the_process() -> None:
    code = (
        "from kvtier import Namespace; from kvtier.keys import chunk_keys;"
        "print(chunk_keys(Namespace(model='m').root(bytes(16)), [1, 2, 3, 4], 4)[0].hex())"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-P", "-c", code],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1")
    }
    assert runs == {chunk_keys(BASE.root(FINGERPRINT), [1, 2, 3, 4], 4)[0].hex() + "\n"}
