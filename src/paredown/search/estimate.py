"""What is believed about a new task: every plan's mean error with a band, the frontier, and the plan to take within a budget.

Errors are means over runs: a lucky run moves them by as much as it deserves and no further. Plans that may be as good as the one taken
are ties, and are counted.

>>> earlier = np.array([[0.9, 0.5, 0.4], [0.8, 0.4, 0.3], [0.9, 0.6, 0.5]])
>>> found = Estimate.of(Prior.of(earlier, np.arange(3)), np.array([1.0, 2.0, 3.0]))
>>> found.best(2.5).plan, found.front().tolist()
(1, [0, 1, 2])
>>> found.best(0.5)
Traceback (most recent call last):
paredown.errors.BudgetError: no plan fits 0.5; the smallest needs 1 (plan 0, error 0.87 +- 0.06).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paredown.errors import BudgetError
from paredown.search.frontier import undominated
from paredown.search.mixture import Belief
from paredown.search.pooled import Prior
from paredown.search.seeds import Run

Array = NDArray[np.float64]
DOUBT = 0.05  # a plan that is better than the one taken with at least this probability ties with it


@dataclass(frozen=True)
class Choice:
    """The plan to take within a budget; `ties` are others within it that may be as good."""

    plan: int
    error: float
    deviation: float
    ties: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class Estimate:
    """Means of the errors of all plans and their standard deviations (of the mean; `noise` is that of one run about it)."""

    memory: Array
    means: Array
    deviations: Array
    noise: Array
    measured: Mapping[int, float]
    prior: Prior
    belief: Belief

    @staticmethod
    def of(prior: Prior, memory: Array, measured: Mapping[int, float | Sequence[float]] | None = None) -> Estimate:
        """After measurements, or before any; a plan may have been measured several times."""
        errors = {plan: np.atleast_1d(errors) for plan, errors in (measured or {}).items()}
        return Estimate.after(prior, memory, [Run(plan, float(error)) for plan, found in errors.items() for error in found])

    @staticmethod
    def after(prior: Prior, memory: Array, runs: Sequence[Run]) -> Estimate:
        """After runs, with their seeds: what these do to all plans alike makes bands wider, and no plan better than another."""
        belief, levels = prior.after(runs), prior.levels
        mean, deviation = belief.levels()
        noise = belief.run_noise()[levels]
        measured: dict[int, list[float]] = {}
        for run in runs:
            measured.setdefault(run.plan, []).append(prior.finite(run.error))
        return Estimate(
            memory,
            mean[levels] + prior.offsets,
            np.sqrt(deviation[levels] ** 2 + prior.doubt + prior.level(runs).common * noise**2),
            noise * np.sqrt(1 + prior.shared),
            {plan: float(np.mean(errors)) for plan, errors in measured.items()},
            prior,
            belief,
        )

    def front(self) -> NDArray[np.intp]:
        """Plans on the frontier of memory and mean error, the least memory first."""
        found = np.flatnonzero(undominated(self.memory, self.means))
        return found[np.argsort(self.memory[found], kind="stable")]

    def band(self, width: float = 1.645) -> tuple[Array, Array]:
        """Between which errors each plan's mean lies: nine times of ten, unless told otherwise."""
        return self.means - width * self.deviations, self.means + width * self.deviations

    def best(self, budget: float) -> Choice:
        """The plan with the least mean error within the budget; of equals the one with the least memory."""
        fits = np.flatnonzero(self.memory <= budget)
        if not len(fits):
            least = int(self.memory.argmin())
            smallest = f"{self.memory[least]:.6g} (plan {least}, error {self._text(least)})"
            raise BudgetError(f"no plan fits {budget:.6g}; the smallest needs {smallest}.")
        plan = int(fits[np.lexsort((self.memory[fits], self.means[fits]))[0]])
        chances = self.chance_below(plan)
        ties = tuple(int(other) for other in fits if other != plan and chances[other] >= DOUBT)
        return Choice(plan, float(self.means[plan]), float(self.deviations[plan]), ties, self._reason(plan, ties, len(fits)))

    def chance_below(self, plan: int) -> Array:
        """How likely each plan's mean error is less than this one's; a half where nothing tells them apart."""
        levels, own = self.prior.levels, self.prior.levels[plan]
        spreads, means = self.belief.spreads[0], self.belief.means[0]  # (kinds, levels, levels), (kinds, levels)
        diagonal = np.diagonal(spreads, axis1=-2, axis2=-1)
        variance = (diagonal + diagonal[:, own, None] - 2 * spreads[:, own])[:, levels]
        variance = variance + self.prior.doubt + self.prior.doubt[plan]
        apart = (means[:, own, None] - means)[:, levels] + self.prior.offsets[plan] - self.prior.offsets
        return self.belief.weights[0] @ _below(apart / np.sqrt(np.maximum(variance, 1e-18)))

    def _text(self, plan: int) -> str:
        return f"{self.means[plan]:.2f} +- {self.deviations[plan]:.2f}"

    def _reason(self, plan: int, ties: tuple[int, ...], num_fits: int) -> str:
        """Why this plan, and how sure that is."""
        runs = f"{len(self.measured)} measurement{'s' * (len(self.measured) != 1)}"
        sure = (
            f"{len(ties)} of the {num_fits} plans that fit may be as good"
            if ties
            else "no other plan that fits is likely to be better"
        )
        return f"mean error {self._text(plan)} after {runs} and {self.prior.num_tasks} earlier tasks; {sure}."


def _below(deviations: Array) -> Array:
    """How likely a normal number is below so many deviations; few are asked for, and scipy need not be there."""
    return np.vectorize(lambda value: 0.5 * math.erfc(-value / math.sqrt(2)), otypes=[float])(deviations)
