"""The plans that `pick` chooses from: those of earlier tasks, presets, and plans with a format for each slot, made for the budget.

A plan of earlier tasks that is made anew for each task has a recipe (`assign/assign.py`). Plans that say the same are one; plans
that speak of
slots which this step does not have are left out, and counted.

What a plan is like, as numbers that compare plans: how coarsely the tensors of each role wait, and how short their range is.

    coarseness   log2(1 + 2^(8 - bits)), bits being the significant ones of the format; in bits lost below 8, and about 0 above
    range        exponents that floats without a block lack: 5 less those that they have, from 0 up

With a trace, every tensor counts that backward needs the values of, as it really waits (pins, tensors that stay): errors of slots add up,
so bits are those of the mean error, and a plan with a format for each slot lies between those with one for all. Without one, a plan is
what its rules say.

>>> four = features_of(Plan.preset("activations4"))
>>> dict(zip(NAMES, four.round(1).tolist(), strict=True))["activation"]
5.0
>>> features_of(Plan()).tolist() == [0.0] * len(NAMES)
True
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paredown.assign.assign import PlanTemplate, assign
from paredown.errors import BudgetError, PlanError
from paredown.formats.element import ElementKind
from paredown.formats.format import Format
from paredown.pick.prior_data import PlanRow, PriorData
from paredown.plan.checkpointed_trace import checkpointed_trace
from paredown.plan.plan import Plan
from paredown.plan.presets import PRESETS
from paredown.plan.replay import resolve_parameter_formats, slot_storages
from paredown.plan.selectors import Selector
from paredown.plan.storage import significant_bits
from paredown.roles import Role
from paredown.sizes import parse_bytes, say_bytes
from paredown.trace.operations import Use
from paredown.trace.trace import Trace


def plan_of_row(row: PlanRow, trace: Trace) -> Plan:
    """The plan of a column, for this step."""
    return PlanTemplate.parse(row.recipe).make(trace) if row.plan is None else Plan.from_json(row.plan)


# --- What a plan is like, as numbers that compare plans ---

Array = NDArray[np.float64]
ROLES = (Role.ACTIVATION, Role.ERROR, Role.WEIGHT, Role.GRADIENT, Role.MOMENT1, Role.MOMENT2)
NAMES = (*(role.value for role in ROLES), "range")
FULL = 24.0  # significant bits of float32
PIVOT = 8.0  # above so many, more bits hardly matter
ENOUGH = 5  # exponent bits
RESIDUE_BITS = 8


def features_of(plan: Plan, trace: Trace | None = None) -> Array:
    """The numbers of NAMES, (num_features,)."""
    formats = _by_rules(plan) if trace is None else _by_slots(plan, trace)
    coarse = [_coarseness(formats.get(role, ())) for role in ROLES]
    lacks = max((_lacking(format) for found in formats.values() for format in found if format is not None), default=0.0)
    return np.array([*coarse, lacks])


def bits_of(format: Format | None) -> float:
    """Significant bits; of a block of another length than 64, as many as its largest value leaves to the others.

    >>> bits_of(Format.parse("int4/64@bf16")), round(bits_of(Format.parse("int4/1024@bf16")), 1)
    (3.0, 2.6)
    """
    if format is None:
        return FULL
    bits = float(significant_bits(format) + (format.minimum is not None))  # a minimum for each block was worth one in trained tasks
    if format.block is None or format.element.kind is ElementKind.FLOAT:
        return bits
    return bits - 0.5 * float(np.log2(np.log(max(format.block, 2)) / np.log(64)))  # the largest of n normal values: sqrt(2 ln n)


def _coarseness(formats: Iterable[Format | None]) -> float:
    """Of the mean of the squared errors, 4^-bits."""
    bits = [bits_of(format) for format in formats]
    if not bits or min(bits) >= FULL:
        return 0.0
    effective = -0.5 * np.log2(np.mean(4.0 ** -np.array(bits)))
    return float(np.log2(1 + 2.0 ** (PIVOT - effective)))


def _lacking(format: Format) -> float:
    element = format.element
    exponent_bits = element.width - element.mantissa_bits - element.signed
    return max(0.0, float(ENOUGH - exponent_bits)) if format.block is None and element.kind is ElementKind.FLOAT else 0.0


def _by_rules(plan: Plan) -> dict[Role, list[Format | None]]:
    found: dict[Role, list[Format | None]] = {}
    for text, assignment in plan.rules:
        found.setdefault(Selector.parse(text).role or Role.ACTIVATION, []).append(assignment.format)
    return {role: [format for format in formats if format is not None] for role, formats in found.items()}


def _by_slots(plan: Plan, trace: Trace) -> dict[Role, list[Format | None]]:
    """What every slot gets; those that backward needs a bit or a shape of are exact, and those computed again follow others."""
    seen = checkpointed_trace(trace, plan.recompute)
    chosen = slot_storages(seen, plan)
    needed = [slot for slot in seen.activations if any(saver.use is Use.VALUE for saver in slot.savers)]
    found: dict[Role, list[Format | None]] = {Role.ACTIVATION: [chosen[slot.name].format for slot in needed]}
    for weight in trace.of(Role.WEIGHT):
        given = resolve_parameter_formats(weight, plan)
        found.setdefault(Role.WEIGHT, []).append(None if given.residue_bytes else given.weight)
        found.setdefault(Role.GRADIENT, []).append(given.gradient)
        for role in (Role.MOMENT1, Role.MOMENT2):
            is_plain = given.is_full or (given.weight is None and given.gradient is None)
            found.setdefault(role, []).append(None if is_plain else plan.find((weight.name,), role).format)
    return found


# --- The plans that `pick` chooses from ---

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
class TaskStep:
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


def candidates(step: TaskStep, earlier: PriorData, budget: int | str, others: Iterable[tuple[str, Plan]] = ()) -> Candidates:
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


def _general(step: TaskStep, budget: int | str) -> Iterator[tuple[str, Callable[[], Plan]]]:
    """Plans that are for any task."""
    yield AS_WRITTEN, Plan
    for name in PRESETS:
        yield name, lambda name=name: Plan.preset(name)
    if step.trace_of is not None:
        share, nbytes = say_bytes(budget) if isinstance(budget, int) else budget, parse_bytes(budget, whole=step.full_bytes)
        yield f"assign {share}", lambda: step.made(nbytes)
        yield f"assign {share}, layers again", lambda: step.made(nbytes, recompute=True)


def _candidate(step: TaskStep, label: str, make: Callable[[], Plan], column: int) -> Candidate | None:
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
