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
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from paredown.errors import BudgetError, PlanError
from paredown.study.pick.mixture import NUM_STEPS, LevelSums, Mixture, Posterior, find_levels, offsets, renumbered
from paredown.study.pick.pareto import at_least_exact, quickest_of_ties, undominated
from paredown.study.pick.seed_effects import RunsWithoutSeeds, SeedRun, without_effects_of_seeds

Array = NDArray[np.float64]
FOUND_STEPS = 20  # EM steps with estimated levels: more change less than the uncertainty of the levels
AS_ACCURATE = 0.5  # standard deviations of a run with a given seed: plans whose mean errors differ by this at most are as accurate
LEAST_RATIO = 1e-9  # of the variance of seed effects to the remaining noise: in the limit, n seeds leave 1 / n of that variance
TIE_PROBABILITY = 0.05  # a plan that is better than the chosen one with at least this probability ties with it


@dataclass(frozen=True)
class Prior:
    """What the prior tasks say: a level for each plan, the plans' offsets from their levels, and the mixture over tasks.

    `doubt`: variances of the offsets. `worst`: the error of a run that diverged. `shared`: variance of the effect that a seed has
    on all plans of a task, in variances of the remaining noise. `seed_variance`: that variance, mean over tasks: it does not follow the
    noise, and fine-tuned tasks have little noise and large effects of seeds. `divergence`: probability that a plan diverges on a task,
    (plans,). `lossier` (plans, plans): how much a run of the second plan says of the first, which loses as much precision or more; from 0
    to 1. Empty where that is not known: then a run says nothing of other plans.
    """

    levels: NDArray[np.intp]
    offsets: Array
    doubt: Array
    mixture: Mixture
    num_tasks: int
    worst: float
    shared: float = 0.0
    seed_variance: float = 0.0
    divergence: Array = field(default_factory=lambda: np.zeros(1))
    lossier: Array = field(default_factory=lambda: np.zeros((0, 0)))

    @staticmethod
    def of(errors: Array, levels: NDArray[np.intp] | None = None, num_kinds: int = 2) -> Prior:
        """The prior fitted to errors (tasks, plans), NaN where not observed; levels are estimated unless given."""
        if not np.isfinite(errors).any():
            raise PlanError(f"a prior needs errors: the matrix {errors.shape} of tasks and plans has no number in it.")
        errors = np.where(np.isfinite(errors), errors, np.nan)
        num_steps = NUM_STEPS if levels is not None else FOUND_STEPS
        plan_offsets, variances = np.zeros((2, errors.shape[1]))  # plans of a given level differ by noise alone
        if levels is None:
            levels = find_levels(errors)
            plan_offsets, variances = offsets(errors, levels)
        levels = renumbered(levels)
        mixture = Mixture.fitted(LevelSums.of(errors - plan_offsets, levels), num_kinds, num_steps)
        return Prior(levels, plan_offsets, variances, mixture, len(errors), float(np.nanmax(errors)))

    def given(self, measured: Array) -> Posterior:
        """The posterior of a new task, given one error of each measured plan (NaN: not measured)."""
        return self.mixture.given(LevelSums.of((measured - self.offsets)[None], self.levels, self.mixture.means.shape[1]))

    def after(self, runs: Sequence[SeedRun | tuple[int, float]]) -> Posterior:
        """The posterior of a new task after runs, (plan, error) or a SeedRun each; a plan may have several.

        One that diverged (infinite) is left out: it tells of its own plan (`with_divergence`), and would raise the errors of all others.
        """
        runs = [run for run in runs if np.isfinite(run[1])]
        plans = np.array([run[0] for run in runs], dtype=np.intp)
        adjusted = self.without_seed_effects(runs)
        errors = adjusted.errors - self.offsets[plans]
        return self.mixture.given(LevelSums.of(errors[None], self.levels[plans], self.mixture.means.shape[1], adjusted.weights))

    def with_divergence(self, runs: Sequence[SeedRun]) -> Prior:
        """The prior after runs: a plan that diverged has the worst error, and others diverge with their probabilities.

        The probability p of a plan is (p + d) / (1 + n) after n runs, of which d diverged: the prior counts as a run. Runs of other plans
        count by their likeness: those that diverged for plans that lose as much precision or more, the others for plans that lose as much
        or less. While all of n runs diverged, the probability is n / (n + 1) at least: the task may be at fault.
        """
        plans, ran = np.arange(len(self.levels)), np.array([run.plan for run in runs], dtype=np.intp)
        is_diverged = np.array([not np.isfinite(run.error) for run in runs], dtype=bool)
        least = len(runs) / (len(runs) + 1) if is_diverged.all() else 0.0
        lossier = self.lossier if len(self.lossier) else np.eye(len(plans))
        counts = np.where(is_diverged, lossier[:, ran], lossier.T[:, ran])  # (plans, runs)
        chances = (np.maximum(self.divergence, least) + (counts * is_diverged).sum(axis=1)) / (1 + counts.sum(axis=1))
        chances = np.where(np.isin(plans, ran[is_diverged]), 1.0, chances)
        rise = np.maximum(self.worst - self.after(runs).levels()[0][self.levels] - self.offsets, 0.0)
        doubt = (1 - chances) * (self.doubt + chances * rise**2)
        return replace(self, offsets=self.offsets + chances * rise, doubt=doubt)

    def without_seed_effects(self, runs: Sequence[SeedRun | tuple[int, float]]) -> RunsWithoutSeeds:
        """A new task's runs without the effects of their seeds."""
        return without_effects_of_seeds([SeedRun(run[0], self.finite(run[1]), *run[2:]) for run in runs], self.shared, self.worst)

    def finite(self, measured: float) -> float:
        """The error of a run; one that diverged counts as the worst error."""
        return measured if np.isfinite(measured) else self.worst


@dataclass(frozen=True)
class BudgetChoice:
    """The plan of least mean error within a budget, and its standard deviation; `ties`: other plans in the budget that may be as good."""

    plan: int
    error: float
    deviation: float
    ties: tuple[int, ...]


@dataclass(frozen=True)
class ErrorMargin:
    """How far a mean error may lie above that of the plan `baseline`, and the least probability that it does not lie further."""

    increase: float
    confidence: float
    baseline: int


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
        """The estimate after measurements, or before any; a plan may have been measured several times."""
        errors = {plan: np.atleast_1d(errors) for plan, errors in (measured or {}).items()}
        return Estimate.after(
            prior, memory, [SeedRun(plan, float(error)) for plan, plan_errors in errors.items() for error in plan_errors]
        )

    @staticmethod
    def after(prior: Prior, memory: Array, runs: Sequence[SeedRun]) -> Estimate:
        """The estimate after runs with seeds: the common effect of a seed widens all standard deviations and favours no plan."""
        posterior, prior, levels = prior.after(runs), prior.with_divergence(runs), prior.levels
        level_mean, level_deviation = posterior.levels()
        ratio = max(prior.shared, LEAST_RATIO)
        unknown = replace(prior, shared=ratio).without_seed_effects(runs).common / ratio  # share of the variance of seeds' effects
        measured: dict[int, list[float]] = {}
        for run in runs:
            measured.setdefault(run.plan, []).append(prior.finite(run.error))
        return Estimate(
            memory,
            level_mean[levels] + prior.offsets,
            np.sqrt(level_deviation[levels] ** 2 + prior.doubt + unknown * prior.seed_variance),
            np.hypot(posterior.run_noise()[levels], np.sqrt(prior.seed_variance)),
            {plan: float(np.mean(errors)) for plan, errors in measured.items()},
            prior,
            posterior,
        )

    def front(self) -> NDArray[np.intp]:
        """Plans on the Pareto front of memory and mean error, the least memory first."""
        on_front = np.flatnonzero(undominated(self.memory, self.means))
        return on_front[np.argsort(self.memory[on_front], kind="stable")]

    def mean_band(self, width: float = 1.645) -> tuple[Array, Array]:
        """Bounds of each plan's mean error over runs, `width` standard deviations to each side: by default a 90 % interval."""
        return self.means - width * self.deviations, self.means + width * self.deviations

    def run_band(self, width: float = 1.645) -> tuple[Array, Array]:
        """Bounds of the error of one further run of each plan: those of its mean, and the noise of a run."""
        half = width * np.hypot(self.deviations, self.noise)
        return self.means - half, self.means + half

    @property
    def tie_error(self) -> float:
        """The difference of mean errors up to which plans are as accurate: AS_ACCURATE standard deviations of a run of the usual plan.

        That is without the effects of seeds, which all plans share.
        """
        return AS_ACCURATE * float(np.median(self.posterior.run_noise()[self.prior.levels]))

    def best(
        self, budget: float, *, is_cautious: bool = True, times: Array | None = None, exact: Collection[int] = ()
    ) -> BudgetChoice:
        """The plan with the least mean error within the budget; of equals the one with the least memory.

        With `is_cautious`, once plans within the budget are measured, one that is not is taken only if its mean plus its standard deviation
        is less. With `times` (plans,), NaN where not known, the quickest of the plans that are as accurate is taken. `exact`: plans that
        quantize nothing (`at_least_exact`).
        """
        fits = np.flatnonzero(self.memory <= budget)
        if not len(fits):
            least = int(self.memory.argmin())
            error = f"{self.means[least]:.2f} +- {self.deviations[least]:.2f}"
            smallest = f"{self.memory[least]:.6g} (plan {least}, error {error}, standard deviation)"
            raise BudgetError(f"no plan fits {budget:.6g}; the smallest needs {smallest}.")
        errors = self._cautious(fits) if is_cautious else self.means[fits]
        errors = at_least_exact(errors, self.means[fits], np.isin(fits, list(exact)))
        known_times = np.full(len(fits), np.nan) if times is None else times[fits]
        plan = int(fits[quickest_of_ties(self.memory[fits], errors, known_times, self.tie_error)])
        chances = self.chance_below(plan)
        ties = tuple(int(other) for other in fits if other != plan and chances[other] >= TIE_PROBABILITY)
        return BudgetChoice(plan, float(self.means[plan]), float(self.deviations[plan]), ties)

    def smallest(self, budget: float, margin: ErrorMargin) -> BudgetChoice:
        """The plan of least memory within the budget whose error is within the margin; of equals the one with the least mean error."""
        chances = self.within_margin(margin)
        allowed = np.flatnonzero((self.memory <= budget) & (chances >= margin.confidence))
        if not len(allowed):
            sure = f"with a probability of {100 * margin.confidence:g} % or more"
            said = f"at most {margin.increase:.4g} above that of plan {margin.baseline} {sure}"
            raise BudgetError(f"no plan that fits {budget:.6g} has an error {said}.")
        plan = int(allowed[np.lexsort((self.means[allowed], self.memory[allowed]))[0]])
        return BudgetChoice(plan, float(self.means[plan]), float(self.deviations[plan]), ())

    def within_margin(self, margin: ErrorMargin) -> Array:
        """Probability that each plan's mean error is at most the margin above that of the baseline; 1 for the baseline, (plans,)."""
        chances = self.chance_below(margin.baseline, margin.increase)
        chances[margin.baseline] = 1.0
        return chances

    def _cautious(self, plans: NDArray[np.intp]) -> Array:
        """Mean errors of these plans, with a standard deviation added to those of plans that are not measured, if others are."""
        is_measured = np.isin(plans, list(self.measured))
        return self.means[plans] + (~is_measured & is_measured.any()) * self.deviations[plans]

    def chance_below(self, plan: int, increase: float = 0.0) -> Array:
        """Probability that each plan's mean error is below this plan's plus `increase`; one half where nothing tells them apart."""
        levels, own_level = self.prior.levels, self.prior.levels[plan]
        spreads, means = self.posterior.spreads[0], self.posterior.means[0]  # (kinds, levels, levels), (kinds, levels)
        variances = np.diagonal(spreads, axis1=-2, axis2=-1)
        variance = (variances + variances[:, own_level, None] - 2 * spreads[:, own_level])[:, levels]
        variance = variance + self.prior.doubt + self.prior.doubt[plan]
        difference = (means[:, own_level, None] - means)[:, levels] + self.prior.offsets[plan] - self.prior.offsets
        return self.posterior.weights[0] @ _normal_cdf((difference + increase) / np.sqrt(np.maximum(variance, 1e-18)))


def _normal_cdf(values: Array) -> Array:
    """Probability that a standard normal number is below each value; without scipy, since few values are needed."""
    return np.vectorize(lambda value: 0.5 * math.erfc(-value / math.sqrt(2)), otypes=[float])(values)
