"""Pareto front of memory and error, the area that it dominates, and scores of a predicted front against the true one.

    convergence             mean over the predicted front of the distance to the nearest point of the true front
    hypervolume difference  |predicted area - true area|, up to memory 1 and error `top`
    regret                  error of the plan recommended within a budget, less the least error there; mean over all budgets
    mean regret             the same with means over runs that differ by noise alone, recommended by prediction: luck is not counted
    rmse                    root mean squared error of the predictions

Memory is relative to the largest of all tasks, error relative to top = max(1, the predicted front's largest error).

>>> memory, errors = np.array([0.2, 0.4, 0.4, 0.8]), np.array([0.9, 0.5, 0.7, 0.6])
>>> undominated(memory, errors).tolist()
[True, True, False, False]
>>> round(hypervolume(memory[:2], errors[:2], 1.0), 3)  # 0.2 wide and 0.1 high, 0.6 wide and 0.5 high
0.32
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
SAME_TIME = 0.02  # step times that differ by this share at most are equal


def undominated(memory: Array, errors: Array, *, keeps_equals: bool = True) -> Mask:
    """Which plans are on the Pareto front: no other plan is at most as large in both memory and error, and smaller in one.

    Without `keeps_equals`, as in PEPPP's released code, plans that are equal in both remove each other.
    """
    order = np.lexsort((errors, memory))
    sizes, heights = memory[order], errors[order]
    lowest = np.minimum.accumulate(heights)
    lowest_before = np.concatenate([[np.inf], lowest[:-1]])
    is_same = np.concatenate([[False], (sizes[1:] == sizes[:-1]) & (heights[1:] == heights[:-1])])
    first_of_equals = np.maximum.accumulate(np.where(is_same, 0, np.arange(len(order))))
    kept_in_order = heights < lowest_before[first_of_equals]
    if not keeps_equals:
        kept_in_order &= np.bincount(first_of_equals, minlength=len(order))[first_of_equals] == 1
    is_on_front = np.zeros(len(order), dtype=bool)
    is_on_front[order] = kept_in_order
    return is_on_front


def undominated_with_times(memory: Array, errors: Array, times: Array) -> Mask:
    """Which plans are on the Pareto front of memory, error and step time; NaN: a time that is not known.

    A plan with a known time is dominated only by one whose time is known, and longer by SAME_TIME at most. Where a time is unknown, memory
    and error decide.

    >>> undominated_with_times(np.array([1.0, 1, 1]), np.array([0.1, 0.2, 0.2]), np.array([1.3, 1.1, np.nan])).tolist()
    [True, True, False]
    """
    is_at_most = (memory[:, None] <= memory) & (errors[:, None] <= errors)  # (a, b): a is at most as large as b
    is_below = (memory[:, None] < memory) | (errors[:, None] < errors)
    is_as_quick = np.isnan(times) | (times[:, None] <= (1 + SAME_TIME) * times)  # False where only the time of a is unknown
    return np.asarray(~(is_at_most & is_below & is_as_quick).any(axis=0))


def quickest_of_ties(memory: Array, errors: Array, times: Array, tolerance: float) -> int:
    """The quickest plan whose error is at most `tolerance` above the least; the plan of least error where its time is not known (NaN).

    Times that differ by SAME_TIME at most are equal, and then the least error decides, then the least memory.

    >>> errors, times = np.array([0.10, 0.11, 0.11, 0.20]), np.array([1.30, 1.10, 1.09, 1.0])
    >>> [quickest_of_ties(np.arange(4.0), errors, times, tolerance) for tolerance in (0.0, 0.02)]
    [0, 1]
    """
    least = int(np.lexsort((memory, errors))[0])
    if np.isnan(times[least]):
        return least
    tied = np.flatnonzero((errors <= errors[least] + tolerance) & np.isfinite(times))
    tied = tied[times[tied] <= (1 + SAME_TIME) * times[tied].min()]
    return int(tied[np.lexsort((memory[tied], errors[tied]))[0]])


def hypervolume(memory: Array, errors: Array, top: float) -> float:
    """The area between the front and (memory 1, error `top`)."""
    order = np.argsort(memory, kind="stable")
    widths = np.diff(np.append(np.minimum(memory[order], 1.0), 1.0))
    return float(widths @ np.maximum(top - np.minimum.accumulate(errors[order]), 0.0))


def released_hypervolume(memory: Array, errors: Array, top: float) -> float:
    """As in PEPPP's released code: errors are sorted, while memories keep the order of the columns."""
    return float(np.diff(np.append(memory, 1.0)) @ (top - np.sort(errors)[::-1]))


@dataclass(frozen=True)
class Scores:
    """The five scores of one prediction; the head of this file defines them."""

    convergence: float
    hypervolume: float
    regret: float
    mean_regret: float
    rmse: float


@dataclass(frozen=True)
class Truth:
    """What predictions for one task are compared with: memory of all plans, relative to the largest of all tasks, and their true errors.

    `feasible`: indices of allowed plans. `means`: means of `errors` over runs that differ by noise alone, or `errors` where not known.
    """

    memory: Array
    errors: Array
    feasible: NDArray[np.intp]
    means: Array

    def scores(self, drawn: Array, expected: Array, predicted: Array, *, is_released: bool = False) -> Scores:
        """Scores of a front from the errors `drawn`, recommendations by `expected`, and errors `predicted`, of feasible plans."""
        memory, errors = self.memory[self.feasible], self.errors[self.feasible]
        front = undominated(memory, drawn, keeps_equals=not is_released)
        true_front = undominated(self.memory, self.errors, keeps_equals=not is_released)
        top = max(1.0, float(drawn[front].max()))
        area = released_hypervolume if is_released else hypervolume
        areas = area(memory[front], drawn[front], top), area(self.memory[true_front], self.errors[true_front], top)
        predicted_points = np.stack([drawn[front] / top, memory[front]], axis=1)
        true_points = np.stack([self.errors[true_front] / top, self.memory[true_front]], axis=1)
        return Scores(
            convergence=distance(predicted_points, true_points),
            hypervolume=abs(areas[0] - areas[1]),
            regret=regret(memory, expected, errors),
            mean_regret=regret(memory, predicted, self.means[self.feasible]),
            rmse=float(np.sqrt(np.mean((predicted - errors) ** 2))),
        )


def distance(points: Array, others: Array) -> float:
    """Mean over `points` of the distance to the nearest of `others`."""
    return float(np.sqrt(((points[:, None] - others[None]) ** 2).sum(axis=-1)).min(axis=1).mean())


def regret(memory: Array, expected: Array, errors: Array) -> float:
    """Mean, over all budgets at which the feasible plans change, of the excess error when recommending by `expected`."""
    lost: list[float] = []
    for budget in np.unique(memory):
        fits = np.flatnonzero(memory <= budget)
        lost.append(float(errors[fits[np.argmin(expected[fits])]] - errors[fits].min()))
    return float(np.mean(lost))
