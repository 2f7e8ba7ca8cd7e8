"""`pick` returns a `Picked` with the `Frontier` of all plans, which has a `Point` (plan, bytes, error) for each.

>>> points = (
...     Point("lpmm", Plan.preset("lpmm"), 400, 0.12, 0.01, on_front=True),
...     Point("baseline", Plan(), 1000, 0.10, 0.01, on_front=True),
... )
>>> frontier = Frontier(points, "error", full_bytes=1000)
>>> frontier.best("60%").label, frontier.best(1000).label
('lpmm', 'baseline')
>>> frontier.best("10%")
Traceback (most recent call last):
    ...
paredown.errors.BudgetError: no plan fits 100 B; the smallest, lpmm, needs 400 B. Raise the budget, or lower the batch.
>>> Frontier.from_json(frontier.to_json()) == frontier
True
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from paredown.errors import BudgetError, PlanError
from paredown.plan.plan import Plan
from paredown.serial import Check, FromZero, FromZeroOrNone, dump_dataclass, read_versioned
from paredown.sizes import parse_bytes, say_bytes, say_bytes_twice
from paredown.study.pick.pareto import at_least_exact, cautious, quickest_of_ties
from paredown.study.tasks.trial import Trial

Array = NDArray[np.float64]
VERSION = 3  # of the JSON


def one_of(*names: str) -> Check:
    """Return a check for a field of JSON that allows only the texts `names`."""
    return Check(names.__contains__, f"one of {', '.join(map(repr, names))}")


@dataclass(frozen=True)
class Point:
    """Describes one plan in the answer of `pick`: its peak bytes, and the mean and standard deviation of its predicted error.

    `mean` and `deviation` (a standard deviation) are of the mean error over runs, in the task's metric. `measured` is the mean error of the
    finished trials, None if there are none. `source` is "measured", "prior" (a plan of the prior) or "features" (predicted from similar
    plans). `fits` says whether the plan is within the budget, and is None without a budget. `trains` is False if a trial of this plan ran
    out of memory or failed; on a GPU also if a smaller plan ran out of memory. `num_trials` counts the trials behind `measured`, those
    of a store included. `needed_bytes` is the expected peak if trials took more than predicted. `step_seconds` is the median step time,
    and `step_ratio` the same divided by the unmodified step's; None means unknown. `step_source` is "measured" (in trials), "predicted"
    (by a cost model), "prior" (the mean ratio on the prior tasks), or "" if the step time is unknown.
    """

    label: str
    plan: Plan
    predicted_bytes: int
    mean: float
    deviation: FromZero
    measured: float | None = None
    measured_bytes: int | None = None
    on_front: bool = False
    fits: bool | None = None
    source: Annotated[str, one_of("measured", "prior", "features")] = "prior"
    trains: bool = True
    num_trials: int = 0
    needed_bytes: int | None = None
    step_seconds: FromZeroOrNone = None
    step_ratio: FromZeroOrNone = None
    step_source: Annotated[str, one_of("", "measured", "predicted", "prior")] = ""

    @property
    def needs(self) -> int:
        """Return the smallest budget in bytes within which this plan can be trained."""
        return self.predicted_bytes if self.needed_bytes is None else self.needed_bytes


@dataclass(frozen=True)
class Frontier:
    """Holds all plans that `pick` compared, with their bytes and errors, sorted by bytes; `front` returns their Pareto front.

    `full_bytes` is the peak of the baseline, for budgets in percent. Plans whose mean errors differ by at most `tie_error` are
    equally accurate.
    """

    points: tuple[Point, ...]
    metric: str = "error"
    full_bytes: int | None = None
    tie_error: FromZero = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "points", tuple(sorted(self.points, key=lambda point: (point.predicted_bytes, point.mean))))

    def front(self) -> tuple[Point, ...]:
        """Return the Pareto front: points that no other is expected to beat in bytes, error and, where it is known, step time."""
        return tuple(point for point in self.points if point.on_front)

    def best(self, budget: int | str) -> Point:
        """Return the point (a plan with its bytes and error) of least mean error within the budget.

        Of points that are equally accurate it is the quickest, then the one of fewest bytes. If some points within the budget have trials,
        a point without trials is taken only if its mean error plus its standard deviation is less than theirs.
        """
        budget_bytes = parse_bytes(budget, whole=self.full_bytes)
        fitting = [point for point in self.points if point.trains and point.needs <= budget_bytes]
        if not fitting:
            raise BudgetError(self.explain_nothing_fits(budget_bytes))
        nbytes = np.array([point.predicted_bytes for point in fitting], dtype=float)
        return fitting[
            quickest_of_ties(nbytes, cautious_errors(fitting), comparable_times(map(step_times, fitting)), self.tie_error)
        ]

    def as_accurate(self, label: str, budget: int | str) -> tuple[Point, ...]:
        """Return the other points within the budget whose error is at most `tie_error` above that of the point `label`."""
        budget_bytes = parse_bytes(budget, whole=self.full_bytes)
        fitting = [point for point in self.points if point.trains and point.needs <= budget_bytes]
        errors, labels = cautious_errors(fitting), [point.label for point in fitting]
        limit = (errors.min() if label in labels else -np.inf) + self.tie_error
        return tuple(point for point, error in zip(fitting, errors, strict=True) if point.label != label and error <= limit)

    def find(self, label: str) -> Point:
        """Return the point (a plan with its bytes and error) that has this label."""
        for point in self.points:
            if point.label == label:
                return point
        raise PlanError(f"no point has the label {label!r}. Labels: {', '.join(point.label for point in self.points)}.")

    def explain_nothing_fits(self, budget_bytes: int) -> str:
        """Return a sentence that no plan fits the budget, and which plan needs the least memory."""
        if not self.points:
            return f"no plan fits {say_bytes_twice(budget_bytes)}: the frontier is empty."
        least = min(self.points, key=lambda point: (not point.trains, point.needs))
        smallest = f"the smallest, {least.label}, needs {say_bytes(least.needs)}"
        return f"no plan fits {say_bytes_twice(budget_bytes)}; {smallest}. Raise the budget, or lower the batch."

    def to_json(self) -> dict[str, Any]:
        """Return the frontier as a dict for JSON: a version, and all fields by name."""
        return {"version": VERSION, **dump_dataclass(self)}

    @staticmethod
    def from_json(value: Any) -> Frontier:
        """Return the frontier whose `to_json` is `value`; if there is none, PlanError names what is wrong."""
        return read_versioned(Frontier, value, "frontier", VERSION, PlanError, oldest=VERSION)


def cautious_errors(points: Sequence[Point]) -> Array:
    """Return the errors (points,) by which plans are compared: mean errors, raised for plans without a trial.

    If some points have trials, the standard deviation is added to the mean error of those that have none. If a plan quantizes nothing,
    no error is below that plan's mean (`at_least_exact`).
    """
    means, deviations = (np.array([getattr(point, name) for point in points]) for name in ("mean", "deviation"))
    errors = cautious(means, deviations, np.array([point.num_trials > 0 for point in points]))
    return at_least_exact(errors, means, np.array([point.plan.quantizes_nothing for point in points], dtype=bool))


def step_times(point: Point) -> tuple[float | None, float | None]:
    """Return the step time of a point in seconds, and as a multiple of the baseline's; None where unknown."""
    return point.step_seconds, point.step_ratio


def comparable_times(times: Iterable[tuple[float | None, float | None]]) -> Array:
    """Return one step time per plan, NaN if unknown, from pairs (seconds, ratio): ratios if any is known, else seconds."""
    seconds, ratios = np.array([*times], dtype=float).reshape(-1, 2).T
    return ratios if np.isfinite(ratios).any() else seconds


@dataclass(frozen=True)
class Picked:
    """The answer of `pick`: the plan to train a task with within a budget, and why it was picked.

    `plan` is None if nothing fits; `reason` then names what would fit. `label` is the label of the picked plan, `ties` are labels of other
    plans that fit and may be as good. `trials` are those that `pick` ran, in `seconds`. `prior` is the name of the prior. `notes` has
    further facts, such as failed trials.
    """

    task: str
    plan: Plan | None
    frontier: Frontier
    reason: str
    budget_bytes: int
    full_bytes: int
    trials: tuple[Trial, ...] = ()
    ties: tuple[str, ...] = ()
    seconds: float = 0.0
    prior: str = ""
    label: str = ""
    notes: tuple[str, ...] = ()

    @property
    def point(self) -> Point | None:
        """Return the plan that was picked, with its bytes and error; None if nothing fits."""
        return None if self.plan is None else self.frontier.find(self.label)

    def __repr__(self) -> str:
        what = f"{self.label} for {self.task}" if self.plan is not None else f"nothing for {self.task}"
        trials = f"{len(self.trials)} trial{'s' * (len(self.trials) != 1)}"
        return f"Picked({what} within {say_bytes(self.budget_bytes)}, {trials}): {self.reason}"

    def to_json(self) -> dict[str, Any]:
        """Return the pick as a dict for JSON: a version, and all fields by name."""
        return {"version": VERSION, **dump_dataclass(self)}

    @staticmethod
    def from_json(value: Any) -> Picked:
        """Return the pick whose `to_json` is `value`; if there is none, PlanError names what is wrong."""
        return read_versioned(Picked, value, "pick", VERSION, PlanError, oldest=VERSION)
