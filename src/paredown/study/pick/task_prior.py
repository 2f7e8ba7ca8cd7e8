"""Fit the prior of a new task's errors to the data of prior tasks, and extend it to plans that no prior task was trained under.

Units: errors are relative to random guessing, and at most 1 (docs/decisions/019). So the share of wrong answers among 10, among
100, and the loss of a text are comparable, and a run that diverged is 1.

>>> from paredown.study.priors.prior_files import made_up_prior
>>> task_prior = TaskPrior.of(made_up_prior())
>>> task_prior.prior.gaussian.num_tasks, len(task_prior.prior.levels)
(11.0, 30)
>>> random_guess_error("error", 10), round(random_guess_error("loss", 256), 2), random_guess_error("mine", 10)
(0.9, 5.55, None)

A plan that no prior task was trained under is predicted from similar plans: on a task, the error of a plan is a smooth function of
its features (study/pick/candidates.py), a Gaussian process about an unknown mean. So the error of a new plan is a weighted mean of those
of known levels (the weights add up to 1) plus a rest, whose covariance the process gives:

    a_new = W a + rest,      rest ~ N(0, C)

C is scaled so that 90 % of the levels, each predicted from the others, lie within their 90 % intervals. The extension of the prior is
exact: trials of new plans inform known ones, and the other way round.

>>> points = np.linspace(0, 6, 7)[:, None]
>>> tasks = np.random.default_rng(0).random((20, 1)) * np.exp(points.T / 3)
>>> weights, _ = predicting_weights(points, np.array([[2.5]]), tasks)
>>> bool(abs(weights @ np.exp(points[:, 0] / 3) - np.exp(2.5 / 3)) < 0.05), round(float(weights.sum()), 6)
(True, 1.0)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from paredown.errors import PriorError
from paredown.study.pick.posterior import Gaussian, LevelSums, Prior
from paredown.study.priors.prior_data import PriorData, random_guess_error

Array = NDArray[np.float64]
LENGTH = 2.5  # length scale of `likeness`, in bits of precision lost
NUGGET = 0.01  # variance that features do not explain, relative to the explained one
Z_90 = 1.645  # standard deviations to each side of a 90 % interval
WORST = 1.0  # random guessing


@dataclass(frozen=True)
class TaskPrior:
    """The distribution of a new task's errors, fitted to earlier tasks. A level is a group of plans that differ by noise alone."""

    prior_data: PriorData
    prior: Prior
    errors: Array

    @staticmethod
    def of(prior_data: PriorData) -> TaskPrior:
        """Return the distribution of a new task's errors, fitted to the errors of all tasks of `prior_data`."""
        has_diverged = prior_data.diverged > 0  # how likely that is counts apart from the errors of plans that train
        runs = np.where(has_diverged[..., None], np.nan, scaled(prior_data))  # (tasks, plans, seeds)
        if not np.isfinite(runs).any():
            size = f"{len(prior_data.tasks)} tasks, {len(prior_data.plans)} plans"
            raise PriorError(f"prior {prior_data.name!r} has no error in it: {size}.")
        names = [plan.level or f"\0{i}" for i, plan in enumerate(prior_data.plans)]
        levels = np.unique(names, return_inverse=True)[1]
        sums = LevelSums.of(runs.reshape(len(runs), -1), np.repeat(levels, runs.shape[2]), data_set_weights(prior_data))
        gaussian = Gaussian.fitted(sums)
        divergence = has_diverged.sum(axis=0) / (1.0 + (prior_data.counts > 0).sum(axis=0))
        errors = np.where(sums.count > 0, sums.total / np.maximum(sums.count, 1), np.nan)
        return TaskPrior(prior_data, Prior(levels, gaussian, WORST, divergence), errors)

    def covering(self, columns: NDArray[np.intp], features: Array, points: Array) -> Prior:
        """Return the distribution of a new task's errors under candidate plans, also those that no prior task was trained under.

        `columns` are the columns of the candidates in the prior data, -1 for plans that it does not have. `features` are the features of
        the candidates, `points` those of all plans of the prior (NaN: unknown), from which plans without a column are predicted.
        """
        prior, is_new = self.prior, columns < 0
        levels = np.where(is_new, 0, prior.levels[columns])
        nearest = (likeness(features, points) * prior.divergence).max(axis=1, initial=0.0)
        prior = replace(prior, divergence=np.where(is_new, nearest, prior.divergence[columns]), levels=levels)
        if not is_new.any():
            return prior
        levels[is_new] = len(prior.gaussian.mean) + np.arange(int(is_new.sum()))
        return replace(prior, gaussian=self._extended(features[is_new], points))

    def _extended(self, new: Array, points: Array) -> Gaussian:
        """Return the prior with more plans, predicted from their features `new` and from `points`, those of the prior's plans."""
        gaussian, levels, is_known = self.prior.gaussian, self.prior.levels, np.isfinite(points).all(axis=1)
        known = np.unique(levels[is_known])
        if not len(known):
            raise PriorError(
                f"none of the {len(points)} plans of prior {self.prior_data.name!r} has features, which are needed to predict other plans."
            )
        level_points = np.array([points[is_known & (levels == level)].mean(axis=0) for level in known])
        weights = np.zeros((len(new), len(gaussian.mean)))
        weights[:, known], rest = predicting_weights(level_points, new, self.errors[:, known])
        whole = np.vstack([np.eye(len(gaussian.mean)), weights])  # (levels and new ones, levels)
        covariance = whole @ gaussian.covariance @ whole.T
        covariance[len(gaussian.mean) :, len(gaussian.mean) :] += rest
        ratios = np.append(gaussian.noise_ratios, np.full(len(new), np.median(gaussian.noise_ratios)))
        return replace(gaussian, mean=whole @ gaussian.mean, covariance=covariance, noise_ratios=ratios)


def scaled(prior_data: PriorData) -> Array:
    """Return the errors of all runs (tasks, plans, seeds) divided by that of random guessing, or by the task's worst; at most WORST."""
    runs = np.where(np.isfinite(prior_data.runs), prior_data.runs, np.nan)
    worst = np.where(np.isfinite(runs), runs, 0.0).max(axis=(1, 2), initial=0.0)
    guesses = [task.blind or random_guess_error(task.metric, task.answers) for task in prior_data.tasks]
    scales = np.array([guess if guess and guess > 0 else error or 1.0 for guess, error in zip(guesses, worst, strict=True)])
    return np.minimum(runs / scales[:, None, None], WORST)


def data_set_weights(prior_data: PriorData) -> Array:
    """Return the weight of each task in the fit of a prior; tasks on parts of one data set count as one together."""
    names = [(task.data.partition("/")[0], task.family) if "/" in task.data else task.name for task in prior_data.tasks]
    return np.array([1 / names.count(name) for name in names])


def predicting_weights(points: Array, new: Array, tasks: Array) -> tuple[Array, Array]:
    """Return the weights of known plans' errors in the prediction of new plans' errors, and the covariance of the prediction's error.

    `new` are the features of the new plans, `points` those of the levels. `tasks` (tasks, levels) are errors of the levels, NaN where not
    observed: each level is predicted from the others to scale the covariance.
    """
    size = len(points)
    system = np.ones((size + 1, size + 1))  # the last row makes the weights add up to 1
    system[:size, :size] = likeness(points, points) + NUGGET * np.eye(size)
    system[size, size] = 0.0
    inverse = np.linalg.pinv(system)
    is_known = np.isfinite(tasks)
    means = np.where(is_known, tasks, 0.0).sum(axis=1, keepdims=True) / np.maximum(is_known.sum(axis=1, keepdims=True), 1)
    tasks = np.where(is_known, tasks, means)
    precision = np.maximum(np.diagonal(inverse)[:size], 1e-12)
    ratios = np.abs(tasks @ inverse[:size, :size])[is_known] / np.sqrt(np.broadcast_to(precision, tasks.shape)[is_known])
    scale = (float(np.quantile(ratios, 0.9)) / Z_90) ** 2 if ratios.size else 1.0
    covariance = np.column_stack([likeness(new, points), np.ones(len(new))])
    solved = covariance @ inverse
    rest = likeness(new, new) + NUGGET * np.eye(len(new)) - solved @ covariance.T
    return solved[:, :size], scale * (rest + rest.T) / 2


def likeness(a: Array, b: Array) -> Array:
    """Return the correlation of the errors of plans with features `a` and `b` (plans, features); 0 if features are unknown (NaN)."""
    squares = (((a[:, None] - b[None]) / LENGTH) ** 2).sum(axis=-1)
    return np.exp(-0.5 * np.where(np.isfinite(squares), squares, np.inf))
