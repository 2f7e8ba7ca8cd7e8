"""`assign`: a format for every slot of a step, so that its predicted peak is within a budget and gradients suffer least.

    plan = assign(trace, "6GiB")                                              # by what is known of each kind of slot
    plan = assign(trace, "6GiB", method="sensitivity", sensitivities=probe(model, batch, trace))

The budget is one for all that a footprint counts: activations, weights, gradients and optimizer state. It is never exceeded: the
last thing that is done is to ask `footprint(trace, plan)`.

>>> import torch
>>> from paredown.plan.trace import trace_step
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
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from paredown.errors import BudgetError, PlanError
from paredown.formats.format import Format
from paredown.plan.footprint import footprint
from paredown.plan.plan import Plan
from paredown.plan.recompute import recomputed
from paredown.plan.record import Trace
from paredown.plan.sizes import parse_bytes, say_bytes
from paredown.plan.slots import Slot
from paredown.roles import Role
from paredown.search.items import LADDER, Ladder
from paredown.search.layers import Found, bearable_error, repeated_layers, with_layers
from paredown.search.path import Point
from paredown.search.quicker import quickest
from paredown.search.refused import why_nothing_fits
from paredown.search.search import Search, check_sensitivities, ladder_of, method_named
from paredown.search.sensitivity import Sensitivities
from paredown.search.written import Formats, Rules, rules_of

__all__ = ["assign"]


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
    time: None where formats would be slower or their errors large (quicker.py), True where errors would be large, False never (layers.py).
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

    def searched(of: Trace, formats: Ladder | None = ladder) -> Search:
        return Search.of(of, row, sensitivities=sensitivities, ladder=formats, seed=seed)

    def planned(found: Found) -> Plan:
        return _planned(trace, found, budget_bytes, _reason(*found, budget_bytes, written), made_for)

    if recompute is None and ladder is None and row.order is None and repeated_layers(trace):
        quick = quickest(trace, budget_bytes, searched, planned)
        if quick is not None:
            return planned(quick)
    return planned(_found(trace, budget_bytes, searched, bearable_error(trace, ladder or LADDER, recompute), recompute))


def _check(trace: object, recompute: object) -> None:
    if not isinstance(trace, Trace):
        raise PlanError(f"assign takes a Trace and a budget, not {type(trace).__name__}: assign(trace_step(model, batch), '6GiB').")
    if recompute not in (None, True, False):
        raise PlanError(
            f"recompute is {recompute!r}: None (layers are computed again if nothing else fits), True (also if errors would be large) or "
            "False (never). A plan names them itself: plan.recomputing('layers.0')."
        )


def _found(trace: Trace, budget_bytes: int, searched: Callable[[Trace], Search], bearable: float, recompute: bool | None) -> Found:
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
    refusal = BudgetError(why_nothing_fits(least, budget_bytes, has_layers=recompute is not False))
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


def _written(search: Search, best: Point) -> Iterator[Rules]:
    """The rules for a point, the best way to write them first: without a rule for activations a session does not look at them."""
    formats = search.formats(best)
    short, long = (rules_of(search.trace, formats, is_short=is_short) for is_short in (True, False))
    if not any(format is not None for (_, role), format in formats.items() if role is Role.ACTIVATION):
        yield tuple(rule for rule in short if rule[0] != Role.ACTIVATION.value)
    yield short
    yield long


def _with_all(trace: Trace, searched: Callable[[Trace], Search], recompute: bool | None) -> list[Search]:
    layers = tuple(repeated_layers(trace)) if recompute is not False else ()
    return [searched(recomputed(trace, layers))] if layers else []


def _made_for(trace: Trace, method: str, budget_bytes: int) -> dict[str, Any]:
    told = {name: getattr(trace, name) for name in ("model", "device", "dtype", "optimizer")}
    return {**told, "batch": list(trace.batch), "method": method, "budget_bytes": budget_bytes}


def _reason(search: Search, best: Point, layers: tuple[str, ...], budget_bytes: int, written: int) -> str:
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


def _parameters(search: Search, formats: Formats) -> str:
    names = {name for (name, role), format in formats.items() if role is not Role.ACTIVATION and format is not None}
    return (
        f"{len(names)} of {len(search.trace.of(Role.WEIGHT))} parameters or their state, which paredown.optim serves"
        if names
        else ""
    )
