"""What a plan decides about in one piece, and the ways in which each piece may wait: `Item` and its `Option`s.

An activation is an item with those that depend on it: views of one storage, which is freed when all of them are packed, and tensors that
are computed again from another one (`plan/recipes.py`). A parameter is an item with its gradient, moments and residue, of which either
none or some are packed (`plan/parameters.py`).

    item                       options: as it is, then lower and lower, each with what is held from when to when, and a predicted error
    layers.0.mlp.1:input       as it is | int8 | int4 | uint2;   layers.0.mlp.2:input follows from it, and waits as nothing
    layers.0.mlp.0.weight      full | moments8 | safe | half | lpmm | lpmm4, with packed or plain gradients

The bytes are those of `plan/replay.py`, by the same functions, so that what is planned here is what a footprint says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from paredown.formats.format import Format
from paredown.formats.tiers import TIERS, is_small
from paredown.plan.assignment import AS_IS, Assignment
from paredown.plan.given import is_same_level
from paredown.plan.parameters import given_to, parameter_of
from paredown.plan.plan import Plan
from paredown.plan.record import Trace
from paredown.plan.replay import Choice, Interval, activations, choice, model_memory, with_recomputed
from paredown.plan.slots import Slot
from paredown.roles import Role
from paredown.search.role_errors import parameter_error

Ladder = tuple[Format | None, ...]  # the best first; None: as it is
ErrorOf = Callable[[Slot, Format], float]
LADDER: Ladder = (None, *(Format.parse(text) for text in ("int8/64@bf16", "int4/64@bf16", "uint2/64@bf16+bf16")))
FREE = 2  # so many slots of an item are given formats independently of each other, more go down together
_PLAIN_GRADIENT = {name: {role: text for role, text in row.items() if role != "gradient"} for name, row in TIERS.items()}
TIER_ROWS: Mapping[str, Mapping[str, str]] = {
    "full": {},
    "moments8": {role: text for role, text in TIERS["safe"].items() if role in ("moment1", "moment2")},
    **{f"{name}, plain gradients": row for name, row in _PLAIN_GRADIENT.items() if row},
    **{name: row for name, row in TIERS.items() if row},
}


@dataclass(frozen=True)
class Option:
    """One way in which an item may wait. `formats`: of its slots by key, None for as it is; `full_bytes`: of weights torch.optim serves."""

    name: str
    error: float
    held: tuple[Interval, ...]
    formats: tuple[tuple[tuple[str, Role], Format | None], ...]
    full_bytes: int = 0

    @property
    def total(self) -> int:
        """Bytes times ticks."""
        return sum(i.nbytes * (i.death - i.birth + 1) for i in self.held)


@dataclass(frozen=True)
class Item:
    """A piece that a plan decides about; options from the first, as little changed as may be, down."""

    name: str
    slots: tuple[Slot, ...]
    options: tuple[Option, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its storages as the model is written."""
        return sum({slot.storage if slot.storage != -1 else i: slot.nbytes for i, slot in enumerate(self.slots)}.values())


# --- activations -----------------------------------------------------------------------------------------------------------------


def activation_items(
    trace: Trace, ladder_of: Callable[[Slot], Ladder], error_of: ErrorOf, *, is_free: bool = True
) -> Iterator[Item]:
    """An item for each storage and what depends on it; `is_free`: slots of an item may be lowered apart."""
    plans: dict[Format | None, Plan] = {}
    for slots in _components(trace.activations):
        ways: list[list[Choice]] = []
        for slot in slots:
            formats = ladder_of(slot)
            for format in formats:
                plans.setdefault(format, Plan((("activation", Assignment(format)),)))
            ways.append(list(dict.fromkeys(choice(slot, plans[format]) for format in formats)))
        yield Item(slots[0].name, slots, tuple(_ordered(_options(slots, ways, error_of, is_free))))


def _components(slots: Sequence[Slot]) -> list[tuple[Slot, ...]]:
    """Slots that share a storage, or are computed again from one another, together."""
    of: dict[str, int] = {slot.name: number for number, slot in enumerate(slots)}
    root = list(range(len(slots)))

    def find(number: int) -> int:
        while root[number] != number:
            root[number] = number = root[root[number]]
        return number

    first: dict[int, int] = {}
    for number, slot in enumerate(slots):
        for other in (first.setdefault(slot.storage, number), of.get(slot.recomputed_from, number)):
            root[find(number)] = find(other)
    groups: dict[int, list[Slot]] = {}
    for number, slot in enumerate(slots):
        groups.setdefault(find(number), []).append(slot)
    return [tuple(group) for group in groups.values()]


def _options(slots: tuple[Slot, ...], ways: list[list[Choice]], error_of: ErrorOf, is_free: bool) -> Iterator[Option]:
    num_free = sum(len(way) > 1 for way in ways)
    if is_free and num_free <= FREE:
        combinations: Iterable[tuple[Choice, ...]] = product(*ways)
    else:
        combinations = (tuple(way[min(step, len(way) - 1)] for way in ways) for step in range(max(map(len, ways))))
    seen: set[tuple[Choice, ...]] = set()
    for combination in combinations:
        chosen = with_recomputed(slots, {slot.name: way for slot, way in zip(slots, combination, strict=True)})
        if any(
            way.recomputed and not is_same_level(way.format, chosen[slot.recomputed_from].format)
            for slot in slots
            if (way := chosen[slot.name])
        ):
            continue  # recomputed it has the precision of its source: one format of its own says it
        key = tuple(chosen[slot.name] for slot in slots)
        if key not in seen:
            seen.add(key)
            yield _option(slots, chosen, error_of)


def _option(slots: tuple[Slot, ...], chosen: dict[str, Choice], error_of: ErrorOf) -> Option:
    formats: list[tuple[tuple[str, Role], Format | None]] = []
    error = 0.0
    for slot in slots:
        format = chosen[slot.name].format
        formats.append(((slot.name, Role.ACTIVATION), format))
        error += error_of(slot, format) if format is not None else 0.0
    name = ", ".join(str(format or "as it is") for _, format in formats)
    return Option(name, error, tuple(activations(slots, chosen)), tuple(formats))


def _ordered(options: Iterable[Option]) -> list[Option]:
    """From the least error up; what only costs more of everything is left to the search to pass over."""
    return sorted(options, key=lambda option: (option.error, -option.total))


# --- parameters ------------------------------------------------------------------------------------------------------------------


def parameter_items(trace: Trace, *, is_free: bool = True) -> Iterator[Item]:
    """An item for each parameter, with its gradient, moments and the casts of it; `is_free`: it may be lowered."""
    rows = TIER_ROWS if is_free else {"full": TIER_ROWS["full"]}
    plans = {name: Plan.uniform(**row) if row else Plan((("activation", AS_IS),)) for name, row in rows.items()}
    for weight, slots in _by_parameter(trace).items():
        part = replace(trace, slots=slots, outputs=())
        options: dict[tuple[Interval, ...], Option] = {}
        for name, plan in plans.items():
            if name != "full" and (is_small(weight.shape) or weight.stays):
                continue  # it stays as it is in every tier
            held = tuple(model_memory(part, plan))
            if held not in options:
                formats = {Role(role): Format.parse(text) for role, text in TIER_ROWS[name].items()}
                own = tuple(((weight.name, role), format) for role, format in formats.items())
                full_bytes = weight.nbytes if given_to(weight, plan).is_full else 0
                options[held] = Option(name, parameter_error(formats), held, own, full_bytes)
        yield Item(weight.name, slots, tuple(_ordered(options.values())))


def _by_parameter(trace: Trace) -> dict[Slot, tuple[Slot, ...]]:
    weights = {slot.name: slot for slot in trace.of(Role.WEIGHT)}
    groups: dict[str, list[Slot]] = {name: [slot] for name, slot in weights.items()}
    for slot in trace.slots:
        if slot.role is Role.GRADIENT:
            groups[slot.name].append(slot)
        elif slot.role in (Role.MOMENT1, Role.MOMENT2):
            of = parameter_of(slot, weights)
            if of is not None:
                groups[of.name].append(slot)
        elif slot.role is Role.TEMPORARY and slot.recomputed_from:
            groups[slot.recomputed_from].append(slot)
    return {weights[name]: tuple(slots) for name, slots in groups.items()}


def unowned(trace: Trace) -> list[Interval]:
    """Moments that belong to no parameter of the trace: no plan changes them."""
    owned = {id(slot) for slots in _by_parameter(trace).values() for slot in slots}
    rest = [s for s in trace.slots if s.role in (Role.MOMENT1, Role.MOMENT2) and id(s) not in owned]
    return [Interval(s.role, s.module, s.birth, s.death, s.nbytes) for s in rest]
