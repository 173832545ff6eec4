"""Lists of descriptors: checked, merged and cut, against the slow and plain way of doing it."""

from __future__ import annotations

import errno
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.descriptors import Cut, cut, is_aligned, per_descriptor, read_list
from kvtier.types import Descriptor, Region, RegionKind

REGIONS = {n: Region(RegionKind.DRAM, 4096 * (n + 1), 1000, number=n) for n in (0, 3, 7)}


def table(*rows: tuple[int, int, int]) -> np.ndarray[tuple[int, int], np.dtype[np.uint64]]:
    return np.array(rows, np.uint64).reshape(-1, 3)


def pieces_of(
    local: list[tuple[int, int, int]], remote: list[tuple[int, int, int]], most: int
) -> Cut:
    return cut(
        read_list("local", table(*local), None, REGIONS),
        read_list("remote", table(*remote), None, REGIONS),
        most,
    )


rows = st.lists(
    st.tuples(
        st.sampled_from([0, 3, 7]), st.sampled_from([0, 3, 7]), st.booleans(), st.integers(1, 60)
    ),
    min_size=1,
    max_size=14,
)


@given(rows, st.integers(1, 100))
def test_pieces_are_the_same_bytes_in_the_same_order(
    drawn: list[tuple[int, int, bool, int]], most: int
) -> None:
    local: list[tuple[int, int, int]] = []
    remote: list[tuple[int, int, int]] = []
    at, to = 0, 500
    for number, other, joined, nbytes in drawn:
        if joined and local:
            number, other = local[-1][0], remote[-1][0]
        else:
            at, to = (at + 13) % 400, 100 + (to + 29) % 300
        at, to = at % 900, to % 900
        local.append((number, at, nbytes))
        remote.append((other, to, nbytes))
        at, to = at + nbytes, to + nbytes
    pieces = pieces_of(local, remote, most)
    here = read_list("local", table(*local), None, REGIONS).regions
    there = read_list("remote", table(*remote), None, REGIONS).regions
    moved = [
        (here[w].number, int(o) + i, there[v].number, int(p) + i)
        for w, o, v, p, n in zip(
            pieces.local_which,
            pieces.local_offsets,
            pieces.remote_which,
            pieces.remote_offsets,
            pieces.lengths,
            strict=True,
        )
        for i in range(int(n))
    ]
    wanted = [
        (a, o + i, b, p + i)
        for (a, o, n), (b, p, _) in zip(local, remote, strict=True)
        for i in range(n)
    ]
    assert moved == wanted
    assert int(pieces.lengths.max()) <= most
    starts = np.concatenate(([0], np.cumsum(pieces.lengths.astype(np.int64))))
    begin = 0
    for index, (_, _, nbytes) in enumerate(local):
        first, last = int(pieces.first[index]), int(pieces.last[index])
        assert starts[first] <= begin < starts[first + 1]
        assert starts[last] < begin + nbytes <= starts[last + 1]
        begin += nbytes


def test_adjacent_descriptors_become_one_piece() -> None:
    pieces = pieces_of(
        [(0, 0, 10), (0, 10, 20), (0, 40, 5)], [(3, 7, 10), (3, 17, 20), (3, 37, 5)], 1 << 20
    )
    assert pieces.lengths.tolist() == [30, 5]
    assert (pieces.first.tolist(), pieces.last.tolist()) == ([0, 0, 1], [0, 0, 1])


def test_neighbours_of_different_regions_stay_apart() -> None:
    pieces = pieces_of([(0, 0, 10), (3, 10, 10)], [(0, 100, 10), (0, 110, 10)], 1 << 20)
    assert pieces.lengths.tolist() == [10, 10]


def test_a_selection_picks_and_orders() -> None:
    ends = read_list("local", table((0, 0, 1), (3, 5, 2), (7, 9, 3)), [2, 0, 2], REGIONS)
    assert [ends.regions[w].number for w in ends.which] == [7, 0, 7]
    assert ends.offsets.tolist() == [9, 0, 9]


def test_objects_and_arrays_mean_the_same() -> None:
    array = read_list("local", table((3, 5, 2), (0, 1, 4)), None, REGIONS)
    objects = read_list(
        "local", [Descriptor(REGIONS[3], 5, 2), Descriptor(REGIONS[0], 1, 4)], None, REGIONS
    )
    for a, b in ((array.which, objects.which), (array.offsets, objects.offsets)):
        assert a.tolist() == b.tolist()
    assert array.regions == objects.regions


@pytest.mark.parametrize(
    ("rows", "word"),
    [
        ([(0, 0, 0)], "0 bytes"),
        ([(0, 0, 1001)], "1000"),
        ([(0, 999, 2)], "offset 999"),
        ([(0, 2**64 - 1, 2)], "offset"),
        ([(0, 5, 2**64 - 4)], "1000"),
        ([(1, 0, 1)], "no region 1"),
        ([(2**63, 0, 1)], "no region"),
        ([], "0 descriptors"),
    ],
)
def test_what_reaches_outside_is_refused(rows: list[tuple[int, int, int]], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        read_list("local", table(*rows), None, REGIONS)


def test_arrays_of_another_form_are_refused() -> None:
    wrong: list[Any] = [np.zeros((3, 2), np.uint64), np.zeros((2, 3), int), np.zeros(3, np.uint64)]
    for given_list in wrong:
        with pytest.raises(ValueError, match="N x 3"):
            read_list("local", given_list, None, REGIONS)
    foreign = Region(RegionKind.DRAM, 1, 1000, number=0)
    with pytest.raises(ValueError, match="not registered"):
        read_list("local", [Descriptor(foreign, 0, 1)], None, REGIONS)
    with pytest.raises(ValueError, match="negative"):
        read_list("local", [Descriptor(REGIONS[0], -1, 1)], None, REGIONS)
    for select in ([3], [-1], np.zeros((1, 1), int), [0.5]):
        with pytest.raises(ValueError, match="selection"):
            read_list("local", table((0, 0, 1)), select, REGIONS)  # type: ignore[arg-type]  # wrong on purpose


def test_sides_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="2 local, 1 remote"):
        pieces_of([(0, 0, 1), (0, 5, 1)], [(3, 0, 1)], 10)
    with pytest.raises(ValueError, match="descriptor 1: 5 bytes here, 6 bytes there"):
        pieces_of([(0, 0, 1), (0, 5, 5)], [(3, 0, 1), (3, 5, 6)], 10)


def test_alignment_looks_at_both_sides_and_lengths() -> None:
    assert is_aligned(pieces_of([(0, 512, 64)], [(3, 64, 64)], 1000), 64)
    for local, remote in (
        ([(0, 8, 64)], [(3, 64, 64)]),
        ([(0, 64, 64)], [(3, 8, 64)]),
        ([(0, 64, 8)], [(3, 64, 8)]),
    ):
        assert not is_aligned(pieces_of(local, remote, 1000), 64)


def test_a_failed_piece_fails_exactly_the_descriptors_that_have_bytes_in_it() -> None:
    # one run of 30 bytes in pieces of 8: descriptors of 10 bytes lie in pieces 0-1, 1-2, 2-3
    pieces = pieces_of(
        [(0, 0, 10), (0, 10, 10), (0, 20, 10)], [(3, 0, 10), (3, 10, 10), (3, 20, 10)], 8
    )
    good = pieces.lengths.astype(np.int64)
    for broken, failed in ((0, [0]), (1, [0, 1]), (2, [1, 2]), (3, [2])):
        results = good.copy()
        results[broken] = -errno.ENOSPC
        codes, touched = per_descriptor(pieces, results, broken + 1)
        assert np.flatnonzero(codes).tolist() == failed
        assert set(codes[failed].tolist()) == {-errno.ENOSPC}
        assert touched.tolist() == [int(first <= broken) for first in pieces.first]


def test_fewer_bytes_than_asked_are_an_error() -> None:
    pieces = pieces_of([(0, 0, 10)], [(3, 0, 10)], 100)
    codes, _ = per_descriptor(pieces, np.array([9], np.int64), 1)
    assert codes.tolist() == [-errno.EIO]
