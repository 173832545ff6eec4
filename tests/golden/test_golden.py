"""Keys and stored bytes stay what they were: other machines and older files depend on them.

The files beside this hold one version each. A change of the formula needs a new version and a new
file; `python tests/golden/test_golden.py` prints what the current code makes.
"""

import hashlib
import hmac
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from kvtier.keys import Extra, Namespace, chunk_keys, namespace_id, partial_key
from kvtier.layout import KvLayout
from kvtier.manifest import NO_PARENT, Head, decode_head, encode_header, record_shape
from kvtier.types import ChunkKey

HERE = Path(__file__).parent
LAYOUT = KvLayout.per_token(
    layers=4, planes=2, page_tokens=16, heads=2, head_bytes=128, dtype="bfloat16"
)
SPACES = {
    "plain": Namespace(model="meta-llama/Llama-3-8B"),
    "full": Namespace(
        model="m",
        revision="r1",
        dtype="float32",
        adapter="lora-7",
        salt="tenant",
        secret=b"secret",
        chunk_tokens=128,
        waves=2,
        extra=(("b", "2"), ("a", "1")),
    ),
}
TOKENS = [(i * 2654435761) % 128000 for i in range(600)]
EXTRAS = [Extra(100, 300, b"image one"), Extra(10, 20, b"image two")]


def keys_now() -> dict[str, Any]:
    result: dict[str, Any] = {"layout": LAYOUT.fingerprint.hex()}
    for name, space in SPACES.items():
        root = space.root(LAYOUT.fingerprint)
        keys = chunk_keys(root, TOKENS, space.chunk_tokens)
        start = len(keys) * space.chunk_tokens
        result[name] = {
            "root": root.hex(),
            "id": namespace_id(root).hex(),
            "keys": [key.hex() for key in keys],
            "partial": partial_key(keys[-1], TOKENS, start, start + 64).hex(),
            "with_extras": [
                key.hex() for key in chunk_keys(root, TOKENS, space.chunk_tokens, EXTRAS)
            ],
        }
    return result


def header_now() -> bytes:
    shape = record_shape(LAYOUT, 16, 3)
    head = Head(
        key=ChunkKey(bytes(range(32))),
        parent=NO_PARENT,
        namespace_id=bytes(range(16)),
        fingerprint=LAYOUT.fingerprint,
        tokens=256,
        pages=16,
        record_bytes=shape.record_bytes,
        payload_bytes=shape.payload_bytes,
        segment_count=3,
        layers=4,
    )
    return encode_header(head, shape, bytes(range(48)))


def test_keys_are_those_of_version_1() -> None:
    assert keys_now() == json.loads((HERE / "keys_v1.json").read_text())


def test_the_header_is_that_of_version_1() -> None:
    golden = bytes.fromhex((HERE / "manifest_v1.hex").read_text())
    assert header_now().rstrip(b"\0") == golden.rstrip(b"\0")


def test_a_version_1_header_is_read() -> None:
    head = decode_head(bytes.fromhex((HERE / "manifest_v1.hex").read_text()))
    assert (head.key, head.tokens, head.layers) == (bytes(range(32)), 256, 4)


@pytest.mark.parametrize("name", SPACES)
def test_keys_are_what_the_docs_say(name: str) -> None:
    """The formula written out with the standard library alone."""
    space = SPACES[name]
    fields = [space.model, space.revision, space.dtype, space.adapter, space.salt]
    parts = [text.encode() for text in [*fields, str(space.chunk_tokens), str(space.waves)]]
    parts.append(LAYOUT.fingerprint)
    for pair in sorted(space.extra):
        parts += [text.encode() for text in pair]
    message = b"kvtier namespace 1" + b"".join(struct.pack("<I", len(p)) + p for p in parts)
    key = hmac.digest(space.secret or bytes(32), message, "sha256")
    for start in range(0, len(TOKENS) - space.chunk_tokens + 1, space.chunk_tokens):
        chunk = TOKENS[start : start + space.chunk_tokens]
        key = hashlib.sha256(key + struct.pack(f"<{len(chunk)}I", *chunk)).digest()
    assert key.hex() == keys_now()[name]["keys"][-1]


if __name__ == "__main__":
    print(json.dumps(keys_now(), indent=1))
    print(header_now().rstrip(b"\0").hex())
