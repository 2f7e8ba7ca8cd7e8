"""Bytes held at every tick, for every option of every item: what `assign` adds and subtracts instead of asking for footprints.

    load[t]  =  base[t]  +  sum over items of  bytes[option of the item, t]  +  what torch.optim's step takes, at its tick

Only ticks at which the peak can lie are kept. Whatever is held at a tick is also held at the last birth before the first death after it;
and where less is held under every plan than some other tick has under all of them, there is no peak.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from paredown.plan.footprint import DEVICES, footprint
from paredown.plan.record import Trace
from paredown.plan.replay import Interval, fixed
from paredown.search.items import Item, unowned

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
        still = [*fixed(trace), *unowned(trace)]
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
