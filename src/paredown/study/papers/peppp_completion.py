"""Complete the gaps of PEPPP's matrix of errors (tasks, plans).

    minimize  1/2 sum over observed (i, j) of (Z_ij - E_ij)^2 / p_ij  +  penalty * (sum of Z's singular values),  rank(Z) <= rank

p_ij is the probability that the entry was observed: 1 for all, unless cheap plans were tried more often. A proximal gradient step
shrinks the singular values (soft-impute) and clips to the box; momentum is reset whenever it points uphill. Singular vectors are
carried from step to step by one product each; the last steps are full decompositions, unless the matrix is large. With a bound on
the rank there is more than one minimum: the result is the one that is reached from 0.

>>> gaps = np.outer([1.0, 2.0, 3.0, 4.0], [0.1, 0.2, 0.15])
>>> gaps[1, 2] = np.nan
>>> completed = complete(gaps, rank=1, penalty=1e-4)
>>> completed.is_converged, round(float(completed.values[1, 2]), 2)
(True, 0.3)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from paredown.errors import PlanError

Array = NDArray[np.float64]
# Singular vectors carried beyond the rank. On PEPPP's matrices 10 of them reach the lowest minimum on average (8.2202; with 5, or with
# full decompositions for the first steps, 8.2208 and 8.2217) in the shortest time.
NUM_SPARE = 10
LARGE = 100_000  # entries above which there is no full decomposition


@dataclass(frozen=True)
class Completed:
    """Holds a completed matrix of errors, the steps that it took, and `residual`, the relative change in the last of them."""

    values: Array
    num_steps: int
    residual: float
    is_converged: bool


@dataclass(frozen=True)
class Completion:
    """Holds the parameters of matrix completion, such as its rank and the bounds of errors (`box`); defaults are the paper's."""

    rank: int = 5
    penalty: float = 0.1
    box: tuple[float, float] = (0.0, 1.0)
    tolerance: float = 1e-6
    max_steps: int = 20_000


def complete(errors: Array, *, propensities: Array | None = None, **how: float) -> Completed:
    """Return `errors` with its NaNs filled in; `propensities`: probabilities that entries are observed, `how`: fields of `Completion`."""
    options = Completion(**how)  # pyright: ignore[reportArgumentType]
    is_known = np.isfinite(errors)
    if errors.ndim != 2 or not is_known.any():
        raise PlanError(f"a matrix of errors is (tasks, plans) with at least one number; this one is {errors.shape} without any.")
    weights = np.where(is_known, 1.0, 0.0) if propensities is None else _inverse(propensities, is_known)
    known = np.where(is_known, errors, 0.0)
    completed = _descend(known, weights, options, _Carried(options.rank))
    if completed.is_converged and options.rank + NUM_SPARE < min(errors.shape) and errors.size <= LARGE:
        completed = _descend(known, weights, options, partial(_exact, options.rank), start=completed)  # with full decompositions
    return completed


def _inverse(propensities: Array, is_known: NDArray[np.bool_]) -> Array:
    if not np.all(propensities[is_known] > 0):
        raise PlanError("an observed entry has a propensity that is not above 0: propensities are probabilities of being observed.")
    return np.where(is_known, 1.0 / np.where(is_known, propensities, 1.0), 0.0)


def _descend(
    known: Array, weights: Array, options: Completion, shrink: Callable[[Array, float], Array], start: Completed | None = None
) -> Completed:
    """Return the completed matrix, found by proximal gradient descent with momentum from `start`, or from zeros.

    `known` has the observed errors and `weights` their weights, both 0 where nothing was observed. `shrink(matrix, amount)` reduces a
    matrix to a rank and shrinks its singular values.
    """
    current = np.zeros_like(known) if start is None else start.values
    extrapolated, speed, step_length = current, 1.0, 1.0 / weights.max()
    residual, step = np.inf, 0 if start is None else start.num_steps
    while step < options.max_steps and residual >= options.tolerance:
        step += 1
        shrunk = shrink(extrapolated - step_length * weights * (extrapolated - known), options.penalty * step_length)
        next_point = np.clip(shrunk, *options.box)
        residual = float(
            np.linalg.norm(extrapolated - next_point) / (1 + np.linalg.norm(next_point)) / (step_length * weights.max())
        )
        if np.vdot(extrapolated - next_point, next_point - current) > 0:
            speed = 1.0
        next_speed = (1 + np.sqrt(1 + 4 * speed * speed)) / 2
        extrapolated, current, speed = next_point + (speed - 1) / next_speed * (next_point - current), next_point, next_speed
    return Completed(current, step, residual, residual < options.tolerance)


def _exact(rank: int, matrix: Array, amount: float) -> Array:
    """Return `matrix` reduced to rank `rank` with its singular values shrunk by `amount`, by a full decomposition."""
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    return (left[:, :rank] * np.maximum(values[:rank] - amount, 0)) @ right[:rank]


class _Carried:
    """Does about what `_exact` does in less time: each call starts from the singular vectors that the last one found."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.right: Array | None = None

    def __call__(self, matrix: Array, amount: float) -> Array:
        if self.right is None:
            self.right = self._first(matrix)
        basis = np.linalg.qr(matrix @ self.right)[0]  # (num_tasks, rank + NUM_SPARE)
        projected = basis.T @ matrix
        squares, rotation = np.linalg.eigh(projected @ projected.T)
        values, rotation = np.sqrt(np.maximum(squares[::-1], 0.0)), rotation[:, ::-1]
        self.right = (projected.T @ rotation) / np.maximum(values, 1e-12)
        left = (basis @ rotation)[:, : self.rank]
        return (left * np.maximum(values[: self.rank] - amount, 0)) @ self.right[:, : self.rank].T

    def _first(self, matrix: Array) -> Array:
        """Return the first right singular vectors of `matrix`, (num_plans, rank + NUM_SPARE), approximate if it is large."""
        count = min(self.rank + NUM_SPARE, *matrix.shape)
        if matrix.size <= LARGE:
            return np.linalg.svd(matrix, full_matrices=False)[2][:count].T
        right = np.random.RandomState(0).standard_normal((matrix.shape[1], count))
        for _ in range(2):
            right = np.linalg.qr(matrix.T @ (matrix @ right))[0]
        return right
