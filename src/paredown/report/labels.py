"""Short names of plans, one for each plan that says something else.

>>> labels = Labels({"mine": Plan.uniform(activation="int4/64@bf16", weight="int8/64@e8m0")})
>>> [labels.of(plan) for plan in (Plan(), Plan.preset("lpmm"), Plan.uniform(activation="e4m3fn/64@bf16", weight="int8/64@e8m0"))]
['as written', 'lpmm', 'weight int8/64@e8m0, activation e4m3fn/64@bf16']
>>> labels.of(Plan.uniform(weight="int8/64@e8m0", activation="int4/64@bf16"))
'mine'
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from paredown.plan.keys import Key
from paredown.plan.plan import Plan
from paredown.plan.presets import PRESETS

WRITTEN = "as written"
MOST_WORDS = 40  # lines of a plan that a page has


class Labels:
    """The label of every plan that was asked for; two plans never share one."""

    def __init__(self, known: Mapping[str, Plan] | None = None) -> None:
        self._labels: dict[object, str] = {said(plan): label for label, plan in (known or {}).items()}

    def of(self, plan: Plan) -> str:
        """Its label, the same each time."""
        key = said(plan)
        if key not in self._labels:
            taken, name = set(self._labels.values()), name_of(plan)
            self._labels[key] = next(
                text for i in range(1, len(taken) + 3) if (text := f"{name} ({i})" if i > 1 else name) not in taken
            )
        return self._labels[key]


def said(plan: Plan) -> object:
    """What a plan says, without its reason."""
    return plan.rules, plan.recompute


def name_of(plan: Plan) -> str:
    """A plan in a few words."""
    if plan.changes_nothing:
        return WRITTEN
    if (name := _presets().get(said(plan))) is not None:
        return name
    roles = [f"{key} {assignment.format or 'as it is'}" for key, assignment in plan.rules if Key.parse(key).role is not None]
    slots = len(plan.rules) - len(roles)
    own = [f"{slots} slots by name"] if slots else []
    again = [f"{len(plan.recompute)} modules computed again"] if plan.recompute else []
    return ", ".join([*roles, *own, *again])


def in_words(plan: Plan) -> tuple[str, ...]:
    """The plan a line for each rule, cut where there are many."""
    lines = plan.explain().splitlines()
    more = [f"and {len(lines) - MOST_WORDS} lines more"] if len(lines) > MOST_WORDS else []
    return (*lines[:MOST_WORDS], *more)


@lru_cache(maxsize=1)
def _presets() -> dict[object, str]:
    return {said(Plan.preset(name)): name for name in reversed(list(PRESETS))}
