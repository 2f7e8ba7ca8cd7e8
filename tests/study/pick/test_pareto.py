"""Fronts by comparing all pairs, areas by counting cells, regret by trying every budget."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paredown.study.papers.peppp_cross_validation import Truth, hypervolume, regret, released_front
from paredown.study.pick.pareto import undominated

POINTS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=12)


def arrays(points: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([p[0] for p in points]) / 7, np.array([p[1] for p in points]) / 7


@given(POINTS)
def test_the_front_by_all_pairs(points: list[tuple[int, int]]) -> None:
    beats = [[a[0] <= b[0] and a[1] <= b[1] and a != b for a in points] for b in points]
    assert undominated(*arrays(points)).tolist() == [not any(row) for row in beats]
    others = [[i != j and a[0] <= b[0] and a[1] <= b[1] for i, a in enumerate(points)] for j, b in enumerate(points)]
    assert released_front(*arrays(points)).tolist() == [not any(row) for row in others]


@given(POINTS)
def test_the_area_by_counting_cells(points: list[tuple[int, int]]) -> None:
    covered = sum(any(x <= i and y <= j for x, y in points) for i in range(7) for j in range(7))
    memory, errors = arrays(points)
    assert hypervolume(memory, errors, 1.0) == pytest.approx(covered / 49)
    front = undominated(memory, errors)
    assert hypervolume(memory[front], errors[front], 1.0) == pytest.approx(covered / 49), "only the front matters"


def test_scores_by_hand() -> None:
    memory, errors = np.array([0.2, 0.4, 1.0]), np.array([0.8, 0.5, 0.4])
    truth = Truth(memory, errors, np.arange(3), errors)
    perfect = truth.scores(errors, errors, errors)
    assert (perfect.convergence, perfect.hypervolume, perfect.regret, perfect.mean_regret, perfect.rmse) == (0, 0, 0, 0, 0)
    wrong = np.array([0.3, 0.5, 0.4])  # the first is taken for the best of all
    found = truth.scores(wrong, wrong, wrong)
    assert found.regret == found.mean_regret == pytest.approx((0 + 0.3 + 0.4) / 3)
    assert found.rmse == pytest.approx(0.5 / np.sqrt(3))
    assert found.convergence == pytest.approx(np.hypot(0.2, 0.2)), "from (0.2, 0.3) the nearest is (0.4, 0.5)"
    assert found.hypervolume == pytest.approx(0.8 * 0.7 - (0.2 * 0.2 + 0.6 * 0.5))


def test_regret_counts_each_budget_once() -> None:
    memory, errors = np.array([1.0, 1.0, 2.0]), np.array([0.5, 0.3, 0.2])
    assert regret(memory, np.array([0.1, 0.2, 0.3]), errors) == pytest.approx((0.2 + 0.3) / 2)


TIMED = st.lists(
    st.tuples(*(st.integers(0, 3) for _ in range(2)), st.sampled_from([1.0, 1.01, 1.1, 2.0, np.nan])), min_size=1, max_size=12
)


def is_as_quick(a: float, b: float) -> bool:
    """Whether nothing says that a plan of time `a` is slower than one of time `b`."""
    return bool(np.isnan(b)) or a <= 1.02 * b


@given(TIMED)
def test_fronts_with_times_by_all_pairs(rows: list[tuple[int, int, float]]) -> None:
    memory, errors, times = np.array(rows, dtype=float).T

    def beats(a: int, b: int) -> bool:
        smaller = memory[a] < memory[b] or errors[a] < errors[b]
        return smaller and memory[a] <= memory[b] and errors[a] <= errors[b] and is_as_quick(times[a], times[b])

    expected = [not any(beats(a, b) for a in range(len(rows))) for b in range(len(rows))]
    assert undominated(memory, errors, times).tolist() == expected
    unknown = np.full(len(rows), np.nan)
    np.testing.assert_array_equal(undominated(memory, errors, unknown), undominated(memory, errors))
