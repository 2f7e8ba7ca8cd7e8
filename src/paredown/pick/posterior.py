"""What is believed about a new task: every plan's mean error with a band, the frontier, and the plan to take within a budget.

Errors are means over runs: a lucky run moves them by as much as it deserves and no further. Plans that may be as good as the one taken
are ties, and are counted.

>>> earlier = np.array([[0.9, 0.5, 0.4], [0.8, 0.4, 0.3], [0.9, 0.6, 0.5]])
>>> found = Estimate.of(Prior.of(earlier, np.arange(3)), np.array([1.0, 2.0, 3.0]))
>>> found.best(2.5).plan, found.front().tolist()
(1, [0, 1, 2])
>>> found.best(0.5)
Traceback (most recent call last):
paredown.errors.BudgetError: no plan fits 0.5; the smallest needs 1 (plan 0, error 0.87 +- 0.06).

The default picker: levels of plans pooled, a mixture prior, and two designs in turn.

    knowledge    the plan whose measurement lowers the sum of the levels' variances most
    improvement  the plan whose measurement is expected to add most to the area under the front measured so far

They take turns, knowledge first. Within a level the plan with the least memory is taken that was not measured yet. The front is drawn
from what was measured and, elsewhere, from what one run of a level comes to when it is on a front: its mean less `luck` deviations.

>>> [round(luck(runs), 2) for runs in (1, 2, 9)]
[0.0, 0.28, 1.01]
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from paredown.errors import BudgetError, PlanError
from paredown.pick.mixture import NUM_STEPS, LevelSums, Mixture, Posterior, as_levels, find_levels, offsets
from paredown.pick.pareto import undominated
from paredown.pick.seed_effects import RunsWithoutSeeds, SeedRun, on_one_level

Array = NDArray[np.float64]
FOUND_STEPS = 20  # of EM with levels that were found: what more of them change is less than what the levels leave open


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
        mixture = Mixture.fitted(LevelSums.of(earlier - apart, levels), num_kinds, num_steps)
        return Prior(levels, apart, doubt, mixture, len(earlier), float(np.nanmax(earlier)))

    def given(self, seen: Array) -> Posterior:
        """A new task by what was measured (NaN where not)."""
        return self.mixture.given(LevelSums.of((seen - self.offsets)[None], self.levels, self.mixture.means.shape[1]))

    def after(self, runs: Sequence[SeedRun | tuple[int, float]]) -> Posterior:
        """A new task by runs, (plan, error) or a Run each; a plan may have several."""
        plans = np.array([run[0] for run in runs], dtype=np.intp)
        level = self.level(runs)
        errors = level.errors - self.offsets[plans]
        return self.mixture.given(LevelSums.of(errors[None], self.levels[plans], self.mixture.means.shape[1], level.weights))

    def level(self, runs: Sequence[SeedRun | tuple[int, float]]) -> RunsWithoutSeeds:
        """A new task's runs without what their seeds do to all plans."""
        return on_one_level([SeedRun(run[0], self.finite(run[1]), *run[2:]) for run in runs], self.shared, self.worst)

    def finite(self, measured: float) -> float:
        """A run that diverged counts as the worst of all errors."""
        return measured if np.isfinite(measured) else self.worst


def propose(design: str, prior: Prior, belief: Posterior, memory: Array, seen: Array) -> int:
    """The plan to measure next: of those with the largest gain, the one with the least memory."""
    gains = _knowledge(belief)[prior.levels] if design == "knowledge" else _improvement(prior, belief, memory, seen)
    gains = np.where(np.isnan(seen), gains, -np.inf)
    best = np.flatnonzero(gains >= gains.max() - 1e-12 * abs(gains.max()))
    return int(best[np.argmin(memory[best])])


def _knowledge(belief: Posterior) -> Array:
    """By how much a run of each level lowers the sum of all levels' variances, (levels,)."""
    spreads, weights = belief.spreads[0], belief.weights[0]  # (kinds, levels, levels)
    lowered = (spreads**2).sum(axis=1) / (np.diagonal(spreads, axis1=-2, axis2=-1) + belief.noise)
    return weights @ lowered


def _improvement(prior: Prior, belief: Posterior, memory: Array, seen: Array) -> Array:
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


# --- What is believed about a new task ---

DOUBT = 0.05  # a plan that is better than the one taken with at least this probability ties with it


@dataclass(frozen=True)
class BudgetChoice:
    """The plan to take within a budget; `ties` are others within it that may be as good."""

    plan: int
    error: float
    deviation: float
    ties: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class Estimate:
    """Means of the errors of all plans and their standard deviations (of the mean; `noise` is that of one run about it)."""

    memory: Array
    means: Array
    deviations: Array
    noise: Array
    measured: Mapping[int, float]
    prior: Prior
    belief: Posterior

    @staticmethod
    def of(prior: Prior, memory: Array, measured: Mapping[int, float | Sequence[float]] | None = None) -> Estimate:
        """After measurements, or before any; a plan may have been measured several times."""
        errors = {plan: np.atleast_1d(errors) for plan, errors in (measured or {}).items()}
        return Estimate.after(prior, memory, [SeedRun(plan, float(error)) for plan, found in errors.items() for error in found])

    @staticmethod
    def after(prior: Prior, memory: Array, runs: Sequence[SeedRun]) -> Estimate:
        """After runs, with their seeds: what these do to all plans alike makes bands wider, and no plan better than another."""
        belief, levels = prior.after(runs), prior.levels
        mean, deviation = belief.levels()
        noise = belief.run_noise()[levels]
        measured: dict[int, list[float]] = {}
        for run in runs:
            measured.setdefault(run.plan, []).append(prior.finite(run.error))
        return Estimate(
            memory,
            mean[levels] + prior.offsets,
            np.sqrt(deviation[levels] ** 2 + prior.doubt + prior.level(runs).common * noise**2),
            noise * np.sqrt(1 + prior.shared),
            {plan: float(np.mean(errors)) for plan, errors in measured.items()},
            prior,
            belief,
        )

    def front(self) -> NDArray[np.intp]:
        """Plans on the frontier of memory and mean error, the least memory first."""
        found = np.flatnonzero(undominated(self.memory, self.means))
        return found[np.argsort(self.memory[found], kind="stable")]

    def band(self, width: float = 1.645) -> tuple[Array, Array]:
        """Between which errors each plan's mean lies: nine times of ten, unless told otherwise."""
        return self.means - width * self.deviations, self.means + width * self.deviations

    def best(self, budget: float) -> BudgetChoice:
        """The plan with the least mean error within the budget; of equals the one with the least memory."""
        fits = np.flatnonzero(self.memory <= budget)
        if not len(fits):
            least = int(self.memory.argmin())
            smallest = f"{self.memory[least]:.6g} (plan {least}, error {self._text(least)})"
            raise BudgetError(f"no plan fits {budget:.6g}; the smallest needs {smallest}.")
        plan = int(fits[np.lexsort((self.memory[fits], self.means[fits]))[0]])
        chances = self.chance_below(plan)
        ties = tuple(int(other) for other in fits if other != plan and chances[other] >= DOUBT)
        return BudgetChoice(plan, float(self.means[plan]), float(self.deviations[plan]), ties, self._reason(plan, ties, len(fits)))

    def chance_below(self, plan: int) -> Array:
        """How likely each plan's mean error is less than this one's; a half where nothing tells them apart."""
        levels, own = self.prior.levels, self.prior.levels[plan]
        spreads, means = self.belief.spreads[0], self.belief.means[0]  # (kinds, levels, levels), (kinds, levels)
        diagonal = np.diagonal(spreads, axis1=-2, axis2=-1)
        variance = (diagonal + diagonal[:, own, None] - 2 * spreads[:, own])[:, levels]
        variance = variance + self.prior.doubt + self.prior.doubt[plan]
        apart = (means[:, own, None] - means)[:, levels] + self.prior.offsets[plan] - self.prior.offsets
        return self.belief.weights[0] @ _below(apart / np.sqrt(np.maximum(variance, 1e-18)))

    def _text(self, plan: int) -> str:
        return f"{self.means[plan]:.2f} +- {self.deviations[plan]:.2f}"

    def _reason(self, plan: int, ties: tuple[int, ...], num_fits: int) -> str:
        """Why this plan, and how sure that is."""
        runs = f"{len(self.measured)} measurement{'s' * (len(self.measured) != 1)}"
        sure = (
            f"{len(ties)} of the {num_fits} plans that fit may be as good"
            if ties
            else "no other plan that fits is likely to be better"
        )
        return f"mean error {self._text(plan)} after {runs} and {self.prior.num_tasks} earlier tasks; {sure}."


def _below(deviations: Array) -> Array:
    """How likely a normal number is below so many deviations; few are asked for, and scipy need not be there."""
    return np.vectorize(lambda value: 0.5 * math.erfc(-value / math.sqrt(2)), otypes=[float])(deviations)
