"""`Updater` updates a parameter, and `fold` adds a gradient to a packed sum, by compiled loops or else `reference.py`.

updater = Updater(RULES["adamw"], unit)
updater.update(hyper, step, seed=0, gradient=None)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, lru_cache
from itertools import chain
from math import lcm
from typing import Any

import numpy as np
from torch import Tensor

from paredown.codec import cpu as codec
from paredown.codec.cpu import DTYPES, GIVEN, bytes_of, numbers_of
from paredown.codec.packed import PackedTensor, default_overflow
from paredown.codec.reference import COVER, PackedParts
from paredown.formats.format import Format
from paredown.formats.rounding import Overflow, Rounding, Seed
from paredown.optim import reference
from paredown.optim.reference import MOMENT_BITS, Fold, UpdateLayout, UpdateSlot, UpdateUnit, is_sticky, is_whole
from paredown.optim.rules import Rule

COMPILED_RULES = ("sgd", "sgdm", "nesterov", "adamw", "lion")  # as loops.py counts them
LONGEST_TILE = 2048  # values, as in `codec/loops.py`
WHOLE_BYTES = 8  # values of any width that end on a byte
MULTIPLIERS = (1, *MOMENT_BITS, 1)  # factors of the random bits of weight, moments and gradient
WEIGHT, GRADIENT = 0, 3  # indices of a parameter's tensors; between them are the moments


@lru_cache(maxsize=1024)
def covers(layout: UpdateLayout, cols: int) -> bool:
    """Return whether `loops.py` can update parameters of this layout (rule and formats) with `cols` columns.

    The loops do not cover Muon's rule, formats with one scale for the whole tensor, or blocks that are longer than a tile (the values that
    a loop decodes at once).
    """
    has_tensor_scale = any(format.has_tensor_scale for format in _formats(layout))
    return layout.rule in COMPILED_RULES and not has_tensor_scale and min(_unit_len(layout), cols) <= LONGEST_TILE


class Updater:
    """The repeated update of one parameter by loops that numba compiles; addresses of its tensors are looked up only once."""

    def __init__(self, rule: Rule, unit: UpdateUnit) -> None:
        self.rule, self.unit, self.layout = rule, unit, unit.how(rule.name)
        self._memory: Any = None

    def update(self, hyper: Sequence[float], step: int, seed: int, gradient: Tensor | None = None) -> None:
        """Update the parameter and its state in place; `step` counts from 1.

        `gradient`: an unpacked gradient to use instead of the one in `unit`; None for that one.
        """
        unit = self.unit
        if not covers(self.layout, unit.cols) or codec.find_loops(unit.weight.codes) is None:
            reference.update(self.rule, unit if gradient is None else with_gradient(unit, gradient), hyper, step, seed)
            return
        from paredown.optim.cpu import loops

        if self._memory is None:
            self._memory = _memory(unit, self.layout)
        numbers, records, residue, shape, counters = self._memory
        h = np.array(list(self.rule.numbers(hyper).values()), np.float32)
        records["factor"][GRADIENT] = h[0] if unit.factor is None else np.float32(unit.factor.item()) * h[0]
        if gradient is not None:
            records["codes_address"][GRADIENT], records["codes_len"][GRADIENT] = gradient.data_ptr(), gradient.nbytes
        keys = Seed(seed, 8 * unit.tensor_id, step).keys()
        loops.update(numbers, records, residue, shape, *keys, COMPILED_RULES.index(self.rule.name), h, counters)


def with_gradient(unit: UpdateUnit, grad: Tensor) -> UpdateUnit:
    """Return `unit`, the tensors of one parameter's update, with `grad`, an unpacked gradient, in place of its gradient."""
    return replace(unit, gradient=UpdateSlot(None, unit.gradient.rounding, PackedParts(grad.detach().view(unit.rows, unit.cols))))


def _formats(layout: UpdateLayout) -> list[Format]:
    return [kind.format for kind in (layout.weight, *layout.moments, layout.gradient) if kind.format is not None]


def _unit_len(layout: UpdateLayout) -> int:
    """Return the smallest number of values after which, in every tensor of the update, both a block and a byte end."""
    return lcm(WHOLE_BYTES, layout.block, *(format.block for format in _formats(layout) if format.block))


def fold(packed: PackedTensor, grad: Tensor, how: Fold) -> None:
    """Add `grad` to a packed sum of gradients in place, weighted and rounded as `how` says, by compiled loops if possible."""
    rows, cols = packed.format.rows_and_cols(packed.shape)
    unit_len = lcm(WHOLE_BYTES, packed.format.block or 1)
    fits = min(unit_len, cols) <= LONGEST_TILE and not packed.format.has_tensor_scale and grad.dtype in DTYPES
    if not fits or codec.find_loops(packed.codes) is None:
        reference.fold(packed, grad, how)
        return
    from paredown.optim.cpu import loops

    numbers, records = np.zeros(1, loops.codec.NUMBERS), np.zeros(1, loops.SLOT)
    slot = UpdateSlot(packed.format, how.rounding, packed.parts)
    numbers[0], records[0] = _slot(slot, default_overflow(packed.format), COVER, integers=loops.CODES, multiplier=1)
    records["factor"] = 1.0 if how.factor is None else how.factor.item()
    shape = loops.Shape(*_tiles(rows, cols, unit_len), 0, how.seed.first_index, how.rounding is Rounding.STOCHASTIC)
    gradient = bytes_of(grad.detach().contiguous())
    loops.fold(numbers, records, shape, *how.seed.keys(), gradient, DTYPES[grad.dtype], np.float32(how.weight), how.is_first)


def _memory(unit: UpdateUnit, layout: UpdateLayout) -> Any:
    """Return the arguments of `loops.update` that are the same in each step: encodings, addresses, sizes and counters."""
    from paredown.optim.cpu import loops

    num_moments = len(unit.moments)
    numbers, records = np.zeros(4, loops.codec.NUMBERS), np.zeros(4, loops.SLOT)
    records["kind"][1 + num_moments : GRADIENT] = loops.ABSENT
    for k, slot in zip((*range(1 + num_moments), GRADIENT), (unit.weight, *unit.moments, unit.gradient), strict=True):
        scales_stay = k == WEIGHT and is_sticky(slot.format)
        integers = loops.WHOLE if is_whole(slot) else loops.CODES
        rule = GIVEN if scales_stay else COVER
        numbers[k], records[k] = _slot(slot, Overflow.SATURATE, rule, integers=integers, multiplier=MULTIPLIERS[k])
    residue = bytes_of(None if unit.residue is None else unit.residue.codes)
    unit_len = _unit_len(layout)
    is_random = any(kind.rounding is Rounding.STOCHASTIC for kind in (layout.weight, *layout.moments))
    shape = loops.Shape(*_tiles(unit.rows, unit.cols, unit_len), layout.block, unit.first_index, is_random)
    return numbers, records, residue, shape, bytes_of(unit.counters).view(np.int32)


def _tiles(rows: int, cols: int, unit_len: int) -> tuple[int, int, int]:
    """Return (rows, columns, values per tile) by which loops read a (rows, cols) tensor, as one long row if possible.

    `unit_len`: a number of values after which a block and a byte end; tiles have a multiple of it.
    """
    if cols % unit_len == 0:
        rows, cols = 1, rows * cols
    return rows, cols, min(max(LONGEST_TILE // unit_len, 1) * unit_len, cols)


def _slot(slot: UpdateSlot, overflow: Overflow, rule: str, *, integers: int, multiplier: int) -> tuple[Any, Any]:
    """Return how loops read and write a tensor: its encoding as numbers, and a record of dtype `loops.SLOT`.

    `integers`: how integer codes are rounded, CODES (by the codec) or WHOLE. `multiplier`: the factor of the tensor's random bits.
    """
    from paredown.optim.cpu import loops

    numbers, _, tables = _encoding(slot.kind.stored, slot.rounding, overflow, rule)
    kind = loops.PACKED if slot.format is not None else DTYPES[slot.codes.dtype]
    memory = (_where(t) for t in (slot.parts.codes, slot.parts.scales, slot.parts.minimums))
    how = (kind, integers, rule == GIVEN, slot.roots, multiplier)
    return numbers, (*how, *chain(*memory), *tables, 1.0)


@cache
def _encoding(format: Format, rounding: Rounding, overflow: Overflow, rule: str) -> tuple[Any, Any, list[int]]:
    """Return an encoding as loops read it: its numbers, tables of code values, and the tables' addresses and lengths."""
    numbers, tables = numbers_of(format, rounding, overflow, rule)
    return numbers, tables, [number for table in tables for number in (table.ctypes.data, len(table))]


def _where(tensor: Tensor | None) -> tuple[int, int]:
    """Return the address and the bytes of a contiguous tensor; (0, 0) for None, and for a tensor on the meta device.

    Such a tensor stands for an unpacked gradient, which has other memory in every step.
    """
    if tensor is None or tensor.is_meta:
        return 0, 0
    assert tensor.is_contiguous()
    return tensor.data_ptr(), tensor.nbytes
