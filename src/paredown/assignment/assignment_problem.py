"""`AssignmentProblem` is what `assign` computes before it knows the budget: items, their ledger, and points (peak, error) to choose from.

`rules_of` writes the formats of a point as short rules that are readable and hold for other batch sizes. A role has one rule if its
slots agree, patterns match layers that agree, and names match the rest:

    activation              int8/64@bf16
    layers.*.mlp.1:input    uint2/64@bf16+bf16
    head:input              unmodified
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

from paredown.assignment.sensitivity import Sensitivities
from paredown.assignment.storage_options import (
    FROZEN_ROWS,
    FULL_ROWS,
    LADDER,
    PRECISE_ROWS,
    TIER_ROWS,
    KnownItems,
    Ladder,
    Ledger,
    activation_items,
    parameter_items,
)
from paredown.assignment.strategies import (
    METHODS,
    AssignmentPoint,
    AssignMethod,
    best_within,
    ladder_for,
    measured_error,
    role_table_error,
)
from paredown.autograd.operations import Use
from paredown.errors import PlanError
from paredown.formats.catalog import is_small, reason_not_to_store
from paredown.formats.format import Format
from paredown.plan.selectors import WILDCARDS, closest, slot_key
from paredown.plan.storage import Assignment, significant_bits
from paredown.plan.trace import Trace
from paredown.roles import Role

NUMBER = re.compile(r"(?<![^.])\d+(?=[.:])")  # the index of a layer in a path
Formats = Mapping[tuple[str, Role], Format | None]
Rules = tuple[tuple[str, Assignment], ...]
SUPPORTED_OPTIMIZERS = frozenset({"sgd", "sgdm", "adamw", "lion", "muon", "SGD", "AdamW", "Lion", "Muon"})  # of paredown.optim


@dataclass(frozen=True, eq=False)
class AssignmentProblem:
    """What `assign` needs to choose formats for `trace` by one method, within any budget: bytes and errors of each."""

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
        known: KnownItems | None = None,
        keeps_margin: bool = True,
    ) -> AssignmentProblem:
        """Return the search for plans of `trace` by `method`, from which `best` selects for any budget.

        `sensitivities` are measured gradient errors of saved tensors (None: the role table predicts them). `ladder` lists the formats that
        activations may have, the most precise first; with it, parameters stay unmodified. `known` caches storage options of tensors for
        other traces that share them; it must have been filled with the same other arguments. With `keeps_margin`, peaks are
        `Footprint.bound_bytes`, otherwise `peak_bytes`.
        """
        formats = LADDER if ladder is None else ladder
        error_of = role_table_error if sensitivities is None else measured_error(trace, sensitivities, formats)
        eligible = method.eligible(trace) if method.eligible is not None else None
        is_free = method.order is None
        items = list(activation_items(trace, ladder_for(eligible, formats), error_of, is_free=is_free, known=known))
        packs_parameters = method.lowers_parameters and ladder is None
        rows = PRECISE_ROWS if method.keeps_residue else TIER_ROWS
        rows = rows if packs_parameters and trace.optimizer in SUPPORTED_OPTIMIZERS else FULL_ROWS
        items += parameter_items(trace, rows, frozen_rows=FROZEN_ROWS if packs_parameters else FULL_ROWS, known=known)
        return AssignmentProblem(trace, method, Ledger.of(trace, items, keeps_margin=keeps_margin), ladder, seed)

    @cached_property
    def points(self) -> list[AssignmentPoint]:
        """Return the candidates that the method finds: a format for each tensor, with the step's peak and error."""
        return self.method.points(self.ledger, self.seed)

    def best(self, budget_bytes: int) -> AssignmentPoint | None:
        """Return the candidate of least predicted error whose peak is within the budget; None if there is none."""
        return best_within(self.points, budget_bytes) if self.ledger.floor_bytes <= budget_bytes else None

    def formats(self, point: AssignmentPoint) -> Formats:
        """Return the format that `point` gives to each (tensor name, role); None means unmodified."""
        rows = [option for item in self.ledger.items for option in item.options]
        return {key: format for row in point.chosen for key, format in rows[row].formats}

    @property
    def smallest(self) -> AssignmentPoint:
        """Return the candidate with the lowest peak, whatever its error."""
        return min(self.points, key=lambda point: (point.peak_bytes, point.error))


# --- arguments of `assign` ---------------------------------------------------------------------------------------------


def method_named(name: str) -> AssignMethod:
    """Return the row of METHODS with this name; raise PlanError for other names."""
    if name not in METHODS:
        rows = "; ".join(f"{row.name} ({row.note})" for row in METHODS.values())
        raise PlanError(f"method {name!r} is unknown. Allowed: {rows}.")
    return METHODS[name]


def ladder_of(levels: Sequence[str | Format | None]) -> Ladder:
    """Return the formats in `levels`; raise PlanError unless they go from the most to the least precise."""
    if isinstance(levels, str) or not isinstance(levels, Sequence) or not levels:
        raise PlanError(f"levels are formats, the best first, such as ('int8/64@bf16', 'int2/64@bf16'), not {levels!r}.")
    ladder = tuple(Assignment.parse(level).format for level in levels)
    for format in ladder:
        reason = None if format is None else reason_not_to_store(format, Role.ACTIVATION.value)
        if reason is not None:
            raise PlanError(f"levels: {reason}.")
    bits = [inf if format is None else significant_bits(format) for format in ladder]
    for index, (better, worse) in enumerate(pairwise(bits)):
        if worse > better:
            raise PlanError(
                f"levels go from the best down, but {levels[index + 1] or 'None (unmodified)'} is better than {levels[index]} before it. "
                "Reverse them."
            )
    return ladder


def check_sensitivities(trace: Trace, method: AssignMethod, sensitivities: Sensitivities | None) -> None:
    """Raise PlanError if `sensitivities` are missing though `method` needs them, not needed, or of another model."""
    if sensitivities is None:
        if method.needs_sensitivities:
            advice = "Give assign(..., sensitivities=probe(model, batch, trace)), or use method 'role', which needs none."
            raise PlanError(f"method {method.name!r} needs sensitivities. {advice}")
        return
    if not isinstance(sensitivities, Sensitivities):
        raise PlanError(f"sensitivities are the result of probe(model, batch, trace), not {type(sensitivities).__name__}.")
    if not method.needs_sensitivities:
        raise PlanError(f"method {method.name!r} does not use sensitivities. Write method='sensitivity', or leave them out.")
    names = [name for slot in trace.activations for name in slot.names]
    if not sensitivities.known(names):
        first = next(iter(sensitivities.errors), "")
        raise PlanError(
            f"the sensitivities are of another model: none of their {len(sensitivities)} slots, {first!r} the first, is among the "
            f"{len(names)} of {trace.model}; closest: {closest(first, names)}. Probe this model with this trace."
        )


# --- rules of a plan ---------------------------------------------------------------------------------------------------


def rules_of(trace: Trace, formats: Formats, *, is_short: bool = True) -> Rules:
    """Return the rules of a plan that give each slot of `trace` (a tensor and its role) its format in `formats`.

    Without `is_short`, parameters are matched by name alone. A rule for a role or a pattern also matches small parameters; these stay
    unmodified, but the user must then train with `paredown.optim`.
    """
    rules = list(_activation_rules(trace, formats))
    for role in (Role.WEIGHT, Role.FROZEN, Role.RESIDUE, Role.GRADIENT, Role.MOMENT1, Role.MOMENT2):
        rules += _parameter_rules(trace, formats, role, is_short=is_short)
    return tuple(rules)


def _activation_rules(trace: Trace, formats: Formats) -> list[tuple[str, Assignment]]:
    """Return rules for activations: one for the most frequent format, and further ones for the other formats.

    The first rule has the key "activation", which matches masks too, so that they are packed in bits.
    """
    format_of: dict[str, Format | None] = {}
    for slot in trace.activations:
        names = [saver.name for saver in slot.savers if saver.use is Use.VALUE]
        if names and not slot.stays:
            format_of |= dict.fromkeys(names, formats.get((slot.name, Role.ACTIVATION)))
    counts = Counter(format_of.values()).most_common(1)
    most_common = counts[0][0] if counts else None
    others = {name: format for name, format in format_of.items() if format != most_common}
    return [("activation", Assignment(most_common)), *_named(others, format_of, Role.ACTIVATION, is_short=True)]


def _parameter_rules(trace: Trace, formats: Formats, role: Role, *, is_short: bool) -> list[tuple[str, Assignment]]:
    is_of_weight = role in (Role.WEIGHT, Role.FROZEN, Role.RESIDUE)
    slots = [slot for slot in trace.of(Role.WEIGHT if is_of_weight else role) if slot.is_frozen == (role is Role.FROZEN)]
    large = [slot.name for slot in slots if not (is_small(slot.shape) or slot.stays)]
    format_of = {name: formats.get((name, role)) for name in large}
    if is_short and large and len(set(format_of.values())) == 1:
        format = next(iter(format_of.values()))
        return [(role.value, Assignment(format))] if format is not None else []
    packed = {name: format for name, format in format_of.items() if format is not None}
    return _named(packed, format_of, role, is_short=is_short)


def _named(
    rest: Mapping[str, Format | None], wanted: Mapping[str, Format | None], role: Role, *, is_short: bool
) -> list[tuple[str, Assignment]]:
    """Return rules that give the slots in `rest` their formats, by patterns of names where possible, else by name.

    `rest` maps names of slots (tensors) to formats, `wanted` the names of all slots of the role. A pattern is used only if it matches no
    slot of another format, and only with `is_short`.
    """
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
    """Return a tensor's name with `*` in place of its first number; "" if it has no number, or contains wildcards.

    >>> _pattern("layers.11.mlp.2:input"), _pattern("head:input")
    ('layers.*.mlp.2:input', '')
    """
    if any(letter in WILDCARDS + "=" for letter in name):
        return ""
    pattern, count = NUMBER.subn("*", name, count=1)
    return pattern if count and "." in pattern else ""
