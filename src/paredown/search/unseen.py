"""Plans that no earlier task was trained under, judged by plans that are like them.

On a task, the error of a plan is a smooth function of its features (`features.py`): a Gaussian process about an unknown mean. So that of
a new plan is a weighted mean of those of known levels (weights add up to 1), and what is left over, of which the process says how large:

    a_new = W a + rest,      rest ~ N(0, C)

How far plans are alike is learned from earlier tasks: every level in turn is predicted from the others, and the lengths are taken that
make them most likely; C is scaled so that nine levels of ten lie within their bands. A mixture is extended by that, exactly: measurements
of new plans teach about old ones and the other way round.

>>> points = np.linspace(0, 6, 7)[:, None]
>>> tasks = np.random.default_rng(0).random((20, 1)) * np.exp(points.T / 3)
>>> likeness = Likeness.of(points, tasks)
>>> weights, _ = likeness.weights(np.array([[2.5]]))
>>> bool(abs(weights @ np.exp(points[:, 0] / 3) - np.exp(2.5 / 3)) < 0.05), round(float(weights.sum()), 6)
(True, 1.0)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from paredown.search.mixture import Mixture

Array = NDArray[np.float64]
LENGTHS = (1.0, 2.5, 6.0, 15.0)  # in bits lost: how far apart plans are that tell little of each other
NUGGETS = (1e-3, 1e-2, 1e-1)  # what features do not say, in parts of what they say
MOST_POINTS = 64  # levels that lengths are learned from
NINE_OF_TEN = 1.645


@dataclass(frozen=True)
class Likeness:
    """How errors go with features: `points` (levels, features) of known levels, a length for each feature, the nugget and the scale."""

    points: Array
    lengths: Array
    nugget: float
    scale: float

    @staticmethod
    def of(points: Array, tasks: Array, known: NDArray[np.bool_] | None = None) -> Likeness:
        """From levels' errors (tasks, levels); `known`: those that were observed."""
        known = np.ones(tasks.shape, dtype=bool) if known is None else known
        best, least = Likeness(points, np.full(points.shape[1], LENGTHS[1]), NUGGETS[1], 1.0), np.inf
        for lengths, nugget in _tried(points):
            trial = Likeness(points, lengths, nugget, 1.0)
            apart, inverse = trial._left_out(tasks)
            squares = np.where(known, apart**2 * inverse, 0.0).sum() / max(int(known.sum()), 1)
            score = np.log(max(squares, 1e-300)) - np.log(inverse).mean()
            if score < least:
                best, least = trial, score
        apart, inverse = best._left_out(tasks)
        ratios = np.abs(apart) * np.sqrt(inverse)
        ninth = float(np.quantile(ratios[known], 0.9)) / NINE_OF_TEN if known.any() else 1.0
        return Likeness(points, best.lengths, best.nugget, max(ninth, 1e-6) ** 2)

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


def extended(mixture: Mixture, likeness: Likeness, points: Array, known: NDArray[np.intp]) -> Mixture:
    """The mixture with new levels behind the others, at these features; `known`: the levels that `likeness` is about."""
    size, weights = mixture.means.shape[1], np.zeros((len(points), mixture.means.shape[1]))
    weights[:, known], rest = likeness.weights(points)
    whole = np.vstack([np.eye(size), weights])  # (levels and new ones, levels)
    spreads = whole @ mixture.spreads @ whole.T
    spreads[:, size:, size:] += rest
    noise = np.concatenate([mixture.noise, np.repeat(mixture.noise.mean(axis=1, keepdims=True), len(points), axis=1)], axis=1)
    return Mixture(mixture.shares, mixture.means @ whole.T, spreads, noise)
