"""The posterior of a new task: the mean error of every plan and its standard deviation, before and after trials.

The errors a of a task's plans are normal, with the mean and the covariance of the prior tasks; a run adds noise:

    a ~ N(m, S)        error of a run of plan j = a_j + noise,    noise ~ N(0, v_j)

`Gaussian.fitted` estimates m and S by EM from all errors that were observed: gaps are not completed. S shrinks towards plans that are
equally hard together. The noise of a run differs from task to task and from plan to plan: v_j = u r_j, where log u is a linear function
of the task's mean error. `Gaussian.given` conditions on runs exactly. S is known from n tasks only, so that errors follow
Student's t distribution: runs that S did not expect, with a misfit of d^2 for k runs, widen it by (n + d^2) / (n + k).

>>> rng = np.random.default_rng(0)
>>> tasks = 0.5 + 0.2 * rng.standard_normal((40, 1)) + [[0.0, 0.1]] + 0.01 * rng.standard_normal((40, 2))
>>> posterior = Gaussian.fitted(LevelSums.of(tasks, np.arange(2))).given([0], [0.3])
>>> posterior.mean.round(1).tolist(), bool(posterior.deviations[1] < 0.05)
([0.3, 0.4], True)

Acquisition chooses the plan to try next. A run of plan j with error y moves the mean errors m of all plans by S_j (y - m_j) / (S_jj + v_j),
so that the error of the picked plan is expected to fall by gain(j) = min m - E min m(y). Trials end when no gain would be noticeable, even
if a run had no noise.

>>> close = Estimate(np.ones(3), np.array([0.30, 0.31, 0.60]), 1e-4 * np.eye(3), np.full(3, 1e-4))
>>> gains = expected_gains(close, np.arange(3))
>>> bool(gains[0] > 1e-4 and gains[2] < 1e-9)
True

A level is a group of plans that are known to differ by noise alone; they share an entry of m and S. An `Estimate` chooses by these numbers:

>>> errors = np.array([[0.9, 0.5, 0.4], [0.8, 0.4, 0.3], [0.9, 0.6, 0.5]])
>>> estimate = Estimate.after(Prior.of(errors), np.array([1.0, 2.0, 3.0]), [])
>>> estimate.best(2.5).plan
1
>>> estimate.best(0.5)
Traceback (most recent call last):
paredown.errors.BudgetError: no plan fits 0.5; the smallest needs 1 (plan 0, error 0.87 +- 0.06, standard deviation).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paredown.errors import BudgetError, PlanError
from paredown.study.pick.pareto import at_least_exact, cautious, quickest_of_ties

Array = NDArray[np.float64]
Indices = NDArray[np.intp]
NUM_STEPS = 30  # iterations of EM
FEWEST_TASKS = 8  # from which the noise follows the mean error of a task; from fewer, it is the median
STRENGTH = 4.0  # weight of the prior of S, in tasks: at least this, and as many as there are more levels than tasks
LOOSE = 0.05  # share of a level's variance that is independent of all other levels, in the prior of S
NOISE_RUNS = 4.0  # weight of the prior of v, in runs
SMALLEST = 1e-8  # least variance
AS_ACCURATE = 0.5  # standard deviations of a run: plans whose mean errors differ by this at most are as accurate
TIE_PROBABILITY = 0.05  # a plan that is better than the chosen one with at least this probability ties with it
GRID = np.linspace(-4.5, 4.5, 61)  # distances of a run's error from its mean, in standard deviations
ODDS = np.exp(-(GRID**2) / 2) / np.exp(-(GRID**2) / 2).sum()
ENOUGH = 0.1  # standard deviations of a run: a smaller expected gain is not noticeable


class Run(NamedTuple):
    """A training run: the index of its plan, and its error, which is infinite if the run diverged."""

    plan: int
    error: float


@dataclass(frozen=True)
class LevelSums:
    """The number of observed errors, their sum and the sum of their squares, as matrices (tasks, levels).

    A level is a group of plans that are known to differ by noise alone. `weights`: how much each task counts in a fit.
    """

    count: Array
    total: Array
    square: Array
    weights: Array

    @staticmethod
    def of(errors: Array, levels: Indices, weights: Array | None = None) -> LevelSums:
        """Return the sums of `errors` (tasks, runs), NaN where not observed; `levels` has each column's level, a group of plans."""
        membership = (levels[:, None] == np.arange(int(levels.max()) + 1)).astype(float)
        observed = np.where(np.isfinite(errors), errors, 0.0)
        count, total, square = (part @ membership for part in (np.isfinite(errors), observed, observed**2))
        return LevelSums(count, total, square, np.ones(len(errors)) if weights is None else weights)


@dataclass(frozen=True)
class Posterior:
    """The distribution of a task's errors given its trials: mean and covariance of levels, and the variance of a run.

    A level is a group of plans that are known to differ by noise alone.
    """

    mean: Array
    covariance: Array
    noise: Array

    @property
    def deviations(self) -> Array:
        """Return the standard deviation of the error of each level, a group of plans that differ by noise alone."""
        return np.sqrt(np.diagonal(self.covariance))


@dataclass(frozen=True)
class Gaussian:
    """The distribution of a new task's errors before any trial, fitted to prior tasks.

    `noise_line`: slope and intercept of the logarithm of a run's variance, as a function of the task's mean error. `noise_ratios`
    (levels,): the variance of each level divided by the variance on that line.
    """

    mean: Array
    covariance: Array
    noise_line: tuple[float, float]
    noise_ratios: Array
    num_tasks: float = math.inf

    @staticmethod
    def fitted(sums: LevelSums) -> Gaussian:
        """Return the distribution of highest posterior probability for the errors that `sums` counts, found by EM."""
        found, usual_noise = _start_of(sums)
        weights, shrunk = sums.weights, found.covariance
        strength = max(STRENGTH, len(shrunk) - found.num_tasks)
        noise, ratios = np.full(len(weights), usual_noise), found.noise_ratios  # (tasks,), (levels,)
        for _ in range(NUM_STEPS):
            values, spreads = _levels_of_tasks(found, sums, noise[:, None] * ratios)
            mean = weights @ values / found.num_tasks
            apart = values - mean
            squares = np.einsum("t,tl,tm->lm", weights, apart, apart) + np.einsum("t,tlm->lm", weights, spreads)
            variances = np.diagonal(spreads, axis1=1, axis2=2)
            misfit = sums.square - 2 * values * sums.total + sums.count * (values**2 + variances)
            ratios = (weights @ (misfit / noise[:, None]) + NOISE_RUNS) / (weights @ sums.count + NOISE_RUNS)
            noise = ((misfit / ratios).sum(axis=1) + NOISE_RUNS * np.median(noise)) / (sums.count.sum(axis=1) + NOISE_RUNS)
            noise = np.maximum(noise, SMALLEST)
            covariance = (squares + strength * shrunk) / (found.num_tasks + strength)
            found = Gaussian(mean, covariance, _noise_line(values, noise, weights), ratios, found.num_tasks)
        return found

    def noise_at(self, height: float) -> Array:
        """Return the variance of a run at each level (group of plans) for a task whose mean error is `height` above average."""
        slope, intercept = self.noise_line
        return math.exp(intercept + slope * (float(self.mean.mean()) + height)) * self.noise_ratios

    def given(self, levels: Sequence[int] | Indices, errors: Sequence[float] | Array) -> Posterior:
        """Return the distribution after runs: run i was of a plan of level (group) `levels[i]`, and had the error `errors[i]`."""
        levels = np.asarray(levels, dtype=np.intp)
        if not len(levels):
            return Posterior(self.mean, self.covariance, self.noise_at(0.0))
        residual = np.asarray(errors, dtype=float) - self.mean[levels]
        noise = self.noise_at(float(residual.mean()))
        inner = self.covariance[np.ix_(levels, levels)] + np.diag(noise[levels])
        gain = np.linalg.solve(inner, self.covariance[levels]).T
        covariance, misfit = self.covariance - gain @ self.covariance[levels], float(residual @ np.linalg.solve(inner, residual))
        widened = (1 + misfit / self.num_tasks) / (1 + len(levels) / self.num_tasks)
        return Posterior(self.mean + gain @ residual, (covariance + covariance.T) / 2 * widened, noise)


def _levels_of_tasks(found: Gaussian, sums: LevelSums, noise: Array) -> tuple[Array, Array]:
    """Return the mean errors (tasks, levels) of the prior's tasks, and their covariances, given the runs in `sums`.

    `found` is the distribution of a task's errors, `noise` (tasks, levels) the variance of a run; a level is a group of plans.
    """
    inner = np.eye(len(found.mean)) + found.covariance * (sums.count / noise)[:, None, :]
    spreads: Array = np.linalg.solve(inner, np.broadcast_to(found.covariance, inner.shape)).astype(float)
    return found.mean + np.einsum("tlm,tm->tl", spreads, (sums.total - sums.count * found.mean) / noise), spreads


def _noise_line(values: Array, noise: Array, weights: Array) -> tuple[float, float]:
    """Fit a line to the logarithm of `noise` (tasks,) over the tasks' mean errors, and return its slope and intercept.

    `values` are errors (tasks, levels), `weights` say how much each task counts.
    """
    if len(noise) < FEWEST_TASKS:
        return 0.0, float(np.log(np.median(noise)))
    heights, logs = values.mean(axis=1), np.log(noise)
    height, log = (float(np.average(part, weights=weights)) for part in (heights, logs))
    slope = float(weights @ ((heights - height) * (logs - log))) / max(float(weights @ (heights - height) ** 2), SMALLEST)
    return slope, log - slope * height


def _start_of(sums: LevelSums) -> tuple[Gaussian, float]:
    """Return the distribution from which EM starts, with one offset per level and one per task, and the variance of a run."""
    weights, observed = sums.weights, sums.weights @ sums.count
    mean = np.where(observed > 0, weights @ sums.total / np.maximum(observed, 1e-12), (weights @ sums.total).sum() / observed.sum())
    heights = (sums.total - sums.count * mean).sum(axis=1) / np.maximum(sums.count.sum(axis=1), 1.0)
    variance = max(float(np.average(heights**2, weights=weights)), SMALLEST)
    repeated = float((sums.count - (sums.count > 0)).sum())
    if repeated:
        noise = (sums.square - sums.total**2 / np.maximum(sums.count, 1e-12)).sum() / repeated
    else:  # no level ran twice: half of what offsets and heights leave
        expected = mean + heights[:, None]
        noise = (sums.square - 2 * expected * sums.total + sums.count * expected**2).sum() / sums.count.sum() / 2
    noise = max(float(noise), SMALLEST)
    covariance = variance * ((1 - LOOSE) + LOOSE * np.eye(len(mean)))
    return Gaussian(mean, covariance, (0.0, math.log(noise)), np.ones(len(mean)), float(weights.sum())), noise


@dataclass(frozen=True)
class Prior:
    """The distribution of a new task's errors by plan, each plan's probability to diverge, and the error of a diverged run (`worst`)."""

    levels: Indices
    gaussian: Gaussian
    worst: float = 1.0
    divergence: Array = field(default_factory=lambda: np.zeros(1))

    @staticmethod
    def of(errors: Array, levels: Indices | None = None) -> Prior:
        """Return the prior fitted to errors (tasks, plans), NaN where unknown; plans of equal `levels` differ by noise alone."""
        if not np.isfinite(errors).any():
            raise PlanError(f"a prior needs errors: the matrix {errors.shape} of tasks and plans has no number in it.")
        errors = np.where(np.isfinite(errors), errors, np.nan)
        levels = np.arange(errors.shape[1]) if levels is None else np.unique(levels, return_inverse=True)[1]
        return Prior(levels, Gaussian.fitted(LevelSums.of(errors, levels)), float(np.nanmax(errors)))

    def after(self, runs: Sequence[Run]) -> Posterior:
        """Return the distribution of errors by level (group of plans) after these runs; diverged runs do not change it."""
        runs = [run for run in runs if np.isfinite(run.error)]
        return self.gaussian.given(self.levels[[run.plan for run in runs]], [run.error for run in runs])

    def chance_of_divergence(self, runs: Sequence[Run]) -> Array:
        """Return the probability that each plan diverges, (plans,), where the prior counts as one run.

        It is 1 for a plan of which a run diverged. If all n runs diverged, it is at least n / (n + 1) for every plan.
        """
        num_runs = np.bincount([run.plan for run in runs], minlength=len(self.levels))
        diverged = [run.plan for run in runs if not np.isfinite(run.error)]
        least = len(runs) / (len(runs) + 1) if len(diverged) == len(runs) else 0.0  # the task may be at fault
        chances = np.maximum(self.divergence, least) / (1 + num_runs)
        chances[diverged] = 1.0
        return chances


class BudgetChoice(NamedTuple):
    """The index of the plan to take within a budget, and those of other plans within it that may be as good (`ties`)."""

    plan: int
    ties: tuple[int, ...] = ()


class ErrorMargin(NamedTuple):
    """Says by how much (`increase`) a mean error may exceed the plan `baseline`'s, and how probably it must stay within."""

    increase: float
    confidence: float
    baseline: int


@dataclass(frozen=True)
class Estimate:
    """Predicted errors of all plans: their means, (plans,), their covariance, and the variance of one run (`noise`).

    `memory`: bytes of the plans. `tried`: plans that have runs. `exact`: plans that quantize nothing (`at_least_exact`). `times`: step
    times, NaN where unknown.
    """

    memory: Array
    means: Array
    covariance: Array
    noise: Array
    tried: frozenset[int] = frozenset()
    exact: frozenset[int] = frozenset()
    times: Array | None = None

    @staticmethod
    def after(prior: Prior, memory: Array, runs: Sequence[Run]) -> Estimate:
        """Return the predicted errors of all plans after these runs.

        If a plan may diverge, its mean error moves towards the error of a diverged run, in proportion to the probability.
        """
        posterior, chances = prior.after(runs), prior.chance_of_divergence(runs)
        means = posterior.mean[prior.levels]
        rise = np.maximum(prior.worst - means, 0.0)
        covariance = posterior.covariance[np.ix_(prior.levels, prior.levels)] + np.diag((1 - chances) * chances * rise**2)
        noise = posterior.noise[prior.levels]
        return Estimate(memory, means + chances * rise, covariance, noise, frozenset(run.plan for run in runs))

    @property
    def deviations(self) -> Array:
        """Return the standard deviations of the mean errors, (plans,)."""
        return np.sqrt(np.diagonal(self.covariance))

    def mean_band(self, width: float = 1.645) -> tuple[Array, Array]:
        """Return the bounds of each plan's mean error: `width` standard deviations to each side, by default a 90 % interval."""
        return self.means - width * self.deviations, self.means + width * self.deviations

    @property
    def tie_error(self) -> float:
        """Return the difference of mean errors up to which plans count as equal: AS_ACCURATE standard deviations of a typical run."""
        return AS_ACCURATE * float(np.sqrt(np.median(self.noise)))

    def errors(self, plans: Indices, *, is_cautious: bool = True) -> Array:
        """Return the errors by which `plans` are compared: their means; if `is_cautious`, a standard deviation more for untried plans."""
        is_tried = np.isin(plans, list(self.tried))
        means, is_exact = self.means[plans], np.isin(plans, list(self.exact))
        return at_least_exact(cautious(means, self.deviations[plans], is_tried) if is_cautious else means, means, is_exact)

    def best(self, budget: float, *, is_cautious: bool = True) -> BudgetChoice:
        """Return the plan of least error within the budget; if several are equally accurate, the quickest of them."""
        fits = np.flatnonzero(self.memory <= budget)
        if not len(fits):
            least = int(self.memory.argmin())
            error = f"{self.means[least]:.2f} +- {self.deviations[least]:.2f}"
            smallest = f"{self.memory[least]:.6g} (plan {least}, error {error}, standard deviation)"
            raise BudgetError(f"no plan fits {budget:.6g}; the smallest needs {smallest}.")
        times = np.full(len(fits), np.nan) if self.times is None else self.times[fits]
        plan = int(fits[quickest_of_ties(self.memory[fits], self.errors(fits, is_cautious=is_cautious), times, self.tie_error)])
        chances = self.chance_below(plan)
        return BudgetChoice(plan, tuple(int(other) for other in fits if other != plan and chances[other] >= TIE_PROBABILITY))

    def smallest(self, budget: float, margin: ErrorMargin) -> BudgetChoice:
        """Return the plan of least memory, then of least mean error, within the budget and the error margin."""
        chances = self.within_margin(margin)
        allowed = np.flatnonzero((self.memory <= budget) & (chances >= margin.confidence))
        if not len(allowed):
            sure = f"with a probability of {100 * margin.confidence:g} % or more"
            said = f"at most {margin.increase:.4g} above that of plan {margin.baseline} {sure}"
            raise BudgetError(f"no plan that fits {budget:.6g} has an error {said}.")
        return BudgetChoice(int(allowed[np.lexsort((self.means[allowed], self.memory[allowed]))[0]]))

    def within_margin(self, margin: ErrorMargin) -> Array:
        """Return the probability that each plan's mean error is within the margin above the baseline's; 1 for the baseline, (plans,)."""
        chances = self.chance_below(margin.baseline, margin.increase)
        chances[margin.baseline] = 1.0
        return chances

    def chance_below(self, plan: int, increase: float = 0.0) -> Array:
        """Return the probability that each plan's mean error is below that of `plan` plus `increase`; one half if nothing is known."""
        variances = np.diagonal(self.covariance)
        apart = np.sqrt(np.maximum(variances + variances[plan] - 2 * self.covariance[plan], 1e-18))
        return np.array([0.5 * math.erfc(-x / math.sqrt(2)) for x in (self.means[plan] - self.means + increase) / apart])


# --- acquisition -----------------------------------------------------------------------------------------------------


def expected_gains(estimate: Estimate, plans: Indices, *, has_noise: bool = True) -> Array:
    """Return by how much a run of each of `plans` is expected to lower the picked plan's error; an upper bound without `has_noise`."""
    means, covariance = estimate.means[plans], estimate.covariance[np.ix_(plans, plans)]
    variances = np.diagonal(covariance) + has_noise * estimate.noise[plans]
    slopes = covariance / np.sqrt(np.maximum(variances, 1e-18))[:, None]  # (plan of the run, plans)
    after = means + slopes[:, None] * GRID[:, None]  # (plan of the run, its error, plans)
    return np.maximum(means.min() - after.min(axis=2) @ ODDS, 0.0)


def propose(estimate: Estimate, plans: Indices) -> int:
    """Return the plan to try next: the one with the largest expected gain; of equal ones, the one of least memory."""
    gains = expected_gains(estimate, plans)
    best = plans[gains >= gains.max() * (1 - 1e-9)]
    return int(best[np.argmin(estimate.memory[best])])


def is_settled(estimate: Estimate, plans: Indices) -> bool:
    """Return whether trials are not worth their cost: even a noiseless run of a plan would lower the picked plan's error too little."""
    noise = float(estimate.noise[plans[estimate.means[plans].argmin()]])
    return float(expected_gains(estimate, plans, has_noise=False).max()) <= ENOUGH * noise**0.5


# --- for the smallest plan within a margin of error ------------------------------------------------------------------


def propose_for_margin(
    estimate: Estimate, margin: ErrorMargin, budget: float, num_runs: Mapping[int, int], *, is_last: bool
) -> int | None:
    """Return the plan to try next in search of the smallest plan within the error margin; None if nothing is left to decide.

    The baseline is measured first. Then come plans smaller than the smallest plan that is known to be within the margin: the next one has
    the largest product of probability and saved bytes, and the baseline is measured again in turn with these plans. A plan is ruled out
    when the probability that it is within the margin is 1 - `confidence` or less. `num_runs` counts the runs of each plan so far.
    The last measurement (`is_last`) is of the plan that is about to be picked.
    """
    chances, memory = estimate.within_margin(margin), estimate.memory
    has_baseline = bool(memory[margin.baseline] <= budget)
    if has_baseline and not num_runs.get(margin.baseline):
        return margin.baseline
    allowed = np.flatnonzero((memory <= budget) & (chances >= margin.confidence))
    taken = int(allowed[np.argmin(memory[allowed])]) if len(allowed) else None
    open_plans = np.flatnonzero((memory < (budget if taken is None else memory[taken])) & (chances > 1 - margin.confidence))
    if taken is not None and not num_runs.get(taken) and (is_last or not len(open_plans)):
        return taken
    if not len(open_plans):
        return None
    saved = (budget if taken is None else memory[taken]) - memory[open_plans]
    plan = int(open_plans[np.argmax(chances[open_plans] * saved)])
    return margin.baseline if has_baseline and num_runs.get(plan, 0) > num_runs[margin.baseline] else plan
