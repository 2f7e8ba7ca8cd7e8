"""Labels of plans: short names for tables, exports and pages.

A plan without a label of its own is named by its preset, or by its formats:

>>> [plan_label(plan) for plan in (Plan(), Plan.preset("lpmm"), Plan.uniform(activation="e3m2fn/64@bf16"))]
['baseline', 'lpmm', 'activation e3m2fn/64@bf16']

`Labels` gives each plan one label; plans with the same rules share it:

>>> labels = Labels({"mine": Plan.uniform(activation="int4/64@bf16", weight="int8/64@e8m0")})
>>> [labels.of(plan) for plan in (Plan(), Plan.preset("lpmm"), Plan.uniform(activation="e4m3fn/64@bf16", weight="int8/64@e8m0"))]
['baseline', 'lpmm', 'weight int8/64@e8m0, activation e4m3fn/64@bf16']
>>> labels.of(Plan.uniform(weight="int8/64@e8m0", activation="int4/64@bf16"))
'mine'
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import count

from paredown.plan.plan import CHECKPOINT_INPUTS, TILED, Plan
from paredown.plan.presets import PRESETS
from paredown.plan.selectors import Selector

BASELINE = "baseline"
MAX_RULES = 4  # in a label; of more rules, the first three and the number of others
TaskPlan = tuple[str, Hashable]  # a task and `plan.key`


class Labels:
    """Gives plans their labels in tables and pages: known ones, and others that are made at first use.

    `known` maps labels to plans, `of_tasks` maps pairs (task, `plan.key`) to labels.
    """

    def __init__(self, known: Mapping[str, Plan] | None = None, *, of_tasks: Mapping[TaskPlan, str] | None = None) -> None:
        self._labels: dict[Hashable, str] = {plan.key: label for label, plan in (known or {}).items()}
        self._of_tasks = of_tasks or {}

    def of(self, plan: Plan, task: str = "") -> str:
        """Return the label of a plan on a task, which does not change between calls."""
        if (label := self._of_tasks.get((task, plan.key))) is not None:
            return label
        if plan.key not in self._labels:
            taken = {*self._labels.values(), *self._of_tasks.values()}
            self._labels[plan.key] = next(text for text in _numbered(plan_label(plan)) if text not in taken)
        return self._labels[plan.key]


def distinct_labels(requests: Iterable[tuple[str, Plan, str]]) -> dict[TaskPlan, str]:
    """Return a label for each request (task, plan, text), by task and `plan.key`.

    A label is the text, with a number if another plan of the task has this label already.

    >>> a, b, c = Plan(), Plan.preset("lpmm"), Plan.preset("safe")
    >>> list(distinct_labels([("digits", a, "x"), ("digits", b, "x"), ("digits", a, "y"), ("faces", c, "x")]).values())
    ['x', 'x (2)', 'x']
    """
    labels: dict[TaskPlan, str] = {}
    taken: dict[str, set[str]] = {}
    for task, plan, text in requests:
        if (task, plan.key) not in labels:
            others = taken.setdefault(task, set())
            labels[task, plan.key] = next(label for label in _numbered(text) if label not in others)
            others.add(labels[task, plan.key])
    return labels


def distinct(names: Iterable[str]) -> list[str]:
    """Return the names, with a number after each name that equals an earlier one.

    >>> distinct(["a", "b", "a", "a (2)"])
    ['a', 'b', 'a (2)', 'a (2) (2)']
    """
    taken: dict[str, None] = {}
    for name in names:
        taken[next(text for text in _numbered(name) if text not in taken)] = None
    return list(taken)


def _numbered(text: str) -> Iterator[str]:
    """Yield `text`, `text (2)`, `text (3)` and so on."""
    return (f"{text} ({i})" if i > 1 else text for i in count(1))


def plan_label(plan: Plan) -> str:
    """Return a short name of a plan: its preset, or its formats by role."""
    if plan.changes_nothing:
        return BASELINE
    if (name := _presets().get(plan.key)) is not None:
        return name
    roles = [f"{key} {assignment.format or 'unmodified'}" for key, assignment in plan.rules if Selector.parse(key).role is not None]
    slots = len(plan.rules) - len(roles)
    roles += [f"{key} {element or 'unmodified'}" for key, element in plan.products]
    if len(roles) > MAX_RULES:
        roles = [*roles[: MAX_RULES - 1], f"{len(roles) - MAX_RULES + 1} rules more"]
    by_name = [f"{slots} slot{'s' * (slots > 1)} by name"] if slots else []
    modules, slots = plan.checkpointed, [text for text in plan.recompute if ":" in text]
    checkpointed = [f"{_listed(modules, 'modules')} checkpointed"] if modules else []
    recomputed = [f"{_listed(slots, 'slots')} recomputed"] if slots else []
    whose = "" if plan.offload == CHECKPOINT_INPUTS else f"{_listed(plan.offload, 'slots')} "
    offloaded = [f"{whose}offloaded"] if plan.offload else []
    tiled = [f"{text} {TILED.format(length)}" for text, length in plan.tiles]
    return ", ".join([*roles, *by_name, *checkpointed, *recomputed, *tiled, *offloaded])


def _listed(names: Sequence[str], what: str) -> str:
    return ", ".join(names) if len(names) < MAX_RULES else f"{len(names)} {what}"


@lru_cache(maxsize=1)
def _presets() -> dict[Hashable, str]:
    return {Plan.preset(name).key: name for name in reversed(list(PRESETS))}
