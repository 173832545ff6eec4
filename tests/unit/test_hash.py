"""Chunk keys against hashlib, checksums against the reference implementation of XXH3."""

from __future__ import annotations

import hashlib
import mmap
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvtier._core import chain_key, chain_keys, xxh3_128

ROOT = bytes(range(32))
RANDOM = np.random.default_rng(11)
BYTES = RANDOM.bytes(1 << 20)
TOKENS: NDArray[np.uint32] = RANDOM.integers(0, 2**31, 5000).astype(np.uint32)


def expected_keys(parent: bytes, tokens: NDArray[Any], chunk_tokens: int) -> list[bytes]:
    keys = []
    for first in range(0, len(tokens) - chunk_tokens + 1, chunk_tokens):
        chunk = np.asarray(tokens[first : first + chunk_tokens], dtype="<u4")
        parent = hashlib.sha256(parent + chunk.tobytes()).digest()
        keys.append(parent)
    return keys


def test_checksums_of_every_short_length_are_the_reference_s() -> None:
    view = memoryview(BYTES)
    wrong = [n for n in range(1101) if xxh3_128(view[:n]) != xxhash.xxh3_128_digest(view[:n])]
    assert wrong == []


@pytest.mark.parametrize("length", [1024, 1025, 4096, 65_535, 65_536, 65_537, 1_000_003, 1 << 20])
@pytest.mark.parametrize("offset", [0, 1, 3, 16, 63])
def test_checksums_of_long_unaligned_input_are_the_reference_s(length: int, offset: int) -> None:
    view = memoryview(BYTES)[offset : offset + length]
    assert xxh3_128(view) == xxhash.xxh3_128_digest(view)


@given(st.binary(max_size=5000))
def test_any_checksum_is_the_reference_s(content: bytes) -> None:
    assert xxh3_128(content) == xxhash.xxh3_128_digest(content)


def test_any_contiguous_buffer_has_a_checksum() -> None:
    expected = xxhash.xxh3_128_digest(BYTES[:4096])
    mapped = mmap.mmap(-1, 4096)
    mapped.write(BYTES[:4096])
    array = np.frombuffer(BYTES, dtype=np.uint32, count=1024).reshape(32, 32)
    for buffer in (BYTES[:4096], bytearray(BYTES[:4096]), memoryview(BYTES)[:4096], mapped, array):
        assert xxh3_128(buffer) == expected
    mapped.close()


def test_what_is_no_contiguous_buffer_has_no_checksum() -> None:
    with pytest.raises(TypeError):
        xxh3_128("text")
    with pytest.raises((BufferError, ValueError)):
        xxh3_128(memoryview(BYTES)[::2])


@pytest.mark.parametrize("chunk_tokens", [1, 3, 4, 5, 8, 13, 16, 255, 256, 5000])
def test_keys_chain_over_whole_chunks(chunk_tokens: int) -> None:
    keys = chain_keys(ROOT, TOKENS, chunk_tokens)
    assert keys == b"".join(expected_keys(ROOT, TOKENS, chunk_tokens))
    assert len(keys) == 32 * (len(TOKENS) // chunk_tokens)


@pytest.mark.parametrize("kind", ["uint32", "int32", "int64", "uint64", "list", "tuple"])
def test_every_kind_of_tokens_gives_the_same_keys(kind: str) -> None:
    tokens: Any = {"list": TOKENS.tolist(), "tuple": tuple(TOKENS.tolist())}.get(kind)
    if tokens is None:
        tokens = TOKENS.astype(kind)
        tokens.flags.writeable = False
    assert chain_keys(ROOT, tokens, 256) == b"".join(expected_keys(ROOT, TOKENS, 256))
    assert chain_key(ROOT, tokens) == expected_keys(ROOT, TOKENS, len(TOKENS))[0]


@pytest.mark.parametrize("kind", ["list", "uint32", "int64", "uint64"])
def test_the_largest_token_is_a_token(kind: str) -> None:
    values = [0, 2**30, 2**31, 2**32 - 1]
    tokens: Any = values if kind == "list" else np.array(values, dtype=kind)
    assert chain_keys(ROOT, tokens, 2) == b"".join(expected_keys(ROOT, np.array(values), 2))


def test_too_few_tokens_make_no_chunk() -> None:
    assert chain_keys(ROOT, TOKENS[:255], 256) == b""
    assert chain_keys(ROOT, [], 1) == b""
    assert chain_keys(ROOT, np.zeros(0, np.uint32), 1) == b""


@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=200),
    st.integers(1, 40),
    st.binary(min_size=32, max_size=32),
)
def test_any_keys_are_hashlib_s(tokens: list[int], chunk_tokens: int, parent: bytes) -> None:
    expected = expected_keys(parent, np.array(tokens, dtype=np.uint32), chunk_tokens)
    assert chain_keys(parent, tokens, chunk_tokens) == b"".join(expected)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=80), st.binary(max_size=200))
def test_extra_content_changes_a_key_by_its_length_and_bytes(
    tokens: list[int], extra: bytes
) -> None:
    content = ROOT + np.array(tokens, dtype="<u4").tobytes()
    if extra:
        content += len(extra).to_bytes(4, "little") + extra
    assert chain_key(ROOT, tokens, extra) == hashlib.sha256(content).digest()


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([5, -1], "token -1 at position 1"),
        ((5, 2**32), "token 4294967296 at position 1"),
        ([2**70], f"token {2**70} at position 0"),
        ([-(2**70)], f"token {-(2**70)} at position 0"),
        (np.array([1, 2, -7], np.int32), "token -7 at position 2"),
        (np.array([-1], np.int64), "token -1 at position 0"),
        (np.array([0, 2**32], np.int64), "token 4294967296 at position 1"),
        (np.array([0, 2**63], np.uint64), f"token {2**63} at position 1"),
    ],
)
def test_a_token_outside_32_bits_is_refused_by_its_position(tokens: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chain_keys(ROOT, tokens, 1)
    with pytest.raises(ValueError, match=message):
        chain_key(ROOT, tokens)


@pytest.mark.parametrize(
    "tokens",
    [
        [1, 2.0],
        ["1"],
        "12",
        None,
        np.zeros(4),
        np.zeros(4, np.uint8),
        np.zeros(4, ">u4"),
        np.zeros((2, 2), np.uint32),
        np.zeros(8, np.uint32)[::2],
    ],
)
def test_what_is_not_tokens_is_refused(tokens: Any) -> None:
    with pytest.raises(TypeError):
        chain_keys(ROOT, tokens, 1)


def test_a_bad_parent_or_chunk_size_is_refused() -> None:
    with pytest.raises(ValueError, match="31 bytes"):
        chain_keys(ROOT[:31], TOKENS, 256)
    with pytest.raises(ValueError, match="33 bytes"):
        chain_key(ROOT + b"x", TOKENS)
    with pytest.raises(ValueError, match="chunk_tokens is 0"):
        chain_keys(ROOT, TOKENS, 0)
