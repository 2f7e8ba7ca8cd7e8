"""The largest batch within a budget: a search over whole numbers for a peak that grows with the batch.

>>> calls = []
>>> largest_batch(lambda num: calls.append(num) or 100 + 7 * num, 1000, start=32), len(calls) < 6
(128, True)
"""

from __future__ import annotations

from collections.abc import Callable

MOST = 1 << 24  # examples: beyond that the budget is no limit


def largest_batch(peak: Callable[[int], int], budget_bytes: int, *, start: int) -> int:
    """The largest number of examples whose `peak` is within the budget; 0 if one alone is above it.

    A line between the nearest sizes guesses where the budget is met; every third guess is the middle, for peaks that are no line.
    """
    known: dict[int, int] = {}

    def fits(num: int) -> bool:
        known[num] = known[num] if num in known else peak(num)
        return known[num] <= budget_bytes

    def met(low: int, high: int) -> int:
        """The last size below the budget on the line through two known ones."""
        slope = max(known[high] - known[low], 1) / (high - low)
        return int(low + (budget_bytes - known[low]) / slope)

    low, high = max(start, 1), 2 * max(start, 1)
    if not fits(low):
        low, high = 1, low
        if high == 1 or not fits(1):
            return 0
    before = low
    while fits(high):  # the first guess beyond two sizes is one that should not fit
        before, low, high = low, high, max(high + 1, met(before, high) + 1) if before == max(start, 1) else 2 * high
        if low >= MOST:
            return MOST
    turn = 0
    while high - low > 1:
        guess, turn = met(low, high) if turn % 3 < 2 else (low + high) // 2, turn + 1
        guess = min(max(guess, low + 1), high - 1)
        low, high = (guess, high) if fits(guess) else (low, guess)
    return low
