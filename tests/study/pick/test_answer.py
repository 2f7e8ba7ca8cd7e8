"""Points, frontiers and picks as values: what they refuse, and that JSON gives them back or says why not."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paredown import Frontier, Picked, Plan, Trial
from paredown.errors import BudgetError, ParedownError, PlanError
from paredown.study.pick.answer import Point


def points() -> tuple[Point, ...]:
    return (
        Point("baseline", Plan(), 1000, 0.1, 0.01, on_front=True, fits=False),
        Point("lpmm", Plan.preset("lpmm"), 400, 0.12, 0.01, 0.125, 420, on_front=True, fits=True, source="measured"),
        Point("no memory", Plan.preset("activations2"), 300, 0.05, 0.2, fits=False, trains=False, source="features"),
    )


def picked() -> Picked:
    trial = Trial("digits", Plan.preset("lpmm"), 0, "done", error=0.125, seconds=1.5, measured_peak_bytes=420)  # type: ignore[arg-type]
    frontier = Frontier(points(), "error", 1000)
    return Picked("digits", Plan.preset("lpmm"), frontier, "why", 500, 1000, (trial,), ("half",), 2.5, "stored", "lpmm", ("note",))


def test_frontiers_are_in_order_and_know_the_best() -> None:
    frontier = picked().frontier
    assert [point.predicted_bytes for point in frontier.points] == [300, 400, 1000]
    assert [point.label for point in frontier.front()] == ["lpmm", "baseline"]
    assert frontier.best("50%").label == "lpmm", "what had no memory is not taken"
    assert frontier.best(1000).label == "baseline"
    with pytest.raises(BudgetError, match="no plan fits 350 B; the smallest, lpmm, needs 400 B"):
        frontier.best(350)
    with pytest.raises(BudgetError, match="the frontier is empty"):
        Frontier(()).best(1)
    with pytest.raises(PlanError, match=r"no point has the label 'mine'. Labels: no memory, lpmm, baseline"):
        frontier.find("mine")


@pytest.mark.parametrize(("mean", "best"), [(0.272, "tried"), (0.18, "tried"), (0.17, "untried")])
def test_an_untried_plan_is_taken_if_it_is_better_by_its_standard_deviation(mean: float, best: str) -> None:
    """A pick took an untried plan at 0.272 +- 0.119, whose error was 0.429, although a tried one had 0.29."""
    tried = Point("tried", Plan.preset("lpmm"), 400, 0.29, 0.01, 0.29, 420, on_front=True, fits=True, num_trials=1)
    untried = Point("untried", Plan.preset("half"), 300, mean, 0.119, on_front=True, fits=True)
    assert Frontier((tried, untried)).best(500).label == best
    assert Frontier((replace(tried, num_trials=0, measured=None), untried)).best(500).label == "untried", "without trials, the mean"


def test_a_pick_knows_its_point_and_its_cost() -> None:
    found = picked()
    assert found.point is not None and found.point.measured == 0.125
    assert "lpmm for digits within 500 B, 1 trial" in repr(found)
    assert replace(found, plan=None).point is None


@pytest.mark.parametrize("value", [picked(), replace(picked(), plan=None, label=""), picked().frontier], ids=str)
def test_json_gives_it_back(value: Any) -> None:
    text = json.dumps(value.to_json(), allow_nan=False)
    assert type(value).from_json(json.loads(text)) == value


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"label": 3}, "label: text is needed here; this is 3"),
        ({"predicted_bytes": -1}, "predicted_bytes: a whole number from 0 to 2\\^53"),
        ({"mean": float("nan")}, "mean: a finite number"),
        ({"deviation": -0.1}, "deviation: a finite number from 0 up"),
        ({"measured_bytes": 1.5}, "measured_bytes: a whole number"),
        ({"step_ratio": -1}, "step_ratio: a finite number from 0 up, or None"),
        ({"source": "rumour"}, "source: one of 'measured', 'prior', 'features'"),
    ],
)
def test_broken_points_are_a_sentence(change: dict[str, Any], said: str) -> None:
    value = picked().frontier.to_json()
    value["points"][1] |= change
    with pytest.raises(PlanError, match=rf"^frontier\.points\[1\]\.{said}"):
        Frontier.from_json(value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 9}, "the pick is of version 9; this paredown reads 3 to 3"),
        ({"extra": 1}, "field 'extra' is unknown in a pick"),
        ({"ties": "half"}, "pick.ties: a list is needed here"),
        ({"frontier": {"version": 3, "points": 3}}, "pick.frontier: frontier.points: a list is needed here"),
        ({"trials": [{}]}, r"pick\.trials\[0\]: the JSON of a trial is an object"),
    ],
)
def test_broken_json_is_a_sentence(change: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        Picked.from_json({**picked().to_json(), **change})


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(10**400)
JUNK = st.recursive(
    LEAVES, lambda of: st.lists(of, max_size=3) | st.dictionaries(st.text(max_size=8), of, max_size=3), max_leaves=8
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([Picked, Frontier]), st.sampled_from([None, *picked().to_json(), *picked().frontier.to_json()]), JUNK)
def test_any_json_is_read_or_refused(kind: Any, name: str | None, junk: Any) -> None:
    whole = {Picked: picked(), Frontier: picked().frontier}[kind].to_json()
    value = junk if name is None else {**whole, name: junk}
    try:
        assert isinstance(kind.from_json(value), kind)
    except ParedownError as error:
        assert len(str(error)) < 2000
