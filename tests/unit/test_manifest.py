"""The stored form: shapes are aligned and complete, and any change of a header is seen."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier import CorruptChunk, KvLayout
from kvtier.backend import HEAD_BYTES
from kvtier.manifest import Head, check_header, decode_head, encode_header, record_shape
from kvtier.types import ALIGN_BYTES, ChunkKey

LAYOUT = KvLayout.opaque(
    layers=5, planes=1, page_tokens=128, page_bytes=1000, dtype="f4", packing="p"
)
SHAPE = record_shape(LAYOUT, 2, 3)
HEAD = Head(
    key=ChunkKey(b"k" * 32),
    parent=b"p" * 32,
    namespace_id=b"n" * 16,
    fingerprint=LAYOUT.fingerprint,
    tokens=256,
    pages=2,
    record_bytes=SHAPE.record_bytes,
    payload_bytes=SHAPE.payload_bytes,
    segment_count=3,
    layers=5,
)
DIGESTS = bytes(range(48))
HEADER = encode_header(HEAD, SHAPE, DIGESTS)
USED = HEAD_BYTES + 3 * 40


@given(
    layers=st.integers(1, 100),
    planes=st.integers(1, 2),
    page_bytes=st.integers(1, 10_000),
    pages=st.integers(1, 40),
    waves=st.integers(1, 64),
)
def test_segments_are_aligned_apart_and_hold_every_layer_once(
    layers: int, planes: int, page_bytes: int, pages: int, waves: int
) -> None:
    layout = KvLayout.opaque(
        layers=layers,
        planes=planes,
        page_tokens=16,
        page_bytes=page_bytes,
        dtype="x",
        packing="p",
    )
    shape = record_shape(layout, pages, waves)
    end = shape.header_bytes
    covered: list[int] = []
    for offset, nbytes, first, count in zip(
        shape.segment_offsets,
        shape.segment_bytes,
        shape.first_layers,
        shape.layer_counts,
        strict=True,
    ):
        assert offset % ALIGN_BYTES == 0
        assert offset >= end
        assert nbytes == count * planes * page_bytes * pages
        end = offset + nbytes
        covered.extend(range(first, first + count))
    assert covered == list(range(layers))
    assert shape.record_bytes >= end
    assert shape.record_bytes % ALIGN_BYTES == 0
    assert shape.payload_bytes == sum(shape.segment_bytes) == layout.block_bytes * pages


def test_a_header_is_read_back() -> None:
    assert decode_head(HEADER) == HEAD
    assert check_header(memoryview(HEADER), HEAD, SHAPE) == DIGESTS


@given(st.integers(0, USED * 8 - 1))
def test_any_flipped_bit_is_seen(bit: int) -> None:
    damaged = bytearray(HEADER)
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptChunk):
        check_header(memoryview(damaged), HEAD, SHAPE)


@given(st.binary(max_size=300))
def test_foreign_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptChunk):
        decode_head(data)


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Head)])
def test_a_record_of_another_chunk_is_refused_and_the_field_named(field: str) -> None:
    value = getattr(HEAD, field)
    changed = bytes(len(value)) if isinstance(value, bytes) else value + 1
    other = dataclasses.replace(HEAD, **{field: changed})  # type: ignore[arg-type]  # by name
    with pytest.raises(CorruptChunk, match=field):
        check_header(memoryview(HEADER), other, SHAPE)


def test_digests_must_be_one_a_segment() -> None:
    with pytest.raises(ValueError, match="32 digest bytes for 3 segments"):
        encode_header(HEAD, SHAPE, bytes(32))
