"""Finds another plan within the same budget while a model trains: `repair` raises slots and lowers others, `replan` sets all formats.

    repair(plan, terms, raised=["attn:query"])      these slots one level up; others go down, the least error per byte first
    replan(plan, terms)                             the best formats of all activations, where they are clearly better

Formats of weights, gradients and optimizer state stay the same: they cannot change during a run. The budget is never exceeded: if
the other slots cannot free enough for all slots that should be raised, the last of these are refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from paredown.assignment.sensitivity import Sensitivities
from paredown.assignment.storage_options import (
    ErrorOf,
    Ints,
    Item,
    Ladder,
    Ledger,
    StorageOption,
    activation_items,
    unowned,
)
from paredown.assignment.strategies import measured_error, role_table_error
from paredown.autograd.operations import Use
from paredown.errors import BudgetError
from paredown.formats.format import Format
from paredown.plan.byte_intervals import (
    SlotStorage,
    activation_intervals,
    model_memory,
    resolve_parameter_formats,
    slot_storages,
)
from paredown.plan.footprint import footprint
from paredown.plan.plan import Plan
from paredown.plan.planned_step import planned_step
from paredown.plan.selectors import slot_key
from paredown.plan.storage import Assignment
from paredown.plan.trace import Trace
from paredown.roles import Role
from paredown.sizes import say_bytes, say_bytes_twice

# one format for each width: a slot whose error is too large gains little from a shorter block
LEVELS: Ladder = (None, *(Format.parse(text) for text in ("bf16", "int8/64@bf16", "int4/64@bf16", "uint2/64@bf16+bf16")))
CURRENT = "current"  # name of the storage option that the plan uses
CLEARLY_BETTER = 0.9  # `replan` needs a predicted error below this share of the current one


@dataclass(frozen=True)
class SlotMove:
    """A change of the format of one saved tensor, `slot`, from `before` to `after`; None means unmodified."""

    slot: str
    before: Format | None
    after: Format | None


@dataclass(frozen=True)
class RepairedPlan:
    """The result of `repair` or `replan`: the new plan, and its slots (saved tensors) whose format changed, in `moves`.

    `raised` names the slots that got a wider format as requested, `refused` those for which the budget did not suffice.
    """

    plan: Plan
    moves: tuple[SlotMove, ...] = ()
    raised: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()


@dataclass(frozen=True)
class RepairTerms:
    """What `repair` and `replan` must respect: the traced step, the budget, and the formats (`levels`) to choose from.

    `sensitivities` are measured gradient errors of saved tensors; if None, the role table predicts the errors.
    """

    trace: Trace
    budget_bytes: int
    sensitivities: Sensitivities | None = None
    levels: Ladder = LEVELS


def repair(plan: Plan, terms: RepairTerms, *, raised: Sequence[str], keeps: Collection[str] = ()) -> RepairedPlan:
    """Return a plan with wider formats for the tensors `raised`, and if the budget needs it, narrower ones for others.

    `raised` lists names, the largest error first; if the budget does not allow all, the last ones are refused. Tensors in `keeps` get no
    fewer bits than now.
    """
    check(plan, terms)
    state = RepairState.of(plan, terms)
    packed = [name for name in dict.fromkeys(raised) if state.can_rise(name)]
    min_bits = {name: state.current_bits(name) for name in keeps if name in state.item_of}
    best, count, too_many = state.current, 0, len(packed) + 1  # `count` slots fit the budget, `too_many` do not
    while too_many - count > 1:
        middle = (count + too_many) // 2
        risen = state.risen(packed[:middle])
        affordable = state.lowered_to_fit(
            risen, min_bits | {name: state.bits_at(name, risen) for name in packed[:middle]}, terms.budget_bytes
        )
        best, count, too_many = (affordable, middle, too_many) if affordable is not None else (best, count, middle)
    return state.repaired(best, raised=packed[:count], refused=packed[count:])


def replan(plan: Plan, terms: RepairTerms, *, keeps: Collection[str] = ()) -> RepairedPlan:
    """Return the plan of least predicted error within the budget, or `plan` itself if no other is clearly better.

    Saved tensors named in `keeps` get no fewer bits than now.
    """
    check(plan, terms)
    state = RepairState.of(plan, terms)
    min_bits = {name: state.current_bits(name) for name in keeps if name in state.item_of}
    chosen = state.lowered_to_fit(state.ledger.starts, min_bits, terms.budget_bytes)
    if chosen is None or state.ledger.error(chosen) > CLEARLY_BETTER * state.ledger.error(state.current):
        return RepairedPlan(plan)
    return state.repaired(chosen)


def check(plan: Plan, terms: RepairTerms) -> None:
    """Raise BudgetError if the predicted peak of `plan` exceeds the budget of `terms`."""
    peak, budget = footprint(terms.trace, plan).peak_bytes, terms.budget_bytes
    if peak > budget:
        raise BudgetError(
            f"the plan to repair needs {say_bytes(peak)}, more than the budget of {say_bytes_twice(budget)}. Raise the budget."
        )


@dataclass(frozen=True, eq=False)
class RepairState:
    """The storage options of all saved tensors, and the options that `plan` takes now, as arrays for `repair`.

    `ledger` has a row of bytes over time for each option. `current` has, for each item (tensors that are stored together), its row now;
    every such array of rows is called `chosen`. `bits[name][row]` is the bits per value of a saved tensor under that row.
    """

    trace: Trace
    plan: Plan
    ledger: Ledger
    current: Ints
    bits: dict[str, dict[int, float]]  # by slot and row
    item_of: dict[str, int]
    totals: Ints  # bytes of each row, summed over ticks

    @staticmethod
    def of(plan: Plan, terms: RepairTerms) -> RepairState:
        """Return the storage options of all tensors under `terms`, and those that `plan` takes, as arrays."""
        trace, levels, measured = planned_step(terms.trace, plan), terms.levels, terms.sensitivities
        error_of = role_table_error if measured is None else measured_error(trace, measured, levels)
        chosen = slot_storages(trace, plan)
        items = [
            _with_current(item, chosen, error_of) for item in activation_items(trace, lambda _: levels, error_of, is_free=False)
        ]
        ledger = Ledger.of(trace, [*items, _parameters(trace, plan)])
        bits: dict[str, dict[int, float]] = {}
        current = ledger.starts.copy()
        for number, item in enumerate(items):
            for offset, option in enumerate(item.options):
                row = int(ledger.starts[number]) + offset
                if option.name == CURRENT:
                    current[number] = row
                for (name, _), format in option.formats:
                    bits.setdefault(name, {})[row] = bits_per_value(format)
        item_of = {slot.name: number for number, item in enumerate(items) for slot in item.slots}
        totals = np.array([option.total for item in ledger.items for option in item.options], dtype=np.int64)
        return RepairState(trace, plan, ledger, current, bits, item_of, totals)

    def bits_at(self, name: str, chosen: Ints) -> float:
        """Return the bits per value of the saved tensor `name` under the rows `chosen`; infinity if unmodified."""
        return self.bits[name][int(chosen[self.item_of[name]])]

    def current_bits(self, name: str) -> float:
        """Return the bits per value that the saved tensor `name` has under the current plan."""
        return self.bits_at(name, self.current)

    def can_rise(self, name: str) -> bool:
        """Return whether a wider format exists for the saved tensor `name`, which is the case if the plan packs it."""
        return name in self.item_of and self.current_bits(name) < inf

    def risen(self, names: Iterable[str]) -> Ints:
        """Return the storage options (rows) as now, but with the next wider format for the saved tensors `names`."""
        chosen = self.current.copy()
        for name in names:
            item = self.item_of[name]
            slots = [slot.name for slot in self.ledger.items[item].slots]
            current_row = int(chosen[item])
            rows = [
                row
                for row in self.bits[name]
                if self.bits[name][row] > self.bits[name][current_row]
                and all(self.bits[other][row] >= self.bits[other][current_row] for other in slots)
            ]
            if rows:
                chosen[item] = min(rows, key=lambda row: (int(self.totals[row]), self._option(row).error))
        return chosen

    def lowered_to_fit(self, chosen: Ints, floors: Mapping[str, float], budget_bytes: int) -> Ints | None:
        """Return the rows `chosen` with fewer bits for some tensors, so that the peak fits; None if impossible.

        The option with the least added error per freed byte is taken first. `floors` has, by name, the fewest bits per value that a saved
        tensor may have.
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
        """Return the row of `allowed` that adds the least error per byte freed at `tick`; None if none frees any.

        A row is an option to store some tensors; `chosen` has the rows now. A tick is the position of an operation in the step.
        """
        current = chosen[self.ledger.item_of[allowed]]
        column, totals = self.ledger.held[:, tick], self.totals
        freed = column[current] - column[allowed]
        is_lower = (freed > 0) & (totals[allowed] < totals[current])  # also summed over all ticks, so that the loop ends
        rows, current, freed = (part[is_lower] for part in (allowed, current, freed))
        if not len(rows):
            return None
        cost = np.maximum(self.ledger.errors[rows] - self.ledger.errors[current], 0) / freed
        return int(rows[np.lexsort((rows, -freed, cost))[0]])

    def repaired(self, chosen: Ints, *, raised: Sequence[str] = (), refused: Sequence[str] = ()) -> RepairedPlan:
        """Return `plan` with the formats of the rows `chosen`, and a list of the saved tensors whose format changed."""
        before, after = self._formats(self.current), self._formats(chosen)
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


def bits_per_value(format: Format | None) -> float:
    """Return the bits per value of a format; infinity for None, which means unmodified."""
    return inf if format is None else float(format.bits_per_value)


def _with_current(item: Item, chosen: dict[str, SlotStorage], error_of: ErrorOf) -> Item:
    """Return `item` with one more storage option: the formats that its tensors have under the current plan."""
    formats = [(slot, chosen[slot.name].format) for slot in item.slots]
    error = sum(error_of(slot, format) for slot, format in formats if format is not None)
    keys = tuple(((slot.name, Role.ACTIVATION), format) for slot, format in formats)
    current = StorageOption(CURRENT, error, tuple(activation_intervals(item.slots, chosen)), keys)
    return Item(item.name, item.slots, (*item.options, current))


def _parameters(trace: Trace, plan: Plan) -> Item:
    """Return all weights, gradients and optimizer state as one group of tensors with one option: as now."""
    held = list(model_memory(replace(trace, outputs=()), plan))
    for interval in unowned(trace):
        held.remove(interval)
    full = sum(slot.nbytes for slot in trace.of(Role.WEIGHT) if resolve_parameter_formats(slot, plan).is_full)
    return Item("parameters", (), (StorageOption("as planned", 0.0, tuple(held), (), full),))
