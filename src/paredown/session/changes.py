"""What was asked for and what was given, slot by slot.

>>> Changes([Change("attn:query", "int4/64@bf16", "int8/64@bf16", "pinned")])
slot        asked         given         why
attn:query  int4/64@bf16  int8/64@bf16  pinned

What a guard did, in order: every row a step, a slot, what it was, what it became, and why.

>>> Actions([Action(30, "attn:query", "int8/64@bf16", "as it is", "its largest value rose from 3 to 61")])
step  slot        from          to        why
30    attn:query  int8/64@bf16  as it is  its largest value rose from 3 to 61

Slot by slot, what a plan did and why: what was lowered, what is pinned or held by others, what was raised later.

>>> lowered = SlotExplanation("fc:input", "int4/64@bf16", "int4/64@bf16", "lowered by the plan")
>>> Explanation([lowered, SlotExplanation("attn:query", "int4/64@bf16", "int8/64@bf16", "pinned")])
slot        asked         now           why
fc:input    int4/64@bf16  int4/64@bf16  lowered by the plan
attn:query  int4/64@bf16  int8/64@bf16  pinned
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator, Mapping
from dataclasses import astuple, dataclass
from typing import Any

from paredown.plan.plan import Plan
from paredown.roles import Role
from paredown.session.activations import Activations
from paredown.tables import TableRows


@dataclass(frozen=True)
class Change:
    """One difference."""

    slot: str
    asked: str
    given: str
    reason: str


class Changes(TableRows[Change]):
    """All differences, as a tuple that prints as a table."""

    __slots__ = ()
    columns = ("slot", "asked", "given", "why")
    if_empty = "everything is as it was asked for"


def describe_state(state: Any) -> str:
    """What a state that cannot be loaded is, for the sentence that says so.

    >>> describe_state({"seed": 1}), describe_state(None)
    ("has ['seed']", 'is of type NoneType')
    """
    return f"has {sorted(map(str, state))}" if isinstance(state, Mapping) else f"is of type {type(state).__name__}"


# --- What a guard did, in order ---

THE_STEP, THE_PROBE = "the step", "the probe"  # rows that speak of no slot


@dataclass(frozen=True)
class Action:
    """One thing that was done."""

    step: int
    slot: str
    before: str
    after: str
    why: str

    def to_json(self) -> list[Any]:
        """The JSON value."""
        return list(astuple(self))


class Actions(TableRows[Action]):
    """All of them, as a tuple that prints as a table."""

    __slots__ = ()
    columns = ("step", "slot", "from", "to", "why")
    if_empty = "nothing was done"


# --- Slot by slot, what a plan did and why ---

AS_IS = "as it is"
AGAIN = "computed again"
LOWERED = "lowered by the plan"
NOTHING = "no activation and no weight is packed, or there was no forward pass yet; session.plan.explain() has what was asked of optimizers"
HELD = "the caller or the model holds it when the forward pass ends"


@dataclass(frozen=True)
class SlotExplanation:
    """A slot: what the plan that was applied asked for, what it has now, and why."""

    slot: str
    asked: str
    now: str
    why: str


class Explanation(TableRows[SlotExplanation]):
    """All slots, as a tuple that prints as a table."""

    __slots__ = ()
    columns = ("slot", "asked", "now", "why")
    if_empty = NOTHING

    def of(self, slot: str) -> SlotExplanation:
        """The row of a slot; KeyError if there is none."""
        found = next((row for row in self if row.slot == slot), None)
        if found is None:
            raise KeyError(f"{slot} is no slot of this session; it has {len(self)}")
        return found


def explain_session(plan: Plan, activations: Activations, changes: Changes, actions: Actions, slots: Container[str]) -> Explanation:
    """The rows of a session: every activation among `slots` that it decided about, and whatever else is not as it was asked for."""
    rows = [row for row in _activations(plan, activations, actions) if row.slot in slots]
    there = {row.slot for row in rows}
    rows += [
        SlotExplanation(change.slot, change.asked, change.given, change.reason) for change in changes if change.slot not in there
    ]
    return Explanation(rows)


def _activations(plan: Plan, activations: Activations, actions: Actions) -> Iterator[SlotExplanation]:
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
        yield SlotExplanation(name, str(asked or AS_IS), now, "; ".join([why, *later]))
