"""The mixture by conditioning joint normals and by their density, and levels and offsets that were put in."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from scipy.stats import multivariate_normal

from paredown.study.pick.mixture import LevelSums, Mixture, find_levels, offsets, renumbered

LEVELS = np.array([0, 0, 1, 1, 2])
SEEN = np.array([0.3, np.nan, 0.5, 0.7, np.nan])


def made() -> Mixture:
    """Two kinds of tasks with three levels."""
    rng = np.random.default_rng(0)
    roots = rng.standard_normal((2, 3, 3)) * 0.06
    means = np.array([[0.3, 0.5, 0.4], [0.9, 0.8, 0.9]])
    return Mixture(np.array([0.7, 0.3]), means, roots @ roots.transpose(0, 2, 1), rng.uniform(0.001, 0.005, (2, 3)))


def test_a_task_given_its_runs() -> None:
    mixture, known = made(), np.isfinite(SEEN)
    posterior = mixture.given(LevelSums.of(SEEN[None], LEVELS))
    densities = []
    for kind in range(2):
        joint = mixture.spreads[kind][np.ix_(LEVELS, LEVELS)] + np.diag(mixture.noise[kind][LEVELS])
        middle, inside = mixture.means[kind][LEVELS], joint[np.ix_(known, known)]
        across = mixture.spreads[kind][:, LEVELS[known]]
        gain = across @ np.linalg.inv(inside)
        assert posterior.means[0, kind] == pytest.approx(mixture.means[kind] + gain @ (SEEN - middle)[known])
        assert posterior.spreads[0, kind] == pytest.approx(mixture.spreads[kind] - gain @ across.T)
        densities.append(mixture.shares[kind] * multivariate_normal(middle[known], inside).pdf(SEEN[known]))
    assert posterior.weights[0] == pytest.approx(np.array(densities) / sum(densities))
    assert posterior.log_likelihood == pytest.approx(np.log(sum(densities)))


def test_without_runs_a_task_is_as_the_others() -> None:
    mixture = made()
    mean, deviation = mixture.given(LevelSums.of(np.full((1, 5), np.nan), LEVELS)).levels()
    assert mean == pytest.approx(mixture.shares @ mixture.means)
    second = np.einsum("k,kl->l", mixture.shares, np.diagonal(mixture.spreads, axis1=1, axis2=2) + mixture.means**2)
    assert deviation**2 == pytest.approx(second - mean**2)


def drawn(num_tasks: int, share: float) -> np.ndarray:
    mixture, rng = made(), np.random.default_rng(1)
    kinds = rng.choice(2, num_tasks, p=mixture.shares)
    tasks = np.array([rng.multivariate_normal(mixture.means[kind], mixture.spreads[kind]) for kind in kinds])
    runs = tasks[:, LEVELS] + rng.standard_normal((num_tasks, 5)) * np.sqrt(mixture.noise[kinds][:, LEVELS])
    return np.where(rng.random(runs.shape) < share, runs, np.nan)


def test_fitting_finds_what_was_put_in() -> None:
    """4,000 tasks of which half the runs are known; means to four standard errors (one false alarm in 2,600, with six of them)."""
    found, truth = Mixture.fitted(LevelSums.of(drawn(4000, 0.5), LEVELS)), made()
    order = np.argsort(found.means[:, 0])
    assert found.shares[order] == pytest.approx(truth.shares, abs=0.03)
    variance = np.diagonal(truth.spreads, axis1=1, axis2=2) + truth.noise
    assert np.all(np.abs(found.means[order] - truth.means) < 4 * np.sqrt(variance / (2000 * truth.shares[:, None])))
    assert found.noise[order][:, :2] == pytest.approx(truth.noise[:, :2], rel=0.25), (
        "of levels with two plans; one alone tells nothing"
    )


def test_more_steps_never_make_the_tasks_less_likely_by_much() -> None:
    """The guess about spreads is a prior: without its weight the likelihood could only rise."""
    sums = LevelSums.of(drawn(300, 0.6), LEVELS)
    values = [Mixture.fitted(sums, num_steps=steps).given(sums).log_likelihood for steps in (0, 1, 3, 10, 40)]
    assert all(after > before - 1 for before, after in pairwise(values)) and values[-1] > values[0]


def test_offsets_of_plans_within_a_level() -> None:
    rng = np.random.default_rng(2)
    levels, put = np.repeat([0, 1], 4), np.array([0.05, -0.05, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    tasks = rng.random((60, 2))[:, levels] + 0.02 * rng.standard_normal((60, 8))
    assert np.abs(offsets(tasks + put, levels)[0] - put).max() < 0.02
    assert np.abs(offsets(tasks, levels)[0]).max() < 0.004, "noise alone (0.02 / sqrt(60) = 0.0026) is no offset"


def test_levels_that_were_put_in_are_found() -> None:
    rng = np.random.default_rng(3)
    levels = rng.permutation(np.repeat(np.arange(4), 6))
    tasks = 0.5 + 0.2 * rng.standard_normal((80, 4))[:, levels] + 0.03 * rng.standard_normal((80, 24))
    assert find_levels(tasks).tolist() == renumbered(levels).tolist()
    tasks[rng.random(tasks.shape) < 0.3] = np.nan
    assert len(set(find_levels(tasks).tolist())) >= 4


def test_levels_of_few_tasks_and_plans() -> None:
    assert find_levels(np.array([[0.5]])).tolist() == [0]
    assert find_levels(np.array([[0.5, 0.1, 0.3]])).tolist() == [0, 1, 2]
    assert renumbered(np.array([7, 7, 3, 9, 3])).tolist() == [0, 0, 1, 2, 1]
