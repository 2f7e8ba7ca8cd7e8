"""Acquisition: which plan to try next so that the best one is picked, and when no further trial is worth its cost.

A run of plan j with error y moves the mean errors m of all plans by S_j (y - m_j) / (S_jj + v_j), where S is their covariance and v_j the
variance of a run. The error of the picked plan is expected to fall by

    gain(j) = min m - E min m(y)

Trials end when no gain would be noticeable, even if a run had no noise.

`propose_for_margin` chooses for the smallest plan whose error is within a margin of the baseline's.

>>> close = Estimate(np.ones(3), np.array([0.30, 0.31, 0.60]), 1e-4 * np.eye(3), np.full(3, 1e-4))
>>> gains = expected_gains(close, np.arange(3))
>>> bool(gains[0] > 1e-4 and gains[2] < 1e-9)
True
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from paredown.study.pick.posterior import ErrorMargin, Estimate

Array = NDArray[np.float64]
Indices = NDArray[np.intp]
GRID = np.linspace(-4.5, 4.5, 61)  # of a run's error from its mean, in standard deviations
ODDS = np.exp(-(GRID**2) / 2) / np.exp(-(GRID**2) / 2).sum()
ENOUGH = 0.1  # standard deviations of a run: a smaller expected gain is not noticeable


def expected_gains(estimate: Estimate, plans: Indices, *, has_noise: bool = True) -> Array:
    """Return how much a run of each of `plans` is expected to lower the error of the plan that is picked from them.

    `has_noise=False` assumes that a run shows the mean error exactly, which gives an upper bound.
    """
    means, covariance = estimate.means[plans], estimate.covariance[np.ix_(plans, plans)]
    variances = np.diagonal(covariance) + has_noise * estimate.noise[plans]
    slopes = covariance / np.sqrt(np.maximum(variances, 1e-18))[:, None]  # (plan of the run, plans)
    after = means + slopes[:, None] * GRID[:, None]  # (plan of the run, its error, plans)
    return np.maximum(means.min() - after.min(axis=2) @ ODDS, 0.0)


def propose(estimate: Estimate, plans: Indices) -> int:
    """Return the plan of `plans` to try next: the one of the largest expected gain, and among equals the one of least memory."""
    gains = expected_gains(estimate, plans)
    best = plans[gains >= gains.max() * (1 - 1e-9)]
    return int(best[np.argmin(estimate.memory[best])])


def is_settled(estimate: Estimate, plans: Indices) -> bool:
    """Return whether no further trial is worth its cost.

    That is so if knowing the mean error of any of `plans` exactly would not lower the error of the picked plan by a noticeable amount.
    """
    noise = float(estimate.noise[plans[estimate.means[plans].argmin()]])
    return float(expected_gains(estimate, plans, has_noise=False).max()) <= ENOUGH * noise**0.5


# --- for the smallest plan within a margin of error ------------------------------------------------------------------


def propose_for_margin(
    estimate: Estimate, margin: ErrorMargin, budget: float, num_runs: Mapping[int, int], *, is_last: bool
) -> int | None:
    """Return the plan to measure next in search of the smallest plan within the error margin; None when there is nothing to decide.

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
