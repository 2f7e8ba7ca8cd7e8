"""All that `assign` knows of a trace before it looks at a budget: the items, their ledger, and the points to choose from.

A choice for every slot, written as the rules of a plan that a person can read and another batch size can use.

A role has one rule if its slots agree, patterns take the layers of a kind that agree, and names the rest:

    activation              int8/64@bf16
    layers.*.mlp.1:input    uint2/64@bf16+bf16
    head:input              as it is
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import pairwise
from math import inf

from paredown.assign.options import LADDER, Ladder, Ledger, activation_items, parameter_items
from paredown.assign.sensitivity import Sensitivities
from paredown.assign.strategies import (
    METHODS,
    AssignmentPoint,
    AssignMethod,
    best_within,
    expected_error,
    ladder_for,
    measured_error,
)
from paredown.errors import PlanError
from paredown.formats.catalog import is_small
from paredown.formats.format import Format
from paredown.plan.selectors import WILDCARDS, closest, slot_key
from paredown.plan.storage import Assignment, significant_bits
from paredown.roles import Role
from paredown.trace.operations import Use
from paredown.trace.trace import Trace

NUMBER = re.compile(r"(?<![^.])\d+(?=[.:])")  # a part of a path that is a number: the layer
Formats = Mapping[tuple[str, Role], Format | None]
Rules = tuple[tuple[str, Assignment], ...]


def rules_of(trace: Trace, formats: Formats, *, is_short: bool = True) -> Rules:
    """The rules that give these formats to the slots of `trace`; not `is_short`: parameters by their names alone.

    Rules for a role or a pattern speak of small parameters too, which stay as they are but are then served by `paredown.optim`.
    """
    rules = list(_activation_rules(trace, formats))
    for role in (Role.WEIGHT, Role.RESIDUE, Role.GRADIENT, Role.MOMENT1, Role.MOMENT2):
        rules += _parameter_rules(trace, formats, role, is_short=is_short)
    return tuple(rules)


def _activation_rules(trace: Trace, formats: Formats) -> list[tuple[str, Assignment]]:
    """A rule for the role, which also makes bits of masks, and more for slots that are not like most."""
    wanted: dict[str, Format | None] = {}
    for slot in trace.activations:
        names = [saver.name for saver in slot.savers if saver.use is Use.VALUE]
        if names and not slot.stays:
            wanted |= dict.fromkeys(names, formats.get((slot.name, Role.ACTIVATION)))
    most = Counter(wanted.values()).most_common(1)
    usual = most[0][0] if most else None
    rest = {name: format for name, format in wanted.items() if format != usual}
    return [("activation", Assignment(usual)), *_named(rest, wanted, Role.ACTIVATION, is_short=True)]


def _parameter_rules(trace: Trace, formats: Formats, role: Role, *, is_short: bool) -> list[tuple[str, Assignment]]:
    having = trace.of(Role.WEIGHT if role is Role.RESIDUE else role)
    large = [slot.name for slot in having if not (is_small(slot.shape) or slot.stays)]
    wanted = {name: formats.get((name, role)) for name in large}
    if is_short and large and len(set(wanted.values())) == 1:
        format = next(iter(wanted.values()))
        return [(role.value, Assignment(format))] if format is not None else []
    packed = {name: format for name, format in wanted.items() if format is not None}
    return _named(packed, wanted, role, is_short=is_short)


def _named(
    rest: Mapping[str, Format | None], wanted: Mapping[str, Format | None], role: Role, *, is_short: bool
) -> list[tuple[str, Assignment]]:
    """Rules for the slots of `rest`: patterns that speak of nothing else that is `wanted`, or their names."""
    patterns: dict[tuple[str, Format | None], list[str]] = {}
    for name, format in rest.items():
        patterns.setdefault((_pattern(name), format), []).append(name)
    rules: list[tuple[str, Assignment]] = []
    for (pattern, format), names in patterns.items():
        matched = [name for name in wanted if fnmatchcase(name, pattern)] if is_short and pattern and len(names) > 1 else []
        if matched and all(rest.get(name, ...) == format for name in matched):
            rules.append((pattern if role is Role.ACTIVATION else f"{role.value}={pattern}", Assignment(format)))
        else:
            rules += [(slot_key(name, role), Assignment(format)) for name in names]
    return rules


def _pattern(name: str) -> str:
    """The name with its first number left open; "" where there is none, or where the name itself looks like a pattern.

    >>> _pattern("layers.11.mlp.2:input"), _pattern("head:input")
    ('layers.*.mlp.2:input', '')
    """
    if any(letter in WILDCARDS + "=" for letter in name):
        return ""
    pattern, count = NUMBER.subn("*", name, count=1)
    return pattern if count and "." in pattern else ""


# --- All that `assign` knows of a trace before it looks at a budget ---

SERVED = frozenset({"sgd", "sgdm", "adamw", "lion", "SGD", "AdamW", "Lion"})  # optimizers that paredown.optim has


@dataclass(frozen=True, eq=False)
class AssignmentProblem:
    """A trace with the points that a method finds on it."""

    trace: Trace
    method: AssignMethod
    ledger: Ledger
    ladder: Ladder | None = None
    seed: int = 0

    @staticmethod
    def of(
        trace: Trace,
        method: AssignMethod,
        *,
        sensitivities: Sensitivities | None = None,
        ladder: Ladder | None = None,
        seed: int = 0,
    ) -> AssignmentProblem:
        """The search of `method`; with a `ladder` activations have its formats, and parameters stay as they are."""
        formats = LADDER if ladder is None else ladder
        error_of = expected_error if sensitivities is None else measured_error(trace, sensitivities, formats)
        eligible = method.eligible(trace) if method.eligible is not None else None
        is_free = method.order is None
        items = list(activation_items(trace, ladder_for(eligible, formats), error_of, is_free=is_free))
        lowers = method.lowers_parameters and ladder is None and trace.optimizer in SERVED
        items += parameter_items(trace, is_free=lowers)
        return AssignmentProblem(trace, method, Ledger.of(trace, items), ladder, seed)

    @cached_property
    def points(self) -> list[AssignmentPoint]:
        """The points that a budget chooses from."""
        return self.method.points(self.ledger, self.seed)

    def best(self, budget_bytes: int) -> AssignmentPoint | None:
        """The point of least error within the budget; None if there is none."""
        return best_within(self.points, budget_bytes) if self.ledger.floor_bytes <= budget_bytes else None

    def formats(self, point: AssignmentPoint) -> Formats:
        """The format of each slot at a point; None for as it is."""
        rows = [option for item in self.ledger.items for option in item.options]
        return {key: format for row in point.chosen for key, format in rows[row].formats}

    @property
    def smallest(self) -> AssignmentPoint:
        """The point of the least peak."""
        return min(self.points, key=lambda point: (point.peak_bytes, point.error))


# --- what the caller gives -------------------------------------------------------------------------------------------------------


def method_named(name: str) -> AssignMethod:
    """The row of METHODS of this name."""
    if name not in METHODS:
        rows = "; ".join(f"{row.name} ({row.note})" for row in METHODS.values())
        raise PlanError(f"method {name!r} is unknown. Allowed: {rows}.")
    return METHODS[name]


def ladder_of(levels: Sequence[str | Format | None]) -> Ladder:
    """The formats that `levels` spell, the best first."""
    if isinstance(levels, str) or not isinstance(levels, Sequence) or not levels:
        raise PlanError(f"levels are formats, the best first, such as ('int8/64@bf16', 'int2/64@bf16'), not {levels!r}.")
    ladder = tuple(Assignment.parse(level).format for level in levels)
    bits = [inf if format is None else significant_bits(format) for format in ladder]
    for place, (better, worse) in enumerate(pairwise(bits)):
        if worse > better:
            raise PlanError(
                f"levels go from the best down, and {levels[place + 1] or 'None (as it is)'} is better than {levels[place]} before it. "
                "Turn them round."
            )
    return ladder


def check_sensitivities(trace: Trace, method: AssignMethod, sensitivities: Sensitivities | None) -> None:
    """Whether the method has the sensitivities that it needs, and they are those of this model."""
    if sensitivities is None:
        if method.needs_sensitivities:
            advice = "Give assign(..., sensitivities=probe(model, batch, trace)), or take method 'role', which needs none."
            raise PlanError(f"method {method.name!r} needs sensitivities. {advice}")
        return
    if not isinstance(sensitivities, Sensitivities):
        raise PlanError(f"sensitivities are what probe(model, batch, trace) gives, not {type(sensitivities).__name__}.")
    if not method.needs_sensitivities:
        raise PlanError(f"method {method.name!r} does not look at sensitivities. Write method='sensitivity', or leave them out.")
    names = [name for slot in trace.activations for name in slot.names]
    if not sensitivities.known(names):
        other = next(iter(sensitivities.errors), "")
        raise PlanError(
            f"the sensitivities are of another model: none of their {len(sensitivities)} slots, {other!r} the first, is among the "
            f"{len(names)} of {trace.model}; closest: {closest(other, names)}. Probe this model with this trace."
        )
