"""What a parameter, its gradient and its optimizer state are given under a plan: the rules that sessions and `paredown.optim` follow.

    nothing asked     all stays as it is, and torch.optim serves it
    small             a plain weight and gradient, float32 moments, and 8 more bits of a bfloat16 weight (`formats/tiers.py`)
    others            what the plan says; a moment without a format is float32

A weight that would not become smaller stays as it is: bfloat16 parameters in "bf16" are updated where they are.

>>> from paredown.plan.plan import Plan
>>> weight = Slot("fc.weight", Role.WEIGHT, "fc", (64, 64), "float32", 16384, 0, 9, numel=4096)
>>> given_to(weight, Plan.preset("safe"))
Given(is_full=False, weight=Format('bf16'), gradient=Format('int8/64@bf16'), residue_bytes=4096)
"""

from __future__ import annotations

from dataclasses import dataclass

from paredown.formats.format import Format
from paredown.formats.tiers import is_small
from paredown.plan.given import ITEM_BYTES
from paredown.plan.plan import Plan
from paredown.plan.slots import Slot
from paredown.roles import Role

OF_PARAMETERS = (Role.WEIGHT, Role.RESIDUE, Role.MOMENT1, Role.MOMENT2, Role.GRADIENT)
FLOAT32_BYTES = 4
WITH_RESIDUE = "bf16"  # the weights whose next 8 bits a residue holds


@dataclass(frozen=True)
class Given:
    """What one parameter gets; None: plain."""

    is_full: bool  # nothing is asked for, not even for its moments
    weight: Format | None = None
    gradient: Format | None = None
    residue_bytes: int = 0


FULL = Given(True)


def given_to(weight: Slot, plan: Plan) -> Given:
    """What `plan` makes of the parameter whose slot is `weight`."""
    wanted = {role: plan.find((weight.name,), role).format for role in OF_PARAMETERS} if plan.rules else {}
    if weight.stays or weight.dtype not in ITEM_BYTES or not any(wanted.values()):
        return FULL
    if is_small(weight.shape):
        return Given(False, residue_bytes=weight.numel if weight.dtype == "bfloat16" else 0)
    format = wanted[Role.WEIGHT]
    has_residue = wanted[Role.RESIDUE] is not None and str(format) == WITH_RESIDUE
    if format is not None and format.nbytes(weight.shape) >= weight.nbytes:
        format = None
    return Given(False, format, wanted[Role.GRADIENT], weight.numel if has_residue else 0)


def moment_bytes(moment: Slot, weight: Slot, given: Given, plan: Plan) -> int:
    """Bytes of one moment of the parameter `weight`."""
    if given.is_full or moment.dtype not in ITEM_BYTES:  # integers: an optimizer that packs by itself
        return moment.nbytes
    format = None if is_small(weight.shape) else plan.find((moment.name,), moment.role).format
    return moment.numel * FLOAT32_BYTES if format is None else format.nbytes(moment.shape)


def parameter_of(moment: Slot, weights: dict[str, Slot]) -> Slot | None:
    """The parameter that a moment belongs to: a third one has a name after the parameter's."""
    return weights.get(moment.name) or weights.get(moment.name.rpartition(".")[0])
