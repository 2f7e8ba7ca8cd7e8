"""A sweep runs tasks x plans x seeds, all of them or a random sample with known probabilities, by one of three methods:

    full         every task with every plan
    uniform      each (task, plan) pair with probability `share`
    cheap_first  each pair with probability share * rank / (N - 1), where rank N - 1 is the pair of the fewest predicted bytes and rank 0
                 that of the most, over all N pairs; trials run in this order, fewest bytes first

The last two are the sampling regimes of PEPPP. The probability is stored with each trial (`propensity`): matrix completion weights an
observed entry by its reciprocal. A pair that is drawn runs with every seed. `pairs` are further pairs, such as plans that `assign` makes
for each task; all of them run. `infeasible` are pairs of a task and a template for which `assign` finds no plan within the budget
(`InfeasiblePair`): their trials are written to the store with that status, and nothing runs.

>>> sweep = Sweep("widths", ("digits",), (Plan(), Plan.preset("activations4")), seeds=(0, 1))
>>> [(drawn.spec.seed, drawn.label, drawn.propensity) for drawn in sweep.draw()]
[(0, 'baseline', 1.0), (1, 'baseline', 1.0), (0, 'activations4', 1.0), (1, 'activations4', 1.0)]

A label is the name of a plan on a task, for readers; it is not part of the trial's key. `labels` has the user's labels; other plans are
named by their template, their preset or their formats.

`load_sweep` (study/sweeps/sweep_file.py) reads a sweep from a TOML file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from paredown.assignment.assign import TEMPLATE_FIELD, PlanTemplate, templates_of
from paredown.errors import SweepError
from paredown.plan.plan import CHECKPOINT_INPUTS, Plan
from paredown.serial import brief
from paredown.study.sweeps.plan_labels import TaskPlan, distinct_labels, plan_label

if TYPE_CHECKING:
    from paredown.study.tasks.trial import Trial

Cost = Callable[[str, Plan], int]  # bytes of a plan on a task
MODES = ("store", "simulate", "peppp")


class SamplingMethod(str, Enum):
    """Names the ways to draw the pairs of task and plan that a sweep runs."""

    FULL = "full"
    UNIFORM = "uniform"
    CHEAP_FIRST = "cheap_first"


@dataclass(frozen=True)
class TrialSettings:
    """The settings of a sweep's trials: mode, device (None: the worker's default) and time limit (None: no limit)."""

    mode: str = "store"
    device: str | None = None
    timeout_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise SweepError(f"mode {self.mode!r} is unknown. Allowed: {', '.join(MODES)}.")
        if self.timeout_seconds is not None and not self.timeout_seconds > 0:
            raise SweepError(f"timeout_seconds is {self.timeout_seconds!r}; it must be above 0. Leave it out for no limit.")


@dataclass(frozen=True)
class TrialSpec:
    """Says what a trial is to run: task, plan, seed and settings."""

    task: str
    plan: Plan
    seed: int
    settings: TrialSettings = TrialSettings()

    def key(self, sweep: str, *, infeasible: str = "") -> str:
        """Return the key of this trial in a database: a hash of sweep, task, plan, seed, mode, device, equal on any machine.

        An infeasible trial has no plan; its template `infeasible`, such as "assign 10% role", takes the place of the plan in the hash.
        """
        plan_rules, recompute, offload, products, tiles = self.plan.key
        rules: list[Any] = [[key, assignment.to_json()] for key, assignment in plan_rules] + [list(rule) for rule in products]
        rules += [["tile", *rule] for rule in tiles]
        moved = ["offload", *(offload if offload != CHECKPOINT_INPUTS else ())] if offload else []
        plan = [rules, list(recompute), *moved] if recompute or offload else rules
        parts = [
            sweep,
            self.task,
            {"infeasible": infeasible} if infeasible else plan,
            self.seed,
            self.settings.mode,
            self.settings.device,
        ]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


class DrawnTrial(NamedTuple):
    """A trial that a sweep drew, with its probability and its plan's label; `infeasible` says why no plan fits (then it does not run)."""

    spec: TrialSpec
    propensity: float
    label: str = ""
    infeasible: str = ""

    def key(self, sweep: str) -> str:
        """Return the key of this trial in a database of trials."""
        return self.spec.key(sweep, infeasible=templates_of(self.spec.plan)[0] if self.infeasible else "")

    def infeasible_keys(self, sweep: str) -> list[str]:
        """Return the keys under which a database has this trial if no plan fitted its budget when it was added."""
        return [] if self.infeasible else [self.spec.key(sweep, infeasible=text) for text in templates_of(self.spec.plan)]


class InfeasiblePair(NamedTuple):
    """A task and a template (`assign` with a budget) for which no plan fits, and the text of the BudgetError."""

    task: str
    template: PlanTemplate
    reason: str

    @property
    def plan(self) -> Plan:
        """Return a plan without rules that stands for the template (`assign` with a budget), which gave no plan."""
        return Plan((), self.reason, {TEMPLATE_FIELD: str(self.template)})


class Claim(NamedTuple):
    """A trial of a database that a worker has reserved and may run; the random `token` identifies the reservation."""

    key: str
    sweep: str
    spec: TrialSpec
    token: str
    attempt: int  # 1: the first time
    label: str = ""
    started_at: str | None = None
    host: str | None = None


class EndedTrial(NamedTuple):
    """A trial that a worker reserved in a database (`claim`) and that has ended, with its result.

    If the process of the trial died, `trial` is None and `reason` describes how it died. `host` None means the worker's host.
    """

    claim: Claim
    trial: Trial | None
    reason: str = ""
    host: str | None = None


@dataclass(frozen=True)
class SweepCounts:
    """Counts the trials of one sweep by state, and the finished ones by status."""

    sweep: str
    waiting: int = 0
    running: int = 0
    by_status: Mapping[str, int] = field(default_factory=dict[str, int], hash=False)

    @property
    def finished(self) -> int:
        """Return the number of trials with a result."""
        return sum(self.by_status.values())

    @property
    def total(self) -> int:
        """Return the number of all trials."""
        return self.waiting + self.running + self.finished

    def __str__(self) -> str:
        kinds = ", ".join(f"{num} {status}" for status, num in self.by_status.items())
        finished = f"{self.finished} of {self.total} finished" + (f" ({kinds})" if kinds else "")
        return f"{self.sweep}: {finished}, {self.running} running, {self.waiting} waiting"

    def to_json(self) -> dict[str, Any]:
        """Return the counts as a dict for JSON."""
        counts = {"sweep": self.sweep, "total": self.total, "finished": self.finished}
        return {**counts, "running": self.running, "waiting": self.waiting, "by_status": dict(self.by_status)}


@dataclass(frozen=True)
class Sweep:
    """Defines trials of tasks x plans x seeds under one name, of which all or a random part is run (`draw`)."""

    name: str
    tasks: tuple[str, ...]
    plans: tuple[Plan, ...] = field(repr=False)
    seeds: tuple[int, ...] = (0,)
    method: SamplingMethod = SamplingMethod.FULL
    share: float = 1.0
    draw_seed: int = 0
    settings: TrialSettings = TrialSettings()
    pairs: tuple[tuple[str, Plan], ...] = field(default=(), repr=False)
    labels: tuple[tuple[str, Plan | PlanTemplate], ...] = field(default=(), repr=False)  # or a mapping of labels to plans
    infeasible: tuple[InfeasiblePair, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "method", _method(self.method))
        object.__setattr__(self, "labels", _check_labels(self.labels))
        for word in ("tasks", "plans", "seeds"):
            values = tuple(getattr(self, word))
            object.__setattr__(self, word, values)
            if not values and (word != "plans" or not self.pairs):
                raise SweepError(self._why_empty(word))
            keys = [value.key if isinstance(value, Plan) else value for value in values]
            if len(set(keys)) != len(keys):
                duplicate = next(value for value, key in zip(values, keys, strict=True) if keys.count(key) > 1)
                raise SweepError(f"sweep {self.name!r} has one of its {word} twice: {duplicate!r}. Leave one out.")
        if not self.name.strip():
            raise SweepError("a sweep needs a name, which identifies it in a store.")
        if not 0 < self.share <= 1:
            raise SweepError(f"share is above 0 and at most 1, not {self.share!r}.")
        if not 0 <= self.draw_seed < 2**32:
            raise SweepError(f"draw_seed is from 0 to 2^32 - 1, not {self.draw_seed!r}.")
        if self.method is SamplingMethod.FULL and self.share != 1:
            raise SweepError(f"share {self.share:g} needs a method that samples: uniform or cheap_first.")
        known = {plan.key for plan in (*self.plans, *(plan for _, plan in self.pairs))}
        for label, plan in self.labels:
            if isinstance(plan, Plan) and plan.key not in known:
                raise SweepError(
                    f"label {label!r} is for a plan that sweep {self.name!r} does not have: add the plan, or leave it out."
                )

    def _why_empty(self, word: str) -> str:
        """Return a sentence on why a sweep has nothing to run; `word` says what it lacks: "tasks", "seeds" or "plans"."""
        if word != "plans" or not self.infeasible:
            return f"sweep {self.name!r} has no {word}; it needs at least one."
        first = self.infeasible[0]
        pairs = (
            f"all {len(self.infeasible)} pairs of task and plan are"
            if len(self.infeasible) > 1
            else "the only pair of task and plan is"
        )
        return f"sweep {self.name!r} has nothing to run: {pairs} infeasible. Task {first.task!r}, {first.template}: {first.reason}"

    def draw(self, cost: Cost | None = None) -> list[DrawnTrial]:
        """Return the trials to run, in order, then those that no plan fits; the method `cheap_first` needs `cost(task, plan)`."""
        propensities, order = self._propensities(cost)
        taken = draw_pairs(propensities, self.method, self.draw_seed)
        if not taken.any() and not self.pairs:
            num_pairs = len(self.tasks) * len(self.plans) + len(self.infeasible)
            raise SweepError(
                f"none of {num_pairs} pairs was drawn (share {self.share:g}, draw_seed {self.draw_seed}). "
                "Raise share, or change draw_seed."
            )
        pairs = [
            (self.tasks[i // len(self.plans)], self.plans[i % len(self.plans)], float(propensities[i])) for i in order if taken[i]
        ]
        if self.pairs:  # task by task, since workers cache the data of a task
            pairs = sorted([*pairs, *((task, plan, 1.0) for task, plan in self.pairs)], key=lambda pair: self.tasks.index(pair[0]))
        labels = self._labels()
        return [
            DrawnTrial(TrialSpec(task, plan, seed, self.settings), p, labels[task, plan.key])
            for task, plan, p in pairs
            for seed in self.seeds
        ] + self._infeasible_trials()

    def _infeasible_trials(self) -> list[DrawnTrial]:
        labels = {str(named): label for label, named in self.labels if isinstance(named, PlanTemplate)}
        named = [(pair, labels.get(str(pair.template), str(pair.template))) for pair in self.infeasible]
        return [
            DrawnTrial(TrialSpec(pair.task, pair.plan, seed, self.settings), 1.0, label, pair.reason)
            for pair, label in named
            for seed in self.seeds
        ]

    def _labels(self) -> dict[TaskPlan, str]:
        given: dict[Hashable, str] = {named.key if isinstance(named, Plan) else str(named): label for label, named in self.labels}
        shared = [(plan, label_of(plan, given)) for plan in self.plans]
        requests = [(task, plan, label) for task in self.tasks for plan, label in shared]
        requests += [(task, plan, label_of(plan, given)) for task, plan in self.pairs]
        # those of the user first: they get no number
        return distinct_labels(
            sorted(requests, key=lambda request: given.keys().isdisjoint([request[1].key, *templates_of(request[1])]))
        )

    def _propensities(self, cost: Cost | None) -> tuple[np.ndarray[Any, Any], Sequence[int]]:
        num = len(self.tasks) * len(self.plans)
        if self.method is not SamplingMethod.CHEAP_FIRST:
            return np.full(num, self.share), range(num)
        if cost is None:
            raise SweepError("cheap_first ranks plans by their bytes: pass draw(cost=...), a function (task, plan) -> bytes.")
        nbytes = np.array([cost(task, plan) for task in self.tasks for plan in self.plans], dtype=np.float64)
        return cheap_first_propensities(nbytes, self.share), [int(i) for i in np.argsort(nbytes, kind="stable")]


MAX_LABEL_CHARS = 200


def _check_labels(labels: Any) -> tuple[tuple[str, Plan | PlanTemplate], ...]:
    """Return `labels` as pairs; SweepError for a label that is no printable text, or that two plans have."""
    pairs = tuple(labels.items() if isinstance(labels, Mapping) else labels)
    texts = [label for label, _ in pairs]
    for label in texts:
        if not isinstance(label, str) or not label.strip() or not label.isprintable() or len(label) > MAX_LABEL_CHARS:
            raise SweepError(
                f"label {brief(label)} is not allowed; a label is a printable text of 1 to {MAX_LABEL_CHARS} characters."
            )
        if texts.count(label) > 1:
            raise SweepError(f"label {label!r} is given to {texts.count(label)} plans; give each plan its own.")
    return pairs


def label_of(plan: Plan, given: Mapping[Hashable, str] | None = None) -> str:
    """Return a plan's label: the one `given` for its key or its template, else its template's text, its preset, or its formats."""
    given = given or {}
    if plan.key in given:
        return given[plan.key]
    names = [given.get(text, text) for text in templates_of(plan)] or [plan_label(plan)]
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def cheap_first_propensities(nbytes: np.ndarray[Any, Any], share: float) -> np.ndarray[Any, Any]:
    """Return the probability to draw each pair: `share` for the fewest bytes, falling evenly by rank to 0 for the most."""
    if len(nbytes) == 1:
        return np.full(1, share)
    rank = np.empty(len(nbytes))
    rank[np.argsort(nbytes, kind="stable")] = np.arange(len(nbytes))[::-1]
    return share * rank / (len(nbytes) - 1)


def draw_pairs(propensities: np.ndarray[Any, Any], method: SamplingMethod, seed: int) -> np.ndarray[Any, Any]:
    """Return booleans that say which pairs of task and plan are drawn with these probabilities; all with the method `full`."""
    if method is SamplingMethod.FULL:
        return np.ones(len(propensities), dtype=bool)
    return np.random.RandomState(seed).uniform(size=len(propensities)) < propensities


def _method(method: SamplingMethod | str) -> SamplingMethod:
    try:
        return SamplingMethod(method)
    except ValueError:
        raise SweepError(f"method {method!r} is unknown. Allowed: {', '.join(m.value for m in SamplingMethod)}.") from None
