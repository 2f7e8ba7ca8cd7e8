"""Which format each slot of a parameter gets, and why it is not the one that was asked for.

A keyword (weight=, moment1=, ...) beats the tier of the group, that beats the plan of a session, and without any of them all stays as it is
(tier "full"). A parameter of fewer than 2 dimensions or 4096 values is *small*: it keeps float32 state and a plain gradient, and a
bfloat16 one gets 8 bits more (RESIDUE), for little is saved on it, and norms and biases are the most sensitive. Embeddings are not small.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paredown.errors import FormatError, OptimError
from paredown.formats.catalog import find_format
from paredown.formats.format import Format
from paredown.formats.rounding import Rounding, default_rounding
from paredown.formats.tiers import TIERS, is_small
from paredown.optim.registry import Asked, Choice, asked_of
from paredown.roles import ACCUMULATED, Role

FROM_TIER = "tier"  # the default of a keyword: what the tier or the plan says
SLOTS: tuple[Role, ...] = (Role.WEIGHT, Role.RESIDUE, Role.MOMENT1, Role.MOMENT2, Role.GRADIENT)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Choices:
    """Format (None: plain) and rounding of each slot of one parameter."""

    name: str
    is_full: bool  # nothing is packed, and torch.optim's own arithmetic serves
    is_small: bool
    slots: Mapping[Role, Choice]
    asked: Mapping[Role, Choice]

    def format(self, role: Role) -> Format | None:
        """The format of a slot, None where it is plain."""
        return self.slots[role][0]

    def rounding(self, role: Role) -> Rounding:
        """How a slot is rounded when it is written."""
        return self.slots[role][1]


PLAIN: Choice = (None, Rounding.NEAREST_EVEN)


def choose(parameter: Tensor, group: Mapping[str, Any], place: str) -> Choices:
    """What the slots of `parameter` get in its group; `place` names it in messages."""
    asked = asked_of(parameter)
    name = asked.name if asked is not None else place
    wanted = {role: _wanted(role, group, asked, name) for role in SLOTS}
    if not any(format for format, _ in wanted.values()):
        return Choices(name, True, False, dict.fromkeys(SLOTS, PLAIN), wanted)
    if is_small(parameter.shape):
        slots = dict.fromkeys(SLOTS, PLAIN)
        if parameter.dtype is torch.bfloat16:
            slots[Role.RESIDUE] = (Format.parse("int8"), Rounding.NEAREST_EVEN)
        return Choices(name, False, True, slots, wanted)
    _check(wanted, name)
    return Choices(name, False, False, wanted, wanted)


def check_group(group: Mapping[str, Any]) -> None:
    """Refuse tiers, formats and roundings that there are not."""
    tier = group.get("tier")
    if tier is not None and tier not in TIERS:
        raise OptimError(f"tier {tier!r} is unknown. Allowed: {', '.join(TIERS)}, or None for the plan's formats.")
    for role, rounding in (group.get("rounding") or {}).items():
        if role not in tuple(SLOTS) or rounding not in tuple(Rounding):
            raise OptimError(
                f"rounding {{{role!r}: {rounding!r}}} is unknown. Keys: {', '.join(r.value for r in SLOTS)}; "
                f"values: {', '.join(r.value for r in Rounding)}."
            )


def _wanted(role: Role, group: Mapping[str, Any], asked: Asked | None, name: str) -> Choice:
    given, tier = group.get(role.value, FROM_TIER), group.get("tier")
    rounding: Rounding | None = None
    if not (isinstance(given, str) and given == FROM_TIER):
        format = _format(given, role)
    elif tier is not None:
        text = TIERS[tier].get(role.value)
        format = Format.parse(text) if text else None
    else:
        format, rounding = asked.choices.get(role, PLAIN) if asked is not None else PLAIN
    own = (group.get("rounding") or {}).get(role.value)
    if own is not None:
        rounding = Rounding(own)
    if rounding is None and format is not None:
        rounding = default_rounding(format.element.width, is_sum=role in ACCUMULATED)
    return format, rounding or Rounding.NEAREST_EVEN


def _format(given: Any, role: Role) -> Format | None:
    try:
        return None if given is None else find_format(given)
    except FormatError as error:
        raise OptimError(f"{role.value}={given!r}: {error} None leaves the tensor as it is.") from None


def _check(wanted: Mapping[Role, Choice], name: str) -> None:
    """Refuse combinations that mean nothing."""
    weight, residue = wanted[Role.WEIGHT][0], wanted[Role.RESIDUE][0]
    if residue is not None and (str(residue) != "int8" or weight is None or str(weight) != "bf16"):
        raise OptimError(
            f"{name}: residue={residue} beside weight={weight}: the residue is 'int8', the 8 bits that follow a 'bf16' weight. "
            "Give weight='bf16', residue='int8' (tier 'safe'), or residue=None."
        )
    for role in (Role.MOMENT1, Role.MOMENT2, Role.GRADIENT):
        format = wanted[role][0]
        if format is not None and format.block is None and format.element.width < 16:
            raise OptimError(
                f"{name}: {role.value}={format} has no scale, and values of this role are of any size. "
                f"Give it a block and a scale, such as '{format}/64@bf16'."
            )
        if format is not None and format.has_tensor_scale:
            raise OptimError(
                f"{name}: {role.value}={format} has one scale for the whole tensor, which an update would have to know beforehand. "
                "Give it scales of blocks alone, such as 'int8/64@bf16'."
            )
