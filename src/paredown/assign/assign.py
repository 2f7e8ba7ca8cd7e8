"""`assign`: a format for every slot of a step, so that its predicted peak is within a budget and gradients suffer least.

    plan = assign(trace, "6GiB")                                              # by what is known of each kind of slot
    plan = assign(trace, "6GiB", method="sensitivity", sensitivities=probe(model, batch, trace))

The budget is one for all that a footprint counts: activations, weights, gradients and optimizer state. It is never exceeded: the
last thing that is done is to ask `footprint(trace, plan)`.

>>> import torch
>>> from paredown.trace.trace_step import trace_step
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

Why no plan fits a budget: the smallest peak there is, who holds it up, and what to do about it.

The tick to look at is that of the peak where least is held. Whatever is there then cannot be lowered any further by the method.

Plans that are made for each task, by a text that says how: `assign 40% role`.

Columns of a prior and sweeps have them where plans by role have formats. The plan of a recipe has it in `made_for`; recipes that come to
the same plan on a task share it there.

>>> PlanTemplate.parse("assign 40% role")
PlanTemplate(budget='40%', method='role')
>>> PlanTemplate.parse("by magic")
Traceback (most recent call last):
    ...
paredown.errors.PlanError: recipe 'by magic' cannot be read; it is 'assign BUDGET METHOD', such as 'assign 40% role'.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paredown.assign.checkpointed_layers import Found, quickest_plan, repeated_layers, tolerated_error, with_layers
from paredown.assign.options import LADDER, Item, Ladder
from paredown.assign.problem import AssignmentProblem, Formats, Rules, check_sensitivities, ladder_of, method_named, rules_of
from paredown.assign.sensitivity import Sensitivities
from paredown.assign.strategies import METHODS, AssignmentPoint
from paredown.errors import BudgetError, PlanError
from paredown.formats.format import Format
from paredown.plan.checkpointed_trace import checkpointed_trace
from paredown.plan.footprint import footprint
from paredown.plan.plan import Plan
from paredown.plan.replay import Interval, fixed_intervals
from paredown.roles import Role
from paredown.sizes import parse_bytes, say_bytes
from paredown.trace.trace import Slot, Trace

__all__ = ["assign"]


NAMED = 3  # slots that an error names


def explain_infeasible(search: AssignmentProblem, budget_bytes: int, *, has_layers: bool) -> str:
    """The sentences of a BudgetError; `has_layers`: layers were tried to be computed again too."""
    smallest = search.smallest
    ledger = search.ledger
    place = int(ledger.total(ledger.load(smallest.chosen), smallest.chosen).argmax())
    sizes = {item.name: int(ledger.held[row, place]) for item, row in zip(ledger.items, smallest.chosen, strict=True)}
    largest = sorted(ledger.items, key=lambda item: -sizes[item.name])[:NAMED]
    named = "; ".join(
        f"{item.name!r} {say_bytes(sizes[item.name])} ({_why(item, sizes[item.name])})" for item in largest if sizes[item.name]
    )
    rest = _rest(search.trace, int(ledger.ticks[place]))
    rest["workspace of libraries"] = ledger.workspace_bytes
    more = [f"{role} {say_bytes(size)}" for role, size in rest.items() if size]
    head = f"no plan of method {search.method.name!r} fits {say_bytes(budget_bytes)}; the smallest needs {say_bytes(smallest.peak_bytes)}"
    parts = [f"{head}.", f"Held up by {named}." if named else ""]
    parts += [f"Beside them, which no plan changes: {', '.join(more)}."] if more else []
    parts.append(_other_method(search, budget_bytes) or _without_pins(search, budget_bytes))
    parts.append("Computing layers again in backward is counted in." if has_layers else "Layers were not to be computed again.")
    return " ".join(part for part in [*parts, _advice(search.trace)] if part)


def _why(item: Item, nbytes: int) -> str:
    """What keeps an item from being smaller than the `nbytes` that it holds at the peak."""
    slot = item.slots[0]
    if slot.role is Role.WEIGHT:
        return slot.stays or "a parameter with its gradient and optimizer state"
    pinned = next((s.pin for s in item.slots if s.pin is not None), None)
    if slot.stays:
        return slot.stays
    if pinned is not None:
        return f"pinned: {pinned.reason}"
    return "in use at that moment, as it is" if nbytes >= min(slot.nbytes for slot in item.slots) else "at its lowest"


def _rest(trace: Trace, tick: int) -> dict[str, int]:
    held: list[Interval] = [i for i in fixed_intervals(trace) if i.birth <= tick <= i.death]
    return {role.value: sum(i.nbytes for i in held if i.role is role) for role in (Role.TEMPORARY, Role.BUFFER, Role.INPUT)}


def _without_pins(search: AssignmentProblem, budget_bytes: int) -> str:
    """A sentence where it is the pins that stand in the way."""
    pinned = [slot for slot in search.trace.activations if slot.pin is not None and not slot.stays]
    if not pinned:
        return ""
    free = replace(search.trace, slots=tuple(_unpinned(slot) for slot in search.trace.slots))
    peak = AssignmentProblem.of(free, METHODS["role"], ladder=search.ladder).smallest.peak_bytes
    if peak > budget_bytes:
        return ""
    first = max(pinned, key=lambda slot: slot.nbytes)
    reason = first.pin.reason if first.pin is not None else ""
    return (
        f"The pins contradict this budget: without them {say_bytes(peak)} would do, and {len(pinned)} slots have one, "
        f"{first.name!r} ({say_bytes(first.nbytes)}) the largest: {reason}."
    )


def _unpinned(slot: Slot) -> Slot:
    return replace(slot, savers=tuple(replace(saver, pin=None) for saver in slot.savers)) if slot.pin is not None else slot


def _other_method(search: AssignmentProblem, budget_bytes: int) -> str:
    """A sentence where the default method would do."""
    if search.method.order is None:
        return ""
    peak = AssignmentProblem.of(search.trace, METHODS["role"], ladder=search.ladder).smallest.peak_bytes
    return f"Method 'role' reaches {say_bytes(peak)}." if peak <= budget_bytes else ""


def _advice(trace: Trace) -> str:
    batch = f" (now {'; '.join(trace.batch)})" if trace.batch else ""
    state = "" if trace.optimizer else ", give trace_step the optimizer, so that weights and its state can be lowered too"
    return f"Raise the budget, lower the batch{batch}{state}."


# --- `assign` ---


def assign(
    trace: Trace,
    budget: int | str,
    *,
    method: str = "role",
    sensitivities: Sensitivities | None = None,
    levels: Sequence[str | Format | None] | None = None,
    seed: int = 0,
    recompute: bool | None = None,
) -> Plan:
    """The plan of least predicted error whose peak is within `budget`: bytes, "6GiB", or "50%" of the step as it is written.

    `method`: a row of METHODS. `levels`: the formats that activations may have, the best first (None: as it is), for comparisons; then
    nothing else is lowered. `seed`: that of method "random". `recompute`: whether layers may be computed again in backward, which costs
    time: None where formats would be slower or their errors large (assign/checkpointed_layers.py), True where errors would be
    large, False never (assign/checkpointed_layers.py).
    With `levels`, and by methods that are there to compare, None is where nothing else fits.
    """
    _check(trace, recompute)
    row = method_named(method)
    check_sensitivities(trace, row, sensitivities)
    ladder = None if levels is None else ladder_of(levels)
    written = footprint(trace).peak_bytes
    budget_bytes = parse_bytes(budget, whole=written)
    made_for = _made_for(trace, method, budget_bytes)
    if ladder is None and written <= budget_bytes:
        reason = f"The step as it is written takes {say_bytes(written)} at its peak, within {say_bytes(budget_bytes)}."
        return Plan((), reason, made_for)

    def searched(of: Trace, formats: Ladder | None = ladder) -> AssignmentProblem:
        return AssignmentProblem.of(of, row, sensitivities=sensitivities, ladder=formats, seed=seed)

    def planned(found: Found) -> Plan:
        return _planned(trace, found, budget_bytes, _reason(*found, budget_bytes, written), made_for)

    if recompute is None and ladder is None and row.order is None and repeated_layers(trace):
        quick = quickest_plan(trace, budget_bytes, searched, planned)
        if quick is not None:
            return planned(quick)
    return planned(_found(trace, budget_bytes, searched, tolerated_error(trace, ladder or LADDER, recompute), recompute))


def _check(trace: object, recompute: object) -> None:
    if not isinstance(trace, Trace):
        raise PlanError(f"assign takes a Trace and a budget, not {type(trace).__name__}: assign(trace_step(model, batch), '6GiB').")
    if recompute not in (None, True, False):
        raise PlanError(
            f"recompute is {recompute!r}: None (layers are computed again if nothing else fits), True (also if errors would be large) or "
            "False (never). A plan names them itself: plan.recomputing('layers.0')."
        )


def _found(
    trace: Trace, budget_bytes: int, searched: Callable[[Trace], AssignmentProblem], bearable: float, recompute: bool | None
) -> Found:
    """What fits best, without layers that are computed again or with them."""
    search = searched(trace)
    best = search.best(budget_bytes)
    if best is not None and (not recompute or best.error <= bearable):
        return search, best, ()
    found = with_layers(trace, budget_bytes, searched, bearable) if recompute is not False else None
    if found is not None and (best is None or found[1].error < best.error):
        return found
    if best is not None:
        return search, best, ()
    tried = [search, *_with_all(trace, searched, recompute)]
    least = min(tried, key=lambda of: of.ledger.floor_bytes)
    refusal = BudgetError(explain_infeasible(least, budget_bytes, has_layers=recompute is not False))
    refusal.smallest_bytes = least.smallest.peak_bytes
    raise refusal


def _planned(trace: Trace, found: Found, budget_bytes: int, reason: str, made_for: dict[str, Any]) -> Plan:
    """The plan of what was found, which a footprint says to be within the budget."""
    search, best, layers = found
    for rules in _written(search, best):
        plan = Plan(rules, reason, made_for, layers)
        if footprint(trace, plan).peak_bytes <= budget_bytes:
            return plan
    raise PlanError(
        f"the rules for this trace of {trace.model} do not bring its peak down to {best.peak_bytes} bytes, as was planned for a budget of "
        f"{budget_bytes}: slots of the trace contradict one another. Trace the step anew, with trace_step."
    )


def _written(search: AssignmentProblem, best: AssignmentPoint) -> Iterator[Rules]:
    """The rules for a point, the best way to write them first: without a rule for activations a session does not look at them."""
    formats = search.formats(best)
    short, long = (rules_of(search.trace, formats, is_short=is_short) for is_short in (True, False))
    if not any(format is not None for (_, role), format in formats.items() if role is Role.ACTIVATION):
        yield tuple(rule for rule in short if rule[0] != Role.ACTIVATION.value)
    yield short
    yield long


def _with_all(trace: Trace, searched: Callable[[Trace], AssignmentProblem], recompute: bool | None) -> list[AssignmentProblem]:
    layers = tuple(repeated_layers(trace)) if recompute is not False else ()
    return [searched(checkpointed_trace(trace, layers))] if layers else []


def _made_for(trace: Trace, method: str, budget_bytes: int) -> dict[str, Any]:
    told = {name: getattr(trace, name) for name in ("model", "device", "dtype", "optimizer")}
    return {**told, "batch": list(trace.batch), "method": method, "budget_bytes": budget_bytes}


def _reason(search: AssignmentProblem, best: AssignmentPoint, layers: tuple[str, ...], budget_bytes: int, written: int) -> str:
    """What was lowered, under which budget, to which peak."""
    formats = search.formats(best)
    lowered = [slot for slot in search.trace.activations if formats.get((slot.name, Role.ACTIVATION)) is not None]
    again = f"{len(layers)} layer{'s' * (len(layers) > 1)} computed again in backward" if layers else ""
    parts = [_lowered(lowered, formats), _parameters(search, formats), again]
    done = ", ".join(part for part in parts if part) or "masks and indices in as few bits as they need"
    head = f"method {search.method.name} under {say_bytes(budget_bytes)}: {done}"
    peak = f"peak {say_bytes(best.peak_bytes)} instead of {say_bytes(written)}, predicted squared gradient error {best.error:.2g}"
    return f"{head}; {peak}."


def _lowered(slots: Sequence[Slot], formats: Formats) -> str:
    counts = Counter(str(formats[slot.name, Role.ACTIVATION]) for slot in slots)
    said = ", ".join(f"{count} in {text}" for text, count in counts.most_common())
    return f"{len(slots)} of the saved tensors lowered ({said})" if slots else ""


def _parameters(search: AssignmentProblem, formats: Formats) -> str:
    names = {name for (name, role), format in formats.items() if role is not Role.ACTIVATION and format is not None}
    return (
        f"{len(names)} of {len(search.trace.of(Role.WEIGHT))} parameters or their state, which paredown.optim serves"
        if names
        else ""
    )


# --- Plans that are made for each task, by a text that says how ---

RECIPE = "recipe"  # the word in `made_for`
BETWEEN = "; "


@dataclass(frozen=True)
class PlanTemplate:
    """`assign` with a budget, a share of the step as it is written or bytes, and a method."""

    budget: str
    method: str = "role"

    def __post_init__(self) -> None:
        method_named(self.method)

    @staticmethod
    def parse(text: str) -> PlanTemplate:
        """The recipe that `str` gives."""
        parts = text.split()
        if len(parts) != 3 or parts[0] != "assign":
            raise PlanError(f"recipe {text!r} cannot be read; it is 'assign BUDGET METHOD', such as 'assign 40% role'.")
        return PlanTemplate(*parts[1:])

    def __str__(self) -> str:
        return f"assign {self.budget} {self.method}"

    def make(self, trace: Trace) -> Plan:
        """The plan for this step."""
        plan = assign(trace, self.budget, method=self.method)
        return replace(plan, made_for={**plan.made_for, RECIPE: str(self)})


def make_plans(recipes: Iterable[PlanTemplate], trace: Trace) -> list[Plan]:
    """The plans of recipes for one step; those that say the same are one, with all of its recipes."""
    found: dict[object, Plan] = {}
    for plan in (recipe.make(trace) for recipe in recipes):
        key = plan.rules, plan.recompute
        told = [str(one.made_for[RECIPE]) for one in (found.get(key), plan) if one is not None]
        found[key] = replace(plan, made_for={**plan.made_for, RECIPE: BETWEEN.join(told)})
    return list(found.values())


def templates_of(plan: Plan) -> list[str]:
    """The recipes that came to this plan."""
    told = plan.made_for.get(RECIPE, "")
    return told.split(BETWEEN) if isinstance(told, str) and told else []
