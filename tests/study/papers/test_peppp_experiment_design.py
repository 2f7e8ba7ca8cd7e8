"""Designs by brute force, expected improvement by integration, and the process by conditioning the joint normal."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from paredown.study.papers.peppp_experiment_design import (
    Process,
    _negative_log_likelihood,
    embed,
    expected_improvement,
    optimal,
    pivoted,
    predict,
    relaxed,
    scattered,
    squared_distances,
)

RNG = np.random.default_rng(0)
VECTORS = np.linalg.qr(RNG.standard_normal((14, 3)))[0].T


def log_det(chosen: list[int]) -> float:
    return float(np.linalg.slogdet(VECTORS[:, chosen] @ VECTORS[:, chosen].T)[1])


def test_each_greedy_step_is_the_best_one() -> None:
    chosen = optimal(VECTORS, 8)
    assert chosen[:3] == pivoted(VECTORS, 3) and len(set(chosen)) == 8
    for count in range(3, 8):
        others = [log_det([*chosen[:count], plan]) for plan in range(14) if plan not in chosen[:count]]
        assert log_det(chosen[: count + 1]) == pytest.approx(max(others))


def test_the_relaxation_is_close_to_the_best_of_all() -> None:
    best = max(log_det(list(chosen)) for chosen in combinations(range(14), 5))
    top = best + 1e-12  # the same columns in another order differ in the last digit
    assert top >= log_det(relaxed(VECTORS, 5)) >= best - 0.5
    assert top >= log_det(optimal(VECTORS, 5)) >= best - 0.5
    assert log_det(scattered(14, 5, seed=1)) < best - 0.5, "the bound can fail"


def test_more_than_there_are() -> None:
    assert sorted(optimal(VECTORS, 99)) == sorted(relaxed(VECTORS, 99)) == sorted(scattered(14, 99, seed=3)) == list(range(14))


def test_embedding_predicts_what_it_spans() -> None:
    tasks = RNG.random((20, 3)) @ RNG.random((3, 9))
    vectors = embed(tasks, rank=3)
    assert np.allclose(vectors @ vectors.T, np.eye(3))
    assert np.allclose(predict(vectors, [0, 4, 7], tasks[5, [0, 4, 7]]), tasks[5])


def test_expected_improvement_is_an_integral() -> None:
    grid = np.linspace(-12, 12, 200_001)
    density = np.exp(-(grid**2) / 2) / np.sqrt(2 * np.pi)
    for mean, deviation in ((0.3, 0.2), (0.6, 0.05), (0.5, 1.0)):
        gain = np.maximum(0.5 - 0.01 - (mean + deviation * grid), 0)
        found = expected_improvement(np.array([mean]), np.array([deviation]), 0.5)[0]
        assert found == pytest.approx(np.trapezoid(gain * density, grid), abs=1e-8)


def test_the_process_conditions_a_joint_normal() -> None:
    points, chosen, measured = RNG.standard_normal((6, 2)), [0, 3, 5], np.array([0.4, 0.9, 0.1])
    joint = np.exp(-squared_distances(points) / (2 * 1.5**2)) + 0.3 * np.eye(6)
    inside = joint[np.ix_(chosen, chosen)] + 1e-10 * np.eye(3)
    mean, deviation = Process(squared_distances(points), chosen, measured, 1.5, 0.3).predict()
    for plan in (1, 2, 4):
        weights = np.linalg.solve(inside, joint[chosen, plan])
        assert mean[plan] == pytest.approx(weights @ measured)
        assert deviation[plan] ** 2 == pytest.approx(joint[plan, plan] - weights @ joint[chosen, plan])


def test_the_slope_of_the_likelihood() -> None:
    squares, measured, at = squared_distances(RNG.standard_normal((7, 2))), RNG.random(7), np.array([0.3, -1.0])
    slope = _negative_log_likelihood(at, squares, measured)[1]
    for axis in range(2):
        aside = 1e-6 * np.eye(2)[axis]
        up, down = (_negative_log_likelihood(at + sign * aside, squares, measured)[0] for sign in (1, -1))
        assert slope[axis] == pytest.approx((up - down) / 2e-6, rel=1e-5)
