"""Seed effects: what a seed does to all plans of a task. Runs of one seed share their initial weights and the order of their examples.

    run of plan j with seed s = mean of plan j + effect of seed s + rest,        effects ~ N(0, t^2),  rest ~ N(0, r^2)

Without a correction, plans that ran with different seeds differ by luck. With Z the seeds of the runs, M the projection that
removes the mean of each plan's runs, and A = Z' M Z, t^2 and r^2 follow from the sums of squares that seeds explain and leave
(Henderson's method 3; plans may have different seeds, and with all seeds for all plans it is the analysis of variance of a table):

    q = runs' M Z A^+ Z' M runs,    E q = trace(A) t^2 + rank(A) r^2,    E (runs' M runs - q) = (runs - plans - rank(A)) r^2

The best linear prediction of the effects, whatever the plans' means, with ratio = t^2 / r^2:

    effects = C Z' M runs,    C = (A + 1 / ratio)^-1,    covariance of their errors = r^2 C

The index of a run among its plan's is its seed; NaN where there is none. Plans with a run that diverged are left out of the
estimate, since divergence is no additive effect. Such runs are unmodified, and the other runs of their seeds are corrected like
those of other plans.

>>> runs = np.array([[[0.30, 0.40], [0.33, 0.42], [0.31, np.nan]]])
>>> without_seed_effects(runs).round(2).tolist()
[[[0.35, 0.35], [0.38, 0.37], [0.36, nan]]]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paredown.study.pick.task_prior import WORST, scaled
from paredown.study.priors.prior_data import PriorData, random_guess_error

Array = NDArray[np.float64]
SMALLEST = 1e-12  # variance
MOST = 1e4  # largest ratio


class SeedSquares(NamedTuple):
    """Sums of squares of one task's runs: those that seeds explain, and the rest, with their degrees of freedom.

    `lifts`: trace(A), by which t^2 enters the first sum.
    """

    seeds: float
    rest: float
    free_seeds: int
    free_rest: int
    lifts: float


class VarianceParts(NamedTuple):
    """Variances of seed effects (`shared`) and of the rest; NaN where fewer than two plans ran with the same two seeds."""

    shared: float
    rest: float

    @property
    def ratio(self) -> float:
        """Variance of seed effects over that of the rest; 0 where they are not known."""
        return min(self.shared / max(self.rest, SMALLEST), MOST) if self.shared > 0 else 0.0


class SeedRun(NamedTuple):
    """The error of a plan with a seed."""

    plan: int
    error: float
    seed: int = 0


class SeedEffects(NamedTuple):
    """Effect of each seed, `size` (seeds,), and covariance of its error, `doubt` (seeds, seeds), in variances of the rest."""

    size: Array
    doubt: Array


def variance_parts_of(runs: Array) -> VarianceParts:
    """Variances of seed effects and of the rest, from one task's runs (plans, seeds)."""
    squares = squares_of(runs)
    if not squares.free_seeds or not squares.free_rest:
        return VarianceParts(np.nan, np.nan)
    rest = squares.rest / squares.free_rest
    return VarianceParts(max(0.0, (squares.seeds - squares.free_seeds * rest) / squares.lifts), rest)


def squares_of(runs: Array) -> SeedSquares:
    """Sums of squares of one task's runs (plans, seeds) between and within seeds; only plans that ran more than once count."""
    repeated = runs[np.isfinite(runs).sum(axis=1) > 1]
    is_run = np.isfinite(repeated)
    sizes = is_run.sum(axis=1, keepdims=True)
    residual = np.where(is_run, repeated - np.where(is_run, repeated, 0.0).sum(axis=1, keepdims=True) / np.maximum(sizes, 1), 0.0)
    inner = np.diag(is_run.sum(axis=0)) - (is_run / sizes).T @ is_run  # A
    rank, sums = int(np.linalg.matrix_rank(inner, tol=1e-9 * max(1.0, float(np.abs(inner).max(initial=0.0))))), residual.sum(axis=0)
    explained = float(sums @ np.linalg.pinv(inner, rcond=1e-9, hermitian=True) @ sums)
    return SeedSquares(
        explained,
        max(0.0, float((residual**2).sum()) - explained),
        rank,
        int(is_run.sum()) - len(repeated) - rank,
        float(np.trace(inner)),
    )


def seed_effects_of(runs: Sequence[SeedRun], ratio: float, num_seeds: int) -> SeedEffects:
    """Effects of the seeds 0 .. num_seeds - 1 of one task, for a known ratio of variances."""
    if ratio <= 0 or not runs:
        return SeedEffects(np.zeros(num_seeds), np.zeros((num_seeds, num_seeds)))
    plans, errors, seeds = (np.array(part) for part in zip(*runs, strict=True))
    names, plan_index = np.unique(plans, return_inverse=True)
    counts = np.zeros((len(names), num_seeds))
    np.add.at(counts, (plan_index, seeds), 1.0)
    sizes = counts.sum(axis=1)
    residual = errors - (np.bincount(plan_index, errors) / sizes)[plan_index]
    inner = np.diag(counts.sum(axis=0)) - (counts / sizes[:, None]).T @ counts  # Z' M Z
    doubt: Array = np.linalg.inv(inner + np.eye(num_seeds) / ratio)
    return SeedEffects(doubt @ np.bincount(seeds, residual, num_seeds), doubt)


def without_seed_effects(runs: Array, calm: NDArray[np.bool_] | None = None) -> Array:
    """Runs (tasks, plans, seeds) without seed effects; runs of a task whose seed effects cannot be estimated are unmodified.

    `calm`: which (tasks, plans) the effects are estimated from; all unless given.
    """
    usable = runs if calm is None else np.where(calm[..., None], runs, np.nan)
    effects, ratios = np.zeros((len(runs), 1, runs.shape[2])), [variance_parts_of(task).ratio for task in usable]
    for row in np.flatnonzero(ratios):
        effects[row, 0] = seed_effects_of(runs_of_task(usable[row]), ratios[row], runs.shape[2]).size
    return runs - effects


def runs_of_task(runs: Array) -> list[SeedRun]:
    """The runs of one task (plans, seeds) as a list."""
    return [
        SeedRun(int(plan), float(runs[plan, seed]), int(seed)) for plan, seed in zip(*np.nonzero(np.isfinite(runs)), strict=True)
    ]


def is_calm(prior_data: PriorData) -> NDArray[np.bool_]:
    """Which (tasks, plans) show noise and seed effects: no run diverged or was as bad as random guessing."""
    # in a metric without an error of random guessing, WORST is only the worst run
    guesses = [task.blind or random_guess_error(task.metric, task.answers) for task in prior_data.tasks]
    is_guessing = (scaled(prior_data) >= WORST).any(axis=2) & np.array([bool(guess) for guess in guesses])[:, None]
    return ~is_guessing & (prior_data.diverged == 0)
