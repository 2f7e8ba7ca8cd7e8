"""A sweep: tasks x plans x seeds, all of them or a random sample with known probabilities.

    full         every task with every plan
    uniform      each (task, plan) pair with probability `share`
    cheap_first  each pair with probability share * rank / (N - 1), where rank N - 1 is the pair of the fewest predicted bytes and rank 0
                 that of the most, over all N pairs; trials run in this order, fewest bytes first

The last two are the sampling regimes of PEPPP. The probability is stored with each trial (`propensity`): matrix completion weights an
observed entry by its reciprocal. A pair that is drawn runs with every seed. `pairs` are further pairs, such as plans that `assign` makes
for each task; all of them run.

>>> sweep = Sweep("widths", ("digits",), (Plan(), Plan.preset("activations4")), seeds=(0, 1))
>>> [(drawn.spec.seed, drawn.label, drawn.propensity) for drawn in sweep.draw()]
[(0, 'baseline', 1.0), (1, 'baseline', 1.0), (0, 'activations4', 1.0), (1, 'activations4', 1.0)]

A label is the name of a plan on a task, for readers; it is not part of the trial's key. `labels` has those of the user; other plans are
named by their template, their preset or their formats.

`load_sweep` reads a sweep from a TOML file:

name = "widths"
tasks = ["digits", "my_tasks.py:small"]      # files in the folder of this one
seeds = [0, 1, 2]
method = "uniform"                           # full (the default), uniform, cheap_first
share = 0.2
mode = "store"                               # or simulate
timeout_seconds = 3600
store = "trials.db"                          # --store and PAREDOWN_STORE replace it

[[plans]]                                    # the baseline
[[plans]]
preset = ["lpmm", "activations4"]            # a plan each; or one text
[[plans]]
file = "plan.json"
label = "mine"                               # its name in status, exports and pages; a list where a table makes several plans
[[plans]]                                    # all combinations of lists: 2 x 1 plans
activation = ["int4/64@bf16", "int8/64@bf16"]
weight = "int8/64@e8m0"
rounding = "stochastic"
[[plans]]                                    # made for each task: formats slot by slot
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
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from enum import Enum
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from paredown.assign.assign import PlanTemplate, make_plans, templates_of
from paredown.errors import ParedownError, SweepError
from paredown.plan.labels import TaskPlan, distinct_labels, plan_label
from paredown.plan.plan import Plan
from paredown.serial import brief

if TYPE_CHECKING:
    from paredown.tasks.trial import Trial

Cost = Callable[[str, Plan], int]  # bytes of a plan on a task
MODES = ("store", "simulate", "peppp")


class SamplingMethod(str, Enum):
    """How pairs of task and plan are drawn."""

    FULL = "full"
    UNIFORM = "uniform"
    CHEAP_FIRST = "cheap_first"


@dataclass(frozen=True)
class TrialSettings:
    """Mode, device (None: the worker's default) and time limit (None: no limit) of the trials of a sweep."""

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
    """A trial before it runs: task, plan, seed and settings."""

    task: str
    plan: Plan
    seed: int
    settings: TrialSettings = TrialSettings()

    def key(self, sweep: str) -> str:
        """The key of this trial in a store: a hash of sweep, task, plan, seed, mode and device, the same on any machine."""
        plan_rules, recompute, offload = self.plan.key
        rules = [[key, assignment.to_json()] for key, assignment in plan_rules]
        plan = (
            [rules, list(recompute), *[offload] * offload] if recompute or offload else rules
        )  # keys of other plans are as before
        parts = [sweep, self.task, plan, self.seed, self.settings.mode, self.settings.device]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


class DrawnTrial(NamedTuple):
    """A trial of a sweep, the probability that it was drawn, and the label of its plan (empty: none)."""

    spec: TrialSpec
    propensity: float
    label: str = ""


class Claim(NamedTuple):
    """A trial that a worker has claimed and may run, with the label of its plan, the time of the claim (UTC) and the worker's host."""

    key: str
    sweep: str
    spec: TrialSpec
    token: str
    attempt: int  # 1: the first time
    label: str = ""
    started_at: str | None = None
    host: str | None = None


class EndedTrial(NamedTuple):
    """A claim and its result; `trial` is None where the process died, and `reason` describes how. `host`: None: the worker's."""

    claim: Claim
    trial: Trial | None
    reason: str = ""
    host: str | None = None


@dataclass(frozen=True)
class Sweep:
    """Tasks x plans x seeds under one name; `method`, `share` and `draw_seed` decide which pairs of task and plan are drawn."""

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

    def __post_init__(self) -> None:
        object.__setattr__(self, "method", _method(self.method))
        object.__setattr__(self, "labels", _check_labels(self.labels))
        for word in ("tasks", "plans", "seeds"):
            values = tuple(getattr(self, word))
            object.__setattr__(self, word, values)
            if not values:
                raise SweepError(f"sweep {self.name!r} has no {word}; it needs at least one.")
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

    @property
    def num_pairs(self) -> int:
        """The number of pairs of task and plan, drawn or not."""
        return len(self.tasks) * len(self.plans) + len(self.pairs)

    def draw(self, cost: Cost | None = None) -> list[DrawnTrial]:
        """The trials to run, in their order. `cost(task, plan)` is the predicted bytes, which `cheap_first` needs."""
        propensities, order = self._propensities(cost)
        taken = draw_pairs(propensities, self.method, self.draw_seed)
        if not taken.any() and not self.pairs:
            raise SweepError(
                f"none of {self.num_pairs} pairs was drawn (share {self.share:g}, draw_seed {self.draw_seed}). "
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
        ]

    def _labels(self) -> dict[TaskPlan, str]:
        """The label of every plan on every task: that of the user, else of its templates, else its preset or formats."""
        given: dict[Hashable, str] = {named.key if isinstance(named, Plan) else str(named): label for label, named in self.labels}
        shared = [(plan, label_of(plan, given)) for plan in self.plans]
        requests = [(task, plan, label) for task in self.tasks for plan, label in shared]
        requests += [(task, plan, label_of(plan, given)) for task, plan in self.pairs]
        # those of the user first: they get no number
        return distinct_labels(
            sorted(requests, key=lambda request: given.keys().isdisjoint([request[1].key, *templates_of(request[1])]))
        )

    def _propensities(self, cost: Cost | None) -> tuple[np.ndarray[Any, Any], Sequence[int]]:
        """The probability of each pair, task by task, and the order in which pairs run."""
        num = len(self.tasks) * len(self.plans)
        if self.method is not SamplingMethod.CHEAP_FIRST:
            return np.full(num, self.share), range(num)
        if cost is None:
            raise SweepError("cheap_first ranks plans by their bytes: pass draw(cost=...), a function (task, plan) -> bytes.")
        nbytes = np.array([cost(task, plan) for task in self.tasks for plan in self.plans], dtype=np.float64)
        return cheap_first_propensities(nbytes, self.share), [int(i) for i in np.argsort(nbytes, kind="stable")]


MAX_LABEL_CHARS = 200


def _check_labels(labels: Any) -> tuple[tuple[str, Plan | PlanTemplate], ...]:
    """`labels` as pairs; SweepError for a label that is no printable text, or that two plans have."""
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
    """The label of a plan: that of `given`, which has labels by key of a plan or text of a template, or its template, preset or formats."""
    given = given or {}
    if plan.key in given:
        return given[plan.key]
    names = [given.get(text, text) for text in templates_of(plan)] or [plan_label(plan)]
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def cheap_first_propensities(nbytes: np.ndarray[Any, Any], share: float) -> np.ndarray[Any, Any]:
    """share * rank / (N - 1): `share` for the pair of the fewest bytes, 0 for that of the most. Of equal ones, the first ranks higher."""
    if len(nbytes) == 1:
        return np.full(1, share)
    rank = np.empty(len(nbytes))
    rank[np.argsort(nbytes, kind="stable")] = np.arange(len(nbytes))[::-1]
    return share * rank / (len(nbytes) - 1)


def draw_pairs(propensities: np.ndarray[Any, Any], method: SamplingMethod, seed: int) -> np.ndarray[Any, Any]:
    """A mask of the pairs that are drawn, each independently with its probability, by numpy's RandomState as in PEPPP's release."""
    if method is SamplingMethod.FULL:
        return np.ones(len(propensities), dtype=bool)
    return np.random.RandomState(seed).uniform(size=len(propensities)) < propensities


def _method(method: SamplingMethod | str) -> SamplingMethod:
    try:
        return SamplingMethod(method)
    except ValueError:
        raise SweepError(f"method {method!r} is unknown. Allowed: {', '.join(m.value for m in SamplingMethod)}.") from None


# --- A sweep from a TOML file ---

MAX_FILE_BYTES = 1 << 24
DOTTED = re.compile(r"""(?:(?:[\w-]{1,99}|"[^"\n]{0,99}"|'[^'\n]{0,99}')[ \t]*\.[ \t]*){100}""")
SETTINGS = tuple(row.name for row in fields(TrialSettings))
PLAIN = tuple(row.name for row in fields(Sweep) if row.name not in ("plans", "settings", "pairs", "labels"))
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
    """The contents of a sweep file: the sweep, its store (None: not named), and the folder of its tasks."""

    sweep: Sweep
    store: str | None
    folder: Path


def load_sweep(path: str | Path) -> SweepFile:
    """The sweep of a TOML file; SweepError names the line or table with an error."""
    path = Path(path)
    try:
        return _read(_parsed(path), path)
    except FileNotFoundError:
        raise SweepError(f"there is no sweep file {path}.") from None
    except ParedownError as error:
        raise SweepError(f"{path}: {error}") from None
    except (OSError, ValueError, RecursionError) as error:  # ValueError: not UTF-8, not TOML, or a number of thousands of digits
        raise SweepError(f"{path} cannot be read: {str(error)[:300]}.") from None


def _parsed(path: Path) -> dict[str, Any]:
    """The TOML of a file. Dotted keys of many parts are refused: tomllib takes quadratic time for them, hours for a small file."""
    if path.stat().st_size > MAX_FILE_BYTES:
        raise SweepError(f"it has {path.stat().st_size} bytes; a sweep file has at most {MAX_FILE_BYTES}.")
    text = path.read_text(encoding="utf-8")
    if DOTTED.search(text):
        raise SweepError("it has a dotted key of more than a hundred parts; keys of a sweep have one part.")
    return tomllib.loads(text)


def _read(value: dict[str, Any], path: Path) -> SweepFile:
    for word, part in value.items():
        _check(word, part)
    missing = [word for word in ("tasks", "plans") if word not in value]
    if missing:
        raise SweepError(f"{missing[0]} is missing; a sweep needs tasks and plans.")
    folder = path.resolve().parent
    entries, labels = _entries(value["plans"], folder)
    plans, templates = tuple(p for p in entries if isinstance(p, Plan)), [t for t in entries if isinstance(t, PlanTemplate)]
    plain: dict[str, Any] = {"name": path.stem} | {word: value[word] for word in PLAIN if word in value}
    settings = TrialSettings(**{word: value[word] for word in SETTINGS if word in value})
    sweep = Sweep(**plain, plans=plans, settings=settings, labels=labels)
    if templates:
        pairs = tuple(
            (task, plan) for task in sweep.tasks for plan in _plans_of_templates(task, templates, folder, settings.device)
        )
        known = {plan.key for plan in plans}
        sweep = replace(sweep, pairs=tuple((t, p) for t, p in pairs if p.key not in known))
    return SweepFile(sweep, _beside(value.get("store"), folder), folder)


def _plans_of_templates(task: str, templates: list[PlanTemplate], folder: Path, device: str | None) -> list[Plan]:
    """The plans of templates for a task, traced for the device where its trials run; as in `pick`, for plans that format state."""
    from paredown.tasks.lookup import cached_task  # importing torch takes seconds, and sweeps without templates need none here
    from paredown.tasks.task_trace import trace_task

    try:
        return make_plans(templates, trace_task(cached_task(task, folder), Plan.preset("lpmm"), device))
    except ParedownError as error:
        raise SweepError(f"task {task!r}: {error}") from None


def _check(word: str, value: Any) -> None:
    if word not in KINDS:
        hint = f" Did you mean {close[0]!r}?" if (close := get_close_matches(word, KINDS, 1)) else ""
        raise SweepError(f"{word!r} is unknown.{hint} Allowed: {', '.join(KINDS)}.")
    if not isinstance(value, KINDS[word]) or isinstance(value, bool):
        raise SweepError(f"{word} must be of type {KINDS[word][-1].__name__}, not {type(value).__name__}.")
    if word in MEMBERS and not all(isinstance(part, MEMBERS[word]) and not isinstance(part, bool) for part in value):
        raise SweepError(f"{word} must be a list of {MEMBERS[word].__name__}, not {value!r}.")


Entry = Plan | PlanTemplate


def _entries(tables: list[dict[str, Any]], folder: Path) -> tuple[list[Entry], tuple[tuple[str, Entry], ...]]:
    """The plans and templates of all [[plans]] tables, and those that have a label, with it."""
    entries: list[Entry] = []
    labels: list[tuple[str, Entry]] = []
    for number, table in enumerate(tables, 1):
        new = _plans({word: value for word, value in table.items() if word != "label"}, folder, number)
        entries += new
        if "label" in table:
            labels += zip(_table_labels(table["label"], len(new), number), new, strict=True)
    return entries, tuple(labels)


def _table_labels(value: Any, num_plans: int, number: int) -> list[str]:
    """The labels of one [[plans]] table: a text for one plan, or a list with a text for each."""
    labels = value if isinstance(value, list) else [value]
    if len(labels) != num_plans:
        needs = f"a list of {num_plans} labels" if num_plans > 1 else "one label"
        raise SweepError(f"plan {number} of the file: label has {len(labels)} text{'s' * (len(labels) != 1)}; it needs {needs}.")
    return labels


def _plans(table: dict[str, Any], folder: Path, number: int) -> Sequence[Entry]:
    """The plans of one [[plans]] table: a preset, a file, templates, or every combination of the formats of its roles."""
    try:
        for word, (make, others) in SOURCES.items():
            if word in table:
                if unknown := sorted(set(table) - {word, *others}):
                    allowed = f"allows only {', '.join(others)} beside it" if others else "allows no other key"
                    raise SweepError(f"{word} {allowed}; leave out {', '.join(unknown)}.")
                return make(table, folder)
        return [Plan.uniform(**choice) for choice in _crossed(table)]
    except (ParedownError, OSError, TypeError, ValueError) as error:
        raise SweepError(f"plan {number} of the file: {error}") from None


def _crossed(table: dict[str, Any]) -> list[dict[str, Any]]:
    """Every combination of the values of lists."""
    choices = [value if isinstance(value, list) else [value] for value in table.values()]
    return [dict(zip(table, choice, strict=True)) for choice in product(*choices)]


def _names(table: dict[str, Any], word: str) -> list[str]:
    """The text of a key, or the texts of its list."""
    names = table[word] if isinstance(table[word], list) else [table[word]]
    if not names or not all(isinstance(name, str) for name in names):
        raise SweepError(f'{word} is a text or a list of texts, such as {word} = ["lpmm", "activations4"], not {table[word]!r}.')
    return names


def _templates(table: dict[str, Any], folder: Path) -> list[PlanTemplate]:
    return [PlanTemplate(str(choice["assign"]), choice.get("method", "role")) for choice in _crossed(table)]


def _peppp(table: dict[str, Any], folder: Path) -> list[Plan]:
    from paredown.simulate.peppp import parse_peppp, peppp_plan  # it imports torch, which other sweeps need in their trials alone

    words = ("peppp_low", "peppp_high")
    if missing := [word for word in words if word not in table]:
        raise SweepError(f"{missing[0]} is missing; a configuration of PEPPP has a low and a high format.")
    choices = _crossed({word: table[word] for word in words})
    return [peppp_plan(*(parse_peppp(choice[word]) for word in words)) for choice in choices]


Make = Callable[[dict[str, Any], Path], Sequence[Entry]]
SOURCES: dict[
    str, tuple[Make, tuple[str, ...]]
] = {  # key of a [[plans]] table: the function that makes its plans, and the keys that it allows beside it
    "preset": (lambda table, folder: [Plan.preset(name) for name in _names(table, "preset")], ()),
    "file": (lambda table, folder: [Plan.load(folder / name) for name in _names(table, "file")], ()),
    "assign": (_templates, ("method",)),
    "peppp_low": (_peppp, ("peppp_high",)),
}


def _beside(store: str | None, folder: Path) -> str | None:
    """The address of a store: a path is relative to the folder of the file; a URL is unchanged."""
    return store if store is None or "://" in store else str(folder / store)
