"""Slot by slot, what a plan did and why: what was lowered, what is pinned or held by others, what was raised later.

>>> lowered = Row("fc:input", "int4/64@bf16", "int4/64@bf16", "lowered by the plan")
>>> Explanation([lowered, Row("attn:query", "int4/64@bf16", "int8/64@bf16", "pinned")])
slot        asked         now           why
fc:input    int4/64@bf16  int4/64@bf16  lowered by the plan
attn:query  int4/64@bf16  int8/64@bf16  pinned
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator
from dataclasses import astuple, dataclass

from paredown.plan.plan import Plan
from paredown.roles import Role
from paredown.session.actions import THE_PROBE, THE_STEP, Action, Actions, in_columns, in_html
from paredown.session.changes import Changes
from paredown.session.stored import Activations

HEAD = ("slot", "asked", "now", "why")
AS_IS = "as it is"
AGAIN = "computed again"
LOWERED = "lowered by the plan"
NOTHING = "no activation and no weight is packed, or there was no forward pass yet; session.plan.explain() has what was asked of optimizers"
HELD = "the caller or the model holds it when the forward pass ends"


@dataclass(frozen=True)
class Row:
    """A slot: what the plan that was applied asked for, what it has now, and why."""

    slot: str
    asked: str
    now: str
    why: str


class Explanation(tuple[Row, ...]):
    """All slots, as a tuple that prints as a table."""

    __slots__ = ()

    def __new__(cls, rows: Iterable[Row] = ()) -> Explanation:
        """A tuple of `rows`."""
        return super().__new__(cls, rows)

    def of(self, slot: str) -> Row:
        """The row of a slot; KeyError if there is none."""
        found = next((row for row in self if row.slot == slot), None)
        if found is None:
            raise KeyError(f"{slot} is no slot of this session; it has {len(self)}")
        return found

    def __repr__(self) -> str:
        return in_columns([HEAD, *map(astuple, self)]) if self else NOTHING

    def _repr_html_(self) -> str:
        return in_html([HEAD, *map(astuple, self)])


def explained(plan: Plan, activations: Activations, changes: Changes, actions: Actions, slots: Container[str]) -> Explanation:
    """The rows of a session: every activation among `slots` that it decided about, and whatever else is not as it was asked for."""
    rows = [row for row in _activations(plan, activations, actions) if row.slot in slots]
    there = {row.slot for row in rows}
    rows += [Row(change.slot, change.asked, change.given, change.reason) for change in changes if change.slot not in there]
    return Explanation(rows)


def _activations(plan: Plan, activations: Activations, actions: Actions) -> Iterator[Row]:
    done: dict[str, list[Action]] = defaultdict(list)
    for action in actions:
        if action.slot not in (THE_STEP, THE_PROBE):
            done[action.slot].append(action)
    for name, decision in activations.decisions.items():
        asked = plan.find((name,), Role.ACTIVATION).format
        now, why = str(decision.format or AS_IS), decision.reason
        if name in activations.returned:
            now, why = AS_IS, HELD
        if not why:
            why = "the plan leaves it" if asked is None else LOWERED
        later = [f"step {action.step}: {action.before} to {action.after}, {action.why}" for action in done[name]]
        yield Row(name, str(asked or AS_IS), now, "; ".join([why, *later]))
