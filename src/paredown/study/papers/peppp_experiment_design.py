"""The published methods that predict a new task's Pareto front from a few measurements, each a row of `PICKERS`.

    ED-MF       measures the plans of a D-optimal design, and predicts the others by least squares on the plans' vectors
    QR-MF       measures the pivots instead, `ED-MF relaxed` the rounded relaxation of the design
    random-MF   measures random plans instead
    BO-MF       measures by expected improvement of a Gaussian process over the plans' vectors, after five random plans
    BO-full     does the same over whole columns of the completed matrix of errors
    means       predicts the columns' means, without measurements

A picker sees `TaskKnowledge` and calls `measure(plan)` at most the allowed number of times: it sees no error that it did not measure.

Designs choose plans from their vectors alone, before any measurement:

    optimal      D-optimal: the pivots of a QR decomposition, then one by one the plan that adds most to log det(Y_S Y_S^T)
    relaxed      D-optimal: the largest shares v of max log det(Y diag(v) Y^T), 0 <= v <= 1, sum(v) = count
    pivoted      the pivots alone
    scattered    at random

>>> vectors = np.array([[1.0, 0.9, 0.0, 0.1], [0.0, 0.1, 1.0, 0.5]])
>>> optimal(vectors, 2), pivoted(vectors, 2)
([0, 2], [0, 2])

The vectors of plans are singular vectors of the errors; that of a new task follows from a few measurements:

    E = U S V^T,  Y = the first k rows of V^T (k, num_plans);  x = argmin |x Y_S - e_S|;  predicted errors = x Y

>>> vectors = embed(np.outer([0.5, 0.6, 0.9], [1.0, 0.5]), rank=1)
>>> predict(vectors, [0], [0.4]).round(3).tolist()
[0.4, 0.2]

Bayesian optimization over plans, the published baseline, is a Gaussian process with expected improvement:

    k(x, y) = exp(-|x - y|^2 / (2 length^2)) + noise [x is y]     mean 0, variance 1; length and noise by maximum likelihood
    EI = d cdf(d / s) + s pdf(d / s),  d = best - mean - margin   the plan with the LARGEST is next (the release took the smallest)

>>> squares = squared_distances(np.array([[0.0], [1.0], [2.0], [50.0]]))
>>> mean, deviation = Process.fitted(squares, [0, 2], np.array([0.5, 0.7])).predict()
>>> bool(deviation[3] >= deviation[1]) and mean.shape == (4,)
True

A Pareto front of single runs shows the lucky ones: for plans that were not measured, `Pooled` draws it from the mean of their level (plans
that differ by noise alone) less `luck` standard deviations of a run.

>>> [round(luck(runs), 2) for runs in (1, 2, 9)]
[0.0, 0.28, 1.01]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from paredown.study.pick.posterior import Posterior, Prior

Array = NDArray[np.float64]
Measure = Callable[[int], float]
SMALLEST_SHARE = 1e-6  # added to every share, so that log det is finite
RANK = 5  # published: the first five singular values of PEPPP's matrix are 78 % of their sum
START = (20.0, 1.0)  # of the fit: length, noise
BOUNDS = (1e-5, 1e5)
JITTER = 1e-10
MARGIN = 0.01
NUM_FIRST = 5  # random plans that are drawn together


# --- designs -----------------------------------------------------------------------------------------------------------


def optimal(vectors: Array, count: int) -> list[int]:
    """Return the indices of `count` plans to measure, a greedy D-optimal design for the plans' `vectors` (k, num_plans)."""
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
    """Return the indices of `count` plans to measure, a D-optimal design for the plans' `vectors`, relaxed to a convex problem."""
    from scipy.optimize import LinearConstraint, minimize

    num_plans = vectors.shape[1]
    count = min(count, num_plans)

    def loss(shares: Array) -> tuple[float, Array]:
        spread = (vectors * (shares + SMALLEST_SHARE)) @ vectors.T
        solved = np.linalg.solve(spread, vectors)
        return -float(np.linalg.slogdet(spread)[1]), -(vectors * solved).sum(axis=0)

    total = LinearConstraint(np.ones((1, num_plans)), count, count)
    start = np.full(num_plans, count / num_plans)
    solution = minimize(loss, start, jac=True, bounds=[(0.0, 1.0)] * num_plans, constraints=total, method="SLSQP")
    return np.argsort(-solution.x, kind="stable")[:count].tolist()


def pivoted(vectors: Array, count: int) -> list[int]:
    """Return the indices of `count` plans to measure, the first pivots of a QR decomposition of the plans' `vectors`."""
    from scipy.linalg import qr

    *_, order = qr(vectors, mode="r", pivoting=True)
    return np.asarray(order)[:count].tolist()


def scattered(num_plans: int, count: int, *, seed: int) -> list[int]:
    """Return the indices of `count` random plans to measure, drawn as in PEPPP's released code.

    The first NUM_FIRST plans are drawn together, then one at a time, each from a new generator of this seed.
    """
    chosen = first_at_random(num_plans, min(count, NUM_FIRST), seed=seed)
    while len(chosen) < min(count, num_plans):
        left = np.setdiff1d(np.arange(num_plans), chosen)
        chosen.append(int(np.random.RandomState(seed).choice(left, 1, replace=False)[0]))
    return chosen


def first_at_random(num_plans: int, count: int, *, seed: int) -> list[int]:
    """Return the indices of `count` distinct random plans, drawn by numpy's legacy generator."""
    return np.random.RandomState(seed).choice(num_plans, count, replace=False).tolist()


# --- vectors of plans and tasks ----------------------------------------------------------------------------------------


def embed(errors: Array, rank: int = RANK) -> Array:
    """Return vectors of all plans (k, num_plans): the first right singular vectors of the errors (tasks, plans)."""
    return np.linalg.svd(errors, full_matrices=False)[2][:rank]


def predict(vectors: Array, chosen: Sequence[int], measured: Sequence[float] | Array) -> Array:
    """Return the errors of all plans, by least squares on their `vectors`, from the errors `measured` on the plans `chosen`."""
    task = np.linalg.lstsq(vectors[:, list(chosen)].T, np.asarray(measured, dtype=float), rcond=None)[0]
    return task @ vectors


# --- Bayesian optimization ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Process:
    """A Gaussian process over plans, given the errors `measured` on the plans `chosen`.

    `squares` are the squared distances between all plans.
    """

    squares: Array
    chosen: list[int]
    measured: Array
    length: float
    noise: float

    @staticmethod
    def fitted(squares: Array, chosen: list[int], measured: Array) -> Process:
        """Return the Gaussian process whose length scale and noise have the highest likelihood."""
        from scipy.optimize import minimize

        near = squares[np.ix_(chosen, chosen)]
        bounds = [(np.log(BOUNDS[0]), np.log(BOUNDS[1]))] * 2
        fit = minimize(_negative_log_likelihood, np.log(START), args=(near, measured), jac=True, method="L-BFGS-B", bounds=bounds)
        length, noise = np.exp(fit.x)
        return Process(squares, chosen, measured, float(length), float(noise))

    def predict(self) -> tuple[Array, Array]:
        """Return the mean and the standard deviation of one more measurement of each plan."""
        from scipy.linalg import cho_factor, cho_solve

        covariance = np.exp(-self.squares[:, self.chosen] / (2 * self.length**2))  # (num_points, num_chosen)
        chosen_covariance = covariance[self.chosen] + (self.noise + JITTER) * np.eye(len(self.chosen))
        factor = cho_factor(chosen_covariance, lower=True)
        variance = 1 + self.noise - (covariance.T * cho_solve(factor, covariance.T)).sum(axis=0)
        return covariance @ cho_solve(factor, self.measured), np.sqrt(np.maximum(variance, 0.0))


def squared_distances(points: Array) -> Array:
    """Return the squared distances between all pairs of `points` (num_points, num_coordinates)."""
    return ((points[:, None] - points[None]) ** 2).sum(axis=-1)


def _negative_log_likelihood(logs: Array, squares: Array, measured: Array) -> tuple[float, Array]:
    """Return the negative log likelihood of `measured` errors under a Gaussian process, and its gradient.

    `logs` has the logarithms of length scale and noise, `squares` the squared distances between the measured plans.
    """
    from scipy.linalg import cho_solve

    length, noise = np.exp(logs)
    eye = np.eye(len(measured))
    kernel = np.exp(-squares / (2 * length**2))
    lower = np.linalg.cholesky(kernel + (noise + JITTER) * eye)
    solved, inverse = cho_solve((lower, True), measured), cho_solve((lower, True), eye)
    sensitivity = np.outer(solved, solved) - inverse
    slopes = [(sensitivity * kernel * squares / length**2).sum(), noise * np.trace(sensitivity)]
    return float(0.5 * measured @ solved + np.log(np.diag(lower)).sum()), -0.5 * np.array(slopes)


def expected_improvement(mean: Array, deviation: Array, best: float) -> Array:
    """Return the expected amount by which a measurement of each plan is below `best`; it counts as 0 if it is above."""
    from scipy.stats import norm

    gain, deviation = best - mean - MARGIN, deviation + 1e-12
    return gain * norm.cdf(gain / deviation) + deviation * norm.pdf(gain / deviation)


# --- pickers -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TaskKnowledge:
    """What a picker (which measures some plans of a task and predicts the others) may know: memory of the plans, and prior tasks.

    `prior_errors`: errors of the prior tasks (tasks, plans), NaN where not observed. `completed`: the same without gaps. `levels`: plans
    with equal numbers are known to differ by noise alone; None: unknown. `seed`: for pickers that draw at random.
    """

    prior_errors: Array
    completed: Array
    memory: Array
    levels: NDArray[np.intp] | None = None
    seed: int = 0


@dataclass(frozen=True)
class Prediction:
    """The errors of all plans as a picker predicts them after measuring the plans `chosen`.

    `predicted`: means; `expected`: the same with measured errors in place, for recommendations; `drawn`: the errors whose Pareto front is
    drawn. `deviations`: standard deviations of one run of each plan about its mean; None where a picker has none.
    """

    chosen: tuple[int, ...]
    predicted: Array
    expected: Array
    drawn: Array
    deviations: Array | None = None


Picker = Callable[[TaskKnowledge, Measure, Iterable[int]], dict[int, Prediction]]


def plain(chosen: list[int], measured: Array, predicted: Array) -> Prediction:
    """Return a Prediction as the published pickers make it: its Pareto front comes from predicted errors alone."""
    return Prediction(tuple(chosen), predicted, with_measured(predicted, chosen, measured), predicted)


def with_measured(predicted: Array, chosen: list[int], measured: Array) -> Array:
    """Return `predicted` with the `measured` errors in place of those predicted for the `chosen` plans."""
    expected = predicted.copy()
    expected[chosen] = measured
    return expected


def factorised(design: Callable[[Array, int, int], list[int]]) -> Picker:
    """Return a picker that measures the plans of `design(vectors, count, seed)`, and predicts the others by least squares."""

    def pick(known: TaskKnowledge, measure: Measure, counts: Iterable[int]) -> dict[int, Prediction]:
        vectors = embed(known.completed)
        predictions: dict[int, Prediction] = {}
        for count in counts:
            chosen = design(vectors, count, known.seed)
            measured = np.array([measure(plan) for plan in chosen])
            predictions[count] = plain(chosen, measured, predict(vectors, chosen, measured))
        return predictions

    return pick


def bayesian(points_of: Callable[[TaskKnowledge], Array], *, is_released: bool = False) -> Picker:
    """Return a picker whose next measurement is always of the plan of largest expected improvement, by a Gaussian process.

    `points_of` returns the plans' vectors. `is_released`: it measures the plan of least improvement next, as the released code does.
    """

    def pick(known: TaskKnowledge, measure: Measure, counts: Iterable[int]) -> dict[int, Prediction]:
        squares, wanted = squared_distances(points_of(known)), set(counts)
        chosen = first_at_random(len(squares), RANK, seed=known.seed)
        predictions: dict[int, Prediction] = {}
        for count in range(RANK, max(wanted) + 1):
            measured = np.array([measure(plan) for plan in chosen])
            mean, deviation = Process.fitted(squares, chosen, measured).predict()
            if count in wanted:
                predictions[count] = plain(chosen, measured, mean)
            gains = expected_improvement(mean, deviation, measured.min()) * (-1 if is_released else 1)
            gains[chosen] = -np.inf
            chosen = [*chosen, int(gains.argmax())]
        return predictions

    return pick


def averaged(known: TaskKnowledge, measure: Measure, counts: Iterable[int]) -> dict[int, Prediction]:
    """Return each plan's mean error on the prior tasks as the prediction for every number in `counts`; nothing is measured."""
    means = known.completed.mean(axis=0)
    return {count: plain([], np.empty(0), means) for count in counts}


PICKERS: Mapping[str, Picker] = MappingProxyType(
    {
        "ED-MF": factorised(lambda vectors, count, seed: optimal(vectors, count)),
        "ED-MF+5": factorised(lambda vectors, count, seed: optimal(vectors, count + RANK)),  # the released code takes five more
        "ED-MF relaxed": factorised(lambda vectors, count, seed: relaxed(vectors, count)),
        "QR-MF": factorised(lambda vectors, count, seed: pivoted(vectors, count)),
        "random-MF": factorised(lambda vectors, count, seed: scattered(vectors.shape[1], count, seed=seed)),
        "BO-MF": bayesian(lambda known: embed(known.completed).T),
        "BO-MF worst": bayesian(lambda known: embed(known.completed).T, is_released=True),
        "BO-full": bayesian(lambda known: known.completed.T),
        "means": averaged,
    }
)


@dataclass(frozen=True)
class Pooled:
    """A picker (it measures some plans and predicts the others) that predicts errors as `pick` does, from prior and trials."""

    def __call__(self, known: TaskKnowledge, measure: Measure, counts: Iterable[int]) -> dict[int, Prediction]:
        """Return predictions after each number of measurements in `counts`; `measure(plan)` returns a measured error."""
        wanted, prior = set(counts), Prior.of(known.prior_errors, known.levels)
        chosen, measured = list[int](), np.full(len(known.memory), np.nan)
        predictions: dict[int, Prediction] = {}
        for count in range(max(wanted) + 1):
            posterior = prior.gaussian.given(prior.levels[chosen], measured[chosen])
            if count in wanted:
                predictions[count] = predicted(prior, posterior, chosen, measured)
            if len(chosen) < len(measured) and count < max(wanted):
                gains = front_gains(prior, posterior, known.memory, measured)
                chosen.append(int(np.lexsort((known.memory, -gains))[0]))
                error = measure(chosen[-1])
                measured[chosen[-1]] = error if np.isfinite(error) else prior.worst  # it diverged
        return predictions


def front_gains(prior: Prior, posterior: Posterior, memory: Array, measured: Array) -> Array:
    """Return the expected improvement of the Pareto front by measuring each plan, (plans,); -1 for measured plans.

    It is the product of two numbers. One is the expected growth of the area that the measured front dominates. The other is the variance
    of all levels that the measurement removes: by area alone, plans would be measured that are likely to be on the front and tell little
    about the others (docs/log.md).
    """
    from scipy.stats import norm

    order = np.argsort(memory, kind="stable")
    heights = np.minimum.accumulate(np.fmin(measured[order], max(1.0, prior.worst)))  # of the front at each plan's memory
    widths = np.diff(memory[order], append=max(1.0, memory.max()))
    levels = prior.levels[order]
    run_variances = np.diagonal(posterior.covariance) + posterior.noise
    deviations = np.sqrt(run_variances)[levels, None]
    ratios = (heights - posterior.mean[levels, None]) / deviations  # (plans, parts of the front)
    shortfall = deviations * (ratios * norm.cdf(ratios) + norm.pdf(ratios))
    gains = np.empty(len(memory))
    gains[order] = np.triu(shortfall * widths).sum(axis=1) * ((posterior.covariance**2).sum(axis=1) / run_variances)[levels]
    return np.where(np.isnan(measured), gains, -1.0)


def predicted(prior: Prior, posterior: Posterior, chosen: list[int], errors: Array) -> Prediction:
    """Return the errors that `posterior` predicts as a Prediction; `errors` has those that were measured on `chosen` plans."""
    levels, measured, noise = prior.levels, errors[chosen], posterior.noise
    luck_of_level = np.sqrt(noise) * np.array([luck(int(size)) for size in np.bincount(levels)])
    means = posterior.mean[levels]
    return Prediction(
        tuple(chosen),
        means,
        with_measured(means, chosen, measured),
        with_measured(means - luck_of_level[levels], chosen, measured),
        np.sqrt(posterior.deviations**2 + noise)[levels],
    )


@cache
def luck(runs: int) -> float:
    """Return how many standard deviations below their mean the least of r runs lies on average, for r from 1 to `runs`.

    On a front drawn from single runs, the r-th cheapest of plans that differ by noise alone appears if its run is below those of the r
    - 1 cheaper ones.
    """
    from scipy.special import ndtr

    grid = np.linspace(-9.0, 9.0, 3601)
    above = 1 - ndtr(grid)
    # E min = integral over x < 0 of -P(min < x), and over x > 0 of P(min > x)
    least = [float(np.trapezoid(np.where(grid < 0, above**r - 1, above**r), grid)) for r in range(1, runs + 1)]
    return max(0.0, -float(np.mean(least))) if runs > 1 else 0.0
