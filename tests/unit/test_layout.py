"""Layouts: what differs in K or V bytes differs in the fingerprint, and misfits are refused."""

import dataclasses

import numpy as np
import pytest

from kvtier import KvLayout, LayoutMismatch, PagedKv

BASE = KvLayout.per_token(
    layers=4, planes=2, page_tokens=16, heads=2, head_bytes=64, dtype="bfloat16"
)


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(KvLayout)])
def test_every_field_is_in_the_fingerprint(field: str) -> None:
    value = getattr(BASE, field)
    other = dataclasses.replace(BASE, **{field: value + (1 if isinstance(value, int) else "x")})
    assert other.fingerprint != BASE.fingerprint


def test_packings_never_meet() -> None:
    one, two = (
        KvLayout.opaque(layers=1, page_tokens=16, page_bytes=64, dtype="f", packing=packing)
        for packing in ("cpu/amx", "cpu/vec")
    )
    assert one.fingerprint != two.fingerprint


def test_an_opaque_layout_needs_a_packing() -> None:
    with pytest.raises(LayoutMismatch, match="name of its packing"):
        KvLayout.opaque(layers=1, page_tokens=16, page_bytes=64, dtype="f", packing="")


def test_zero_layers_are_refused() -> None:
    with pytest.raises(LayoutMismatch, match="layers is 0"):
        dataclasses.replace(BASE, layers=0)


def test_sizes_follow_from_the_shape() -> None:
    assert (BASE.page_bytes, BASE.block_bytes) == (16 * 2 * 64, 4 * 2 * 16 * 2 * 64)


def test_a_plane_too_few_is_refused() -> None:
    kv = PagedKv(plane_addresses=np.ones(7, dtype=np.uint64), page_count=1, page_stride=2048)
    with pytest.raises(LayoutMismatch, match="7 plane addresses for 4 layers of 2 planes"):
        kv.copy_plan(BASE)
