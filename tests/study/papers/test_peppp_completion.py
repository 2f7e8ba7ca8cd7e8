"""Completion: stationary by a whole decomposition, right on what is low-rank, weighted, and a sentence where there is nothing."""

from __future__ import annotations

import numpy as np
import pytest

from paredown.errors import PlanError
from paredown.study.papers.peppp_completion import complete


def low_rank(num_tasks: int, num_plans: int, rank: int = 2, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    product = rng.random((num_tasks, rank)) @ rng.random((rank, num_plans))
    return 0.9 * product / product.max()


def with_gaps(matrix: np.ndarray, share: float, seed: int = 1) -> np.ndarray:
    return np.where(np.random.default_rng(seed).random(matrix.shape) < share, matrix, np.nan)


def step(at: np.ndarray, gaps: np.ndarray, weights: np.ndarray, rank: int, penalty: float) -> np.ndarray:
    """One step of the definition: gradient, shrink, clip."""
    length = 1 / weights.max()
    moved = at - length * weights * np.where(np.isnan(gaps), 0.0, at - gaps)
    left, values, right = np.linalg.svd(moved, full_matrices=False)
    return np.clip((left[:, :rank] * np.maximum(values[:rank] - penalty * length, 0)) @ right[:rank], 0, 1)


@pytest.mark.parametrize("is_weighted", [False, True])
def test_the_answer_stays_where_it_is(is_weighted: bool) -> None:
    gaps = with_gaps(low_rank(40, 50), 0.5)
    propensities = np.random.default_rng(2).uniform(0.1, 1.0, gaps.shape) if is_weighted else None
    weights = np.where(np.isnan(gaps), 0.0, 1.0 if propensities is None else 1 / propensities)
    found = complete(gaps, propensities=propensities, rank=5)
    assert found.is_converged
    moved = step(found.values, gaps, weights, 5, 0.1)
    assert np.linalg.norm(moved - found.values) / np.linalg.norm(found.values) < 1e-5


def test_low_rank_matrices_come_back() -> None:
    whole = low_rank(60, 50)
    found = complete(with_gaps(whole, 0.4), rank=2, penalty=1e-3)
    assert found.is_converged and np.abs(found.values - whole).max() < 0.01


def test_weights_undo_looking_at_cheap_plans_first() -> None:
    """Two plans of which the second is looked at rarely: without weights the pull of its few numbers is weaker."""
    rng = np.random.default_rng(3)
    whole = np.column_stack([np.full(400, 0.2), np.full(400, 0.8)])
    propensities = np.broadcast_to([1.0, 0.02], whole.shape)
    gaps = np.where(rng.random(whole.shape) < propensities, whole, np.nan)
    plain, weighted = (
        complete(gaps, propensities=given, rank=1, penalty=3.0).values[:, 1].mean() for given in (None, propensities)
    )
    assert abs(weighted - 0.8) < abs(plain - 0.8)


def test_no_numbers_and_impossible_propensities_are_sentences() -> None:
    with pytest.raises(PlanError, match=r"\(2, 3\) without any"):
        complete(np.full((2, 3), np.nan))
    with pytest.raises(PlanError, match="propensity that is not above 0"):
        complete(np.ones((2, 2)), propensities=np.zeros((2, 2)))


def test_fewer_numbers_than_the_rank() -> None:
    gaps = np.full((4, 3), np.nan)
    gaps[1, 2] = 0.5
    found = complete(gaps, rank=5)
    assert found.is_converged and np.isfinite(found.values).all()
    assert found.values[1, 2] == pytest.approx(0.4), "the penalty of 0.1 is what the one singular value loses"


def test_large_matrices_are_not_decomposed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = low_rank(400, 300)
    expected = complete(whole).values
    monkeypatch.setattr(np.linalg, "svd", None)
    assert np.abs(complete(whole).values - expected).max() < 1e-4
