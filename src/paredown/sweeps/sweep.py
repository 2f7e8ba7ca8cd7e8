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

A sweep from a TOML file.

name = "widths"
tasks = ["digits", "my_tasks.py:small"]      # files lie beside this one
seeds = [0, 1, 2]
method = "uniform"                           # full (the default), uniform, cheap_first
share = 0.2
mode = "store"                               # or simulate
timeout_seconds = 3600
store = "trials.db"                          # unless --store or PAREDOWN_STORE says otherwise

[[plans]]                                    # the step as it is written
[[plans]]
preset = "lpmm"
[[plans]]
file = "plan.json"
[[plans]]                                    # lists are crossed: 2 x 1 plans
activation = ["int4/64@bf16", "int8/64@bf16"]
weight = "int8/64@e8m0"
rounding = "stochastic"
[[plans]]                                    # made for each task: its own formats, slot by slot
assign = ["40%", "60%"]
method = ["role", "size"]
[[plans]]                                    # PEPPP's configurations, for model=sumlast18 and mode = "peppp"
peppp_low = ["e4m3", "e5m2"]
peppp_high = ["e6m7", "e8m11"]
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from enum import Enum
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from paredown.assign.assign import PlanTemplate, make_plans
from paredown.errors import ParedownError, SweepError
from paredown.plan.plan import Plan
from paredown.simulate.peppp import parse_peppp, peppp_plan

Cost = Callable[[str, Plan], int]  # bytes of a plan on a task
MODES = ("store", "simulate", "peppp")


class SamplingMethod(str, Enum):
    """How pairs of task and plan are drawn."""

    FULL = "full"
    UNIFORM = "uniform"
    CHEAP_FIRST = "cheap_first"


@dataclass(frozen=True)
class TrialSettings:
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
    settings: TrialSettings = TrialSettings()

    def key(self, sweep: str) -> str:
        """What tells this trial from the others of a store: the same for the same words, on any machine."""
        rules = [[key, assignment.to_json()] for key, assignment in self.plan.rules]
        plan = [rules, list(self.plan.recompute)] if self.plan.recompute else rules
        told = [sweep, self.task, plan, self.seed, self.settings.mode, self.settings.device]
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:32]


class DrawnTrial(NamedTuple):
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
    method: SamplingMethod = SamplingMethod.FULL
    share: float = 1.0
    draw_seed: int = 0
    settings: TrialSettings = TrialSettings()
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
        if self.method is SamplingMethod.FULL and self.share != 1:
            raise SweepError(f"share {self.share:g} needs a method that samples: uniform or cheap_first.")

    @property
    def num_pairs(self) -> int:
        """Pairs of task and plan, drawn or not."""
        return len(self.tasks) * len(self.plans) + len(self.pairs)

    def draw(self, cost: Cost | None = None) -> list[DrawnTrial]:
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
        return [DrawnTrial(TrialSpec(task, plan, seed, self.settings), p) for task, plan, p in pairs for seed in self.seeds]

    def _odds(self, cost: Cost | None) -> tuple[np.ndarray[Any, Any], Sequence[int]]:
        """The probability of each pair, task by task, and the order in which they run."""
        num = len(self.tasks) * len(self.plans)
        if self.method is not SamplingMethod.CHEAP_FIRST:
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


def draw_pairs(odds: np.ndarray[Any, Any], method: SamplingMethod, seed: int) -> np.ndarray[Any, Any]:
    """Which pairs are taken, each by itself with its own probability; the stream is numpy's legacy one, as in PEPPP's release."""
    if method is SamplingMethod.FULL:
        return np.ones(len(odds), dtype=bool)
    return np.random.RandomState(seed).uniform(size=len(odds)) < odds


def _method(method: SamplingMethod | str) -> SamplingMethod:
    try:
        return SamplingMethod(method)
    except ValueError:
        raise SweepError(f"method {method!r} is unknown. Allowed: {', '.join(m.value for m in SamplingMethod)}.") from None


# --- A sweep from a TOML file ---

LARGEST = 1 << 24  # bytes of a file
DOTTED = re.compile(r"""(?:(?:[\w-]{1,99}|"[^"\n]{0,99}"|'[^'\n]{0,99}')[ \t]*\.[ \t]*){100}""")
SETTINGS = tuple(row.name for row in fields(TrialSettings))
PLAIN = tuple(row.name for row in fields(Sweep) if row.name not in ("plans", "settings", "pairs"))
KINDS: dict[str, tuple[type, ...]] = {
    "name": (str,),
    "tasks": (list,),
    "seeds": (list,),
    "method": (str,),
    "share": (int, float),
    "draw_seed": (int,),
    "mode": (str,),
    "device": (str,),
    "timeout_seconds": (int, float),
    "plans": (list,),
    "store": (str,),
}
MEMBERS: dict[str, type] = {"tasks": str, "seeds": int, "plans": dict}


class SweepFile(NamedTuple):
    """What a file says: the sweep, the store if it names one, and the folder of its tasks."""

    sweep: Sweep
    store: str | None
    folder: Path


def load_sweep(path: str | Path) -> SweepFile:
    """The sweep of a TOML file; SweepError says what is wrong, and in which line or table."""
    path = Path(path)
    try:
        return _read(_parsed(path), path)
    except FileNotFoundError:
        raise SweepError(f"there is no sweep {path}.") from None
    except ParedownError as error:
        raise SweepError(f"{path}: {error}") from None
    except (OSError, ValueError, RecursionError) as error:  # ValueError: no UTF-8, no TOML, a number of thousands of digits
        raise SweepError(f"{path} cannot be read: {str(error)[:300]}.") from None


def _parsed(path: Path) -> dict[str, Any]:
    """The TOML of a file; a few bytes could keep the parser busy for hours: keys of many parts take it the square of their number."""
    if path.stat().st_size > LARGEST:
        raise SweepError(f"it has {path.stat().st_size} bytes; a sweep has at most {LARGEST}.")
    text = path.read_text(encoding="utf-8")
    if DOTTED.search(text):
        raise SweepError("it has a key of more than a hundred parts; a sweep's keys have one.")
    return tomllib.loads(text)


def _read(value: dict[str, Any], path: Path) -> SweepFile:
    for word, part in value.items():
        _check(word, part)
    missing = [word for word in ("tasks", "plans") if word not in value]
    if missing:
        raise SweepError(f"{missing[0]} is missing; a sweep needs tasks and plans.")
    folder = path.resolve().parent
    made = [one for i, table in enumerate(value["plans"], 1) for one in _plans(table, folder, i)]
    plans, recipes = tuple(p for p in made if isinstance(p, Plan)), [r for r in made if isinstance(r, PlanTemplate)]
    plain: dict[str, Any] = {"name": path.stem} | {word: value[word] for word in PLAIN if word in value}
    settings = TrialSettings(**{word: value[word] for word in SETTINGS if word in value})
    sweep = Sweep(**plain, plans=plans, settings=settings)
    if recipes:
        pairs = tuple((task, plan) for task in sweep.tasks for plan in _made(task, recipes, folder, settings.device))
        known = {(plan.rules, plan.recompute) for plan in plans}
        sweep = replace(sweep, pairs=tuple((t, p) for t, p in pairs if (p.rules, p.recompute) not in known))
    return SweepFile(sweep, _beside(value.get("store"), folder), folder)


def _made(task: str, recipes: list[PlanTemplate], folder: Path, device: str | None) -> list[Plan]:
    """The plans of templates for a task, traced for the device where its trials run; as in `pick`, for plans that format state."""
    from paredown.tasks.lookup import cached_task  # importing torch takes seconds, and sweeps without templates need none here
    from paredown.tasks.task_trace import trace_task

    try:
        return make_plans(recipes, trace_task(cached_task(task, folder), Plan.preset("lpmm"), device))
    except ParedownError as error:
        raise SweepError(f"task {task!r}: {error}") from None


def _check(word: str, value: Any) -> None:
    if word not in KINDS:
        hint = f" Did you mean {close[0]!r}?" if (close := get_close_matches(word, KINDS, 1)) else ""
        raise SweepError(f"{word!r} is unknown.{hint} Allowed: {', '.join(KINDS)}.")
    if not isinstance(value, KINDS[word]) or isinstance(value, bool):
        raise SweepError(f"{word} is of type {KINDS[word][-1].__name__}, not {type(value).__name__}.")
    if word in MEMBERS and not all(isinstance(part, MEMBERS[word]) and not isinstance(part, bool) for part in value):
        raise SweepError(f"{word} is a list of {MEMBERS[word].__name__} alone, not {value!r}.")


def _plans(table: dict[str, Any], folder: Path, number: int) -> Sequence[Plan | PlanTemplate]:
    """The plans of one [[plans]] table: a preset, a file, recipes, or every combination of the formats of its roles."""
    try:
        for word, (make, others) in SOURCES.items():
            if word in table:
                if unknown := sorted(set(table) - {word, *others}):
                    beside = f"goes with {', '.join(others)} alone" if others else "stands alone"
                    raise SweepError(f"{word} {beside}; leave out {', '.join(unknown)}.")
                return make(table, folder)
        return [Plan.uniform(**choice) for choice in _crossed(table)]
    except (ParedownError, OSError, TypeError, ValueError) as error:
        raise SweepError(f"plan {number} of the file: {error}") from None


def _crossed(table: dict[str, Any]) -> list[dict[str, Any]]:
    """Every combination of what stands in lists."""
    choices = [value if isinstance(value, list) else [value] for value in table.values()]
    return [dict(zip(table, choice, strict=True)) for choice in product(*choices)]


def _recipes(table: dict[str, Any], folder: Path) -> list[PlanTemplate]:
    return [PlanTemplate(str(one["assign"]), one.get("method", "role")) for one in _crossed(table)]


def _peppp(table: dict[str, Any], folder: Path) -> list[Plan]:
    words = ("peppp_low", "peppp_high")
    if missing := [word for word in words if word not in table]:
        raise SweepError(f"{missing[0]} is missing; a configuration of PEPPP has a low format and a high one.")
    chosen = [[one[word] for word in words] for one in _crossed({word: table[word] for word in words})]
    return [peppp_plan(*(parse_peppp(text) for text in pair)) for pair in chosen]


Make = Callable[[dict[str, Any], Path], Sequence[Plan | PlanTemplate]]
SOURCES: dict[str, tuple[Make, tuple[str, ...]]] = {  # word: what it makes, and the words that go with it
    "preset": (lambda table, folder: [Plan.preset(table["preset"])], ()),
    "file": (lambda table, folder: [Plan.load(folder / table["file"])], ()),
    "assign": (_recipes, ("method",)),
    "peppp_low": (_peppp, ("peppp_high",)),
}


def _beside(store: str | None, folder: Path) -> str | None:
    """A path is meant from the file's folder; a URL is itself."""
    return store if store is None or "://" in store else str(folder / store)
