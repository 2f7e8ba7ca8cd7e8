"""The tables that a session prints: changes, guard actions and the explanation of every slot.

`Changes`: the slots that are not stored as the plan requests, with the requested format (asked), the one used (given) and the reason.

>>> Changes([Change("attn:query", "int4/64@bf16", "int8/64@bf16", "pinned")])
slot        asked         given         why
attn:query  int4/64@bf16  int8/64@bf16  pinned

`Actions`: what a guard did, in order; each row has the step, the slot, its format before and after, and the reason.

>>> Actions([Action(30, "attn:query", "int8/64@bf16", "unmodified", "its largest value rose from 3 to 61")])
step  slot        from          to          why
30    attn:query  int8/64@bf16  unmodified  its largest value rose from 3 to 61

`Explanation`: all slots, with the reason of each one's current format: the plan, a pin, a tensor that stays alive, a guard.

>>> quantized = SlotExplanation("fc:input", "int4/64@bf16", "int4/64@bf16", "quantized by the plan")
>>> Explanation([quantized, SlotExplanation("attn:query", "int4/64@bf16", "int8/64@bf16", "pinned")])
slot        asked         now           why
fc:input    int4/64@bf16  int4/64@bf16  quantized by the plan
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

UNMODIFIED = "unmodified"
CHECKPOINTED = "checkpointed"
QUANTIZED = "quantized by the plan"
HELD = "the caller or the model holds it when the forward pass ends"
THE_STEP, THE_PROBE = "the step", "the probe"  # in the slot column of actions that concern no slot
ACTION_COLUMNS = ("step", "slot", "from", "to", "why")
EXPLANATION_COLUMNS = ("slot", "asked", "now", "why")
NO_ROWS = (
    "no activation and no weight is packed, or there was no forward pass yet; "
    "session.plan.explain() has the formats requested of optimizers"
)


@dataclass(frozen=True)
class Change:
    """A slot that is not stored as requested. `asked`: the requested format; `given`: the one used."""

    slot: str
    asked: str
    given: str
    reason: str


class Changes(TableRows[Change]):
    """All changes of a session, as a tuple that prints as a table."""

    __slots__ = ()
    columns = ("slot", "asked", "given", "why")
    if_empty = "everything is as requested"


def describe_state(state: Any) -> str:
    """The keys or the type of a state that cannot be loaded, for an error message.

    >>> describe_state({"seed": 1}), describe_state(None)
    ("has ['seed']", 'is of type NoneType')
    """
    return f"has {sorted(map(str, state))}" if isinstance(state, Mapping) else f"is of type {type(state).__name__}"


@dataclass(frozen=True)
class Action:
    """One thing that a guard did: `slot` had format `before` and has format `after` from this step on."""

    step: int
    slot: str
    before: str
    after: str
    why: str

    def to_json(self) -> list[Any]:
        """The fields in order, as a JSON list."""
        return list(astuple(self))


class Actions(TableRows[Action]):
    """All actions of a guard, as a tuple that prints as a table."""

    __slots__ = ()
    columns = ACTION_COLUMNS
    if_empty = "nothing was done"


@dataclass(frozen=True)
class SlotExplanation:
    """A slot: the format that the applied plan requests, the current format, and the reason."""

    slot: str
    asked: str
    now: str
    why: str


class Explanation(TableRows[SlotExplanation]):
    """All slots, as a tuple that prints as a table."""

    __slots__ = ()
    columns = EXPLANATION_COLUMNS
    if_empty = NO_ROWS

    def of(self, slot: str) -> SlotExplanation:
        """The row of a slot; KeyError if there is none."""
        row = next((row for row in self if row.slot == slot), None)
        if row is None:
            raise KeyError(f"{slot} is no slot of this session, which has {len(self)} slots; print the explanation for their names")
        return row


def explain_session(plan: Plan, activations: Activations, changes: Changes, actions: Actions, slots: Container[str]) -> Explanation:
    """A row for every activation among `slots` that has a decision, and for every other slot in `changes`."""
    rows = [row for row in _activations(plan, activations, actions) if row.slot in slots]
    explained = {row.slot for row in rows}
    rows += [
        SlotExplanation(change.slot, change.asked, change.given, change.reason)
        for change in changes
        if change.slot not in explained
    ]
    return Explanation(rows)


def _activations(plan: Plan, activations: Activations, actions: Actions) -> Iterator[SlotExplanation]:
    by_slot: dict[str, list[Action]] = defaultdict(list)
    for action in actions:
        if action.slot not in (THE_STEP, THE_PROBE):
            by_slot[action.slot].append(action)
    for name, decision in activations.decisions.items():
        asked = plan.find((name,), Role.ACTIVATION).format
        current, why = str(decision.format or UNMODIFIED), decision.reason
        if name in activations.restored:
            current, why = UNMODIFIED, HELD
        if not why:
            why = "the plan requests no format" if asked is None else QUANTIZED
        later = [f"step {action.step}: {action.before} to {action.after}, {action.why}" for action in by_slot[name]]
        yield SlotExplanation(name, str(asked or UNMODIFIED), current, "; ".join([why, *later]))
