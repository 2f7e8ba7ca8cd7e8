"""What `pick` returns: a `Picked`, with the `Frontier` of all plans, a `Point` (plan, bytes, error) each.

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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paredown.errors import BudgetError, PlanError
from paredown.plan.plan import Plan
from paredown.serial import COUNT, SUMMED, TEXT, Check, brief, check_fields, is_count, object_parts, or_none
from paredown.sizes import parse_bytes, say_bytes, say_bytes_twice
from paredown.study.pick.pareto import at_least_exact, quickest_of_ties
from paredown.study.tasks.trial import Trial

Array = NDArray[np.float64]
VERSION = 2  # of the JSON: 1 has one excess over prediction for all points, 2 the bytes that each point needs
SOURCES = ("measured", "prior", "features")
TIME_SOURCES = ("", "measured", "predicted", "prior")


class TrialTime(NamedTuple):
    """The step time of a plan: in seconds, and relative to the unmodified step. None means unknown.

    `source` is "measured", "predicted" or "prior", and "" if the step time is unknown.
    """

    seconds: float | None = None
    ratio: float | None = None
    source: str = ""


@dataclass(frozen=True)
class Point:
    """A plan for a task, with its peak bytes and the posterior mean and standard deviation of its error.

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
    deviation: float
    measured: float | None = None
    measured_bytes: int | None = None
    on_front: bool = False
    fits: bool | None = None
    source: str = "prior"
    trains: bool = True
    num_trials: int = 0
    needed_bytes: int | None = None
    step_seconds: float | None = None
    step_ratio: float | None = None
    step_source: str = ""

    @property
    def step_time(self) -> TrialTime:
        """The step time of this plan, made of the three fields `step_seconds`, `step_ratio` and `step_source`."""
        return TrialTime(self.step_seconds, self.step_ratio, self.step_source)

    def __post_init__(self) -> None:
        check_fields(self, POINT_CHECKS, "point", PlanError)

    @property
    def needs(self) -> int:
        """The peak bytes that a budget has to allow for this plan."""
        return self.predicted_bytes if self.needed_bytes is None else self.needed_bytes

    def to_json(self) -> dict[str, Any]:
        """Return the JSON value: all fields by name."""
        return {row.name: getattr(self, row.name) for row in fields(self)} | {"plan": self.plan.to_json()}

    @staticmethod
    def from_json(value: Any) -> Point:
        """Return the point whose `to_json` is `value`; if there is none, PlanError names what is wrong."""
        parts = _parts(value, Point, "point")
        parts["plan"] = Plan.from_json(parts["plan"])
        return Point(**parts)


@dataclass(frozen=True)
class Frontier:
    """Plans with their bytes and errors (a `Point` each), sorted by bytes; `front` is the Pareto front of them.

    `full_bytes` is the peak of the baseline, for budgets in percent. Plans whose mean errors differ by at most `tie_error` are
    equally accurate.
    """

    points: tuple[Point, ...]
    metric: str = "error"
    full_bytes: int | None = None
    tie_error: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "points", tuple(sorted(self.points, key=lambda point: (point.predicted_bytes, point.mean))))
        check_fields(self, FRONTIER_CHECKS, "frontier", PlanError)

    def front(self) -> tuple[Point, ...]:
        """Return the Pareto front: points that no other point is expected to beat in both bytes and error.

        Where step times are known, a point is also on the front if no other point beats it in step time, too.
        """
        return tuple(point for point in self.points if point.on_front)

    def best(self, budget: int | str) -> Point:
        """Return the point of least mean error within the budget.

        Of points that are equally accurate it is the quickest, then the one of fewest bytes. If some points within the budget have trials,
        a point without trials is taken only if its mean error plus its standard deviation is less than theirs.
        """
        budget_bytes = parse_bytes(budget, whole=self.full_bytes)
        fitting = [point for point in self.points if point.trains and point.needs <= budget_bytes]
        if not fitting:
            raise BudgetError(self._infeasible(budget_bytes))
        nbytes = np.array([point.predicted_bytes for point in fitting], dtype=float)
        return fitting[
            quickest_of_ties(
                nbytes, cautious_errors(fitting), comparable_times(point.step_time for point in fitting), self.tie_error
            )
        ]

    def as_accurate(self, label: str, budget: int | str) -> tuple[Point, ...]:
        """Return the other points within the budget whose errors are as low, up to `tie_error`, as that of the point `label`."""
        budget_bytes = parse_bytes(budget, whole=self.full_bytes)
        fitting = [point for point in self.points if point.trains and point.needs <= budget_bytes]
        errors, labels = cautious_errors(fitting), [point.label for point in fitting]
        limit = (errors.min() if label in labels else -np.inf) + self.tie_error
        return tuple(point for point, error in zip(fitting, errors, strict=True) if point.label != label and error <= limit)

    def find(self, label: str) -> Point:
        """Return the point with this label."""
        for point in self.points:
            if point.label == label:
                return point
        raise PlanError(f"no point has the label {label!r}. Labels: {', '.join(point.label for point in self.points)}.")

    def _infeasible(self, budget_bytes: int) -> str:
        if not self.points:
            return f"no plan fits {say_bytes_twice(budget_bytes)}: the frontier is empty."
        least = min(self.points, key=lambda point: (not point.trains, point.needs))
        smallest = f"the smallest, {least.label}, needs {say_bytes(least.needs)}"
        return f"no plan fits {say_bytes_twice(budget_bytes)}; {smallest}. Raise the budget, or lower the batch."

    def to_json(self) -> dict[str, Any]:
        """Return the JSON value."""
        points = [point.to_json() for point in self.points]
        about = {"metric": self.metric, "full_bytes": self.full_bytes, "tie_error": self.tie_error}
        return {"version": VERSION, **about, "points": points}

    @staticmethod
    def from_json(value: Any) -> Frontier:
        """Return the frontier whose `to_json` is `value`; if there is none, PlanError names what is wrong."""
        value, excess = _without_excess(value)
        parts = _parts(value, Frontier, "frontier")
        points = (Point.from_json(point) for point in _list(parts["points"], "points"))
        parts["points"] = tuple(_with_excess(point, excess) if excess else point for point in points)
        return Frontier(**parts)


def cautious_errors(points: Sequence[Point]) -> Array:
    """Return the errors by which plans are chosen, (points,): mean errors, with caution about plans that have no trial.

    If some points have trials, the standard deviation is added to the mean error of those that have none. If a plan quantizes nothing,
    no error is below that plan's mean (`at_least_exact`).
    """
    has_trials, means = any(point.num_trials for point in points), np.array([point.mean for point in points])
    added = np.array([point.deviation * (has_trials and not point.num_trials) for point in points])
    return at_least_exact(means + added, means, np.array([point.plan.quantizes_nothing for point in points], dtype=bool))


def comparable_times(times: Iterable[TrialTime]) -> Array:
    """Return step times that can be compared, (plans,), NaN where unknown.

    They are ratios to the baseline if any ratio is known, otherwise seconds.
    """
    seconds, ratios, _ = (np.array(part, dtype=float) for part in zip(*((*time[:2], 0.0) for time in times), strict=True))
    return ratios if np.isfinite(ratios).any() else seconds


@dataclass(frozen=True)
class Picked:
    """The plan to train a task with within a budget, and why.

    `plan` is None if nothing fits; `reason` then names what would fit. `label` is the label of the picked plan, `ties` are labels of other
    plans that fit and may be as good. `trials` are those that `pick` ran, in `seconds`. `prior` is the name of the prior. `used` has the
    prior tasks of most weight as (name, weight); the weights of all tasks add up to 1. `notes` has further facts, such as failed trials.
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
    used: tuple[tuple[str, float], ...] = ()
    label: str = ""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, PICKED_CHECKS, "pick", PlanError)

    @property
    def point(self) -> Point | None:
        """The plan that was picked, with its bytes and error; None if nothing fits."""
        return None if self.plan is None else self.frontier.find(self.label)

    def __repr__(self) -> str:
        what = f"{self.label} for {self.task}" if self.plan is not None else f"nothing for {self.task}"
        trials = f"{len(self.trials)} trial{'s' * (len(self.trials) != 1)}"
        return f"Picked({what} within {say_bytes(self.budget_bytes)}, {trials}): {self.reason}"

    def to_json(self) -> dict[str, Any]:
        """Return the JSON value: version and all fields by name."""
        value: dict[str, Any] = {"version": VERSION} | {row.name: getattr(self, row.name) for row in fields(self)}
        value |= {"plan": None if self.plan is None else self.plan.to_json(), "frontier": self.frontier.to_json()}
        value |= {"trials": [trial.to_json() for trial in self.trials], "used": [list(pair) for pair in self.used]}
        return value | {"ties": list(self.ties), "notes": list(self.notes)}

    @staticmethod
    def from_json(value: Any) -> Picked:
        """Return the pick whose `to_json` is `value`; if there is none, PlanError names what is wrong."""
        parts = _parts(value, Picked, "pick")
        parts["plan"] = None if parts["plan"] is None else Plan.from_json(parts["plan"])
        parts["frontier"] = Frontier.from_json(parts["frontier"])
        parts["trials"] = tuple(Trial.from_json(trial) for trial in _list(parts.get("trials", []), "trials"))
        parts["used"] = tuple(tuple(_list(pair, "used")) for pair in _list(parts.get("used", []), "used"))
        parts |= {name: tuple(_list(parts.get(name, []), name)) for name in ("ties", "notes")}
        return Picked(**parts)


# --- checks of the fields and of JSON -----------------------------------------------------------------------------------------------


def _is_tuple_of(kind: type, value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(part, kind) for part in value)


def _is_used(value: Any) -> bool:
    return _is_tuple_of(tuple, value) and all(
        len(pair) == 2 and isinstance(pair[0], str) and SUMMED.holds(pair[1]) for pair in value
    )


PLAN = Check(lambda value: isinstance(value, Plan), "a Plan")
TEXTS = Check(lambda value: _is_tuple_of(str, value), "texts")
FLAG = Check(lambda value: isinstance(value, bool), "true or false")
FROM_0 = Check(lambda value: SUMMED.holds(value) and value >= 0, "a finite number from 0 up")
Checks = Mapping[str, Check]
POINT_CHECKS: Checks = {
    "label": TEXT,
    "plan": PLAN,
    "predicted_bytes": COUNT,
    "mean": SUMMED,
    "deviation": FROM_0,
    "measured": or_none(SUMMED),
    "measured_bytes": or_none(COUNT),
    "needed_bytes": or_none(COUNT),
    **dict.fromkeys(("step_seconds", "step_ratio"), or_none(FROM_0)),
    "step_source": Check(lambda value: value in TIME_SOURCES, "measured, predicted, prior or empty"),
    "num_trials": COUNT,
    **dict.fromkeys(("on_front", "trains"), FLAG),
    "fits": or_none(FLAG),
    "source": Check(lambda value: value in SOURCES, f"one of {', '.join(SOURCES)}"),
}
FRONTIER_CHECKS: Checks = {
    "points": Check(lambda value: _is_tuple_of(Point, value), "points"),
    "metric": TEXT,
    "full_bytes": or_none(COUNT),
    "tie_error": FROM_0,
}
PICKED_CHECKS: Checks = {
    **dict.fromkeys(("task", "reason", "prior", "label"), TEXT),
    **dict.fromkeys(("budget_bytes", "full_bytes"), COUNT),
    **dict.fromkeys(("ties", "notes"), TEXTS),
    "plan": or_none(PLAN),
    "frontier": Check(lambda value: isinstance(value, Frontier), "a Frontier"),
    "trials": Check(lambda value: _is_tuple_of(Trial, value), "trials"),
    "seconds": SUMMED,
    "used": Check(_is_used, "pairs of a name and a weight"),
}


def _without_excess(value: Any) -> tuple[Any, int]:
    """Return the JSON of a frontier without the field `excess_bytes`, and the value of that field.

    Files of version 1 have it: the bytes that every plan is expected to take beyond its prediction.
    """
    if not isinstance(value, dict) or value.get("version") != 1 or "excess_bytes" not in value:
        return value, 0
    excess = value["excess_bytes"]
    if not is_count(excess):
        raise PlanError(f"excess_bytes of a frontier is {COUNT.expected}, not {brief(excess)}.")
    return {name: part for name, part in value.items() if name != "excess_bytes"}, excess


def _with_excess(point: Point, excess_bytes: int) -> Point:
    """Return a point of a version 1 file with its needed bytes: the measured peak, or else the prediction plus `excess_bytes`."""
    needs = point.measured_bytes or point.predicted_bytes + excess_bytes
    return replace(point, needed_bytes=needs if needs > point.predicted_bytes else None)


def _parts(value: Any, kind: Any, what: str) -> dict[str, Any]:
    """Return the fields of a JSON object after checking and removing its version; `kind` and `what` name the object in errors."""
    names = [row.name for row in fields(kind)]
    needed = {row.name for row in fields(kind) if row.default is MISSING}
    return object_parts(value, what, names, needed, VERSION, PlanError)


def _list(value: Any, name: str) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise PlanError(f"{name} is a list, not {brief(value)}.")
    return value
