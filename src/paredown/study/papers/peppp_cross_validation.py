"""Cross-validate pickers, which predict a task's errors from few measurements: each task in turn is the new one, the others the prior.

Settings of the PEPPP paper, by which entries of the prior tasks are observed, and whether memory has a cap (the median of all):

    I full   II full, cap   III 20 % at random   IV 20 % at random, cap   V cheap plans first   VI cheap plans first, cap

A picker sees of the new task only what it measures. `V leaky` and `VI leaky` are as in PEPPP's released code: the new task's row is
sampled and completed among the others.

Scores of a predicted front against the true one:

    convergence             mean over the predicted front of the distance to the nearest point of the true front
    hypervolume difference  |predicted area - true area|, up to memory 1 and error `top`
    regret                  error of the plan recommended within a budget, less the least error there; mean over all budgets
    mean regret             the same with means over runs that differ by noise alone, recommended by prediction: luck is not counted
    rmse                    root mean squared error of the predictions

Memory is relative to the largest of all tasks, error relative to top = max(1, the predicted front's largest error).

>>> round(hypervolume(np.array([0.2, 0.4]), np.array([0.9, 0.5]), 1.0), 3)  # 0.2 wide and 0.1 high, 0.6 wide and 0.5 high
0.32
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from paredown.errors import BudgetError, PlanError, TaskError
from paredown.study.papers.peppp_completion import complete
from paredown.study.papers.peppp_experiment_design import Picker, TaskKnowledge
from paredown.study.pick.pareto import undominated

Array = NDArray[np.float64]
SHARE = 0.2  # of entries that are observed, or the largest propensity of one


@dataclass(frozen=True)
class CrossValidationSetting:
    """One of the paper's settings: which errors of prior tasks are observed, and whether memory is capped.

    `is_leaky`: the new task's row is sampled and completed among the others, as in PEPPP's released code.
    """

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
    """Holds errors and memory of tasks (rows) under plans (columns); plans with equal `levels` differ by noise alone."""

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
        """Return the errors averaged over the plans of a level (plans that are known to differ by noise alone)."""
        if self.levels is None:
            return self.errors
        membership = self.levels[:, None] == np.unique(self.levels)[None]  # (num_plans, num_levels)
        return (self.errors @ membership / membership.sum(axis=0)) @ membership.T


@dataclass(frozen=True)
class PriorRows:
    """Holds the errors of prior tasks, with gaps (`errors`) and with the gaps filled in (`completed`)."""

    errors: Array
    completed: Array


def prior_rows(matrices: Matrices, left_out: int, setting: CrossValidationSetting) -> PriorRows:
    """Return what a picker may know of all tasks but `left_out`: their errors, sampled and completed as `setting` says."""
    rows = [row for row in range(len(matrices.errors)) if setting.is_leaky or row != left_out]
    errors, memory = matrices.errors[rows], matrices.memory[rows]
    if setting.sampling == "full":
        return PriorRows(errors, errors)
    propensities = propensities_of(memory, setting.sampling)
    observed = np.where(_is_observed(propensities, setting.sampling), errors, np.nan)
    completed = complete(observed, propensities=propensities if setting.sampling == "cheap" else None).values
    kept = np.array(rows) != left_out
    return PriorRows(observed[kept], completed[kept])


def propensities_of(memory: Array, sampling: str) -> Array:
    """Return the probability that each error (tasks, plans) is observed: SHARE for "uniform", else higher for less memory."""
    if sampling == "uniform":
        return np.full(memory.shape, SHARE)
    ranks = np.argsort(np.argsort((1 / memory).ravel())).reshape(memory.shape)
    return SHARE * ranks / max(memory.size - 1, 1)


def _is_observed(propensities: Array, sampling: str) -> NDArray[np.bool_]:
    rng = np.random.RandomState(0)
    if sampling == "uniform":  # as in the released code
        return rng.choice([True, False], size=propensities.shape, p=[SHARE, 1 - SHARE])
    return rng.random_sample(propensities.shape) < propensities


@dataclass(frozen=True)
class PickerScores:
    """The scores of one picker (a method that predicts a task's errors from measurements) after `count` measurements, for each task."""

    count: int
    rows: tuple[Scores, ...]

    def values(self, name: str) -> Array:
        """Return the score `name`, such as "regret", for every task."""
        return np.array([getattr(row, name) for row in self.rows])

    def mean(self, name: str) -> float:
        """Return the mean over tasks of the score `name`."""
        return float(self.values(name).mean())

    def standard_error(self, name: str) -> float:
        """Return the standard error of the mean over tasks of the score `name`."""
        return float(self.values(name).std(ddof=1) / np.sqrt(len(self.rows)))


@dataclass(frozen=True)
class HeldOutTask:
    """Judges pickers on a task that the prior lacks: `known` is what a picker may know of it, `truth` its true errors.

    A picker measures some plans, and predicts the errors of all.
    """

    known: TaskKnowledge
    truth: Truth

    def judge(self, picker: Picker, counts: Sequence[int], *, is_released: bool = False) -> dict[int, Scores]:
        """Return a picker's scores after each number of measurements in `counts`.

        With `is_released`, fronts and areas are computed as in PEPPP's released code.
        """
        errors = self.truth.errors[self.truth.feasible]
        predictions = picker(self.known, lambda plan: float(errors[plan]), counts)
        missing = [count for count in counts if count not in predictions]
        if missing:
            raise TaskError(
                f"the picker has no prediction after {missing[0]} measurements, but after {[*predictions]}; the task has {len(errors)} "
                "feasible plans. Ask for counts that the picker has, or let it return one prediction for each of `counts`."
            )
        return {
            count: self.truth.scores(prediction.drawn, prediction.expected, prediction.predicted, is_released=is_released)
            for count, prediction in predictions.items()
        }


Cache = dict[tuple[str, bool], list[PriorRows]]


def held_out_tasks(matrices: Matrices, setting: CrossValidationSetting, cache: Cache | None = None) -> list[HeldOutTask]:
    """Return every task of `matrices` in turn as the one that is left out of the prior.

    `cache` may be shared by calls for the same matrices: the memory cap does not change the prior.
    """
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
    """Return a picker's scores after each number of measurements in `counts`, on all the tasks `rows`.

    With `is_released`, fronts and areas are computed as in PEPPP's released code.
    """
    scores_of_tasks = [row.judge(picker, counts, is_released=is_released) for row in rows]
    return {count: PickerScores(count, tuple(scores[count] for scores in scores_of_tasks)) for count in counts}


# --- Scores ---


def hypervolume(memory: Array, errors: Array, top: float) -> float:
    """Return the area that a Pareto front dominates, up to memory 1 and error `top`."""
    order = np.argsort(memory, kind="stable")
    widths = np.diff(np.append(np.minimum(memory[order], 1.0), 1.0))
    return float(widths @ np.maximum(top - np.minimum.accumulate(errors[order]), 0.0))


def released_hypervolume(memory: Array, errors: Array, top: float) -> float:
    """Return the area of a front as PEPPP's released code has it: errors are sorted, memories keep the order of the columns."""
    return float(np.diff(np.append(memory, 1.0)) @ (top - np.sort(errors)[::-1]))


def released_front(memory: Array, errors: Array) -> NDArray[np.bool_]:
    """Return the Pareto front as in PEPPP's released code: plans that are equal in memory and error remove each other."""
    is_equal = (memory[:, None] == memory) & (errors[:, None] == errors)
    return undominated(memory, errors) & (is_equal.sum(axis=0) == 1)


@dataclass(frozen=True)
class Scores:
    """Says how good one prediction is: convergence, hypervolume difference, regret, mean regret and rmse; 0 is best."""

    convergence: float
    hypervolume: float
    regret: float
    mean_regret: float
    rmse: float


@dataclass(frozen=True)
class Truth:
    """The true errors and memory of the plans on one task, for comparison with predictions.

    `feasible`: indices of allowed plans. `means`: means of `errors` over runs that differ by noise alone; if these are unknown, `errors`.
    """

    memory: Array
    errors: Array
    feasible: NDArray[np.intp]
    means: Array

    def scores(self, drawn: Array, expected: Array, predicted: Array, *, is_released: bool = False) -> Scores:
        """Return the scores of a prediction, which has three arrays of errors of the feasible plans.

        `drawn` gives its Pareto front, `expected` the plans that it recommends, `predicted` the rmse and the mean regret.
        """
        memory, errors = self.memory[self.feasible], self.errors[self.feasible]
        front_of = released_front if is_released else undominated
        front, true_front = front_of(memory, drawn), front_of(self.memory, self.errors)
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
    """Return the mean distance from each of `points` to the nearest of `others`."""
    return float(np.sqrt(((points[:, None] - others[None]) ** 2).sum(axis=-1)).min(axis=1).mean())


def regret(memory: Array, expected: Array, errors: Array) -> float:
    """Return how much more error the recommended plan has than the best one, averaged over budgets that equal a memory.

    The plan of least `expected` error within a budget is recommended; `errors` are the true ones.
    """
    lost: list[float] = []
    for budget in np.unique(memory):
        fits = np.flatnonzero(memory <= budget)
        lost.append(float(errors[fits[np.argmin(expected[fits])]] - errors[fits].min()))
    return float(np.mean(lost))
