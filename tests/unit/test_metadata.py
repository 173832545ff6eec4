"""Metadata and messages of agents: whatever bytes come, they are understood or refused."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.metadata import (
    MAGIC,
    METADATA_BYTES_MAX,
    PAYLOAD_BYTES_MAX,
    Hello,
    Metadata,
    Notify,
    Refused,
    RegionEntry,
    Welcome,
    Withdraw,
    Withdrawn,
    check_payload,
    decode_message,
    decode_metadata,
    encode_message,
    encode_metadata,
    this_host,
)
from kvtier.types import RegionKind

REGION = RegionEntry(5, RegionKind.DRAM, 1 << 46, 1 << 30, 0, {"ucx": b"key"})
WHOLE = Metadata(
    name="prefill-0",
    agent=b"a" * 16,
    generation=3,
    token=b"t" * 16,
    host=b"h" * 16,
    pid=77,
    unix="kvtier-1",
    tcp="10.0.0.1:7000",
    backends={"ucx": b"address"},
    regions=[REGION],
)


def test_metadata_come_back_as_they_were() -> None:
    assert decode_metadata(encode_metadata(WHOLE)) == WHOLE


@pytest.mark.parametrize(
    "message",
    [
        Hello("n", b"a" * 16, b"b" * 16, b"c" * 16),
        Welcome([1, 2]),
        Refused("why"),
        Notify(b"x" * PAYLOAD_BYTES_MAX, ""),
        Withdraw(7),
        Withdrawn(7),
    ],
)
def test_messages_come_back_as_they_were(message: Hello) -> None:
    frame = encode_message(message)
    assert int.from_bytes(frame[:4], "little") == len(frame) - 4
    assert decode_message(frame[4:]) == message


@settings(max_examples=300)
@given(st.data())
def test_damaged_metadata_are_refused_or_within_bounds(data: st.DataObject) -> None:
    good = bytearray(encode_metadata(WHOLE))
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(good)))
    try:
        found = decode_metadata(bytes(good[:cut]))
    except ValueError:
        return
    for region in found.regions:
        assert region.nbytes >= 1
        assert region.address >= 0
        assert region.address + region.nbytes <= 1 << 63
    assert len(found.agent) == len(found.token) == 16


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_understood(noise: bytes) -> None:
    for data in (noise, MAGIC + noise, MAGIC + b"\x01" + noise):
        with pytest.raises(ValueError, match="metadata"):
            decode_metadata(data)
    with contextlib.suppress(ValueError):
        decode_message(noise)


@pytest.mark.parametrize(
    "changed",
    [
        {"agent": b"short"},
        {"name": ""},
        {"name": "x" * 201},
        {"generation": -1},
        {"pid": 0},
        {"regions": [REGION, REGION]},
        {"regions": [msgspec.structs.replace(REGION, nbytes=0)]},
        {"regions": [msgspec.structs.replace(REGION, address=(1 << 63) - 1)]},
        {"backends": {"x" * 201: b""}},
    ],
)
def test_values_out_of_bounds_are_refused(changed: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="damaged metadata"):
        decode_metadata(encode_metadata(msgspec.structs.replace(WHOLE, **changed)))


def test_another_version_is_refused_by_name() -> None:
    data = bytearray(encode_metadata(WHOLE))
    data[len(MAGIC)] = 9
    with pytest.raises(ValueError, match="version 09"):
        decode_metadata(bytes(data))


def test_metadata_that_are_too_long_are_not_looked_at() -> None:
    with pytest.raises(ValueError, match="at most"):
        decode_metadata(bytes(METADATA_BYTES_MAX + 1))


def test_deeply_nested_bytes_are_refused() -> None:
    for opened in (b"\x91", b"\x81\xa1a"):
        with pytest.raises(ValueError, match="damaged"):
            decode_metadata(MAGIC + b"\x01" + opened * 200_000)
        with pytest.raises(ValueError, match="damaged"):
            decode_message(opened * 200_000)


def test_a_payload_has_a_bound() -> None:
    check_payload(bytes(PAYLOAD_BYTES_MAX))
    with pytest.raises(ValueError, match="at most"):
        check_payload(bytes(PAYLOAD_BYTES_MAX + 1))


def test_a_host_is_the_same_to_itself() -> None:
    assert this_host() == this_host()
    assert len(this_host()) == 16
