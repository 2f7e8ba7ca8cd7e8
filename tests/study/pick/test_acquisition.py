"""What a trial is worth, against draws of it; and when nothing more is worth trying."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paredown.study.pick.posterior import Estimate, expected_gains, is_settled, propose

NUM_DRAWS = 200_000


def made(seed: int = 0, num: int = 5) -> Estimate:
    """Plans that are hard to tell apart."""
    rng = np.random.default_rng(seed)
    root = rng.standard_normal((num, num)) * 0.05
    return Estimate(np.ones(num), rng.uniform(0.3, 0.4, num), root @ root.T, rng.uniform(1e-4, 4e-3, num))


def of(means: list[float], covariance: np.ndarray, noise: float = 1e-3) -> Estimate:
    """An estimate of plans of equal memory."""
    return Estimate(np.ones(len(means)), np.array(means), covariance, np.full(len(means), noise))


def test_a_runs_value_is_what_draws_of_it_say() -> None:
    """Tasks and their runs are drawn; those of like runs are of one mean of each plan, which is what may be known after such a run."""
    estimate, rng = made(), np.random.default_rng(1)
    tasks = rng.multivariate_normal(estimate.means, estimate.covariance, NUM_DRAWS)
    for has_noise in (True, False):
        for plan, value in enumerate(expected_gains(estimate, np.arange(5), has_noise=has_noise)):
            runs = tasks[:, plan] + has_noise * np.sqrt(estimate.noise[plan]) * rng.standard_normal(NUM_DRAWS)
            least = np.mean([part.mean(axis=0).min() for part in np.array_split(tasks[np.argsort(runs)], 400)])
            assert value == pytest.approx(estimate.means.min() - least, rel=0.1, abs=3e-4)


def test_it_is_settled_when_the_best_is_known_or_alone() -> None:
    apart, close = of([0.1, 0.4, 0.5], 1e-4 * np.eye(3)), of([0.1, 0.11, 0.5], 1e-3 * np.eye(3))
    everything = np.arange(3)
    assert is_settled(apart, everything) and not is_settled(close, everything)
    assert is_settled(close, np.array([1])), "one plan alone is taken whatever it comes to"
    assert is_settled(replace(close, covariance=1e-6 * np.eye(3)), everything)


def test_plans_that_always_do_the_same_need_no_run() -> None:
    assert is_settled(of([0.2] * 3, np.full((3, 3), 0.05)), np.arange(3))  # they rise and fall together


def test_only_plans_that_may_be_taken_are_proposed() -> None:
    for plans in (np.array([1, 3]), np.array([4])):
        assert propose(made(), plans) in plans


def test_of_equals_the_one_with_least_memory_is_proposed() -> None:
    estimate = replace(of([0.3] * 4, 0.01 * np.eye(4)), memory=np.array([3.0, 2.0, 1.0, 4.0]))
    assert propose(estimate, np.arange(4)) == 2
