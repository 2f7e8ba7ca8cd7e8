"""The posterior of a new task: mean error and standard deviation of every plan, the Pareto front, and the plan for a budget.

Errors are means over runs, so that one lucky run moves a mean by no more than its weight. Plans that may be as good as the chosen
one are ties.

>>> errors = np.array([[0.9, 0.5, 0.4], [0.8, 0.4, 0.3], [0.9, 0.6, 0.5]])
>>> estimate = Estimate.of(Prior.of(errors, np.arange(3)), np.array([1.0, 2.0, 3.0]))
>>> estimate.best(2.5).plan, estimate.front().tolist()
(1, [0, 1, 2])
>>> estimate.best(0.5)
Traceback (most recent call last):
paredown.errors.BudgetError: no plan fits 0.5; the smallest needs 1 (plan 0, error 0.87 +- 0.06, standard deviation).

Acquisition for the whole front (`propose`; for one budget see pick/acquisition.py) has two designs, which take turns:

    knowledge    the plan whose measurement lowers the sum of the levels' variances most
    improvement  the plan whose measurement is expected to add most to the area that the measured front dominates

Within a level the plan of least memory that was not measured yet is taken. A front of single runs shows the lucky ones: where
nothing was measured, it is drawn from the mean of a level less `luck` standard deviations of a run.

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
from paredown.pick.mixture import NUM_STEPS, LevelSums, Mixture, Posterior, find_levels, offsets, renumbered
from paredown.pick.pareto import undominated
from paredown.pick.seed_effects import RunsWithoutSeeds, SeedRun, without_effects_of_seeds

Array = NDArray[np.float64]
FOUND_STEPS = 20  # EM steps with estimated levels: more change less than the uncertainty of the levels
TIE_PROBABILITY = 0.05  # a plan that is better than the chosen one with at least this probability ties with it


@dataclass(frozen=True)
class Prior:
    """What the prior tasks say: a level for each plan, the plans' offsets from their levels, and the mixture over tasks.

    `doubt`: variances of the offsets. `worst`: the error of a run that diverged. `shared`: variance of the effect that a seed has
    on all plans of a task, in variances of the remaining noise.
    """

    levels: NDArray[np.intp]
    offsets: Array
    doubt: Array
    mixture: Mixture
    num_tasks: int
    worst: float
    shared: float = 0.0

    @staticmethod
    def of(errors: Array, levels: NDArray[np.intp] | None = None, num_kinds: int = 2) -> Prior:
        """Fitted to errors (tasks, plans), NaN where not observed; levels are estimated unless given."""
        if not np.isfinite(errors).any():
            raise PlanError(f"a prior needs errors: the matrix {errors.shape} of tasks and plans has no number in it.")
        errors = np.where(np.isfinite(errors), errors, np.nan)
        num_steps = NUM_STEPS if levels is not None else FOUND_STEPS
        levels = find_levels(errors) if levels is None else renumbered(levels)
        plan_offsets, variances = offsets(errors, levels)
        mixture = Mixture.fitted(LevelSums.of(errors - plan_offsets, levels), num_kinds, num_steps)
        return Prior(levels, plan_offsets, variances, mixture, len(errors), float(np.nanmax(errors)))

    def given(self, measured: Array) -> Posterior:
        """The posterior of a new task, given one error of each measured plan (NaN: not measured)."""
        return self.mixture.given(LevelSums.of((measured - self.offsets)[None], self.levels, self.mixture.means.shape[1]))

    def after(self, runs: Sequence[SeedRun | tuple[int, float]]) -> Posterior:
        """The posterior of a new task after runs, (plan, error) or a SeedRun each; a plan may have several."""
        plans = np.array([run[0] for run in runs], dtype=np.intp)
        adjusted = self.without_seed_effects(runs)
        errors = adjusted.errors - self.offsets[plans]
        return self.mixture.given(LevelSums.of(errors[None], self.levels[plans], self.mixture.means.shape[1], adjusted.weights))

    def without_seed_effects(self, runs: Sequence[SeedRun | tuple[int, float]]) -> RunsWithoutSeeds:
        """A new task's runs without the effects of their seeds."""
        return without_effects_of_seeds([SeedRun(run[0], self.finite(run[1]), *run[2:]) for run in runs], self.shared, self.worst)

    def finite(self, measured: float) -> float:
        """The error of a run; one that diverged counts as the worst error."""
        return measured if np.isfinite(measured) else self.worst


@dataclass(frozen=True)
class BudgetChoice:
    """The plan of least mean error within a budget, its standard deviation; `ties` are other plans within it that may be as good."""

    plan: int
    error: float
    deviation: float
    ties: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class Estimate:
    """Posterior means of the errors of all plans, and standard deviations of these means; `noise`: that of one run about its mean."""

    memory: Array
    means: Array
    deviations: Array
    noise: Array
    measured: Mapping[int, float]
    prior: Prior
    posterior: Posterior

    @staticmethod
    def of(prior: Prior, memory: Array, measured: Mapping[int, float | Sequence[float]] | None = None) -> Estimate:
        """After measurements, or before any; a plan may have been measured several times."""
        errors = {plan: np.atleast_1d(errors) for plan, errors in (measured or {}).items()}
        return Estimate.after(
            prior, memory, [SeedRun(plan, float(error)) for plan, plan_errors in errors.items() for error in plan_errors]
        )

    @staticmethod
    def after(prior: Prior, memory: Array, runs: Sequence[SeedRun]) -> Estimate:
        """After runs with seeds: the common effect of a seed widens all standard deviations and favours no plan."""
        posterior, levels = prior.after(runs), prior.levels
        level_mean, level_deviation = posterior.levels()
        noise = posterior.run_noise()[levels]
        measured: dict[int, list[float]] = {}
        for run in runs:
            measured.setdefault(run.plan, []).append(prior.finite(run.error))
        return Estimate(
            memory,
            level_mean[levels] + prior.offsets,
            np.sqrt(level_deviation[levels] ** 2 + prior.doubt + prior.without_seed_effects(runs).common * noise**2),
            noise * np.sqrt(1 + prior.shared),
            {plan: float(np.mean(errors)) for plan, errors in measured.items()},
            prior,
            posterior,
        )

    def front(self) -> NDArray[np.intp]:
        """Plans on the Pareto front of memory and mean error, the least memory first."""
        on_front = np.flatnonzero(undominated(self.memory, self.means))
        return on_front[np.argsort(self.memory[on_front], kind="stable")]

    def band(self, width: float = 1.645) -> tuple[Array, Array]:
        """Bounds of each plan's mean error, `width` standard deviations to each side: by default a 90 % interval."""
        return self.means - width * self.deviations, self.means + width * self.deviations

    def best(self, budget: float) -> BudgetChoice:
        """The plan with the least mean error within the budget; of equals the one with the least memory."""
        fits = np.flatnonzero(self.memory <= budget)
        if not len(fits):
            least = int(self.memory.argmin())
            smallest = f"{self.memory[least]:.6g} (plan {least}, error {self._text(least)}, standard deviation)"
            raise BudgetError(f"no plan fits {budget:.6g}; the smallest needs {smallest}.")
        plan = int(fits[np.lexsort((self.memory[fits], self.means[fits]))[0]])
        chances = self.chance_below(plan)
        ties = tuple(int(other) for other in fits if other != plan and chances[other] >= TIE_PROBABILITY)
        return BudgetChoice(plan, float(self.means[plan]), float(self.deviations[plan]), ties, self._reason(plan, ties, len(fits)))

    def chance_below(self, plan: int) -> Array:
        """Probability that each plan's mean error is below this plan's; one half where nothing tells them apart."""
        levels, own_level = self.prior.levels, self.prior.levels[plan]
        spreads, means = self.posterior.spreads[0], self.posterior.means[0]  # (kinds, levels, levels), (kinds, levels)
        variances = np.diagonal(spreads, axis1=-2, axis2=-1)
        variance = (variances + variances[:, own_level, None] - 2 * spreads[:, own_level])[:, levels]
        variance = variance + self.prior.doubt + self.prior.doubt[plan]
        difference = (means[:, own_level, None] - means)[:, levels] + self.prior.offsets[plan] - self.prior.offsets
        return self.posterior.weights[0] @ _normal_cdf(difference / np.sqrt(np.maximum(variance, 1e-18)))

    def _text(self, plan: int) -> str:
        return f"{self.means[plan]:.2f} +- {self.deviations[plan]:.2f}"

    def _reason(self, plan: int, ties: tuple[int, ...], num_fits: int) -> str:
        """Why this plan, and how certain the choice is."""
        runs = f"{len(self.measured)} measurement{'s' * (len(self.measured) != 1)}"
        certainty = (
            f"{len(ties)} of the {num_fits} plans that fit may be as good"
            if ties
            else "no other plan that fits is likely to be better"
        )
        return (
            f"mean error {self._text(plan)} (standard deviation) after {runs} and {self.prior.num_tasks} prior tasks; {certainty}."
        )


def _normal_cdf(values: Array) -> Array:
    """Probability that a standard normal number is below each value; without scipy, since few values are needed."""
    return np.vectorize(lambda value: 0.5 * math.erfc(-value / math.sqrt(2)), otypes=[float])(values)


# --- acquisition for the whole front ----------------------------------------------------------------------------------


def propose(design: str, prior: Prior, posterior: Posterior, memory: Array, measured: Array) -> int:
    """The plan to measure next: the largest gain of this design; among equals, the least memory."""
    gains = _knowledge(posterior)[prior.levels] if design == "knowledge" else _improvement(prior, posterior, memory, measured)
    gains = np.where(np.isnan(measured), gains, -np.inf)
    best = np.flatnonzero(gains >= gains.max() - 1e-12 * abs(gains.max()))
    return int(best[np.argmin(memory[best])])


def _knowledge(posterior: Posterior) -> Array:
    """By how much a run of each level lowers the sum of all levels' variances, (levels,)."""
    spreads, weights = posterior.spreads[0], posterior.weights[0]  # (kinds, levels, levels)
    reduction = (spreads**2).sum(axis=1) / (np.diagonal(spreads, axis1=-2, axis2=-1) + posterior.noise)
    return weights @ reduction


def _improvement(prior: Prior, posterior: Posterior, memory: Array, measured: Array) -> Array:
    """By how much each plan is expected to add to the area that the measured front dominates, (plans,)."""
    order = np.argsort(memory, kind="stable")
    top = max(1.0, prior.worst)
    heights = np.minimum.accumulate(
        np.where(np.isnan(measured[order]), top, measured[order])
    )  # the measured front at each plan's memory
    steps, step_of_plan = np.unique(heights, return_inverse=True)
    widths = np.zeros(len(steps))
    expected_gain = np.empty(len(measured))
    edges = np.append(memory[order], max(1.0, memory.max()))
    levels = prior.levels[order]
    means = posterior.means[0][:, levels] + prior.offsets[order]  # (kinds, plans)
    spreads = (np.diagonal(posterior.spreads[0], axis1=-2, axis2=-1) + posterior.noise)[:, levels]
    gains = np.einsum("k,kph->ph", posterior.weights[0], _shortfall(steps, means, np.sqrt(spreads)))  # (plans, steps of the front)
    for rank in range(len(order) - 1, -1, -1):
        widths[step_of_plan[rank]] += edges[rank + 1] - edges[rank]
        expected_gain[order[rank]] = gains[rank] @ widths
    return expected_gain


def _shortfall(heights: Array, means: Array, deviations: Array) -> Array:
    """E max(height - run, 0), (kinds, levels, heights)."""
    from scipy.special import ndtr

    difference = heights - means[..., None]
    ratio = difference / deviations[..., None]
    return difference * ndtr(ratio) + deviations[..., None] * np.exp(-(ratio**2) / 2) / np.sqrt(2 * np.pi)


@cache
def luck(runs: int) -> float:
    """Mean over r = 1 .. runs of how far the least of r normal runs lies below their mean, in standard deviations.

    On a front drawn from single runs, a level's r-th cheapest plan appears if its run is below those of the r - 1 before it.
    """
    from scipy.special import ndtr

    grid = np.linspace(-9.0, 9.0, 3601)
    above = 1 - ndtr(grid)
    # E min = integral over x < 0 of -P(min < x), and over x > 0 of P(min > x)
    least = [float(np.trapezoid(np.where(grid < 0, above**r - 1, above**r), grid)) for r in range(1, runs + 1)]
    return max(0.0, -float(np.mean(least))) if runs > 1 else 0.0
