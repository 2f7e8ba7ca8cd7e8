"""What a measurement is worth, against draws of it; and when nothing more is worth measuring."""

from __future__ import annotations

import numpy as np
import pytest

from paredown.search.choosing import TURNS, is_settled, joint, knowledge, propose, value_of_all, values
from paredown.search.mixture import Mixture
from paredown.search.pooled import Prior


def made(seed: int = 0, num: int = 5) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Means, spread and noise of plans that are hard to tell apart."""
    rng = np.random.default_rng(seed)
    root = rng.standard_normal((num, num)) * 0.05
    return rng.uniform(0.3, 0.4, num), root @ root.T, rng.uniform(1e-4, 4e-3, num)


def test_a_runs_value_is_what_draws_of_it_say() -> None:
    """200,000 runs of each plan, conditioned on; four standard errors."""
    means, spread, noise = made()
    rng = np.random.default_rng(1)
    for plan, value in enumerate(values(means, spread, noise)):
        runs = means[plan] + np.sqrt(spread[plan, plan] + noise[plan]) * rng.standard_normal(200_000)
        after = means + np.outer(runs - means[plan], spread[plan] / (spread[plan, plan] + noise[plan]))
        gains = means.min() - after.min(axis=1)
        assert value == pytest.approx(gains.mean(), abs=4 * gains.std() / np.sqrt(len(gains)))


def test_all_values_are_what_draws_of_them_say() -> None:
    means, spread, noise = made()
    draws = np.random.default_rng(2).multivariate_normal(means, spread, 200_000)
    gains = means.min() - draws.min(axis=1)
    found = value_of_all(means, spread)
    assert found == pytest.approx(gains.mean(), abs=8 * gains.std() / np.sqrt(4096))
    assert found > values(means, spread, noise).max(), "one run tells less than everything"


def test_knowledge_is_the_fall_of_all_variances() -> None:
    _, spread, noise = made()
    for plan, gain in enumerate(knowledge(np.zeros(5), spread, noise)):
        left = spread - np.outer(spread[plan], spread[plan]) / (spread[plan, plan] + noise[plan])
        assert gain == pytest.approx(np.trace(spread) - np.trace(left))


def prior_of(means: np.ndarray, spread: np.ndarray, noise: float) -> Prior:
    """One kind of task, every plan a level."""
    num = len(means)
    mixture = Mixture(np.ones(1), means[None], spread[None], np.full((1, num), noise))
    return Prior(np.arange(num), np.zeros(num), np.zeros(num), mixture, 20, 1.0)


def test_it_is_settled_when_the_best_is_known_or_alone() -> None:
    apart = prior_of(np.array([0.1, 0.4, 0.5]), 1e-4 * np.eye(3), 1e-3)
    close = prior_of(np.array([0.1, 0.11, 0.5]), 1e-3 * np.eye(3), 1e-3)
    everything = np.arange(3)
    assert is_settled(apart, apart.after([]), everything)
    assert not is_settled(close, close.after([]), everything)
    assert is_settled(close, close.after([]), np.array([1])), "one plan alone is taken whatever it comes to"
    often = [(plan, mean) for plan, mean in enumerate((0.10, 0.13, 0.5)) for _ in range(400)]
    assert is_settled(close, close.after(often), everything)


def test_plans_that_always_do_the_same_need_no_run() -> None:
    same = prior_of(np.full(3, 0.2), np.full((3, 3), 0.05), 1e-3)  # they rise and fall together
    assert is_settled(same, same.after([]), np.arange(3))


@pytest.mark.parametrize("design", TURNS)
def test_only_plans_that_may_be_taken_are_proposed(design: str) -> None:
    prior = prior_of(*made()[:2], 1e-3)
    for plans in (np.array([1, 3]), np.array([4])):
        assert propose(design, prior, prior.after([(0, 0.3)]), plans, np.ones(5)) in plans


def test_of_equals_the_one_with_least_memory_is_proposed() -> None:
    prior = prior_of(np.full(4, 0.3), 0.01 * np.eye(4), 1e-3)
    assert propose("choice", prior, prior.after([]), np.arange(4), np.array([3.0, 2.0, 1.0, 4.0])) == 2


def test_joint_beliefs_have_the_offsets_and_doubts_of_plans() -> None:
    means, spread, _ = made(num=2)
    mixture = Mixture(np.ones(1), means[None], spread[None], np.full((1, 2), 1e-3))
    prior = Prior(np.array([0, 0, 1]), np.array([0.0, 0.02, 0.0]), np.array([0.0, 1e-4, 0.0]), mixture, 9, 1.0)
    found, joined, noise = joint(prior, prior.after([]), np.array([0, 1, 2]))
    assert found == pytest.approx([means[0], means[0] + 0.02, means[1]])
    assert joined[0, 1] == pytest.approx(spread[0, 0]) and joined[1, 1] == pytest.approx(spread[0, 0] + 1e-4)
    assert noise == pytest.approx(np.full(3, 1e-3))
