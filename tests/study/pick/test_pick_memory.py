"""`pick` where measured peaks have to fit, as on a GPU: what trials take beyond their prediction, and plans without memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paredown import Plan, pick
from paredown.sizes import say_bytes
from paredown.study.pick.answer import Frontier, Point
from paredown.study.pick.pick_loop import expected_peaks
from paredown.study.pick.reasons import explain_nothing_trains
from paredown.study.report.studies import study_of_pick
from paredown.study.tasks.trial import Status
from tests.study.pick.test_pick import PRIOR, as_in_prior, make_task, tried

__all__ = ["tried"]


def test_a_trial_that_was_broken_off_says_nothing_of_the_excess(tried: Any) -> None:
    """What it had reached is below its prediction: plans still need what the others took beyond theirs."""
    tried()
    before = pick(make_task(), "75%", 0, prior=PRIOR, device="cpu")
    predicted = {point.plan: point.predicted_bytes for point in before.frontier.points}
    excess = (before.budget_bytes - min(predicted.values())) // 2

    def rule(plan: Plan, seed: int) -> Any:
        if len(ran) == 2:
            return {"status": Status.OUT_OF_MEMORY, "error": None, "measured_peak_bytes": 10, "reason": "out of memory"}
        return {"error": as_in_prior(plan, seed), "measured_peak_bytes": predicted[plan] + excess}

    ran = tried(rule)
    found = pick(make_task(), "75%", 3, prior=PRIOR, device="cpu")
    assert len(ran) >= 2 and found.trials[1].status is Status.OUT_OF_MEMORY
    assert all(point.predicted_bytes + excess <= before.budget_bytes for point in found.frontier.points if point.fits)


@pytest.mark.parametrize("is_small", [True, False])
def test_what_trials_take_beyond_their_prediction_counts_for_all_plans(tried: Any, is_small: bool) -> None:
    """As on a GPU, whose measured peaks have to fit: a small excess leaves some plans, a large one none: two trials."""
    tried()
    points = pick(make_task(), "75%", 0, prior=PRIOR, device="cpu").frontier.points
    predicted = {point.plan: point.predicted_bytes for point in points}
    budget = pick(make_task(), "75%", 0, prior=PRIOR, device="cpu").budget_bytes
    smallest = min(predicted.values())
    excess = (budget - smallest) // 2 if is_small else budget
    ran = tried(lambda plan, seed: {"error": as_in_prior(plan, seed), "measured_peak_bytes": predicted[plan] + excess})
    found = pick(make_task(), "75%", 6, prior=PRIOR, device="cpu")
    if is_small:
        assert found.point is not None and found.point.predicted_bytes + excess <= budget
        assert found.frontier.best("75%") == found.point and Frontier.from_json(found.frontier.to_json()) == found.frontier
        assert {point.label for point in found.frontier.points if point.fits} == {
            point.label for point in points if point.predicted_bytes + excess <= budget
        }
        assert study_of_pick(found).picks[0].nbytes == smallest + excess, "the lowest budget of its page has a plan"
    else:
        assert found.plan is None and len(ran) == 2 and predicted[ran[1][0]] == smallest, (
            "the smallest before nothing is said to fit"
        )
        assert f"up to {say_bytes(excess)} more than predicted" in found.reason and "channels_last" in found.reason


def test_a_plan_takes_what_the_nearest_trial_took_beyond(tried: Any) -> None:
    """Large plans take far more than predicted, small ones as much: what is small still fits, and a page of it moves with its budget."""
    tried()
    points = pick(make_task(), "75%", 0, prior=PRIOR, device="cpu").frontier.points
    predicted = {point.plan: point.predicted_bytes for point in points}
    middle = sorted(predicted.values())[len(predicted) // 2]

    def peak(plan: Plan) -> int:
        return predicted[plan] * (2 if predicted[plan] > middle else 1)

    tried(lambda plan, seed: {"error": as_in_prior(plan, seed), "measured_peak_bytes": peak(plan)})
    found = pick(make_task(), "75%", 6, prior=PRIOR, device="cpu")
    peaks = {trial.plan: trial.measured_peak_bytes or 0 for trial in found.trials}
    assert max(peaks[plan] - predicted[plan] for plan in peaks) > 0, "a trial that says so"
    for point in found.frontier.points:
        gaps = {plan: abs(predicted[plan] - point.predicted_bytes) for plan in peaks}
        near = [point.plan] if point.plan in peaks else [plan for plan, gap in gaps.items() if gap == min(gaps.values())]
        assert point.needs == point.predicted_bytes + max(peaks[plan] - predicted[plan] for plan in near)
        assert point.fits == (point.needs <= found.budget_bytes) and point.trains
    assert found.point is not None and peak(found.point.plan) <= found.budget_bytes
    study = study_of_pick(found)
    assert study.picks[0].nbytes == min(point.needs for point in found.frontier.points)
    assert all(found.frontier.find(step.label).needs <= step.nbytes for step in study.picks)
    said = {mark.label: (mark.nbytes, mark.predicted_bytes) for mark in study.marks}
    assert said == {p.label: (p.needs, p.predicted_bytes if p.needs > p.predicted_bytes else None) for p in found.frontier.points}


def test_a_gpu_without_memory_for_a_plan_has_none_for_larger_ones(tried: Any) -> None:
    tried()
    points = pick(make_task(), "75%", 0, prior=PRIOR, device="cpu").frontier.points
    predicted = {point.plan: point.predicted_bytes for point in points}
    middle = sorted(predicted.values())[len(predicted) // 3]

    def rule(plan: Plan, seed: int) -> Any:
        no_memory = {"status": Status.OUT_OF_MEMORY, "error": None, "reason": "out of memory after 0 of 12 steps"}
        return no_memory if predicted[plan] > middle else {"error": as_in_prior(plan, seed), "measured_peak_bytes": predicted[plan]}

    ran = tried(rule)
    found = pick(make_task(), "75%", 6, prior=PRIOR, device="cpu")
    sizes = [predicted[plan] for plan, _ in ran]
    short = [size for size in sizes if size > middle]
    assert short and short == sorted(short, reverse=True) and len(set(short)) == len(short), "each is smaller than the one before"
    assert found.point is not None and found.point.predicted_bytes < min(short)
    notes = {mark.label: mark.note for mark in study_of_pick(found).marks}
    for point in found.frontier.points:
        assert point.trains == (point.predicted_bytes < min(short))
        had = "its trials failed" if point.plan in dict(ran) else "it, or a smaller plan, ran out of memory"
        assert (had in notes[point.label]) == (not point.trains)


def test_the_smallest_that_is_named_is_one_that_may_train() -> None:
    """A plan that had no memory is no advice, however little it was predicted to take."""
    short = Point("short", Plan(), 300, 0.1, 0.1, trains=False, needed_bytes=400)
    other = Point("other", Plan.preset("half"), 350, 0.1, 0.1, needed_bytes=450)
    assert "with that the smallest, other, needs 450 B" in explain_nothing_trains([short, other], [])
    assert "the smallest, other, took 420 B" in explain_nothing_trains(
        [short, Point("other", Plan(), 350, 0.1, 0.1, measured_bytes=420)], []
    )


def test_what_is_picked_is_on_the_front_within_the_budget_and_not_above_the_baseline(tried: Any) -> None:
    """On a CPU each quantized plan takes a quarter of the baseline beyond its prediction: small plans still fit."""
    tried()
    before = pick(make_task(), "75%", 0, prior=PRIOR, device="cpu")
    predicted = {point.plan: point.predicted_bytes for point in before.frontier.points}

    def peak(plan: Plan) -> int:
        return predicted[plan] + (0 if plan.quantizes_nothing else before.full_bytes // 4)

    for budget, increase in (("75%", None), ("100%", None), ("100%", 0.02), ("100%", 0.3)):
        tried(lambda plan, seed: {"error": as_in_prior(plan, seed), "measured_peak_bytes": peak(plan)})
        found = pick(make_task(), budget, 5, max_error_increase=increase, prior=PRIOR, device="cpu")
        assert found.point is not None and found.point.on_front and found.point in found.frontier.front()
        assert peak(found.point.plan) <= min(found.budget_bytes, found.full_bytes)
        assert all(point.needs <= found.full_bytes for point in found.frontier.points if point.fits)


def test_the_answer_says_whether_trials_can_help(tried: Any) -> None:
    tried()
    loose, alone = (pick(make_task(), budget, 0, prior=PRIOR, device="cpu") for budget in ("100%", None))
    smallest = min(point.predicted_bytes for point in loose.frontier.points)
    one = pick(make_task(), smallest, 0, prior=PRIOR, device="cpu")
    assert "Trials are not expected to change this choice" in one.reason, "no other plan fits"
    assert all(
        ("Trials are not expected" in found.reason) != ("No trial ran; trials are expected" in found.reason)
        for found in (loose, alone)
    )


def test_an_untried_plan_is_not_taken_at_a_prediction_that_all_trials_exceed(tried: Any) -> None:
    """On a CPU every plan takes the same scratch memory beyond its prediction: what is answered fits, tried or not, and says so."""
    tried()
    before = pick(make_task(), "60%", 0, prior=PRIOR, device="cpu")
    predicted = {point.plan: point.predicted_bytes for point in before.frontier.points}
    excess = (before.budget_bytes - min(predicted.values())) // 2
    tried(lambda plan, seed: {"error": as_in_prior(plan, seed), "measured_peak_bytes": predicted[plan] + excess})
    for increase in (None, 0.5):
        found = pick(make_task(), "60%", 3, max_error_increase=increase, prior=PRIOR, device="cpu")
        assert found.point is not None and predicted[found.point.plan] + excess <= found.budget_bytes
        sentence = "measured" if found.point.measured_bytes else "with what trials took beyond their prediction"
        assert (
            f"{say_bytes(found.point.needs)} {sentence}" in found.reason
            or f"measured {say_bytes(found.point.needs)}" in found.reason
        )


def by_definition(memory: list[float], peaks: list[tuple[int, int]], plan: int) -> float:
    """The expected peak of one plan: its own trials, else those of plans of the nearest size."""
    gaps = [-1.0 if other == plan else abs(memory[other] - memory[plan]) for other, _ in peaks]
    return memory[plan] + max(0.0, *(n - memory[other] for gap, (other, n) in zip(gaps, peaks, strict=True) if gap == min(gaps)))


def test_expected_peaks_follow_the_trial_of_the_nearest_prediction() -> None:
    draw = np.random.default_rng(0)
    for _ in range(300):
        memory = draw.integers(1, 6, size=6).astype(float) * 100
        peaks = [(int(plan), int(draw.integers(50, 900))) for plan in draw.integers(0, 6, size=draw.integers(1, 5))]
        assert expected_peaks(memory, peaks).tolist() == [by_definition(memory.tolist(), peaks, plan) for plan in range(6)]
