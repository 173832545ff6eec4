"""Descriptors between any two geometries put every byte where a slow model says, and none else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier import KvLayout, LayoutMismatch, PagedKv
from kvtier.geometry import Geometry, Part, Shape, Shard, extents, place, plan
from kvtier.slices import LayerSlices, page_ids
from kvtier.types import Region, RegionKind

ORDERS = {"KNTHD": 2, "NKTHD": 2, "NKHTD": 2, "NTHD": 2, "NHTD": 2, "NLKTHD": 2, "LNKHTD": 2}
LATENT_ORDERS = {"NTD": 1, "NLTD": 1}
PAGES = 12

Words = npt.NDArray[np.uint32]


def region(number: int, array: npt.NDArray[np.uint32]) -> Region:
    return Region(RegionKind.DRAM, array.ctypes.data, array.nbytes, number=number)


class Rank:
    """Pages of one rank as [layer, plane][page, token, head, word], in memory of some order."""

    def __init__(
        self,
        order: str,
        shard: Shard,
        page_tokens: int,
        words: int,
        *,
        planes: int = 2,
        together: bool = True,
        model: str = "m",
    ) -> None:
        size = {
            "L": shard.layers,
            "K": planes,
            "N": PAGES,
            "T": page_tokens,
            "H": shard.heads,
            "D": words,
        }
        per_layer = 1 if "K" in order else planes
        count = 1 if "L" in order else shard.layers * per_layer
        shape = [size[letter] for letter in order]
        length = int(np.prod(shape))
        if together:  # with a gap before each, as an allocator leaves them
            whole = np.zeros(count * (length + 3), np.uint32)
            self.regions = [whole]
            tensors = [whole[i * (length + 3) + 3 :][:length].reshape(shape) for i in range(count)]
        else:
            self.regions = [np.zeros(length, np.uint32) for _ in range(count)]
            tensors = [region.reshape(shape) for region in self.regions]
        views = []
        for tensor in tensors:
            missing = [letter for letter in "LKH" if letter not in order]
            letters = order + "".join(missing)
            view = tensor.reshape([*shape, *(1 for _ in missing)])
            views.append(view.transpose([letters.index(letter) for letter in "LKNTHD"]))
        self.planes = [
            view[layer, plane]
            for view in views
            for layer in range(view.shape[0])
            for plane in range(view.shape[1])
        ]
        strides = self.planes[0].strides
        layout = KvLayout.per_token(
            layers=shard.layers,
            planes=planes,
            page_tokens=page_tokens,
            heads=shard.heads,
            head_bytes=4 * words,
            dtype="u4",
        )
        self.kv = PagedKv(
            plane_addresses=np.array([p.ctypes.data for p in self.planes], np.uint64),
            page_count=PAGES,
            page_stride=strides[0],
            row_stride=strides[1],
            col_stride=strides[2],
        )
        self.layout, self.shard = layout, shard
        numbered = [region(i + 5, array) for i, array in enumerate(self.regions)]
        self.geometry = place(Shape.of(layout, model, shard), self.kv, numbered)

    def write(self, kv: Words, pages: Sequence[int]) -> None:
        """Put this rank's share of [layer, plane, token, head, word] in its pages."""
        shard, size = self.shard, self.geometry.shape.page_tokens
        for at, plane in enumerate(self.planes):
            layer, k = divmod(at, self.geometry.shape.planes)
            heads = slice(shard.first_head, shard.first_head + shard.heads)
            for token in range(kv.shape[2]):
                value = kv[shard.first_layer + layer, k, token, heads]
                plane[pages[token // size], token % size] = value

    def take(
        self, source: Rank, local: npt.NDArray[np.uint64], remote: npt.NDArray[np.uint64]
    ) -> None:
        """Copy as an agent would; no word may come twice."""
        assert np.array_equal(local[:, 2], remote[:, 2])
        for (s_region, s_at, nbytes), (t_region, t_at, _) in zip(
            local.tolist(), remote.tolist(), strict=True
        ):
            piece = source.regions[s_region - 5].view(np.uint8)[s_at : s_at + nbytes]
            there = self.regions[t_region - 5].view(np.uint8)[t_at : t_at + nbytes]
            assert piece.nbytes == there.nbytes == nbytes
            assert not there.any(), "written before"
            there[:] = piece


def shards(ranks: int, heads: int, stages: int, layers: int) -> list[Shard]:
    """Heads over `ranks`, replicated if there are fewer; layers over `stages`."""
    spans = [
        (int(part[0]), len(part))
        for part in (
            np.array_split(np.arange(heads), ranks)
            if ranks <= heads
            else [np.array([rank * heads // ranks]) for rank in range(ranks)]
        )
    ]
    return [
        Shard(count, len(stage), heads, layers, first, int(stage[0]), rank)
        for stage in np.array_split(np.arange(layers), min(stages, layers))
        for rank, (first, count) in enumerate(spans)
    ]


def unique_kv(layers: int, planes: int, tokens: int, heads: int, words: int) -> Words:
    """No word is zero, and none comes twice."""
    shape = (layers, planes, tokens, heads, words)
    return np.arange(1, np.prod(shape) + 1, dtype=np.uint32).reshape(shape)


sides = st.fixed_dictionaries(
    {
        "ranks": st.sampled_from([1, 2, 3, 4]),
        "stages": st.sampled_from([1, 1, 2]),
        "page_tokens": st.sampled_from([1, 3, 8, 16, 32]),
        "together": st.booleans(),
        "seed": st.integers(0, 5),
        "order": st.integers(0, 6),
    }
)


@settings(deadline=None, max_examples=150)
@given(
    prefill=sides,
    decode=sides,
    layers=st.integers(1, 3),
    heads=st.integers(1, 6),
    words=st.integers(1, 3),
    tokens=st.integers(1, 40),
    latent=st.booleans(),
)
def test_every_word_arrives_once_and_nothing_else_is_touched(
    prefill: dict[str, int],
    decode: dict[str, int],
    layers: int,
    heads: int,
    words: int,
    tokens: int,
    latent: bool,
) -> None:
    planes, heads = (1, 1) if latent else (2, heads)
    kv = unique_kv(layers, planes, tokens, heads, words)

    def build(side: dict[str, int]) -> list[tuple[Rank, list[int]]]:
        orders = list(LATENT_ORDERS if latent else ORDERS)
        size = max(side["page_tokens"], -(-tokens // PAGES))
        ranks = [
            Rank(
                orders[side["order"] % len(orders)],
                shard,
                size,
                words,
                planes=planes,
                together=bool(side["together"]),
            )
            for shard in shards(side["ranks"], heads, side["stages"], layers)
        ]
        random = np.random.default_rng(side["seed"])
        drawn = random.permutation(PAGES) if side["seed"] else np.arange(PAGES)
        return [(rank, drawn[: -(-tokens // size)].tolist()) for rank in ranks]

    sources, targets = build(prefill), build(decode)
    for rank, pages in sources:
        rank.write(kv, pages)
    for target, target_pages in targets:
        parts = plan([rank.shard for rank, _ in sources], target.shard)
        for (source, source_pages), mine in zip(sources, parts, strict=True):
            slices = LayerSlices(
                source.geometry,
                target.geometry,
                mine,
                page_ids(source_pages, tokens, source.geometry),
                page_ids(target_pages, tokens, target.geometry),
                tokens,
            )
            for layer in slices.layers:
                local, remote = slices.layer(layer)
                target.take(source, local, remote)
                assert_longest(local, remote)
        expected = Rank(
            "KNTHD" if not latent else "NTD",
            target.shard,
            target.geometry.shape.page_tokens,
            words,
            planes=planes,
        )
        expected.write(kv, target_pages)
        for got, want in zip(target.planes, expected.planes, strict=True):
            assert np.array_equal(got, want)
        total = sum(int(np.count_nonzero(region)) for region in target.regions)
        assert total == sum(int(np.count_nonzero(plane)) for plane in expected.planes)


def assert_longest(local: npt.NDArray[np.uint64], remote: npt.NDArray[np.uint64]) -> None:
    """No two descriptors could be one."""
    ends = {
        (s[0], s[1] + s[2], t[0], t[1] + t[2])
        for s, t in zip(local.tolist(), remote.tolist(), strict=True)
    }
    for s, t in zip(local.tolist(), remote.tolist(), strict=True):
        assert (s[0], s[1], t[0], t[1]) not in ends


def one_layer(source: Rank, target: Rank, pages: Sequence[int], tokens: int) -> list[int]:
    """Bytes of each descriptor of layer 0 when both sides use `pages`."""
    slices = LayerSlices(
        source.geometry,
        target.geometry,
        plan([source.shard], target.shard)[0],
        page_ids(pages, tokens, source.geometry),
        page_ids(pages, tokens, target.geometry),
        tokens,
    )
    lengths: list[int] = slices.layer(0)[0][:, 2].tolist()
    return lengths


def test_equal_pages_are_one_descriptor_a_plane_and_neighbours_are_joined() -> None:
    shard = Shard(4, 2, 4, 2)
    source, target = (Rank("KNTHD", shard, 16, 8) for _ in range(2))
    page = 16 * 4 * 32
    assert one_layer(source, target, [3, 7], 32) == [page] * 4
    assert one_layer(source, target, [3, 4], 32) == [2 * page] * 2
    assert one_layer(source, target, [4, 3], 32) == [2 * page] * 2
    assert one_layer(source, target, [3, 7], 17) == [page, page // 16] * 2


def test_k_and_v_that_lie_together_are_one_descriptor() -> None:
    shard = Shard(4, 2, 4, 2)
    source, target = (Rank("NKTHD", shard, 16, 8) for _ in range(2))
    assert one_layer(source, target, [3, 7], 32) == [2 * 16 * 4 * 32] * 2


def test_half_the_heads_are_a_run_a_token_or_a_run_a_head() -> None:
    whole, half = Shard(4, 1, 4, 1), Shard(2, 1, 4, 1, 2)
    token_major = one_layer(Rank("KNTHD", whole, 16, 8), Rank("KNTHD", half, 16, 8), [3], 16)
    assert token_major == [2 * 32] * 16 * 2
    head_major = one_layer(Rank("NKHTD", whole, 16, 8), Rank("NKHTD", half, 16, 8), [3], 16)
    assert head_major == [2 * 16 * 32] * 2


def packed(packing: str, page_tokens: int = 16, page_bytes: int = 96) -> tuple[Geometry, Words]:
    layout = KvLayout.opaque(
        layers=2, page_tokens=page_tokens, page_bytes=page_bytes, dtype="u4", packing=packing
    )
    memory = np.zeros((2, PAGES, page_bytes // 4), np.uint32)
    kv = PagedKv(
        plane_addresses=np.array([layer.ctypes.data for layer in memory], np.uint64),
        page_count=PAGES,
        page_stride=page_bytes,
    )
    shape = Shape.of(layout, "m", Shard(8, 2, 8, 2))
    return place(shape, kv, [region(0, memory)]), memory


def test_packed_pages_go_whole() -> None:
    source, _ = packed("x")
    slices = LayerSlices(
        source,
        source,
        [Part(0, 2, 0, 8)],
        page_ids([1, 9], 17, source),
        page_ids([4, 2], 17, source),
        17,
    )
    local, remote = slices.layer(1)
    base = PAGES * 96
    assert local.tolist() == [[0, base + 96, 96], [0, base + 9 * 96, 96]]
    assert remote.tolist() == [[0, base + 4 * 96, 96], [0, base + 2 * 96, 96]]


@pytest.mark.parametrize(
    ("other", "word"),
    [
        (packed("y")[0], "packing"),
        (packed("x", page_tokens=32)[0], "page_tokens"),
        (packed("x", page_bytes=64)[0], "run_bytes"),
        (Rank("KNTHD", Shard(4, 2, 4, 2), 16, 8).geometry, "packing"),
    ],
)
def test_packed_pages_of_another_kind_are_refused(other: Geometry, word: str) -> None:
    with pytest.raises(LayoutMismatch, match=word):
        packed("x")[0].shape.check_sends_to(other.shape)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"words": 3}, "run_bytes"),
        ({"shard": Shard(4, 3, 4, 3)}, "layers"),
        ({"shard": Shard(4, 2, 5, 2)}, "heads"),
        ({"model": "other"}, "model"),
        ({"planes": 1, "order": "NTHD"}, "planes"),
    ],
)
def test_a_mismatch_names_what_differs(change: dict[str, object], word: str) -> None:
    base: dict[str, object] = {
        "order": "KNTHD",
        "shard": Shard(4, 2, 4, 2),
        "page_tokens": 16,
        "words": 2,
    }
    ours, theirs = Rank(**base), Rank(**(base | change))  # type: ignore[arg-type]
    with pytest.raises(LayoutMismatch, match=word):
        ours.geometry.shape.check_sends_to(theirs.geometry.shape)


def test_a_part_that_nobody_holds_is_refused() -> None:
    with pytest.raises(LayoutMismatch, match="no source holds head 2 of layer 0"):
        plan([Shard(2, 1, 4, 1)], Shard(4, 1, 4, 1))


def test_ranks_that_hold_the_same_share_the_work() -> None:
    """Two heads on four ranks, to four ranks: each sends to one."""
    ranks = shards(4, 2, 1, 1)
    senders = [[i for i, part in enumerate(plan(ranks, rank)) if part] for rank in ranks]
    assert senders == [[0], [1], [2], [3]]


def test_shards_that_overlap_in_a_million_ways_are_refused() -> None:
    many = [Shard(1 + i, 1 + i, 2048, 2048, i, i) for i in range(1000)]
    with pytest.raises(LayoutMismatch, match="too many ways"):
        plan(many, Shard(2000, 2000, 2048, 2048))


@pytest.mark.parametrize(
    ("pages", "tokens", "message"),
    [
        ([], 0, "0 tokens"),
        ([1], 17, "expected 2"),
        ([1, 2], 16, "expected 1"),
        ([PAGES], 16, f"page {PAGES}"),
        ([-1], 16, "page -1"),
    ],
)
def test_pages_that_do_not_fit_the_tokens_are_refused(
    pages: list[int], tokens: int, message: str
) -> None:
    rank = Rank("KNTHD", Shard(1, 1, 1, 1), 16, 1)
    with pytest.raises(ValueError, match=message):
        page_ids(pages, tokens, rank.geometry)


def test_a_target_page_named_twice_is_refused() -> None:
    rank = Rank("KNTHD", Shard(1, 1, 1, 1), 16, 1)
    with pytest.raises(LayoutMismatch, match="twice"):
        one_layer(rank, rank, [3, 3], 32)


def test_memory_that_is_not_registered_is_refused() -> None:
    rank = Rank("KNTHD", Shard(1, 1, 1, 1), 16, 1)
    [(address, nbytes)] = extents(rank.layout, rank.kv)
    exact = Region(RegionKind.DRAM, address, nbytes, number=0)
    assert place(rank.geometry.shape, rank.kv, [exact]).plane_offsets[0] == 0
    with pytest.raises(LayoutMismatch, match="not registered"):
        place(rank.geometry.shape, rank.kv, [replace(exact, nbytes=nbytes - 1)])


@settings(deadline=None, max_examples=300)
@given(at=st.integers(0, 10_000), to=st.integers(0, 255), cut=st.integers(0, 10_000))
def test_a_damaged_geometry_is_refused_or_harmless(at: int, to: int, cut: int) -> None:
    """Whatever decodes gives offsets that add up without overflow."""
    rank = Rank("NKTHD", Shard(2, 2, 4, 2, 1), 16, 2)
    data = bytearray(msgspec.msgpack.encode(rank.geometry))
    data[at % len(data)] = to
    try:
        read = msgspec.msgpack.decode(bytes(data[: len(data) - cut % 5]), type=Geometry)
    except (msgspec.DecodeError, LayoutMismatch, UnicodeDecodeError):
        return
    assert max(read.plane_offsets) + read.plane_bytes < 2**62
    assert read.shape.shard.first_head + read.shape.shard.heads <= read.shape.shard.model_heads
