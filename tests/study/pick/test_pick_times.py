"""Step times in picks, made by hand: the quickest of plans that are as accurate, how that is said, and where no time is known."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paredown import Frontier, Picked, Plan, pick
from paredown.errors import PlanError
from paredown.plan.calibration import REFERENCE
from paredown.plan.step_time import predict_step
from paredown.study.pick.answer import Point
from paredown.study.pick.reasons import say_time
from paredown.study.priors.prior_collection import collect
from paredown.study.priors.prior_files import prior_from_json, prior_to_text
from paredown.study.report.studies import study_of_pick
from paredown.study.tasks.task_trace import trace_task
from tests.study.pick.test_pick import PRIOR, make_task, tried
from tests.study.priors.test_prior_collection import PLANS, SMALL, row

__all__ = ["tried"]


def point(label: str, mean: float, ratio: float | None, **changes: Any) -> Point:
    source = {} if ratio is None else {"step_ratio": ratio, "step_seconds": ratio / 100, "step_source": "measured"}
    return Point(label, Plan.preset("lpmm"), 400, mean, **{"deviation": 0.002, "num_trials": 1, **source, **changes})


SLOW, QUICK, WORSE = point("slow", 0.100, 1.4), point("quick", 0.104, 1.08), point("worse", 0.12, 1.0)
UNTIMED, UNTRIED = point("untimed", 0.101, None), point("untried", 0.1, 1.01, num_trials=0, step_source="predicted", deviation=0.05)


@pytest.mark.parametrize(
    ("points", "tie_error", "best"),
    [
        ((SLOW, QUICK, WORSE), 0.005, "quick"),
        ((SLOW, QUICK, WORSE), 0.003, "slow"),
        ((SLOW, QUICK, WORSE), 0.02, "worse"),
        ((SLOW, UNTIMED, WORSE), 0.005, "slow"),
        ((replace(SLOW, step_ratio=None, step_seconds=None, step_source=""), QUICK), 0.005, "slow"),
        ((SLOW, QUICK, UNTRIED), 0.005, "quick"),
        ((replace(SLOW, num_trials=0), replace(QUICK, num_trials=0), UNTRIED), 0.005, "untried"),
    ],
)
def test_the_quickest_of_those_as_accurate(points: tuple[Point, ...], tie_error: float, best: str) -> None:
    """One without a trial is as accurate only if its mean and its standard deviation say so, once others have trials."""
    assert Frontier(points, tie_error=tie_error).best(400).label == best


def test_without_a_baseline_seconds_decide() -> None:
    """As where the unmodified step ran out of memory."""
    slow, quick = (replace(one, step_ratio=None) for one in (SLOW, QUICK))
    frontier = Frontier((slow, quick), tie_error=0.005)
    assert frontier.best(400) == quick
    assert say_time(frontier, quick, 400).endswith("; it is the quickest: 10.8 ms (measured).")
    assert Frontier.from_json(frontier.to_json()) == frontier


def test_sentences() -> None:
    frontier = Frontier((SLOW, QUICK, WORSE, UNTIMED), tie_error=0.005)
    said = say_time(frontier, QUICK, 400)
    apart = "(mean errors at most 0.0050 apart, 0.5 standard deviations of a run)"
    quickest = "of the 2 with a known step time it is the quickest: 1.08x the baseline's, 10.8 ms (measured)."
    assert said == f"2 other plans that fit are as accurate as this one {apart}; {quickest}"
    assert say_time(frontier, UNTIMED, 400) == "No step time was measured."
    assert (
        say_time(Frontier((SLOW, WORSE), tie_error=0.005), SLOW, 400) == "Its step time is 1.40x the baseline's, 14 ms (measured)."
    )
    assert say_time(frontier, QUICK, 400, is_by_error=False) == "Its step time is 1.08x the baseline's, 10.8 ms (measured)."
    near = replace(QUICK, label="near", step_ratio=1.07, mean=0.1045)
    assert "it is within 2% of the quickest: 1.08x" in say_time(Frontier((SLOW, QUICK, near), tie_error=0.005), QUICK, 400)
    assert "none of them has a known step time" in say_time(Frontier((SLOW, UNTIMED), tie_error=0.005), SLOW, 400)


def by_rule(plan: Plan, seed: int) -> dict[str, Any]:
    """Equal errors; a plan takes the longer the more rules it has."""
    return {"error": 0.3, "step_seconds": 0.01 * (1 + len(plan.rules)), "baseline_step_seconds": 0.01}


def picked_by(tried: Any, evaluations: int = 6, rule: Any = by_rule, **options: Any) -> Picked:
    tried(rule)
    return pick(make_task(), "60%", evaluations, **{"prior": PRIOR, "device": "cpu", **options})


def test_a_pick_takes_the_quickest_and_says_so(tried: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paredown.study.sweeps.measurement.baseline_step_seconds", lambda *_: 0.01)
    found = picked_by(tried)
    assert found.point is not None
    others = found.frontier.as_accurate(found.label, found.budget_bytes)
    known = [one.step_ratio for one in others if one.step_ratio is not None]
    assert known and found.point.step_ratio == min([*known, 1.0 + len(found.point.plan.rules)])
    assert "as accurate as this one" in found.reason and f"{found.point.step_ratio:.2f}x the baseline's" in found.reason
    assert found.frontier.best(found.budget_bytes) == found.point, "the page's slider and the pick agree"
    assert Picked.from_json(found.to_json()) == found
    mark = next(mark for mark in study_of_pick(found).marks if mark.label == found.label)
    assert (mark.step_ratio, mark.step_source) == (found.point.step_ratio, "measured")


def test_without_times_the_reason_says_so(tried: Any) -> None:
    found = picked_by(tried, rule=lambda plan, seed: 0.3)
    assert "No step time was measured." in found.reason and found.point is not None and found.point.step_seconds is None


@pytest.mark.parametrize("is_mapping", [False, True])
def test_predicted_times(tried: Any, is_mapping: bool) -> None:
    """Without trials: the plan of least mean or a quicker one as accurate; a time of the cost model is named as predicted."""
    first = picked_by(tried, 0)
    rivals = first.frontier.as_accurate(first.label, first.budget_bytes)
    assert rivals, "or this test shows nothing"
    seconds = {one.plan: 0.02 for one in first.frontier.points} | {rivals[0].plan: 0.011, Plan(): 0.01}
    by_key = {plan.key: value for plan, value in seconds.items()}
    found = picked_by(tried, 0, step_seconds=seconds if is_mapping else lambda plan: by_key.get(plan.key))
    assert found.label == rivals[0].label and "it is the quickest: 1.10x the baseline's, 11 ms (predicted)" in found.reason
    with pytest.raises(PlanError, match="it is a number of seconds above 0, or None"):
        picked_by(tried, 0, step_seconds=lambda plan: -1.0)


def test_times_of_a_calibrated_device(tried: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the device was calibrated, the cost model predicts step times; those that the caller passes replace them."""
    calibration = replace(REFERENCE, device="cpu")
    monkeypatch.setattr(sys.modules["paredown.study.pick.pick"], "find_calibration", lambda device: (calibration, ""))
    task = make_task()
    tried(by_rule)
    found = pick(task, "60%", 0, prior=PRIOR, device="cpu")
    for one in found.frontier.points:
        predicted = predict_step(trace_task(task, one.plan, "cpu"), one.plan, calibration=calibration).seconds
        assert (one.step_seconds, one.step_source) == (pytest.approx(predicted), "predicted")
    passed = pick(task, "60%", 0, prior=PRIOR, device="cpu", step_seconds={})
    assert not any(one.step_source for one in passed.frontier.points)
    assert "(predicted)" in found.reason


def test_ratios_of_prior_tasks(tried: Any) -> None:
    """Means of other tasks stand in where nothing was measured or predicted, and are named as such; files keep them."""
    ratios = np.tile(np.linspace(1.0, 2.0, len(PRIOR.plans)), (len(PRIOR.tasks), 1))
    prior = prior_from_json(json.loads(prior_to_text(replace(PRIOR, step_ratio=ratios))))
    np.testing.assert_allclose(prior.step_ratio, ratios, atol=1e-6)
    points = picked_by(tried, 0, prior=prior).frontier.points
    known = {one.label: one.step_ratio for one in points if one.step_source == "prior"}
    assert known == {row.label: pytest.approx(ratios[0, i], abs=1e-6) for i, row in enumerate(PRIOR.plans)}


def test_priors_collect_ratios() -> None:
    """Of a trial's own baseline, else of the baseline's trials on the same device; no other device's."""
    timed = {"step_seconds": 0.3, "device": "gpu"}
    rows = [
        row(SMALL, PLANS[0], 0, 0.1, step_seconds=0.2, device="gpu"),
        row(SMALL, PLANS[1], 0, 0.1, **timed),
        row(SMALL, PLANS[2], 0, 0.1, **timed, baseline_step_seconds=0.1),
        row(SMALL, PLANS[2], 1, 0.1, **timed, baseline_step_seconds=0.15),
        row(SMALL, Plan.preset("half"), 0, 0.1, step_seconds=0.3, device="cpu"),
    ]
    np.testing.assert_allclose(collect(rows, "mine").step_ratio, [[1.0, 1.5, 2.5, np.nan]])
