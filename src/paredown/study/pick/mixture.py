"""The prior over tasks: a mixture of normal distributions of errors, one for each kind of task, with errors pooled by level.

Plans of one level differ by noise alone. Task i is of kind k with probability pi_k; the errors of its levels and its runs are

    a_i ~ N(mu_k, S_k)  (num_levels numbers)        e_ij = a_i[level of j] + noise,  noise ~ N(0, v_k[level of j])

`Mixture.fitted` estimates pi, mu, S and v by EM from all observed entries; gaps are not completed. Weak conjugate priors shrink S
towards levels that move together, and v towards one noise for all levels. Conditioning on a new task's measurements is exact
(`Mixture.given`).

>>> rng = np.random.default_rng(0)
>>> tasks = 0.5 + 0.2 * rng.standard_normal((40, 1)) + [[0.0, 0.1]] + 0.01 * rng.standard_normal((40, 2))
>>> mixture = Mixture.fitted(LevelSums.of(tasks, np.array([0, 1])))
>>> mean, deviation = mixture.given(LevelSums.of(np.array([[0.3, np.nan]]), np.array([0, 1]))).levels()
>>> mean.round(1).tolist(), bool(deviation[1] < 0.05)
([0.3, 0.4], True)

Levels are estimated where a prior names none: plans with similar columns are joined (Ward's tree over the first singular vectors of
the errors), and the tree is cut where a mixture fitted to one half of the tasks gives the other half the highest likelihood.

>>> rng = np.random.default_rng(1)
>>> sharp, blunt = 0.5 + 0.1 * rng.standard_normal((2, 60, 1))
>>> tasks = np.hstack([sharp, sharp, sharp, blunt, blunt, blunt]) + 0.05 * rng.standard_normal((60, 6))
>>> find_levels(tasks).tolist()
[0, 0, 0, 1, 1, 1]
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Levels = NDArray[np.intp]
NUM_STEPS = 40  # of EM, at most
TASKS_OF_A_KIND = 8  # at least, in the first split of the tasks
STRENGTH = 4.0  # weight of the prior of S, in tasks: at least this, and as many as there are more levels than tasks
LOOSE = (0.01, 0.1)  # bounds of the share of a level's variance that is independent of all other levels, in the prior of S
NUM_COMMON = 5  # principal directions of shared variance, at most half of all; the rest of the variance is independent
NOISE_RUNS = 4.0  # weight of the prior of v, in runs
SMALLEST = 1e-8  # variance
CONVERGED = 0.01  # EM ends when a step raises the log likelihood by less
CUTS = (2, 4, 8, 16)  # numbers of levels to compare
MOST_LEVELS = 48  # with at most this many plans, each plan may be its own level
MOST_TASKS, FEWEST_TASKS, FEW_STEPS = 200, 8, 10  # to compare cuts: most tasks of a half, fewest tasks, EM steps
NUM_VECTORS = 5  # singular vectors behind Ward's tree


@dataclass(frozen=True)
class LevelSums:
    """Sufficient statistics of observed errors: count, sum and sum of squares by level, (num_tasks, num_levels) each.

    `weights` (num_tasks,): how much a task counts in a fit; the tasks of one data set count as one task.
    """

    count: Array
    total: Array
    square: Array
    weights: Array

    @staticmethod
    def of(errors: Array, levels: NDArray[np.intp], num_levels: int | None = None, weights: Array | None = None) -> LevelSums:
        """The statistics of errors (tasks, plans), NaN where not observed; `weights` (plans,): how much a run counts, 1 unless given."""
        membership = (levels[:, None] == np.arange(num_levels or int(levels.max()) + 1)[None]).astype(float)
        membership = membership if weights is None else membership * weights[:, None]
        observed = np.where(np.isfinite(errors), errors, 0.0)
        return LevelSums(np.isfinite(errors) @ membership, observed @ membership, observed**2 @ membership, np.ones(len(errors)))

    def rows(self, is_selected: NDArray[np.bool_]) -> LevelSums:
        """The statistics of the selected tasks."""
        return LevelSums(*(part[is_selected] for part in (self.count, self.total, self.square, self.weights)))


@dataclass(frozen=True)
class Posterior:
    """Posterior of tasks after their observations.

    `weights` (tasks, kinds): probability of each kind. `means` (tasks, kinds, levels) and `spreads` (tasks, kinds, levels, levels):
    mean and covariance of the levels' errors within a kind. `noise` (kinds, levels): variance of one run.
    """

    weights: Array
    means: Array
    spreads: Array
    noise: Array
    log_likelihood: float

    def levels(self) -> tuple[Array, Array]:
        """Mean and standard deviation of the first task's levels, without the noise of a run."""
        weights, means = self.weights[0][:, None], self.means[0]
        mean = (weights * means).sum(axis=0)
        variance = np.diagonal(self.spreads[0], axis1=-2, axis2=-1)
        return mean, np.sqrt((weights * (variance + (means - mean) ** 2)).sum(axis=0))

    def moments(self) -> tuple[Array, Array]:
        """Means (tasks, levels) and covariances (tasks, levels, levels) of all tasks, over kinds."""
        means = np.einsum("tk,tkl->tl", self.weights, self.means)
        difference = self.means - means[:, None]
        within = np.einsum("tk,tklm->tlm", self.weights, self.spreads)
        return means, within + np.einsum("tk,tkl,tkm->tlm", self.weights, difference, difference)

    def run_noise(self) -> Array:
        """Standard deviation of one run of each level of the first task."""
        return np.sqrt((self.weights[0][:, None] * self.noise).sum(axis=0))


@dataclass(frozen=True)
class Mixture:
    """Kinds of tasks: `shares` (kinds,), `means` (kinds, levels), covariances `spreads`, variances `noise` (kinds, levels) of a run."""

    shares: Array
    means: Array
    spreads: Array
    noise: Array

    @staticmethod
    def fitted(sums: LevelSums, num_kinds: int = 2, num_steps: int = NUM_STEPS) -> Mixture:
        """The mixture fitted by EM, from a split of the tasks by their mean error; fewer kinds where tasks are few."""
        start = _StartValues.of(sums)
        num_kinds = max(1, min(num_kinds, int(sums.weights.sum() + 1e-9) // TASKS_OF_A_KIND))
        order = np.argsort(np.argsort(start.heights, kind="stable"))
        weights = np.eye(num_kinds)[order * num_kinds // len(order)]
        means = np.repeat(start.filled(sums)[:, None], num_kinds, axis=1)
        spreads = np.zeros((*means.shape, means.shape[-1]))
        mixture = _maximized(sums, Posterior(weights, means, spreads, np.empty(0), 0.0), start)
        last = -np.inf
        for _ in range(num_steps):
            posterior = mixture.given(sums)
            if posterior.log_likelihood - last < CONVERGED:
                break
            mixture, last = _maximized(sums, posterior, start), posterior.log_likelihood
        return mixture

    def given(self, sums: LevelSums) -> Posterior:
        """The posterior of tasks given their observations; without any, it is the prior."""
        residual = (sums.total[:, None] - sums.count[:, None] * self.means) / self.noise  # (tasks, kinds, levels)
        spreads, log_det = self._conditioned(sums.count)
        shift = (spreads @ residual[..., None])[..., 0]
        misfit = (sums.count[:, None] * np.log(2 * np.pi * self.noise) + self._squared_residuals(sums) / self.noise).sum(axis=-1)
        log_weights = -0.5 * (misfit - (residual * shift).sum(axis=-1) + log_det) + np.log(self.shares)
        top = log_weights.max(axis=1, keepdims=True)
        total = np.exp(log_weights - top).sum(axis=1, keepdims=True)
        log_likelihood = float(sums.weights @ (top + np.log(total))[:, 0])
        return Posterior(np.exp(log_weights - top) / total, self.means + shift, spreads, self.noise, log_likelihood)

    def _conditioned(self, count: Array) -> tuple[Array, Array]:
        """Covariances (tasks, kinds, levels, levels) after these counts of runs, and log |I + S D|; once if all counts are equal."""
        is_alike = bool((count == count[0]).all())
        precision = (count[:1] if is_alike else count)[:, None] / self.noise
        # (S^-1 + D)^-1 = (I + S D)^-1 S: S need not have an inverse
        inner = np.eye(self.means.shape[1]) + self.spreads * precision[:, :, None, :]
        spreads: Array = np.linalg.solve(inner, np.broadcast_to(self.spreads, inner.shape)).astype(float)
        log_dets = np.linalg.slogdet(inner)[1]
        return np.broadcast_to(spreads, (len(count), *spreads.shape[1:])), np.broadcast_to(
            log_dets, (len(count), log_dets.shape[1])
        )

    def _squared_residuals(self, sums: LevelSums) -> Array:
        return sums.square[:, None] - 2 * self.means * sums.total[:, None] + sums.count[:, None] * self.means**2


@dataclass(frozen=True)
class _StartValues:
    """Start of EM, and the prior that it shrinks to: tasks' mean errors, levels' offsets, and variances."""

    heights: Array
    offsets: Array
    variance: float
    loose: float
    noise: float

    @staticmethod
    def of(sums: LevelSums) -> _StartValues:
        """Start values from a two-way analysis of the sums: means of tasks and levels, and residual variances."""
        counts, w = np.maximum(sums.count, 1e-12), sums.weights
        offsets = w @ sums.total / np.maximum(w @ sums.count, 1e-12)
        mean = float(w @ sums.total.sum(axis=1) / max(float(w @ sums.count.sum(axis=1)), 1e-12))
        offsets = np.where(w @ sums.count > 0, offsets, mean)
        heights = (sums.total - sums.count * offsets).sum(axis=1) / np.maximum(sums.count.sum(axis=1), 1.0)
        noise = (sums.square - sums.total**2 / counts).sum() / max((sums.count - (sums.count > 0)).sum(), 1.0)
        variance = float(np.cov(heights, aweights=w, bias=True)) if len(heights) > 1 else 0.0
        start = _StartValues(heights, offsets, max(variance, SMALLEST), LOOSE[1], max(float(noise), SMALLEST))
        num_common = min(NUM_COMMON, len(offsets) // 2)
        covariance = np.cov(start.filled(sums) - offsets, rowvar=False, bias=True, aweights=w).reshape(len(offsets), -1)
        independent, num_tasks = float(np.linalg.eigvalsh(covariance)[: len(offsets) - num_common].mean()), float(w.sum())
        if num_tasks <= len(offsets):  # few tasks span little of the independent variance
            independent *= num_tasks / max(num_tasks - 1 - num_common, 1)
        return replace(start, loose=float(np.clip(independent / start.variance, *LOOSE)))

    def filled(self, sums: LevelSums) -> Array:
        """Errors by level (tasks, levels): observed means, or else the level's offset plus the task's height."""
        return np.where(sums.count > 0, sums.total / np.maximum(sums.count, 1.0), self.offsets + self.heights[:, None])

    def spread(self) -> Array:
        """Covariance of the levels: fully correlated, except for the independent share `loose`."""
        size = len(self.offsets)
        return self.variance * ((1 - self.loose) + self.loose * np.eye(size))


def _maximized(sums: LevelSums, posterior: Posterior, start: _StartValues) -> Mixture:
    """The M step: the mixture of highest posterior probability for these posteriors of the tasks."""
    weights = posterior.weights * sums.weights[:, None]
    num_tasks = np.maximum(weights.sum(axis=0), 1e-9)  # (kinds,)
    means = np.einsum("tk,tkl->kl", weights, posterior.means) / num_tasks[:, None]
    difference = posterior.means - means
    spreads = np.einsum("tk,tkl,tkm->klm", weights, difference, difference) + np.einsum("tk,tklm->klm", weights, posterior.spreads)
    strength = max(STRENGTH, float(len(start.offsets) - sums.weights.sum()))
    spreads = (spreads + strength * start.spread()) / (num_tasks + strength)[:, None, None]
    variance = np.diagonal(posterior.spreads, axis1=-2, axis2=-1)
    squares = (
        sums.square[:, None] - 2 * posterior.means * sums.total[:, None] + sums.count[:, None] * (posterior.means**2 + variance)
    )
    squares, runs = np.einsum("tk,tkl->kl", weights, squares), weights.T @ sums.count
    # a level without two runs on any task takes the common noise: its own cannot be separated from differences between tasks
    is_repeated = sums.count.max(axis=0) > 1
    has_noise = is_repeated if is_repeated.any() else np.ones(len(is_repeated), dtype=bool)
    common = (squares[:, has_noise].sum(axis=1) + NOISE_RUNS * start.noise) / (runs[:, has_noise].sum(axis=1) + NOISE_RUNS)
    noise = np.where(has_noise, (squares + NOISE_RUNS * common[:, None]) / (runs + NOISE_RUNS), common[:, None])
    return Mixture(num_tasks / num_tasks.sum(), means, spreads, np.maximum(noise, SMALLEST))


# --- levels ------------------------------------------------------------------------------------------------------------


def find_levels(errors: Array) -> Levels:
    """A level for each plan, (plans,): the cut of Ward's tree that predicts held-out tasks best."""
    num_tasks, num_plans = errors.shape
    cuts = [*(cut for cut in CUTS if cut < num_plans), *([num_plans] if num_plans <= MOST_LEVELS else [])]
    if num_tasks < FEWEST_TASKS:  # too few for a comparison
        return _cut(_tree(errors), cuts[-1], num_plans)
    fit, held_out = errors[0::2][:MOST_TASKS], errors[1::2][:MOST_TASKS]
    tree = _tree(fit)
    best = max(cuts, key=lambda cut: _likelihood(fit, held_out, _cut(tree, cut, num_plans)))
    return _cut(_tree(errors), best, num_plans)


def renumbered(levels: Levels) -> Levels:
    """The levels numbered from 0, in the order in which they occur."""
    _, first, inverse = np.unique(levels, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[inverse]


def _likelihood(fit: Array, held_out: Array, levels: Levels) -> float:
    """Log likelihood of the held-out half of the tasks under a mixture fitted to the other half."""
    shift = offsets(fit, levels)[0]
    return (
        Mixture.fitted(LevelSums.of(fit - shift, levels), num_steps=FEW_STEPS)
        .given(LevelSums.of(held_out - shift, levels))
        .log_likelihood
    )


def _tree(errors: Array) -> Array:
    """Ward's tree of the plans; entries that were not observed count as the mean of their task and plan."""
    from scipy.cluster.hierarchy import ward
    from scipy.linalg import eigh

    if errors.shape[1] < 2:
        return np.empty((0, 4))
    is_observed = np.isfinite(errors)
    residual = np.where(is_observed, errors, 0.0)
    residual -= is_observed * (residual.sum(axis=1) / np.maximum(is_observed.sum(axis=1), 1))[:, None]
    plan_means = residual.sum(axis=0) / np.maximum(is_observed.sum(axis=0), 1)
    residual -= is_observed * plan_means
    last = errors.shape[1] - 1
    squares, vectors = eigh(residual.T @ residual, subset_by_index=[max(0, last + 1 - NUM_VECTORS), last])
    vectors = vectors * np.sqrt(np.maximum(squares, 0.0)) / max(float(is_observed.mean()), 1e-9)
    return ward(np.column_stack([vectors, np.sqrt(len(errors)) * plan_means]))


def _cut(tree: Array, count: int, num_plans: int) -> Levels:
    from scipy.cluster.hierarchy import fcluster

    if num_plans < 2:
        return np.zeros(num_plans, dtype=np.intp)
    return renumbered(fcluster(tree, count, criterion="maxclust"))


def offsets(errors: Array, levels: Levels) -> tuple[Array, Array]:
    """How far each plan lies from its level on all tasks, shrunk by the share that noise explains, and the variance of that."""
    sums = LevelSums.of(errors, levels)
    count = sums.count[:, levels]
    difference = errors - (sums.total / np.maximum(sums.count, 1.0))[:, levels]
    difference = np.where(count > 1, difference * np.sqrt(count / np.maximum(count - 1, 1.0)), np.nan)
    is_known = np.isfinite(difference)
    runs = np.maximum(is_known.sum(axis=0), 1)
    means = np.where(is_known, difference, 0.0).sum(axis=0) / runs
    noise = np.where(is_known, (difference - means) ** 2, 0.0).sum() / max(is_known.sum(), 1)
    variance = max(0.0, float(np.mean(means**2 - noise / runs)))  # between plans of a level
    share = variance / np.maximum(variance + noise / runs, 1e-300)
    return means * share, share * noise / runs
