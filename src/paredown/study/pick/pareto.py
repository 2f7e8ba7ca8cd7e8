"""Find the Pareto front of memory and error, with step time as a third axis, and the quickest of equally accurate plans.

>>> undominated(np.array([0.2, 0.4, 0.4, 0.8]), np.array([0.9, 0.5, 0.7, 0.6])).tolist()
[True, True, False, False]
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
SMALL = 1e-9  # by which an exact plan is better than another one with the same mean
SAME_TIME = 0.02  # step times that differ by this share at most are equal


def undominated(memory: Array, errors: Array, times: Array | None = None) -> Mask:
    """Return which plans are on the Pareto front of memory, error and step time, as booleans; NaN is an unknown time.

    A plan is on the front unless another plan dominates it: at most the same memory and error, and less of one of them. If the time of a
    plan is known, the other plan's time must also be known, and be longer by SAME_TIME at most.

    >>> undominated(np.array([1.0, 1, 1]), np.array([0.1, 0.2, 0.2]), np.array([1.3, 1.1, np.nan])).tolist()
    [True, True, False]
    """
    times = np.full(len(memory), np.nan) if times is None else times
    is_at_most = (memory[:, None] <= memory) & (errors[:, None] <= errors)  # (a, b): a is at most as large as b
    is_below = (memory[:, None] < memory) | (errors[:, None] < errors)
    is_as_quick = np.isnan(times) | (times[:, None] <= (1 + SAME_TIME) * times)  # False where only the time of a is unknown
    return np.asarray(~(is_at_most & is_below & is_as_quick).any(axis=0))


def cautious(means: Array, deviations: Array, is_tried: Mask) -> Array:
    """Return the plans' mean errors; if any plan was tried, those of untried plans are raised by one standard deviation."""
    return means + (~is_tried & is_tried.any()) * deviations


def at_least_exact(errors: Array, means: Array, is_exact: Mask) -> Array:
    """Return `errors`, raised to at least the mean error of the plans that quantize nothing (`is_exact`).

    A plan that quantizes is not more accurate than the baseline; if its mean error is less, its runs were lucky. So its error is at least
    the least mean error of the exact plans. The errors of the exact plans are their `means`, whether they were tried or not.

    >>> at_least_exact(np.array([0.1, 0.3, 0.5]), np.array([0.1, 0.2, 0.5]), np.array([False, True, False])).round(6).tolist()
    [0.2, 0.2, 0.5]
    """
    if not is_exact.any():
        return errors
    return np.where(is_exact, means, np.maximum(errors, means[is_exact].min() + SMALL))


def quickest_of_ties(memory: Array, errors: Array, times: Array, tolerance: float) -> int:
    """Return the index of the quickest plan whose error is at most `tolerance` above the least error.

    If the step time of the plan of least error is unknown (NaN), that plan is returned.

    Times that differ by SAME_TIME at most count as equal; then the least error decides, then the least memory.

    >>> errors, times = np.array([0.10, 0.11, 0.11, 0.20]), np.array([1.30, 1.10, 1.09, 1.0])
    >>> [quickest_of_ties(np.arange(4.0), errors, times, tolerance) for tolerance in (0.0, 0.02)]
    [0, 1]
    """
    least = int(np.lexsort((memory, errors))[0])
    if np.isnan(times[least]):
        return least
    tied = np.flatnonzero((errors <= errors[least] + tolerance) & np.isfinite(times))
    tied = tied[times[tied] <= (1 + SAME_TIME) * times[tied].min()]
    return int(tied[np.lexsort((memory[tied], errors[tied]))[0]])
