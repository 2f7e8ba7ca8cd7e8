"""What no other plan beats in both memory and error, the area that it covers, and how a predicted front differs from the true one.

    convergence             mean over the predicted front of the distance to the nearest point of the true one
    hypervolume difference  |area predicted - area true|, up to memory 1 and error `top`
    regret                  error of the plan recommended within a budget, less the least there; mean over all budgets
    mean regret             the same of means over runs that differ by noise alone, recommending by predictions: luck is not counted
    rmse                    of the predictions

Memory is in parts of the most of all tasks, error in parts of top = max(1, the predicted front's largest error).

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


def undominated(memory: Array, errors: Array, *, keeps_equals: bool = True) -> Mask:
    """Which plans are on the front: no other is at most as large in both, and less in one.

    Without `keeps_equals`, as released, plans that are equal in both remove each other.
    """
    order = np.lexsort((errors, memory))
    sizes, heights = memory[order], errors[order]
    lowest = np.minimum.accumulate(heights)
    best = np.concatenate([[np.inf], lowest[:-1]])  # of those before
    is_same = np.concatenate([[False], (sizes[1:] == sizes[:-1]) & (heights[1:] == heights[:-1])])
    first = np.maximum.accumulate(np.where(is_same, 0, np.arange(len(order))))  # of its group of equals
    kept = heights < best[first]
    if not keeps_equals:
        kept &= np.bincount(first, minlength=len(order))[first] == 1
    found = np.zeros(len(order), dtype=bool)
    found[order] = kept
    return found


def hypervolume(memory: Array, errors: Array, top: float) -> float:
    """The area between the front and (memory 1, error `top`)."""
    order = np.argsort(memory, kind="stable")
    widths = np.diff(np.append(np.minimum(memory[order], 1.0), 1.0))
    return float(widths @ np.maximum(top - np.minimum.accumulate(errors[order]), 0.0))


def released_hypervolume(memory: Array, errors: Array, top: float) -> float:
    """The release's: errors are put in order and memories left as the columns are, which need not be in order."""
    return float(np.diff(np.append(memory, 1.0)) @ (top - np.sort(errors)[::-1]))


@dataclass(frozen=True)
class Scores:
    """How good one prediction is; the five are described above."""

    convergence: float
    hypervolume: float
    regret: float
    mean_regret: float
    rmse: float


@dataclass(frozen=True)
class Truth:
    """A task as it is: memory in parts of the most of all tasks, and errors, of all plans; which of them are feasible.

    `means` are the means of `errors` over runs that differ by noise alone, `errors` themselves where that is not known.
    """

    memory: Array
    errors: Array
    feasible: NDArray[np.intp]
    means: Array

    def scores(self, drawn: Array, expected: Array, predicted: Array, *, is_released: bool = False) -> Scores:
        """Those of a front drawn from `drawn`, plans recommended by `expected`, and errors `predicted`, of the feasible plans."""
        memory, errors = self.memory[self.feasible], self.errors[self.feasible]
        front = undominated(memory, drawn, keeps_equals=not is_released)
        true = undominated(self.memory, self.errors, keeps_equals=not is_released)
        top = max(1.0, float(drawn[front].max()))
        area = released_hypervolume if is_released else hypervolume
        areas = area(memory[front], drawn[front], top), area(self.memory[true], self.errors[true], top)
        here = np.stack([drawn[front] / top, memory[front]], axis=1)
        there = np.stack([self.errors[true] / top, self.memory[true]], axis=1)
        return Scores(
            convergence=distance(here, there),
            hypervolume=abs(areas[0] - areas[1]),
            regret=regret(memory, expected, errors),
            mean_regret=regret(memory, predicted, self.means[self.feasible]),
            rmse=float(np.sqrt(np.mean((predicted - errors) ** 2))),
        )


def distance(points: Array, others: Array) -> float:
    """Mean over `points` of the distance to the nearest of `others`."""
    return float(np.sqrt(((points[:, None] - others[None]) ** 2).sum(axis=-1)).min(axis=1).mean())


def regret(memory: Array, expected: Array, errors: Array) -> float:
    """Mean over all budgets that make a difference of what recommending by `expected` loses."""
    lost: list[float] = []
    for budget in np.unique(memory):
        fits = np.flatnonzero(memory <= budget)
        lost.append(float(errors[fits[np.argmin(expected[fits])]] - errors[fits].min()))
    return float(np.mean(lost))
