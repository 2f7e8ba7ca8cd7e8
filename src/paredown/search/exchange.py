"""Points that no other beats in both peak and error, made better by exchanging options: what greedy steps alone pass over.

A greedy step may free far more than was needed, at a high price, where two small steps, or one step down and another up, would have done.
So every point of the frontier is looked at once: all points that differ from it in one item, and in two where the ledger is small, join
the frontier if nothing there beats them. It ends when all were looked at, or when WORK is spent: the budget has no say in it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable

import numpy as np

from paredown.search.ledger import Ints, Ledger
from paredown.search.path import Point

WORK = 40_000_000  # additions: a quarter of a second
LOOK, ROW = 50_000, 20  # what a look, and a row of it, takes whatever its size, as additions
PAIRS = 300_000  # additions of one look, up to which two items are exchanged at once


class Frontier:
    """Points by rising peak and falling error."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self._peaks: list[int] = []
        self._errors: list[float] = []

    def add(self, point: Point) -> bool:
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

    def has(self, point: Point) -> bool:
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


def exchanged(ledger: Ledger, points: Iterable[Point]) -> list[Point]:
    """The frontier of `points`, and of what exchanging one or two options at a time makes of them."""
    frontier = Frontier()
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
            made = Point(chosen, int(peaks[number]), ledger.error(chosen))
            if frontier.add(made):
                waiting.append(made)
    return frontier.points


def _neighbours(ledger: Ledger, point: Point) -> tuple[Ints, Ints, np.ndarray, int]:
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
