"""The `Trace` of a step as a value: slots, outputs, times, notes; it prints as a table and goes through JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

from paredown.errors import TraceError
from paredown.plan.row_checks import check_rows
from paredown.plan.sizes import say_bytes
from paredown.plan.slots import Output, Slot, output_of, slot_named, slot_of, to_row
from paredown.roles import Role
from paredown.serial import brief, read_json

VERSION = 2  # of the JSON: 2 says when weights are needed
LARGEST = 10  # slots that repr shows
DEVICES = ("cuda", "cpu")
MOST_TICKS, LONGEST = 1 << 26, 1 << 60  # of a step in a file; of its numbers


@dataclass(frozen=True, repr=False)
class Trace:
    """One training step: what it keeps (`slots`), what it makes (`outputs`), in `length` ticks; backward begins at `backward_at`.

    `dtype` is what the step computes in: autocast's, or that of the parameters. `notes` says what was assumed or left out, by name.
    """

    model: str
    batch: tuple[str, ...]
    device: str
    dtype: str
    optimizer: str
    slots: tuple[Slot, ...]
    outputs: tuple[Output, ...]
    length: int
    backward_at: int
    returned_bytes: int = 0  # of the model's output beside its loss, which is let go before backward
    notes: tuple[str, ...] = ()

    @cached_property
    def activations(self) -> tuple[Slot, ...]:
        """The slots that autograd saves for backward."""
        return self.of(Role.ACTIVATION)

    def of(self, role: Role) -> tuple[Slot, ...]:
        """The slots of a role."""
        return tuple(slot for slot in self.slots if slot.role is role)

    def slot(self, name: str, role: Role | None = None) -> Slot:
        """The slot of this name; of an activation or a weight where no role is given."""
        return slot_named(self.slots, name, role)

    @cached_property
    def largest(self) -> tuple[Slot, ...]:
        """The largest activations, one for each storage."""
        by_storage = {slot.storage: slot for slot in reversed(self.activations)}
        return tuple(sorted(by_storage.values(), key=lambda slot: -slot.nbytes)[:LARGEST])

    def __repr__(self) -> str:
        sums = {role: sum(slot.nbytes for slot in _once(self.of(role))) for role in Role}
        roles = ", ".join(f"{role.value} {say_bytes(n)}" for role, n in sums.items() if n)
        width = max((len(slot.name) for slot in self.largest), default=0)
        rows = [f"  {s.name:{width}}  {say_bytes(s.nbytes):>10}  {s.dtype} {s.shape}" for s in self.largest]
        notes = [f"  note: {note}" for note in self.notes]
        head = f"Trace of {self.model} on {self.device}, {self.dtype}, batch {'; '.join(self.batch)}"
        return "\n".join([head, f"  {roles}", f"  largest of {len(self.activations)} saved tensors:", *rows, *notes])

    def to_json(self) -> dict[str, Any]:
        """The JSON value."""
        head = {
            name: getattr(self, name)
            for name in ("model", "device", "dtype", "optimizer", "length", "backward_at", "returned_bytes")
        }
        rows = {"slots": [to_row(s) for s in self.slots], "outputs": [to_row(o) for o in self.outputs]}
        return {"version": VERSION, **head, "batch": list(self.batch), "notes": list(self.notes), **rows}

    @staticmethod
    def from_json(value: Any) -> Trace:
        """The trace whose `to_json` is `value`."""
        if not isinstance(value, dict) or value.get("version") != VERSION:
            raise TraceError(f"this is no trace of version {VERSION}: traces are written by trace.save(path).")
        try:
            trace = _read(value)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise TraceError(f"this is no trace: {type(error).__name__}: {error}.") from None
        return trace

    def save(self, path: str | PathLike[str]) -> None:
        """Write the JSON."""
        Path(path).write_text(json.dumps(self.to_json()) + "\n", encoding="utf-8", newline="\n")

    @staticmethod
    def load(path: str | PathLike[str]) -> Trace:
        """The trace that `save` wrote."""
        value = read_json(path, "trace", TraceError, hint="Traces are written by trace.save(path).")
        try:
            return Trace.from_json(value)
        except TraceError as error:
            raise TraceError(f"{path}: {error}") from None


def _read(value: dict[str, Any]) -> Trace:
    """A trace of its JSON value, checked."""
    parts: dict[str, Any] = {name: part for name, part in value.items() if name != "version"}
    slots, outputs = tuple(map(slot_of, value["slots"])), tuple(map(output_of, value["outputs"]))
    parts |= {"batch": tuple(value["batch"]), "notes": tuple(value["notes"]), "slots": slots, "outputs": outputs}
    trace = Trace(**parts)
    numbers = (trace.length, trace.backward_at, trace.returned_bytes)
    if not all(type(number) is int and 0 <= number < LONGEST for number in numbers) or trace.length > MOST_TICKS:
        raise TraceError(f"length, backward_at and returned_bytes are whole numbers, not {brief(numbers)}.")
    texts = (trace.model, trace.device, trace.dtype, trace.optimizer, *trace.batch, *trace.notes)
    if not all(isinstance(text, str) for text in texts) or trace.device not in DEVICES:
        raise TraceError(f"model, device ({' or '.join(DEVICES)}), dtype, optimizer, batch and notes are texts.")
    if trace.backward_at > trace.length:
        raise TraceError(f"backward begins at {trace.backward_at}, after the step's end at {trace.length}. Trace the step anew.")
    check_rows(slots, outputs, trace.length)
    return trace


def _once(slots: tuple[Slot, ...]) -> list[Slot]:
    """Slots without those that share a storage with one before."""
    seen: set[int] = set()
    return [slot for slot in slots if slot.storage == -1 or not (slot.storage in seen or seen.add(slot.storage))]
