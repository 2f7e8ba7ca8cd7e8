"""In which order slots are lowered: METHODS has a row for each way.

    size          the largest first, the order of "Training with Mixed-Precision Floating-Point Assignments" (2023)
    operator      inputs of matrix products and convolutions alone, the largest first; not those of the first and the last layer
    role          what is expected to cost least, by the role table (priors.py)
    sensitivity   what was measured to cost least (`probe`); the role table, on the same scale, for slots that were not probed
    random        any order, by the seed

Pins hold under every method: they are facts of what backward does (`trace/operations.py`), and a session keeps to them anyway.

From the step as it is written down to the least memory, one move at a time: the points that `assign` chooses from.

A move lowers one item by one option or more. The greedy path looks at the tick where most is held, and makes the move that costs the least
error for each byte that it frees there, which is the next corner of the item's convex hull at that tick; then it looks again. From each
point of it items are raised again as far as they fit, under the peak of that point and under that of the point before.

None of this knows the budget. A budget takes, of all points whose peak is within it, the one of least error: so more budget is
never worse, whatever the moves were.

Points that no other beats in both peak and error, made better by exchanging options: what greedy steps alone pass over.

A greedy step may free far more than was needed, at a high price, where two small steps, or one step down and another up, would have done.
So every point of the frontier is looked at once: all points that differ from it in one item, and in two where the ledger is small, join
the frontier if nothing there beats them. It ends when all were looked at, or when WORK is spent: the budget has no say in it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from statistics import median
from types import MappingProxyType

import numpy as np

from paredown.assign.options import ErrorOf, Ints, Item, Ladder, Ledger
from paredown.assign.sensitivity import Sensitivities, slot_error
from paredown.formats.format import Format
from paredown.plan.storage import significant_bits
from paredown.trace.operations import Use
from paredown.trace.trace import Slot, Trace

RAISED = 100  # points of a path from which items are raised again, about
MOVES = 200  # to a lower peak, at most
TIGHT = 8  # ticks that are looked at before all others


@dataclass(frozen=True, eq=False)
class AssignmentPoint:
    """A row for each item, with the peak and the error that they make."""

    chosen: Ints
    peak_bytes: int
    error: float


def best_within(points: Iterable[AssignmentPoint], budget_bytes: int) -> AssignmentPoint | None:
    """The point of least error whose peak is within the budget; of equal ones the one that holds least."""
    fitting = [point for point in points if point.peak_bytes <= budget_bytes]
    return min(fitting, key=lambda point: (point.error, point.peak_bytes), default=None)


def greedy(ledger: Ledger) -> list[AssignmentPoint]:
    """The points of the greedy path, and those that raising again makes of them, or of some of them where there are many."""
    path = list(_down(ledger))
    found = [*path, *_least(ledger)]
    for place in range(0, len(path), max(1, len(path) // RAISED)):
        point = path[place]
        found += _raised(ledger, point, point.peak_bytes)
        if place and path[place - 1].peak_bytes - 1 > point.peak_bytes:
            found += _raised(ledger, point, path[place - 1].peak_bytes - 1)
    return found


def in_order(ledger: Ledger, order: Sequence[int]) -> list[AssignmentPoint]:
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


def _point(ledger: Ledger, chosen: Ints) -> AssignmentPoint:
    return AssignmentPoint(chosen.copy(), ledger.peak(chosen), ledger.error(chosen))


def _down(ledger: Ledger) -> Iterator[AssignmentPoint]:
    chosen = ledger.starts.copy()
    load = ledger.load(chosen)
    rows = np.arange(len(ledger.errors))
    while True:
        total = ledger.total(load, chosen)
        yield AssignmentPoint(chosen.copy(), int(total.max(initial=0)) + ledger.workspace_bytes, ledger.error(chosen))
        row = _cheapest(ledger, chosen, rows, int(total.argmax())) if len(rows) else None
        if row is None:
            return
        item = ledger.item_of[row]
        load = load + ledger.held[row] - ledger.held[chosen[item]]
        chosen[item] = row


def _least(ledger: Ledger) -> Iterator[AssignmentPoint]:
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


def _raised(ledger: Ledger, point: AssignmentPoint, cap_bytes: int) -> list[AssignmentPoint]:
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


# --- Points that no other beats in both peak and error, made better by exchanging options ---

WORK = 40_000_000  # additions: a quarter of a second
LOOK, ROW = 50_000, 20  # what a look, and a row of it, takes whatever its size, as additions
PAIRS = 300_000  # additions of one look, up to which two items are exchanged at once


class PointFront:
    """Points by rising peak and falling error."""

    def __init__(self) -> None:
        self.points: list[AssignmentPoint] = []
        self._peaks: list[int] = []
        self._errors: list[float] = []

    def add(self, point: AssignmentPoint) -> bool:
        """Take a point in, if none here is as good; those that it beats leave."""
        place = bisect_right(self._peaks, point.peak_bytes)
        if place and self._errors[place - 1] <= point.error:
            return False
        first = place - 1 if place and self._peaks[place - 1] == point.peak_bytes else place
        last = place
        while last < len(self.points) and self._errors[last] >= point.error:
            last += 1
        self.points[first:last] = [point]
        self._peaks[first:last], self._errors[first:last] = [point.peak_bytes], [point.error]
        return True

    def has(self, point: AssignmentPoint) -> bool:
        """Whether this very point is still here."""
        place = bisect_right(self._peaks, point.peak_bytes)
        return bool(place) and self.points[place - 1] is point

    def promising(self, peaks: Ints, errors: np.ndarray) -> Ints:
        """Which of these candidates are better than what is here, the best of each peak alone."""
        own = np.array([np.inf, *self._errors])
        here = own[np.searchsorted(np.array(self._peaks, dtype=np.int64), peaks, side="right")]
        found = np.flatnonzero(errors < here)
        found = found[np.lexsort((errors[found], peaks[found]))]
        lowest = np.minimum.accumulate(np.append(np.inf, errors[found]))[:-1]
        return found[errors[found] < lowest]


def exchange_options(ledger: Ledger, points: Iterable[AssignmentPoint]) -> list[AssignmentPoint]:
    """The frontier of `points`, and of what exchanging one or two options at a time makes of them."""
    frontier = PointFront()
    for point in points:
        frontier.add(point)
    waiting, left = deque(frontier.points), WORK
    while waiting and left > 0:
        point = waiting.popleft()
        if not frontier.has(point):
            continue
        changes, peaks, errors, work = _neighbours(ledger, point)
        left -= work
        for number in frontier.promising(peaks, errors):
            chosen = point.chosen.copy()
            chosen[ledger.item_of[changes[number]]] = changes[number]
            made = AssignmentPoint(chosen, int(peaks[number]), ledger.error(chosen))
            if frontier.add(made):
                waiting.append(made)
    return frontier.points


def _neighbours(ledger: Ledger, point: AssignmentPoint) -> tuple[Ints, Ints, np.ndarray, int]:
    """The rows that change (one row twice, or two), the peaks and errors that they make, and how many additions that took."""
    now = point.chosen[ledger.item_of]
    rows = np.flatnonzero(now != np.arange(len(now)))
    first, second = rows, rows
    if len(rows) ** 2 * len(ledger.ticks) // 2 <= PAIRS:
        a, b = np.triu_indices(len(rows), 1)
        differ = ledger.item_of[rows[a]] != ledger.item_of[rows[b]]
        first, second = np.append(rows, rows[a[differ]]), np.append(rows, rows[b[differ]])
    pairs = len(rows)  # from here on
    loads = ledger.held[first] - ledger.held[now[first]]
    loads += ledger.load(point.chosen)
    loads[pairs:] += ledger.held[second[pairs:]] - ledger.held[now[second[pairs:]]]
    change = ledger.full_bytes - ledger.full_bytes[now]
    fulls = ledger.full_bytes[point.chosen].sum() + change[first]
    fulls[pairs:] += change[second[pairs:]]
    cost = ledger.errors - ledger.errors[now]
    errors = point.error + cost[first]
    errors[pairs:] += cost[second[pairs:]]
    return np.stack((first, second), axis=1), ledger.peaks(loads, fulls), errors, loads.size + ROW * len(first) + LOOK


# --- In which order slots are lowered ---

PRODUCTS = frozenset({"conv", "linear", "matmul"})
Order = Callable[[tuple[Item, ...], int], list[int]]


@dataclass(frozen=True)
class AssignMethod:
    """A way of assigning. `order`: of items, None for the greedy search by predicted error; `eligible`: the activations it may lower."""

    name: str
    note: str
    order: Order | None = None
    eligible: Callable[[Trace], frozenset[str]] | None = None
    lowers_parameters: bool = True
    needs_sensitivities: bool = False

    def points(self, ledger: Ledger, seed: int) -> list[AssignmentPoint]:
        """The points that a budget chooses from."""
        if self.order is not None:
            return in_order(ledger, self.order(ledger.items, seed))
        return exchange_options(ledger, greedy(ledger))


def _by_size(items: tuple[Item, ...], seed: int) -> list[int]:
    return sorted(range(len(items)), key=lambda number: -items[number].nbytes)


def _shuffled(items: tuple[Item, ...], seed: int) -> list[int]:
    order = list(range(len(items)))
    Random(seed).shuffle(order)
    return order


def _inputs_of_products(trace: Trace) -> frozenset[str]:
    """Activations that a matrix product or a convolution needs, without those of the first and the last of them."""
    found = [
        slot
        for slot in sorted(trace.activations, key=lambda slot: slot.birth)
        if any(saver.use is Use.VALUE and saver.op in PRODUCTS for saver in slot.savers)
    ]
    return frozenset(slot.name for slot in found[1:-1])


ROWS = (
    AssignMethod("size", "the largest first, as in the paper", order=_by_size),
    AssignMethod(
        "operator",
        "inputs of matrix products and convolutions alone, but for the first and the last layer",
        order=_by_size,
        eligible=_inputs_of_products,
        lowers_parameters=False,
    ),
    AssignMethod("role", "the least expected error for each byte, by what backward does with a slot"),
    AssignMethod("sensitivity", "the least measured error for each byte (probe)", needs_sensitivities=True),
    AssignMethod("random", "any order, by the seed", order=_shuffled),
)
METHODS: Mapping[str, AssignMethod] = MappingProxyType({row.name: row for row in ROWS})


def expected_error(slot: Slot, format: Format) -> float:
    """By the role table."""
    return slot_error(slot.savers, format)


def measured_error(trace: Trace, sensitivities: Sensitivities, ladder: Ladder) -> ErrorOf:
    """As it was measured; the role table, scaled by the median of measured to expected, for slots that were not probed.

    A lower format never counts as better than a higher one, whatever the noise of the measurement.
    """
    formats = [format for format in ladder if format is not None]
    probed = [(slot, name) for slot in trace.activations if (name := _probed(slot, sensitivities)) is not None]
    ratios = [_ratio(sensitivities.of(name, format), expected_error(slot, format)) for slot, name in probed for format in formats]
    scale = median([ratio for ratio in ratios if ratio > 0] or [1.0])

    def error_of(slot: Slot, format: Format) -> float:
        name = _probed(slot, sensitivities)
        if name is None:
            return scale * expected_error(slot, format)
        bits = significant_bits(format)
        finer = (other for other in formats if significant_bits(other) > bits)
        return max(sensitivities.of(name, other) or 0.0 for other in (format, *finer))

    return error_of


def _probed(slot: Slot, sensitivities: Sensitivities) -> str | None:
    """The name under which a slot was probed: its own, or that of another operation that saved it."""
    return next(iter(sensitivities.known((slot.name, *slot.names))), None)


def _ratio(measured: float | None, expected: float) -> float:
    return (measured or 0.0) / expected if expected else 0.0


def ladder_for(eligible: Iterable[str] | None, ladder: Ladder) -> Callable[[Slot], Ladder]:
    """The formats that a slot may have: all, or the first alone where it is not eligible."""
    if eligible is None:
        return lambda slot: ladder
    names = frozenset(eligible)
    return lambda slot: ladder if slot.name in names else ladder[:1]
