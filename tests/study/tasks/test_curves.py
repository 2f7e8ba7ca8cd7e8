"""Loss curves: when a run has diverged, when it is stopped as hopeless, and how often the device is read."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from paredown.study.tasks.training import MAX_POINTS, LossCurve
from paredown.study.tasks.trial import Status

BLIND = math.log(10)


def run(
    loss_of: Callable[[int], float], steps: int = 200, blind_loss: float | None = BLIND, *, stops_early: bool = True
) -> LossCurve:
    """A run whose loss at each step, from 1, is known."""
    curve = LossCurve(steps, blind_loss=blind_loss, stops_early=stops_early)
    for step in range(1, steps + 1):
        curve.add(torch.tensor(loss_of(step)))
        if curve.verdict is not None:
            break
    return curve


def test_points_are_means_since_the_last_one() -> None:
    curve = run(float, steps=10, blind_loss=None, stops_early=False)
    assert curve.points == [(step, float(step)) for step in range(1, 11)]
    curve = run(lambda step: 1.0 + step % 4, steps=450, stops_early=False)
    assert curve.points[:2] == [(5, (2 + 3 + 4 + 1 + 2) / 5), (10, (3 + 4 + 1 + 2 + 3) / 5)]
    assert len(curve.points) == 90 and curve.points[-1][0] == 450


@pytest.mark.parametrize("steps", [1, 99, 100, 101, 199, 200, 1234])
def test_a_run_is_read_at_most_so_often_and_at_its_end(steps: int) -> None:
    curve = run(lambda step: 1.0, steps)
    assert len(curve.points) <= MAX_POINTS
    assert curve.points[-1][0] == steps and curve.verdict is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_has_diverged(bad: float) -> None:
    curve = run(lambda step: bad if step == 31 else 2.0)
    assert curve.verdict is not None and curve.verdict.status is Status.DIVERGED
    assert curve.verdict.reason == f"the training loss is {bad} at step 32 of 200"
    assert all(math.isfinite(loss) for _, loss in curve.points)


def test_a_loss_far_above_its_start_has_diverged() -> None:
    curve = run(lambda step: 1e4 if step > 60 else 2.0)
    assert curve.verdict is not None and curve.verdict.status is Status.DIVERGED
    assert "is 1e+04 at step 62 of 200, above 20 times" in curve.verdict.reason


@pytest.mark.parametrize("loss_of", [lambda step: 40.0 if step < 10 else 1.0, lambda step: 2.0 + 30.0 * (step in (50, 51))])
def test_a_bad_start_and_a_spike_are_borne(loss_of: Callable[[int], float]) -> None:
    assert run(loss_of).verdict is None


def test_a_run_that_only_guesses_stops_at_half() -> None:
    curve = run(lambda step: BLIND + 0.01 * (step % 3))
    assert curve.verdict is not None and curve.verdict.status is Status.STOPPED
    assert curve.step == 100
    assert "steps 51 to 100 of 200" in curve.verdict.reason and "of the last 20" in curve.verdict.reason


def test_a_run_that_forgets_stops_at_three_quarters() -> None:
    curve = run(lambda step: 1.0 if step < 101 else 3.0)
    assert curve.verdict is not None and curve.verdict.status is Status.STOPPED
    assert curve.step == 150


GOES_ON: dict[str, Callable[[int], float]] = {
    "learns late": lambda step: 3.0 if step < 85 else 1.9,
    "learns a little": lambda step: BLIND - 0.001,
    "got worse lately": lambda step: 1.0 if step < 85 else 2.7,
    "falls in the last tenth": lambda step: 3.0 if step <= 80 else 3.0 - (step - 80) * 0.08,
}


@pytest.mark.parametrize("name", GOES_ON)
def test_whoever_is_better_than_guessing_goes_on(name: str) -> None:
    curve = run(lambda step: GOES_ON[name](step) if step <= 100 else 1.0)
    assert curve.verdict is None and curve.step == 200


def test_short_runs_and_those_that_may_not_stop_go_on() -> None:
    assert run(lambda step: 5.0, steps=99).verdict is None
    assert run(lambda step: 5.0, stops_early=False).verdict is None


def test_without_a_known_loss_of_guessing_the_start_counts() -> None:
    assert run(lambda step: 0.5 - step * 1e-4, blind_loss=None).verdict is None
    curve = run(lambda step: 0.5, blind_loss=None)
    assert curve.verdict is not None and "it began with 0.5" in curve.verdict.reason
