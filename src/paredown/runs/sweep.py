"""A sweep: tasks x plans x seeds, all of them or a sample that is drawn with known odds.

    full         every task with every plan
    uniform      each (task, plan) with probability `share`
    cheap_first  with probability share * rank / (N - 1), where rank N - 1 is the plan of the fewest bytes and rank 0 the one of
                 the most, over all N pairs; they run in that order, cheapest first

The last two are the regimes that PEPPP learns from. The probability is kept with each trial: completion weighs an observed
entry by its reciprocal. A pair that is drawn runs with every seed. `pairs` are further tasks with plans of their own, such as those that
`assign` makes for each task; all of them run.

>>> sweep = Sweep("widths", ("digits",), (Plan(), Plan.preset("activations4")), seeds=(0, 1))
>>> [(drawn.spec.seed, len(drawn.spec.plan.rules), drawn.propensity) for drawn in sweep.draw()]
[(0, 0, 1.0), (1, 0, 1.0), (0, 1, 1.0), (1, 1, 1.0)]
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from paredown.errors import SweepError
from paredown.plan.plan import Plan

Cost = Callable[[str, Plan], int]  # bytes of a plan on a task
MODES = ("store", "simulate", "peppp")


class Method(str, Enum):
    """How pairs of task and plan are drawn."""

    FULL = "full"
    UNIFORM = "uniform"
    CHEAP_FIRST = "cheap_first"


@dataclass(frozen=True)
class Settings:
    """How trials of a sweep run, beside task, plan and seed. None: the worker's own device; no end but the task's."""

    mode: str = "store"
    device: str | None = None
    timeout_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise SweepError(f"mode {self.mode!r} is unknown. Allowed: {', '.join(MODES)}.")
        if self.timeout_seconds is not None and not self.timeout_seconds > 0:
            raise SweepError(f"timeout_seconds is more than 0, not {self.timeout_seconds!r}; leave it out for no limit.")


@dataclass(frozen=True)
class TrialSpec:
    """A trial before it runs."""

    task: str
    plan: Plan
    seed: int
    settings: Settings = Settings()

    def key(self, sweep: str) -> str:
        """What tells this trial from the others of a store: the same for the same words, on any machine."""
        rules = [[key, assignment.to_json()] for key, assignment in self.plan.rules]
        plan = [rules, list(self.plan.recompute)] if self.plan.recompute else rules
        told = [sweep, self.task, plan, self.seed, self.settings.mode, self.settings.device]
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:32]


class Drawn(NamedTuple):
    """A trial of a sweep, and how likely it was to be drawn."""

    spec: TrialSpec
    propensity: float


@dataclass(frozen=True)
class Sweep:
    """Tasks x plans x seeds under one name; `method`, `share` and `draw_seed` say which pairs of task and plan are taken."""

    name: str
    tasks: tuple[str, ...]
    plans: tuple[Plan, ...] = field(repr=False)
    seeds: tuple[int, ...] = (0,)
    method: Method = Method.FULL
    share: float = 1.0
    draw_seed: int = 0
    settings: Settings = Settings()
    pairs: tuple[tuple[str, Plan], ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "method", _method(self.method))
        for word in ("tasks", "plans", "seeds"):
            values = tuple(getattr(self, word))
            object.__setattr__(self, word, values)
            if not values:
                raise SweepError(f"sweep {self.name!r} has no {word}; it needs one at least.")
            told = [(value.rules, value.recompute) if isinstance(value, Plan) else value for value in values]
            if len(set(told)) != len(told):
                twice = next(value for value, said in zip(values, told, strict=True) if told.count(said) > 1)
                raise SweepError(f"sweep {self.name!r} has one of its {word} twice: {twice!r}. Leave one out.")
        if not self.name.strip():
            raise SweepError("a sweep has a name: it is how a store finds it again.")
        if not 0 < self.share <= 1:
            raise SweepError(f"share is above 0 and at most 1, not {self.share!r}.")
        if not 0 <= self.draw_seed < 2**32:
            raise SweepError(f"draw_seed is from 0 to 2^32 - 1, not {self.draw_seed!r}.")
        if self.method is Method.FULL and self.share != 1:
            raise SweepError(f"share {self.share:g} needs a method that samples: uniform or cheap_first.")

    @property
    def num_pairs(self) -> int:
        """Pairs of task and plan, drawn or not."""
        return len(self.tasks) * len(self.plans) + len(self.pairs)

    def draw(self, cost: Cost | None = None) -> list[Drawn]:
        """The trials to run, in the order to run them. `cost` gives bytes, and `cheap_first` needs it."""
        odds, order = self._odds(cost)
        taken = draw_pairs(odds, self.method, self.draw_seed)
        if not taken.any() and not self.pairs:
            raise SweepError(
                f"the draw took none of {self.num_pairs} pairs (share {self.share:g}, draw_seed {self.draw_seed}). "
                "Raise share, or change draw_seed."
            )
        pairs = [(self.tasks[i // len(self.plans)], self.plans[i % len(self.plans)], float(odds[i])) for i in order if taken[i]]
        if self.pairs:  # task by task: who trains a task has its data at hand
            pairs = sorted([*pairs, *((task, plan, 1.0) for task, plan in self.pairs)], key=lambda pair: self.tasks.index(pair[0]))
        return [Drawn(TrialSpec(task, plan, seed, self.settings), p) for task, plan, p in pairs for seed in self.seeds]

    def _odds(self, cost: Cost | None) -> tuple[np.ndarray[Any, Any], Sequence[int]]:
        """The probability of each pair, task by task, and the order in which they run."""
        num = len(self.tasks) * len(self.plans)
        if self.method is not Method.CHEAP_FIRST:
            return np.full(num, self.share), range(num)
        if cost is None:
            raise SweepError("cheap_first ranks plans by the bytes they need: give draw(cost=...), bytes of (task, plan).")
        nbytes = np.array([cost(task, plan) for task in self.tasks for plan in self.plans], dtype=np.float64)
        return cheap_odds(nbytes, self.share), [int(i) for i in np.argsort(nbytes, kind="stable")]


def cheap_odds(nbytes: np.ndarray[Any, Any], share: float) -> np.ndarray[Any, Any]:
    """share * rank(1 / nbytes) / (N - 1): the cheapest of N pairs gets `share`, the dearest 0. Of equals, the first is cheaper."""
    if len(nbytes) == 1:
        return np.full(1, share)
    rank = np.empty(len(nbytes))
    rank[np.argsort(nbytes, kind="stable")] = np.arange(len(nbytes))[::-1]
    return share * rank / (len(nbytes) - 1)


def draw_pairs(odds: np.ndarray[Any, Any], method: Method, seed: int) -> np.ndarray[Any, Any]:
    """Which pairs are taken, each by itself with its own probability; the stream is numpy's legacy one, as in PEPPP's release."""
    if method is Method.FULL:
        return np.ones(len(odds), dtype=bool)
    return np.random.RandomState(seed).uniform(size=len(odds)) < odds


def _method(method: Method | str) -> Method:
    try:
        return Method(method)
    except ValueError:
        raise SweepError(f"method {method!r} is unknown. Allowed: {', '.join(m.value for m in Method)}.") from None
