"""The choices of `assign`: `Item`s are tensors of a step that are stored alike, with `StorageOption`s; a `Ledger` has their bytes.

An activation is an item together with activations that depend on it: views of one storage, which is freed when all of them are packed, and
tensors that are recomputed from another one (autograd/rematerialization.py). A parameter is an item with its gradient, moments and residue,
all, some or none of which are packed (plan/byte_intervals.py).

    item                       options: unmodified, then of fewer and fewer bits; each has its bytes over time and a predicted error
    layers.0.mlp.1:input       unmodified | int8 | uint4 | int4 | uint2;   layers.0.mlp.2:input is recomputed from it and takes no bytes
    layers.0.mlp.0.weight      full | moments8 | safe | half | lpmm | lpmm4, with packed or plain gradients | gradient4 | state4
    a frozen weight            full | frozen8 | frozen4

The bytes come from the functions of plan/byte_intervals.py, so that they equal those of a footprint with its margin, `bound_bytes`.

The ledger is a matrix with the bytes of every option (row) at every tick of the step (column). A choice is one row for each item, and
a search adds and subtracts rows instead of computing footprints:

    load[t]  =  base[t]  +  sum over items of  bytes[option of the item, t]  +  workspace of torch.optim's step, at its tick

Only ticks at which the peak can lie are kept: of the ticks from one allocation to the next free the last one suffices, and a tick
that needs less under every plan than another tick needs under all of them is never the peak.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paredown.assignment.sensitivity import parameter_error
from paredown.formats.catalog import TIERS, is_small
from paredown.formats.format import Format
from paredown.plan.byte_intervals import (
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
from paredown.plan.footprint import DEVICES, STAYING, library_bound, library_bytes
from paredown.plan.plan import Plan
from paredown.plan.storage import UNMODIFIED, Assignment, is_same_level
from paredown.plan.trace import Slot, Trace
from paredown.roles import Role

Ladder = tuple[Format | None, ...]  # formats, the best first; None: unmodified
Ints = NDArray[np.int64]
ErrorOf = Callable[[Slot, Format], float]
LADDER: Ladder = (
    None,
    *(Format.parse(text) for text in ("int8/64@bf16", "uint4/32@bf16+bf16", "int4/64@bf16", "uint2/64@bf16+bf16")),
)
MOST_FREE_SLOTS = 2  # up to this many slots of an item have independent formats; more slots all have the same format
OF_WEIGHT = (Role.WEIGHT.value, Role.RESIDUE.value)
Rows = Mapping[str, Mapping[str, str]]  # name of a way to store a parameter -> role -> format
# fine_tune differs from safe only in the length of blocks
_TIERS = {name: row for name, row in TIERS.items() if row and name != "fine_tune"}
_PLAIN_GRADIENT = {name: {role: text for role, text in row.items() if role != "gradient"} for name, row in _TIERS.items()}
# Gradients and weights in 4 bits cost less than activations in 2 bits in all trials of the prior `state_budgets` (docs/log.md, 2026-11-19).
_FOUR_BITS = {"gradient": "int4/64@bf16", "weight": "int4/64@e8m0"}
TIER_ROWS: Mapping[str, Mapping[str, str]] = {
    "full": {},
    "moments8": {role: text for role, text in TIERS["safe"].items() if role in ("moment1", "moment2")},
    **{f"{name}, plain gradients": row for name, row in _PLAIN_GRADIENT.items()},
    **_TIERS,
    "gradient4": {**TIERS["lpmm4"], "gradient": _FOUR_BITS["gradient"]},
    "state4": {**TIERS["lpmm4"], **_FOUR_BITS},
}
FULL_ROWS = {"full": TIER_ROWS["full"]}
# rows for small learning rates: a trained weight that is packed has a residue
PRECISE_ROWS = {name: row for name, row in TIER_ROWS.items() if "weight" not in row or "residue" in row}
FROZEN_ROWS: Mapping[str, Mapping[str, str]] = {
    **FULL_ROWS,
    "frozen8": {"frozen": "int8/64@bf16"},
    "frozen4": {"frozen": "nf4/64@bf16"},
}


@dataclass(frozen=True)
class StorageOption:
    """One way to store the tensors of an `Item`, with its predicted gradient error.

    `held` has the intervals in which the tensors then hold bytes, and `formats` the format of each (None: unmodified). `full_bytes` are the
    bytes of the weights that torch.optim would update.
    """

    name: str
    error: float
    held: tuple[Interval, ...]
    formats: tuple[tuple[tuple[str, Role], Format | None], ...]
    full_bytes: int = 0

    @property
    def total(self) -> int:
        """Return the bytes that the tensors hold under this option, summed over all operations of the step."""
        return sum(i.nbytes * (i.death - i.birth + 1) for i in self.held)


@dataclass(frozen=True)
class Item:
    """Tensors that `assign` stores together, such as views of one storage, with the options to choose from."""

    name: str
    slots: tuple[Slot, ...]
    options: tuple[StorageOption, ...]

    @property
    def nbytes(self) -> int:
        """Return the bytes that the tensors of this item take in the unmodified step."""
        return sum({slot.storage if slot.storage != -1 else i: slot.nbytes for i, slot in enumerate(self.slots)}.values())


KnownItems = dict[tuple[int, ...], Item]  # by the identities of their slots, which the items keep alive


# --- activations -----------------------------------------------------------------------------------------------------------------


def activation_items(
    trace: Trace, ladder_of: Callable[[Slot], Ladder], error_of: ErrorOf, *, is_free: bool = True, known: KnownItems | None = None
) -> Iterator[Item]:
    """Yield an item for each group of activations that share memory, with the options to store it.

    `ladder_of` returns the formats that an activation may have, `error_of` the gradient error of an activation in a format. `is_free` says
    whether activations of one item may have different formats. `known` caches items for other traces that share activations with this
    trace; it must have been filled with the same formats and errors.
    """
    known = {} if known is None else known
    for slots in _components(trace.activations):
        key = tuple(map(id, slots))
        if key not in known:
            storages = [
                list(dict.fromkeys(slot_storage(slot, _activation_plan(format)) for format in ladder_of(slot))) for slot in slots
            ]
            known[key] = Item(slots[0].name, slots, tuple(_ordered(_options(slots, storages, error_of, is_free))))
        yield known[key]


@lru_cache(maxsize=64)
def _activation_plan(format: Format | None) -> Plan:
    return Plan((("activation", Assignment(format)),))


def _components(slots: Sequence[Slot]) -> list[tuple[Slot, ...]]:
    """Return the groups of activations that share a torch storage or are recomputed from one another."""
    number_of: dict[str, int] = {slot.name: number for number, slot in enumerate(slots)}
    root = list(range(len(slots)))

    def find(number: int) -> int:
        while root[number] != number:
            root[number] = number = root[root[number]]
        return number

    first_of_storage: dict[int, int] = {}
    for number, slot in enumerate(slots):
        for other in (first_of_storage.setdefault(slot.storage, number), number_of.get(slot.recomputed_from, number)):
            root[find(number)] = find(other)
    groups: dict[int, list[Slot]] = {}
    for number, slot in enumerate(slots):
        groups.setdefault(find(number), []).append(slot)
    return [tuple(group) for group in groups.values()]


def _options(
    slots: tuple[Slot, ...], storages: list[list[SlotStorage]], error_of: ErrorOf, is_free: bool
) -> Iterator[StorageOption]:
    num_free = sum(len(storage) > 1 for storage in storages)
    if is_free and num_free <= MOST_FREE_SLOTS:
        combinations: Iterable[tuple[SlotStorage, ...]] = product(*storages)
    else:
        combinations = (
            tuple(storage[min(step, len(storage) - 1)] for storage in storages) for step in range(max(map(len, storages)))
        )
    seen: set[tuple[SlotStorage, ...]] = set()
    for combination in combinations:
        chosen = with_recomputed(slots, {slot.name: storage for slot, storage in zip(slots, combination, strict=True)})
        if any(
            storage.recomputed and not is_same_level(storage.format, chosen[slot.recomputed_from].format)
            for slot in slots
            if (storage := chosen[slot.name])
        ):
            continue  # a recomputed slot has the precision of its source, so its own format must be equal to that
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
    name = ", ".join(str(format or "unmodified") for _, format in formats)
    return StorageOption(name, error, tuple(activation_intervals(slots, chosen)), tuple(formats))


def _ordered(options: Iterable[StorageOption]) -> list[StorageOption]:
    """Return options to store a group of tensors by rising error; of equal error, those with more bytes first."""
    return sorted(options, key=lambda option: (option.error, -option.total))


# --- parameters ------------------------------------------------------------------------------------------------------------------


def parameter_items(
    trace: Trace, rows: Rows = TIER_ROWS, *, frozen_rows: Rows = FROZEN_ROWS, known: KnownItems | None = None
) -> Iterator[Item]:
    """Yield a group for each parameter, with its gradient, moments and casts, and the options to store all of them.

    `rows` are the ways to store a parameter, each as {role: format}, and `frozen_rows` those for a parameter that is not trained. `known`
    caches items for other traces that share parameters with this trace.
    """
    known = {} if known is None else known
    if trace.is_compiled:  # trained weights of a compiled model are not packed
        rows = {name: {role: text for role, text in row.items() if role not in OF_WEIGHT} for name, row in rows.items()}
    trained, frozen = _tiers(rows), _tiers(frozen_rows)
    for weight, slots in _by_parameter(trace).items():
        key = tuple(map(id, slots))
        if key not in known:
            options = _parameter_options(trace, weight, slots, frozen if weight.is_frozen else trained)
            known[key] = Item(weight.name, slots, tuple(_ordered(options)))
        yield known[key]


def _tiers(rows: Rows) -> list[Tier]:
    return [Tier.of(name, row) for name, row in rows.items()]


class Tier(NamedTuple):
    """Formats for a parameter, its gradient and its moments, with their predicted error.

    Each is a row of TIER_ROWS, for trained parameters, or of FROZEN_ROWS. `plan` is a plan with these formats alone.
    """

    name: str
    formats: dict[Role, Format]
    plan: Plan
    error: float

    @staticmethod
    def of(name: str, row: Mapping[str, str]) -> Tier:
        """Return the tier called `name`; `row` maps roles to formats, both as text."""
        formats = {Role(role): Format.parse(text) for role, text in row.items()}
        plan = Plan.uniform(**row) if row else Plan((("activation", UNMODIFIED),))
        return Tier(name, formats, plan, parameter_error(formats))


def _parameter_options(trace: Trace, weight: Slot, slots: tuple[Slot, ...], tiers: Iterable[Tier]) -> Iterable[StorageOption]:
    part = replace(trace, slots=slots, outputs=())
    options: dict[tuple[Interval, ...], StorageOption] = {}
    for tier in tiers:
        if tier.name != "full" and (is_small(weight.shape) or weight.stays):
            continue  # no tier packs it
        held = tuple(model_memory(part, tier.plan))
        if held not in options:
            keys = tuple(((weight.name, role), format) for role, format in tier.formats.items())
            is_full = resolve_parameter_formats(weight, tier.plan, is_compiled=trace.is_compiled).is_full
            options[held] = StorageOption(tier.name, tier.error, held, keys, weight.nbytes if is_full else 0)
    return options.values()


def _by_parameter(trace: Trace) -> dict[Slot, tuple[Slot, ...]]:
    weights = {slot.name: slot for slot in trace.of(Role.WEIGHT)}
    groups: dict[str, list[Slot]] = {name: [slot] for name, slot in weights.items()}
    for slot in trace.slots:
        if slot.role is Role.GRADIENT:
            groups[slot.name].append(slot)
        elif slot.role in (Role.MOMENT1, Role.MOMENT2):
            parameter = parameter_of(slot, weights)
            if parameter is not None:
                groups[parameter.name].append(slot)
        elif slot.role is Role.TEMPORARY and slot.recomputed_from:
            groups[slot.recomputed_from].append(slot)
    return {weights[name]: tuple(slots) for name, slots in groups.items()}


def unowned(trace: Trace) -> list[Interval]:
    """Return the intervals in which optimizer moments that belong to no parameter of the trace hold memory.

    No plan changes these moments.
    """
    owned = {id(slot) for slots in _by_parameter(trace).values() for slot in slots}
    moments = [slot for slot in trace.slots if slot.role in (Role.MOMENT1, Role.MOMENT2) and id(slot) not in owned]
    return [Interval(slot.role, slot.module, slot.birth, slot.death, slot.nbytes) for slot in moments]


# --- the ledger --------------------------------------------------------------------------------------------------------


Allocated = Callable[..., Any]  # bytes of tensors, a number or an array -> the same with rounding and margin


@dataclass(frozen=True, eq=False)
class Ledger:
    """A table of the bytes that each storage option takes (row) at each operation of the step (column, or tick).

    `assign` searches in it instead of predicting footprints. Items are groups of tensors that are stored alike. Rows of item i start at
    `starts[i]`; `item_of[r]` is the item of row r. A choice of formats, `chosen`, is an array with one row for each item.

    Bytes are those of `Footprint.bound_bytes`, with its margin for memory that is not predicted, or of `peak_bytes` without it.
    """

    items: tuple[Item, ...]
    ticks: Ints
    base: Ints
    held: Ints  # (rows, ticks)
    errors: NDArray[np.float64]
    full_bytes: Ints
    starts: Ints
    item_of: Ints
    transients: tuple[tuple[slice, int], ...]  # workspaces of the optimizer's step: (slice of ticks, most bytes)
    allocated: Allocated
    workspace_bytes: int
    floor_bytes: int  # a lower bound of the peak: the largest sum, over ticks, of the fewest bytes of each item at that tick

    @staticmethod
    def of(trace: Trace, items: Sequence[Item], *, keeps_margin: bool = True) -> Ledger:
        """Return the table of bytes for the activations and parameters (`items`) of a trace.

        `keeps_margin` says whether bytes include the margin for memory that is not predicted.
        """
        device = DEVICES[trace.device]
        allocated = partial(device.bound, is_compiled=trace.is_compiled) if keeps_margin else device.rounded
        rows = [option for item in items for option in item.options]
        step = [output for output in trace.outputs if output.phase == "step"]
        fixed = _spans([[*fixed_intervals(trace), *unowned(trace)]], allocated)
        spans = _spans([row.held for row in rows], allocated)
        ticks = _peak_ticks(np.concatenate((fixed, spans)), [output.birth for output in step])
        counts = [len(item.options) for item in items]
        item_of = np.repeat(np.arange(len(items), dtype=np.int64), counts)
        base, (least, most) = _held(fixed, ticks, 1)[0], _bounds(spans, item_of, ticks)
        can_peak = base + most + sum(allocated(output.nbytes) for output in step) >= (base + least).max(initial=0)
        workspace_bytes = (library_bound if keeps_margin else library_bytes)(trace)
        floor_bytes = int((base + least).max(initial=0)) + workspace_bytes
        ticks = ticks[can_peak]
        return Ledger(
            tuple(items),
            ticks,
            base[can_peak],
            _held(spans, ticks, len(rows)),
            np.array([row.error for row in rows]),
            np.array([row.full_bytes for row in rows], dtype=np.int64),
            np.cumsum([0, *counts], dtype=np.int64)[:-1],
            item_of,
            tuple((_tick_slice(ticks, output.birth, output.death), output.nbytes) for output in step),
            allocated,
            workspace_bytes,
            floor_bytes,
        )

    def load(self, chosen: Ints) -> Ints:
        """Return the bytes in memory at each tick under `chosen`, a storage option (row) for each group of tensors.

        A tick is the position of an operation in the step. The memory that torch.optim's step allocates and frees is left out; `total` adds
        it.
        """
        return self.base + self.held[chosen].sum(axis=0)

    def changed_load(self, load: Ints, before: Ints, after: Ints) -> Ints:
        """Return the bytes in memory at each operation under the options `after`; `load` has those under `before`."""
        items = np.flatnonzero(before != after)
        return load + self.held[after[items]].sum(axis=0) - self.held[before[items]].sum(axis=0)

    def total(self, load: Ints, chosen: Ints) -> Ints:
        """Return `load`, the bytes in memory at each tick (operation), plus temporary memory of torch.optim's step.

        That memory is smaller if parameters are packed; `chosen` has a storage option (row) for each group of tensors.
        """
        if not self.transients:
            return load
        total, full = load.copy(), int(self.full_bytes[chosen].sum())
        for places, most in self.transients:
            total[places] += self.allocated(min(most, full))
        return total

    def peak(self, chosen: Ints) -> int:
        """Return the step's peak bytes under `chosen`, a storage option (row) for each group of tensors."""
        return int(self.total(self.load(chosen), chosen).max()) + self.workspace_bytes

    def changed_peaks(self, chosen: Ints, load: Ints, changes: Ints, columns: Ints | None = None) -> Ints:
        """Return the peak bytes after each of several changes of `chosen`, a storage option (row) for each item.

        Items are groups of tensors. `load` has the bytes at each operation before. `changes` is an array (number of changes, 2) with the
        new rows of two items, or twice the same row if only one item changes. `columns` are the operations to look at; None for all.
        """
        first, second = changes[:, 0], changes[:, 1]
        before, is_pair = chosen[self.item_of], first != second
        loads = self._rows(first, columns)
        loads -= self._rows(before[first], columns)
        loads += load if columns is None else load[columns]
        change = self.full_bytes - self.full_bytes[before]
        fulls = self.full_bytes[chosen].sum() + change[first]
        if is_pair.any():
            second = second[is_pair]
            loads[is_pair] += self._rows(second, columns) - self._rows(before[second], columns)
            fulls[is_pair] += change[second]
        for places, most in self.transients:
            is_inside = places if columns is None else (places.start <= columns) & (columns < places.stop)
            loads[:, is_inside] += self.allocated(np.minimum(most, fulls))[:, None]
        return loads.max(axis=1, initial=0) + self.workspace_bytes

    def _rows(self, rows: Ints, columns: Ints | None) -> Ints:
        return self.held[rows] if columns is None else self.held[np.ix_(rows, columns)]

    def error(self, chosen: Ints) -> float:
        """Return the predicted gradient error of `chosen`, a storage option (row) for each group of tensors."""
        return float(self.errors[chosen].sum())


def _tick_slice(ticks: Ints, birth: int, death: int) -> slice:
    return slice(int(np.searchsorted(ticks, birth)), int(np.searchsorted(ticks, death, side="right")))


def _spans(rows: Sequence[Sequence[Interval]], allocated: Allocated) -> Ints:
    """Return when storage options hold memory, as an array (intervals, 4): row, first and last operation, bytes."""
    flat = [(r, i.birth, i.death, i.nbytes, i.role not in STAYING) for r, row in enumerate(rows) for i in row]
    spans = np.array(flat, dtype=np.int64).reshape(-1, 5)
    spans[:, 3] = allocated(spans[:, 3], comes_and_goes=spans[:, 4] != 0)
    return spans[:, :4]


def _peak_ticks(spans: Ints, others: Iterable[int]) -> Ints:
    births = np.unique(spans[:, 1]) if len(spans) else np.zeros(1, dtype=np.int64)
    deaths = np.unique(spans[:, 2]) if len(spans) else births
    last = births[np.searchsorted(births, deaths, side="right") - 1]
    return np.unique(np.concatenate((last, np.array([*others], dtype=np.int64))))


def _bounds(spans: Ints, item_of: Ints, ticks: Ints) -> tuple[Ints, Ints]:
    """Return the fewest and the most bytes that can be in memory at each operation, whatever formats are chosen.

    `spans` are the intervals of all storage options as numbers (`_spans`), and `item_of` is the group of tensors of each option. The bytes
    of a group are constant between two ticks (operations) at which one of its tensors is allocated or freed, so that each option needs one
    value for such a stretch of ticks, not one for each tick.
    """
    row, birth, death, nbytes = spans.T
    period = int(ticks.max(initial=0)) + int(death.max(initial=0)) + 2
    first, after = item_of[row] * period + birth, item_of[row] * period + death + 1
    stretches = np.unique(np.concatenate((first, after)))  # item * period + tick of its start
    starts = np.searchsorted(stretches, np.arange(item_of.max(initial=-1) + 2) * period)
    counts = np.diff(starts)[item_of]  # stretches of each row
    offset = np.cumsum(counts) - counts - starts[item_of]  # of the cells of a row: one for each stretch of its item
    cells = np.zeros(int(counts.sum()), dtype=np.int64)
    np.add.at(cells, offset[row] + np.searchsorted(stretches, first), nbytes)
    np.subtract.at(cells, offset[row] + np.searchsorted(stretches, after), nbytes)
    stretch_of = np.arange(len(cells)) - np.repeat(offset, counts)
    cells = cells.cumsum()
    least, most = (_at_ticks(reduce, cells, stretch_of, stretches, period)[ticks] for reduce in (np.minimum, np.maximum))
    return least, most


def _at_ticks(reduce: np.ufunc, cells: Ints, stretch_of: Ints, stretches: Ints, period: int) -> Ints:
    """Return the fewest or most bytes that can be in memory at each operation, if `reduce` is np.minimum or np.maximum.

    `cells` has, for each row (option to store a group of tensors), its bytes in each stretch of ticks in which the bytes of the group are
    constant. `stretch_of` is the index of each cell's stretch in `stretches`, where a stretch is the number of its group times `period`
    plus its first tick.
    """
    bytes_of = np.zeros(len(stretches), dtype=np.int64)
    bytes_of[stretch_of] = cells  # of any row
    reduce.at(bytes_of, stretch_of, cells)
    is_first = np.diff(stretches // period, prepend=-1) > 0
    before = np.where(is_first, 0, np.roll(bytes_of, 1))
    changes = np.zeros(period, dtype=np.int64)
    np.add.at(changes, stretches % period, bytes_of - before)
    return changes.cumsum()


def _held(spans: Ints, ticks: Ints, num_rows: int) -> Ints:
    """Return the bytes that each storage option holds at each of `ticks`, as an array (options, ticks)."""
    row, birth, death, nbytes = spans.T
    width = len(ticks) + 1
    changes = np.zeros(num_rows * width, dtype=np.int64)
    np.add.at(changes, row * width + np.searchsorted(ticks, birth), nbytes)
    np.subtract.at(changes, row * width + np.searchsorted(ticks, death, side="right"), nbytes)
    held = changes.reshape(num_rows, width)
    return held.cumsum(axis=1, out=held)[:, :-1]
