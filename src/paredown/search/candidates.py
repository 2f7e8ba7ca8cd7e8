"""The plans that `pick` chooses from: those of earlier tasks, presets, and plans with a format for each slot, made for the budget.

A plan of earlier tasks that is made anew for each task has a recipe (`recipe.py`). Plans that say the same are one; plans that speak of
slots which this step does not have are left out, and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paredown.errors import BudgetError, PlanError
from paredown.plan.plan import Plan
from paredown.plan.presets import PRESETS
from paredown.plan.record import Trace
from paredown.plan.sizes import parse_bytes, say_bytes
from paredown.search.assign import assign
from paredown.search.earlier import Earlier, PlanRow
from paredown.search.features import NAMES, features_of
from paredown.search.recipe import plan_of_row

Array = NDArray[np.float64]
AS_WRITTEN = "as written"


@dataclass(frozen=True)
class Candidate:
    """A plan for this task: its peak, its column among earlier tasks' plans (-1: none), and its features."""

    label: str
    plan: Plan
    predicted_bytes: int
    column: int
    features: Array


@dataclass(frozen=True)
class Step:
    """A step to make plans for: its bytes under a plan, and its trace, of which both may differ with what the plan speaks of.

    `trace_of` is None where plans speak of values that no step stores; then nothing is made for the step, and plans are as their rules say.
    """

    bytes_of: Callable[[Plan], int]
    trace_of: Callable[[Plan], Trace] | None
    full_bytes: int

    def features(self, plan: Plan) -> Array:
        """The plan's, as far as they can be told."""
        return features_of(plan, None if self.trace_of is None else self.trace_of(plan))

    def plan_of(self, row: PlanRow) -> Plan:
        """The plan of a column."""
        return Plan.from_json(row.plan) if row.plan is not None else plan_of_row(row, self._state_trace())

    def made(self, budget_bytes: int, *, recompute: bool | None = None) -> Plan:
        """A format for each slot within a budget."""
        return assign(self._state_trace(), budget_bytes, recompute=recompute)

    def _state_trace(self) -> Trace:
        """The step for plans that may speak of weights and optimizer state."""
        if self.trace_of is None:
            raise PlanError("plans with a format for each slot are made for what a step stores.")
        return self.trace_of(Plan.preset("lpmm"))


@dataclass(frozen=True)
class Candidates:
    """All of them, with the features of earlier tasks' plans (NaN: not known), and how many of these cannot be made here."""

    rows: tuple[Candidate, ...]
    points: Array  # (earlier plans, features)
    num_left_out: int = 0

    @property
    def columns(self) -> NDArray[np.intp]:
        """The column of each, -1 for new plans."""
        return np.array([row.column for row in self.rows], dtype=np.intp)

    @property
    def features(self) -> Array:
        """(plans, features)"""
        return np.array([row.features for row in self.rows]).reshape(len(self.rows), len(NAMES))

    @property
    def memory(self) -> Array:
        """Bytes of each."""
        return np.array([row.predicted_bytes for row in self.rows], dtype=float)


def candidates(step: Step, earlier: Earlier, budget: int | str, others: Iterable[tuple[str, Plan]] = ()) -> Candidates:
    """The plans to choose from; `others` are further ones, by label."""
    found: dict[object, Candidate] = {}
    num_left_out = 0
    points = np.full((len(earlier.plans), len(NAMES)), np.nan)
    for column, row in enumerate(earlier.plans):
        made = _candidate(step, row.label, lambda row=row: step.plan_of(row), column)
        if made is not None:
            points[column] = made.features
            found.setdefault(_key(made.plan), made)
        elif row.plan is not None:
            points[column], num_left_out = features_of(Plan.from_json(row.plan)), num_left_out + 1
    for label, make in (*_general(step, budget), *((label, lambda plan=plan: plan) for label, plan in others)):
        made = _candidate(step, label, make, -1)
        if made is not None:
            found.setdefault(_key(made.plan), made)
    return Candidates(tuple(_told_apart(found.values())), points, num_left_out)


def _general(step: Step, budget: int | str) -> Iterator[tuple[str, Callable[[], Plan]]]:
    """Plans that are for any task."""
    yield AS_WRITTEN, Plan
    for name in PRESETS:
        yield name, lambda name=name: Plan.preset(name)
    if step.trace_of is not None:
        share, nbytes = say_bytes(budget) if isinstance(budget, int) else budget, parse_bytes(budget, whole=step.full_bytes)
        yield f"assign {share}", lambda: step.made(nbytes)
        yield f"assign {share}, layers again", lambda: step.made(nbytes, recompute=True)


def _candidate(step: Step, label: str, make: Callable[[], Plan], column: int) -> Candidate | None:
    """None where the plan cannot be made for this step, or speaks of slots that it does not have."""
    try:
        plan = make()
        return Candidate(label, plan, step.bytes_of(plan), column, step.features(plan))
    except (BudgetError, PlanError):
        return None


def _key(plan: Plan) -> object:
    return plan.rules, plan.recompute


def _told_apart(rows: Iterable[Candidate]) -> Iterator[Candidate]:
    """Labels are told apart: the second of two equal ones has a number behind it."""
    seen: dict[str, int] = {}
    for row in rows:
        seen[row.label] = number = seen.get(row.label, 0) + 1
        yield row if number == 1 else Candidate(f"{row.label} ({number})", row.plan, row.predicted_bytes, row.column, row.features)
