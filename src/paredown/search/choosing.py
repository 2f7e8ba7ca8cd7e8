"""Which plan to measure next so that the right one is taken, and when nothing more is worth measuring.

Means m and spread S of the plans that may be taken are normal, and a run adds noise of variance v. A run of plan j moves all means, for
each deviation that it comes out at by S_j / sqrt(S_jj + v_j). So by

    value(j) = min m - E min (m + S_j Z / sqrt(S_jj + v_j)),   Z ~ N(0, 1)

the error of the plan that is taken is expected to fall. However many runs are made, they are worth no more than knowing all means:

    value of all = min m - E min a,   a ~ N(m, S)

When that is small beside the noise of a run, nothing more can change the choice by what could be noticed.

>>> means, spread = np.array([0.30, 0.31, 0.60]), np.diag([0.01, 0.01, 0.01]) ** 2
>>> gains = values(means, spread, np.full(3, 1e-4))
>>> bool(gains[0] > 1e-4 and gains[2] < 1e-12), bool(gains.max() < value_of_all(means, spread))
(True, True)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paredown.search.mixture import Belief
from paredown.search.pooled import Prior

Array = NDArray[np.float64]
Indices = NDArray[np.intp]
GRID = np.linspace(-4.5, 4.5, 61)  # deviations of a run
ODDS = np.exp(-(GRID**2) / 2) / np.exp(-(GRID**2) / 2).sum()
NUM_DRAWS = 2048
ENOUGH = 0.1  # of a run's noise: a smaller gain is none


def joint(prior: Prior, belief: Belief, plans: Indices) -> tuple[Array, Array, Array]:
    """Means, spread and noise (variances) of these plans, over all kinds of task."""
    means, spreads = (part[0] for part in belief.moments())
    levels = prior.levels[plans]
    noise = belief.run_noise()[levels] ** 2
    return means[levels] + prior.offsets[plans], spreads[np.ix_(levels, levels)] + np.diag(prior.doubt[plans]), noise


def values(means: Array, spread: Array, noise: Array) -> Array:
    """By how much a run of each plan is expected to lower the error of the plan that is taken, (plans,)."""
    moves = spread / np.sqrt(np.maximum(np.diagonal(spread) + noise, 1e-18))  # (plans, measured plan)
    return np.array([means.min() - float((means[:, None] + move[:, None] * GRID).min(axis=0) @ ODDS) for move in moves.T])


def value_of_all(means: Array, spread: Array, seed: int = 0) -> float:
    """What knowing all means is worth; by NUM_DRAWS draws."""
    squares, vectors = np.linalg.eigh(spread)
    draws = np.random.default_rng(seed).standard_normal((NUM_DRAWS, len(means)))
    draws = np.concatenate([draws, -draws]) * np.sqrt(np.maximum(squares, 0.0))
    return max(0.0, float(means.min() - (means + draws @ vectors.T).min(axis=1).mean()))


def knowledge(means: Array, spread: Array, noise: Array) -> Array:
    """By how much a run of each plan lowers the sum of all variances, (plans,)."""
    return (spread**2).sum(axis=0) / np.maximum(np.diagonal(spread) + noise, 1e-18)


DESIGNS = {"knowledge": knowledge, "choice": values}
TURNS = ("knowledge", "choice")  # the first one chooses the first plan to measure, the second all others


def propose(design: str, prior: Prior, belief: Belief, plans: Indices, memory: Array) -> int:
    """The one of `plans` to measure next: that of the largest gain; of equals, the one of the least memory."""
    gains = DESIGNS[design](*joint(prior, belief, plans))
    best = plans[gains >= gains.max() - 1e-9 * abs(gains.max())]
    return int(best[np.argmin(memory[best])])


def is_settled(prior: Prior, belief: Belief, plans: Indices) -> bool:
    """Whether measuring more of `plans`, however much, could not lower the error by what would be noticed."""
    means, spread, noise = joint(prior, belief, plans)
    return value_of_all(means, spread) <= ENOUGH * float(np.sqrt(noise[means.argmin()]))
