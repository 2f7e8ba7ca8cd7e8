"""Another plan within the same budget, while a model trains: `repair` raises slots and lowers others for it, `replan` plans anew.

    repair(plan, terms, raised=["attn:query"])      one level up for these, and who costs the least error for a byte pays
    settle(plan, terms)                             the best formats of all activations, where that is clearly better

Formats of weights, gradients and optimizer state stay what they are: they cannot be changed in the middle of a run. The budget is never
exceeded: if nobody can pay for all that should be raised, the last of them are refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from paredown.assign.options import LADDER, ErrorOf, Ints, Item, Ladder, Ledger, StorageOption, activation_items, unowned
from paredown.assign.sensitivity import Sensitivities
from paredown.assign.strategies import expected_error, measured_error
from paredown.errors import BudgetError
from paredown.formats.format import Format
from paredown.plan.checkpointed_trace import checkpointed_trace
from paredown.plan.footprint import footprint
from paredown.plan.plan import Plan
from paredown.plan.replay import SlotStorage, activation_intervals, model_memory, resolve_parameter_formats, slot_storages
from paredown.plan.selectors import slot_key
from paredown.plan.storage import Assignment
from paredown.roles import Role
from paredown.sizes import say_bytes
from paredown.trace.operations import Use
from paredown.trace.trace import Trace

LEVELS: Ladder = (None, Format.parse("bf16"), *LADDER[1:])
NOW = "now"  # the option that the plan has
CLEARLY = 0.9  # a plan is settled anew if its predicted error is below this share of what it was


@dataclass(frozen=True)
class SlotMove:
    """A slot that got another format; None is as it is."""

    slot: str
    before: Format | None
    after: Format | None


@dataclass(frozen=True)
class RepairedPlan:
    """A plan, the slots that moved, and of those that should be raised which were and which were not."""

    plan: Plan
    moves: tuple[SlotMove, ...] = ()
    raised: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()


@dataclass(frozen=True)
class RepairTerms:
    """Within which a plan is repaired: the step, the budget, who is how sensitive, and the levels that activations may have."""

    trace: Trace
    budget_bytes: int
    sensitivities: Sensitivities | None = None
    levels: Ladder = LEVELS


def repair(plan: Plan, terms: RepairTerms, *, raised: Sequence[str], keeps: Collection[str] = ()) -> RepairedPlan:
    """`plan` with the slots `raised`, the worst first, one level up, and others but those that it `keeps` down as far as it takes."""
    check(plan, terms)
    state = RepairState.of(plan, terms)
    up = [name for name in dict.fromkeys(raised) if state.can_rise(name)]
    now = {name: state.bits_now(name) for name in keeps if name in state.item_of}
    best, count, refused = state.now, 0, len(up) + 1  # `count` can be paid for, `refused` cannot
    while refused - count > 1:
        middle = (count + refused) // 2
        risen = state.risen(up[:middle])
        found = state.paid(risen, now | {name: state.bits_at(name, risen) for name in up[:middle]}, terms.budget_bytes)
        best, count, refused = (found, middle, refused) if found is not None else (best, count, middle)
    return state.repaired(best, raised=up[:count], refused=up[count:])


def replan(plan: Plan, terms: RepairTerms, *, keeps: Collection[str] = ()) -> RepairedPlan:
    """The plan of least predicted error for activations, none of `keeps` lower than it is; `plan` itself where that is little better."""
    check(plan, terms)
    state = RepairState.of(plan, terms)
    floors = {name: state.bits_now(name) for name in keeps if name in state.item_of}
    found = state.paid(state.ledger.starts, floors, terms.budget_bytes)
    if found is None or state.ledger.error(found) > CLEARLY * state.ledger.error(state.now):
        return RepairedPlan(plan)
    return state.repaired(found)


def check(plan: Plan, terms: RepairTerms) -> None:
    """Refuse a plan that is not within the budget itself."""
    peak, budget = footprint(terms.trace, plan).peak_bytes, terms.budget_bytes
    if peak > budget:
        raise BudgetError(f"the plan to repair needs {say_bytes(peak)}, more than the budget of {say_bytes(budget)}.")


@dataclass(frozen=True, eq=False)
class RepairState:
    """A plan on the ledger of its trace: `now` has the row of each item; `bits[row, slot]` are those of a value."""

    trace: Trace
    plan: Plan
    ledger: Ledger
    now: Ints
    bits: dict[str, dict[int, float]]  # of a slot, by row
    item_of: dict[str, int]
    totals: Ints  # bytes times ticks of each row

    @staticmethod
    def of(plan: Plan, terms: RepairTerms) -> RepairState:
        """The state of a run under `plan`."""
        trace, levels, measured = checkpointed_trace(terms.trace, plan.recompute), terms.levels, terms.sensitivities
        error_of = expected_error if measured is None else measured_error(trace, measured, levels)
        chosen = slot_storages(trace, plan)
        items = [_with_now(item, chosen, error_of) for item in activation_items(trace, lambda _: levels, error_of, is_free=False)]
        ledger = Ledger.of(trace, [*items, _parameters(trace, plan)])
        bits: dict[str, dict[int, float]] = {}
        now = ledger.starts.copy()
        for number, item in enumerate(items):
            for place, option in enumerate(item.options):
                row = int(ledger.starts[number]) + place
                if option.name == NOW:
                    now[number] = row
                for (name, _), format in option.formats:
                    bits.setdefault(name, {})[row] = bits_of(format)
        item_of = {slot.name: number for number, item in enumerate(items) for slot in item.slots}
        totals = np.array([option.total for item in ledger.items for option in item.options], dtype=np.int64)
        return RepairState(trace, plan, ledger, now, bits, item_of, totals)

    def bits_at(self, name: str, chosen: Ints) -> float:
        """Bits of a value of a slot when these rows are chosen; infinity for as it is."""
        return self.bits[name][int(chosen[self.item_of[name]])]

    def bits_now(self, name: str) -> float:
        """Bits of a value of a slot under the plan."""
        return self.bits_at(name, self.now)

    def can_rise(self, name: str) -> bool:
        """Whether a slot is packed."""
        return name in self.item_of and self.bits_now(name) < inf

    def risen(self, names: Iterable[str]) -> Ints:
        """Rows where these slots are one level up, and none of those that depend on them is lower."""
        chosen = self.now.copy()
        for name in names:
            item = self.item_of[name]
            slots = [slot.name for slot in self.ledger.items[item].slots]
            now = int(chosen[item])
            rows = [
                row
                for row in self.bits[name]
                if self.bits[name][row] > self.bits[name][now] and all(self.bits[s][row] >= self.bits[s][now] for s in slots)
            ]
            if rows:
                chosen[item] = min(rows, key=lambda row: (int(self.totals[row]), self._option(row).error))
        return chosen

    def paid(self, chosen: Ints, floors: Mapping[str, float], budget_bytes: int) -> Ints | None:
        """`chosen` with items lowered, the least error for a byte first, until the peak is within the budget; None if it cannot be.

        `floors`: the least bits of some slots.
        """
        ledger, chosen = self.ledger, chosen.copy()
        refused = {row for name, least in floors.items() for row, bits in self.bits[name].items() if bits < least}
        allowed = np.array([row for row in range(len(ledger.errors)) if row not in refused], dtype=np.int64)
        load = ledger.load(chosen)
        while True:
            total = ledger.total(load, chosen)
            if int(total.max()) + ledger.workspace_bytes <= budget_bytes:
                return chosen
            row = self._cheapest(chosen, allowed, int(total.argmax()))
            if row is None:
                return None
            item = ledger.item_of[row]
            load = load + ledger.held[row] - ledger.held[chosen[item]]
            chosen[item] = row

    def _cheapest(self, chosen: Ints, allowed: Ints, tick: int) -> int | None:
        """The row that costs least error for a byte that it frees at the tick."""
        now = chosen[self.ledger.item_of[allowed]]
        column, totals = self.ledger.held[:, tick], self.totals
        freed = column[now] - column[allowed]
        is_lower = (freed > 0) & (totals[allowed] < totals[now])  # of all ticks together too: it never comes back
        rows, now, freed = (part[is_lower] for part in (allowed, now, freed))
        if not len(rows):
            return None
        cost = np.maximum(self.ledger.errors[rows] - self.ledger.errors[now], 0) / freed
        return int(rows[np.lexsort((rows, -freed, cost))[0]])

    def repaired(self, chosen: Ints, *, raised: Sequence[str] = (), refused: Sequence[str] = ()) -> RepairedPlan:
        """The plan of these rows, and how it differs."""
        before, after = self._formats(self.now), self._formats(chosen)
        moves = tuple(SlotMove(name, before[name], after[name]) for name in before if before[name] != after[name])
        rules = dict(self.plan.rules)
        slots = {slot.name: slot for slot in self.trace.activations}
        for move in moves:
            for saver in slots[move.slot].savers:
                if saver.use is Use.VALUE:
                    rules[slot_key(saver.name, Role.ACTIVATION)] = Assignment(move.after)
        plan = replace(self.plan, rules=tuple(rules.items())) if moves else self.plan
        return RepairedPlan(plan, moves, tuple(raised), tuple(refused))

    def _formats(self, chosen: Ints) -> dict[str, Format | None]:
        return {name: format for row in chosen for (name, _), format in self._option(int(row)).formats}

    def _option(self, row: int) -> StorageOption:
        item = int(self.ledger.item_of[row])
        return self.ledger.items[item].options[row - int(self.ledger.starts[item])]


def bits_of(format: Format | None) -> float:
    """Bits of a value; infinity for as it is."""
    return inf if format is None else float(format.bits_per_value)


def _with_now(item: Item, chosen: dict[str, SlotStorage], error_of: ErrorOf) -> Item:
    """The item with one more option, behind the others: what the plan gives now."""
    formats = [(slot, chosen[slot.name].format) for slot in item.slots]
    error = sum(error_of(slot, format) for slot, format in formats if format is not None)
    keys = tuple(((slot.name, Role.ACTIVATION), format) for slot, format in formats)
    now = StorageOption(NOW, error, tuple(activation_intervals(item.slots, chosen)), keys)
    return Item(item.name, item.slots, (*item.options, now))


def _parameters(trace: Trace, plan: Plan) -> Item:
    """Weights, gradients and optimizer state, which stay as the plan has them."""
    held = list(model_memory(replace(trace, outputs=()), plan))
    for interval in unowned(trace):
        held.remove(interval)
    full = sum(slot.nbytes for slot in trace.of(Role.WEIGHT) if resolve_parameter_formats(slot, plan).is_full)
    return Item("parameters", (), (StorageOption("as planned", 0.0, tuple(held), (), full),))
