"""`GradientSum` accumulates gradients in a low-bit format; p.grad shows it as a `PackedGradient` (gradient_ops.py).

    sum <- encode(decode(sum) * factor + gradient * weight), rounded stochastically

    codes (rows, row_bytes) uint8, scales (rows, blocks)     written in place, as long as the optimizer is alive
    factor () float32                                        value = decoded * factor: clipping and unscaling change one number

Fold n, counted from 1 over all steps, draws the random bits of Seed(step=n), so that a resumed run gives the same bits. Nothing here
synchronizes with the device.

The optimizer reuses the buffers at every step. A p.grad of an earlier step that user code still references keeps its values: tensors refer
to the sum through a `Lease`, and a lease that is still referenced gets a copy of the buffers before they are overwritten.

>>> from paredown.codec.packed import encode
>>> held = GradientSum.over(encode(torch.zeros(2, 64), "int8/64@bf16", order="logical"), Seed(0))
>>> for _ in range(3):
...     held.fold(torch.full((2, 64), 127.0), weight=0.5, is_first=False)
>>> _ = held.factor_to_change().mul_(2.0)
>>> held.decode(torch.float32).mean().item() / 127, held.folds
(3.0, 3)
"""


# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from paredown.codec.packed import DTYPES, PackedTensor
from paredown.errors import OptimError
from paredown.formats.rounding import Rounding, Seed
from paredown.optim.batched_update import fold, square_sums
from paredown.optim.reference import Fold


@dataclass(eq=False)
class GradientSum:
    """The packed sum of one parameter's gradients, stored by the optimizer; p.grad shows it as a `PackedGradient`."""

    packed: PackedTensor
    seed: Seed
    factor: Tensor
    weight: float = 1.0  # factor of gradients from backward: 1 / microbatches
    folds: int = 0
    is_scaled: bool = False  # whether `factor` may differ from 1
    floor: float | None = None  # a deferred lower bound of the values, not yet applied to the codes
    rounding: Rounding = Rounding.STOCHASTIC
    before_start: Callable[[], None] = lambda: None  # called before a new sum starts; may raise
    before_unscale: Callable[[], None] = lambda: None  # called before a GradScaler unscales the sum; may raise

    @staticmethod
    def over(packed: PackedTensor, seed: Seed, *, weight: float = 1.0) -> GradientSum:
        """Return a sum of gradients that is stored in `packed`, which must be in the order of the parameter's dimensions.

        `weight`: the factor of each gradient before it is added. `seed`: the source of random bits for stochastic rounding.
        """
        if packed.order != tuple(range(len(packed.shape))):
            raise OptimError(
                f"an accumulator is packed in the order of its dimensions, not in {packed.order}: encode with order='logical'."
            )
        return GradientSum(packed, seed, torch.ones((), device=packed.device), weight)

    def fold(self, grad: Tensor, *, weight: float, is_first: bool) -> None:
        """Add `grad` * `weight` to the sum, and round it to its format; if `is_first`, replace the sum by it."""
        grad = _as_plain(grad, self.packed)
        if not is_first:
            self.settle()
        self.folds += 1
        seed = Seed(self.seed.value, self.seed.tensor, self.folds, self.seed.first_index)
        factor = self.factor if self.is_scaled and not is_first else None
        fold(self.packed, grad, Fold(weight, factor, seed, is_first, self.rounding))
        self._reset_factor()

    def store(self, values: Tensor) -> None:
        """Replace the sum of gradients by `values`, rounded to its format."""
        self.fold(values, weight=1.0, is_first=True)

    def zero(self) -> None:
        """Set the sum to zero: codes 0, and scales 0 if there are any."""
        self.before_start()
        for tensor in self.packed.parts.tensors():
            tensor.zero_()
        self._reset_factor()

    def factor_to_change(self) -> Tensor:
        """Return the scalar tensor that multiplies all decoded values, for the caller to change in place."""
        self.settle()
        self.is_scaled = True
        return self.factor

    def clamp_min(self, floor: float) -> None:
        """Clamp the sum's values to at least `floor`; they are encoded again only when the codes are next read.

        clip_grad_value_ clamps at each bound in a call of its own; because the first is deferred, codes are rounded once.
        """
        self.settle()
        self.floor = floor

    def clamp_max(self, ceiling: float) -> None:
        """Clamp the sum's values to at most `ceiling`."""
        self.store(self.decode(torch.float32).clamp_(max=ceiling))

    def settle(self) -> None:
        """Encode the sum again if `clamp_min` has set a lower bound that its codes do not respect yet."""
        if self.floor is not None:
            self.store(self.decode(torch.float32))

    def decode(self, dtype: torch.dtype) -> Tensor:
        """Return the sum's values as a contiguous tensor: decoded * factor in float32, then converted to `dtype`."""
        if not self.is_scaled and self.floor is None and dtype in DTYPES:
            return self.packed.decode(dtype)
        values = self.packed.decode(torch.float32)
        if self.is_scaled:
            values.mul_(self.factor)
        if self.floor is not None:
            values.clamp_(min=self.floor)
        return values.to(dtype)

    def copy(self, device: torch.device | None = None) -> GradientSum:
        """Return a copy of the sum in new memory on `device`; None means the same device."""
        target = device or self.packed.device
        copied = self.packed.mapped(lambda part: part.to(target, copy=True))
        return replace(self, packed=copied, factor=self.factor.to(target, copy=True))

    def _reset_factor(self) -> None:
        """Set the factor to 1 and forget the bound of `clamp_min`: the sum was encoded again, and its codes include both."""
        self.floor = None
        if self.is_scaled:
            self.factor.fill_(1.0)
            self.is_scaled = False


def any_nonfinite(sums: list[GradientSum]) -> Tensor:
    """Return a scalar tensor: 1.0 if any value of these packed sums is NaN or infinite, and 0.0 otherwise.

    Scales are read instead of values, since a block that is not finite has scale NaN.
    """
    scales = [s.packed.scales for s in sums]
    floats = [t for t in scales if t is not None and t.is_floating_point() and t.numel()]
    norms = torch._foreach_norm(floats, torch.inf) if floats else ()
    rest = [s for s in sums if s.packed.scales is None or not s.packed.scales.is_floating_point()]
    largest = [s.packed.decode(torch.float32).abs().max() for s in rest if s.packed.shape.numel()]
    checked = torch.stack([t.float() for t in (*norms, *largest, *(s.factor for s in sums))])
    return (~checked.isfinite()).any().float()


def norms(sums: list[GradientSum]) -> list[Tensor | None]:
    """Return the Euclidean norm of each packed sum, by one kernel launch for each format; None where no kernel reads it."""
    result: list[Tensor | None] = [None] * len(sums)
    by_format: dict[Any, list[int]] = {}
    for i, held in enumerate(sums):
        if held.floor is None:
            by_format.setdefault((held.packed.format, held.packed.device), []).append(i)
    for places in by_format.values():
        squares = square_sums([sums[i].packed for i in places])
        if squares is not None:
            factors = torch.stack([sums[i].factor for i in places])
            for i, norm in zip(places, (squares.sqrt() * factors.abs()).unbind(), strict=True):
                result[i] = norm
    return result


def _as_plain(grad: Tensor, packed: PackedTensor) -> Tensor:
    """Return `grad` contiguous, in a dtype that `encode` takes; raise OptimError if it cannot be added to the sum `packed`."""
    if grad.layout is not torch.strided or grad.is_complex():
        what = "complex" if grad.is_complex() else f"sparse ({str(grad.layout).removeprefix('torch.')})"
        raise OptimError(
            f"a gradient is {what}, and packed accumulators hold dense real numbers. Make the embedding with sparse=False, or give the "
            "optimizer gradient=None for this parameter (tier='full')."
        )
    if grad.shape != packed.shape or grad.device != packed.device:
        raise OptimError(
            f"a gradient of shape {tuple(grad.shape)} on {grad.device} does not fit its accumulator of shape {tuple(packed.shape)} on "
            f"{packed.device}. Make a new optimizer after changing a parameter's shape or device."
        )
    grad = grad.detach().contiguous()
    return grad if grad.dtype in DTYPES else grad.float()


@dataclass(eq=False)
class Lease:
    """What p.grad and other tensors hold to refer to the sum of gradients whose values they show.

    Before the optimizer overwrites that sum, a lease that is still in use is given a copy, so that the tensors keep their values.
    """

    total: GradientSum
    last: weakref.ref[Lease] | None = field(default=None)  # the lease of the current p.grad, made by `lend`
