"""What a plan is like, as numbers that compare plans: how coarsely the tensors of each role wait, and how short their range is.

    coarseness   log2(1 + 2^(8 - bits)), bits being the significant ones of the format; in bits lost below 8, and about 0 above
    range        exponents that floats without a block lack: 5 less those that they have, from 0 up

With a trace, every tensor counts that backward needs the values of, as it really waits (pins, tensors that stay): errors of slots add up,
so bits are those of the mean error, and a plan with a format for each slot lies between those with one for all. Without one, a plan is
what its rules say.

>>> four = features_of(Plan.preset("activations4"))
>>> dict(zip(NAMES, four.round(1).tolist(), strict=True))["activation"]
5.0
>>> features_of(Plan()).tolist() == [0.0] * len(NAMES)
True
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from paredown.formats.element import Kind
from paredown.formats.format import Format
from paredown.plan.given import significant_bits
from paredown.plan.keys import Key
from paredown.plan.ops import Use
from paredown.plan.parameters import given_to
from paredown.plan.plan import Plan
from paredown.plan.recompute import recomputed
from paredown.plan.record import Trace
from paredown.plan.replay import choices
from paredown.roles import Role

Array = NDArray[np.float64]
ROLES = (Role.ACTIVATION, Role.ERROR, Role.WEIGHT, Role.GRADIENT, Role.MOMENT1, Role.MOMENT2)
NAMES = (*(role.value for role in ROLES), "range")
FULL = 24.0  # significant bits of float32
PIVOT = 8.0  # above so many, more bits hardly matter
ENOUGH = 5  # exponent bits
RESIDUE_BITS = 8


def features_of(plan: Plan, trace: Trace | None = None) -> Array:
    """The numbers of NAMES, (num_features,)."""
    formats = _by_rules(plan) if trace is None else _by_slots(plan, trace)
    coarse = [_coarseness(formats.get(role, ())) for role in ROLES]
    lacks = max((_lacking(format) for found in formats.values() for format in found if format is not None), default=0.0)
    return np.array([*coarse, lacks])


def bits_of(format: Format | None) -> float:
    """Significant bits; of a block of another length than 64, as many as its largest value leaves to the others.

    >>> bits_of(Format.parse("int4/64@bf16")), round(bits_of(Format.parse("int4/1024@bf16")), 1)
    (3.0, 2.6)
    """
    if format is None:
        return FULL
    bits = float(significant_bits(format) + (format.minimum is not None))  # a minimum for each block was worth one in trained tasks
    if format.block is None or format.element.kind is Kind.FLOAT:
        return bits
    return bits - 0.5 * float(np.log2(np.log(max(format.block, 2)) / np.log(64)))  # the largest of n normal values: sqrt(2 ln n)


def _coarseness(formats: Iterable[Format | None]) -> float:
    """Of the mean of the squared errors, 4^-bits."""
    bits = [bits_of(format) for format in formats]
    if not bits or min(bits) >= FULL:
        return 0.0
    effective = -0.5 * np.log2(np.mean(4.0 ** -np.array(bits)))
    return float(np.log2(1 + 2.0 ** (PIVOT - effective)))


def _lacking(format: Format) -> float:
    element = format.element
    exponent_bits = element.width - element.mantissa_bits - element.signed
    return max(0.0, float(ENOUGH - exponent_bits)) if format.block is None and element.kind is Kind.FLOAT else 0.0


def _by_rules(plan: Plan) -> dict[Role, list[Format | None]]:
    found: dict[Role, list[Format | None]] = {}
    for text, assignment in plan.rules:
        found.setdefault(Key.parse(text).role or Role.ACTIVATION, []).append(assignment.format)
    return {role: [format for format in formats if format is not None] for role, formats in found.items()}


def _by_slots(plan: Plan, trace: Trace) -> dict[Role, list[Format | None]]:
    """What every slot gets; those that backward needs a bit or a shape of are exact, and those computed again follow others."""
    seen = recomputed(trace, plan.recompute)
    chosen = choices(seen, plan)
    needed = [slot for slot in seen.activations if any(saver.use is Use.VALUE for saver in slot.savers)]
    found: dict[Role, list[Format | None]] = {Role.ACTIVATION: [chosen[slot.name].format for slot in needed]}
    for weight in trace.of(Role.WEIGHT):
        given = given_to(weight, plan)
        found.setdefault(Role.WEIGHT, []).append(None if given.residue_bytes else given.weight)
        found.setdefault(Role.GRADIENT, []).append(given.gradient)
        for role in (Role.MOMENT1, Role.MOMENT2):
            is_plain = given.is_full or (given.weight is None and given.gradient is None)
            found.setdefault(role, []).append(None if is_plain else plan.find((weight.name,), role).format)
    return found
