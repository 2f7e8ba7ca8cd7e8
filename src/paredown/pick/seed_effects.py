"""What a seed does to all plans of a task: runs of one seed share their first weights and the order of their examples.

    run of plan j with seed s = mean of plan j + lift of seed s + rest,        lifts ~ N(0, t^2),  rest ~ N(0, r^2)

Plans that ran with different seeds differ by luck that has nothing to do with them. With Z the seeds of the runs, M what takes off the mean
of each plan's runs, and A = Z' M Z, t^2 and r^2 follow from the squares that seeds explain and leave (Henderson's method 3; a plan may
have any of the seeds, and where all have all it is the analysis of variance of a table):

    q = runs' M Z A^+ Z' M runs,    E q = trace(A) t^2 + rank(A) r^2,    E (runs' M runs - q) = (runs - plans - rank(A)) r^2

Then lifts are what they are expected to be, whatever the plans' means (best linear prediction), with ratio = t^2 / r^2:

    lifts = C Z' M runs,    C = (A + 1 / ratio)^-1,    variance of what is left of them = r^2 C

The place of a run among its plan's is its seed; NaN where there is none. Plans of which a run diverged tell nothing of lifts: to diverge is
no lift of a seed. Such runs stay where they are, and other runs of their seeds are as the other plans have them.

>>> runs = np.array([[[0.30, 0.40], [0.33, 0.42], [0.31, np.nan]]])
>>> without_seed_effects(runs).round(2).tolist()
[[[0.35, 0.35], [0.38, 0.37], [0.36, nan]]]
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
SMALLEST = 1e-12  # variance
MOST = 1e4  # that the ratio may be
RATIOS = np.concatenate([[0.0], np.geomspace(1e-3, MOST, 701)])  # steps of 2 %
NUM_DRAWS = 1000  # of what the squares of a task may be


class SeedSquares(NamedTuple):
    """That seeds explain beside plans, and that are left; how many each could be; and how often, in runs, the first have a lift in them."""

    seeds: float
    rest: float
    free_seeds: int
    free_rest: int
    lifts: float

    @property
    def runs(self) -> float:
        """Of each lift."""
        return self.lifts / max(self.free_seeds, 1)


class VarianceParts(NamedTuple):
    """Variances of lifts and of the rest; NaN where fewer than two plans ran with the same two seeds."""

    shared: float
    rest: float

    @property
    def ratio(self) -> float:
        """Of the two; 0 where they are not known."""
        return min(self.shared / max(self.rest, SMALLEST), MOST) if self.shared > 0 else 0.0


class SeedRun(NamedTuple):
    """An error of a plan, with a seed."""

    plan: int
    error: float
    seed: int = 0


class SeedEffects(NamedTuple):
    """Of each seed: what it adds to all runs, and what is left open of that (seeds, seeds), in variances of the rest."""

    size: Array
    doubt: Array


class RunsWithoutSeeds(NamedTuple):
    """Runs without the lifts of their seeds. `weights`: how much each tells, 1 where its seed is that of all. `common`: what is open of the
    lifts that all share, in variances of the rest."""

    errors: Array
    weights: Array
    common: float


def variance_parts_of(runs: Array) -> VarianceParts:
    """Of one task's runs (plans, seeds), by all plans that ran more than once."""
    found = squares_of(runs)
    if not found.free_seeds or not found.free_rest:
        return VarianceParts(np.nan, np.nan)
    rest = found.rest / found.free_rest
    return VarianceParts(max(0.0, (found.seeds - found.free_seeds * rest) / found.lifts), rest)


def squares_of(runs: Array) -> SeedSquares:
    """Of one task's runs (plans, seeds)."""
    again = runs[np.isfinite(runs).sum(axis=1) > 1]
    seen = np.isfinite(again)
    sizes = seen.sum(axis=1, keepdims=True)
    apart = np.where(seen, again - np.where(seen, again, 0.0).sum(axis=1, keepdims=True) / np.maximum(sizes, 1), 0.0)
    inner = np.diag(seen.sum(axis=0)) - (seen / sizes).T @ seen  # A
    rank, sums = int(np.linalg.matrix_rank(inner)), apart.sum(axis=0)
    explained = float(sums @ np.linalg.pinv(inner, hermitian=True) @ sums)
    return SeedSquares(
        explained, max(0.0, float((apart**2).sum()) - explained), rank, int(seen.sum()) - len(again) - rank, float(np.trace(inner))
    )


def seed_effects_of(runs: Sequence[SeedRun], ratio: float, num_seeds: int) -> SeedEffects:
    """Of the seeds 0, 1, .. of one task."""
    if ratio <= 0 or not runs:
        return SeedEffects(np.zeros(num_seeds), np.zeros((num_seeds, num_seeds)))
    plans, errors, seeds = (np.array(part) for part in zip(*runs, strict=True))
    names, places = np.unique(plans, return_inverse=True)
    counts = np.zeros((len(names), num_seeds))
    np.add.at(counts, (places, seeds), 1.0)
    sizes = counts.sum(axis=1)
    apart = errors - (np.bincount(places, errors) / sizes)[places]
    inner = np.diag(counts.sum(axis=0)) - (counts / sizes[:, None]).T @ counts  # Z' M Z
    doubt: Array = np.linalg.inv(inner + np.eye(num_seeds) / ratio)
    return SeedEffects(doubt @ np.bincount(seeds, apart, num_seeds), doubt)


def on_one_level(runs: Sequence[SeedRun], ratio: float, worst: float = np.inf) -> RunsWithoutSeeds:
    """A new task's runs, whatever their seeds are called. What is not known of a seed makes its runs tell less, beside the others.

    `worst`: the error of a run that diverged.
    """
    names, seeds = np.unique([run.seed for run in runs], return_inverse=True)
    errors = np.array([run.error for run in runs], dtype=float)
    moves = errors < worst
    shares = np.bincount(seeds[moves], minlength=len(names)) / max(int(moves.sum()), 1)
    lost = {run.plan for run in runs if run.error >= worst}
    calm = [run._replace(seed=int(seed)) for run, seed in zip(runs, seeds, strict=True) if run.plan not in lost]
    size, doubt = seed_effects_of(calm, ratio, len(names))
    across = doubt @ shares
    common = float(shares @ across)
    beside = np.maximum(np.diagonal(doubt) + common - 2 * across, 0.0)
    return RunsWithoutSeeds(errors - np.where(moves, size[seeds], 0.0), np.where(moves, 1 / (1 + beside[seeds]), 1.0), common)


def without_seed_effects(runs: Array, calm: NDArray[np.bool_] | None = None) -> Array:
    """Runs (tasks, plans, seeds) without the lifts of their seeds; those of a task that tells nothing of them stay as they are.

    `calm`: which (tasks, plans) tell of lifts; all unless given.
    """
    telling = runs if calm is None else np.where(calm[..., None], runs, np.nan)
    lifts, ratios = np.zeros((len(runs), 1, runs.shape[2])), [variance_parts_of(task).ratio for task in telling]
    for place in np.flatnonzero(ratios):
        lifts[place, 0] = seed_effects_of(runs_of_task(telling[place]), ratios[place], runs.shape[2]).size
    return runs - lifts


def runs_of_task(runs: Array) -> list[SeedRun]:
    """Those of one task (plans, seeds)."""
    return [
        SeedRun(int(plan), float(runs[plan, seed]), int(seed)) for plan, seed in zip(*np.nonzero(np.isfinite(runs)), strict=True)
    ]


def shared_of(runs: Array) -> float:
    """The ratio of all tasks (tasks, plans, seeds), each of which counts as much as any other; 0 where none tells it.

    A task's squares of seeds, over those of the rest and for each that is free, are F; with n runs of each lift, F / n is about the ratio,
    and F / (F + n) the share of seeds. The ratio is the one under which the mean share is what it is.
    """
    found = [one for one in map(squares_of, runs) if one.free_seeds and one.free_rest]
    if not found:
        return 0.0
    free, left, n = (
        np.array(part)[:, None] for part in zip(*((one.free_seeds, one.free_rest, one.runs) for one in found), strict=True)
    )
    dice = np.random.default_rng(0)
    drawn = dice.chisquare(free, (len(found), NUM_DRAWS)) / free / (dice.chisquare(left, (len(found), NUM_DRAWS)) / left)
    seen = np.array([[one.seeds] for one in found]) / free / np.maximum(np.array([[one.rest] for one in found]) / left, SMALLEST)
    place = bisect_left(RATIOS, _share(seen, n), key=lambda ratio: _share((1 + ratio * n) * drawn, n))
    return float(RATIOS[min(place, len(RATIOS) - 1)])


def _share(ratios: Array, n: Array) -> float:
    return float((ratios / (ratios + n)).mean())
