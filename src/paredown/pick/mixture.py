"""What earlier tasks say about a new one: errors by level, normal within each of a few kinds of task.

Plans of one level differ by noise alone. Task i is of kind k with probability pi_k; its levels' errors and its runs are

    a_i ~ N(mu_k, S_k)  (num_levels numbers)        e_ij = a_i[level of j] + noise,  noise ~ N(0, v_k[level of j])

`Mixture.fitted` finds pi, mu, S and v by EM from whatever was observed: gaps need no completing. S and v are drawn, weakly, towards levels
that go up and down together and towards one noise. Conditioning on a new task's measurements is exact.

>>> rng = np.random.default_rng(0)
>>> tasks = 0.5 + 0.2 * rng.standard_normal((40, 1)) + [[0.0, 0.1]] + 0.01 * rng.standard_normal((40, 2))
>>> belief = Mixture.fitted(LevelSums.of(tasks, np.array([0, 1]))).given(LevelSums.of(np.array([[0.3, np.nan]]), np.array([0, 1])))
>>> mean, deviation = belief.levels()
>>> mean.round(1).tolist(), bool(deviation[1] < 0.05)
([0.3, 0.4], True)

Which plans may be taken for one: levels, found from earlier tasks, what is left of plans within a level, and twins.

Plans with like columns are joined (Ward's tree over the first singular vectors of the errors), and the tree is cut where a mixture
fitted to one half of the tasks makes the other half most likely.

>>> rng = np.random.default_rng(1)
>>> sharp, blunt = 0.5 + 0.1 * rng.standard_normal((2, 60, 1))
>>> tasks = np.hstack([sharp, sharp, sharp, blunt, blunt, blunt]) + 0.05 * rng.standard_normal((60, 6))
>>> find_levels(tasks).tolist()
[0, 0, 0, 1, 1, 1]

Twins are plans of a level whose runs of one seed are the same to the last bit, as where a format has more exponents than any value needs.
They are one run, however often it is made.

>>> runs = np.array([[[0.1], [0.1], [0.2]], [[0.3], [0.3], [0.3]], [[0.5], [0.5], [0.4]]])
>>> find_twins(runs, np.zeros(3, dtype=int)).tolist()
[0, 0, 2]
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
NUM_STEPS = 40
TASKS_OF_A_KIND = 8  # at least, at the start
STRENGTH = 4.0  # tasks that the guess about S weighs as much as, at least: as many more as levels are than tasks
LOOSE = (0.01, 0.1)  # in that guess, at least and at most: the part of a level's variance that it shares with no other
NUM_COMMON = 5  # directions, at most half of all, in which levels go together; what is left of the variance is loose
NOISE_RUNS = 4.0  # runs that the guess about v weighs as much as
SMALLEST = 1e-8  # variance
SETTLED = 0.01  # EM ends when a step makes everything observed less than 1 % more likely


@dataclass(frozen=True)
class LevelSums:
    """What matters of observed errors: how many of each level, their sum and sum of squares; (num_tasks, num_levels) each."""

    count: Array
    total: Array
    square: Array

    @staticmethod
    def of(errors: Array, levels: NDArray[np.intp], num_levels: int | None = None, weights: Array | None = None) -> LevelSums:
        """Of a matrix (tasks, plans), NaN where nothing was observed; `weights` (plans,): as parts of a run, 1 unless given."""
        is_of = (levels[:, None] == np.arange(num_levels or int(levels.max()) + 1)[None]).astype(float)
        is_of = is_of if weights is None else is_of * weights[:, None]
        seen = np.where(np.isfinite(errors), errors, 0.0)
        return LevelSums(np.isfinite(errors) @ is_of, seen @ is_of, seen**2 @ is_of)

    def rows(self, which: NDArray[np.bool_]) -> LevelSums:
        """Those of some tasks alone."""
        return LevelSums(self.count[which], self.total[which], self.square[which])


@dataclass(frozen=True)
class Posterior:
    """Tasks after their observations: `weights` (tasks, kinds), `means` (tasks, kinds, levels) and `spreads` (.., levels, levels) of each
    kind, `noise` (kinds, levels), and how likely the observations were."""

    weights: Array
    means: Array
    spreads: Array
    noise: Array
    log_likelihood: float

    def levels(self) -> tuple[Array, Array]:
        """Mean and standard deviation of the first task's levels, without the noise of a run."""
        weights, means = self.weights[0][:, None], self.means[0]
        mean = (weights * means).sum(axis=0)
        inside = np.diagonal(self.spreads[0], axis1=-2, axis2=-1)
        return mean, np.sqrt((weights * (inside + (means - mean) ** 2)).sum(axis=0))

    def moments(self) -> tuple[Array, Array]:
        """Means (tasks, levels) and spreads (tasks, levels, levels) of all tasks, over kinds."""
        means = np.einsum("tk,tkl->tl", self.weights, self.means)
        apart = self.means - means[:, None]
        inside = np.einsum("tk,tklm->tlm", self.weights, self.spreads)
        return means, inside + np.einsum("tk,tkl,tkm->tlm", self.weights, apart, apart)

    def run_noise(self) -> Array:
        """Standard deviation of one run of each level of the first task."""
        return np.sqrt((self.weights[0][:, None] * self.noise).sum(axis=0))


@dataclass(frozen=True)
class Mixture:
    """Kinds of tasks: `shares` (kinds), `means` (kinds, levels), `spreads` (kinds, levels, levels), `noise` (kinds, levels) variances."""

    shares: Array
    means: Array
    spreads: Array
    noise: Array

    @staticmethod
    def fitted(sums: LevelSums, num_kinds: int = 2, num_steps: int = NUM_STEPS) -> Mixture:
        """By EM from a split of the tasks into equal parts by their mean error; of fewer kinds where tasks are few."""
        guess = _Guess.of(sums)
        num_kinds = max(1, min(num_kinds, len(sums.count) // TASKS_OF_A_KIND))
        order = np.argsort(np.argsort(guess.heights, kind="stable"))
        weights = np.eye(num_kinds)[order * num_kinds // len(order)]
        means = np.repeat(guess.filled(sums)[:, None], num_kinds, axis=1)
        spreads = np.zeros((*means.shape, means.shape[-1]))
        found = _maximised(sums, Posterior(weights, means, spreads, np.empty(0), 0.0), guess)
        last = -np.inf
        for _ in range(num_steps):
            belief = found.given(sums)
            if belief.log_likelihood - last < SETTLED:
                break
            found, last = _maximised(sums, belief, guess), belief.log_likelihood
        return found

    def given(self, sums: LevelSums) -> Posterior:
        """Tasks by their observations; a task without any is as the earlier ones were."""
        pull = (sums.total[:, None] - sums.count[:, None] * self.means) / self.noise  # (tasks, kinds, levels)
        spreads, size = self._conditioned(sums.count)
        shift = (spreads @ pull[..., None])[..., 0]
        misfit = (sums.count[:, None] * np.log(2 * np.pi * self.noise) + self._around(sums) / self.noise).sum(axis=-1)
        logs = -0.5 * (misfit - (pull * shift).sum(axis=-1) + size) + np.log(self.shares)
        top = logs.max(axis=1, keepdims=True)
        total = np.exp(logs - top).sum(axis=1, keepdims=True)
        return Posterior(np.exp(logs - top) / total, self.means + shift, spreads, self.noise, float((top + np.log(total)).sum()))

    def _conditioned(self, count: Array) -> tuple[Array, Array]:
        """Spreads (tasks, kinds, levels, levels) after so many runs, and log |I + S D|; once where the same was observed of all tasks."""
        is_alike = bool((count == count[0]).all())
        precision = (count[:1] if is_alike else count)[:, None] / self.noise
        # (S^-1 + D)^-1 = (I + S D)^-1 S: S need not have an inverse
        inner = np.eye(self.means.shape[1]) + self.spreads * precision[:, :, None, :]
        spreads: Array = np.linalg.solve(inner, np.broadcast_to(self.spreads, inner.shape)).astype(float)
        sizes = np.linalg.slogdet(inner)[1]
        return np.broadcast_to(spreads, (len(count), *spreads.shape[1:])), np.broadcast_to(sizes, (len(count), sizes.shape[1]))

    def _around(self, sums: LevelSums) -> Array:
        return sums.square[:, None] - 2 * self.means * sums.total[:, None] + sums.count[:, None] * self.means**2


@dataclass(frozen=True)
class _Guess:
    """What is believed before EM: the tasks' mean errors, the levels' offsets, variances between tasks, loose ones, and of noise."""

    heights: Array
    offsets: Array
    variance: float
    loose: float
    noise: float

    @staticmethod
    def of(sums: LevelSums) -> _Guess:
        """From sums, means and what is left of them."""
        seen = np.maximum(sums.count, 1e-12)
        offsets = sums.total.sum(axis=0) / np.maximum(sums.count.sum(axis=0), 1e-12)
        middle = float(sums.total.sum() / max(sums.count.sum(), 1.0))
        offsets = np.where(sums.count.sum(axis=0) > 0, offsets, middle)
        lifted = (sums.total - sums.count * offsets).sum(axis=1) / np.maximum(sums.count.sum(axis=1), 1.0)
        inside = (sums.square - sums.total**2 / seen).sum() / max((sums.count - (sums.count > 0)).sum(), 1.0)
        guess = _Guess(lifted, offsets, max(float(lifted.var()), SMALLEST), LOOSE[1], max(float(inside), SMALLEST))
        num_common = min(NUM_COMMON, len(offsets) // 2)
        rest = np.linalg.eigvalsh(np.cov(guess.filled(sums) - offsets, rowvar=False, bias=True).reshape(len(offsets), -1))
        alone = float(rest[: len(offsets) - num_common].mean())
        if len(lifted) <= len(offsets):  # fewer tasks than levels span little of what is loose
            alone *= len(lifted) / max(len(lifted) - 1 - num_common, 1)
        return replace(guess, loose=float(np.clip(alone / guess.variance, *LOOSE)))

    def filled(self, sums: LevelSums) -> Array:
        """The tasks' levels: as seen, and where nothing was seen the level's offset moved by the task's height."""
        return np.where(sums.count > 0, sums.total / np.maximum(sums.count, 1.0), self.offsets + self.heights[:, None])

    def spread(self) -> Array:
        """Levels that go up and down together, but for what is loose."""
        size = len(self.offsets)
        return self.variance * ((1 - self.loose) + self.loose * np.eye(size))


def _maximised(sums: LevelSums, belief: Posterior, guess: _Guess) -> Mixture:
    """The kinds that suit what is believed about the tasks."""
    weights = belief.weights
    tasks = np.maximum(weights.sum(axis=0), 1e-9)  # (kinds,)
    means = np.einsum("tk,tkl->kl", weights, belief.means) / tasks[:, None]
    apart = belief.means - means
    spreads = np.einsum("tk,tkl,tkm->klm", weights, apart, apart) + np.einsum("tk,tklm->klm", weights, belief.spreads)
    strength = max(STRENGTH, float(len(guess.offsets) - len(weights)))
    spreads = (spreads + strength * guess.spread()) / (tasks + strength)[:, None, None]
    inside = np.diagonal(belief.spreads, axis1=-2, axis2=-1)
    squares = sums.square[:, None] - 2 * belief.means * sums.total[:, None] + sums.count[:, None] * (belief.means**2 + inside)
    squares, runs = np.einsum("tk,tkl->kl", weights, squares), weights.T @ sums.count
    # a level of which no task has two runs tells nothing of noise: what it is made of would be taken for the task's own
    is_repeated = sums.count.max(axis=0) > 1
    told = is_repeated if is_repeated.any() else np.ones(len(is_repeated), dtype=bool)
    common = (squares[:, told].sum(axis=1) + NOISE_RUNS * guess.noise) / (runs[:, told].sum(axis=1) + NOISE_RUNS)
    noise = np.where(told, (squares + NOISE_RUNS * common[:, None]) / (runs + NOISE_RUNS), common[:, None])
    return Mixture(tasks / tasks.sum(), means, spreads, np.maximum(noise, SMALLEST))


# --- Which plans may be taken for one ---

Levels = NDArray[np.intp]
CUTS = (2, 4, 8, 16)  # numbers of levels that are tried
MOST_LEVELS = 48  # up to so many plans, each may be a level of its own
MOST_TASKS, FEWEST_TASKS, FEW_STEPS = 200, 8, 10  # when cuts are compared: of a half, of all, and of EM
NUM_VECTORS = 5
TASKS_OF_TWINS = 3  # at least, that both ran on with one seed


def find_levels(errors: Array) -> Levels:
    """A level for each plan: the cut of the tree that predicts earlier tasks best."""
    num_tasks, num_plans = errors.shape
    cuts = [*(cut for cut in CUTS if cut < num_plans), *([num_plans] if num_plans <= MOST_LEVELS else [])]
    if num_tasks < FEWEST_TASKS:  # too few to compare on
        return _cut(_tree(errors), cuts[-1], num_plans)
    fit, judge = errors[0::2][:MOST_TASKS], errors[1::2][:MOST_TASKS]
    tree = _tree(fit)
    best = max(cuts, key=lambda cut: _likelihood(fit, judge, _cut(tree, cut, num_plans)))
    return _cut(_tree(errors), best, num_plans)


def as_levels(levels: Levels) -> Levels:
    """Numbered from 0, in the order in which they occur."""
    _, first, inverse = np.unique(levels, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[inverse]


def _likelihood(fit: Array, judge: Array, levels: Levels) -> float:
    """Of one half of the tasks, by what the other half teaches."""
    apart = offsets(fit, levels)[0]
    return (
        Mixture.fitted(LevelSums.of(fit - apart, levels), num_steps=FEW_STEPS)
        .given(LevelSums.of(judge - apart, levels))
        .log_likelihood
    )


def _tree(errors: Array) -> Array:
    """Ward's tree of the plans; what was not observed is taken for its task's and plan's means."""
    from scipy.cluster.hierarchy import ward
    from scipy.linalg import eigh

    if errors.shape[1] < 2:
        return np.empty((0, 4))
    known = np.isfinite(errors)
    rest = np.where(known, errors, 0.0)
    rest -= known * (rest.sum(axis=1) / np.maximum(known.sum(axis=1), 1))[:, None]
    middle = rest.sum(axis=0) / np.maximum(known.sum(axis=0), 1)
    rest -= known * middle
    last = errors.shape[1] - 1
    squares, vectors = eigh(rest.T @ rest, subset_by_index=[max(0, last + 1 - NUM_VECTORS), last])
    vectors = vectors * np.sqrt(np.maximum(squares, 0.0)) / max(float(known.mean()), 1e-9)
    return ward(np.column_stack([vectors, np.sqrt(len(errors)) * middle]))


def _cut(tree: Array, count: int, num_plans: int) -> Levels:
    from scipy.cluster.hierarchy import fcluster

    if num_plans < 2:
        return np.zeros(num_plans, dtype=np.intp)
    return as_levels(fcluster(tree, count, criterion="maxclust"))


def offsets(errors: Array, levels: Levels) -> tuple[Array, Array]:
    """How far each plan lies from its level on all tasks alike, drawn to 0 by as much as noise explains, and the variance of that."""
    sums = LevelSums.of(errors, levels)
    count = sums.count[:, levels]
    apart = errors - (sums.total / np.maximum(sums.count, 1.0))[:, levels]
    apart = np.where(count > 1, apart * np.sqrt(count / np.maximum(count - 1, 1.0)), np.nan)
    seen = np.isfinite(apart)
    runs = np.maximum(seen.sum(axis=0), 1)
    means = np.where(seen, apart, 0.0).sum(axis=0) / runs
    noise = np.where(seen, (apart - means) ** 2, 0.0).sum() / max(seen.sum(), 1)
    real = max(0.0, float(np.mean(means**2 - noise / runs)))  # the variance between plans of a level
    share = real / np.maximum(real + noise / runs, 1e-300)
    return means * share, share * noise / runs


def find_twins(runs: Array, levels: Levels) -> Levels:
    """For each plan the first of its level of which all twins are its own: where both ran (tasks, plans, seeds), nothing differs."""
    groups: dict[int, list[list[int]]] = {}  # of each level
    found = np.arange(runs.shape[1])
    for plan in range(runs.shape[1]):
        of_level = groups.setdefault(int(levels[plan]), [])
        own = next((group for group in of_level if _are_twins(runs[:, group], runs[:, [plan]])), None)
        if own is None:
            of_level.append(own := [])
        own.append(plan)
        found[plan] = own[0]
    return found


def _are_twins(runs: Array, others: Array) -> bool:
    """Whether a plan is the twin of every plan of a group, (tasks, plans, seeds) each."""
    both = np.isfinite(runs) & np.isfinite(others)
    num_tasks = both.any(axis=2).sum(axis=0)
    return bool((num_tasks >= TASKS_OF_TWINS).all()) and bool((runs == others)[both].all())


def without_twins(runs: Array, twins: Levels) -> Array:
    """Runs (tasks, plans, seeds), those of twins once: NaN where an earlier twin has the same."""
    kept = runs.copy()
    for twin in np.unique(twins):
        same = np.flatnonzero(twins == twin)
        before = np.cumsum(np.isfinite(runs[:, same]), axis=1) - np.isfinite(runs[:, same])  # (tasks, twins, seeds)
        kept[:, same] = np.where(before > 0, np.nan, runs[:, same])
    return kept
