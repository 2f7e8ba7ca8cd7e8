"""Which plans may be taken for one: levels, found from earlier tasks, what is left of plans within a level, and twins.

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

import numpy as np
from numpy.typing import NDArray

from paredown.search.mixture import Mixture, Sums

Array = NDArray[np.float64]
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
    return Mixture.fitted(Sums.of(fit - apart, levels), num_steps=FEW_STEPS).given(Sums.of(judge - apart, levels)).log_likelihood


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
    sums = Sums.of(errors, levels)
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


def once(runs: Array, twins: Levels) -> Array:
    """Runs (tasks, plans, seeds), those of twins once: NaN where an earlier twin has the same."""
    kept = runs.copy()
    for twin in np.unique(twins):
        same = np.flatnonzero(twins == twin)
        before = np.cumsum(np.isfinite(runs[:, same]), axis=1) - np.isfinite(runs[:, same])  # (tasks, twins, seeds)
        kept[:, same] = np.where(before > 0, np.nan, runs[:, same])
    return kept
