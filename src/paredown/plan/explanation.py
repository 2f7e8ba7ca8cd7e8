"""Slot by slot: what a plan lowers, what is pinned, what stays, and why. `explain_slots(trace, plan)` prints as a table.

lowered     it waits in the format
pinned      likewise, and may not go below 8 bits
exact       bits of a mask or integers of the smallest width, without loss
follows     it is computed from another slot that waits, and takes nothing
again       its module is computed again in backward
kept        the plan leaves it as it is
stays       no plan can change it
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paredown.formats.catalog import is_small
from paredown.formats.format import Format
from paredown.plan.checkpointed_trace import checkpointed_trace
from paredown.plan.footprint import slot_bytes
from paredown.plan.plan import Plan
from paredown.plan.replay import SlotStorage, moment_bytes, parameter_of, resolve_parameter_formats, slot_storages
from paredown.roles import Role
from paredown.sizes import say_bytes
from paredown.tables import TableRows
from paredown.trace.trace import Slot, Trace

HEAD = ("slot", "role", "as written", "waits as", "what", "why")
SMALL = "it is small: biases, norms and small layers stay as they are"


@dataclass(frozen=True)
class PlannedSlot:
    """What becomes of one slot. `nbytes`: what waits of it; `written_bytes`: what the step as it is written keeps."""

    slot: str
    role: Role
    written_bytes: int
    nbytes: int
    format: str
    what: str
    why: str

    @property
    def cells(self) -> tuple[str, ...]:
        """The row of a table."""
        waits = f"{say_bytes(self.nbytes)} {self.format}".strip()
        return self.slot, self.role.value, say_bytes(self.written_bytes), waits, self.what, self.why


class PlannedSlots(TableRows[PlannedSlot]):
    """All slots that a plan could speak of, as a tuple that prints as a table."""

    __slots__ = ()
    columns = HEAD

    def that(self, what: str) -> PlannedSlots:
        """Those of one kind: "lowered", "pinned", "stays" and so on."""
        return PlannedSlots(row for row in self if row.what == what)

    def cells(self, row: PlannedSlot) -> tuple[str, ...]:
        """The texts of one row."""
        return row.cells


def explain_slots(trace: Trace, plan: Plan) -> PlannedSlots:
    """What `plan` makes of every activation, weight, gradient and moment of the step, and why."""
    return PlannedSlots([*_activations(trace, plan), *_parameters(trace, plan)])


def _activations(trace: Trace, plan: Plan) -> Iterator[PlannedSlot]:
    then = checkpointed_trace(trace, plan.recompute)
    chosen, slots = slot_storages(then, plan), {slot.name: slot for slot in then.activations}
    for slot in trace.activations:
        now = slots.get(slot.name)
        if now is None:
            yield PlannedSlot(slot.name, slot.role, slot.nbytes, 0, "", "again", "its module is computed again in backward")
        else:
            choice = chosen[slot.name]
            what, why = _what(now, choice, plan)
            yield PlannedSlot(slot.name, slot.role, slot.nbytes, slot_bytes(now, choice), str(choice.format or ""), what, why)


def _what(slot: Slot, choice: SlotStorage, plan: Plan) -> tuple[str, str]:
    if slot.stays:
        return "stays", slot.stays
    if choice.recomputed:
        return "follows", f"from {slot.recomputed_from}"
    if choice.packs and choice.format is None:
        return "exact", "backward needs a bit, an index or a shape of it"
    if choice.packs and slot.pin is not None:
        return "pinned", f"{slot.pin.significant_bits} significant bits or more: {slot.pin.reason}"
    if choice.packs:
        return "lowered", f"saved by {slot.savers[0].op}"
    return "kept", choice.reason or ("the plan changes nothing" if plan.changes_nothing else "the plan leaves it as it is")


def _parameters(trace: Trace, plan: Plan) -> Iterator[PlannedSlot]:
    weights = {slot.name: slot for slot in trace.of(Role.WEIGHT)}
    for slot in trace.slots:
        of = weights.get(slot.name) if slot.role is not Role.ACTIVATION else None
        of = parameter_of(slot, weights) if slot.role in (Role.MOMENT1, Role.MOMENT2) else of
        if of is None or slot.role not in (Role.WEIGHT, Role.GRADIENT, Role.MOMENT1, Role.MOMENT2):
            continue
        gets = resolve_parameter_formats(of, plan)
        format: Format | None = {Role.WEIGHT: gets.weight, Role.GRADIENT: gets.gradient}.get(slot.role)
        nbytes = slot.nbytes if format is None else format.nbytes(slot.shape)
        if slot.role in (Role.MOMENT1, Role.MOMENT2):
            nbytes = moment_bytes(slot, of, gets, plan)
            format = None if is_small(of.shape) or gets.is_full else plan.find((slot.name,), slot.role).format
        what, why = ("lowered", "paredown.optim serves it") if format is not None else _left(of)
        yield PlannedSlot(slot.name, slot.role, slot.nbytes, nbytes, str(format or ""), what, why)


def _left(weight: Slot) -> tuple[str, str]:
    if weight.stays:
        return "stays", weight.stays
    return ("stays", SMALL) if is_small(weight.shape) else ("kept", "the plan leaves it as it is")
