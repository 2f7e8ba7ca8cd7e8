"""Bayesian optimisation over plans, the published baseline: a Gaussian process and expected improvement.

    k(x, y) = exp(-|x - y|^2 / (2 length^2)) + noise [x is y]     mean 0, variance 1; length and noise by maximum likelihood
    EI = d cdf(d / s) + s pdf(d / s),  d = best - mean - margin   the plan with the LARGEST is next (the release took the smallest)

>>> squares = squared_distances(np.array([[0.0], [1.0], [2.0], [50.0]]))
>>> mean, deviation = Process.fitted(squares, [0, 2], np.array([0.5, 0.7])).predict()
>>> bool(deviation[3] >= deviation[1]) and mean.shape == (4,)
True
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
START = (20.0, 1.0)  # length, noise
BOUNDS = (1e-5, 1e5)
JITTER = 1e-10
MARGIN = 0.01


@dataclass(frozen=True)
class Process:
    """A Gaussian process that saw `measured` at the chosen points; `squares` are squared distances of all from all."""

    squares: Array
    chosen: list[int]
    measured: Array
    length: float
    noise: float

    @staticmethod
    def fitted(squares: Array, chosen: list[int], measured: Array) -> Process:
        """The process whose length and noise make the measurements most likely."""
        from scipy.optimize import minimize

        near = squares[np.ix_(chosen, chosen)]
        bounds = [(np.log(BOUNDS[0]), np.log(BOUNDS[1]))] * 2
        found = minimize(_unlikeliness, np.log(START), args=(near, measured), jac=True, method="L-BFGS-B", bounds=bounds)
        length, noise = np.exp(found.x)
        return Process(squares, chosen, measured, float(length), float(noise))

    def predict(self) -> tuple[Array, Array]:
        """Mean and standard deviation at every point, those of one more measurement."""
        from scipy.linalg import cho_factor, cho_solve

        across = np.exp(-self.squares[:, self.chosen] / (2 * self.length**2))  # (num_points, num_chosen)
        inside = across[self.chosen] + (self.noise + JITTER) * np.eye(len(self.chosen))
        factor = cho_factor(inside, lower=True)
        variance = 1 + self.noise - (across.T * cho_solve(factor, across.T)).sum(axis=0)
        return across @ cho_solve(factor, self.measured), np.sqrt(np.maximum(variance, 0.0))


def squared_distances(points: Array) -> Array:
    """Of all points (num_points, anything) from all."""
    return ((points[:, None] - points[None]) ** 2).sum(axis=-1)


def _unlikeliness(logs: Array, squares: Array, measured: Array) -> tuple[float, Array]:
    """-log likelihood, up to a constant, and its gradient by log length and log noise."""
    from scipy.linalg import cho_solve

    length, noise = np.exp(logs)
    eye = np.eye(len(measured))
    near = np.exp(-squares / (2 * length**2))
    lower = np.linalg.cholesky(near + (noise + JITTER) * eye)
    solved, inverse = cho_solve((lower, True), measured), cho_solve((lower, True), eye)
    pull = np.outer(solved, solved) - inverse
    slopes = [(pull * near * squares / length**2).sum(), noise * np.trace(pull)]
    return float(0.5 * measured @ solved + np.log(np.diag(lower)).sum()), -0.5 * np.array(slopes)


def expected_improvement(mean: Array, deviation: Array, best: float, margin: float = MARGIN) -> Array:
    """By how much less than `best` a measurement is expected to be, counting only what is less."""
    from scipy.stats import norm

    gain, deviation = best - mean - margin, deviation + 1e-12
    return gain * norm.cdf(gain / deviation) + deviation * norm.pdf(gain / deviation)
