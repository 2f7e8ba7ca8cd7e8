"""Search strategies of `assign`: METHODS has a row for each; a strategy finds choices of formats, as points with peak and error.

    size          the largest first, the order of "Training with Mixed-Precision Floating-Point Assignments" (2023)
    operator      inputs of matrix products and convolutions alone, the largest first; not those of the first and the last layer
    role          the least predicted error per byte, by the role table (assignment/sensitivity.py)
    sensitivity   the least measured error per byte (`probe`); the role table, on the same scale, for slots that were not probed
    random        any order, by the seed

Pins, lower bounds on precision, hold under every method: backward needs them (autograd/operations.py), and a session enforces them.

The greedy path goes from the baseline down to the least memory. A move gives one item an option of fewer bytes. At the tick of the
peak, the search takes the move of least added error per byte that it frees there, which is the next corner of the item's convex hull
at that tick; then it computes the peak again. From each point of the path, items get options of less error again as far as the peak
of that point, or of the point before, allows.

A greedy move may free far more than needed, at a high error, where two small moves, or one item with fewer bytes and another with
more, would have been enough. So each point of the Pareto front is visited once: all points that differ from it in one
item, and in two where the ledger is small, join the front if no point there beats them. The search ends when all points were visited,
or when WORK is spent.

None of this depends on the budget. A budget selects, of all points whose peak is within it, the one of least error: so a larger
budget never gives more error.
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

from paredown.assignment.sensitivity import Sensitivities, slot_error
from paredown.assignment.storage_options import ErrorOf, Ints, Item, Ladder, Ledger
from paredown.autograd.operations import Use
from paredown.formats.format import Format
from paredown.plan.storage import significant_bits
from paredown.plan.trace import Slot, Trace

RAISED_POINTS = 100  # at most this many points of a path are improved by options of less error
MOST_MOVES = 200  # most moves to a lower peak
TIGHT_TICKS = 8  # ticks of the largest load, checked before all others
BOUND_TICKS = 32  # ticks at which a lower bound of the peak is computed
WORK = 40_000_000  # additions: about 0.25 s
VISIT_COST, ROW_COST = 50_000, 20  # fixed cost of visiting a point, and of each row of it, in additions
MOST_PAIR_WORK = 300_000  # additions of one visit, up to which two items are exchanged at once
PRODUCTS = frozenset({"conv", "linear", "matmul"})
Order = Callable[[tuple[Item, ...], int], list[int]]


@dataclass(frozen=True, eq=False)
class AssignmentPoint:
    """A candidate of `assign`: an option to store each tensor, with the predicted peak and gradient error.

    `chosen` has, for each group of tensors that are stored alike, its row in the table of options (`Ledger`).
    """

    chosen: Ints
    peak_bytes: int
    error: float


def best_within(points: Iterable[AssignmentPoint], budget_bytes: int) -> AssignmentPoint | None:
    """Return the candidate for a plan with the least error whose peak is within the budget; None if none fits."""
    fitting = [point for point in points if point.peak_bytes <= budget_bytes]
    return min(fitting, key=lambda point: (point.error, point.peak_bytes), default=None)


def greedy(ledger: Ledger) -> list[AssignmentPoint]:
    """Return the candidates of a greedy search from the unmodified step down, and variants of them with less error."""
    path = list(downward_path(ledger))
    points = [*path, *_least(ledger)]
    chosen = path[0].chosen
    load = ledger.load(chosen)
    for index in range(0, len(path), max(1, len(path) // RAISED_POINTS)):
        point = path[index]
        load, chosen = ledger.changed_load(load, chosen, point.chosen), point.chosen
        points += raised_points(ledger, point, load, point.peak_bytes)
        if index and path[index - 1].peak_bytes - 1 > point.peak_bytes:
            points += raised_points(ledger, point, load, path[index - 1].peak_bytes - 1)
    return points


def in_order(ledger: Ledger, order: Sequence[int]) -> list[AssignmentPoint]:
    """Return the candidates for a plan that arise if groups of tensors get fewer bits one by one, in this `order`.

    All groups get their second storage option one after the other, then all get their third, and so on.
    """
    chosen = ledger.starts.copy()
    ends = np.append(ledger.starts[1:], len(ledger.errors))
    load = ledger.load(chosen)
    points = [_point(ledger, chosen, load)]
    for step in range(1, int((ends - ledger.starts).max(initial=0))):
        for item in order:
            row = ledger.starts[item] + step
            if row < ends[item]:
                load = load + ledger.held[row] - ledger.held[chosen[item]]
                chosen[item] = row
                points.append(_point(ledger, chosen, load))
    return points


def _point(ledger: Ledger, chosen: Ints, load: Ints) -> AssignmentPoint:
    """Return the candidate that stores each group of tensors by its row in `chosen`, with its peak and gradient error.

    `load` has the bytes in memory at each tick (operation).
    """
    peak_bytes = int(ledger.total(load, chosen).max(initial=0)) + ledger.workspace_bytes
    return AssignmentPoint(chosen.copy(), peak_bytes, ledger.error(chosen))


def downward_path(ledger: Ledger) -> Iterator[AssignmentPoint]:
    """Yield the candidates of the greedy search, from the unmodified step to the least memory.

    Each stores one more group of tensors in fewer bytes: the one that adds the least error for each byte that it frees at the peak.
    """
    chosen = ledger.starts.copy()
    load = ledger.load(chosen)
    rows = np.arange(len(ledger.errors))
    while True:
        yield _point(ledger, chosen, load)
        row = _cheapest(ledger, chosen, rows, int(ledger.total(load, chosen).argmax())) if len(rows) else None
        if row is None:
            return
        item = ledger.item_of[row]
        load = load + ledger.held[row] - ledger.held[chosen[item]]
        chosen[item] = row


def _least(ledger: Ledger) -> Iterator[AssignmentPoint]:
    """Yield candidates with the lowest peaks at any error, which the greedy search may miss.

    They start from the option with the fewest bytes of each group of tensors, and each has a lower peak than the one before.
    """
    totals = ledger.held.sum(axis=1)
    ends = np.append(ledger.starts[1:], len(ledger.errors))
    chosen = np.array(
        [start + int(totals[start:end].argmin()) for start, end in zip(ledger.starts, ends, strict=True)], dtype=np.int64
    )
    load = ledger.load(chosen)
    for _ in range(MOST_MOVES):
        yield _point(ledger, chosen, load)
        row = _lowest_peak(ledger, chosen, load)
        if row is None:
            return
        item = ledger.item_of[row]
        load = load + ledger.held[row] - ledger.held[chosen[item]]
        chosen[item] = row


def _lowest_peak(ledger: Ledger, chosen: Ints, load: Ints) -> int | None:
    """Return the row of `ledger` (storage option) that lowers the peak most; None if none lowers it.

    Rows are options to store a group of tensors. `chosen` has each group's row now, `load` the bytes in memory at each operation.
    """
    total, rows = ledger.total(load, chosen), np.arange(len(ledger.errors))
    peak_bytes = int(total.max(initial=0)) + ledger.workspace_bytes
    peaks = np.zeros(0, dtype=np.int64)
    for columns in (np.array([total.argmax()]), None):  # only options with fewer bytes at the tick of the peak can lower it
        peaks = ledger.changed_peaks(chosen, load, np.stack((rows, rows), axis=1), columns)
        rows, peaks = rows[peaks < peak_bytes], peaks[peaks < peak_bytes]
    return int(rows[peaks.argmin()]) if len(rows) else None


def _cheapest(ledger: Ledger, chosen: Ints, rows: Ints, tick: int) -> int | None:
    """Return the option in `rows` that adds the least error per byte freed at `tick`; None if none frees any.

    An option is a row of `ledger`; `chosen` has the row of each group of tensors now. Of equal options, the one that frees most is
    returned.
    """
    current = chosen[ledger.item_of]
    column = ledger.held[:, tick]
    freed = column[current] - column + _freed_in_step(ledger, chosen, current, tick)
    rows = rows[(rows > current) & (freed > 0)]
    if not len(rows):
        return None
    cost = (ledger.errors[rows] - ledger.errors[current[rows]]) / freed[rows]
    return int(rows[np.lexsort((-freed[rows], cost))[0]])


def _freed_in_step(ledger: Ledger, chosen: Ints, current: Ints, tick: int) -> Ints | int:
    """Return the bytes that each storage option (row) frees in the temporary memory of torch.optim's step.

    They are 0 unless `tick` is in that step. `chosen` has the row of each group of tensors now, `current` the row that each option would
    replace.
    """
    freed: Ints | int = 0
    full = int(ledger.full_bytes[chosen].sum())
    for ticks, most in ledger.transients:
        if ticks.start <= tick < ticks.stop:
            freed = freed + min(most, full) - np.minimum(most, full - ledger.full_bytes[current] + ledger.full_bytes)
    return freed


def raised_points(ledger: Ledger, point: AssignmentPoint, load: Ints, cap_bytes: int) -> list[AssignmentPoint]:
    """Return a list of one candidate with less error than `point` and a peak within `cap_bytes`, or an empty list.

    The candidate gives tensors wider formats, the largest error first. `load` has the bytes of `point` at each operation.
    """
    chosen, cap = point.chosen.copy(), cap_bytes - ledger.workspace_bytes
    while (row := _raisable(ledger, chosen, load, cap)) is not None:
        item = ledger.item_of[row]
        load = load + ledger.held[row] - ledger.held[chosen[item]]
        chosen[item] = row
    return [] if np.array_equal(chosen, point.chosen) else [_point(ledger, chosen, load)]


def _raisable(ledger: Ledger, chosen: Ints, load: Ints, cap: int) -> int | None:
    """Return the row (storage option) that removes most error with a peak within `cap` bytes; None if there is none.

    `chosen` has the row of each group of tensors now, and `load` the bytes at each operation; `cap` must leave out the workspace of
    libraries.
    """
    current = chosen[ledger.item_of]
    gains = ledger.errors[current] - ledger.errors
    rows = np.flatnonzero(gains > 0)
    total = ledger.total(load, chosen)
    tightest = np.argsort(total)[-TIGHT_TICKS:]
    more = ledger.held[np.ix_(rows, tightest)] - ledger.held[np.ix_(current[rows], tightest)]
    rows = rows[(more <= cap - total[tightest]).all(axis=1)]
    for row in rows[np.argsort(-gains[rows], kind="stable")]:
        raised = chosen.copy()
        raised[ledger.item_of[row]] = row
        if ledger.total(load + ledger.held[row] - ledger.held[current[row]], raised).max(initial=0) <= cap:
            return int(row)
    return None


# --- the Pareto front of peak and error, improved by exchanges ---------------------------------------------------------


class PointFront:
    """The Pareto front of candidates for a plan: none is beaten by another in both peak memory and error."""

    def __init__(self) -> None:
        self.points: list[AssignmentPoint] = []
        self._peaks: list[int] = []
        self._errors: list[float] = []

    def add(self, point: AssignmentPoint) -> bool:
        """Add `point` and drop those that it beats, unless one of them beats it; return whether it was added."""
        index = bisect_right(self._peaks, point.peak_bytes)
        if index and self._errors[index - 1] <= point.error:
            return False
        first = index - 1 if index and self._peaks[index - 1] == point.peak_bytes else index
        last = index
        while last < len(self.points) and self._errors[last] >= point.error:
            last += 1
        self.points[first:last] = [point]
        self._peaks[first:last], self._errors[first:last] = [point.peak_bytes], [point.error]
        return True

    def has(self, point: AssignmentPoint) -> bool:
        """Return whether `point`, a candidate for a plan, is on the front."""
        index = bisect_right(self._peaks, point.peak_bytes)
        return bool(index) and self.points[index - 1] is point

    def could_add(self, least_peaks: Ints, errors: np.ndarray) -> Ints:
        """Return the indices of candidates with these errors that would join the front at the peaks `least_peaks`."""
        front_errors = np.array([np.inf, *self._errors])
        error_to_beat = front_errors[np.searchsorted(np.array(self._peaks, dtype=np.int64), least_peaks, side="right")]
        return np.flatnonzero(errors < error_to_beat)

    def promising(self, peaks: Ints, errors: np.ndarray) -> Ints:
        """Return the indices of candidates with these peaks and errors that neither the front nor others beat."""
        better = self.could_add(peaks, errors)
        better = better[np.lexsort((errors[better], peaks[better]))]
        lowest = np.minimum.accumulate(np.append(np.inf, errors[better]))[:-1]
        return better[errors[better] < lowest]


def exchange_options(ledger: Ledger, points: Iterable[AssignmentPoint]) -> list[AssignmentPoint]:
    """Return the Pareto front (peak, error) of `points` and of variants with one or two storage options changed."""
    front = PointFront()
    for point in points:
        front.add(point)
    queue, work_left = deque(front.points), WORK
    while queue and work_left > 0:
        point = queue.popleft()
        if not front.has(point):
            continue
        changes, peaks, errors, work = _neighbours(ledger, point, front)
        work_left -= work
        for index in front.promising(peaks, errors):
            chosen = point.chosen.copy()
            chosen[ledger.item_of[changes[index]]] = changes[index]
            neighbour = AssignmentPoint(chosen, int(peaks[index]), ledger.error(chosen))
            if front.add(neighbour):
                queue.append(neighbour)
    return front.points


def _neighbours(ledger: Ledger, point: AssignmentPoint, front: PointFront) -> tuple[Ints, Ints, np.ndarray, int]:
    """Return changes of one or two storage options that turn `point` into a candidate that could join the front.

    The result is (changes, peaks after them, errors after them, number of additions to compute them). A change is a pair of rows of the
    ledger, the new options of two groups of tensors, or twice the same row if only one changes.
    """
    current = point.chosen[ledger.item_of]
    rows = np.flatnonzero(current != np.arange(len(current)))
    changes = np.stack((rows, rows), axis=1)
    if len(rows) ** 2 * len(ledger.ticks) // 2 <= MOST_PAIR_WORK:
        a, b = np.triu_indices(len(rows), 1)
        is_pair = ledger.item_of[rows[a]] != ledger.item_of[rows[b]]
        changes = np.append(changes, np.stack((rows[a[is_pair]], rows[b[is_pair]]), axis=1), axis=0)
    work = len(changes) * len(ledger.ticks) + ROW_COST * len(changes) + VISIT_COST
    cost = ledger.errors - ledger.errors[current]
    second_cost = np.where(changes[:, 0] == changes[:, 1], 0.0, cost[changes[:, 1]])
    errors = point.error + cost[changes[:, 0]] + second_cost
    load = ledger.load(point.chosen)
    total = ledger.total(load, point.chosen)
    peaks = np.zeros(0, dtype=np.int64)
    for columns in (_highest_ticks(total), None):  # few ticks first, which rule most changes out
        peaks = ledger.changed_peaks(point.chosen, load, changes, columns)
        kept = front.could_add(peaks, errors)
        changes, peaks, errors = changes[kept], peaks[kept], errors[kept]
    return changes, peaks, errors, work


def _highest_ticks(total: Ints) -> Ints:
    """Return the operation with the most bytes in memory in each of BOUND_TICKS equal parts of the step."""
    stretch = -(-max(len(total), 1) // BOUND_TICKS)
    return np.array([start + total[start : start + stretch].argmax() for start in range(0, len(total), stretch)], dtype=np.int64)


# --- methods -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AssignMethod:
    """A method of `assign`, such as "size" or "role": how it finds formats, and which tensors it may quantize.

    `order` sorts the groups of tensors that get fewer bits one by one; None means a greedy search. `eligible` returns the names of
    activations that may be quantized; None means all.
    """

    name: str
    note: str
    order: Order | None = None
    eligible: Callable[[Trace], frozenset[str]] | None = None
    lowers_parameters: bool = True
    needs_sensitivities: bool = False
    keeps_residue: bool = False  # whether trained weights are unmodified, or packed with a residue

    def points(self, ledger: Ledger, seed: int) -> list[AssignmentPoint]:
        """Return the candidates for a plan that this method finds, each with its predicted peak and error.

        `seed` is used by the method "random" alone.
        """
        if self.order is not None:
            return in_order(ledger, self.order(ledger.items, seed))
        return exchange_options(ledger, greedy(ledger))


def _by_size(items: tuple[Item, ...], seed: int) -> list[int]:
    return sorted(range(len(items)), key=lambda index: -items[index].nbytes)


def _shuffled(items: tuple[Item, ...], seed: int) -> list[int]:
    order = list(range(len(items)))
    Random(seed).shuffle(order)
    return order


def _inputs_of_products(trace: Trace) -> frozenset[str]:
    """Return the names of the saved inputs of matrix products and convolutions, without the first and the last."""
    inputs = [
        slot
        for slot in sorted(trace.activations, key=lambda slot: slot.birth)
        if any(saver.use is Use.VALUE and saver.op in PRODUCTS for saver in slot.savers)
    ]
    return frozenset(slot.name for slot in inputs[1:-1])


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
    AssignMethod(
        "fine_tune", "as role, with 24 bits or more for trained weights: learning rates of 5e-5 and less", keeps_residue=True
    ),
    AssignMethod("random", "any order, by the seed", order=_shuffled),
)
METHODS: Mapping[str, AssignMethod] = MappingProxyType({row.name: row for row in ROWS})


def role_table_error(slot: Slot, format: Format) -> float:
    """Return the predicted gradient error if the activation `slot` is stored in `format`, by a table of factors."""
    return slot_error(slot.savers, format)


def measured_error(trace: Trace, sensitivities: Sensitivities, ladder: Ladder) -> ErrorOf:
    """Return a function (slot, format) -> gradient error of an activation in that format, from measurements.

    An activation that was not probed has the error of the role table, scaled by median(measured / predicted). `ladder` lists formats, the
    most precise first; a later format never has a smaller error than an earlier one, whatever the noise of the measurement.
    """
    formats = [format for format in ladder if format is not None]
    probed = [(slot, name) for slot in trace.activations if (name := _probed_name(slot, sensitivities)) is not None]
    ratios = [_ratio(sensitivities.of(name, format), role_table_error(slot, format)) for slot, name in probed for format in formats]
    scale = median([ratio for ratio in ratios if ratio > 0] or [1.0])

    def error_of(slot: Slot, format: Format) -> float:
        name = _probed_name(slot, sensitivities)
        if name is None:
            return scale * role_table_error(slot, format)
        bits = significant_bits(format)
        finer = (other for other in formats if significant_bits(other) > bits)
        return max(sensitivities.of(name, other) or 0.0 for other in (format, *finer))

    return error_of


def _probed_name(slot: Slot, sensitivities: Sensitivities) -> str | None:
    """Return the name of a tensor in `sensitivities`, its own or that of an operation that saved it, or None."""
    return next(iter(sensitivities.known((slot.name, *slot.names))), None)


def _ratio(measured: float | None, expected: float) -> float:
    return (measured or 0.0) / expected if expected else 0.0


def ladder_for(eligible: Iterable[str] | None, ladder: Ladder) -> Callable[[Slot], Ladder]:
    """Return a function from an activation to its allowed formats: all of `ladder`, or only the most precise one.

    `ladder` lists formats, the most precise first. `eligible` names the activations that may have all of them; None for all.
    """
    if eligible is None:
        return lambda slot: ladder
    names = frozenset(eligible)
    return lambda slot: ladder if slot.name in names else ladder[:1]
