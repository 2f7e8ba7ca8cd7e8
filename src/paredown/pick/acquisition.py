"""Which plan to measure next so that the right one is taken, and when nothing more is worth measuring.

Of the kinds of task that the new one may be, each says means m, a spread S and noise v of the plans that may be taken. A run of plan j, of
error y, makes some kinds likelier and moves the means of each by S_j (y - m_j) / (S_jj + v_j). So by

    value(j) = min m - E min m(y)

the error of the plan that is taken is expected to fall. However many runs are made, they are worth no more than knowing all means:

    value of all = min m - E min a

When that is small beside the noise of a run, nothing more can change the choice by what could be noticed.

>>> close = TaskKinds(np.ones(1), np.array([[0.30, 0.31, 0.60]]), 1e-4 * np.eye(3)[None], np.full((1, 3), 1e-4))
>>> gains = expected_gains(close)
>>> bool(gains[0] > 1e-4 and gains[2] < 1e-9), bool(gains.max() < value_of_all(close))
(True, True)
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paredown.pick.mixture import Posterior
from paredown.pick.posterior import Prior

Array = NDArray[np.float64]
Indices = NDArray[np.intp]
GRID = np.linspace(-4.5, 4.5, 61)  # deviations of a run
ODDS = np.exp(-(GRID**2) / 2) / np.exp(-(GRID**2) / 2).sum()
NUM_DRAWS = 2048
ENOUGH = 0.1  # of a run's noise: a smaller gain is none


class TaskKinds(NamedTuple):
    """What is believed of some plans: how likely each kind of task is (kinds,), its means and noise (kinds, plans) and spread."""

    weights: Array
    means: Array
    spreads: Array  # (kinds, plans, plans)
    noise: Array  # variances

    @property
    def mean(self) -> Array:
        """Over all kinds, (plans,)."""
        return self.weights @ self.means


def kinds_of(prior: Prior, belief: Posterior, plans: Indices, tried: Collection[int] = ()) -> TaskKinds:
    """What is believed of these plans. Those that were tried would run with another seed, and what that does to all plans is not known."""
    levels = prior.levels[plans]
    spreads = belief.spreads[0][:, levels][:, :, levels] + np.diag(prior.doubt[plans])
    apart = np.array([1 + 2 * prior.shared * (plan in tried) for plan in plans])
    return TaskKinds(belief.weights[0], belief.means[0][:, levels] + prior.offsets[plans], spreads, apart * belief.noise[:, levels])


def expected_gains(kinds: TaskKinds) -> Array:
    """By how much a run of each plan is expected to lower the error of the plan that is taken, (plans,)."""
    return np.array([max(0.0, kinds.mean.min() - _least_after(kinds, plan)) for plan in range(kinds.means.shape[1])])


def _least_after(kinds: TaskKinds, plan: int) -> float:
    """The least mean of all plans that is expected after a run of this one."""
    middle, variance = kinds.means[:, plan], kinds.spreads[:, plan, plan] + kinds.noise[:, plan]
    deviation = np.sqrt(np.maximum(variance, 1e-18))[:, None]
    runs = (middle[:, None] + deviation * GRID).ravel()  # as each kind has them
    ratios = (runs - middle[:, None]) / deviation  # (kinds, runs)
    logs = np.log(np.maximum(kinds.weights, 1e-300))[:, None] - np.log(deviation) - ratios**2 / 2
    likely = np.exp(logs - logs.max(axis=0))
    likely /= likely.sum(axis=0)
    moves = kinds.spreads[:, plan] / deviation  # (kinds, plans), for each deviation of a run
    after = np.einsum("kr,kp->rp", likely, kinds.means) + np.einsum("kr,kr,kp->rp", likely, ratios, moves)
    return float(np.outer(kinds.weights, ODDS).ravel() @ after.min(axis=1))


def value_of_all(kinds: TaskKinds, seed: int = 0) -> float:
    """What knowing all means is worth; by NUM_DRAWS draws of each kind, and as many opposite ones."""
    draws = np.random.default_rng(seed).standard_normal((NUM_DRAWS, kinds.means.shape[1]))
    draws = np.concatenate([draws, -draws])
    squares, vectors = np.linalg.eigh(kinds.spreads)
    roots = vectors * np.sqrt(np.maximum(squares, 0.0))[:, None]  # (kinds, plans, draws)
    least = [(mean + draws @ root.T).min(axis=1).mean() for mean, root in zip(kinds.means, roots, strict=True)]
    return max(0.0, float(kinds.mean.min() - kinds.weights @ np.array(least)))


def variance_reduction(kinds: TaskKinds) -> Array:
    """By how much a run of each plan lowers the sum of all variances, (plans,); mean over kinds."""
    inside = np.diagonal(kinds.spreads, axis1=1, axis2=2) + kinds.noise
    return kinds.weights @ ((kinds.spreads**2).sum(axis=1) / np.maximum(inside, 1e-18))


DESIGNS = {"knowledge": variance_reduction, "choice": expected_gains}
TURNS = ("knowledge", "choice")  # the first one chooses the first plan to measure, the second all others


def propose(design: str, prior: Prior, belief: Posterior, plans: Indices, memory: Array, *, tried: Collection[int] = ()) -> int:
    """The one of `plans` to measure next: that of the largest gain; of equals, the one of the least memory."""
    gains = DESIGNS[design](kinds_of(prior, belief, plans, tried))
    best = plans[gains >= gains.max() - 1e-9 * abs(gains.max())]
    return int(best[np.argmin(memory[best])])


def is_settled(prior: Prior, belief: Posterior, plans: Indices) -> bool:
    """Whether measuring more of `plans`, however much, could not lower the error by what would be noticed."""
    kinds = kinds_of(prior, belief, plans)
    noise = (1 + prior.shared) * (kinds.weights @ kinds.noise)[int(kinds.mean.argmin())]
    return value_of_all(kinds) <= ENOUGH * float(np.sqrt(noise))
