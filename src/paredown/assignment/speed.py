"""Finds the plan of `assign(..., prefer="speed")`: of plans within the budget and the error allowance, the one predicted to be quickest.

Candidates, whose times plan/step_time.py predicts from the calibration of the device:

    exact           every layer checkpointed, every second layer, and as few as fit; nothing quantized
    accuracy        the plan of prefer="accuracy"
    packed          for some numbers of checkpointed layers: as few packed tensors, or packed bytes, as fit

A packed candidate follows the greedy path of assignment/strategies.py with another cost: seconds of packing plus a weight times the error,
for weights from 0 (fewest seconds, lowest formats) up. If the host is the bottleneck, each packed tensor takes the same time; if the
device is, time grows with bytes. Both costs are tried, and the prediction of the whole step decides; of plans within NOISE of the
quickest, that of least error. The exact candidates make sure that no plan is predicted to be slower than checkpointing every layer, or
every second one.

Checkpointing every layer, or every second one, is a candidate also where its expected peak is within the budget and its margin is not:
nothing else may be as quick at the peak that it reaches. Such a plan is taken only if it is quicker than all others by more than NOISE, and
its reason states the smaller margin. Measured peaks of checkpointed steps were up to 0.15 % above expected ones (decision 034).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paredown.assignment.assignment_problem import AssignmentProblem
from paredown.assignment.checkpointed_layers import UNMODIFIED, ProblemOf, Solution, fewest_layers, repeated_layers
from paredown.assignment.storage_options import LADDER, Ledger
from paredown.assignment.strategies import AssignmentPoint, downward_path, raised_points
from paredown.errors import BudgetError, CalibrationError, PlanError
from paredown.formats.format import Format
from paredown.plan.calibration import REFERENCE, Calibration
from paredown.plan.checkpointed_trace import checkpointed_trace
from paredown.plan.footprint import bound_of, peak_of
from paredown.plan.plan import Plan
from paredown.plan.step_time import StepTime, predict_step
from paredown.plan.trace import Slot, Trace
from paredown.roles import Role
from paredown.serial import is_number
from paredown.sizes import say_bytes

PREFERENCES = ("speed", "accuracy")
ALLOWANCE_FACTOR = 1.1  # times the error of prefer="accuracy" is allowed
NOISE = 0.02  # relative noise of measured step times
ERROR_WEIGHTS = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0)
MOST_PACKED = 8  # candidates whose whole step is predicted
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Preference:
    """The checked arguments of `assign` about speed: preference, error allowance and calibration."""

    prefer: str
    error_allowance: float | None
    calibration: Calibration
    note: str = ""  # why times are those of REFERENCE

    @staticmethod
    def of(trace: Trace, prefer: object, error_allowance: Any, calibration: object) -> Preference | None:
        """Return the arguments of `assign` about speed as one checked value; None if `prefer` is None."""
        if prefer not in (None, *PREFERENCES):
            raise PlanError(f"prefer is {prefer!r}. Allowed: {', '.join(map(repr, PREFERENCES))}, or None.")
        is_allowance = isinstance(error_allowance, int | float) and is_number(error_allowance) and error_allowance >= 0
        if error_allowance is not None and not (is_allowance and prefer == "speed"):
            raise PlanError(
                f"error_allowance is {error_allowance!r} and prefer {prefer!r}: error_allowance is used with prefer='speed' only. It is "
                "the largest predicted squared gradient error, a number from 0 up."
            )
        if not isinstance(calibration, Calibration | None) or (calibration is not None and prefer != "speed"):
            raise PlanError(
                "calibration is used with prefer='speed' or a host_budget only: pass the result of paredown.calibrate()."
            )
        if prefer is None:
            return None
        from paredown.predict.device_calibration import calibration_for  # imports torch, which `assign` itself does without

        found, note = (calibration, "") if calibration is not None else calibration_for(trace)
        return Preference(str(prefer), error_allowance, _checked(found or replace(REFERENCE, device=trace.device), trace), note)

    def allowed_error(self, accurate: Solution) -> float:
        """Return the largest predicted error that a quicker plan may have.

        `accurate` has the formats and layers for prefer="accuracy"; unless the user gave an allowance, its error times 1.1 is allowed.
        """
        return ALLOWANCE_FACTOR * accurate[1].error if self.error_allowance is None else float(self.error_allowance)


def _checked(calibration: Calibration, trace: Trace) -> Calibration:
    if calibration.device != trace.device:
        raise CalibrationError(f"the trace is of a step on {trace.device}, the calibration of {calibration.device_name}.")
    return calibration


@dataclass(frozen=True, eq=False)
class Candidate:
    """A plan that may be chosen for `prefer="speed"`, with its predicted step time.

    `solution` has the formats and checkpointed layers from which the plan was made. `keeps_margin` says whether the plan keeps a part of
    the budget free for memory that is not predicted.
    """

    solution: Solution
    plan: Plan
    time: StepTime
    keeps_margin: bool

    @property
    def error(self) -> float:
        """Return the predicted squared gradient error of the plan."""
        return self.solution[1].error


def quickest_plan(candidates: Sequence[Candidate]) -> Candidate:
    """Return the candidate of least error among those whose predicted time is within NOISE (2 %) of the quickest.

    Candidates that keep a margin for unpredicted memory come first: one without it is returned only if it is quicker by more than NOISE, or
    if there is no other.
    """

    def best(of: Sequence[Candidate]) -> Candidate:
        near = min(one.time.seconds for one in of) * (1 + NOISE)
        return min((one for one in of if one.time.seconds <= near), key=lambda one: (one.error, one.time.seconds))

    safe, tight = ([one for one in candidates if one.keeps_margin == keeps] for keeps in (True, False))
    chosen = [best(group) for group in (safe, tight) if group]
    is_tight = len(chosen) == 2 and chosen[1].time.seconds * (1 + NOISE) < chosen[0].time.seconds
    return chosen[-1] if is_tight else chosen[0]


def quickest_solution(
    trace: Trace,
    budget_bytes: int,
    problem_of: ProblemOf,
    plan_of: Callable[[Solution], Plan],
    preference: Preference,
    candidates: Iterable[Solution],
    *,
    has_layers: bool,
) -> Candidate:
    """Return the quickest plan that can be made from `candidates` or from further solutions, which pack tensors.

    A solution is formats and checkpointed layers. The first candidate must be the solution of prefer="accuracy". `problem_of` sets up the
    search for plans of a trace, `plan_of` makes the plan of a solution. `has_layers` says whether the further solutions may checkpoint
    layers.
    """
    given = list(candidates)
    allowed = preference.allowed_error(given[0])
    packed = packed_solutions(trace, budget_bytes, problem_of, preference.calibration, allowed, has_layers=has_layers)
    within = [one for one in given if one[1].error <= allowed] + list(packed)
    if not within:
        raise BudgetError(
            f"no plan within {say_bytes(budget_bytes)} was found whose predicted squared gradient error is at most {allowed:g}; the least "
            f"found is {min(one[1].error for one in given):.2g}. Raise error_allowance or the budget."
        )
    plans = [(one, plan_of(one)) for one in within]
    return quickest_plan(
        [
            Candidate(
                solution,
                plan,
                predict_step(trace, plan, calibration=preference.calibration),
                bound_of(trace, plan) <= budget_bytes,
            )
            for solution, plan in plans
        ]
    )


def exact_solutions(trace: Trace, budget_bytes: int, problem_of: ProblemOf) -> Iterator[Solution]:
    """Yield solutions that quantize nothing and checkpoint all layers, every second one, or the fewest that fit.

    The first two are left out if their expected peak exceeds the budget. The last one fits with a margin for unpredicted memory.
    """
    layers = repeated_layers(trace)

    def fits(chosen: tuple[str, ...], size_of: Callable[[Trace, Plan], int]) -> bool:
        return size_of(trace, Plan((), recompute=chosen)) <= budget_bytes

    if not layers:
        return
    choices = [chosen for chosen in (tuple(layers), tuple(sorted(layers)[::2])) if fits(chosen, peak_of)]
    if fits(tuple(layers), bound_of):
        count = fewest_layers(lambda count: fits(tuple(layers[:count]), bound_of), 0, len(layers))
        choices.append(tuple(layers[:count]))
    for chosen in dict.fromkeys(choices):
        problem = problem_of(checkpointed_trace(trace, chosen), UNMODIFIED)
        yield problem, problem.points[0], chosen


def packed_solutions(
    trace: Trace, budget_bytes: int, problem_of: ProblemOf, calibration: Calibration, allowed: float, *, has_layers: bool
) -> list[Solution]:
    """Return solutions that pack tensors, fit the budget, and have an error of at most `allowed`, the quickest first.

    Their time is compared as the sum of seconds over tensors, and only the MOST_PACKED quickest are returned. `has_layers` says whether
    they may also checkpoint layers.
    """
    layers = repeated_layers(trace) if has_layers else []
    counts = sorted({len(layers) * part // 4 for part in range(5)} | ({1} if layers else set()))
    found: dict[tuple[object, ...], tuple[float, Solution]] = {}
    for count in counts:
        step = checkpointed_trace(trace, tuple(layers[:count]))
        problem = problem_of(step, LADDER)
        if problem.ledger.floor_bytes > budget_bytes:
            continue
        base = predict_step(trace, Plan((), recompute=tuple(layers[:count])), calibration=calibration)
        costs = row_costs(problem, calibration)
        for chosen in cheapest_choices(problem.ledger, costs, budget_bytes):
            point = AssignmentPoint(chosen, problem.ledger.peak(chosen), problem.ledger.error(chosen))
            if point.error <= allowed:
                seconds = base + StepTime(float(costs[0][chosen].sum()), float(costs[1][chosen].sum()))
                found[count, *chosen.tolist()] = seconds.seconds, (problem, point, tuple(layers[:count]))
    return [solution for _, solution in sorted(found.values(), key=lambda pair: pair[0])[:MOST_PACKED]]


def row_costs(problem: AssignmentProblem, calibration: Calibration) -> tuple[Floats, Floats]:
    """Return the seconds that each row of `problem.ledger` (storage option) adds to a step, on device and host."""
    slots = {slot.name: slot for slot in problem.trace.activations}
    rows = [option for item in problem.ledger.items for option in item.options]

    def packed(formats: Iterable[tuple[tuple[str, Role], Format | None]]) -> list[tuple[Slot, Format]]:
        return [(slots[name], one) for (name, role), one in formats if one is not None and role is Role.ACTIVATION]

    chosen = [packed(option.formats) for option in rows]
    device = [sum(calibration.format_cost(one).device_seconds(slot.nbytes) for slot, one in row) for row in chosen]
    host = [sum(calibration.format_cost(one).host_seconds * len(slot.names) for slot, one in row) for row in chosen]
    return np.array(device), np.array(host)


def cheapest_choices(ledger: Ledger, costs: tuple[Floats, Floats], budget_bytes: int) -> Iterator[NDArray[np.int64]]:
    """Yield ways to store all tensors within the budget that add few seconds to a step and have little error.

    Each is an array with the row of `ledger` of each item. `costs` are the seconds of each row, on the device and on the host.
    """
    error_scale = max(float(ledger.errors.max(initial=0.0)), 1e-30)
    for seconds in costs:
        scale = max(float(seconds.max(initial=0.0)), 1e-30)
        for weight in ERROR_WEIGHTS:
            priced = replace(ledger, errors=seconds / scale + weight * ledger.errors / error_scale)
            point = next((one for one in downward_path(priced) if one.peak_bytes <= budget_bytes), None)
            if point is not None:
                raised = raised_points(priced, point, priced.load(point.chosen), budget_bytes)
                yield (raised[0] if raised else point).chosen
