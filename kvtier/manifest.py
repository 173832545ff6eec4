"""The stored form of a chunk: a header that says what the bytes are, then the bytes.

A record is ``header | segment 0 | segment 1 | ...``, each part at a multiple of 4 KiB so that
direct I/O and range reads work. A segment holds one wave (a group of layers) of all pages,
block-first: ``[page][layer][K|V][token][head][dim]``. The header's first 192 bytes (the fixed part)
are enough to rebuild an index; a table of segments with their checksums follows.

All numbers are little-endian. Both the fixed part and the table carry an XXH3-128 checksum. A
change of this format needs a new `VERSION` and a new golden file in `tests/golden`; readers refuse
versions they do not know.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from kvtier import _core
from kvtier.backend import HEAD_BYTES
from kvtier.errors import CorruptChunk
from kvtier.layout import KvLayout
from kvtier.types import ChunkKey, align_up

MAGIC = b"KVTIER\r\n"  # the line end shows a transfer in text mode
VERSION = 1
CODEC_RAW = 0
NO_PARENT = bytes(32)
"""In place of a parent's key: the chunk is the first of its prompt."""
SEGMENTS_MAX = 64

_FIXED = struct.Struct("<8sHHI32s32s16s16sIIHHHHHHHHQQQ")
_ENTRY = struct.Struct("<QQII16s")
_DIGEST_BYTES = 16
assert _FIXED.size + 2 * _DIGEST_BYTES == HEAD_BYTES


@dataclass(frozen=True, slots=True)
class RecordShape:
    """Where everything lies in a record of some number of pages; the same for equal layouts."""

    header_bytes: int
    segment_offsets: tuple[int, ...]
    segment_bytes: tuple[int, ...]
    first_layers: tuple[int, ...]
    layer_counts: tuple[int, ...]
    record_bytes: int
    payload_bytes: int


@lru_cache(maxsize=4096)
def record_shape(layout: KvLayout, pages: int, waves: int) -> RecordShape:
    """The shape of a record of `pages` pages in at most `waves` segments of whole layers."""
    count = min(waves, layout.layers, SEGMENTS_MAX)
    bounds = [layout.layers * i // count for i in range(count + 1)]
    layer_counts = tuple(b - a for a, b in pairwise(bounds))
    layer_bytes = layout.planes * layout.page_bytes * pages
    header_bytes = align_up(HEAD_BYTES + count * _ENTRY.size)
    offsets, offset = [], header_bytes
    for layers in layer_counts:
        offsets.append(offset)
        offset = align_up(offset + layers * layer_bytes)
    return RecordShape(
        header_bytes=header_bytes,
        segment_offsets=tuple(offsets),
        segment_bytes=tuple(layers * layer_bytes for layers in layer_counts),
        first_layers=tuple(bounds[:-1]),
        layer_counts=layer_counts,
        record_bytes=offset,
        payload_bytes=layout.layers * layer_bytes,
    )


@dataclass(frozen=True, slots=True)
class Head:
    """The fixed part of a manifest: who the chunk is."""

    key: ChunkKey
    parent: bytes
    """Key of the chunk before it, or `NO_PARENT`."""
    namespace_id: bytes
    fingerprint: bytes
    tokens: int
    pages: int
    record_bytes: int
    payload_bytes: int
    segment_count: int
    layers: int


def encode_header(head: Head, shape: RecordShape, digests: bytes) -> bytes:
    """The header of a record whose segments have the XXH3-128 `digests` (16 bytes each)."""
    if len(digests) != _DIGEST_BYTES * len(shape.segment_offsets):
        raise ValueError(f"{len(digests)} digest bytes for {len(shape.segment_offsets)} segments")
    table = b"".join(
        _ENTRY.pack(offset, nbytes, first, layers, digests[i * 16 : i * 16 + 16])
        for i, (offset, nbytes, first, layers) in enumerate(
            zip(
                shape.segment_offsets,
                shape.segment_bytes,
                shape.first_layers,
                shape.layer_counts,
                strict=True,
            )
        )
    )
    fixed = _FIXED.pack(
        MAGIC,
        VERSION,
        0,  # flags
        shape.header_bytes,
        head.key,
        head.parent,
        head.namespace_id,
        head.fingerprint,
        head.tokens,
        head.pages,
        0,  # group
        head.segment_count,
        CODEC_RAW,
        0,  # codec parameter
        0,  # first head of the shard; 0 heads = all
        0,
        0,  # first layer of the shard
        head.layers,
        head.record_bytes,
        head.payload_bytes,
        head.payload_bytes,  # stored length: equal while the codec is raw
    )
    fixed += _core.xxh3_128(table)
    fixed += _core.xxh3_128(fixed)
    return (fixed + table).ljust(shape.header_bytes, b"\0")


def decode_head(data: bytes | memoryview) -> Head:
    """The fixed part, verified.

    Raises:
        CorruptChunk: it is not a manifest of a known version, or its checksum does not match.
    """
    if len(data) < HEAD_BYTES:
        raise CorruptChunk(f"{len(data)} bytes, a manifest has at least {HEAD_BYTES}")
    fixed = bytes(data[:HEAD_BYTES])
    (
        magic,
        version,
        _flags,
        _header_bytes,
        key,
        parent,
        namespace,
        fingerprint,
        tokens,
        pages,
        _group,
        segments,
        codec,
        _codec_parameter,
        _head_first,
        _head_count,
        _layer_first,
        layers,
        record_bytes,
        payload_bytes,
        _stored_bytes,
    ) = _FIXED.unpack_from(fixed)
    if magic != MAGIC:
        raise CorruptChunk("no kvtier manifest")
    if version != VERSION:
        raise CorruptChunk(f"manifest version {version}, this kvtier reads {VERSION}")
    if fixed[-_DIGEST_BYTES:] != _core.xxh3_128(fixed[:-_DIGEST_BYTES]):
        raise CorruptChunk("manifest checksum does not match")
    if codec != CODEC_RAW:
        raise CorruptChunk(f"codec {codec} is not known")
    return Head(
        key=ChunkKey(key),
        parent=parent,
        namespace_id=namespace,
        fingerprint=fingerprint,
        tokens=tokens,
        pages=pages,
        record_bytes=record_bytes,
        payload_bytes=payload_bytes,
        segment_count=segments,
        layers=layers,
    )


def check_header(data: memoryview, expected: Head, shape: RecordShape) -> bytes:
    """Digests of the segments, if the header is exactly what this chunk's must be.

    Raises:
        CorruptChunk: it is damaged, or describes another chunk or layout.
    """
    head = decode_head(data)
    if head != expected:
        wrong = [name for name in Head.__slots__ if getattr(head, name) != getattr(expected, name)]
        raise CorruptChunk(f"record of another chunk: {', '.join(wrong)} differ")
    count = len(shape.segment_offsets)
    table = bytes(data[HEAD_BYTES : HEAD_BYTES + count * _ENTRY.size])
    fixed_digest_at = HEAD_BYTES - 2 * _DIGEST_BYTES
    if _core.xxh3_128(table) != bytes(data[fixed_digest_at : fixed_digest_at + _DIGEST_BYTES]):
        raise CorruptChunk("segment table checksum does not match")
    digests = []
    for i, (offset, nbytes, first, layers, digest) in enumerate(_ENTRY.iter_unpack(table)):
        if (offset, nbytes, first, layers) != (
            shape.segment_offsets[i],
            shape.segment_bytes[i],
            shape.first_layers[i],
            shape.layer_counts[i],
        ):
            raise CorruptChunk(f"segment {i} is not where this layout has it")
        digests.append(digest)
    return b"".join(digests)
