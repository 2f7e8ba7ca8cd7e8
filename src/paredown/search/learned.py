"""From earlier tasks, as files have them, to what is believed about a new one: the one place where units, levels and families are decided.

Units: an error is in parts of what a blind guess has, and at most 1 (docs/decisions/019). So the share of wrong answers among 10, among
100, and the loss of a text are numbers of one kind, and a run that diverged is 1.

Seeds: what a seed does to all plans of a task is taken off (search/seeds.py), and plans that ran with other seeds can be compared.

Levels: those that a prior names; where it names none, every plan is its own, or levels are found where plans are many.

>>> from paredown.search.earlier_made import made_up
>>> learned = Learned.of(made_up(), family="vit")
>>> learned.family, learned.prior.num_tasks, len(learned.prior.levels)
('vit', 11, 30)
>>> blind_error("error", 10), round(blind_error("loss", 256), 2), blind_error("mine", 10)
(0.9, 5.55, None)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from paredown.errors import PriorError
from paredown.search.earlier import Earlier, pooled_noise
from paredown.search.families import nearest, with_family, with_noises, with_strangers
from paredown.search.grouping import MOST_LEVELS, as_levels, find_levels, find_twins, offsets, once
from paredown.search.mixture import Belief, Mixture, Sums
from paredown.search.pooled import Prior
from paredown.search.seeds import levelled, parts_of, shared_of
from paredown.search.unseen import MOST_POINTS, Likeness, extended

Array = NDArray[np.float64]
WORST = 1.0  # a blind guess
NOISE_QUANTILES, FEWEST_NOISES = (1 / 6, 1 / 2, 5 / 6), 4  # a quiet task, a usual one and a noisy one; tasks that tell them apart


def blind_error(metric: str, answers: int | None) -> float | None:
    """The error of a guess that knows nothing, by the name of the metric; None where that is not known."""
    if answers is None or answers < 2:
        return None
    return {"error": 1 - 1 / answers, "loss": math.log(answers)}.get(metric)


@dataclass(frozen=True)
class Learned:
    """What earlier tasks teach about a task of some family.

    `wanted`: the new task's family; `family`: the one whose tasks are a kind of their own, "" where none is. `shares`: how much each
    earlier task weighs in each kind, (tasks, kinds). `twins`: for each plan the first that came to the same runs, (plans,).
    """

    earlier: Earlier
    prior: Prior
    wanted: str
    family: str
    sums: Sums
    shares: Array
    twins: NDArray[np.intp]

    @staticmethod
    def of(earlier: Earlier, family: str = "", *, num_kinds: int = 2) -> Learned:
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
        flat = (once(runs, twins) - apart[:, None]).reshape(len(runs), -1)
        sums = Sums.of(flat, np.repeat(levels, runs.shape[2]), int(levels.max()) + 1)
        fitted = _widened(Mixture.fitted(sums, num_kinds), len(runs))
        near = nearest(family, [task.family for task in earlier.tasks])
        is_of = np.array([bool(near) and task.family == near for task in earlier.tasks])
        with_own = with_family(fitted, sums, is_of, is_own=near == family)
        weights = fitted.given(sums).weights
        if has_own := len(with_own.shares) > len(fitted.shares):
            weights = np.column_stack([weights, is_of])
        ratios = noise_ratios(earlier)
        mixture = with_strangers(with_noises(with_own, ratios))
        weights = np.column_stack([np.repeat(weights, len(ratios), axis=1), np.ones(len(runs))])  # to a stranger all tell alike
        prior = Prior(levels, apart, doubt, mixture, len(runs), WORST, shared_of(calm_runs(earlier)))
        return Learned(
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
            mixture = extended(mixture, likeness, features[is_new], known)
        shift, doubt = (np.where(is_new, 0.0, part[columns]) for part in (prior.offsets, prior.doubt))
        return replace(prior, levels=levels, offsets=shift, doubt=doubt, mixture=mixture)

    def likeness(self, points: Array) -> tuple[NDArray[np.intp], Likeness]:
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
        return known, Likeness.of(places, tasks[:, known], self.sums.count[:, known] > 0)

    def used(self, belief: Belief) -> list[tuple[str, float]]:
        """How much each earlier task weighs in what is believed, the most first; they add up to 1."""
        weights = self.shares @ belief.weights[0]
        return [(self.earlier.tasks[i].name, float(weights[i])) for i in np.argsort(-weights, kind="stable")]


def scaled(earlier: Earlier) -> Array:
    """All runs (tasks, plans, seeds) in parts of a blind guess's error, at most WORST; NaN where there is none."""
    runs = np.where(np.isfinite(earlier.runs), earlier.runs, np.nan)
    return np.minimum(runs / scales_of(earlier)[:, None, None], WORST)


def scales_of(earlier: Earlier) -> Array:
    """The error of a blind guess, (tasks,); of a metric of one's own the worst that was seen."""
    runs = np.where(np.isfinite(earlier.runs), earlier.runs, np.nan)
    blind = _blind(earlier)
    tops = np.where(np.isnan(runs), -np.inf, runs).max(
        axis=(1, 2), initial=-np.inf
    )  # a metric of one's own: the worst that was seen
    return np.array([one if one and one > 0 else top if 0 < top < np.inf else 1.0 for one, top in zip(blind, tops, strict=True)])


def noise_ratios(earlier: Earlier) -> Array:
    """How the noise of a task may differ from that of all, as variances: by the tasks of which plans ran more than once."""
    calm = calm_runs(earlier)
    rests = np.array([part.rest if part.shared > 0 else np.nan for part in map(parts_of, calm)])  # lifts have taken some freedom
    found = np.where(np.isfinite(rests), np.sqrt(rests), pooled_noise(calm))
    noise = np.where(np.isfinite(found), found, earlier.noise / scales_of(earlier)) ** 2
    known = noise[np.isfinite(noise) & (noise > 0)]
    if len(known) < FEWEST_NOISES:
        return np.ones(1)
    return np.quantile(known, NOISE_QUANTILES) / known.mean()


def _blind(earlier: Earlier) -> list[float | None]:
    return [task.blind or blind_error(task.metric, task.answers) for task in earlier.tasks]


def _level(earlier: Earlier) -> Array:
    """All runs as `scaled` has them, without the lifts of their seeds; one that is no better than a blind guess stays that."""
    runs = scaled(earlier)
    return np.where(runs >= WORST, runs, np.minimum(levelled(runs, is_calm(earlier)), WORST))


def is_calm(earlier: Earlier) -> NDArray[np.bool_]:
    """Which (tasks, plans) tell of noise and lifts: no run diverged or was no better than a blind guess, and their seeds are known."""
    has_unit = np.array([bool(one) for one in _blind(earlier)])  # of a metric of one's own the worst run is no blind guess
    lost = (scaled(earlier) >= WORST).any(axis=2) & has_unit[:, None]
    return ~lost & (earlier.diverged == 0) & earlier.has_seeds[:, None]


def calm_runs(earlier: Earlier) -> Array:
    """Those of calm plans, as `scaled` has them."""
    return np.where(is_calm(earlier)[..., None], scaled(earlier), np.nan)


def levels_of(earlier: Earlier, errors: Array) -> NDArray[np.intp]:
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
