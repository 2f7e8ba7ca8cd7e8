"""A matrix of errors with gaps, completed: what every plan would have given on every earlier task.

    minimise  1/2 sum over observed (i, j) of (Z_ij - E_ij)^2 / p_ij  +  penalty * (sum of Z's singular values),  rank(Z) <= rank

p_ij is how likely the entry was to be observed: 1 for all, unless cheap plans were tried more often. Steps go down the gradient, shrink the
singular values (soft-impute) and clip to the box; momentum is dropped whenever it points uphill. Singular vectors are carried on from
step to step, by one product each; the last steps are whole decompositions, unless the matrix is large. With a cap on the rank there is
more than one minimum: the answer is the one that is reached from 0.

>>> gaps = np.outer([1.0, 2.0, 3.0, 4.0], [0.1, 0.2, 0.15])
>>> gaps[1, 2] = np.nan
>>> found = complete(gaps, rank=1, penalty=1e-4)
>>> found.is_converged, round(float(found.values[1, 2]), 2)
(True, 0.3)

What makes a difference in a matrix of errors, and what is noise: shares of variance and an F test, as for PEPPP's matrices.

Of each task its mean is taken away. What is left is split into

    levels      the means of groups of plans, of each task for itself
    plans       what plans of a group have in common over all tasks, beyond their group: the formats that the groups do not tell apart
    rest        all else: noise, and what plans do on single tasks

    F = (plans / their degrees of freedom) / (rest / its degrees of freedom)          1 where plans of a group differ by noise alone

>>> source = np.random.default_rng(0)
>>> errors = np.repeat([0.2, 0.5], 4) + 0.01 * source.standard_normal((30, 8))
>>> found = split_variance(errors, np.repeat([0, 1], 4))
>>> found.levels > 0.99, 0.5 < found.f < 2, found.p > 0.05
(True, True, True)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paredown.errors import PlanError

Array = NDArray[np.float64]
# Singular vectors that are carried on beside the wanted ones. On PEPPP's matrices 10 of them reach the lowest minimum on average (8.2202;
# with 5, or with whole decompositions for the first steps, 8.2208 and 8.2217) in the shortest time.
SPARE = 10
LARGE = 100_000  # entries from which on nothing is decomposed whole


@dataclass(frozen=True)
class Completed:
    """The matrix without gaps, and how far from settled it is: `residual` is the last change, relative, for a step of 1."""

    values: Array
    num_steps: int
    residual: float
    is_converged: bool


@dataclass(frozen=True)
class Completion:
    """How to complete: the published values are the defaults."""

    rank: int = 5
    penalty: float = 0.1
    box: tuple[float, float] = (0.0, 1.0)
    tolerance: float = 1e-6
    max_steps: int = 20_000


def complete(errors: Array, *, propensities: Array | None = None, **how: float) -> Completed:
    """`errors` with its NaNs filled in; `propensities`: how likely each entry was to be observed. `how`: fields of `Completion`."""
    options = Completion(**how)  # pyright: ignore[reportArgumentType]
    is_known = np.isfinite(errors)
    if errors.ndim != 2 or not is_known.any():
        raise PlanError(
            f"a matrix of errors is (tasks, plans) with something observed; this one is {errors.shape} without a number."
        )
    weights = np.where(is_known, 1.0, 0.0) if propensities is None else _inverse(propensities, is_known)
    known = np.where(is_known, errors, 0.0)
    found = _descend(known, weights, options, _Carried(options.rank))
    if (
        found.is_converged and options.rank + SPARE < min(errors.shape) and errors.size <= LARGE
    ):  # one more, by whole decompositions
        found = _descend(known, weights, options, _Exact(options.rank), start=found)
    return found


def _inverse(propensities: Array, is_known: NDArray[np.bool_]) -> Array:
    if not np.all(propensities[is_known] > 0):
        raise PlanError("an entry was observed whose propensity is not above 0: propensities are probabilities of being observed.")
    return np.where(is_known, 1.0 / np.where(is_known, propensities, 1.0), 0.0)


def _descend(
    known: Array, weights: Array, options: Completion, shrink: _Carried | _Exact, start: Completed | None = None
) -> Completed:
    """Proximal gradient with momentum that restarts."""
    at = np.zeros_like(known) if start is None else start.values
    ahead, speed, length = at, 1.0, 1.0 / weights.max()
    residual, step = np.inf, 0 if start is None else start.num_steps
    while step < options.max_steps and residual >= options.tolerance:
        step += 1
        shrunk = shrink(ahead - length * weights * (ahead - known), options.penalty * length)
        new = np.clip(shrunk, *options.box)
        residual = float(np.linalg.norm(ahead - new) / (1 + np.linalg.norm(new)) / (length * weights.max()))
        if np.vdot(ahead - new, new - at) > 0:
            speed = 1.0
        faster = (1 + np.sqrt(1 + 4 * speed * speed)) / 2
        ahead, at, speed = new + (speed - 1) / faster * (new - at), new, faster
    return Completed(at, step, residual, residual < options.tolerance)


class _Exact:
    """The best matrix of a rank, singular values shrunk: by decomposing all of it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __call__(self, matrix: Array, amount: float) -> Array:
        left, values, right = np.linalg.svd(matrix, full_matrices=False)
        return (left[:, : self.rank] * np.maximum(values[: self.rank] - amount, 0)) @ right[: self.rank]


class _Carried:
    """The same from the last step's singular vectors, multiplied once."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.right: Array | None = None

    def __call__(self, matrix: Array, amount: float) -> Array:
        if self.right is None:
            self.right = self._first(matrix)
        base = np.linalg.qr(matrix @ self.right)[0]  # (num_tasks, rank + SPARE)
        inside = base.T @ matrix
        squares, turn = np.linalg.eigh(inside @ inside.T)
        values, turn = np.sqrt(np.maximum(squares[::-1], 0.0)), turn[:, ::-1]
        self.right = (inside.T @ turn) / np.maximum(values, 1e-12)
        left = (base @ turn)[:, : self.rank]
        return (left * np.maximum(values[: self.rank] - amount, 0)) @ self.right[:, : self.rank].T

    def _first(self, matrix: Array) -> Array:
        """The first right singular vectors (num_plans, rank + SPARE); of a large matrix about, by products with a few random vectors."""
        count = min(self.rank + SPARE, *matrix.shape)
        if matrix.size <= LARGE:
            return np.linalg.svd(matrix, full_matrices=False)[2][:count].T
        right = np.random.RandomState(0).standard_normal((matrix.shape[1], count))
        for _ in range(2):
            right = np.linalg.qr(matrix.T @ (matrix @ right))[0]
        return right


# --- What makes a difference in a matrix of errors, and what is noise ---


@dataclass(frozen=True)
class Effects:
    """Shares of the variance within tasks, F of plans beyond their levels, how likely it is by chance, and the deviation within levels."""

    levels: float
    plans: float
    rest: float
    f: float
    p: float
    deviation: float


def split_variance(errors: Array, levels: NDArray[np.intp]) -> Effects:
    """Of complete rows (tasks, plans) and the level of each plan."""
    if not np.isfinite(errors).all():
        raise PlanError(f"errors {errors.shape} have gaps; complete rows are compared.")
    num_tasks, num_plans = errors.shape
    groups = np.unique(levels)
    if num_tasks < 2 or num_plans == len(groups):
        raise PlanError(f"{num_tasks} tasks and {num_plans} plans in {len(groups)} levels leave nothing to compare.")
    of_task = errors - errors.mean(axis=1, keepdims=True)
    means = np.stack([of_task[:, levels == group].mean(axis=1) for group in groups], axis=1)  # (tasks, levels)
    within = of_task - means[:, np.searchsorted(groups, levels)]
    common = within.mean(axis=0)  # (plans,)
    total, plans = float((of_task**2).sum()), num_tasks * float((common**2).sum())
    rest = float(((within - common) ** 2).sum())
    free = num_plans - len(groups)
    f = (plans / free) / (rest / (free * (num_tasks - 1)))
    return Effects(
        levels=1 - (plans + rest) / total,
        plans=plans / total,
        rest=rest / total,
        f=f,
        p=_chance(f, free, free * (num_tasks - 1)),
        deviation=float(np.sqrt((plans + rest) / (free * num_tasks))),
    )


def _chance(f: float, above: int, below: int) -> float:
    """How likely an F value is at least this large by chance."""
    from scipy.special import fdtrc

    return float(fdtrc(above, below, f))


def lost_share(errors: Array, full: Array, blind: Array) -> Array:
    """Of what a task learns at full precision, the share that a plan loses: 0 as good as full, 1 a blind guess, (tasks, plans)."""
    return (errors - full[:, None]) / (blind - full)[:, None]
