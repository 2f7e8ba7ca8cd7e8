"""Trainings side by side give the trials that `evaluate` gives, and the difference of their errors has the standard error of its pairs."""

from __future__ import annotations

import math
from contextlib import ExitStack
from fractions import Fraction
from statistics import stdev

import pytest
import torch

import paredown as pare
from paredown.study.tasks.lookup import find_task
from paredown.study.tasks.paired_training import Training, paired_difference

TASK = "digits#model=mlp,steps=12"


def test_steps_in_turn_are_those_of_a_training_alone() -> None:
    task, plans = find_task(TASK), (pare.Plan(), pare.Plan.preset("lpmm"))
    pare.evaluate(task, plans[1], device="cpu")  # tables that a process allocates once are no part of the comparison
    expected = [pare.evaluate(task, plan, seed=3, device="cpu") for plan in plans]
    with ExitStack() as sessions:
        trainings = [Training.start(task, plan, seed=3, sessions=sessions) for plan in plans]
        losses = [0.0, 0.0]
        while trainings[0].num_steps_left:
            losses = [training.step() for training in trainings]
        trials = [training.trial(0.5) for training in trainings]
        shares = [float(training.wrong().double().mean()) for training in trainings]
    for training, trial, share, loss, alone in zip(trainings, trials, shares, losses, expected, strict=True):
        assert (trial.error, trial.loss, trial.curve) == (alone.error, alone.loss, alone.curve)
        assert trial.predicted_peak_bytes == alone.predicted_peak_bytes and trial.curve[-1] == (12, loss)
        assert trial.measured_peak_bytes == pytest.approx(alone.measured_peak_bytes, abs=1024)
        assert share == pytest.approx(trial.error) and len(training.step_seconds) == 9
        assert trial.step_ratio == training.median_seconds / 0.5  # type: ignore[operator]


def test_a_training_that_diverges_says_so() -> None:
    with ExitStack() as sessions:
        training = Training.start(find_task(f"{TASK},lr=1e30"), pare.Plan(), seed=0, sessions=sessions)
        while training.num_steps_left:
            training.step()
        trial = training.trial(None)
    assert trial.status.value == "diverged" and trial.reason and trial.error is None


@pytest.mark.parametrize("num_seeds", [2, 3])
def test_the_difference_is_that_of_pairs_and_its_noise_the_larger_of_two(num_seeds: int) -> None:
    draw = torch.Generator().manual_seed(num_seeds)
    baseline, plan = (torch.rand(num_seeds, 40, generator=draw) < 0.3 for _ in range(2))
    rows = [[int(b) - int(a) for a, b in zip(*row, strict=True)] for row in zip(baseline.tolist(), plan.tolist(), strict=True)]
    values = [value for row in rows for value in row]
    by_seed = stdev(float(Fraction(sum(row), 40)) for row in rows) / math.sqrt(num_seeds)
    by_pair = stdev(values) / math.sqrt(len(values))
    difference, standard_error = paired_difference(baseline, plan)
    assert difference == pytest.approx(sum(values) / len(values))
    assert standard_error == pytest.approx(max(by_seed, by_pair)) and by_seed != by_pair


def test_seeds_that_agree_by_chance_are_not_taken_for_certainty() -> None:
    baseline = torch.zeros(3, 100, dtype=torch.bool)
    plan = baseline.clone()
    plan[:, 0] = True  # each seed has one more error: no spread over seeds
    difference, standard_error = paired_difference(baseline, plan)
    assert difference == pytest.approx(0.01) and standard_error > 0.005
    plan[0, :50] = True  # one seed fails: the spread over seeds is what counts
    assert paired_difference(baseline, plan)[1] == pytest.approx(stdev([0.5, 0.01, 0.01]) / math.sqrt(3))
