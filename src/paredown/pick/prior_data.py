"""What earlier tasks came to under which plans: matrices with a row for each task and a column for each plan.

    errors, counts   mean over seeds, NaN where nobody looked, and the seeds behind it; a run that diverged has the error of a blind guess
    runs             the same, each seed by itself, (tasks, plans, seeds), NaN where there is none
    memory           predicted peak bytes, and `measured` ones; NaN where they are not known
    noise            of a task: the deviation of one run about the mean of its plan, pooled over plans that ran more than once

        noise^2 = sum over plans and seeds of (run - mean of the plan)^2  /  sum over plans of (seeds - 1)

Plans of which a run diverged tell nothing of the noise of those that do not, and are left out there. numpy alone is needed.

>>> tasks = [TaskRow("digits", "cnn", "digits"), TaskRow("clothes", "cnn", "fashion_mnist")]
>>> runs = np.array([[[0.02, 0.04], [0.05, 0.05]], [[0.11, 0.13], [np.nan, np.nan]]])
>>> found = PriorData.of_runs("two", "store", tasks, [PlanRow("8 bits"), PlanRow("4 bits", recipe="assign 40% role")], runs)
>>> found
PriorData(two: 2 tasks x 2 plans, store mode, 3 of 4 entries, 6 runs, noise 0.010 to 0.014)
>>> found.without(["digits"]).errors.round(3).tolist()
[[0.12, nan]]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paredown.errors import PriorError
from paredown.plan.plan import Plan
from paredown.plan.selectors import closest

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
MATRICES = ("errors", "counts", "memory", "measured", "diverged", "propensity")
OF_TASKS = ("noise", "has_seeds")


@dataclass(frozen=True)
class TaskRow:
    """A task that was trained. `metric`: "error" is the share of wrong answers, "loss" the loss of a text.

    `answers`: how many there are to choose from. `blind`: the error of a blind guess. `full_bytes`: the step as it is written, counted
    as `memory` is. `source`: the prior that it came with. `text`: the task as `find_task` reads it.
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
    """A plan that tasks were trained under. `plan`: its JSON; None: `recipe` makes it for each task ("assign 40% role").

    `level`: plans of one level differ by noise alone, as far as is known; "" unknown. `features`: bits a value by role, and what else
    tells plans apart as numbers.
    """

    label: str
    plan: Mapping[str, Any] | None = field(default=None, hash=False)
    recipe: str = ""
    level: str = ""
    features: Mapping[str, float] = field(default_factory=dict[str, float], hash=False)

    @property
    def key(self) -> str:
        """The same for columns that mean the same plan."""
        if self.plan is None:
            return self.recipe
        plan = Plan.from_json(self.plan)
        return repr((plan.rules, plan.recompute))


@dataclass(frozen=True, eq=False, repr=False)
class PriorData:
    """Tasks x plans, as the head of this file says. `provenance`: commit, device, versions, dates and sweep of each collection."""

    name: str
    mode: str  # "simulate" or "store"
    tasks: tuple[TaskRow, ...]
    plans: tuple[PlanRow, ...]
    errors: Array
    counts: Array
    memory: Array
    measured: Array
    noise: Array  # (tasks,), NaN where no plan ran twice
    provenance: tuple[Mapping[str, Any], ...] = ()
    diverged: Array = field(default=None)  # type: ignore[assignment]  # (tasks, plans) runs; none unless given
    propensity: Array = field(default=None)  # type: ignore[assignment]  # how likely the draw was to take the pair; 1 unless given
    runs: Array = field(default=None)  # type: ignore[assignment]  # the means unless given
    has_seeds: Mask = field(default=None)  # type: ignore[assignment]  # (tasks,) runs stand in the places of their seeds; all unless given

    def __post_init__(self) -> None:
        shape = len(self.tasks), len(self.plans)
        defaults = {"diverged": np.zeros(shape), "propensity": np.ones(shape), "runs": np.asarray(self.errors)[..., None]}
        defaults["has_seeds"] = np.ones(shape[0], dtype=bool)
        for name, value in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        for name in (*MATRICES, "runs", *OF_TASKS):
            array = np.asarray(getattr(self, name), dtype=bool if name == "has_seeds" else np.float64)
            wanted = shape if name in MATRICES else (*shape, *array.shape[2:]) if name == "runs" else shape[:1]
            if array.shape != wanted:
                raise PriorError(
                    f"{name} of prior {self.name!r} is {array.shape}; {shape[0]} tasks and {shape[1]} plans need {wanted}."
                )
            array.flags.writeable = False
            object.__setattr__(self, name, array)
        for what, rows in (("tasks", [task.name for task in self.tasks]), ("plans", [plan.label for plan in self.plans])):
            if len(set(rows)) != len(rows):
                twice = next(row for row in rows if rows.count(row) > 1)
                raise PriorError(f"prior {self.name!r} has one of its {what} twice: {twice!r}.")

    @staticmethod
    def of_runs(name: str, mode: str, tasks: Sequence[TaskRow], plans: Sequence[PlanRow], runs: Array, **rest: Any) -> PriorData:
        """From single runs (tasks, plans, seeds), NaN where there is none; `rest` are the other fields, unknown unless given."""
        runs, shape = np.asarray(runs, dtype=np.float64), (len(tasks), len(plans))
        counts = np.isfinite(runs).sum(axis=2)
        errors = np.where(counts > 0, np.nansum(runs, axis=2) / np.maximum(counts, 1), np.nan)
        diverged = rest.get("diverged", np.zeros(shape))
        unknown: dict[str, Any] = {word: np.full(shape, np.nan) for word in ("memory", "measured") if word not in rest}
        noise = pooled_noise(np.where((diverged > 0)[..., None], np.nan, runs))
        return PriorData(name, mode, tuple(tasks), tuple(plans), errors, counts, noise=noise, runs=runs, **{**unknown, **rest})

    @property
    def levels(self) -> NDArray[np.intp] | None:
        """The same number for plans of one level; None where a plan's level is not known."""
        if not all(plan.level for plan in self.plans):
            return None
        names = list(dict.fromkeys(plan.level for plan in self.plans))
        return np.array([names.index(plan.level) for plan in self.plans])

    def row(self, name: str) -> int:
        """Where a task is."""
        names = [task.name for task in self.tasks]
        if name not in names:
            raise PriorError(f"prior {self.name!r} has no task {name!r}. Closest: {closest(name, names)}.")
        return names.index(name)

    def rows(self, names: Iterable[str]) -> PriorData:
        """These tasks alone, in this order."""
        return self._taken([self.row(name) for name in names])

    def without(self, tasks: Iterable[str]) -> PriorData:
        """All tasks but these."""
        out = {self.row(name) for name in tasks}
        return self._taken([i for i in range(len(self.tasks)) if i not in out])

    def _taken(self, which: Sequence[int]) -> PriorData:
        arrays = {name: getattr(self, name)[list(which)] for name in (*MATRICES, "runs", *OF_TASKS)}
        return replace(self, tasks=tuple(self.tasks[i] for i in which), **arrays)

    def __repr__(self) -> str:
        seen, known = np.isfinite(self.errors), self.noise[np.isfinite(self.noise)]
        noise = f", noise {known.min():.3f} to {known.max():.3f}" if len(known) else ""
        size = f"{len(self.tasks)} tasks x {len(self.plans)} plans, {self.mode} mode"
        return f"PriorData({self.name}: {size}, {seen.sum()} of {seen.size} entries, {int(self.counts.sum())} runs{noise})"


def pooled_noise(runs: Array) -> Array:
    """The deviation of one run about its plan's mean, (tasks,); NaN where no plan ran twice."""
    counts = np.isfinite(runs).sum(axis=2)
    means = np.nansum(runs, axis=2) / np.maximum(counts, 1)
    squares = np.nansum((runs - means[..., None]) ** 2, axis=(1, 2))
    free = np.maximum(counts - 1, 0).sum(axis=1)
    return np.where(free > 0, np.sqrt(squares / np.maximum(free, 1)), np.nan)


def join_priors(parts: Sequence[PriorData], name: str = "joined") -> PriorData:
    """All tasks under all plans; a plan that several parts have is one column, a task of two parts two rows."""
    modes = list(dict.fromkeys(part.mode for part in parts))
    if len(modes) != 1:
        raise PriorError(f"priors of one mode are joined, and these are of {', '.join(modes) or 'none'}.")
    columns = {plan.key: plan for part in reversed(parts) for plan in reversed(part.plans)}
    keys = list(dict.fromkeys(plan.key for part in parts for plan in part.plans))
    place = {key: i for i, key in enumerate(keys)}
    names = _apart([(task.name, part.name) for part in parts for task in part.tasks])
    tasks = [replace(task, name=new) for task, new in zip((t for part in parts for t in part.tasks), names, strict=True)]
    labels = _apart([(columns[key].label, f"column {i}") for i, key in enumerate(keys)])
    plans = [replace(columns[key], label=label) for key, label in zip(keys, labels, strict=True)]
    wheres = [np.array([place[plan.key] for plan in part.plans], dtype=np.intp) for part in parts]
    depth = max(part.runs.shape[2] for part in parts)
    wide = {word: [_spread(part, word, at, len(keys)) for part, at in zip(parts, wheres, strict=True)] for word in MATRICES}
    runs = [_spread(part, "runs", at, len(keys), depth) for part, at in zip(parts, wheres, strict=True)]
    arrays = {word: np.concatenate(found) for word, found in wide.items()} | {"runs": np.concatenate(runs)}
    of_tasks: dict[str, Any] = {word: np.concatenate([getattr(part, word) for part in parts]) for word in OF_TASKS}
    provenance = tuple(one for part in parts for one in part.provenance)
    return PriorData(name, modes[0], tuple(tasks), tuple(plans), provenance=provenance, **arrays, **of_tasks)


def _spread(part: PriorData, word: str, at: NDArray[np.intp], num: int, depth: int = 0) -> Array:
    """A matrix of `part` in columns `at` of `num`."""
    array = getattr(part, word)
    tail = (depth,) if depth else ()
    empty = 0.0 if word in ("counts", "diverged", "propensity") else np.nan
    found = np.full((len(part.tasks), num, *tail), empty)
    if depth:
        found[:, at, : array.shape[2]] = array
    else:
        found[:, at] = array
    return found


def _apart(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Names that are told apart: the second of two equal ones has its origin behind it."""
    found: list[str] = []
    for name, origin in pairs:
        new, number = name, 2
        while new in found:
            new, number = (f"{name} ({origin})", number) if new == name else (f"{name} ({origin}, {number})", number + 1)
        found.append(new)
    return found
