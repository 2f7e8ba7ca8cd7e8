"""How good a picker is: every task of a matrix in turn is the new one, and the others are what was known before.

Settings of the PEPPP paper, by how much of the earlier tasks was looked at, and whether memory has a cap (the median of all):

    I full   II full, cap   III a fifth at random   IV a fifth at random, cap   V cheap plans first   VI cheap plans first, cap

Nothing of the new task is seen but what the picker measures. `V leaky` and `VI leaky` are as released: the new task's row is sampled and
completed among the others.
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
SHARE = 0.2  # of entries that are looked at, or the largest propensity of one


@dataclass(frozen=True)
class CrossValidationSetting:
    """What is known of earlier tasks, and whether there is a cap."""

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
    """Errors and memory of tasks (rows) under plans (columns); `levels`: the same number for plans that may differ by noise alone."""

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
            raise PlanError(f"errors and memory are (tasks, plans), with a level for each plan: these are {shapes}.")
        if len(self.errors) < 2:
            raise PlanError("leaving one task out needs two or more; this is one.")

    @cached_property
    def denoised(self) -> Array:
        """Errors as means over the plans of a level."""
        if self.levels is None:
            return self.errors
        is_of = self.levels[:, None] == np.unique(self.levels)[None]  # (num_plans, num_levels)
        return (self.errors @ is_of / is_of.sum(axis=0)) @ is_of.T


@dataclass(frozen=True)
class EarlierRows:
    """The rows known before, with gaps and without; one for each task that is left out and each way of sampling."""

    errors: Array
    completed: Array


def earlier_tasks(matrices: Matrices, left_out: int, setting: CrossValidationSetting, *, seed: int = 0) -> EarlierRows:
    """What was known before `left_out` came: sampled, and completed where there are gaps."""
    rows = [row for row in range(len(matrices.errors)) if setting.is_leaky or row != left_out]
    errors, memory = matrices.errors[rows], matrices.memory[rows]
    if setting.sampling == "full":
        return EarlierRows(errors, errors)
    propensities = propensities_of(memory, setting.sampling)
    observed = np.where(_is_observed(propensities, setting.sampling, seed), errors, np.nan)
    completed = complete(observed, propensities=propensities if setting.sampling == "cheap" else None).values
    kept = np.array(rows) != left_out
    return EarlierRows(observed[kept], completed[kept])


def propensities_of(memory: Array, sampling: str) -> Array:
    """How likely each entry is to be looked at: alike, or by the rank of its memory, the least first."""
    if sampling == "uniform":
        return np.full(memory.shape, SHARE)
    ranks = np.argsort(np.argsort((1 / memory).ravel())).reshape(memory.shape)
    return SHARE * ranks / max(memory.size - 1, 1)


def _is_observed(propensities: Array, sampling: str, seed: int) -> NDArray[np.bool_]:
    dice = np.random.RandomState(seed)
    if sampling == "uniform":  # as released
        return dice.choice([True, False], size=propensities.shape, p=[SHARE, 1 - SHARE])
    return dice.random_sample(propensities.shape) < propensities


@dataclass(frozen=True)
class PickerScores:
    """Scores of one picker with `count` measurements, over all tasks."""

    count: int
    rows: tuple[Scores, ...]

    def values(self, name: str) -> Array:
        """One score of every task."""
        return np.array([getattr(row, name) for row in self.rows])

    def mean(self, name: str) -> float:
        """Its mean over tasks."""
        return float(self.values(name).mean())

    def standard_error(self, name: str) -> float:
        """The standard error of that mean."""
        return float(self.values(name).std(ddof=1) / np.sqrt(len(self.rows)))


@dataclass(frozen=True)
class HeldOutTask:
    """What is left out, and what is known: a row of a cross-validation, ready for any picker."""

    known: TaskKnowledge
    truth: Truth

    def judge(self, picker: Picker, counts: Sequence[int], *, is_released: bool = False) -> dict[int, Scores]:
        """Scores by the number of measurements."""
        errors = self.truth.errors[self.truth.feasible]
        found = picker(self.known, lambda plan: float(errors[plan]), counts)
        return {count: self.truth.scores(p.drawn, p.expected, p.predicted, is_released=is_released) for count, p in found.items()}


Cache = dict[tuple[str, bool], list[EarlierRows]]


def trials(matrices: Matrices, setting: CrossValidationSetting, cache: Cache | None = None) -> list[HeldOutTask]:
    """One for each task. `cache`: keeps the earlier tasks of a way of sampling, which settings with and without a cap share."""
    cache, key, rows = {} if cache is None else cache, (setting.sampling, setting.is_leaky), range(len(matrices.errors))
    if key not in cache:
        cache[key] = [earlier_tasks(matrices, row, setting) for row in rows]
    cap = float(np.median(matrices.memory)) if setting.has_cap else np.inf
    return [_trial(matrices, row, cache[key][row], cap) for row in rows]


def _trial(matrices: Matrices, row: int, earlier: EarlierRows, cap: float) -> HeldOutTask:
    memory, errors = matrices.memory[row], matrices.errors[row]
    feasible = np.flatnonzero(memory <= cap)
    if not len(feasible):
        raise BudgetError(f"no plan of task {row} fits {cap:.6g}; the smallest needs {memory.min():.6g}.")
    most = matrices.memory.max()
    levels = None if matrices.levels is None else matrices.levels[feasible]
    known = TaskKnowledge(earlier.errors[:, feasible], earlier.completed[:, feasible], memory[feasible] / most, levels, seed=row)
    return HeldOutTask(known, Truth(memory / most, errors, feasible, matrices.denoised[row]))


def judge(
    rows: Sequence[HeldOutTask], picker: Picker, counts: Sequence[int], *, is_released: bool = False
) -> dict[int, PickerScores]:
    """Scores of a picker over all trials, by the number of measurements."""
    found = [row.judge(picker, counts, is_released=is_released) for row in rows]
    return {count: PickerScores(count, tuple(scores[count] for scores in found)) for count in counts}
