"""Update many parameters together: one kernel launch for all that have the same layout; on the CPU, tensor by tensor.

    batch = Batch(RULES["adamw"], units, seed=0)
    batch.update([hyper], rows=0, steps=t, gradients=None)       every unit (a parameter's tensors) uses hyper at step t

`update_one` updates one tensor immediately; `fold` adds a gradient to a packed accumulator. On CUDA with Triton they use the kernels if
those cover the formats, on the CPU compiled loops (`cpu/`), and `reference.py` otherwise; the bits are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from torch import Tensor

from paredown.codec.packed import PackedTensor
from paredown.errors import OptimError
from paredown.optim.cpu import updater
from paredown.optim.cpu.updater import Updater
from paredown.optim.reference import Fold, UpdateLayout, UpdateUnit
from paredown.optim.rules import Rule

Hyper = Sequence[float]


class Batch:
    """Parameters with the same update rule, which are updated together: one kernel launch for all that are stored alike."""

    def __init__(self, rule: Rule, units: Sequence[UpdateUnit], seed: int) -> None:
        self.rule, self.units, self.seed = rule, list(units), seed
        by_layout: dict[Any, list[int]] = {}
        self._without_kernel: list[tuple[int, Updater]] = []
        for i, unit in enumerate(self.units):
            layout = unit.how(rule.name)
            kernels = _kernels_for(unit, layout)
            if kernels is None:
                self._without_kernel.append((i, Updater(rule, unit)))
            else:
                by_layout.setdefault((kernels, layout, unit.weight.codes.device, _is_aligned(unit)), []).append(i)
        self._groups = [
            (places, kernels.LaunchGroup(rule, [self.units[i] for i in places], seed))
            for (kernels, *_), places in by_layout.items()
        ]

    def update(
        self,
        hypers: Sequence[Hyper],
        rows: Sequence[int] | int,
        steps: Sequence[int] | int,
        gradients: Sequence[Tensor] | None = None,
    ) -> None:
        """Update every parameter once.

        Parameter i has the hyperparameters hypers[rows[i]] and is at step steps[i], counted from 1. An int for `rows` or `steps`
        is for all parameters. `gradients`: unpacked gradients, new tensors in each step; None if gradients have kept their memory.
        """
        if gradients is not None:
            for unit, grad in zip(self.units, gradients, strict=True):
                check_gradient(unit, grad)
        for places, group in self._groups:
            if gradients is not None:
                group.set_gradients([gradients[i] for i in places])
            group.update(hypers, _at(rows, places), _at(steps, places))
        for i, one in self._without_kernel:
            row, step = (n if isinstance(n, int) else n[i] for n in (rows, steps))
            one.update(hypers[row], step, self.seed, None if gradients is None else gradients[i])


def update_one(rule: Rule, unit: UpdateUnit, hyper: Hyper, step: int, seed: int, gradient: Tensor | None = None) -> None:
    """Update one parameter and its state in place by `rule`; `step` counts from 1.

    `unit` has the parameter's tensors. `gradient`: an unpacked gradient to use instead of the one in `unit`; None for that one.
    """
    if gradient is not None:
        check_gradient(unit, gradient)
    layout = unit.how(rule.name)
    kernels = _kernels_for(unit, layout)
    if kernels is None:
        Updater(rule, unit).update(hyper, step, seed, gradient)
    else:
        kernels.update_one(unit, layout, hyper, step, seed, gradient)


def fold(packed: PackedTensor, grad: Tensor, how: Fold) -> None:
    """Add `grad` to a packed sum of gradients in place, weighted and rounded as `how` says, on a GPU by a Triton kernel."""
    kernels = _find_kernels() if packed.codes.is_cuda else None
    if kernels is None or not kernels.covers_format(packed.format):
        updater.fold(packed, grad, how)
    else:
        kernels.fold(packed, grad, how)


def square_sums(tensors: Sequence[PackedTensor]) -> Tensor | None:
    """Return the sum of squares of each packed tensor, computed by kernels; None if kernels do not support all of them."""
    kernels = _find_kernels() if tensors[0].codes.is_cuda else None
    if kernels is None or not all(kernels.covers_squares(t.format, t.shape) for t in tensors):
        return None
    return kernels.square_sums(tensors)


def _kernels_for(unit: UpdateUnit, layout: UpdateLayout) -> ModuleType | None:
    """Return the module of Triton kernels if they can update tensors stored in this `layout`, on their device; else None."""
    kernels = _find_kernels() if unit.weight.codes.is_cuda else None
    return kernels if kernels is not None and kernels.covers(layout) else None


@cache
def _find_kernels() -> ModuleType | None:
    if find_spec("triton") is None:
        return None
    from paredown.optim import kernels  # needs Triton, which CPU builds of torch come without

    return kernels


def _is_aligned(unit: UpdateUnit) -> bool:
    """Return whether the memory of all tensors that an update writes starts at a multiple of 16 bytes."""
    written = [slot for slot in (unit.weight, unit.residue, *unit.moments) if slot is not None]
    return all(t.data_ptr() % 16 == 0 for slot in written for t in slot.parts.tensors())


def _at(numbers: Sequence[int] | int, places: Sequence[int]) -> Sequence[int] | int:
    return numbers if isinstance(numbers, int) else [numbers[i] for i in places]


def check_gradient(unit: UpdateUnit, grad: Tensor) -> None:
    """Raise OptimError if an unpacked gradient differs in dtype or size from the one that `unit` was made for, or has gaps."""
    before = unit.gradient.codes
    if unit.gradient.format is None and grad.dtype is before.dtype and grad.is_contiguous() and grad.numel() == before.numel():
        return
    raise OptimError(
        f"a new gradient has to be contiguous and of the same dtype and size as the one before ({unit.gradient.format or before.dtype}, "
        f"{before.numel()} values); this one is {grad.dtype}, {grad.numel()} values{'' if grad.is_contiguous() else ', not contiguous'}."
    )
