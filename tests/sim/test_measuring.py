"""What is made of figures: medians in a time box, thresholds, goals."""

from __future__ import annotations

import measures
import pytest
from rig import OutOfTime, TimeBox, take_turns
from steps import GOALS


def test_works_take_turns_and_warm_up_rounds_do_not_count() -> None:
    rounds: list[tuple[str, int]] = []

    def work(name: str, turn: int) -> float:
        rounds.append((name, turn))
        return 100.0 if turn < 0 else float(turn)

    box = TimeBox(60)
    names = ("a", "b")
    times = take_turns({name: lambda turn, name=name: work(name, turn) for name in names}, 5, box)  # type: ignore[misc]
    assert times == {"a": 2.0, "b": 2.0}
    assert box.rounds == 5
    assert rounds[4:8] == [("a", 0), ("b", 0), ("b", 1), ("a", 1)]


def test_a_time_box_that_is_over_gives_no_figure() -> None:
    with pytest.raises(OutOfTime, match="0 rounds of a"):
        take_turns({"a": lambda turn: 1.0}, 5, TimeBox(0))


def test_parts_of_a_time_box_share_what_is_left() -> None:
    box = TimeBox(100)
    assert 24 < box.part(4).left_s <= 25
    assert TimeBox(-1).part(4).left_s <= 0


def test_copy_engines_do_from_the_shortest_run_on_that_no_longer_run_belies() -> None:
    def row(dma: float) -> dict[str, float]:
        return {"dma": dma, "staged": 10.0, "direct": 5.0}

    rows = {2: row(9.9), 4: row(3.0), 8: row(9.6), 16: row(12.0)}
    assert measures._threshold(rows) == 8
    assert measures._threshold({2: row(1.0), 4: row(9.0)}) is None
    assert measures._threshold({2: row(20.0), 4: {"not measured": "the time was over"}}) is None


def test_goals_are_bounds_below_or_above() -> None:
    assert GOALS["d2h"].is_reached(0.95)
    assert not GOALS["d2h"].is_reached(0.94)
    assert GOALS["interference"].is_reached(1.05)
    assert not GOALS["interference"].is_reached(1.06)
