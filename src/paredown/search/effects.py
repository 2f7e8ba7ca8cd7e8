"""What makes a difference in a matrix of errors, and what is noise: shares of variance and an F test, as for PEPPP's matrices.

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
