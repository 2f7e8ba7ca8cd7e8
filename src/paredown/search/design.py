"""Which plans to try on a new task, from the plans' vectors alone: before anything is measured.

    optimal      D-optimal: the pivots of a QR decomposition, then one after the other whatever adds most to log det(Y_S Y_S^T)
    relaxed      D-optimal: the largest shares v of max log det(Y diag(v) Y^T), 0 <= v <= 1, sum(v) = count
    pivoted      the pivots alone
    scattered    at random

>>> vectors = np.array([[1.0, 0.9, 0.0, 0.1], [0.0, 0.1, 1.0, 0.5]])
>>> optimal(vectors, 2), pivoted(vectors, 2)
([0, 2], [0, 2])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
SMALLEST_SHARE = 1e-6  # keeps log det finite where the relaxation gives a plan nothing


def optimal(vectors: Array, count: int) -> list[int]:
    """Greedy D-optimal design, begun with as many pivots as the vectors are long."""
    chosen = pivoted(vectors, min(count, len(vectors)))
    inverse = np.linalg.pinv(vectors[:, chosen] @ vectors[:, chosen].T)
    while len(chosen) < min(count, vectors.shape[1]):
        spread = inverse @ vectors
        gains = (vectors * spread).sum(axis=0)  # det(X + y y^T) = det(X) (1 + y^T X^-1 y)
        gains[chosen] = -np.inf
        best = int(gains.argmax())
        inverse -= np.outer(spread[:, best], spread[:, best]) / (1 + gains[best])
        chosen.append(best)
    return chosen


def relaxed(vectors: Array, count: int) -> list[int]:
    """The convex relaxation, rounded to its largest shares."""
    from scipy.optimize import LinearConstraint, minimize

    num_plans = vectors.shape[1]
    count = min(count, num_plans)

    def loss(shares: Array) -> tuple[float, Array]:
        spread = (vectors * (shares + SMALLEST_SHARE)) @ vectors.T
        solved = np.linalg.solve(spread, vectors)
        return -float(np.linalg.slogdet(spread)[1]), -(vectors * solved).sum(axis=0)

    total = LinearConstraint(np.ones((1, num_plans)), count, count)
    start = np.full(num_plans, count / num_plans)
    found = minimize(loss, start, jac=True, bounds=[(0.0, 1.0)] * num_plans, constraints=total, method="SLSQP")
    return np.argsort(-found.x, kind="stable")[:count].tolist()


def pivoted(vectors: Array, count: int) -> list[int]:
    """The first pivots: each plan is the one least explained by those before it."""
    from scipy.linalg import qr

    *_, order = qr(vectors, mode="r", pivoting=True)
    return np.asarray(order)[:count].tolist()


def scattered(num_plans: int, count: int, *, seed: int, num_first: int = 5) -> list[int]:
    """At random. As released: the first ones together, then one at a time, each from a generator with the same seed."""
    chosen = first_at_random(num_plans, min(count, num_first), seed=seed)
    while len(chosen) < min(count, num_plans):
        left = np.setdiff1d(np.arange(num_plans), chosen)
        chosen.append(int(np.random.RandomState(seed).choice(left, 1, replace=False)[0]))
    return chosen


def first_at_random(num_plans: int, count: int, *, seed: int) -> list[int]:
    """Different plans at random, as numpy's first generator picks them."""
    return np.random.RandomState(seed).choice(num_plans, count, replace=False).tolist()


DESIGNS: Mapping[str, Callable[[Array, int], list[int]]] = MappingProxyType(
    {"optimal": optimal, "relaxed": relaxed, "pivoted": pivoted}
)
