"""What a seed does to all plans of a task: runs of one seed share their first weights and the order of their examples.

    run of plan j with seed s = mean of plan j + lift of seed s + rest,        lifts ~ N(0, t^2),  rest ~ N(0, r^2)

Plans that ran with different seeds differ by luck that has nothing to do with them. t^2 and r^2 follow from the plans that ran with every
seed, by analysis of variance; then lifts are what they are expected to be, whatever the plans' means (best linear prediction), with
ratio = t^2 / r^2, Z the seeds of the runs, and M what takes off the mean of each plan's runs:

    lifts = C Z' M runs,    C = (Z' M Z + 1 / ratio)^-1,    variance of what is left of them = r^2 C

The place of a run among its plan's is its seed; NaN where there is none.

>>> runs = np.array([[[0.30, 0.40], [0.33, 0.42], [0.31, np.nan]]])
>>> levelled(runs).round(2).tolist()
[[[0.35, 0.35], [0.38, 0.37], [0.36, nan]]]
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
SMALLEST = 1e-12  # variance
MOST = 1e4  # that the ratio may be


class Parts(NamedTuple):
    """Variances of lifts and of the rest; NaN where fewer than two plans ran with the same two seeds."""

    shared: float
    rest: float

    @property
    def ratio(self) -> float:
        """Of the two; 0 where they are not known."""
        return min(self.shared / max(self.rest, SMALLEST), MOST) if self.shared > 0 else 0.0


class Lifts(NamedTuple):
    """Of each seed: what it adds to all runs, and what is left open of that (seeds, seeds), in variances of the rest."""

    size: Array
    doubt: Array

    def doubt_beside(self, seed: int) -> Array:
        """How uncertain it is what runs of each seed have beside those of this one."""
        own = np.diagonal(self.doubt)
        return own + own[seed] - 2 * self.doubt[seed]


def parts_of(runs: Array) -> Parts:
    """Of one task's runs (plans, seeds), by the plans that ran with every seed that any plan ran with twice."""
    seen = np.isfinite(runs)
    seeds = seen[seen.sum(axis=1) > 1].any(axis=0)
    whole = runs[:, seeds][seen[:, seeds].all(axis=1)]
    num_plans, num_seeds = whole.shape
    if num_plans < 2 or num_seeds < 2:
        return Parts(np.nan, np.nan)
    apart = whole - whole.mean(axis=1, keepdims=True)
    lifts = apart.mean(axis=0)
    rest = float(((apart - lifts) ** 2).sum() / ((num_plans - 1) * (num_seeds - 1)))
    return Parts(max(0.0, float((lifts**2).sum() / (num_seeds - 1)) - rest / num_plans), rest)


def lifts_of(runs: Array, ratio: float) -> Lifts:
    """Of one task's runs (plans, seeds)."""
    num_seeds = runs.shape[1]
    if ratio <= 0:
        return Lifts(np.zeros(num_seeds), np.zeros((num_seeds, num_seeds)))
    seen = np.isfinite(runs).astype(float)
    counts = np.maximum(seen.sum(axis=1, keepdims=True), 1.0)
    filled = np.where(seen > 0, runs, 0.0)
    apart = np.where(seen > 0, runs - filled.sum(axis=1, keepdims=True) / counts, 0.0)
    inner = np.diag(seen.sum(axis=0)) - (seen / counts).T @ seen  # Z' M Z
    doubt: Array = np.linalg.inv(inner + np.eye(num_seeds) / ratio)
    return Lifts(doubt @ apart.sum(axis=0), doubt)


def levelled(runs: Array) -> Array:
    """Runs (tasks, plans, seeds) without the lifts of their seeds; those of a task that tells nothing of them stay as they are."""
    lifts = [lifts_of(task, parts_of(task).ratio).size for task in runs]
    return runs - np.reshape(lifts, (len(runs), 1, runs.shape[2]))
