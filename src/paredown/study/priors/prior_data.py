"""A prior's data: errors of tasks (rows) under plans (columns), with memory, noise and provenance. This file needs numpy alone.

    errors, counts   mean error over seeds, NaN without a run, and the number of runs
    runs             the error of each seed, (tasks, plans, seeds), NaN without a run; if the run diverged, that of random guessing
    memory           predicted peak bytes; `measured` has the measured ones; NaN where they are not known
    step_ratio       step time divided by the unmodified step's on the same machine; NaN where it was not measured
    noise            of a task: standard deviation of one run about the mean of its plan, pooled over plans that ran more than once

        noise^2 = sum over plans and seeds of (run - mean of the plan)^2  /  sum over plans of (seeds - 1)

Plans with a run that diverged are left out of the noise: divergence says nothing about the noise of the others.

>>> tasks = [TaskRow("digits", "cnn", "digits"), TaskRow("clothes", "cnn", "fashion_mnist")]
>>> runs = np.array([[[0.02, 0.04], [0.05, 0.05]], [[0.11, 0.13], [np.nan, np.nan]]])
>>> data = PriorData("two", "store", tasks, [PlanRow("8 bits"), PlanRow("4 bits", template="assign 40% role")], runs)
>>> data
PriorData(two: 2 tasks x 2 plans, store mode, 3 of 4 entries, 6 runs, noise 0.010 to 0.014)
>>> data.without(["digits"]).errors.round(3).tolist()
[[0.12, nan]]
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paredown.errors import PriorError
from paredown.plan.plan import Plan
from paredown.study.sweeps.plan_labels import distinct

Array = NDArray[np.float64]
MATRICES = {
    "memory": np.nan,
    "measured": np.nan,
    "diverged": 0.0,
    "propensity": 1.0,
    "step_ratio": np.nan,
}  # optional matrices (tasks, plans), and the value of their entries by default


def random_guess_error(metric: str, answers: int | None) -> float | None:
    """Return the error of random guessing in a metric, with equal odds for every answer; None if it is unknown."""
    if answers is None or answers < 2:
        return None
    return {"error": 1 - 1 / answers, "loss": math.log(answers)}.get(metric)


@dataclass(frozen=True)
class TaskRow:
    """Describes a task, which is a row of a prior. `metric`: "error" is the share of wrong answers, "loss" the cross entropy.

    `answers`: number of possible answers. `blind`: the error of random guessing. `full_bytes`: bytes of the baseline, counted as
    `memory` is. `source`: the prior that the task came with. `text`: the task's name as `find_task` reads it.
    """

    name: str
    family: str  # "cnn", "vit", "gpt", "mlp", ...
    data: str
    metric: str = "error"
    answers: int | None = None
    blind: float | None = None
    full_bytes: float | None = None
    steps: int | None = None
    source: str = ""
    text: str = ""


@dataclass(frozen=True)
class PlanRow:
    """Describes a column of a prior: `plan` is a plan's JSON, or None if each task has a plan made from `template` ("assign 40% role").

    `level`: plans with the same level are known to differ by noise alone; "" means unknown.
    """

    label: str
    plan: Mapping[str, Any] | None = field(default=None, hash=False)
    template: str = ""
    level: str = ""

    @property
    def key(self) -> str:
        """Return the text that identifies the plan: the template, or the plan's key; columns with equal keys are one plan."""
        if self.plan is None:
            return self.template
        return repr(Plan.from_json(self.plan).key)


@dataclass(frozen=True, eq=False, repr=False)
class PriorData:
    """Holds the errors of earlier tasks (rows) under plans (columns), with memory, noise and step times, for `pick`.

    `provenance` has commit, device, versions, dates and sweep of each collection of trials.
    """

    name: str
    mode: str  # "simulate" or "store"
    tasks: tuple[TaskRow, ...]
    plans: tuple[PlanRow, ...]
    runs: Array
    memory: Array = field(default=None)  # type: ignore[assignment]
    measured: Array = field(default=None)  # type: ignore[assignment]
    diverged: Array = field(default=None)  # type: ignore[assignment]  # number of runs that diverged
    propensity: Array = field(default=None)  # type: ignore[assignment]  # probability that the pair was drawn
    step_ratio: Array = field(default=None)  # type: ignore[assignment]
    provenance: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "tasks", tuple(self.tasks))
        object.__setattr__(self, "plans", tuple(self.plans))
        shape = len(self.tasks), len(self.plans)
        for name in ("runs", *MATRICES):
            value = getattr(self, name)
            array = np.full(shape, MATRICES[name]) if value is None else np.asarray(value, dtype=np.float64)
            expected = (*shape, *array.shape[2:]) if name == "runs" else shape
            if array.shape != expected:
                raise PriorError(
                    f"{name} of prior {self.name!r} is {array.shape}; {shape[0]} tasks and {shape[1]} plans need {expected}."
                )
            array.flags.writeable = False
            object.__setattr__(self, name, array)
        for what, rows in (("tasks", [task.name for task in self.tasks]), ("plans", [plan.label for plan in self.plans])):
            if len(set(rows)) != len(rows):
                twice = next(row for row in rows if rows.count(row) > 1)
                raise PriorError(f"prior {self.name!r} has one of its {what} twice: {twice!r}. Names and labels must differ.")

    @cached_property
    def counts(self) -> Array:
        """Return the number of runs of each task under each plan, (tasks, plans)."""
        return np.isfinite(self.runs).sum(axis=2)

    @cached_property
    def errors(self) -> Array:
        """Return the mean error over the runs of each task under each plan, (tasks, plans)."""
        return mean_of_seeds(self.runs)

    @cached_property
    def noise(self) -> Array:
        """Return the standard deviation of single runs of each task, (tasks,); NaN where no plan ran twice. Diverged plans are left out."""
        return pooled_noise(np.where((self.diverged > 0)[..., None], np.nan, self.runs))

    def without(self, tasks: Iterable[str]) -> PriorData:
        """Return the prior without the tasks of these names."""
        left_out = set(tasks)
        kept = [i for i, task in enumerate(self.tasks) if task.name not in left_out]
        return replace(
            self, tasks=tuple(self.tasks[i] for i in kept), **{name: getattr(self, name)[kept] for name in ("runs", *MATRICES)}
        )

    def __repr__(self) -> str:
        is_observed, known = np.isfinite(self.errors), self.noise[np.isfinite(self.noise)]
        noise = f", noise {known.min():.3f} to {known.max():.3f}" if len(known) else ""
        size = f"{len(self.tasks)} tasks x {len(self.plans)} plans, {self.mode} mode"
        return f"PriorData({self.name}: {size}, {is_observed.sum()} of {is_observed.size} entries, {int(self.counts.sum())} runs{noise})"


def mean_of_seeds(values: Array) -> Array:
    """Return the means over seeds (tasks, plans) of `values` (tasks, plans, seeds) that are not NaN; NaN where all are."""
    counts = np.isfinite(values).sum(axis=2)
    return np.where(counts > 0, np.nansum(values, axis=2) / np.maximum(counts, 1), np.nan)


def pooled_noise(runs: Array) -> Array:
    """Return the standard deviation of single runs of a plan, (tasks,); NaN if no plan of the task ran twice."""
    squares = np.nansum((runs - mean_of_seeds(runs)[..., None]) ** 2, axis=(1, 2))
    degrees_of_freedom = np.maximum(np.isfinite(runs).sum(axis=2) - 1, 0).sum(axis=1)
    return np.where(degrees_of_freedom > 0, np.sqrt(squares / np.maximum(degrees_of_freedom, 1)), np.nan)


def join_priors(parts: Sequence[PriorData], name: str = "joined") -> PriorData:
    """Return one prior with all tasks and plans of `parts`; a plan in several parts is one column, a task in two is two rows."""
    modes = list(dict.fromkeys(part.mode for part in parts))
    if len(modes) != 1:
        raise PriorError(f"only priors of one mode can be joined; these have {', '.join(modes) or 'none'}.")
    columns = {plan.key: plan for part in reversed(parts) for plan in reversed(part.plans)}
    keys = list(dict.fromkeys(plan.key for part in parts for plan in part.plans))
    column_of = {key: i for i, key in enumerate(keys)}
    names = _distinct_names([(task.name, part.name) for part in parts for task in part.tasks])
    tasks = [replace(task, name=new) for task, new in zip((t for part in parts for t in part.tasks), names, strict=True)]
    labels = _distinct_names([(columns[key].label, f"column {i}") for i, key in enumerate(keys)])
    plans = [replace(columns[key], label=label) for key, label in zip(keys, labels, strict=True)]
    part_columns = [np.array([column_of[plan.key] for plan in part.plans], dtype=np.intp) for part in parts]
    depth = max(part.runs.shape[2] for part in parts)
    arrays: dict[str, Any] = {
        word: np.concatenate([_spread(part, word, at, len(keys), depth) for part, at in zip(parts, part_columns, strict=True)])
        for word in ("runs", *MATRICES)
    }
    provenance = tuple(record for part in parts for record in part.provenance)
    return PriorData(name, modes[0], tuple(tasks), tuple(plans), provenance=provenance, **arrays)


def _spread(part: PriorData, name: str, columns: NDArray[np.intp], num_columns: int, depth: int) -> Array:
    """Return the matrix `name` of the prior `part` for `num_columns` plans: its columns stand at `columns`, others are empty.

    `depth` is the number of seeds, the third dimension of the matrix "runs".
    """
    array = getattr(part, name)
    empty = 0.0 if name in ("diverged", "propensity") else np.nan
    matrix = np.full((len(part.tasks), num_columns, *([depth] if name == "runs" else [])), empty)
    matrix[(slice(None), columns, *(slice(size) for size in array.shape[2:]))] = array
    return matrix


def _distinct_names(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Return distinct names for (name, origin): the second of two equal names gets its origin in parentheses."""
    firsts = {name: i for i, (name, _) in reversed(list(enumerate(pairs)))}
    return distinct(name if firsts[name] == i else f"{name} ({origin})" for i, (name, origin) in enumerate(pairs))
