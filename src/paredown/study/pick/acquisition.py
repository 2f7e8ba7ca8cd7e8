"""Acquisition: which plan to measure next so that the best one is picked, and when no further measurement is worth its cost.

The posterior is a mixture over kinds of task. Each kind has means m, covariances S and noise variances v of the plans within the
budget. A run of plan j with error y makes some kinds likelier and moves the means of each by S_j (y - m_j) / (S_jj + v_j). The error of
the picked plan is expected to fall by

    value(j) = min m - E min m(y)

However many runs are made, they are worth no more than knowing all means a:

    value of perfect information = min m - E min a

When that is small relative to the noise of a run, no measurement changes the choice by a noticeable amount.

`propose` chooses the next plan for one budget by a rule of DESIGNS; TURNS names those of the first trials, the last one is of all others:

    knowledge    the plan whose measurement lowers the sum of the levels' variances most
    choice       the plan whose measurement is expected to lower the error of the picked plan most

`propose_for_margin` chooses for the smallest plan whose error is within a margin of the baseline's.
`propose_for_front` chooses for the whole Pareto front, by the improvement that a measurement is expected to bring (what it adds to the area
that the measured front dominates) times the variance of all levels that it removes. Improvement alone measures plans that are likely to be
on the front and tell little of the others (docs/log.md).

Within a level they take the plan of least memory that was not measured yet.

>>> close = TaskKinds(np.ones(1), np.array([[0.30, 0.31, 0.60]]), 1e-4 * np.eye(3)[None], np.full((1, 3), 1e-4))
>>> gains = expected_gains(close)
>>> bool(gains[0] > 1e-4 and gains[2] < 1e-9), bool(gains.max() < value_of_perfect_information(close))
(True, True)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paredown.study.pick.mixture import Posterior
from paredown.study.pick.posterior import ErrorMargin, Estimate, Prior

Array = NDArray[np.float64]
Indices = NDArray[np.intp]
GRID = np.linspace(-4.5, 4.5, 61)  # of a run's error from its mean, in standard deviations
ODDS = np.exp(-(GRID**2) / 2) / np.exp(-(GRID**2) / 2).sum()
NUM_DRAWS = 2048
ENOUGH = 0.1  # standard deviations of a run: a smaller expected gain is not noticeable


class TaskKinds(NamedTuple):
    """The posterior of some plans by kind of task: probabilities (kinds,), means and noise (kinds, plans), covariances."""

    weights: Array
    means: Array
    spreads: Array  # covariances, (kinds, plans, plans)
    noise: Array  # variances

    @property
    def mean(self) -> Array:
        """Mean errors over all kinds, (plans,)."""
        return self.weights @ self.means


def kinds_of(prior: Prior, posterior: Posterior, plans: Indices, tried: Collection[int] = ()) -> TaskKinds:
    """The posterior of these plans. Those in `tried` would run with a new seed, whose effect is unknown: they have more noise."""
    levels = prior.levels[plans]
    spreads = posterior.spreads[0][:, levels][:, :, levels] + np.diag(prior.doubt[plans])
    noise_factor = np.array([1 + 2 * prior.shared * (plan in tried) for plan in plans])
    means, noise = posterior.means[0][:, levels] + prior.offsets[plans], noise_factor * posterior.noise[:, levels]
    return TaskKinds(posterior.weights[0], means, spreads, noise)


def expected_gains(kinds: TaskKinds) -> Array:
    """By how much a run of each plan is expected to lower the error of the picked plan, (plans,)."""
    return np.array([max(0.0, kinds.mean.min() - _least_after(kinds, plan)) for plan in range(kinds.means.shape[1])])


def _least_after(kinds: TaskKinds, plan: int) -> float:
    """The least mean of all plans that is expected after a run of this one."""
    means, variance = kinds.means[:, plan], kinds.spreads[:, plan, plan] + kinds.noise[:, plan]
    deviation = np.sqrt(np.maximum(variance, 1e-18))[:, None]
    runs = (means[:, None] + deviation * GRID).ravel()  # a grid of errors around the mean of each kind
    ratios = (runs - means[:, None]) / deviation  # (kinds, runs)
    logs = np.log(np.maximum(kinds.weights, 1e-300))[:, None] - np.log(deviation) - ratios**2 / 2
    kind_probability = np.exp(logs - logs.max(axis=0))
    kind_probability /= kind_probability.sum(axis=0)
    slopes = kinds.spreads[:, plan] / deviation  # (kinds, plans), for each standard deviation of a run
    means_after = np.einsum("kr,kp->rp", kind_probability, kinds.means) + np.einsum(
        "kr,kr,kp->rp", kind_probability, ratios, slopes
    )
    return float(np.outer(kinds.weights, ODDS).ravel() @ means_after.min(axis=1))


def value_of_perfect_information(kinds: TaskKinds, seed: int = 0) -> float:
    """What knowing the means of all plans is worth, from NUM_DRAWS draws of each kind and their mirror images."""
    draws = np.random.default_rng(seed).standard_normal((NUM_DRAWS, kinds.means.shape[1]))
    draws = np.concatenate([draws, -draws])
    squares, vectors = np.linalg.eigh(kinds.spreads)
    roots = vectors * np.sqrt(np.maximum(squares, 0.0))[:, None]  # (kinds, plans, draws)
    least = [(mean + draws @ root.T).min(axis=1).mean() for mean, root in zip(kinds.means, roots, strict=True)]
    return max(0.0, float(kinds.mean.min() - kinds.weights @ np.array(least)))


def variance_reduction(kinds: TaskKinds) -> Array:
    """By how much a run of each plan lowers the sum of all posterior variances, mean over kinds, (plans,)."""
    run_variance = np.diagonal(kinds.spreads, axis1=1, axis2=2) + kinds.noise
    return kinds.weights @ ((kinds.spreads**2).sum(axis=1) / np.maximum(run_variance, 1e-18))


DESIGNS = {"knowledge": variance_reduction, "choice": expected_gains}
# On PEPPP's 87 tasks under 22 %, six trials: 0.014 standard deviations of a run above the best with two of knowledge, 0.152 with one.
TURNS = ("knowledge", "knowledge", "choice")


def propose(design: str, prior: Prior, posterior: Posterior, plans: Indices, memory: Array, *, tried: Collection[int] = ()) -> int:
    """The one of `plans` to measure next: the largest gain of this design; among equals, the least memory."""
    gains = DESIGNS[design](kinds_of(prior, posterior, plans, tried))
    best = plans[gains >= gains.max() - 1e-9 * abs(gains.max())]
    return int(best[np.argmin(memory[best])])


def is_settled(prior: Prior, posterior: Posterior, plans: Indices) -> bool:
    """Whether further runs of `plans` are not expected to lower the error of the picked plan by a noticeable amount."""
    kinds = kinds_of(prior, posterior, plans)
    noise = (1 + prior.shared) * (kinds.weights @ kinds.noise)[int(kinds.mean.argmin())]
    return value_of_perfect_information(kinds) <= ENOUGH * float(np.sqrt(noise))


# --- for the smallest plan within a margin of error ------------------------------------------------------------------


def propose_for_margin(
    estimate: Estimate, margin: ErrorMargin, budget: float, num_runs: Mapping[int, int], *, is_last: bool
) -> int | None:
    """The plan to measure next, so that the smallest plan within the margin is found; None when every smaller plan is decided.

    The baseline is first. Then, of the plans smaller than the smallest one within the margin, the one for which probability times saved
    bytes is largest, in turn with the baseline; a plan is out when the probability that it is within is 1 - confidence or less. The last
    measurement is of the plan that is about to be taken.
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


# --- for the whole front ---------------------------------------------------------------------------------------------


def propose_for_front(prior: Prior, posterior: Posterior, memory: Array, measured: Array) -> int:
    """The plan to measure next: the largest product of improvement and knowledge; among equals, the least memory."""
    levels = TaskKinds(posterior.weights[0], posterior.means[0], posterior.spreads[0], posterior.noise)
    gains = _improvement(prior, posterior, memory, measured) * variance_reduction(levels)[prior.levels]
    gains = np.where(np.isnan(measured), gains, -np.inf)
    best = np.flatnonzero(gains >= gains.max() - 1e-12 * abs(gains.max()))
    return int(best[np.argmin(memory[best])])


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
