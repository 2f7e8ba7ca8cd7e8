"""What a plan decides about in one piece, and the ways in which each piece may wait: `Item` and its `StorageOption`s.

An activation is an item with those that depend on it: views of one storage, which is freed when all of them are packed, and tensors that
are computed again from another one (`trace/saved_tensors.py`). A parameter is an item with its gradient, moments and residue, of
which either
none or some are packed (`plan/replay.py`).

    item                       options: as it is, then lower and lower, each with what is held from when to when, and a predicted error
    layers.0.mlp.1:input       as it is | int8 | int4 | uint2;   layers.0.mlp.2:input follows from it, and waits as nothing
    layers.0.mlp.0.weight      full | moments8 | safe | half | lpmm | lpmm4, with packed or plain gradients

The bytes are those of `plan/replay.py`, by the same functions, so that what is planned here is what a footprint says.

Bytes held at every tick, for every option of every item: what `assign` adds and subtracts instead of asking for footprints.

    load[t]  =  base[t]  +  sum over items of  bytes[option of the item, t]  +  what torch.optim's step takes, at its tick

Only ticks at which the peak can lie are kept. Whatever is held at a tick is also held at the last birth before the first death after it;
and where less is held under every plan than some other tick has under all of them, there is no peak.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import numpy as np
from numpy.typing import NDArray

from paredown.assign.sensitivity import parameter_error
from paredown.formats.catalog import TIERS, is_small
from paredown.formats.format import Format
from paredown.plan.footprint import DEVICES, footprint
from paredown.plan.plan import Plan
from paredown.plan.replay import (
    Interval,
    SlotStorage,
    activation_intervals,
    fixed_intervals,
    model_memory,
    parameter_of,
    resolve_parameter_formats,
    slot_storage,
    with_recomputed,
)
from paredown.plan.storage import UNMODIFIED, Assignment, is_same_level
from paredown.roles import Role
from paredown.trace.trace import Slot, Trace

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
class StorageOption:
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
    options: tuple[StorageOption, ...]

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
        ways: list[list[SlotStorage]] = []
        for slot in slots:
            formats = ladder_of(slot)
            for format in formats:
                plans.setdefault(format, Plan((("activation", Assignment(format)),)))
            ways.append(list(dict.fromkeys(slot_storage(slot, plans[format]) for format in formats)))
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


def _options(slots: tuple[Slot, ...], ways: list[list[SlotStorage]], error_of: ErrorOf, is_free: bool) -> Iterator[StorageOption]:
    num_free = sum(len(way) > 1 for way in ways)
    if is_free and num_free <= FREE:
        combinations: Iterable[tuple[SlotStorage, ...]] = product(*ways)
    else:
        combinations = (tuple(way[min(step, len(way) - 1)] for way in ways) for step in range(max(map(len, ways))))
    seen: set[tuple[SlotStorage, ...]] = set()
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


def _option(slots: tuple[Slot, ...], chosen: dict[str, SlotStorage], error_of: ErrorOf) -> StorageOption:
    formats: list[tuple[tuple[str, Role], Format | None]] = []
    error = 0.0
    for slot in slots:
        format = chosen[slot.name].format
        formats.append(((slot.name, Role.ACTIVATION), format))
        error += error_of(slot, format) if format is not None else 0.0
    name = ", ".join(str(format or "as it is") for _, format in formats)
    return StorageOption(name, error, tuple(activation_intervals(slots, chosen)), tuple(formats))


def _ordered(options: Iterable[StorageOption]) -> list[StorageOption]:
    """From the least error up; what only costs more of everything is left to the search to pass over."""
    return sorted(options, key=lambda option: (option.error, -option.total))


# --- parameters ------------------------------------------------------------------------------------------------------------------


def parameter_items(trace: Trace, *, is_free: bool = True) -> Iterator[Item]:
    """An item for each parameter, with its gradient, moments and the casts of it; `is_free`: it may be lowered."""
    rows = TIER_ROWS if is_free else {"full": TIER_ROWS["full"]}
    plans = {name: Plan.uniform(**row) if row else Plan((("activation", UNMODIFIED),)) for name, row in rows.items()}
    for weight, slots in _by_parameter(trace).items():
        part = replace(trace, slots=slots, outputs=())
        options: dict[tuple[Interval, ...], StorageOption] = {}
        for name, plan in plans.items():
            if name != "full" and (is_small(weight.shape) or weight.stays):
                continue  # it stays as it is in every tier
            held = tuple(model_memory(part, plan))
            if held not in options:
                formats = {Role(role): Format.parse(text) for role, text in TIER_ROWS[name].items()}
                own = tuple(((weight.name, role), format) for role, format in formats.items())
                full_bytes = weight.nbytes if resolve_parameter_formats(weight, plan).is_full else 0
                options[held] = StorageOption(name, parameter_error(formats), held, own, full_bytes)
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


# --- Bytes held at every tick, for every option of every item ---

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Ledger:
    """Rows are options, those of an item behind each other; `starts[i]` is the first of item i, `item_of[r]` the item of row r."""

    items: tuple[Item, ...]
    ticks: Ints
    base: Ints
    held: Ints  # (rows, ticks)
    errors: NDArray[np.float64]
    full_bytes: Ints
    starts: Ints
    item_of: Ints
    transients: tuple[tuple[slice, int], ...]  # (places among ticks, bytes at most) of the optimizer's step
    rounding: int
    workspace_bytes: int

    @staticmethod
    def of(trace: Trace, items: Sequence[Item]) -> Ledger:
        """The ledger of a trace whose activations and parameters are `items`."""
        rounding = DEVICES[trace.device].rounding
        rows = [option for item in items for option in item.options]
        step = [made for made in trace.outputs if made.phase == "step"]
        still = [*fixed_intervals(trace), *unowned(trace)]
        ticks = _peak_ticks([*still, *(i for row in rows for i in row.held)], [made.birth for made in step])
        counts = [len(item.options) for item in items]
        starts = np.cumsum([0, *counts], dtype=np.int64)[:-1]
        base, held = _held([still], ticks, rounding)[0], _held([row.held for row in rows], ticks, rounding)
        binds = _binds(base, held, starts, sum(made.nbytes + rounding for made in step))
        ticks = ticks[binds]
        return Ledger(
            tuple(items),
            ticks,
            base[binds],
            held[:, binds],
            np.array([row.error for row in rows]),
            np.array([row.full_bytes for row in rows], dtype=np.int64),
            starts,
            np.repeat(np.arange(len(items), dtype=np.int64), counts),
            tuple((_places(ticks, made.birth, made.death), made.nbytes) for made in step),
            rounding,
            footprint(trace).workspace_bytes,
        )

    @cached_property
    def floor_bytes(self) -> int:
        """What no choice of rows gets below: at some tick, the least that each item can hold there."""
        least = self.base + np.minimum.reduceat(self.held, self.starts, axis=0).sum(axis=0) if len(self.items) else self.base
        return int(least.max(initial=0)) + self.workspace_bytes

    def load(self, chosen: Ints) -> Ints:
        """Bytes at each tick when these rows are chosen, one of each item."""
        return self.base + self.held[chosen].sum(axis=0)

    def total(self, load: Ints, chosen: Ints) -> Ints:
        """`load`, with what the optimizer's step takes."""
        if not self.transients:
            return load
        total, full = load.copy(), int(self.full_bytes[chosen].sum())
        for places, most in self.transients:
            total[places] += -(-min(most, full) // self.rounding) * self.rounding
        return total

    def peak(self, chosen: Ints) -> int:
        """The expected peak, as a footprint has it."""
        return int(self.total(self.load(chosen), chosen).max()) + self.workspace_bytes

    def peaks(self, loads: Ints, fulls: Ints) -> Ints:
        """The peaks of many choices at once: `loads` (choices, ticks), which are changed, and `full_bytes` of each choice in all."""
        for places, most in self.transients:
            loads[:, places] += (-(-np.minimum(most, fulls) // self.rounding) * self.rounding)[:, None]
        return loads.max(axis=1, initial=0) + self.workspace_bytes

    def error(self, chosen: Ints) -> float:
        """The predicted error."""
        return float(self.errors[chosen].sum())


def _places(ticks: Ints, birth: int, death: int) -> slice:
    return slice(int(np.searchsorted(ticks, birth)), int(np.searchsorted(ticks, death, side="right")))


def _peak_ticks(held: Iterable[Interval], others: Iterable[int]) -> Ints:
    spans = np.array([(i.birth, i.death) for i in held] or [(0, 0)], dtype=np.int64)
    births = np.unique(spans[:, 0])
    last = births[np.searchsorted(births, np.unique(spans[:, 1]), side="right") - 1]
    return np.unique(np.concatenate((last, np.array([*others], dtype=np.int64))))


def _binds(base: Ints, held: Ints, starts: Ints, step_bytes: int) -> NDArray[np.bool_]:
    """At which ticks the peak can lie: more can be held there than the least that must be held at some tick."""
    if not len(starts):
        return np.ones(len(base), dtype=bool)
    least = base + np.minimum.reduceat(held, starts, axis=0).sum(axis=0)
    most = base + np.maximum.reduceat(held, starts, axis=0).sum(axis=0)
    return most + step_bytes >= least.max()


def _held(rows: Sequence[Sequence[Interval]], ticks: Ints, rounding: int) -> Ints:
    """(rows, ticks): bytes of each row at each tick, every interval rounded up as the allocator does."""
    changes = np.zeros((len(rows), len(ticks) + 1), dtype=np.int64)
    if any(rows):
        flat = np.array([(r, i.birth, i.death, i.nbytes) for r, row in enumerate(rows) for i in row], dtype=np.int64)
        nbytes = -(-flat[:, 3] // rounding) * rounding
        np.add.at(changes, (flat[:, 0], np.searchsorted(ticks, flat[:, 1])), nbytes)
        np.subtract.at(changes, (flat[:, 0], np.searchsorted(ticks, flat[:, 2], side="right")), nbytes)
    return changes.cumsum(axis=1)[:, :-1]
