"""`explain_slots(trace, plan)` says how a plan stores each slot (tensor of the step), and why; the result prints as a table.

The column `what` has these values:

    quantized       stored in the format
    pinned          stored in the format, which may not have fewer significant bits than the pin
    exact           bits of a mask, or integers of the smallest width, without loss
    recomputed      recomputed from another stored slot; takes no bytes
    checkpointed    inside of a module under activation checkpointing; takes no bytes
    tiled           inside of a module that runs over pieces of the sequence; takes no bytes
    unmodified      the plan does not change it
    fixed           no plan can change it
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paredown.formats.catalog import is_small
from paredown.formats.format import Format
from paredown.plan.byte_intervals import SlotStorage, moment_bytes, parameter_of, resolve_parameter_formats, slot_storages
from paredown.plan.checkpointed_trace import is_of
from paredown.plan.footprint import slot_bytes
from paredown.plan.plan import OFFLOADED, Plan
from paredown.plan.planned_step import planned_step
from paredown.plan.tiled_trace import tiled_modules
from paredown.plan.trace import Slot, Trace
from paredown.roles import Role
from paredown.sizes import FLOAT_BYTES, say_bytes
from paredown.tables import TableRows

HEAD = ("slot", "role", "baseline", "stored as", "what", "why")
SMALL = "it is small: biases, norms and small layers are stored unmodified"
NOT_SMALLER = "its format would take no fewer bytes"
CHECKPOINTED = "checkpointed", "its module runs again in backward"
TILED = "tiled", "its module runs again in backward, piece by piece"
NO_RULE = "the plan assigns it no format"


@dataclass(frozen=True)
class PlannedSlot:
    """A row of `explain_slots`: how a plan stores one tensor of the step, with its bytes under both plan and baseline.

    `what` is a word such as "quantized" or "fixed", and `why` the reason.
    """

    slot: str
    role: Role
    baseline_bytes: int
    nbytes: int
    format: str
    what: str
    why: str


class PlannedSlots(TableRows[PlannedSlot]):
    """The result of `explain_slots`: a row for each tensor of the step, printed as a table."""

    __slots__ = ()
    columns = HEAD

    def that(self, what: str) -> PlannedSlots:
        """Return the rows whose column `what` has this text: "quantized", "pinned", "fixed" and so on."""
        return PlannedSlots(row for row in self if row.what == what)

    def cells(self, row: PlannedSlot) -> tuple[str, ...]:
        """Return the cells of a row of the printed table, as texts."""
        stored = f"{say_bytes(row.nbytes)} {row.format}".strip()
        return row.slot, row.role.value, say_bytes(row.baseline_bytes), stored, row.what, row.why


def explain_slots(trace: Trace, plan: Plan) -> PlannedSlots:
    """Return how `plan` stores every activation, weight, gradient and moment of the step, and why."""
    return PlannedSlots([*_activations(trace, plan), *_parameters(trace, plan)])


@dataclass(frozen=True)
class UnpackedSlots:
    """Tensors that stay unmodified for the same reason `why`, though a rule of the plan asks for a format."""

    role: Role
    why: str
    nbytes: int
    slots: tuple[str, ...]


def unpacked_slots(trace: Trace, plan: Plan) -> list[UnpackedSlots]:
    """Return the tensors that stay unmodified though `plan` has a rule for them, grouped by role and reason.

    Groups of most bytes come first. Small parameters, which never are packed, are left out.
    """
    groups: dict[tuple[Role, str], list[PlannedSlot]] = {}
    for row in explain_slots(trace, plan) if not plan.changes_nothing else ():
        if row.what in ("fixed", "unmodified") and row.why not in (NO_RULE, SMALL) and _has_rule(row, plan):
            why = NOT_SMALLER if row.why.startswith("it would take") else row.why
            groups.setdefault((row.role, why), []).append(row)
    found = [UnpackedSlots(*key, sum(r.nbytes for r in rows), tuple(r.slot for r in rows)) for key, rows in groups.items()]
    return sorted(found, key=lambda group: -group.nbytes)


def _has_rule(row: PlannedSlot, plan: Plan) -> bool:
    return plan.find((row.slot,), row.role).format is not None


def _activations(trace: Trace, plan: Plan) -> Iterator[PlannedSlot]:
    checkpointed = planned_step(trace, plan)
    storages, planned = slot_storages(checkpointed, plan), {slot.name: slot for slot in checkpointed.kept_activations}
    tiled = [module.path for module, _ in tiled_modules(trace, plan.tiles)] if plan.tiles else []
    new = [slot for slot in checkpointed.kept_activations if slot.name not in {slot.name for slot in trace.activations}]
    for slot in (*trace.activations, *new):
        after = planned.get(slot.name)
        if after is None:
            again = ("recomputed", "its operations run again in backward") if trace.is_compiled else CHECKPOINTED
            again = TILED if any(is_of(slot.name, path) for path in tiled) else again
            yield PlannedSlot(slot.name, slot.role, slot.nbytes, 0, "", *again)
        else:
            storage = storages[slot.name]
            what, why = _what(after, storage, plan)
            yield PlannedSlot(slot.name, slot.role, slot.nbytes, slot_bytes(after, storage), str(storage.format or ""), what, why)


def _what(slot: Slot, storage: SlotStorage, plan: Plan) -> tuple[str, str]:
    """Return (what, why): a word for how an activation is stored, such as "quantized" or "pinned", and the reason."""
    if slot.stays:
        return "fixed", slot.stays
    if storage.recomputed:
        return "recomputed", f"from {slot.recomputed_from}"
    if storage.packs and storage.format is None:
        return "exact", "backward needs a bit, an index or a shape of it"
    place = f"; {OFFLOADED}" if any(part.away for part in slot.parts) else ""
    if storage.packs and slot.pin is not None:
        return "pinned", f"{slot.pin.significant_bits} significant bits or more: {slot.pin.reason}{place}"
    if storage.packs:
        return "quantized", f"saved by {slot.savers[0].op}{place}"
    return "unmodified", storage.reason or ("the plan changes nothing" if plan.changes_nothing else NO_RULE)


def _parameters(trace: Trace, plan: Plan) -> Iterator[PlannedSlot]:
    weights = {slot.name: slot for slot in trace.of(Role.WEIGHT)}
    for slot in trace.slots:
        weight = weights.get(slot.name) if slot.role is not Role.ACTIVATION else None
        weight = parameter_of(slot, weights) if slot.role in (Role.MOMENT1, Role.MOMENT2) else weight
        if weight is None or slot.role not in (Role.WEIGHT, Role.GRADIENT, Role.MOMENT1, Role.MOMENT2):
            continue
        formats = resolve_parameter_formats(weight, plan)
        format: Format | None = {Role.WEIGHT: formats.weight, Role.GRADIENT: formats.gradient}.get(slot.role)
        nbytes = slot.nbytes if format is None else format.nbytes(slot.shape)
        if slot.role in (Role.MOMENT1, Role.MOMENT2):
            nbytes = moment_bytes(slot, weight, formats, plan)
            format = None if is_small(weight.shape) or formats.is_full else plan.find((slot.name,), slot.role).format
        stored_by = "it is frozen: apply encodes it once" if weight.is_frozen else "an optimizer of paredown.optim stores it"
        what, why = ("quantized", stored_by) if format is not None else _not_quantized(weight)
        yield PlannedSlot(slot.name, slot.role, slot.nbytes, nbytes, str(format or ""), what, why)


def _not_quantized(weight: Slot) -> tuple[str, str]:
    """Return (what, why) for a weight without a format: "fixed" or "unmodified", and the reason."""
    if weight.stays:
        return "fixed", weight.stays
    if weight.dtype not in FLOAT_BYTES:
        return "fixed", f"it is {weight.dtype}, which no format can store"
    return ("fixed", SMALL) if is_small(weight.shape) else ("unmodified", NO_RULE)
