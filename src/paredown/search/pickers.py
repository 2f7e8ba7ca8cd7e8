"""The published ways to learn a new task's frontier from a few measurements, each a row of `PICKERS`.

    ED-MF       least squares on the plans' vectors, at a D-optimal design; the vectors are those of the completed matrix
    QR-MF       the same at the pivots; `ED-MF relaxed`: at the rounded relaxation; `ED-MF plugged`: the front has what was measured
    random-MF   the same at random plans
    BO-MF       a Gaussian process over the plans' vectors, plans by expected improvement, begun at five random ones
    BO-full     the same over whole columns of the matrix
    means       the columns' means: what is known without measuring; `most memory`: the same, recommending the largest plan

A picker sees `Known` and asks `measure(plan)`, at most as often as it is told: it cannot look at what it did not pay for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from paredown.search.bayes import Process, expected_improvement, squared_distances
from paredown.search.design import DESIGNS, first_at_random, scattered
from paredown.search.embedding import RANK, embed, predict

Array = NDArray[np.float64]
Measure = Callable[[int], float]


@dataclass(frozen=True)
class Known:
    """What a picker may know of a new task, its feasible plans alone.

    `earlier`: errors of earlier tasks (tasks, plans), NaN where nobody looked; `completed`: the same without gaps. `levels`: a number for
    each plan, the same for plans that may differ by noise alone, None where that is not known; `seed`: for pickers that throw dice.
    """

    earlier: Array
    completed: Array
    memory: Array
    levels: NDArray[np.intp] | None = None
    seed: int = 0


@dataclass(frozen=True)
class Prediction:
    """Errors of every plan after some measurements.

    `predicted`: means; `expected`: the same with what was measured in its place, to recommend by; `drawn`: what the front is drawn from.
    `deviations`: standard deviations of one run of each plan about its mean; None where a way has none.
    """

    chosen: tuple[int, ...]
    predicted: Array
    expected: Array
    drawn: Array
    deviations: Array | None = None


Picker = Callable[[Known, Measure, Iterable[int]], dict[int, Prediction]]


def plain(chosen: list[int], measured: Array, predicted: Array) -> Prediction:
    """As published: the front is drawn from predictions alone."""
    return Prediction(tuple(chosen), predicted, with_measured(predicted, chosen, measured), predicted)


def with_measured(predicted: Array, chosen: list[int], measured: Array) -> Array:
    """`predicted` with what was measured in its place."""
    expected = predicted.copy()
    expected[chosen] = measured
    return expected


def factorised(design: Callable[[Array, int, int], list[int]]) -> Picker:
    """Least squares at a design (of vectors, count and seed)."""

    def pick(known: Known, measure: Measure, counts: Iterable[int]) -> dict[int, Prediction]:
        vectors = embed(known.completed)
        found: dict[int, Prediction] = {}
        for count in counts:
            chosen = design(vectors, count, known.seed)
            measured = np.array([measure(plan) for plan in chosen])
            found[count] = plain(chosen, measured, predict(vectors, chosen, measured))
        return found

    return pick


def plugged(picker: Picker) -> Picker:
    """The same with the front drawn from what was measured too."""

    def pick(known: Known, measure: Measure, counts: Iterable[int]) -> dict[int, Prediction]:
        return {count: replace(found, drawn=found.expected) for count, found in picker(known, measure, counts).items()}

    return pick


def bayesian(points_of: Callable[[Known], Array], *, is_released: bool = False) -> Picker:
    """Expected improvement over points; `is_released`: the plan with the least of it is next."""

    def pick(known: Known, measure: Measure, counts: Iterable[int]) -> dict[int, Prediction]:
        squares, wanted = squared_distances(points_of(known)), set(counts)
        chosen = first_at_random(len(squares), RANK, seed=known.seed)
        found: dict[int, Prediction] = {}
        for count in range(RANK, max(wanted) + 1):
            measured = np.array([measure(plan) for plan in chosen])
            mean, deviation = Process.fitted(squares, chosen, measured).predict()
            if count in wanted:
                found[count] = plain(chosen, measured, mean)
            gains = expected_improvement(mean, deviation, measured.min()) * (-1 if is_released else 1)
            gains[chosen] = -np.inf
            chosen = [*chosen, int(gains.argmax())]
        return found

    return pick


def averaged(known: Known, measure: Measure, counts: Iterable[int]) -> dict[int, Prediction]:
    """Nothing is measured: means over earlier tasks."""
    means = known.completed.mean(axis=0)
    return {count: plain([], np.empty(0), means) for count in counts}


def heaviest(known: Known, measure: Measure, counts: Iterable[int]) -> dict[int, Prediction]:
    """Nothing is measured, and a random one of the plans that need most memory is recommended."""
    dice = np.random.RandomState(known.seed).permutation(len(known.memory))
    ranks = np.empty(len(dice))
    ranks[np.lexsort((dice, -known.memory))] = np.arange(len(dice))
    return {count: replace(found, expected=ranks) for count, found in averaged(known, measure, counts).items()}


PICKERS: Mapping[str, Picker] = MappingProxyType(
    {
        "ED-MF": factorised(lambda vectors, count, seed: DESIGNS["optimal"](vectors, count)),
        "ED-MF+5": factorised(lambda vectors, count, seed: DESIGNS["optimal"](vectors, count + RANK)),  # as released: five more
        "ED-MF plugged": plugged(factorised(lambda vectors, count, seed: DESIGNS["optimal"](vectors, count))),
        "ED-MF relaxed": factorised(lambda vectors, count, seed: DESIGNS["relaxed"](vectors, count)),
        "QR-MF": factorised(lambda vectors, count, seed: DESIGNS["pivoted"](vectors, count)),
        "random-MF": factorised(lambda vectors, count, seed: scattered(vectors.shape[1], count, seed=seed)),
        "BO-MF": bayesian(lambda known: embed(known.completed).T),
        "BO-MF worst": bayesian(lambda known: embed(known.completed).T, is_released=True),
        "BO-full": bayesian(lambda known: known.completed.T),
        "means": averaged,
        "most memory": heaviest,
    }
)
