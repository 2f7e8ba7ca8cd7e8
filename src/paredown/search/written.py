"""A choice for every slot, written as the rules of a plan that a person can read and another batch size can use.

A role has one rule if its slots agree, patterns take the layers of a kind that agree, and names the rest:

    activation              int8/64@bf16
    layers.*.mlp.1:input    uint2/64@bf16+bf16
    head:input              as it is
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from fnmatch import fnmatchcase

from paredown.formats.format import Format
from paredown.formats.tiers import is_small
from paredown.plan.assignment import Assignment
from paredown.plan.keys import WILDCARDS, slot_key
from paredown.plan.ops import Use
from paredown.plan.record import Trace
from paredown.roles import Role

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
