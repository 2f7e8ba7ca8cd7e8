"""The default picker: levels of plans pooled, a mixture prior, and two designs in turn.

    knowledge    the plan whose measurement lowers the sum of the levels' variances most
    improvement  the plan whose measurement is expected to add most to the area under the front measured so far

They take turns, knowledge first. Within a level the plan with the least memory is taken that was not measured yet. The front is drawn
from what was measured and, elsewhere, from what one run of a level comes to when it is on a front: its mean less `luck` deviations.

>>> [round(luck(runs), 2) for runs in (1, 2, 9)]
[0.0, 0.28, 1.01]
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from paredown.search.mixture import Belief, Mixture, Sums
from paredown.search.pickers import Known, Measure, Prediction, with_measured

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Pooled:
    """The picker. `turns`: which design chooses the next plan, over and over."""

    turns: tuple[str, ...] = ("knowledge", "improvement")
    num_kinds: int = 2

    def __call__(self, known: Known, measure: Measure, counts: Iterable[int]) -> dict[int, Prediction]:
        wanted = set(counts)
        prior = Mixture.fitted(Sums.of(known.earlier, known.levels), self.num_kinds)
        seen = np.full(len(known.memory), np.nan)
        found: dict[int, Prediction] = {}
        chosen: list[int] = []
        for count in range(max(wanted) + 1):
            belief = prior.given(Sums.of(seen[None], known.levels))
            if count in wanted:
                found[count] = predicted(belief, known, chosen, seen)
            if len(chosen) < len(seen):
                plan = _next(self.turns[count % len(self.turns)], belief, known, seen)
                chosen.append(plan)
                seen[plan] = measure(plan)
        return found


def predicted(belief: Belief, known: Known, chosen: list[int], seen: Array) -> Prediction:
    """Errors of all plans, with deviations of one run."""
    mean, deviation = belief.levels()
    noise = belief.run_noise()
    sizes = np.bincount(known.levels, minlength=len(mean))
    likely = mean - noise * np.array([luck(int(size)) for size in sizes])
    means = mean[known.levels]
    measured = seen[chosen]
    return Prediction(
        tuple(chosen),
        means,
        with_measured(means, chosen, measured),
        with_measured(likely[known.levels], chosen, measured),
        np.sqrt(deviation**2 + noise**2)[known.levels],
    )


def _next(design: str, belief: Belief, known: Known, seen: Array) -> int:
    """The plan with the largest gain of its level; of those, the one with the least memory."""
    gains = _knowledge(belief)[known.levels] if design == "knowledge" else _improvement(belief, known, seen)
    gains = np.where(np.isnan(seen), gains, -np.inf)
    best = np.flatnonzero(gains >= gains.max() - 1e-12 * abs(gains.max()))
    return int(best[np.argmin(known.memory[best])])


def _knowledge(belief: Belief) -> Array:
    """By how much a run of each level lowers the sum of all levels' variances, (levels,)."""
    spreads, weights = belief.spreads[0], belief.weights[0]  # (kinds, levels, levels)
    lowered = (spreads**2).sum(axis=1) / (np.diagonal(spreads, axis1=-2, axis2=-1) + belief.noise)
    return weights @ lowered


def _improvement(belief: Belief, known: Known, seen: Array) -> Array:
    """By how much each plan is expected to add to the area under what was measured, up to memory 1 and error 1."""
    order = np.argsort(known.memory, kind="stable")
    edges = np.append(known.memory[order], max(1.0, known.memory.max()))
    heights = np.minimum.accumulate(np.where(np.isnan(seen[order]), 1.0, seen[order]))  # the front from each plan's memory on
    widths = np.diff(edges)
    means, spreads = belief.means[0], np.diagonal(belief.spreads[0], axis1=-2, axis2=-1) + belief.noise
    gains = np.einsum("k,klh->lh", belief.weights[0], _shortfall(heights, means, np.sqrt(spreads)))  # (levels, plans)
    areas = np.cumsum((gains * widths)[:, ::-1], axis=1)[:, ::-1]
    found = np.empty(len(seen))
    found[order] = areas[known.levels[order], np.arange(len(order))]
    return found


def _shortfall(heights: Array, means: Array, deviations: Array) -> Array:
    """E max(height - run, 0), (kinds, levels, heights)."""
    from scipy.special import ndtr

    apart = heights - means[..., None]
    ratio = apart / deviations[..., None]
    return apart * ndtr(ratio) + deviations[..., None] * np.exp(-(ratio**2) / 2) / np.sqrt(2 * np.pi)


@cache
def luck(runs: int) -> float:
    """Mean over r = 1 .. runs of how far, in deviations, the least of r normal runs lies below their mean.

    On a front drawn from one run each, a level's r-th cheapest plan shows if it is less than the r - 1 before it.
    """
    from scipy.special import ndtr

    grid = np.linspace(-9.0, 9.0, 3601)
    above = 1 - ndtr(grid)
    # E min = integral over x < 0 of -P(min < x), and over x > 0 of P(min > x)
    least = [float(np.trapezoid(np.where(grid < 0, above**r - 1, above**r), grid)) for r in range(1, runs + 1)]
    return max(0.0, -float(np.mean(least))) if runs > 1 else 0.0
