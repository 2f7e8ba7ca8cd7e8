"""Leave-one-task-out cross-validation of pickers: every task of a matrix in turn is the new one, and the others are the prior.

Settings of the PEPPP paper, by which entries of the prior tasks are observed, and whether memory has a cap (the median of all):

    I full   II full, cap   III 20 % at random   IV 20 % at random, cap   V cheap plans first   VI cheap plans first, cap

A picker sees of the new task only what it measures. `V leaky` and `VI leaky` are as in PEPPP's released code: the new task's row is
sampled and completed among the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from paredown.errors import BudgetError, PlanError
from paredown.papers.peppp_completion import complete
from paredown.papers.peppp_experiment_design import Picker, TaskKnowledge
from paredown.pick.pareto import Scores, Truth

Array = NDArray[np.float64]
SHARE = 0.2  # of entries that are observed, or the largest propensity of one


@dataclass(frozen=True)
class CrossValidationSetting:
    """Which entries of the prior tasks are observed, and whether memory has a cap."""

    sampling: str
    has_cap: bool
    is_leaky: bool = False


SETTINGS: Mapping[str, CrossValidationSetting] = MappingProxyType(
    {
        "I": CrossValidationSetting("full", has_cap=False),
        "II": CrossValidationSetting("full", has_cap=True),
        "III": CrossValidationSetting("uniform", has_cap=False),
        "IV": CrossValidationSetting("uniform", has_cap=True),
        "V": CrossValidationSetting("cheap", has_cap=False),
        "VI": CrossValidationSetting("cheap", has_cap=True),
        "V leaky": CrossValidationSetting("cheap", has_cap=False, is_leaky=True),
        "VI leaky": CrossValidationSetting("cheap", has_cap=True, is_leaky=True),
    }
)


@dataclass(frozen=True)
class Matrices:
    """Errors and memory of tasks (rows) under plans (columns); `levels`: equal numbers for plans that may differ by noise alone."""

    errors: Array
    memory: Array
    levels: NDArray[np.intp] | None = None

    def __post_init__(self) -> None:
        shapes = [
            self.errors.shape,
            self.memory.shape,
            self.errors.shape[:1] + (self.errors.shape[1:] if self.levels is None else self.levels.shape),
        ]
        if len(set(shapes)) > 1 or self.errors.ndim != 2:
            raise PlanError(f"errors and memory are (tasks, plans), with a level for each plan; these are {shapes}.")
        if len(self.errors) < 2:
            raise PlanError("leaving one task out needs two tasks or more; this is one.")

    @cached_property
    def denoised(self) -> Array:
        """Errors averaged over the plans of a level."""
        if self.levels is None:
            return self.errors
        membership = self.levels[:, None] == np.unique(self.levels)[None]  # (num_plans, num_levels)
        return (self.errors @ membership / membership.sum(axis=0)) @ membership.T


@dataclass(frozen=True)
class PriorRows:
    """Errors of the prior tasks, with gaps and completed."""

    errors: Array
    completed: Array


def prior_rows(matrices: Matrices, left_out: int, setting: CrossValidationSetting, *, seed: int = 0) -> PriorRows:
    """The prior of the task `left_out`: the other rows, sampled, and completed where there are gaps."""
    rows = [row for row in range(len(matrices.errors)) if setting.is_leaky or row != left_out]
    errors, memory = matrices.errors[rows], matrices.memory[rows]
    if setting.sampling == "full":
        return PriorRows(errors, errors)
    propensities = propensities_of(memory, setting.sampling)
    observed = np.where(_is_observed(propensities, setting.sampling, seed), errors, np.nan)
    completed = complete(observed, propensities=propensities if setting.sampling == "cheap" else None).values
    kept = np.array(rows) != left_out
    return PriorRows(observed[kept], completed[kept])


def propensities_of(memory: Array, sampling: str) -> Array:
    """Probability of each entry to be observed: equal, or by the rank of its memory, the least memory most likely."""
    if sampling == "uniform":
        return np.full(memory.shape, SHARE)
    ranks = np.argsort(np.argsort((1 / memory).ravel())).reshape(memory.shape)
    return SHARE * ranks / max(memory.size - 1, 1)


def _is_observed(propensities: Array, sampling: str, seed: int) -> NDArray[np.bool_]:
    rng = np.random.RandomState(seed)
    if sampling == "uniform":  # as in the released code
        return rng.choice([True, False], size=propensities.shape, p=[SHARE, 1 - SHARE])
    return rng.random_sample(propensities.shape) < propensities


@dataclass(frozen=True)
class PickerScores:
    """Scores of one picker after `count` measurements, over all tasks."""

    count: int
    rows: tuple[Scores, ...]

    def values(self, name: str) -> Array:
        """One score for every task."""
        return np.array([getattr(row, name) for row in self.rows])

    def mean(self, name: str) -> float:
        """The mean of a score over tasks."""
        return float(self.values(name).mean())

    def standard_error(self, name: str) -> float:
        """The standard error of that mean."""
        return float(self.values(name).std(ddof=1) / np.sqrt(len(self.rows)))


@dataclass(frozen=True)
class HeldOutTask:
    """A task that is left out, and what a picker may know of it."""

    known: TaskKnowledge
    truth: Truth

    def judge(self, picker: Picker, counts: Sequence[int], *, is_released: bool = False) -> dict[int, Scores]:
        """Scores by the number of measurements."""
        errors = self.truth.errors[self.truth.feasible]
        predictions = picker(self.known, lambda plan: float(errors[plan]), counts)
        return {
            count: self.truth.scores(prediction.drawn, prediction.expected, prediction.predicted, is_released=is_released)
            for count, prediction in predictions.items()
        }


Cache = dict[tuple[str, bool], list[PriorRows]]


def held_out_tasks(matrices: Matrices, setting: CrossValidationSetting, cache: Cache | None = None) -> list[HeldOutTask]:
    """A held-out task for each row. `cache`: keeps the prior rows of a sampling, which settings with and without a cap share."""
    cache, key, rows = {} if cache is None else cache, (setting.sampling, setting.is_leaky), range(len(matrices.errors))
    if key not in cache:
        cache[key] = [prior_rows(matrices, row, setting) for row in rows]
    cap = float(np.median(matrices.memory)) if setting.has_cap else np.inf
    return [_held_out_task(matrices, row, cache[key][row], cap) for row in rows]


def _held_out_task(matrices: Matrices, row: int, prior: PriorRows, cap: float) -> HeldOutTask:
    memory, errors = matrices.memory[row], matrices.errors[row]
    feasible = np.flatnonzero(memory <= cap)
    if not len(feasible):
        raise BudgetError(f"no plan of task {row} fits {cap:.6g}; the smallest needs {memory.min():.6g}.")
    most = matrices.memory.max()
    levels = None if matrices.levels is None else matrices.levels[feasible]
    known = TaskKnowledge(prior.errors[:, feasible], prior.completed[:, feasible], memory[feasible] / most, levels, seed=row)
    return HeldOutTask(known, Truth(memory / most, errors, feasible, matrices.denoised[row]))


def judge(
    rows: Sequence[HeldOutTask], picker: Picker, counts: Sequence[int], *, is_released: bool = False
) -> dict[int, PickerScores]:
    """Scores of a picker over all held-out tasks, by the number of measurements."""
    scores_of_tasks = [row.judge(picker, counts, is_released=is_released) for row in rows]
    return {count: PickerScores(count, tuple(scores[count] for scores in scores_of_tasks)) for count in counts}
