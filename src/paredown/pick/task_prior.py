"""From earlier tasks, as files have them, to what is believed about a new one: the one place where units, levels and families are decided.

Units: an error is in parts of what a blind guess has, and at most 1 (docs/decisions/019). So the share of wrong answers among 10, among
100, and the loss of a text are numbers of one kind, and a run that diverged is 1.

Seeds: what a seed does to all plans of a task is taken off (pick/seed_effects.py), and plans that ran with other seeds can be compared.

Levels: those that a prior names; where it names none, every plan is its own, or levels are found where plans are many.

>>> from paredown.pick.priors import made_up_prior
>>> learned = TaskPrior.of(made_up_prior(), family="vit")
>>> learned.family, learned.prior.num_tasks, len(learned.prior.levels)
('vit', 11, 30)
>>> blind_error("error", 10), round(blind_error("loss", 256), 2), blind_error("mine", 10)
(0.9, 5.55, None)

Kinds of tasks beside those that EM finds: the tasks of one family of models, and tasks like none before.

The kind of a family has the mean of its tasks, drawn to that of all by as much as OF_ALL tasks weigh, and their spread, drawn to that of
all. A new task is of it with probability n / (n + DOUBT), n being the number of its tasks, else as all tasks are; what is measured decides
from then on. A family that no earlier task has starts from the one that shares most traits with it, with more doubt.

A last kind is for tasks like none before: plans of any error, far less tied to each other, and noisier runs. It is unlikely, until what is
measured is more unlikely under all others; then measurements speak for themselves.

>>> nearest("vit", ["cnn", "gpt"]), nearest("cnn", ["cnn", "gpt"]), nearest("unknown", ["cnn"])
('gpt', 'cnn', '')

Plans that no earlier task was trained under, judged by plans that are like them.

On a task, the error of a plan is a smooth function of its features (`pick/candidates.py`): a Gaussian process about an unknown
mean. So that of
a new plan is a weighted mean of those of known levels (weights add up to 1), and what is left over, of which the process says how large:

    a_new = W a + rest,      rest ~ N(0, C)

How far plans are alike is learned from earlier tasks: every level in turn is predicted from the others, and the lengths are taken that
make them most likely; C is scaled so that nine levels of ten lie within their bands. A mixture is extended by that, exactly: measurements
of new plans teach about old ones and the other way round.

>>> points = np.linspace(0, 6, 7)[:, None]
>>> tasks = np.random.default_rng(0).random((20, 1)) * np.exp(points.T / 3)
>>> likeness = PlanSimilarity.of(points, tasks)
>>> weights, _ = likeness.weights(np.array([[2.5]]))
>>> bool(abs(weights @ np.exp(points[:, 0] / 3) - np.exp(2.5 / 3)) < 0.05), round(float(weights.sum()), 6)
(True, 1.0)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from paredown.errors import PriorError
from paredown.pick.mixture import (
    MOST_LEVELS,
    STRENGTH,
    LevelSums,
    Mixture,
    Posterior,
    as_levels,
    find_levels,
    find_twins,
    offsets,
    without_twins,
)
from paredown.pick.posterior import Prior
from paredown.pick.prior_data import PriorData, pooled_noise
from paredown.pick.seed_effects import shared_of, variance_parts_of, without_seed_effects

Array = NDArray[np.float64]
OF_ALL = 2.0
DOUBT, OTHER_DOUBT = 4.0, 12.0  # of one's own family, of another one
STRANGE = 0.03  # the share of tasks like none before
TOGETHER, APART, NOISIER = (
    0.25,
    0.12,
    4.0,
)  # deviations of such a task and of its plans, in parts of a blind guess; of runs, times others'
TRAITS = MappingProxyType(
    {
        "cnn": {"convolutions", "pictures", "batch norms"},
        "vit": {"attention", "layer norms", "residuals", "pictures"},
        "gpt": {"attention", "layer norms", "residuals", "tokens"},
        "bert": {"attention", "layer norms", "residuals", "tokens"},
        "unet": {"convolutions", "pictures", "group norms"},
        "mlp": {"linear layers"},
        "lstm": {"tokens", "linear layers"},
    }
)


def nearest(family: str, known: Sequence[str]) -> str:
    """The known family that shares most traits with this one; "" where none shares any."""
    if family in known:
        return family
    own = TRAITS.get(family, set())
    shared = {other: len(own & TRAITS.get(other, set())) for other in dict.fromkeys(known)}
    best = max(shared, key=lambda other: shared[other], default="")
    return best if best and shared[best] else ""


def with_unknown_kind(mixture: Mixture) -> Mixture:
    """The mixture and, last, the kind of tasks like none before."""
    mean = mixture.shares @ mixture.means
    spread = TOGETHER**2 + APART**2 * np.eye(len(mean))
    noise = np.full(len(mean), NOISIER**2 * float((mixture.shares @ mixture.noise).mean()))
    return _joined(mixture, STRANGE, mean, spread, noise)


def with_noises(mixture: Mixture, ratios: Array) -> Mixture:
    """Each kind once for each of these ratios of its noise, variances: how noisy runs of a task are is no more known than its kind."""
    shares = np.repeat(mixture.shares, len(ratios)) / len(ratios)
    noise = (mixture.noise[:, None] * ratios[:, None]).reshape(len(shares), -1)
    means, spreads = (np.repeat(part, len(ratios), axis=0) for part in (mixture.means, mixture.spreads))
    return Mixture(shares, means, spreads, noise)


def with_family(mixture: Mixture, sums: LevelSums, is_of: NDArray[np.bool_], *, is_own: bool = True) -> Mixture:
    """The mixture and, last, the kind of the tasks `is_of`; without it where that are all tasks, or none."""
    count = int(is_of.sum())
    if not count or count == len(is_of):
        return mixture
    share = count / (count + (DOUBT if is_own else OTHER_DOUBT))
    return _joined(mixture, share, *_family(mixture, sums.rows(is_of), count), mixture.shares @ mixture.noise)


def _joined(mixture: Mixture, share: float, mean: Array, spread: Array, noise: Array) -> Mixture:
    """With a kind more."""
    return Mixture(
        np.append(mixture.shares * (1 - share), share),
        np.concatenate([mixture.means, mean[None]]),
        np.concatenate([mixture.spreads, spread[None]]),
        np.concatenate([mixture.noise, noise[None]]),
    )


def _family(mixture: Mixture, sums: LevelSums, count: int) -> tuple[Array, Array]:
    """Mean and spread of the family's tasks; the spread has the doubt about the mean in it."""
    nobody = LevelSums(*(np.zeros((1, mixture.means.shape[1])) for _ in range(3)))
    middle, whole = (part[0] for part in mixture.given(nobody).moments())
    means, spreads = mixture.given(sums).moments()
    mean = (means.sum(axis=0) + OF_ALL * middle) / (count + OF_ALL)
    apart = means - mean
    strength = max(STRENGTH, float(len(mean) - count))
    spread = (apart.T @ apart + spreads.sum(axis=0) + strength * whole) / (count + strength)
    return mean, spread * (1 + 1 / (count + OF_ALL))


# --- Plans that no earlier task was trained under, judged by plans that are like them ---

LENGTHS = (1.0, 2.5, 6.0, 15.0)  # in bits lost: how far apart plans are that tell little of each other
NUGGETS = (1e-3, 1e-2, 1e-1)  # what features do not say, in parts of what they say
MOST_POINTS = 64  # levels that lengths are learned from
NINE_OF_TEN = 1.645


@dataclass(frozen=True)
class PlanSimilarity:
    """How errors go with features: `points` (levels, features) of known levels, a length for each feature, the nugget and the scale."""

    points: Array
    lengths: Array
    nugget: float
    scale: float

    @staticmethod
    def of(points: Array, tasks: Array, known: NDArray[np.bool_] | None = None) -> PlanSimilarity:
        """From levels' errors (tasks, levels); `known`: those that were observed."""
        known = np.ones(tasks.shape, dtype=bool) if known is None else known
        best, least = PlanSimilarity(points, np.full(points.shape[1], LENGTHS[1]), NUGGETS[1], 1.0), np.inf
        for lengths, nugget in _tried(points):
            trial = PlanSimilarity(points, lengths, nugget, 1.0)
            apart, inverse = trial._left_out(tasks)
            squares = np.where(known, apart**2 * inverse, 0.0).sum() / max(int(known.sum()), 1)
            score = np.log(max(squares, 1e-300)) - np.log(inverse).mean()
            if score < least:
                best, least = trial, score
        apart, inverse = best._left_out(tasks)
        ratios = np.abs(apart) * np.sqrt(inverse)
        ninth = float(np.quantile(ratios[known], 0.9)) / NINE_OF_TEN if known.any() else 1.0
        return PlanSimilarity(points, best.lengths, best.nugget, max(ninth, 1e-6) ** 2)

    def weights(self, points: Array) -> tuple[Array, Array]:
        """W (new, levels), and the covariance of what is left over (new, new)."""
        across = np.column_stack([self._kernel(points, self.points), np.ones(len(points))])
        solved = np.linalg.solve(self._system(), across.T).T.astype(float)
        rest = self._kernel(points, points) + self.nugget * np.eye(len(points)) - solved @ across.T
        return solved[:, : len(self.points)], self.scale * (rest + rest.T) / 2

    def _kernel(self, a: Array, b: Array) -> Array:
        apart = ((a[:, None] - b[None]) / self.lengths) ** 2
        return np.exp(-0.5 * apart.sum(axis=-1))

    def _system(self) -> Array:
        """Of the weights, with the multiplier of their sum."""
        size = len(self.points)
        system = np.ones((size + 1, size + 1))
        system[:size, :size] = self._kernel(self.points, self.points) + self.nugget * np.eye(size)
        system[size, size] = 0.0
        return system

    def _left_out(self, tasks: Array) -> tuple[Array, Array]:
        """Each level less what the others say (tasks, levels), and one over its variance, (levels,)."""
        inverse = np.linalg.pinv(self._system())[: len(self.points), : len(self.points)]
        ones = np.maximum(np.diagonal(inverse), 1e-12)
        return (tasks @ inverse) / ones, ones


def _tried(points: Array) -> Iterator[tuple[Array, float]]:
    """Lengths of features that differ at all, in one group where they are many, and nuggets."""
    differs = np.flatnonzero(np.ptp(points, axis=0) > 1e-9)
    groups = [[i] for i in differs] if len(differs) <= 2 else [list(differs[:1]), list(differs[1:])]
    for chosen in product(LENGTHS, repeat=len(groups)):
        lengths = np.full(points.shape[1], LENGTHS[1])
        for length, group in zip(chosen, groups, strict=True):
            lengths[group] = length
        for nugget in NUGGETS:
            yield lengths, nugget


def with_new_levels(mixture: Mixture, likeness: PlanSimilarity, points: Array, known: NDArray[np.intp]) -> Mixture:
    """The mixture with new levels behind the others, at these features; `known`: the levels that `likeness` is about."""
    size, weights = mixture.means.shape[1], np.zeros((len(points), mixture.means.shape[1]))
    weights[:, known], rest = likeness.weights(points)
    whole = np.vstack([np.eye(size), weights])  # (levels and new ones, levels)
    spreads = whole @ mixture.spreads @ whole.T
    spreads[:, size:, size:] += rest
    noise = np.concatenate([mixture.noise, np.repeat(mixture.noise.mean(axis=1, keepdims=True), len(points), axis=1)], axis=1)
    return Mixture(mixture.shares, mixture.means @ whole.T, spreads, noise)


# --- From earlier tasks, as files have them, to what is believed about a new one ---

WORST = 1.0  # a blind guess
NOISE_QUANTILES, FEWEST_NOISES = (1 / 6, 1 / 2, 5 / 6), 4  # a quiet task, a usual one and a noisy one; tasks that tell them apart


def blind_error(metric: str, answers: int | None) -> float | None:
    """The error of a guess that knows nothing, by the name of the metric; None where that is not known."""
    if answers is None or answers < 2:
        return None
    return {"error": 1 - 1 / answers, "loss": math.log(answers)}.get(metric)


@dataclass(frozen=True)
class TaskPrior:
    """What earlier tasks teach about a task of some family.

    `wanted`: the new task's family; `family`: the one whose tasks are a kind of their own, "" where none is. `shares`: how much each
    earlier task weighs in each kind, (tasks, kinds). `twins`: for each plan the first that came to the same runs, (plans,).
    """

    earlier: PriorData
    prior: Prior
    wanted: str
    family: str
    sums: LevelSums
    shares: Array
    twins: NDArray[np.intp]

    @staticmethod
    def of(earlier: PriorData, family: str = "", *, num_kinds: int = 2) -> TaskPrior:
        """From all of its tasks; `family`: that of the new one."""
        runs = _level(earlier)  # (tasks, plans, seeds)
        seen = np.isfinite(runs)
        errors = np.where(seen.any(axis=2), np.nansum(runs, axis=2) / np.maximum(seen.sum(axis=2), 1), np.nan)
        if not np.isfinite(errors).any():
            raise PriorError(
                f"prior {earlier.name!r} has no number to learn from: {len(earlier.tasks)} tasks, {len(earlier.plans)} plans."
            )
        levels = levels_of(earlier, errors)
        apart, doubt = offsets(errors, levels)
        twins = find_twins(earlier.runs, levels)
        flat = (without_twins(runs, twins) - apart[:, None]).reshape(len(runs), -1)
        sums = LevelSums.of(flat, np.repeat(levels, runs.shape[2]), int(levels.max()) + 1)
        fitted = _widened(Mixture.fitted(sums, num_kinds), len(runs))
        near = nearest(family, [task.family for task in earlier.tasks])
        is_of = np.array([bool(near) and task.family == near for task in earlier.tasks])
        with_own = with_family(fitted, sums, is_of, is_own=near == family)
        weights = fitted.given(sums).weights
        if has_own := len(with_own.shares) > len(fitted.shares):
            weights = np.column_stack([weights, is_of])
        ratios = noise_ratios(earlier)
        mixture = with_unknown_kind(with_noises(with_own, ratios))
        weights = np.column_stack([np.repeat(weights, len(ratios), axis=1), np.ones(len(runs))])  # to a stranger all tell alike
        prior = Prior(levels, apart, doubt, mixture, len(runs), WORST, shared_of(calm_runs(earlier)))
        return TaskPrior(
            earlier, prior, family, near if has_own else "", sums, weights / np.maximum(weights.sum(axis=0), 1e-12), twins
        )

    def covering(self, columns: NDArray[np.intp], features: Array, points: Array) -> Prior:
        """The prior of plans to choose from: `columns` are those of the earlier tasks' plans, -1 for plans that are none of them.

        `features` are of the plans to choose from, `points` of all earlier plans (NaN: not known), by which the others are judged.
        """
        prior, is_new = self.prior, columns < 0
        levels = np.where(is_new, 0, prior.levels[columns])
        mixture = prior.mixture
        if is_new.any():
            levels[is_new] = mixture.means.shape[1] + np.arange(int(is_new.sum()))
            known, likeness = self.likeness(points)
            mixture = with_new_levels(mixture, likeness, features[is_new], known)
        shift, doubt = (np.where(is_new, 0.0, part[columns]) for part in (prior.offsets, prior.doubt))
        return replace(prior, levels=levels, offsets=shift, doubt=doubt, mixture=mixture)

    def likeness(self, points: Array) -> tuple[NDArray[np.intp], PlanSimilarity]:
        """The levels whose features are known, and how errors go with features; a level is where the mean of its plans is."""
        levels, is_known = self.prior.levels, np.isfinite(points).all(axis=1)
        known = np.unique(levels[is_known])
        if not len(known):
            raise PriorError(
                f"none of the {len(points)} plans of prior {self.earlier.name!r} has features: others cannot be judged by them."
            )
        known = known[np.linspace(0, len(known) - 1, min(len(known), MOST_POINTS)).astype(int)]
        places = np.array([points[is_known & (levels == level)].mean(axis=0) for level in known])
        tasks = self.prior.mixture.given(self.sums).moments()[0]
        return known, PlanSimilarity.of(places, tasks[:, known], self.sums.count[:, known] > 0)

    def used(self, belief: Posterior) -> list[tuple[str, float]]:
        """How much each earlier task weighs in what is believed, the most first; they add up to 1."""
        weights = self.shares @ belief.weights[0]
        return [(self.earlier.tasks[i].name, float(weights[i])) for i in np.argsort(-weights, kind="stable")]


def scaled(earlier: PriorData) -> Array:
    """All runs (tasks, plans, seeds) in parts of a blind guess's error, at most WORST; NaN where there is none."""
    runs = np.where(np.isfinite(earlier.runs), earlier.runs, np.nan)
    return np.minimum(runs / scales_of(earlier)[:, None, None], WORST)


def scales_of(earlier: PriorData) -> Array:
    """The error of a blind guess, (tasks,); of a metric of one's own the worst that was seen."""
    runs = np.where(np.isfinite(earlier.runs), earlier.runs, np.nan)
    blind = _blind(earlier)
    tops = np.where(np.isnan(runs), -np.inf, runs).max(
        axis=(1, 2), initial=-np.inf
    )  # a metric of one's own: the worst that was seen
    return np.array([one if one and one > 0 else top if 0 < top < np.inf else 1.0 for one, top in zip(blind, tops, strict=True)])


def noise_ratios(earlier: PriorData) -> Array:
    """How the noise of a task may differ from that of all, as variances: by the tasks of which plans ran more than once."""
    calm = calm_runs(earlier)
    rests = np.array(
        [part.rest if part.shared > 0 else np.nan for part in map(variance_parts_of, calm)]
    )  # lifts have taken some freedom
    found = np.where(np.isfinite(rests), np.sqrt(rests), pooled_noise(calm))
    noise = np.where(np.isfinite(found), found, earlier.noise / scales_of(earlier)) ** 2
    known = noise[np.isfinite(noise) & (noise > 0)]
    if len(known) < FEWEST_NOISES:
        return np.ones(1)
    return np.quantile(known, NOISE_QUANTILES) / known.mean()


def _blind(earlier: PriorData) -> list[float | None]:
    return [task.blind or blind_error(task.metric, task.answers) for task in earlier.tasks]


def _level(earlier: PriorData) -> Array:
    """All runs as `scaled` has them, without the lifts of their seeds; one that is no better than a blind guess stays that."""
    runs = scaled(earlier)
    return np.where(runs >= WORST, runs, np.minimum(without_seed_effects(runs, is_calm(earlier)), WORST))


def is_calm(earlier: PriorData) -> NDArray[np.bool_]:
    """Which (tasks, plans) tell of noise and lifts: no run diverged or was no better than a blind guess, and their seeds are known."""
    has_unit = np.array([bool(one) for one in _blind(earlier)])  # of a metric of one's own the worst run is no blind guess
    lost = (scaled(earlier) >= WORST).any(axis=2) & has_unit[:, None]
    return ~lost & (earlier.diverged == 0) & earlier.has_seeds[:, None]


def calm_runs(earlier: PriorData) -> Array:
    """Those of calm plans, as `scaled` has them."""
    return np.where(is_calm(earlier)[..., None], scaled(earlier), np.nan)


def levels_of(earlier: PriorData, errors: Array) -> NDArray[np.intp]:
    """A level for each plan: by name, or else each by itself; found where that would be too many."""
    names = [plan.level or f"\0{i}" for i, plan in enumerate(earlier.plans)]
    levels = as_levels(np.unique(names, return_inverse=True)[1])
    if levels.max() < MOST_LEVELS:
        return levels
    try:
        return find_levels(errors)
    except ModuleNotFoundError as error:
        plans = f"the {len(names)} plans of prior {earlier.name!r} have no levels"
        raise PriorError(f"{plans}, and to find some needs {error.name}: pip install 'paredown[search]'.") from None


def _widened(mixture: Mixture, num_tasks: int) -> Mixture:
    """With what n tasks leave open of a kind's mean and spread: the next one of n draws has (1 + 1/n) n / (n - 2) of their variance."""
    counts = np.maximum(mixture.shares * num_tasks, 1.0)
    return replace(mixture, spreads=mixture.spreads * ((1 + 1 / counts) * counts / np.maximum(counts - 2, 1.0))[:, None, None])
