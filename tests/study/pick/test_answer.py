"""Points, frontiers and picks as values: what they refuse, and that JSON gives them back or says why not."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from paredown import Frontier, Picked, Plan, Trial
from paredown.errors import BudgetError, PlanError
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
