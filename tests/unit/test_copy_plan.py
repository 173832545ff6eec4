"""Copies between paged KV and block-first segments, byte for byte against numpy."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvtier._core import CopyPlan, CopyPool

Bytes = NDArray[np.uint8]

MODES = CopyPool.modes()
POOL = CopyPool(2)
POISON = 0xA5


@dataclass(frozen=True)
class Size:
    """Extents of one engine's KV; `run` is the bytes of one head of one token."""

    layers: int
    pages: int
    rows: int
    cols: int
    run: int

    @property
    def plane_bytes(self) -> int:
        return self.rows * self.cols * self.run


@dataclass(frozen=True)
class Engine:
    """KV in one layout: `planes[p][g]` is page g of plane p as a (rows, cols, run) view."""

    storage: list[Bytes]
    planes: list[Bytes]

    def plan(self) -> CopyPlan:
        first = self.planes[0]
        page, row, col, unit = first.strides
        assert unit == 1
        assert all(plane.strides == first.strides for plane in self.planes)
        pages, rows, cols, run = first.shape
        return CopyPlan(addresses(self.planes), pages, page, rows, row, cols, col, run)


def addresses(arrays: Sequence[Bytes]) -> NDArray[np.uint64]:
    return np.array([array.ctypes.data for array in arrays], dtype=np.uint64)


def filled(*shape: int) -> Bytes:
    return np.random.default_rng(sum(shape)).integers(0, 256, shape, dtype=np.uint8)


def stacked(s: Size) -> Engine:
    """One tensor a layer, K and V outermost: [2, pages, rows, cols, run]."""
    layers = [filled(2, s.pages, s.rows, s.cols, s.run) for _ in range(s.layers)]
    return Engine(layers, [layer[kv] for layer in layers for kv in (0, 1)])


def page_first(s: Size) -> Engine:
    """One tensor a layer, pages outermost: [pages, 2, rows, cols, run]."""
    layers = [filled(s.pages, 2, s.rows, s.cols, s.run) for _ in range(s.layers)]
    return Engine(layers, [layer[:, kv] for layer in layers for kv in (0, 1)])


def separate(s: Size) -> Engine:
    """K and V of a layer in tensors of their own."""
    planes = [filled(s.pages, s.rows, s.cols, s.run) for _ in range(2 * s.layers)]
    return Engine(planes, planes)


def latent(s: Size) -> Engine:
    """MLA: one plane a layer, [pages, rows, cols * run]."""
    layers = [filled(s.pages, s.rows, s.cols * s.run) for _ in range(s.layers)]
    return Engine(layers, [layer[:, :, None, :] for layer in layers])


def cross_layer(s: Size) -> Engine:
    """All layers of a page together: [pages, layers, 2, rows, cols, run]."""
    whole = filled(s.pages, s.layers, 2, s.rows, s.cols, s.run)
    return Engine([whole], [whole[:, layer, kv] for layer in range(s.layers) for kv in (0, 1)])


def interrupted(s: Size) -> Engine:
    """Cross-layer with something else after the first plane: stretches of unequal length."""
    whole = filled(s.pages, 2 * s.layers + 1, s.rows, s.cols, s.run)
    return Engine([whole], [whole[:, plane] for plane in (0, *range(2, 2 * s.layers + 1))])


def token_first(s: Size) -> Engine:
    """All layers of a token together: [pages, rows, layers, 2, cols, run]."""
    whole = filled(s.pages, s.rows, s.layers, 2, s.cols, s.run)
    planes = [whole[:, :, layer, kv] for layer in range(s.layers) for kv in (0, 1)]
    return Engine([whole], planes)


def heads_first(s: Size) -> Engine:
    """HND: [2, pages, cols, rows, run]."""
    layers = [filled(2, s.pages, s.cols, s.rows, s.run) for _ in range(s.layers)]
    planes = [layer[kv].transpose(0, 2, 1, 3) for layer in layers for kv in (0, 1)]
    return Engine(layers, planes)


def cross_layer_heads_first(s: Size) -> Engine:
    """HND with all layers of a page together: [pages, layers, 2, cols, rows, run]."""
    whole = filled(s.pages, s.layers, 2, s.cols, s.rows, s.run)
    planes = [
        whole[:, layer, kv].transpose(0, 2, 1, 3) for layer in range(s.layers) for kv in (0, 1)
    ]
    return Engine([whole], planes)


def padded(s: Size) -> Engine:
    """Every dimension has a gap behind it."""
    layers = [filled(2, s.pages + 1, s.rows + 1, s.cols + 1, s.run + 3) for _ in range(s.layers)]
    planes = [
        layer[kv, : s.pages, : s.rows, : s.cols, : s.run] for layer in layers for kv in (0, 1)
    ]
    return Engine(layers, planes)


LAYOUTS: list[Callable[[Size], Engine]] = [
    stacked,
    page_first,
    separate,
    latent,
    cross_layer,
    interrupted,
    token_first,
    heads_first,
    cross_layer_heads_first,
    padded,
]

SIZES = [
    Size(layers=2, pages=11, rows=4, cols=2, run=64),
    Size(layers=3, pages=9, rows=3, cols=5, run=7),
    Size(layers=1, pages=5, rows=1, cols=1, run=1),
    Size(layers=2, pages=7, rows=16, cols=1, run=1000),
    Size(layers=2, pages=7, rows=16, cols=8, run=256),
]


@dataclass
class Segments:
    """A poisoned target or a random source for each chunk, at odd addresses, with guards."""

    chunk_bytes: list[int]
    arrays: list[Bytes]
    buffer: Bytes

    @classmethod
    def of(cls, chunk_bytes: list[int], fill: Callable[[int], Bytes], shift: int) -> Segments:
        buffer = np.full(sum(chunk_bytes) + 64 * (len(chunk_bytes) + 2), POISON, dtype=np.uint8)
        arrays, at = [], 64 + shift
        for nbytes in chunk_bytes:
            arrays.append(buffer[at : at + nbytes])
            arrays[-1][:] = fill(nbytes)
            at += nbytes + 64
        return cls(chunk_bytes, arrays, buffer)


@dataclass(frozen=True)
class Job:
    """Which pages go where: one list of page ids a chunk, and a wave of planes."""

    chunks: list[list[int]]
    first_plane: int
    plane_count: int

    @property
    def page_ids(self) -> NDArray[np.int64]:
        return np.array([page for chunk in self.chunks for page in chunk], dtype=np.int64)

    @property
    def page_offsets(self) -> NDArray[np.uint32]:
        return np.cumsum([0, *map(len, self.chunks)], dtype=np.uint32)

    @property
    def wave(self) -> range:
        return range(self.first_plane, self.first_plane + self.plane_count)


def stored(segment: Bytes, job: Job, size: tuple[int, ...]) -> Bytes:
    """The segment as [page, plane in wave, row, col, byte]."""
    return segment.reshape(-1, job.plane_count, *size)


def check_gather(engine: Engine, job: Job, mode: str, shift: int = 0) -> None:
    shape = engine.planes[0].shape[1:]
    page_bytes = int(np.prod(shape)) * job.plane_count
    chunk_bytes = [len(chunk) * page_bytes for chunk in job.chunks]
    segments = Segments.of(chunk_bytes, lambda n: np.full(n, POISON, np.uint8), shift)
    expected = segments.buffer.copy()
    at = 64 + shift
    for chunk, nbytes in zip(job.chunks, chunk_bytes, strict=True):
        target = stored(expected[at : at + nbytes], job, shape)
        for b, page in enumerate(chunk):
            for place, plane in enumerate(job.wave):
                if page >= 0:
                    target[b, place] = engine.planes[plane][page]
        at += nbytes + 64

    moved = engine.plan().gather(
        POOL,
        job.page_ids,
        job.page_offsets,
        addresses(segments.arrays),
        job.first_plane,
        job.plane_count,
        mode,
    )

    assert moved == page_bytes * int(np.count_nonzero(job.page_ids >= 0))
    np.testing.assert_array_equal(segments.buffer, expected)


def check_scatter(engine: Engine, job: Job, mode: str, shift: int = 0) -> None:
    shape = engine.planes[0].shape[1:]
    page_bytes = int(np.prod(shape)) * job.plane_count
    chunk_bytes = [len(chunk) * page_bytes for chunk in job.chunks]
    random = np.random.default_rng(7)
    segments = Segments.of(chunk_bytes, lambda n: random.integers(0, 256, n, np.uint8), shift)
    before = [array.copy() for array in engine.storage]
    plan = engine.plan()
    moved = plan.scatter(
        POOL,
        job.page_ids,
        job.page_offsets,
        addresses(segments.arrays),
        job.first_plane,
        job.plane_count,
        mode,
    )
    after = [array.copy() for array in engine.storage]

    # Written again by numpy over what was there: the whole storage must come out the same.
    for array, old in zip(engine.storage, before, strict=True):
        array[:] = old
    for chunk, segment in zip(job.chunks, segments.arrays, strict=True):
        source = stored(segment, job, shape)
        for b, page in enumerate(chunk):
            for place, plane in enumerate(job.wave):
                if page >= 0:
                    engine.planes[plane][page] = source[b, place]
    assert moved == page_bytes * int(np.count_nonzero(job.page_ids >= 0))
    for array, found in zip(engine.storage, after, strict=True):
        np.testing.assert_array_equal(found, array)


CHECKS = {"gather": check_gather, "scatter": check_scatter}
every_direction = pytest.mark.parametrize("direction", CHECKS)
every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)


def every_page_once(engine: Engine) -> list[int]:
    return [int(page) for page in np.random.default_rng(3).permutation(len(engine.planes[0]))]


@every_direction
@every_layout
@pytest.mark.parametrize("size", SIZES, ids=lambda s: f"{s.rows}x{s.cols}x{s.run}")
@pytest.mark.parametrize("mode", MODES)
def test_every_layout_size_and_mode_moves_the_right_bytes(
    direction: str, layout: Callable[[Size], Engine], size: Size, mode: str
) -> None:
    engine = layout(size)
    pages = every_page_once(engine)
    job = Job([pages[:3], pages[3:4], pages[4:]], 0, len(engine.planes))
    CHECKS[direction](engine, job, mode)


@every_direction
@every_layout
def test_waves_of_layers_have_segments_of_their_own(
    direction: str, layout: Callable[[Size], Engine]
) -> None:
    engine = layout(Size(layers=5, pages=6, rows=2, cols=3, run=16))
    chunks = [every_page_once(engine)]
    for first in range(0, len(engine.planes), 3):
        count = min(3, len(engine.planes) - first)
        CHECKS[direction](engine, Job(chunks, first, count), "auto")


@every_direction
@every_layout
def test_a_skipped_page_leaves_its_place_alone(
    direction: str, layout: Callable[[Size], Engine]
) -> None:
    engine = layout(SIZES[0])
    job = Job([[-1, -1, 4, 0], [-1], [2, -1, 3]], 0, len(engine.planes))
    CHECKS[direction](engine, job, "auto")


@every_direction
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shift", [1, 16, 63])
def test_segments_need_no_alignment(direction: str, mode: str, shift: int) -> None:
    engine = heads_first(Size(layers=2, pages=9, rows=4, cols=2, run=200))
    job = Job([every_page_once(engine)], 0, len(engine.planes))
    CHECKS[direction](engine, job, mode, shift)
    CHECKS[direction](stacked(SIZES[3]), Job([[1, 0, 6], [2]], 1, 3), mode, shift)


@every_direction
@pytest.mark.parametrize("layout", [stacked, cross_layer, heads_first])
def test_a_copy_larger_than_the_caches_is_right(
    direction: str, layout: Callable[[Size], Engine]
) -> None:
    engine = layout(Size(layers=8, pages=48, rows=16, cols=8, run=256))
    pages = every_page_once(engine)[:40]
    CHECKS[direction](engine, Job([pages[:16], pages[16:32], pages[32:]], 0, 16), "auto")


@st.composite
def engines_and_jobs(draw: st.DrawFn) -> tuple[Engine, Job]:
    extent = st.integers(1, 5)
    size = Size(
        draw(extent),
        draw(st.integers(1, 9)),
        draw(extent),
        draw(extent),
        draw(st.integers(1, 300)),
    )
    engine = draw(st.sampled_from(LAYOUTS))(size)
    pages = draw(st.permutations(range(size.pages)))
    skipped = draw(st.sets(st.integers(0, size.pages - 1)))
    ids = [-1 if i in skipped else page for i, page in enumerate(pages)]
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=3)))
    edges = [0, *cuts, len(ids)]
    chunks = [ids[a:b] for a, b in itertools.pairwise(edges)]
    first = draw(st.integers(0, len(engine.planes) - 1))
    count = draw(st.integers(1, len(engine.planes) - first))
    return engine, Job(chunks, first, count)


@settings(max_examples=150, deadline=None)
@given(
    engines_and_jobs(), st.sampled_from(sorted(CHECKS)), st.sampled_from(MODES), st.integers(0, 63)
)
def test_any_engine_and_any_job_move_the_right_bytes(
    case: tuple[Engine, Job], direction: str, mode: str, shift: int
) -> None:
    engine, job = case
    CHECKS[direction](engine, job, mode, shift)


def test_a_page_may_be_gathered_twice() -> None:
    engine = stacked(SIZES[0])
    check_gather(engine, Job([[3, 3], [3]], 0, 4), "auto")


def test_an_empty_request_moves_nothing() -> None:
    engine = stacked(SIZES[0])
    check_gather(engine, Job([], 0, 4), "auto")
    check_gather(engine, Job([[], [-1]], 0, 4), "auto")
    check_scatter(engine, Job([[], [-1]], 0, 4), "auto")


def test_a_plan_knows_its_extents() -> None:
    for layout in (stacked, heads_first):
        plan = layout(SIZES[0]).plan()
        assert (plan.plane_count, plan.page_count, plan.plane_bytes) == (4, 11, 4 * 2 * 64)


def i64(*values: int) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


def u32(*values: int) -> NDArray[np.uint32]:
    return np.array(values, dtype=np.uint32)


def u64(*values: int) -> NDArray[np.uint64]:
    return np.array(values, dtype=np.uint64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_ids": i64(0, 1, 11)}, "page 11 at position 2 of 11"),
        ({"page_ids": i64(0, -2, 1)}, "page -2 at position 1"),
        ({"page_ids": i64(0, 1)}, "page offset 3 of 2"),
        ({"page_offsets": u32(0, 3)}, "2 page offsets for 2 segments"),
        ({"page_offsets": u32(0, 3, 2)}, "decrease"),
        ({"first_plane": 3}, r"planes 3 \+ 2 of 4"),
        ({"plane_count": 0}, r"planes 0 \+ 0"),
        ({"first_plane": 2**64 - 1}, "planes"),
        ({"second_segment": 0}, "segment 1 has address 0"),
        ({"second_segment": 2**64 - 8}, "segment 1 ends beyond"),
        ({"mode": "fastest"}, "fastest"),
    ],
)
@every_direction
def test_a_bad_request_is_refused_before_anything_is_copied(
    direction: str, change: dict[str, Any], message: str
) -> None:
    engine = stacked(SIZES[0])
    plan = engine.plan()
    segments = np.full((2, 4 * plan.plane_bytes), POISON, dtype=np.uint8)
    second = change.get("second_segment", segments[1].ctypes.data)
    request: dict[str, Any] = {
        "page_ids": i64(0, 1, 2),
        "page_offsets": u32(0, 2, 3),
        "segments": u64(segments[0].ctypes.data, second),
        "first_plane": 0,
        "plane_count": 2,
    }
    request |= {name: value for name, value in change.items() if name in request or name == "mode"}
    before = [array.copy() for array in engine.storage]
    with pytest.raises(ValueError, match=message):
        getattr(plan, direction)(POOL, **request)
    assert np.all(segments == POISON)
    for array, old in zip(engine.storage, before, strict=True):
        np.testing.assert_array_equal(array, old)


@pytest.mark.parametrize(
    "change",
    [
        {"page_ids": np.zeros(3, np.int32)},
        {"page_offsets": np.zeros(3, np.int64)},
        {"segments": np.zeros(2, np.int64)},
        {"segments": np.zeros(4, np.uint64)[::2]},
    ],
)
def test_an_array_of_another_type_is_not_converted(change: dict[str, Any]) -> None:
    plan = stacked(SIZES[0]).plan()
    request: dict[str, Any] = {
        "page_ids": i64(0, 1, 2),
        "page_offsets": u32(0, 2, 3),
        "segments": u64(4096, 4096),
        "first_plane": 0,
        "plane_count": 2,
    }
    with pytest.raises(TypeError):
        plan.gather(POOL, **(request | change))


@pytest.mark.parametrize(
    ("position", "value"),
    [
        (0, u64()),
        (0, u64(0)),
        (0, u64(2**64 - 8)),
        (1, 0),
        (2, -1),
        (3, 0),
        (4, -1),
        (5, 0),
        (6, -8),
        (7, 0),
        (1, 2**62),
        (7, 2**62),
        (3, 2**62),
    ],
)
def test_an_impossible_layout_is_refused(position: int, value: object) -> None:
    arguments: list[Any] = [u64(4096), 8, 4096, 4, 64, 2, 32, 32]
    CopyPlan(*arguments)
    arguments[position] = value
    with pytest.raises(ValueError, match=r".+"):
        CopyPlan(*arguments)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lengths", [[0], [1], [63, 64, 65], [3 << 20, 5, 0, (1 << 20) + 7, 9]])
def test_plain_copies_move_every_piece(mode: str, lengths: list[int]) -> None:
    sources = [filled(n) for n in lengths]
    segments = Segments.of(lengths, lambda n: np.zeros(n, np.uint8), 5)
    POOL.copy(addresses(segments.arrays), addresses(sources), u64(*lengths), mode)
    for source, target in zip(sources, segments.arrays, strict=True):
        np.testing.assert_array_equal(target, source)
    guards = sum(int(np.count_nonzero(a == POISON)) for a in sources) + 64 * (len(lengths) + 2)
    assert int(np.count_nonzero(segments.buffer == POISON)) == guards


def test_bad_plain_copies_are_refused() -> None:
    with pytest.raises(ValueError, match="as many"):
        POOL.copy(u64(4096), u64(), u64(1))
    with pytest.raises(ValueError, match="piece 0 has address 0"):
        POOL.copy(u64(0), u64(4096), u64(1))
    with pytest.raises(ValueError, match="beyond"):
        POOL.copy(u64(4096), u64(4096), u64(2**64 - 1))
    with pytest.raises(ValueError, match="warp"):
        POOL.copy(u64(), u64(), u64(), "warp")
    POOL.copy(u64(), u64(), u64())


@pytest.mark.parametrize("count", [0, 257])
def test_a_pool_has_a_bounded_number_of_threads(count: int) -> None:
    with pytest.raises(ValueError, match=str(count)):
        CopyPool(count)


def test_a_pool_may_have_more_threads_than_work() -> None:
    pool = CopyPool(8)
    assert pool.thread_count == 8
    source, target = filled(3 << 20), np.zeros(3 << 20, np.uint8)
    pool.copy(addresses([target]), addresses([source]), u64(source.size))
    np.testing.assert_array_equal(target, source)


def test_modes_start_with_auto_and_all_run() -> None:
    assert MODES[:2] == ["auto", "memcpy"]
    assert set(MODES) <= {"auto", "memcpy", "nt256", "nt512", "movsb"}


def test_several_threads_share_one_pool() -> None:
    engine = stacked(Size(layers=4, pages=16, rows=16, cols=4, run=128))
    plan = engine.plan()
    pages = every_page_once(engine)
    segments = [np.zeros(16 * 8 * plan.plane_bytes, np.uint8) for _ in range(4)]

    def gather(segment: Bytes) -> None:
        for _ in range(20):
            plan.gather(POOL, i64(*pages), u32(0, 16), addresses([segment]), 0, 8)

    threads = [threading.Thread(target=gather, args=(segment,)) for segment in segments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    job = Job([pages], 0, 8)
    shape = engine.planes[0].shape[1:]
    for segment in segments:
        for b, page in enumerate(pages):
            for plane in range(8):
                np.testing.assert_array_equal(
                    stored(segment, job, shape)[b, plane], engine.planes[plane][page]
                )


def test_checksums_are_those_of_the_reference() -> None:
    pieces = [filled(n) for n in (0, 1, 17, 300, 4096, (3 << 20) + 1)]
    digests = POOL.checksum(addresses(pieces), u64(*map(len, pieces)))
    assert digests == b"".join(xxhash.xxh3_128_digest(piece.tobytes()) for piece in pieces)


def test_verify_finds_the_piece_with_one_wrong_bit() -> None:
    pieces = [filled(n) for n in (100, 5000, 2 << 20)]
    where, sizes = addresses(pieces), u64(*map(len, pieces))
    digests = POOL.checksum(where, sizes)
    assert POOL.verify(where, sizes, digests).tolist() == [1, 1, 1]
    pieces[1][4999] ^= 1
    assert POOL.verify(where, sizes, digests).tolist() == [1, 0, 1]


def test_bad_checksum_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="as many"):
        POOL.checksum(u64(4096), u64())
    with pytest.raises(ValueError, match="address 0"):
        POOL.checksum(u64(0), u64(1))
    with pytest.raises(ValueError, match="15 bytes of digests"):
        POOL.verify(u64(4096), u64(1), bytes(15))
    assert POOL.checksum(u64(), u64()) == b""
    assert POOL.verify(u64(), u64(), b"").tolist() == []
