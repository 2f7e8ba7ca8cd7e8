"""Updates of many parameters at once: one launch for all that are stored alike, or plain torch, tensor by tensor.

    batch = Batch(RULES["adamw"], units, seed=0)
    batch.update([hyper], rows=0, steps=t, gradients=None)       every unit reads numbers 0 of [hyper] and is at step t

`update_one` is the same for one tensor, at once; `fold` adds a gradient into a packed accumulator. On CUDA with Triton they go through
kernels where those cover the formats, elsewhere through `reference.py`; the bits are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from torch import Tensor

from paredown.codec.packed import PackedTensor
from paredown.codec.reference import PackedParts
from paredown.errors import OptimError
from paredown.formats.rounding import Rounding, Seed
from paredown.optim import reference
from paredown.optim.reference import UpdateLayout, UpdateSlot, UpdateUnit
from paredown.optim.rules import Rule

Hyper = Sequence[float]


class Batch:
    """Units under one rule, updated together at every step."""

    def __init__(self, rule: Rule, units: Sequence[UpdateUnit], seed: int) -> None:
        self.rule, self.units, self.seed = rule, list(units), seed
        together: dict[Any, list[int]] = {}
        self._alone: list[int] = []  # units for which there is no kernel
        for i, unit in enumerate(self.units):
            how = unit.how(rule.name)
            if _kernels_for(unit, how) is None:
                self._alone.append(i)
            else:
                together.setdefault((how, unit.weight.codes.device, _is_aligned(unit)), []).append(i)
        self._groups = [(places, _group(rule, [self.units[i] for i in places], seed)) for places in together.values()]

    def update(
        self,
        hypers: Sequence[Hyper],
        rows: Sequence[int] | int,
        steps: Sequence[int] | int,
        gradients: Sequence[Tensor] | None = None,
    ) -> None:
        """One update of every unit: unit i reads hypers[rows[i]] and is at step steps[i], counted from 1.

        An int stands for all units. `gradients` are new plain gradients, where their memory is another than at the last update.
        """
        if gradients is not None:
            for unit, grad in zip(self.units, gradients, strict=True):
                check_gradient(unit, grad)
        for places, group in self._groups:
            if gradients is not None:
                group.set_gradients([gradients[i] for i in places])
            group.update(hypers, _at(rows, places), _at(steps, places))
        for i in self._alone:
            row, step = (n if isinstance(n, int) else n[i] for n in (rows, steps))
            unit = self.units[i] if gradients is None else with_gradient(self.units[i], gradients[i])  # not kept: it is freed after
            reference.update(self.rule, unit, hypers[row], step, self.seed)


def update_one(rule: Rule, unit: UpdateUnit, hyper: Hyper, step: int, seed: int, gradient: Tensor | None = None) -> None:
    """One update of one unit, at once. `gradient` is a new plain one in the place of the unit's, which can then be used again."""
    if gradient is not None:
        check_gradient(unit, gradient)
    how = unit.how(rule.name)
    kernels = _kernels_for(unit, how)
    if kernels is None:
        reference.update(rule, unit if gradient is None else with_gradient(unit, gradient), hyper, step, seed)
    else:
        kernels.update_one(unit, how, hyper, step, seed, gradient)


def fold(
    packed: PackedTensor,
    grad: Tensor,
    *,
    weight: float,
    factor: Tensor | None,
    seed: Seed,
    is_first: bool,
    rounding: Rounding = Rounding.STOCHASTIC,
) -> None:
    """packed <- encode(DQ(packed) * factor + grad * weight), in place; the first time encode(grad * weight)."""
    kernels = _find_kernels() if packed.codes.is_cuda else None
    if kernels is None or not kernels.covers_format(packed.format):
        reference.fold(packed, grad, weight=weight, factor=factor, seed=seed, is_first=is_first, rounding=rounding)
    else:
        kernels.fold(packed, grad, weight, factor, seed, is_first, rounding)


def square_sums(tensors: Sequence[PackedTensor]) -> Tensor | None:
    """The sum of the squares of each, by kernels; None where those do not serve all of them."""
    kernels = _find_kernels() if tensors[0].codes.is_cuda else None
    if kernels is None or not all(kernels.covers_squares(t.format, t.shape) for t in tensors):
        return None
    return kernels.square_sums(tensors)


def _kernels_for(unit: UpdateUnit, how: UpdateLayout) -> ModuleType | None:
    """The kernels, where they serve this unit."""
    kernels = _find_kernels() if unit.weight.codes.is_cuda else None
    return kernels if kernels is not None and kernels.covers(how) else None


@cache
def _find_kernels() -> ModuleType | None:
    if find_spec("triton") is None:
        return None
    from paredown.optim import kernels  # needs Triton, which CPU builds of torch come without

    return kernels


def _group(rule: Rule, units: Sequence[UpdateUnit], seed: int) -> Any:
    kernels = _find_kernels()
    assert kernels is not None
    return kernels.LaunchGroup(rule, units, seed)


def _is_aligned(unit: UpdateUnit) -> bool:
    """Whether all that an update writes starts at a multiple of 16 bytes."""
    written = [slot for slot in (unit.weight, unit.residue, *unit.moments) if slot is not None]
    return all(t.data_ptr() % 16 == 0 for slot in written for t in slot.parts.tensors())


def _at(numbers: Sequence[int] | int, places: Sequence[int]) -> Sequence[int] | int:
    return numbers if isinstance(numbers, int) else [numbers[i] for i in places]


def check_gradient(unit: UpdateUnit, grad: Tensor) -> None:
    """Refuse a new gradient that is not stored like the one before."""
    before = unit.gradient.codes
    if unit.gradient.format is None and grad.dtype is before.dtype and grad.is_contiguous() and grad.numel() == before.numel():
        return
    raise OptimError(
        f"a new gradient is contiguous, plain and stored like the one before it ({unit.gradient.format or before.dtype}, {before.numel()} "
        f"values); found {grad.dtype}, {grad.numel()} values{'' if grad.is_contiguous() else ', not contiguous'}."
    )


def with_gradient(unit: UpdateUnit, grad: Tensor) -> UpdateUnit:
    """The unit with another plain gradient."""
    return replace(unit, gradient=UpdateSlot(None, unit.gradient.rounding, PackedParts(grad.detach().view(unit.rows, unit.cols))))
