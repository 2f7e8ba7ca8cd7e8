"""The candidates of a pick: plans of the prior, presets, and plans that `assign` makes for the budget, with bytes and features.

Plans with equal rules are one candidate. A plan with rules for slots that this step does not have is left out. A
column of the prior may be a template (`assignment/assign.py`), from which a plan is made for this step.

Features are numbers that compare plans: for each role how much precision its format loses, and for all roles the missing exponent
range.

    precision lost   log2(1 + 2^(8 - bits)), with the significant bits of the format: the bits below 8, and about 0 above 8
    range            exponent bits that unscaled floats lack: 5 less those that they have, from 0 up

With a trace, the features count the formats that slots really get (pins, tensors that stay unmodified) over all tensors whose
values backward needs. Squared errors of slots add up, so the bits are those of the mean squared error, and a plan with a format for
each slot lies between plans with one format for all. Without a trace, the features come from the rules alone.

>>> four = features_of(Plan.preset("activations4"))
>>> dict(zip(NAMES, four.round(1).tolist(), strict=True))["activation"]
4.0
>>> features_of(Plan()).tolist() == [0.0] * len(NAMES)
True
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from paredown.assignment.assign import PlanTemplate, assign
from paredown.autograd.operations import Use
from paredown.errors import BudgetError, PlanError
from paredown.formats.element import ElementKind
from paredown.formats.format import Format
from paredown.plan.byte_intervals import resolve_parameter_formats, slot_storages
from paredown.plan.footprint import peak_of
from paredown.plan.plan import Plan
from paredown.plan.planned_step import planned_step
from paredown.plan.presets import PRESETS
from paredown.plan.selectors import Selector
from paredown.plan.storage import significant_bits
from paredown.plan.trace import Trace
from paredown.roles import Role
from paredown.sizes import parse_bytes, say_bytes
from paredown.study.priors.prior_data import PlanRow, PriorData
from paredown.study.sweeps.plan_labels import BASELINE, distinct

Array = NDArray[np.float64]
ROLES = (Role.ACTIVATION, Role.ERROR, Role.WEIGHT, Role.GRADIENT, Role.MOMENT1, Role.MOMENT2)
NAMES = (*(role.value for role in ROLES), "range")
FP32_BITS = 24.0  # significant bits of float32
PIVOT_BITS = 8.0  # more significant bits than these hardly matter
ENOUGH_EXPONENT_BITS = 5
UNPROPOSED = {
    Role.FROZEN.value,
    "product",
}  # roles of presets that are not proposed: tasks train all parameters, and forward is unmodified


@dataclass(frozen=True)
class CandidatePlan:
    """Describes a plan that `pick` may choose: its predicted peak, and features, numbers by which plans are compared.

    `column` is the plan's column in the prior, the errors of earlier tasks; -1 if the prior does not have the plan.
    """

    label: str
    plan: Plan
    predicted_bytes: int
    column: int
    features: Array


@dataclass(frozen=True)
class TaskStep:
    """Makes plans for the training step of a task, and predicts their peaks; `full_bytes` is the baseline's predicted peak.

    The trace depends on the plan, since plans with formats for weights or optimizer state run another optimizer.

    `trace_of` is None where plans format values that no step stores (simulate mode); then no plan is made for the step, and
    features come from rules alone.
    """

    bytes_of: Callable[[Plan], int]
    trace_of: Callable[[Plan], Trace] | None
    full_bytes: int
    _solved: dict[tuple[int, str], Plan | BudgetError] = field(
        default_factory=dict[tuple[int, str], Plan | BudgetError], repr=False
    )

    def features(self, plan: Plan) -> Array:
        """Return the features of a plan, numbers by which plans are compared, such as the precision that each role loses."""
        return features_of(plan, None if self.trace_of is None else self.trace_of(plan))

    def plan_of(self, row: PlanRow) -> Plan:
        """Return the plan of a column of the prior (errors of earlier tasks); `assign` makes it if the column is a template."""
        if row.plan is not None:
            return Plan.from_json(row.plan)
        template, budget_bytes = PlanTemplate.parse(row.template), self.budget_of(row)
        for (_, method), found in self._solved.items():
            if method == template.method and isinstance(found, BudgetError) and (found.smallest_bytes or 0) > budget_bytes:
                raise found  # no plan was as small as this
        return self._solution(budget_bytes, template)

    def budget_of(self, row: PlanRow) -> int:
        """Return the budget in bytes for which `assign` makes the plan of a column that is a template; 0 for other columns."""
        if row.plan is not None:
            return 0
        trace = self.state_trace()  # of which `assign` takes the percentage
        return parse_bytes(PlanTemplate.parse(row.template).budget, whole=peak_of(trace, Plan()))

    def assigned(self, budget_bytes: int) -> Plan:
        """Return the plan that `assign` makes for a budget, with a format for each slot (tensor of the step)."""
        return self._solution(budget_bytes, PlanTemplate(str(budget_bytes)))

    def _solution(self, budget_bytes: int, template: PlanTemplate) -> Plan:
        """Return the plan that `assign` makes for a budget by the template's method, or raise its BudgetError; computed once."""
        key = budget_bytes, template.method
        if key not in self._solved:
            try:
                self._solved[key] = template.make(self.state_trace())
            except BudgetError as error:
                self._solved[key] = error
        if isinstance(found := self._solved[key], BudgetError):
            raise found
        return found

    def state_trace(self) -> Trace:
        """Return the trace of the step under a plan with formats for weights and optimizer state; PlanError if it is simulated."""
        if self.trace_of is None:
            raise PlanError("plans with a format for each slot need a step that stores them: mode 'store', not a simulated one.")
        return self.trace_of(Plan.preset("lpmm"))


@dataclass(frozen=True)
class Candidates:
    """Holds all plans that `pick` may choose (`rows`), and features of the prior's plans (`points`), NaN where unknown."""

    rows: tuple[CandidatePlan, ...]
    points: Array  # (plans of the prior, features)

    @property
    def columns(self) -> NDArray[np.intp]:
        """Return each candidate plan's column in the prior, the errors of earlier tasks; -1 if the prior lacks the plan."""
        return np.array([row.column for row in self.rows], dtype=np.intp)

    @property
    def error_columns(self) -> NDArray[np.intp]:
        """Return the prior's column with each candidate plan's errors: the baseline's, if the plan quantizes nothing."""
        baseline = next((row.column for row in self.rows if row.plan.changes_nothing), -1)
        return np.where([row.plan.quantizes_nothing and baseline >= 0 for row in self.rows], baseline, self.columns)

    @property
    def features(self) -> Array:
        """Return the features of the candidate plans, numbers by which they are compared, (plans, features)."""
        return np.array([row.features for row in self.rows]).reshape(len(self.rows), len(NAMES))

    @property
    def memory(self) -> Array:
        """Return the predicted peak bytes of the candidate plans, (plans,)."""
        return np.array([row.predicted_bytes for row in self.rows], dtype=float)


def candidates(step: TaskStep, prior_data: PriorData, budget: int | str, others: Iterable[tuple[str, Plan]] = ()) -> Candidates:
    """Return the plans that `pick` compares: the prior's, presets, those that `assign` makes for `budget`, and `others`.

    A template of the prior (a plan that `assign` makes for a budget) is left out if its budget is above `budget`, to save time.
    """
    by_key: dict[object, CandidatePlan] = {}
    budget_bytes = parse_bytes(budget, whole=step.full_bytes)
    points = np.full((len(prior_data.plans), len(NAMES)), np.nan)
    for column, row in enumerate(prior_data.plans):
        if step.trace_of is not None and step.budget_of(row) > budget_bytes:
            continue
        candidate = _candidate(step, row.label, lambda row=row: step.plan_of(row), column)
        if candidate is not None:
            points[column] = candidate.features
            by_key.setdefault(candidate.plan.key, candidate)
        elif row.plan is not None:
            points[column] = features_of(Plan.from_json(row.plan))
    for label, make in (*_general(step, budget), *((label, lambda plan=plan: plan) for label, plan in others)):
        candidate = _candidate(step, label, make, -1)
        if candidate is not None:
            by_key.setdefault(candidate.plan.key, candidate)
    labels = distinct(candidate.label for candidate in by_key.values())
    rows = tuple(replace(candidate, label=label) for candidate, label in zip(by_key.values(), labels, strict=True))
    return Candidates(rows, points)


def _general(step: TaskStep, budget: int | str) -> Iterator[tuple[str, Callable[[], Plan]]]:
    """Yield labels and functions that make plans for any task: the baseline, presets, and plans that `assign` makes for the budget."""
    yield BASELINE, Plan
    for name in (name for name, row in PRESETS.items() if not row.formats.keys() & UNPROPOSED):
        yield name, lambda name=name: Plan.preset(name)
    if step.trace_of is not None:
        share, nbytes = say_bytes(budget) if isinstance(budget, int) else budget, parse_bytes(budget, whole=step.full_bytes)
        yield f"assign {share}", lambda: step.assigned(nbytes)
        yield f"assign {share}, checkpointing", lambda: assign(step.state_trace(), nbytes, recompute=True)


def _candidate(step: TaskStep, label: str, make: Callable[[], Plan], column: int) -> CandidatePlan | None:
    """Return the plan of `make()` as a candidate called `label`; None if it cannot be made or has rules for absent tensors.

    `column` is the plan's column in the prior, or -1.
    """
    try:
        plan = make()
        return CandidatePlan(label, plan, step.bytes_of(plan), column, step.features(plan))
    except (BudgetError, PlanError):
        return None


# --- features ----------------------------------------------------------------------------------------------------------


def features_of(plan: Plan, trace: Trace | None = None) -> Array:
    """Return the numbers by which plans are compared, in the order of NAMES; without a `trace`, from the plan's rules alone."""
    formats = _by_rules(plan) if trace is None else _by_slots(plan, trace)
    precision_lost = [_precision_lost(formats.get(role, ())) for role in ROLES]
    lossy = [format for of_role in formats.values() for format in of_role if format is not None]
    range_lost = max(map(_missing_exponent_bits, lossy), default=0.0)
    return np.array([*precision_lost, range_lost])


def effective_bits(format: Format | None) -> float:
    """Return the significant bits of a format; those of integers are corrected for the largest value of a block, which sets the scale.

    >>> effective_bits(Format.parse("int4/64@bf16")), round(effective_bits(Format.parse("int4/1024@bf16")), 1)
    (3.0, 2.6)
    """
    if format is None:
        return FP32_BITS
    bits = float(
        significant_bits(format) + (format.minimum is not None)
    )  # a minimum for each block was worth one bit on trained tasks
    if format.block is None or format.element.kind is ElementKind.FLOAT:
        return bits
    return bits - 0.5 * float(np.log2(np.log(max(format.block, 2)) / np.log(64)))  # the largest of n normal values: sqrt(2 ln n)


def _precision_lost(formats: Iterable[Format | None]) -> float:
    """Return the bits of precision that tensors lose in these `formats` (None: float32), by the mean of their squared errors."""
    bits = [effective_bits(format) for format in formats]
    if not bits or min(bits) >= FP32_BITS:
        return 0.0
    effective = -0.5 * np.log2(np.mean(4.0 ** -np.array(bits)))
    return float(np.log2(1 + 2.0 ** (PIVOT_BITS - effective)))


def _missing_exponent_bits(format: Format) -> float:
    element = format.element
    exponent_bits = element.width - element.mantissa_bits - element.signed
    return (
        max(0.0, float(ENOUGH_EXPONENT_BITS - exponent_bits)) if format.block is None and element.kind is ElementKind.FLOAT else 0.0
    )


def _by_rules(plan: Plan) -> dict[Role, list[Format | None]]:
    formats_by_role: dict[Role, list[Format | None]] = {}
    for text, assignment in plan.rules:
        formats_by_role.setdefault(Selector.parse(text).role or Role.ACTIVATION, []).append(assignment.format)
    return {role: [format for format in formats_of_role if format is not None] for role, formats_of_role in formats_by_role.items()}


def _by_slots(plan: Plan, trace: Trace) -> dict[Role, list[Format | None]]:
    """Return the formats of all stored tensors by role (None: unmodified); of activations, only those whose values backward needs."""
    trace_with_checkpoints = planned_step(trace, plan)
    storages = slot_storages(trace_with_checkpoints, plan)
    needed = [slot for slot in trace_with_checkpoints.activations if any(saver.use is Use.VALUE for saver in slot.savers)]
    formats: dict[Role, list[Format | None]] = {Role.ACTIVATION: [storages[slot.name].format for slot in needed]}
    for weight in trace.of(Role.WEIGHT):
        parameter = resolve_parameter_formats(weight, plan)
        formats.setdefault(Role.WEIGHT, []).append(None if parameter.residue_bytes else parameter.weight)
        formats.setdefault(Role.GRADIENT, []).append(parameter.gradient)
        for role in (Role.MOMENT1, Role.MOMENT2):
            is_plain = parameter.is_full or (parameter.weight is None and parameter.gradient is None)
            formats.setdefault(role, []).append(None if is_plain else plan.find((weight.name,), role).format)
    return formats
