"""Checks of a trace that was read from a file: types and ranges of each row, and rows that contradict themselves or one another.

`trace_step` makes none of these: a tensor that dies before it is born, a packed part that is released before it is packed, a part that
holds values which no operation saved, views of one storage with different sizes, two slots of one role and name, or bytes that are not
those of shape and dtype. Footprints and `assign` rely on it.

>>> from paredown.plan.ops import Pin, Use
>>> check_row(Part(Use.VALUE, packed=1, released=99), length=10)
Traceback (most recent call last):
    ...
paredown.errors.TraceError: released of a part is a time from -1 to 11, not 99.
>>> check_row(Part(Use.VALUE, packed=5, released=3), length=10)
Traceback (most recent call last):
    ...
paredown.errors.TraceError: the part contradicts itself: packed 5, released 3; no tensor ends before it begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from math import prod
from typing import Any

from paredown.errors import TraceError
from paredown.plan.given import ITEM_BYTES
from paredown.plan.ops import Pin, Use
from paredown.plan.slots import Output, Part, Saver, Slot
from paredown.roles import Role
from paredown.serial import brief, is_text

MOST = 1 << 60  # bytes, values
MOST_IN_ALL = 1 << 58  # bytes of all rows and their decoded copies: int64 holds every sum of them, in any format
TIMES = frozenset({"birth", "death", "dropped", "packed", "released", "used"})
SPANS = frozenset({"running", "decoded"})
MAY_BE_UNKNOWN = frozenset({"storage", "dropped", "used"})  # -1 there
PHASES = ("forward", "loss", "backward", "step")
OF_PARAMETERS = (Role.WEIGHT, Role.GRADIENT, Role.MOMENT1, Role.MOMENT2)
Row = Slot | Output | Saver | Part | Pin


def _is_whole(value: Any) -> bool:
    return type(value) is int and -1 <= value < MOST


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < MOST


# by the text of a field's annotation; other fields are made by their own readers
KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "int": (_is_count, "a whole number from 0 to 2^60"),
    "int | None": (lambda value: value is None or _is_count(value), "a whole number from 0 to 2^60, or nothing"),
    "str": (is_text, "text"),
    "tuple[int, ...]": (lambda value: all(map(_is_count, value)), "whole numbers from 0 to 2^60"),
}
UNKNOWN = _is_whole, "a whole number, -1 for unknown"


def check_row(row: Row, length: int) -> None:
    """TraceError where a field of `row` cannot be what it says, or contradicts another one."""
    kind = type(row).__name__.lower()
    what = f"{'an' if kind[0] == 'o' else 'a'} {kind}"
    for field in fields(row):
        value = getattr(row, field.name)
        is_time = field.name in TIMES
        check, expected = UNKNOWN if field.name in MAY_BE_UNKNOWN else KINDS.get(str(field.type), (lambda value: True, ""))
        if not is_time and not check(value):
            raise TraceError(f"{field.name} of {what} is {expected}, not {brief(value)}.")
        for time in (value,) if is_time else [t for span in value for t in span] if field.name in SPANS else ():
            if not _is_whole(time) or time > length + 1:
                raise TraceError(f"{field.name} of {what} is a time from -1 to {length + 1}, not {brief(time)}.")
    inner: tuple[Any, ...] = (row.pin,) if isinstance(row, Saver) else (*row.savers, *row.parts) if isinstance(row, Slot) else ()
    for part in inner:
        if part is not None:
            check_row(part, length)
    _check_order(row, kind)


def _check_order(row: Row, kind: str) -> None:
    """TraceError where something ends before it begins."""
    where = f"{kind} {brief(row.name)}" if isinstance(row, Slot) else kind
    for first, begins, last, ends in _pairs(row):
        if ends < begins:
            raise TraceError(f"the {where} contradicts itself: {first} {begins}, {last} {ends}; no tensor ends before it begins.")


def _pairs(row: Row) -> Iterator[tuple[str, int, str, int]]:
    """(name, begin, name, end) of everything in a row that lasts."""
    if isinstance(row, Slot | Output):
        yield "born at", row.birth, "dead at", row.death
    if isinstance(row, Slot):
        if row.dropped != -1:
            yield "born at", row.birth, "dropped at", row.dropped
        yield from (("running from", start, "to", end) for start, end in row.running)
    if isinstance(row, Part):
        yield "packed", row.packed, "released", row.released
        yield from (("decoded from", start, "to", end) for start, end in row.decoded)


def check_rows(slots: tuple[Slot, ...], outputs: tuple[Output, ...], length: int) -> None:
    """TraceError where a row is impossible, or where rows contradict one another."""
    for row in (*slots, *outputs):
        check_row(row, length)
    total = sum(row.nbytes * _copies(row) for row in (*slots, *outputs))
    if total >= MOST_IN_ALL:
        raise TraceError(f"the slots and outputs of the trace have {brief(total)} bytes in all; fewer than 2^58 are counted.")
    odd = next((row.phase for row in outputs if row.phase not in PHASES), None)
    if odd is not None:
        raise TraceError(f"phase of an output is one of {', '.join(PHASES)}, not {brief(odd)}.")
    for slot in slots:
        if slot.role in OF_PARAMETERS:
            _check_bytes(slot)
        elif slot.role is Role.ACTIVATION:
            _check_uses(slot)
    _check_names(slots)
    _check_storages(slot for slot in slots if slot.role is Role.ACTIVATION)
    _check_owners(slots)


def _copies(row: Slot | Output) -> int:
    """How many tensors of its size a row stands for at most: itself, and what is packed and decoded of it."""
    return 1 + (len(row.running) + sum(1 + len(part.decoded) for part in row.parts) if isinstance(row, Slot) else 0)


def _check_bytes(slot: Slot) -> None:
    """Bytes, shape and dtype of a weight, a gradient or a moment agree."""
    numel = prod(slot.shape)
    size = numel * ITEM_BYTES.get(slot.dtype, 0)
    if (size and size != slot.nbytes) or slot.numel not in (0, numel):
        raise _contradiction(slot, f"shape {slot.shape} of {slot.dtype}, {slot.numel} values, {slot.nbytes} bytes")


def _check_uses(slot: Slot) -> None:
    """What is packed of an activation is what operations saved."""
    if slot.numel * ITEM_BYTES.get(slot.dtype, 1) > slot.nbytes:
        raise _contradiction(slot, f"{slot.numel} values of {slot.dtype} in a storage of {slot.nbytes} bytes")
    packed, saved = ({row.use for row in rows} for rows in (slot.parts, slot.savers))
    if not slot.stays and packed - saved:
        uses = ", ".join(sorted(use.value for use in packed - saved))
        raise _contradiction(slot, f"a part for the use {uses}, which no operation saved")
    if len(packed) < len(slot.parts):
        raise _contradiction(slot, "two parts for one use")
    if Use.VALUE in packed and not slot.stays and slot.dropped == -1:
        raise _contradiction(slot, "a packed part, and no time at which the original is dropped")


def _check_names(slots: tuple[Slot, ...]) -> None:
    """A role and a name belong to one slot, the name of a saver to one activation."""
    seen: set[tuple[Role, str]] = set()
    for slot in slots:
        keys = (
            {(slot.role, name) for name in (slot.name, *slot.names)} if slot.role is Role.ACTIVATION else {(slot.role, slot.name)}
        )
        if keys & seen:
            raise _contradiction(slot, "another slot has this role and name")
        seen |= keys if slot.role in (Role.ACTIVATION, *OF_PARAMETERS) else set()


def _check_storages(activations: Iterable[Slot]) -> None:
    """Views of one storage are born with it and have its bytes."""
    first: dict[int, Slot] = {}
    for slot in activations:
        other = first.setdefault(slot.storage, slot)
        if (other.nbytes, other.birth) != (slot.nbytes, slot.birth):
            here, there = (f"{of.nbytes} bytes from {of.birth}" for of in (slot, other))
            raise _contradiction(slot, f"storage {slot.storage} has {here}, and {there} in slot {brief(other.name)}")


def _check_owners(slots: tuple[Slot, ...]) -> None:
    """A gradient, and the cast of a weight, belong to a weight of the trace."""
    weights = {slot.name for slot in slots if slot.role is Role.WEIGHT}
    named = {slot.name for slot in slots if slot.role is Role.GRADIENT}
    named |= {slot.recomputed_from for slot in slots if slot.role is Role.TEMPORARY and slot.recomputed_from}
    if missing := sorted(named - weights):
        raise TraceError(
            f"a gradient or a cast is of {brief(missing[0])}, and there is no such weight in the trace: save it anew with "
            "trace.save(path)."
        )


def _contradiction(slot: Slot, why: str) -> TraceError:
    return TraceError(f"slot {brief(slot.name)} ({slot.role.value}) contradicts itself or another one: {why}. Trace the step anew.")
