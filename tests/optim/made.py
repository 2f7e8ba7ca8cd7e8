"""Units for tests: a parameter with moments and a gradient in given formats, with numbers of many sizes in it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from paredown.codec.packed import encode
from paredown.codec.reference import PackedParts
from paredown.formats.format import Format
from paredown.formats.rounding import Rounding
from paredown.optim.reference import UpdateSlot, UpdateUnit
from paredown.optim.rules import RULES, stored_root
from tests.support.compare import assert_same_bits

NEAREST, STOCHASTIC = Rounding.NEAREST_EVEN, Rounding.STOCHASTIC
Stored = tuple[str | torch.dtype, Rounding, int]  # format or plain dtype, rounding, roots
INT8: Stored = ("int8/64@bf16", NEAREST, 0)
GRADIENT: Stored = ("int8/64@bf16", STOCHASTIC, 0)
SQUARES: Stored = ("uint8/64@bf16", STOCHASTIC, 1)
STICKY: Stored = ("int8/64@e8m0", STOCHASTIC, 0)
PLAIN: Stored = (torch.float32, NEAREST, 0)
# weight, first moment, second moment, gradient
TIERS: dict[str, tuple[Stored, Stored, Stored, Stored]] = {
    "lpmm": (STICKY, INT8, SQUARES, GRADIENT),
    "half": ((torch.bfloat16, STOCHASTIC, 0), INT8, SQUARES, GRADIENT),
    "safe": ((torch.bfloat16, NEAREST, 0), INT8, SQUARES, GRADIENT),
    "lpmm4": (STICKY, ("int4/64@bf16", STOCHASTIC, 0), ("uint4/64@bf16", STOCHASTIC, 2), GRADIENT),
    "small": (PLAIN, PLAIN, PLAIN, (torch.bfloat16, NEAREST, 0)),
}
HYPERS = {
    "sgd": (0.75, 0.01, 0.9, 0.9, 0.95, 1e-4),
    "sgdm": (0.75, 0.01, 0.9, 0.9, 0.95, 1e-4),
    "nesterov": (0.75, 0.01, 0.9, 0.9, 0.95, 1e-4),
    "adamw": (0.75, 1 - 1e-5, 0.9, 0.1, 0.999, 0.001, 1e-3 / 0.19, 22.4, 1e-8),
    "lion": (0.75, 1 - 1e-5, 0.9, 0.1, 0.99, 0.01, 1e-4),
}


def slot(x: Tensor, stored: Stored) -> UpdateSlot:
    """`x` in a format, or as a plain tensor."""
    format, rounding, roots = stored
    x = stored_root(x, roots)
    if isinstance(format, torch.dtype):
        return UpdateSlot(None, rounding, PackedParts(x.to(format).clone()), roots)
    return UpdateSlot(Format.parse(format), rounding, encode(x, format, order="logical").parts, roots)


def unit(
    rule: str, stored: tuple[Stored, Stored, Stored, Stored], rows: int, cols: int, *, seed: int = 0, is_broken: bool = False
) -> UpdateUnit:
    """A parameter in the middle of training; `is_broken`: its gradient holds NaN and inf."""
    made = torch.Generator().manual_seed(seed)
    weight, first, second, gradient = stored
    x, g, m, v = (torch.randn(rows, cols, generator=made) * size for size in (0.02, 1e-3, 1e-3, 1e-3))
    x[:, : cols // 3] *= 1e-3
    g[-1, :40], m[-1, :40], v[-1, :40] = 0.0, 0.0, 0.0
    if is_broken:
        g[rows // 2, cols // 2], g[0, -1] = torch.nan, torch.inf
    moments = (slot(m, first), slot(v.square(), second))[: len(RULES[rule].roles)]
    residue = None
    if stored is TIERS["safe"]:
        low = torch.randint(-128, 128, (rows, cols), generator=made, dtype=torch.int8)
        residue = UpdateSlot(None, NEAREST, PackedParts(low))
    return UpdateUnit(slot(x, weight), residue, moments, slot(g, gradient), rows, cols, tensor_id=seed + 2, first_index=0)


def moved_slot(slot: UpdateSlot, device: str) -> UpdateSlot:
    """A copy on a device."""
    parts = slot.parts
    copies = [None if t is None else t.clone().to(device) for t in (parts.codes, parts.scales, parts.minimums, parts.tensor_scale)]
    return UpdateSlot(slot.format, slot.rounding, PackedParts(*copies), slot.roots)


def moved(unit: UpdateUnit, device: str = "cpu") -> UpdateUnit:
    """A copy on a device."""
    return replace(
        unit,
        weight=moved_slot(unit.weight, device),
        residue=None if unit.residue is None else moved_slot(unit.residue, device),
        moments=tuple(moved_slot(m, device) for m in unit.moments),
        gradient=moved_slot(unit.gradient, device),
        factor=None if unit.factor is None else unit.factor.to(device),
        counters=unit.counters.clone().to(device),
    )


def tensors(unit: UpdateUnit) -> list[Tensor]:
    """All that an update writes."""
    slots = [unit.weight, *([] if unit.residue is None else [unit.residue]), *unit.moments]
    return [*(t for s in slots for t in s.parts.tensors()), unit.counters]


def assert_same_unit(actual: UpdateUnit, expected: UpdateUnit) -> None:
    """The same bits in all slots, and the same counters."""
    for mine, theirs in zip(tensors(actual), tensors(expected), strict=True):
        assert_same_bits(mine.cpu(), theirs.cpu())
