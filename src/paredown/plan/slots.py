"""What a trace is made of: the tensors that one training step keeps, each a `Slot`, and every output of an operation, kept or not.

Times are ticks of the step's clock, one for each operation (see timeline.py); a lifetime includes both its ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from paredown.errors import TraceError
from paredown.plan.ops import Needs, Pin, Use
from paredown.roles import Role

INDEX_BYTES = ((1 << 8, 1), (1 << 15, 2), (1 << 31, 4))  # integers below a bound fit in so many bytes


@dataclass(frozen=True)
class Saver:
    """One operation that saved a tensor for backward, and what its backward needs of it."""

    name: str
    op: str
    operand: str
    use: Use
    pin: Pin | None = None
    is_centered: bool = False  # its backward subtracts a mean from it

    @property
    def needs(self) -> Needs:
        """What its backward needs of the tensor."""
        return Needs(self.use, self.pin, self.is_centered)


@dataclass(frozen=True)
class Part:
    """One form in which a slot can wait: when it is packed, until when it waits, and when it is decoded."""

    use: Use
    packed: int
    released: int
    decoded: tuple[tuple[int, int], ...] = ()
    bound: int | None = None  # INDEX: what all values are below


@dataclass(frozen=True)
class Slot:
    """A tensor with a role. `shape` and `dtype` are those of its first saver; an activation holds `nbytes`, all of its storage.

    birth..death is its life as the model is written. If it is packed, the original is gone after `dropped`. `stays`: why no plan packs
    it. Views too small to stand for their storage are slots of their own, with the `storage` number in common.

    A weight that waits packed is plain while a module that has it runs (`running`), and again when backward needs it (its part); the
    cast of one is a TEMPORARY slot that follows from it (`recomputed_from`).
    """

    name: str
    role: Role
    module: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    birth: int
    death: int
    numel: int = 0  # values that wait when it is packed: those of the storage, or of a small view
    storage: int = -1
    dropped: int = -1
    savers: tuple[Saver, ...] = ()
    parts: tuple[Part, ...] = ()
    stays: str = ""
    recomputed_from: str = ""  # the slot that its values follow from, as relu(batch_norm(x)) does from x
    running: tuple[tuple[int, int], ...] = ()  # of a weight; when its cast is there, if its module is computed again

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all savers, or its own."""
        return tuple(saver.name for saver in self.savers) or (self.name,)

    @property
    def pin(self) -> Pin | None:
        """The strictest pin of its savers."""
        pins = [saver.pin for saver in self.savers if saver.pin is not None]
        return max(pins, key=lambda pin: pin.significant_bits, default=None)

    @property
    def uses(self) -> frozenset[Use]:
        """What backward needs of it."""
        return frozenset(part.use for part in self.parts)


@dataclass(frozen=True)
class Output:
    """Memory that an operation made. `slot`: the slot that it became; "" for what nothing keeps. `used`: when an operation took it last,
    -1 if that is not known: a name in a program may hold it beyond."""

    op: str
    module: str
    phase: str  # "forward", "loss", "backward" or "step"
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    birth: int
    death: int
    slot: str = ""
    used: int = -1


def index_bytes(bound: int | None, itemsize: int) -> int:
    """Bytes of an integer below `bound`, in the smallest width that holds it.

    >>> index_bytes(200, 8), index_bytes(50257, 8), index_bytes(None, 8)
    (1, 4, 8)
    """
    return next((width for top, width in INDEX_BYTES if bound is not None and bound <= top), itemsize)


# --- JSON: rows without the fields that have their default ------------------------------------------------------------------------


def to_row(value: Any) -> dict[str, Any]:
    """A Slot or Output as a JSON value."""
    return {f.name: _plain(getattr(value, f.name)) for f in fields(value) if getattr(value, f.name) != f.default}


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Saver | Part | Pin):
        return to_row(value)
    return [_plain(part) for part in value] if isinstance(value, tuple) else value


def slot_of(row: dict[str, Any]) -> Slot:
    """The slot whose `to_row` is `row`."""
    savers = tuple(_saver(saver) for saver in row.get("savers", ()))
    parts = tuple(_part(part) for part in row.get("parts", ()))
    slot: dict[str, Any] = {**row, "role": Role(row["role"]), "shape": tuple(row["shape"]), "savers": savers, "parts": parts}
    slot["running"] = _spans(row.get("running", ()))
    return Slot(**slot)


def _spans(rows: Iterable[Any]) -> tuple[tuple[int, int], ...]:
    return tuple((start, end) for start, end in rows)


def _saver(row: dict[str, Any]) -> Saver:
    saver: dict[str, Any] = {**row, "use": Use(row["use"]), "pin": Pin(**row["pin"]) if "pin" in row else None}
    return Saver(**saver)


def _part(row: dict[str, Any]) -> Part:
    part: dict[str, Any] = {**row, "use": Use(row["use"]), "decoded": _spans(row.get("decoded", ()))}
    return Part(**part)


def output_of(row: dict[str, Any]) -> Output:
    """The output whose `to_row` is `row`."""
    output: dict[str, Any] = {**row, "shape": tuple(row["shape"])}
    return Output(**output)


def slot_named(slots: Iterable[Slot], name: str, role: Role | None = None) -> Slot:
    """The slot of this name; of an activation or weight where no role is given."""
    roles = (Role.ACTIVATION, Role.WEIGHT) if role is None else (role,)
    found = [slot for slot in slots if name in slot.names and slot.role in roles]
    if not found:
        raise TraceError(f"there is no slot {name!r} in the trace; trace.slots has all of them.")
    return found[0]
