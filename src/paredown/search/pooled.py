"""The default picker: levels of plans pooled, a mixture prior, and two designs in turn.

    knowledge    the plan whose measurement lowers the sum of the levels' variances most
    improvement  the plan whose measurement is expected to add most to the area under the front measured so far

They take turns, knowledge first. Within a level the plan with the least memory is taken that was not measured yet. The front is drawn
from what was measured and, elsewhere, from what one run of a level comes to when it is on a front: its mean less `luck` deviations.

>>> [round(luck(runs), 2) for runs in (1, 2, 9)]
[0.0, 0.28, 1.01]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from paredown.errors import PlanError
from paredown.search.grouping import as_levels, find_levels, offsets
from paredown.search.mixture import NUM_STEPS, Belief, Mixture, Sums
from paredown.search.pickers import Known, Measure, Prediction, with_measured
from paredown.search.seeds import Level, Run, on_one_level

Array = NDArray[np.float64]
FOUND_STEPS = 20  # of EM with levels that were found: what more of them change is less than what the levels leave open


@dataclass(frozen=True)
class Pooled:
    """The picker. `turns`: which design chooses the next plan, over and over."""

    turns: tuple[str, ...] = ("knowledge", "improvement")
    num_kinds: int = 2

    def __call__(self, known: Known, measure: Measure, counts: Iterable[int]) -> dict[int, Prediction]:
        """Predictions after each of `counts` measurements."""
        wanted, prior = set(counts), Prior.of(known.earlier, known.levels, self.num_kinds)
        seen = np.full(len(known.memory), np.nan)
        found: dict[int, Prediction] = {}
        chosen: list[int] = []
        for count in range(max(wanted) + 1):
            belief = prior.given(seen)
            if count in wanted:
                found[count] = predicted(prior, belief, chosen, seen)
            if len(chosen) < len(seen) and count < max(wanted):
                chosen.append(propose(self.turns[count % len(self.turns)], prior, belief, known.memory, seen))
                seen[chosen[-1]] = prior.finite(measure(chosen[-1]))
        return found


@dataclass(frozen=True)
class Prior:
    """What earlier tasks teach: levels, how far plans lie from theirs (and its variance), the mixture, their number and worst error.

    `shared`: the variance of what a seed does to all plans of a task, in variances of the noise beside it.
    """

    levels: NDArray[np.intp]
    offsets: Array
    doubt: Array
    mixture: Mixture
    num_tasks: int
    worst: float
    shared: float = 0.0

    @staticmethod
    def of(earlier: Array, levels: NDArray[np.intp] | None = None, num_kinds: int = 2) -> Prior:
        """From errors (tasks, plans), NaN where nobody looked; `levels` are found where none are given."""
        if not np.isfinite(earlier).any():
            raise PlanError(f"there is nothing to learn from: the matrix of earlier errors {earlier.shape} has no number in it.")
        earlier = np.where(np.isfinite(earlier), earlier, np.nan)
        num_steps = NUM_STEPS if levels is not None else FOUND_STEPS
        levels = find_levels(earlier) if levels is None else as_levels(levels)
        apart, doubt = offsets(earlier, levels)
        mixture = Mixture.fitted(Sums.of(earlier - apart, levels), num_kinds, num_steps)
        return Prior(levels, apart, doubt, mixture, len(earlier), float(np.nanmax(earlier)))

    def given(self, seen: Array) -> Belief:
        """A new task by what was measured (NaN where not)."""
        return self.mixture.given(Sums.of((seen - self.offsets)[None], self.levels, self.mixture.means.shape[1]))

    def after(self, runs: Sequence[Run | tuple[int, float]]) -> Belief:
        """A new task by runs, (plan, error) or a Run each; a plan may have several."""
        plans = np.array([run[0] for run in runs], dtype=np.intp)
        level = self.level(runs)
        errors = level.errors - self.offsets[plans]
        return self.mixture.given(Sums.of(errors[None], self.levels[plans], self.mixture.means.shape[1], level.weights))

    def level(self, runs: Sequence[Run | tuple[int, float]]) -> Level:
        """A new task's runs without what their seeds do to all plans."""
        return on_one_level([Run(run[0], self.finite(run[1]), *run[2:]) for run in runs], self.shared, self.worst)

    def finite(self, measured: float) -> float:
        """A run that diverged counts as the worst of all errors."""
        return measured if np.isfinite(measured) else self.worst


def predicted(prior: Prior, belief: Belief, chosen: list[int], seen: Array) -> Prediction:
    """Errors of all plans, with deviations of one run."""
    levels, measured = prior.levels, seen[chosen]
    mean, deviation = belief.levels()
    noise = belief.run_noise()
    lucky = noise * np.array([luck(int(size)) for size in np.bincount(levels)])
    means = mean[levels] + prior.offsets
    return Prediction(
        tuple(chosen),
        means,
        with_measured(means, chosen, measured),
        with_measured(means - lucky[levels], chosen, measured),
        np.sqrt((deviation**2 + noise**2)[levels] + prior.doubt),
    )


def propose(design: str, prior: Prior, belief: Belief, memory: Array, seen: Array) -> int:
    """The plan to measure next: of those with the largest gain, the one with the least memory."""
    gains = _knowledge(belief)[prior.levels] if design == "knowledge" else _improvement(prior, belief, memory, seen)
    gains = np.where(np.isnan(seen), gains, -np.inf)
    best = np.flatnonzero(gains >= gains.max() - 1e-12 * abs(gains.max()))
    return int(best[np.argmin(memory[best])])


def _knowledge(belief: Belief) -> Array:
    """By how much a run of each level lowers the sum of all levels' variances, (levels,)."""
    spreads, weights = belief.spreads[0], belief.weights[0]  # (kinds, levels, levels)
    lowered = (spreads**2).sum(axis=1) / (np.diagonal(spreads, axis1=-2, axis2=-1) + belief.noise)
    return weights @ lowered


def _improvement(prior: Prior, belief: Belief, memory: Array, seen: Array) -> Array:
    """By how much each plan is expected to add to the area under what was measured, up to the most memory and the worst error."""
    order = np.argsort(memory, kind="stable")
    top = max(1.0, prior.worst)
    heights = np.minimum.accumulate(np.where(np.isnan(seen[order]), top, seen[order]))  # the front from each plan's memory on
    steps, first = np.unique(heights, return_inverse=True)
    widths = np.zeros(len(steps))
    found = np.empty(len(seen))
    edges = np.append(memory[order], max(1.0, memory.max()))
    levels = prior.levels[order]
    means = belief.means[0][:, levels] + prior.offsets[order]  # (kinds, plans)
    spreads = (np.diagonal(belief.spreads[0], axis1=-2, axis2=-1) + belief.noise)[:, levels]
    gains = np.einsum("k,kph->ph", belief.weights[0], _shortfall(steps, means, np.sqrt(spreads)))  # (plans, steps of the front)
    for place in range(len(order) - 1, -1, -1):
        widths[first[place]] += edges[place + 1] - edges[place]
        found[order[place]] = gains[place] @ widths
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
