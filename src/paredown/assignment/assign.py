"""`assign` finds a format for every slot (tensor of a step): the predicted peak is within a budget, at the least predicted gradient error.

    plan = assign(trace, "6GiB")                                              # errors by the role table
    plan = assign(trace, "6GiB", method="sensitivity", sensitivities=probe(model, batch, trace))

The budget covers all that a footprint counts: activations, weights, gradients and optimizer state. It is never exceeded: the last
step checks the peak of `footprint(trace, plan)`.

>>> import torch
>>> from paredown.predict.trace_step import trace_step
>>> layers = (part for _ in range(6) for part in (torch.nn.Linear(64, 64), torch.nn.GELU()))
>>> batch = torch.empty(512, 64), torch.empty(512, 64)
>>> trace = trace_step(torch.nn.Sequential(*layers), batch, loss=torch.nn.functional.mse_loss, device="cpu")
>>> plan = assign(trace, "60%")
>>> bool(footprint(trace, plan).fits("60%"))
True
>>> assign(trace, "1%", method="alphabet")  # doctest: +ELLIPSIS
Traceback (most recent call last):
    ...
paredown.errors.PlanError: method 'alphabet' is unknown. Allowed: size (...

Where no plan fits, the BudgetError names the smallest peak, the slots that hold most of it, and what to change.

A `PlanTemplate` is the text `assign BUDGET METHOD`, from which a plan is made for each task; columns of a prior and sweeps contain
such texts. A plan made from a template has it in `made_for`; templates that make equal plans on a task share one plan.

>>> PlanTemplate.parse("assign 40% role")
PlanTemplate(budget='40%', method='role')
>>> PlanTemplate.parse("by magic")
Traceback (most recent call last):
    ...
paredown.errors.PlanError: template 'by magic' cannot be read; it is 'assign BUDGET METHOD', such as 'assign 40% role'.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from paredown.assignment.assignment_problem import (
    AssignmentProblem,
    Formats,
    Rules,
    check_sensitivities,
    ladder_of,
    method_named,
    rules_of,
)
from paredown.assignment.checkpointed_layers import (
    UNMODIFIED,
    Solution,
    quickest_plan,
    recompute_choices,
    tolerated_error,
    with_choice,
    with_layers,
)
from paredown.assignment.offloaded_layers import HostBudget, offloaded_slots, with_offload
from paredown.assignment.sensitivity import Sensitivities
from paredown.assignment.speed import Preference, exact_solutions, quickest_solution
from paredown.assignment.storage_options import LADDER, Item, KnownItems, Ladder
from paredown.assignment.strategies import METHODS, AssignmentPoint, AssignMethod
from paredown.assignment.tiled_layers import say_tiled, tiled_steps
from paredown.errors import BudgetError, PlanError
from paredown.formats.format import Format
from paredown.plan.byte_intervals import Interval, fixed_intervals
from paredown.plan.calibration import Calibration
from paredown.plan.footprint import Footprint, bound_of, footprint, peak_of
from paredown.plan.plan import Plan
from paredown.plan.tiled_trace import Tiles
from paredown.plan.trace import Slot, Trace
from paredown.roles import Role
from paredown.sizes import parse_bytes, say_bytes, say_bytes_above, say_bytes_twice

__all__ = ["assign"]


NUM_NAMED_SLOTS = 3  # slots that an error message names
LARGEST_MARGIN = 8  # a margin is at most one part in this many of the budget; 45 MiB of 370 was the most seen (decision 034)
INCLUDED, NOT_ALLOWED = "Activation checkpointing is included.", "Activation checkpointing was not allowed."
OF_TENSORS = "Recomputing single tensors is included.", "Recomputing single tensors was not allowed."
TEMPLATE_FIELD = "recipe"  # of `made_for`; the name in files since version 0.1
SEPARATOR = "; "


def assign(
    trace: Trace,
    budget: int | str,
    *,
    method: str = "role",
    sensitivities: Sensitivities | None = None,
    levels: Sequence[str | Format | None] | None = None,
    seed: int = 0,
    recompute: bool | None = None,
    prefer: str | None = None,
    error_allowance: float | None = None,
    calibration: Calibration | None = None,
    host_budget: int | str | None = None,
) -> Plan:
    """Return the plan of least predicted gradient error whose predicted peak is within `budget`.

    `budget` is bytes, "6GiB", or "50%" of the baseline's peak. A plan fits if `footprint(trace, plan).peak_bytes` is within the budget, as
    for `Footprint.fits`. On CUDA the plan also keeps a margin below the budget for memory that is not predicted (`Footprint.bound_bytes` is
    within the budget too), and its reason states the margin. It keeps less if the margin would be more than an eighth of the budget, or if
    only plans without the margin fit.

    `method` is the name of a row of METHODS. `sensitivities`, the result of `probe`, are needed for method "sensitivity" only. `levels`
    lists the formats that activations may have, the most precise first, with None for unmodified; then weights, gradients and optimizer
    state stay unmodified, so that methods can be compared. `seed` is the seed of method "random".

    `recompute` says when repeated layers may be checkpointed (activation checkpointing), or single tensors of a compiled step recomputed,
    which costs time: None if formats would be slower or their errors large, True if their errors would be large, False never
    (assignment/checkpointed_layers.py). With `levels`, and for methods that only serve comparisons, None means: only if nothing else fits.
    If no plan fits, layers run over pieces of the sequence too (tiles, assignment/tiled_layers.py), but not with `recompute` False, with
    `prefer`, or in these comparisons.

    `prefer` is "accuracy" for the least error, with checkpointed layers only if nothing else fits, or "speed" for the least predicted step
    time among plans whose predicted error is at most `error_allowance` (None: 1.1 times that of "accuracy"). Times follow from
    `calibration` (None: that of `paredown calibrate`, or of one H200 if nothing was measured; the plan's reason says which).

    `host_budget` is the bytes of host memory that packed activations may take between forward and backward, on a GPU; None for none. They
    are moved there if that costs less predicted time than fewer bits or recomputation (assignment/offloaded_layers.py).
    """
    recompute = _checked_recompute(trace, recompute)
    host = HostBudget.of(trace, host_budget, calibration)
    preference = Preference.of(trace, prefer, error_allowance, calibration if host is None or prefer == "speed" else None)
    strategy = method_named(method)
    if (preference or host) is not None and (levels is not None or strategy.order is not None):
        name = "prefer" if preference is not None else "host_budget"
        raise PlanError(
            f"{name} is not combined with levels, or with methods that are there for comparison: leave one of them out."
        )
    check_sensitivities(trace, strategy, sensitivities)
    ladder = None if levels is None else ladder_of(levels)
    baseline = footprint(trace)
    budget_bytes = parse_bytes(budget, whole=baseline.peak_bytes)
    made_for = _made_for(trace, method, budget_bytes)
    is_percentage = isinstance(budget, str) and "%" in budget
    planning = Planning.of(baseline, budget_bytes)
    if ladder is None and (baseline.peak_bytes <= budget_bytes if is_percentage else planning.has(baseline)):
        margin = _margin(baseline, budget_bytes)
        reason = f"The baseline's peak is {say_bytes(baseline.peak_bytes)}, within {say_bytes(budget_bytes)}{margin}."
        return Plan((), reason, made_for)

    def planned(step: Trace, tiles: Tiles, how: Planning) -> Plan:
        def found(slots: tuple[str, ...] = ()) -> tuple[Plan, float]:
            problem_of = _problems(strategy, sensitivities, ladder, seed, slots, keeps_margin=how.keeps_margin)
            errors: dict[Any, float] = {}

            def plan_of(solution: Solution) -> Plan:
                plan = _checked_plan(trace, solution, how=how, made_for=made_for, kept=Plan(tiles=tiles, offload=slots))
                errors[plan.key] = solution[1].error
                return plan

            plan = _planned(step, how, problem_of, plan_of, preference, recompute, ladder)
            return plan, errors[plan.key]

        if host is None:
            return found()[0]
        is_accurate = preference is not None and preference.prefer == "accuracy"
        tolerated = [tolerated_error(step, LADDER, with_layers) for with_layers in (True, None)]
        return host.best(trace, step, found, () if is_accurate else tolerated)

    failed: BudgetError | None = None
    for attempt in _attempts(trace, planning, may_tile=not (recompute is False or ladder or preference or strategy.order)):
        try:
            return planned(*attempt)
        except BudgetError as error:
            failed = error
    assert failed is not None
    raise failed


def _attempts(trace: Trace, planning: Planning, *, may_tile: bool) -> Iterator[tuple[Trace, Tiles, Planning]]:
    """Yield the searches for a plan that `assign` tries one after the other until one finds a plan.

    Each is (trace, modules that run over pieces of the sequence, budget and margin). The first keeps a margin for unpredicted memory, the
    second keeps none; if `may_tile`, further ones run modules over shorter and shorter pieces.
    """
    yield trace, (), planning
    if planning.has_margin:
        yield trace, (), Planning(planning.budget_bytes, planning.budget_bytes, keeps_margin=False)
    if may_tile and not trace.is_compiled:
        yield from ((step, rules, planning) for step, rules in tiled_steps(trace))


@dataclass(frozen=True)
class Planning:
    """A budget in bytes, and how much of it `assign` keeps free for memory that is not predicted.

    With `keeps_margin`, a plan is found if its `Footprint.bound_bytes`, which includes that margin, is at most `within_bytes`; otherwise if
    its `Footprint.peak_bytes` is.
    """

    budget_bytes: int
    within_bytes: int
    keeps_margin: bool

    @staticmethod
    def of(baseline: Footprint, budget_bytes: int) -> Planning:
        """Return the limits for a search within `budget_bytes` that keeps at most an eighth free as a margin."""
        most = budget_bytes // LARGEST_MARGIN
        is_small = baseline.bound_bytes - baseline.peak_bytes <= most
        return Planning(budget_bytes, budget_bytes if is_small else budget_bytes - most, is_small)

    @property
    def has_margin(self) -> bool:
        """Return whether a part of the budget is kept free for memory that is not predicted."""
        return self.keeps_margin or self.within_bytes < self.budget_bytes

    @property
    def size_of(self) -> Callable[[Trace, Plan], int]:
        """Return the function (trace, plan) -> predicted peak bytes that must be at most `within_bytes`."""
        return bound_of if self.keeps_margin else peak_of

    def has(self, planned: Footprint) -> bool:
        """Return whether the predicted peak of `planned`, with the margin if one is kept, is at most `within_bytes`."""
        return (planned.bound_bytes if self.keeps_margin else planned.peak_bytes) <= self.within_bytes


def _planned(
    trace: Trace,
    how: Planning,
    problem_of: Callable[..., AssignmentProblem],
    plan_of: Callable[[Solution], Plan],
    preference: Preference | None,
    recompute: bool | None,
    ladder: Ladder | None,
) -> Plan:
    """Return the plan that `assign` finds in one search.

    With a `preference` it decides; otherwise the plan is the quickest of those with a small error, or if there is none, that of least
    error. `how` has the budget, `problem_of` sets up the search for plans of a trace, and `plan_of` turns a solution (formats and
    checkpointed layers) into a plan. `ladder` has the formats of the argument `levels` of `assign`, or is None.
    """
    if preference is not None:
        return _preferred(trace, how, problem_of, plan_of, preference, recompute)
    if recompute is None and ladder is None and problem_of(trace).method.order is None and recompute_choices(trace):
        quickest = quickest_plan(trace, how.within_bytes, problem_of, plan_of, how.size_of)
        if quickest is not None:
            return plan_of(quickest)
    tolerated = tolerated_error(trace, ladder or LADDER, recompute)
    return plan_of(_solve(trace, how.within_bytes, problem_of, tolerated, recompute))


def _preferred(
    trace: Trace,
    how: Planning,
    problem_of: Callable[..., AssignmentProblem],
    plan_of: Callable[[Solution], Plan],
    preference: Preference,
    recompute: bool | None,
) -> Plan:
    """Return the plan for `assign(..., prefer=...)`; with "speed", the plan's reason states the predicted step time."""
    is_speed, has_layers = preference.prefer == "speed", recompute is not False and not trace.is_compiled
    exact = list(exact_solutions(trace, how.budget_bytes, problem_of)) if is_speed and has_layers else []
    try:
        accurate = _solve(trace, how.within_bytes, problem_of, tolerated_error(trace, LADDER, recompute), recompute)
    except BudgetError:
        if not exact:
            raise
        accurate = exact[0]  # within the budget without its margin
    if not is_speed:
        return plan_of(accurate)
    chosen = quickest_solution(trace, how.within_bytes, problem_of, plan_of, preference, [accurate, *exact], has_layers=has_layers)
    by = (
        f"by the costs of one H200, not of this device: {preference.note}"
        if preference.note
        else f"by the calibration of {preference.calibration.device_name}."
    )
    return replace(chosen.plan, reason=f"{chosen.plan.reason} Predicted step {chosen.time!r}, {by}")


def _problems(
    strategy: AssignMethod,
    sensitivities: Sensitivities | None,
    ladder: Ladder | None,
    seed: int,
    offload: tuple[str, ...],
    *,
    keeps_margin: bool,
) -> Callable[..., AssignmentProblem]:
    """Return a function (trace, formats of activations) -> the search for plans of that trace by `strategy`.

    The formats are those of `ladder` unless the function gets others. `offload` names the saved tensors whose packed values are in host
    memory between forward and backward.
    """
    known: dict[Ladder | None, KnownItems] = {}

    def problem_of(step: Trace, allowed: Ladder | None = ladder) -> AssignmentProblem:
        is_local = sensitivities is None and strategy.eligible is None  # formats and errors of a slot follow from the slot alone
        items = known.setdefault(allowed, {}) if is_local else None
        given = partial(AssignmentProblem.of, with_offload(step, offload), strategy, sensitivities=sensitivities, ladder=allowed)
        return given(seed=seed, known=items, keeps_margin=keeps_margin)

    return problem_of


def _checked_recompute(trace: object, recompute: bool | None) -> bool | None:
    if not isinstance(trace, Trace):
        raise PlanError(f"assign takes a Trace and a budget, not {type(trace).__name__}: assign(trace_step(model, batch), '6GiB').")
    if recompute not in (None, True, False):
        raise PlanError(
            f"recompute is {recompute!r}: None (layers are checkpointed if nothing else fits), True (also if errors would be large) or "
            "False (never). To name the layers yourself: plan.recomputing('layers.0')."
        )
    return recompute


def _solve(
    trace: Trace, budget_bytes: int, problem_of: Callable[[Trace], AssignmentProblem], tolerated: float, recompute: bool | None
) -> Solution:
    """Return the formats and checkpointed layers of least error within the budget; raise BudgetError if none fit.

    If `recompute` is True, layers are also checkpointed where the predicted error without that would be above `tolerated`.
    """
    problem = problem_of(trace)
    best = problem.best(budget_bytes)
    if best is not None and (not recompute or best.error <= tolerated):
        return problem, best, ()
    with_checkpoints = with_layers(trace, budget_bytes, problem_of, tolerated) if recompute is not False else None
    if with_checkpoints is not None and (best is None or with_checkpoints[1].error < best.error):
        return with_checkpoints
    if best is not None:
        return problem, best, ()
    problems = [problem, *_with_all_layers(trace, problem_of, recompute)]
    least = min(problems, key=lambda candidate: candidate.ledger.floor_bytes)
    error = BudgetError(explain_infeasible(least, budget_bytes, has_layers=recompute is not False))
    error.smallest_bytes = least.smallest.peak_bytes
    raise error


def _checked_plan(trace: Trace, solution: Solution, *, how: Planning, made_for: dict[str, Any], kept: Plan) -> Plan:
    """Return the plan for the formats and layers in `solution`; raise BudgetError if its footprint is over budget.

    The footprint also includes the margin for memory that is not predicted, unless the plan quantizes nothing (assignment/speed.py). `kept`
    is a plan whose modules that run over pieces of the sequence, and whose offloaded tensors, are kept; tensors that are not packed are
    dropped from the offloaded ones.
    """
    problem, point, layers = solution
    is_exact = problem.ladder == UNMODIFIED
    for rules in _rule_variants(problem, point, needs_activations=problem.trace.is_compiled and bool(layers)):
        planned = footprint(trace, replace(kept, rules=rules, made_for=made_for, recompute=layers))
        if planned.peak_bytes <= how.budget_bytes if is_exact else how.has(planned):
            reason = _reason(*solution, how.budget_bytes, planned) + say_tiled(kept.tiles)
            return replace(planned.plan, reason=reason, offload=offloaded_slots(trace, planned.plan))
    if kept.offload:
        raise BudgetError(f"no plan that offloads {len(kept.offload)} layers fits {say_bytes(how.budget_bytes)}.")
    raise PlanError(
        f"the rules for this trace of {trace.model} do not lower its peak to the planned {point.peak_bytes} bytes, within a budget of "
        f"{how.budget_bytes}: slots of the trace contradict one another. Trace the step again with trace_step."
    )


def _rule_variants(problem: AssignmentProblem, point: AssignmentPoint, *, needs_activations: bool) -> Iterator[Rules]:
    """Yield lists of rules that give each slot (saved tensor or parameter) its format in `point`, the shortest first.

    The caller uses the first list whose plan fits the budget. A list without a rule for activations comes first if no activation gets a
    format, since a session then needs no hooks, unless `needs_activations`: the plan recomputes tensors of a compiled step, which needs
    such a rule.
    """
    formats = problem.formats(point)
    short, long = (rules_of(problem.trace, formats, is_short=is_short) for is_short in (True, False))
    has_formats = any(format is not None for (_, role), format in formats.items() if role is Role.ACTIVATION)
    if not has_formats and not needs_activations:
        yield tuple(rule for rule in short if rule[0] != Role.ACTIVATION.value)
    yield short
    yield long


def _with_all_layers(
    trace: Trace, problem_of: Callable[[Trace], AssignmentProblem], recompute: bool | None
) -> list[AssignmentProblem]:
    layers = tuple(recompute_choices(trace)) if recompute is not False else ()
    return [problem_of(with_choice(trace, layers))] if layers else []


def _made_for(trace: Trace, method: str, budget_bytes: int) -> dict[str, Any]:
    fields = {name: getattr(trace, name) for name in ("model", "device", "dtype", "optimizer")}
    return {**fields, "batch": list(trace.batch), "method": method, "budget_bytes": budget_bytes}


def _reason(
    problem: AssignmentProblem, point: AssignmentPoint, layers: tuple[str, ...], budget_bytes: int, planned: Footprint
) -> str:
    """Return the plan's `reason`: which tensors get fewer bits, the budget, the predicted peak, margin and error.

    `point` is the chosen format of each tensor, `layers` are the checkpointed layers, and `planned` is the plan's footprint.
    """
    formats = problem.formats(point)
    quantized = [slot for slot in problem.trace.activations if formats.get((slot.name, Role.ACTIVATION)) is not None]
    what = ("tensor", "recomputed") if problem.trace.is_compiled else ("layer", "checkpointed")
    checkpointed = f"{len(layers)} {what[0]}{'s' * (len(layers) > 1)} {what[1]}" if layers else ""
    parts = [_quantized(quantized, formats), _parameters(problem, formats), checkpointed]
    changes = ", ".join(part for part in parts if part) or "masks and indices in as few bits as they need"
    head = f"method {problem.method.name} under {say_bytes(budget_bytes)}: {changes}"
    before = say_bytes(planned.baseline.peak_bytes)
    peak = f"peak {say_bytes(planned.peak_bytes)} instead of {before}{_margin(planned, budget_bytes)}"
    return f"{head}; {peak}, predicted squared gradient error {point.error:.2g}."


def _margin(planned: Footprint, budget_bytes: int) -> str:
    margin, left = planned.bound_bytes - planned.peak_bytes, budget_bytes - planned.peak_bytes
    instead = f"{say_bytes(left)} instead of " if left < margin else ""
    return f" (with a margin of {instead}{say_bytes(margin)} for the allocator and libraries)" if margin else ""


def _quantized(slots: Sequence[Slot], formats: Formats) -> str:
    counts = Counter(str(formats[slot.name, Role.ACTIVATION]) for slot in slots)
    counted = ", ".join(f"{count} in {text}" for text, count in counts.most_common())
    return f"{len(slots)} of the saved tensors quantized ({counted})" if slots else ""


def _parameters(problem: AssignmentProblem, formats: Formats) -> str:
    packed = {(name, role) for (name, role), format in formats.items() if role is not Role.ACTIVATION and format is not None}
    frozen = {name for name, role in packed if role is Role.FROZEN}
    trained = {name for name, _ in packed} - frozen
    count = len(problem.trace.of(Role.WEIGHT))
    texts = (
        f"{len(frozen)} of {count} parameters, which are frozen" if frozen else "",
        f"{len(trained)} of {count} parameters or their state, which need paredown.optim" if trained else "",
    )
    return ", ".join(text for text in texts if text)


# --- plan templates ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlanTemplate:
    """A budget and a method of `assign`, such as "assign 50% role", from which a plan is made for each traced step."""

    budget: str
    method: str = "role"

    def __post_init__(self) -> None:
        method_named(self.method)

    @staticmethod
    def parse(text: str) -> PlanTemplate:
        """Return the template for a text such as "assign 50% role"; raise PlanError for any other text."""
        parts = text.split()
        if len(parts) != 3 or parts[0] != "assign":
            raise PlanError(f"template {text!r} cannot be read; it is 'assign BUDGET METHOD', such as 'assign 40% role'.")
        return PlanTemplate(*parts[1:])

    def __str__(self) -> str:
        return f"assign {self.budget} {self.method}"

    def make(self, trace: Trace) -> Plan:
        """Return the plan that `assign` finds for the step of `trace` with this template's budget and method."""
        plan = assign(trace, self.budget, method=self.method)
        return replace(plan, made_for={**plan.made_for, TEMPLATE_FIELD: str(self)})


OnInfeasible = Callable[[PlanTemplate, BudgetError], object]


def make_plans(templates: Iterable[PlanTemplate], trace: Trace, *, on_infeasible: OnInfeasible | None = None) -> list[Plan]:
    """Return the plans that `templates` (a budget and a method of `assign` each) make for the step of `trace`.

    Templates that make equal plans share one plan, which names all of them in `made_for`. `on_infeasible` is called for each template whose
    budget no plan fits; without it, the first such template raises its BudgetError.
    """
    plans: dict[object, Plan] = {}
    for template in templates:
        try:
            plan = template.make(trace)
        except BudgetError as error:
            if on_infeasible is None or error.smallest_bytes is None:  # None: the budget itself cannot be read
                raise
            on_infeasible(template, error)
            continue
        texts = [str(other.made_for[TEMPLATE_FIELD]) for other in (plans.get(plan.key), plan) if other is not None]
        plans[plan.key] = replace(plan, made_for={**plan.made_for, TEMPLATE_FIELD: SEPARATOR.join(texts)})
    return list(plans.values())


def templates_of(plan: Plan) -> list[str]:
    """Return the templates, as texts such as "assign 50% role", from which this plan was made."""
    texts = plan.made_for.get(TEMPLATE_FIELD, "")
    return texts.split(SEPARATOR) if isinstance(texts, str) and texts else []


# --- why no plan fits --------------------------------------------------------------------------------------------------


def explain_infeasible(problem: AssignmentProblem, budget_bytes: int, *, has_layers: bool) -> str:
    """Return the BudgetError's message if no plan fits: the largest tensors, and what the user can change.

    `has_layers` says whether activation checkpointing was allowed in the search.
    """
    smallest = problem.smallest
    ledger = problem.ledger
    tick_index = int(ledger.total(ledger.load(smallest.chosen), smallest.chosen).argmax())
    sizes = {item.name: int(ledger.held[row, tick_index]) for item, row in zip(ledger.items, smallest.chosen, strict=True)}
    largest = sorted(ledger.items, key=lambda item: -sizes[item.name])[:NUM_NAMED_SLOTS]
    named = "; ".join(
        f"{item.name!r} {say_bytes(sizes[item.name])} ({_why(item, sizes[item.name])})" for item in largest if sizes[item.name]
    )
    rest = _rest(problem.trace, int(ledger.ticks[tick_index]))
    rest["workspace of libraries"] = ledger.workspace_bytes
    more = [f"{role} {say_bytes(size)}" for role, size in rest.items() if size]
    budget = say_bytes_twice(budget_bytes)
    head = f"no plan of method {problem.method.name!r} fits {budget}; the smallest needs {say_bytes_above(smallest.peak_bytes)}"
    parts = [f"{head}.", f"Largest at the peak: {named}." if named else ""]
    parts += [f"In addition, which no plan changes: {', '.join(more)}."] if more else []
    parts.append(_other_method(problem, budget_bytes) or _without_pins(problem, budget_bytes))
    included, not_allowed = OF_TENSORS if problem.trace.is_compiled else (INCLUDED, NOT_ALLOWED)
    parts.append(included if has_layers else not_allowed)
    return " ".join(part for part in [*parts, _advice(problem.trace)] if part)


def _why(item: Item, nbytes: int) -> str:
    """Return why the tensors of `item` still take `nbytes` bytes at the peak, such as "in its lowest format"."""
    slot = item.slots[0]
    if slot.role is Role.WEIGHT:
        return slot.stays or ("frozen" if slot.is_frozen else "a parameter with its gradient and optimizer state")
    pinned = next((s.pin for s in item.slots if s.pin is not None), None)
    if slot.stays:
        return slot.stays
    if pinned is not None:
        return f"pinned: {pinned.reason}"
    return "in use at that moment, unmodified" if nbytes >= min(slot.nbytes for slot in item.slots) else "in its lowest format"


def _rest(trace: Trace, tick: int) -> dict[str, int]:
    held: list[Interval] = [i for i in fixed_intervals(trace) if i.birth <= tick <= i.death]
    return {role.value: sum(i.nbytes for i in held if i.role is role) for role in (Role.TEMPORARY, Role.BUFFER, Role.INPUT)}


def _without_pins(problem: AssignmentProblem, budget_bytes: int) -> str:
    """Return a sentence that says so if a plan would fit without pins (lower bounds on precision); else ""."""
    pinned = [slot for slot in problem.trace.activations if slot.pin is not None and not slot.stays]
    if not pinned:
        return ""
    free = replace(problem.trace, slots=tuple(_unpinned(slot) for slot in problem.trace.slots))
    peak = AssignmentProblem.of(free, METHODS["role"], ladder=problem.ladder, keeps_margin=False).smallest.peak_bytes
    if peak > budget_bytes:
        return ""
    largest = max(pinned, key=lambda slot: slot.nbytes)
    reason = largest.pin.reason if largest.pin is not None else ""
    return (
        f"The pins contradict this budget: without them the smallest peak is {say_bytes(peak)}; {len(pinned)} slots have one, "
        f"{largest.name!r} ({say_bytes(largest.nbytes)}) the largest: {reason}."
    )


def _unpinned(slot: Slot) -> Slot:
    return replace(slot, savers=tuple(replace(saver, pin=None) for saver in slot.savers)) if slot.pin is not None else slot


def _other_method(problem: AssignmentProblem, budget_bytes: int) -> str:
    """Return a sentence that recommends method="role" if it finds a plan within the budget; else ""."""
    if problem.method.order is None and not problem.method.keeps_residue:
        return ""
    peak = AssignmentProblem.of(problem.trace, METHODS["role"], ladder=problem.ladder, keeps_margin=False).smallest.peak_bytes
    return f"Method 'role' reaches {say_bytes(peak)}." if peak <= budget_bytes else ""


def _advice(trace: Trace) -> str:
    batch = f" (now {'; '.join(trace.batch)})" if trace.batch else ""
    state = "" if trace.optimizer else ", or give trace_step the optimizer, so that weights and its state can be packed too"
    return f"Raise the budget, lower the batch{batch}{state}."
