"""From the step as it is written down to the least memory, one move at a time: the points that `assign` chooses from.

A move lowers one item by one option or more. The greedy path looks at the tick where most is held, and makes the move that costs the least
error for each byte that it frees there, which is the next corner of the item's convex hull at that tick; then it looks again. From each
point of it items are raised again as far as they fit, under the peak of that point and under that of the point before.

None of this knows the budget. A budget takes, of all points whose peak is within it, the one of least error: so more budget is
never worse, whatever the moves were.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from paredown.search.ledger import Ints, Ledger

RAISED = 100  # points of a path from which items are raised again, about
MOVES = 200  # to a lower peak, at most
TIGHT = 8  # ticks that are looked at before all others


@dataclass(frozen=True, eq=False)
class Point:
    """A row for each item, with the peak and the error that they make."""

    chosen: Ints
    peak_bytes: int
    error: float


def best_within(points: Iterable[Point], budget_bytes: int) -> Point | None:
    """The point of least error whose peak is within the budget; of equal ones the one that holds least."""
    fitting = [point for point in points if point.peak_bytes <= budget_bytes]
    return min(fitting, key=lambda point: (point.error, point.peak_bytes), default=None)


def greedy(ledger: Ledger) -> list[Point]:
    """The points of the greedy path, and those that raising again makes of them, or of some of them where there are many."""
    path = list(_down(ledger))
    found = [*path, *_least(ledger)]
    for place in range(0, len(path), max(1, len(path) // RAISED)):
        point = path[place]
        found += _raised(ledger, point, point.peak_bytes)
        if place and path[place - 1].peak_bytes - 1 > point.peak_bytes:
            found += _raised(ledger, point, path[place - 1].peak_bytes - 1)
    return found


def in_order(ledger: Ledger, order: Sequence[int]) -> list[Point]:
    """The points of going down item by item in this order: all to their second option, then all to their third, and so on."""
    chosen = ledger.starts.copy()
    ends = np.append(ledger.starts[1:], len(ledger.errors))
    points = [_point(ledger, chosen)]
    for step in range(1, int((ends - ledger.starts).max(initial=0))):
        for item in order:
            row = ledger.starts[item] + step
            if row < ends[item]:
                chosen[item] = row
                points.append(_point(ledger, chosen))
    return points


def _point(ledger: Ledger, chosen: Ints) -> Point:
    return Point(chosen.copy(), ledger.peak(chosen), ledger.error(chosen))


def _down(ledger: Ledger) -> Iterator[Point]:
    chosen = ledger.starts.copy()
    load = ledger.load(chosen)
    rows = np.arange(len(ledger.errors))
    while True:
        total = ledger.total(load, chosen)
        yield Point(chosen.copy(), int(total.max(initial=0)) + ledger.workspace_bytes, ledger.error(chosen))
        row = _cheapest(ledger, chosen, rows, int(total.argmax())) if len(rows) else None
        if row is None:
            return
        item = ledger.item_of[row]
        load = load + ledger.held[row] - ledger.held[chosen[item]]
        chosen[item] = row


def _least(ledger: Ledger) -> Iterator[Point]:
    """From the options that hold least in all, move by move to a lower peak, whatever it costs: the way down alone may miss the least."""
    totals = ledger.held.sum(axis=1)
    ends = np.append(ledger.starts[1:], len(ledger.errors))
    chosen = np.array(
        [first + int(totals[first:end].argmin()) for first, end in zip(ledger.starts, ends, strict=True)], dtype=np.int64
    )
    for _ in range(MOVES):
        point = _point(ledger, chosen)
        yield point
        now = chosen[ledger.item_of]
        fulls = ledger.full_bytes[chosen].sum() + ledger.full_bytes - ledger.full_bytes[now]
        peaks = ledger.peaks(ledger.held - ledger.held[now] + ledger.load(chosen), fulls)
        if peaks.min(initial=point.peak_bytes) >= point.peak_bytes:
            return
        row = int(peaks.argmin())
        chosen[ledger.item_of[row]] = row


def _cheapest(ledger: Ledger, chosen: Ints, rows: Ints, tick: int) -> int | None:
    """The row below a chosen one that costs least error for a byte freed at the tick; of equal ones that which frees most."""
    now = chosen[ledger.item_of]
    column = ledger.held[:, tick]
    freed = column[now] - column + _freed_in_step(ledger, chosen, now, tick)
    rows = rows[(rows > now) & (freed > 0)]
    if not len(rows):
        return None
    cost = (ledger.errors[rows] - ledger.errors[now[rows]]) / freed[rows]
    return int(rows[np.lexsort((-freed[rows], cost))[0]])


def _freed_in_step(ledger: Ledger, chosen: Ints, now: Ints, tick: int) -> Ints | int:
    """What each row frees of what the optimizer's step takes, if the tick is in it."""
    freed: Ints | int = 0
    full = int(ledger.full_bytes[chosen].sum())
    for places, most in ledger.transients:
        if places.start <= tick < places.stop:
            freed = freed + min(most, full) - np.minimum(most, full - ledger.full_bytes[now] + ledger.full_bytes)
    return freed


def _raised(ledger: Ledger, point: Point, cap_bytes: int) -> list[Point]:
    """The point with items raised again, the largest error first, as long as the peak stays within `cap_bytes`; none if nothing can be."""
    chosen, cap = point.chosen.copy(), cap_bytes - ledger.workspace_bytes
    load = ledger.load(chosen)
    while (row := _raisable(ledger, chosen, load, cap)) is not None:
        item = ledger.item_of[row]
        load = load + ledger.held[row] - ledger.held[chosen[item]]
        chosen[item] = row
    return [] if np.array_equal(chosen, point.chosen) else [_point(ledger, chosen)]


def _raisable(ledger: Ledger, chosen: Ints, load: Ints, cap: int) -> int | None:
    """The row above a chosen one that takes most of the error away and still fits."""
    now = chosen[ledger.item_of]
    gains = ledger.errors[now] - ledger.errors
    rows = np.flatnonzero(gains > 0)
    total = ledger.total(load, chosen)
    tight = np.argsort(total)[-TIGHT:]
    more = ledger.held[np.ix_(rows, tight)] - ledger.held[np.ix_(now[rows], tight)]
    rows = rows[(more <= cap - total[tight]).all(axis=1)]
    for row in rows[np.argsort(-gains[rows], kind="stable")]:
        then = chosen.copy()
        then[ledger.item_of[row]] = row
        if ledger.total(load + ledger.held[row] - ledger.held[now[row]], then).max(initial=0) <= cap:
            return int(row)
    return None
