"""Why no plan fits a budget: the smallest peak there is, who holds it up, and what to do about it.

The tick to look at is that of the peak where least is held. Whatever is there then cannot be lowered any further by the method.
"""

from __future__ import annotations

from dataclasses import replace

from paredown.plan.record import Trace
from paredown.plan.replay import Interval, fixed
from paredown.plan.sizes import say_bytes
from paredown.plan.slots import Slot
from paredown.roles import Role
from paredown.search.items import Item
from paredown.search.methods import METHODS
from paredown.search.search import Search

NAMED = 3  # slots that an error names


def why_nothing_fits(search: Search, budget_bytes: int, *, has_layers: bool) -> str:
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
    held: list[Interval] = [i for i in fixed(trace) if i.birth <= tick <= i.death]
    return {role.value: sum(i.nbytes for i in held if i.role is role) for role in (Role.TEMPORARY, Role.BUFFER, Role.INPUT)}


def _without_pins(search: Search, budget_bytes: int) -> str:
    """A sentence where it is the pins that stand in the way."""
    pinned = [slot for slot in search.trace.activations if slot.pin is not None and not slot.stays]
    if not pinned:
        return ""
    free = replace(search.trace, slots=tuple(_unpinned(slot) for slot in search.trace.slots))
    peak = Search.of(free, METHODS["role"], ladder=search.ladder).smallest.peak_bytes
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


def _other_method(search: Search, budget_bytes: int) -> str:
    """A sentence where the default method would do."""
    if search.method.order is None:
        return ""
    peak = Search.of(search.trace, METHODS["role"], ladder=search.ladder).smallest.peak_bytes
    return f"Method 'role' reaches {say_bytes(peak)}." if peak <= budget_bytes else ""


def _advice(trace: Trace) -> str:
    batch = f" (now {'; '.join(trace.batch)})" if trace.batch else ""
    state = "" if trace.optimizer else ", give trace_step the optimizer, so that weights and its state can be lowered too"
    return f"Raise the budget, lower the batch{batch}{state}."
