"""What was asked for and what was given, slot by slot.

>>> Changes([Change("attn:query", "int4/64@bf16", "int8/64@bf16", "pinned")])
slot          asked           given           why
attn:query    int4/64@bf16    int8/64@bf16    pinned

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
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass
from html import escape
from typing import Any

from paredown.plan.plan import Plan
from paredown.roles import Role
from paredown.session.activations import Activations
from paredown.tables import in_columns, in_html


@dataclass(frozen=True)
class Change:
    """One difference."""

    slot: str
    asked: str
    given: str
    reason: str


class Changes(tuple[Change, ...]):
    """All differences, as a tuple that prints as a table."""

    __slots__ = ()

    def __new__(cls, rows: Iterable[Change] = ()) -> Changes:
        """A tuple of `rows`."""
        return super().__new__(cls, rows)

    def __repr__(self) -> str:
        if not self:
            return "everything is as it was asked for"
        rows = [("slot", "asked", "given", "why"), *(astuple(row) for row in self)]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        return "\n".join("    ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]) for row in rows)

    def _repr_html_(self) -> str:
        head = "<tr><th>slot<th>asked<th>given<th>why</tr>"
        body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}' for cell in astuple(row))}</tr>" for row in self)
        return f"<table>{head}{body}</table>"


def describe_state(state: Any) -> str:
    """What a state that cannot be loaded is, for the sentence that says so.

    >>> describe_state({"seed": 1}), describe_state(None)
    ("has ['seed']", 'is of type NoneType')
    """
    return f"has {sorted(map(str, state))}" if isinstance(state, Mapping) else f"is of type {type(state).__name__}"


# --- What a guard did, in order ---

THE_STEP, THE_PROBE = "the step", "the probe"  # rows that speak of no slot
ACTION_COLUMNS = ("step", "slot", "from", "to", "why")


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


class Actions(tuple[Action, ...]):
    """All of them, as a tuple that prints as a table."""

    __slots__ = ()

    def __new__(cls, rows: Iterable[Action] = ()) -> Actions:
        """A tuple of `rows`."""
        return super().__new__(cls, rows)

    def __repr__(self) -> str:
        return in_columns([ACTION_COLUMNS, *(tuple(map(str, astuple(row))) for row in self)]) if self else "nothing was done"

    def _repr_html_(self) -> str:
        return in_html([ACTION_COLUMNS, *(tuple(map(str, astuple(row))) for row in self)])


# --- Slot by slot, what a plan did and why ---

EXPLANATION_COLUMNS = ("slot", "asked", "now", "why")
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


class Explanation(tuple[SlotExplanation, ...]):
    """All slots, as a tuple that prints as a table."""

    __slots__ = ()

    def __new__(cls, rows: Iterable[SlotExplanation] = ()) -> Explanation:
        """A tuple of `rows`."""
        return super().__new__(cls, rows)

    def of(self, slot: str) -> SlotExplanation:
        """The row of a slot; KeyError if there is none."""
        found = next((row for row in self if row.slot == slot), None)
        if found is None:
            raise KeyError(f"{slot} is no slot of this session; it has {len(self)}")
        return found

    def __repr__(self) -> str:
        return in_columns([EXPLANATION_COLUMNS, *map(astuple, self)]) if self else NOTHING

    def _repr_html_(self) -> str:
        return in_html([EXPLANATION_COLUMNS, *map(astuple, self)])


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
