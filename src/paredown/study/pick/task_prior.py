"""The prior of a new task, from the data of prior tasks: the one place that decides about units, levels and kinds of tasks.

Units: errors are relative to random guessing, and at most 1 (docs/decisions/019). So the share of wrong answers among 10, among
100, and the loss of a text are comparable, and a run that diverged is 1.

Seeds: effects of seeds are removed (study/pick/seed_effects.py), so that plans that ran with different seeds can be compared.

Levels: those that the data names; without names, every plan is its own level, or levels are estimated where plans are many. Plans of an
estimated level differ a little from task to task: the variance of that, beyond the noise of runs, widens the intervals of their means.

>>> from paredown.study.pick.priors import made_up_prior
>>> task_prior = TaskPrior.of(made_up_prior())
>>> task_prior.prior.num_tasks, len(task_prior.prior.levels)
(11, 30)
>>> random_guess_error("error", 10), round(random_guess_error("loss", 256), 2), random_guess_error("mine", 10)
(0.9, 5.55, None)

Kinds of tasks are those that EM finds, each with low, usual and high noise, and one for tasks unlike all prior ones: errors with a wide
spread, noisier runs, and plans that are alike only as far as their formats are. It is unlikely until the measurements are more unlikely
under all other kinds; then the posterior follows the measurements.

Plans that no prior task was trained under are predicted from similar plans: on a task, the error of a plan is a smooth function of
its features (study/pick/candidates.py), a Gaussian process about an unknown mean. So the error of a new plan is a weighted mean of those
of known levels (the weights add up to 1) plus a rest, whose covariance the process gives:

    a_new = W a + rest,      rest ~ N(0, C)

C is scaled so that 90 % of the levels, each predicted from the others, lie within their 90 % intervals. One length scale for all
features predicts as well as fitted ones (docs/log.md). The extension of the mixture is exact: measurements of new plans inform known
ones, and the other way round.

>>> points = np.linspace(0, 6, 7)[:, None]
>>> tasks = np.random.default_rng(0).random((20, 1)) * np.exp(points.T / 3)
>>> similarity = PlanSimilarity.of(points, tasks)
>>> weights, _ = similarity.weights(np.array([[2.5]]))
>>> bool(abs(weights @ np.exp(points[:, 0] / 3) - np.exp(2.5 / 3)) < 0.05), round(float(weights.sum()), 6)
(True, 1.0)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from paredown.errors import PriorError
from paredown.study.pick.mixture import MOST_LEVELS, LevelSums, Mixture, Posterior, find_levels, offsets, renumbered
from paredown.study.pick.posterior import Prior
from paredown.study.pick.prior_data import PriorData, pooled_noise
from paredown.study.pick.seed_effects import seed_variance_of, shared_of, variance_parts_of, without_seed_effects

Array = NDArray[np.float64]
UNKNOWN_SHARE = 0.03  # prior probability of a task unlike all prior ones
TOGETHER, APART, NOISIER = (
    0.25,
    0.12,
    4.0,
)  # of such a task: standard deviations of its mean and of its plans, relative to random guessing; factor on the noise of a run
LENGTH = 2.5  # of likeness, in bits of precision lost
SAME_FEATURE = 1e-9  # bits of precision: features that differ by less are equal
NUGGET = 0.01  # variance that features do not explain, relative to the explained one
MOST_POINTS = 64  # levels that new plans are predicted from
Z_90 = 1.645  # standard deviations to each side of a 90 % interval
WORST = 1.0  # random guessing
NOISE_QUANTILES, FEWEST_NOISES = (1 / 6, 1 / 2, 5 / 6), 4  # tasks of low, usual and high noise; fewest tasks to estimate them


def random_guess_error(metric: str, answers: int | None) -> float | None:
    """The error of random guessing in a metric, with equal odds for every answer; None where it is not known."""
    if answers is None or answers < 2:
        return None
    return {"error": 1 - 1 / answers, "loss": math.log(answers)}.get(metric)


@dataclass(frozen=True)
class TaskPrior:
    """The prior of a new task; `shares`: weight of each prior task in each kind, (tasks, kinds)."""

    prior_data: PriorData
    prior: Prior
    sums: LevelSums
    shares: Array

    @staticmethod
    def of(prior_data: PriorData) -> TaskPrior:
        """The prior from all tasks of `prior_data`."""
        has_diverged = prior_data.diverged > 0  # how likely that is counts apart from the errors of plans that train
        runs = np.where(has_diverged[..., None], np.nan, _scaled_without_seed_effects(prior_data))  # (tasks, plans, seeds)
        is_run = np.isfinite(runs)
        errors = np.where(is_run.any(axis=2), np.nansum(runs, axis=2) / np.maximum(is_run.sum(axis=2), 1), np.nan)
        if not np.isfinite(errors).any():
            raise PriorError(
                f"prior {prior_data.name!r} has no error in it: {len(prior_data.tasks)} tasks, {len(prior_data.plans)} plans."
            )
        levels = levels_of(prior_data, errors)
        plan_offsets, variances = offsets(errors, levels)
        if not any(plan.level for plan in prior_data.plans):
            variances = variances + _variance_within_levels(runs, errors - plan_offsets, levels)
        flat = (runs - plan_offsets[:, None]).reshape(len(runs), -1)
        sums = LevelSums.of(flat, np.repeat(levels, runs.shape[2]), int(levels.max()) + 1)
        sums = replace(sums, weights=data_set_weights(prior_data))
        fitted = _widened(Mixture.fitted(sums), float(sums.weights.sum()))
        weights, ratios = fitted.given(sums).weights, noise_ratios(prior_data)
        mixture = with_unknown_kind(with_noises(fitted, ratios))
        # in the unknown kind all tasks have equal weight
        weights = np.column_stack([np.repeat(weights, len(ratios), axis=1), np.ones(len(runs))])
        weights = weights / np.maximum(weights.sum(axis=0), 1e-12)
        divergence = has_diverged.sum(axis=0) / (1.0 + (prior_data.counts > 0).sum(axis=0))
        calm = calm_runs(prior_data)
        seeds = shared_of(calm), seed_variance_of(calm)
        prior = Prior(levels, plan_offsets, variances, mixture, len(runs), WORST, *seeds, divergence=divergence)
        return TaskPrior(prior_data, prior, sums, weights)

    def covering(self, columns: NDArray[np.intp], features: Array, points: Array) -> Prior:
        """The prior of the candidates: `columns` are theirs in the prior data, -1 for plans that it does not have.

        `features` are those of the candidates, `points` those of all plans of the prior (NaN: not known), from which new plans are
        predicted.
        """
        prior, is_new = self.prior, columns < 0
        levels = np.where(is_new, 0, prior.levels[columns])
        mixture = prior.mixture
        if is_new.any():
            levels[is_new] = mixture.means.shape[1] + np.arange(int(is_new.sum()))
            known, similarity = self.similarity(points)
            mixture = with_new_levels(mixture, similarity, features[is_new], known)
        mixture = with_likeness(mixture, self._level_features(points, features[is_new]))
        shift, variances = (np.where(is_new, 0.0, part[columns]) for part in (prior.offsets, prior.doubt))
        nearest = (likeness(features, points) * prior.divergence).max(axis=1, initial=0.0)
        divergence = np.where(is_new, nearest, prior.divergence[columns])
        prior = replace(prior, divergence=divergence, lossier=_lossier(features))
        return replace(prior, levels=levels, offsets=shift, doubt=variances, mixture=mixture)

    def _level_features(self, points: Array, new: Array) -> Array:
        """Features of all levels, those of new plans last: the mean of their plans' (NaN: not known), (levels, features)."""
        levels = self.prior.levels
        known = [points[(levels == level) & np.isfinite(points).all(axis=1)] for level in range(int(levels.max()) + 1)]
        rows = [part.mean(axis=0) if len(part) else np.full(points.shape[1], np.nan) for part in known]
        return np.concatenate([np.array(rows), new])

    def similarity(self, points: Array) -> tuple[NDArray[np.intp], PlanSimilarity]:
        """The levels with known features, and a Gaussian process over features; the features of a level are the mean of its plans'."""
        levels, is_known = self.prior.levels, np.isfinite(points).all(axis=1)
        known = np.unique(levels[is_known])
        if not len(known):
            raise PriorError(
                f"none of the {len(points)} plans of prior {self.prior_data.name!r} has features, which are needed to predict other plans."
            )
        known = known[np.linspace(0, len(known) - 1, min(len(known), MOST_POINTS)).astype(int)]
        level_points = np.array([points[is_known & (levels == level)].mean(axis=0) for level in known])
        tasks = self.prior.mixture.given(self.sums).moments()[0]
        return known, PlanSimilarity.of(level_points, tasks[:, known], self.sums.count[:, known] > 0)

    def used(self, posterior: Posterior) -> list[tuple[str, float]]:
        """(name, weight) of each prior task in the posterior, the largest first; the weights add up to 1."""
        weights = self.shares @ posterior.weights[0]
        return [(self.prior_data.tasks[i].name, float(weights[i])) for i in np.argsort(-weights, kind="stable")]


def scaled(prior_data: PriorData) -> Array:
    """All runs (tasks, plans, seeds) relative to random guessing, at most WORST; NaN where there is none."""
    runs = np.where(np.isfinite(prior_data.runs), prior_data.runs, np.nan)
    return np.minimum(runs / scales_of(prior_data)[:, None, None], WORST)


def scales_of(prior_data: PriorData) -> Array:
    """The error of random guessing, (tasks,); for a metric without one, the worst observed error."""
    runs = np.where(np.isfinite(prior_data.runs), prior_data.runs, -np.inf)
    worst = runs.max(axis=(1, 2), initial=-np.inf)
    observed = np.where((worst > 0) & (worst < np.inf), worst, 1.0)
    guesses = _random_guess_errors(prior_data)
    return np.array([guess if guess and guess > 0 else error for guess, error in zip(guesses, observed, strict=True)])


def noise_ratios(prior_data: PriorData) -> Array:
    """Noise variances of a task relative to the mean of all tasks, from the tasks on which plans ran more than once."""
    runs = calm_runs(prior_data)
    rest_variances = np.array(
        [parts.rest if parts.shared > 0 else np.nan for parts in map(variance_parts_of, runs)]
    )  # lifts have taken some freedom
    deviations = np.where(np.isfinite(rest_variances), np.sqrt(rest_variances), pooled_noise(runs))
    noise = np.where(np.isfinite(deviations), deviations, prior_data.noise / scales_of(prior_data)) ** 2
    known = noise[np.isfinite(noise) & (noise > 0)]
    if len(known) < FEWEST_NOISES:
        return np.ones(1)
    return np.quantile(known, NOISE_QUANTILES) / known.mean()


def _random_guess_errors(prior_data: PriorData) -> list[float | None]:
    return [task.blind or random_guess_error(task.metric, task.answers) for task in prior_data.tasks]


def _scaled_without_seed_effects(prior_data: PriorData) -> Array:
    """The runs of `scaled` without seed effects; one that is no better than random guessing is unmodified."""
    runs = scaled(prior_data)
    return np.where(runs >= WORST, runs, np.minimum(without_seed_effects(runs, is_calm(prior_data)), WORST))


def is_calm(prior_data: PriorData) -> NDArray[np.bool_]:
    """Which (tasks, plans) show noise and seed effects: seeds are known, and no run diverged or was as bad as random guessing."""
    # in a metric without an error of random guessing, WORST is only the worst run
    has_unit = np.array([bool(guess) for guess in _random_guess_errors(prior_data)])
    is_guessing = (scaled(prior_data) >= WORST).any(axis=2) & has_unit[:, None]
    return ~is_guessing & (prior_data.diverged == 0) & prior_data.has_seeds[:, None]


def calm_runs(prior_data: PriorData) -> Array:
    """The runs of `scaled` of the plans that `is_calm` selects, NaN elsewhere."""
    return np.where(is_calm(prior_data)[..., None], scaled(prior_data), np.nan)


def levels_of(prior_data: PriorData, errors: Array) -> NDArray[np.intp]:
    """The level of each plan: as named by the prior, else one level per plan, or estimated levels if those would be too many."""
    names = [plan.level or f"\0{i}" for i, plan in enumerate(prior_data.plans)]
    levels = renumbered(np.unique(names, return_inverse=True)[1])
    if levels.max() < MOST_LEVELS:
        return levels
    try:
        return find_levels(errors)
    except ModuleNotFoundError as error:
        plans = f"the {len(names)} plans of prior {prior_data.name!r} have no levels"
        raise PriorError(f"{plans}, and estimating them needs {error.name}: pip install 'paredown[search]'.") from None


def _variance_within_levels(runs: Array, errors: Array, levels: NDArray[np.intp]) -> Array:
    """Variance of plans about their level on a task, beyond the noise of runs (tasks, plans, seeds), (plans,): the median over tasks.

    Levels that were estimated join plans whose errors differ a little from task to task. `errors`: means of the runs, without offsets.
    It is 0 where no plan of a level ran twice.
    """
    sums, counts, found = LevelSums.of(errors, levels), np.isfinite(runs).sum(axis=2), np.zeros(int(levels.max()) + 1)
    squares = (sums.square - sums.total**2 / np.maximum(sums.count, 1.0)) / np.maximum(sums.count - 1, 1.0)
    for level in range(len(found)):
        own, noise = counts[:, levels == level], pooled_noise(runs[:, levels == level]) ** 2
        share = np.where(own > 0, 1 / np.maximum(own, 1), 0.0).sum(axis=1) / np.maximum((own > 0).sum(axis=1), 1)  # left in a mean
        beyond = (squares[:, level] - share * noise)[np.isfinite(noise) & (sums.count[:, level] > 1)]
        found[level] = max(0.0, float(np.median(beyond))) if len(beyond) else 0.0
    return found[levels]


def data_set_weights(prior_data: PriorData) -> Array:
    """How much each task counts, (tasks,): the superclasses of one data set, `data/1`, `data/2` and so on, count as one task together."""
    names = [(task.data.partition("/")[0], task.family) if "/" in task.data else task.name for task in prior_data.tasks]
    return np.array([1 / names.count(name) for name in names])


def _widened(mixture: Mixture, num_tasks: float) -> Mixture:
    """The mixture with the uncertainty of its means and covariances: a predictive variance of (1 + 1/n) n / (n - 2) for n tasks."""
    counts = np.maximum(mixture.shares * num_tasks, 1.0)
    return replace(mixture, spreads=mixture.spreads * ((1 + 1 / counts) * counts / np.maximum(counts - 2, 1.0))[:, None, None])


# --- kinds of tasks ----------------------------------------------------------------------------------------------------


def with_unknown_kind(mixture: Mixture) -> Mixture:
    """The mixture with one more kind at the end, for tasks unlike all prior ones."""
    mean = mixture.shares @ mixture.means
    spread = TOGETHER**2 + APART**2 * np.eye(len(mean))
    noise = np.full(len(mean), NOISIER**2 * float((mixture.shares @ mixture.noise).mean()))
    return Mixture(
        np.append(mixture.shares * (1 - UNKNOWN_SHARE), UNKNOWN_SHARE),
        np.concatenate([mixture.means, mean[None]]),
        np.concatenate([mixture.spreads, spread[None]]),
        np.concatenate([mixture.noise, noise[None]]),
    )


def with_likeness(mixture: Mixture, points: Array) -> Mixture:
    """The mixture, in whose last kind (tasks unlike all prior ones) plans with similar features (levels, features) have similar errors."""
    alike = likeness(points, points)
    np.fill_diagonal(alike, 1.0)
    spreads = mixture.spreads.copy()
    spreads[-1] = TOGETHER**2 + APART**2 * (alike + np.eye(len(points))) / 2  # as much by format as by plan
    return replace(mixture, spreads=spreads)


def with_noises(mixture: Mixture, ratios: Array) -> Mixture:
    """The mixture with a copy of each kind for each ratio of noise variances, because the noise of a new task is unknown too."""
    shares = np.repeat(mixture.shares, len(ratios)) / len(ratios)
    noise = (mixture.noise[:, None] * ratios[:, None]).reshape(len(shares), -1)
    means, spreads = (np.repeat(part, len(ratios), axis=0) for part in (mixture.means, mixture.spreads))
    return Mixture(shares, means, spreads, noise)


# --- plans that no prior task was trained under ------------------------------------------------------------------------


@dataclass(frozen=True)
class PlanSimilarity:
    """A Gaussian process of errors over features: `points` (levels, features), and the `scale` of the variance."""

    points: Array
    scale: float = 1.0

    @staticmethod
    def of(points: Array, tasks: Array, known: NDArray[np.bool_] | None = None) -> PlanSimilarity:
        """Scaled to the levels' errors (tasks, levels), each predicted from the others; `known`: those that were observed."""
        residual, inverse = PlanSimilarity(points)._left_out(tasks)
        ratios = (np.abs(residual) * np.sqrt(inverse))[known if known is not None else ...]
        factor = float(np.quantile(ratios, 0.9)) / Z_90 if ratios.size else 1.0
        return PlanSimilarity(points, max(factor, 1e-6) ** 2)

    def weights(self, points: Array) -> tuple[Array, Array]:
        """Weights (new plans, levels) that predict new plans from levels, and the covariance of the residuals (new plans, new plans)."""
        covariance = np.column_stack([likeness(points, self.points), np.ones(len(points))])
        solved = np.linalg.solve(self._system(), covariance.T).T.astype(float)
        rest = likeness(points, points) + NUGGET * np.eye(len(points)) - solved @ covariance.T
        return solved[:, : len(self.points)], self.scale * (rest + rest.T) / 2

    def _system(self) -> Array:
        """The linear system of the weights, with the multiplier of the constraint on their sum."""
        size = len(self.points)
        system = np.ones((size + 1, size + 1))
        system[:size, :size] = likeness(self.points, self.points) + NUGGET * np.eye(size)
        system[size, size] = 0.0
        return system

    def _left_out(self, tasks: Array) -> tuple[Array, Array]:
        """Residuals of each level when predicted from the others (tasks, levels), and the inverse of their variances, (levels,)."""
        inverse = np.linalg.pinv(self._system())[: len(self.points), : len(self.points)]
        precision = np.maximum(np.diagonal(inverse), 1e-12)
        return (tasks @ inverse) / precision, precision


def likeness(a: Array, b: Array) -> Array:
    """Correlation of the errors of plans with features (plans, features); 0 where features are not known (NaN)."""
    squares = (((a[:, None] - b[None]) / LENGTH) ** 2).sum(axis=-1)
    return np.exp(-0.5 * np.where(np.isfinite(squares), squares, np.inf))


def _lossier(points: Array) -> Array:
    """Likeness of plans with features (plans, features), where the first loses as much precision as the second or more, else 0."""
    is_lossier = (points[:, None] >= points[None] - SAME_FEATURE).all(axis=-1)
    found = np.where(is_lossier, likeness(points, points), 0.0)
    np.fill_diagonal(found, 1.0)
    return found


def with_new_levels(mixture: Mixture, similarity: PlanSimilarity, points: Array, known: NDArray[np.intp]) -> Mixture:
    """The mixture with new levels at these features after the others; `known`: the levels of `similarity`."""
    size, weights = mixture.means.shape[1], np.zeros((len(points), mixture.means.shape[1]))
    weights[:, known], rest = similarity.weights(points)
    whole = np.vstack([np.eye(size), weights])  # (levels and new ones, levels)
    spreads = whole @ mixture.spreads @ whole.T
    spreads[:, size:, size:] += rest
    noise = np.concatenate([mixture.noise, np.repeat(mixture.noise.mean(axis=1, keepdims=True), len(points), axis=1)], axis=1)
    return Mixture(mixture.shares, mixture.means @ whole.T, spreads, noise)
