"""A tensor over a sum of gradients in a format: shape, dtype and device of the gradient, codes instead of values.

The buffers belong to an optimizer, which fills them anew at every step. Who holds the p.grad of an earlier step still sees its values:
tensors reach the sum through a `Lease`, and one that is still in use gets a copy before the buffers are written.
Views remember how they came about: read, they are taken of the decoded values; written, the whole is encoded again.

A sum of gradients in a format: sum <- encode(DQ(sum) * factor + gradient * weight), rounded at random.

    codes (rows, row_bytes) uint8, scales (rows, blocks)     in place, for as long as the optimizer lives
    factor () float32                                        value = DQ * factor: clipping and unscaling change one number

Fold n, counted from 1 over all steps, draws the random bits of Seed(step=n), so that a resumed run folds to the same bits. Nothing here
waits for the device.

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
from typing import Any, Self

import torch
from torch import Tensor

from paredown.codec.packed import DTYPES, PackedTensor
from paredown.codec.reference import PackedParts
from paredown.errors import OptimError
from paredown.formats.rounding import Rounding, Seed
from paredown.optim.batched_update import fold, square_sums


@dataclass(eq=False)
class GradientSum:
    """The buffers of one accumulator and what is known of them. Their owner changes them in place; others see them through a tensor."""

    packed: PackedTensor
    seed: Seed
    factor: Tensor
    weight: float = 1.0  # of a gradient that backward brings: 1 / microbatches
    folds: int = 0
    is_scaled: bool = False  # whether `factor` may be another number than 1
    floor: float | None = None  # a lower bound of the values that is not in the codes yet
    rounding: Rounding = Rounding.STOCHASTIC
    before_start: Callable[[], None] = lambda: None  # called before a new sum is begun; may refuse
    before_unscale: Callable[[], None] = lambda: None  # called before a GradScaler unscales it; may refuse

    @staticmethod
    def over(packed: PackedTensor, seed: Seed, *, weight: float = 1.0, factor: Tensor | None = None) -> GradientSum:
        """A sum in the buffers of `packed`, which has logical order; `factor` is a float32 tensor of no dimensions that holds 1."""
        if packed.order != tuple(range(len(packed.shape))):
            raise OptimError(
                f"an accumulator is packed along its dimensions as they are numbered, not {packed.order}: order='logical'."
            )
        made = torch.ones((), device=packed.device) if factor is None else factor
        return GradientSum(packed, seed, made, weight)

    def fold(self, grad: Tensor, *, weight: float, is_first: bool) -> None:
        """Add `grad` * `weight` to the sum, or start it with that."""
        grad = _as_plain(grad, self.packed)
        if not is_first:
            self.settle()
        self.folds += 1
        seed = Seed(self.seed.value, self.seed.tensor, self.folds, self.seed.first_index)
        factor = self.factor if self.is_scaled and not is_first else None
        fold(self.packed, grad, weight=weight, factor=factor, seed=seed, is_first=is_first, rounding=self.rounding)
        self._is_new()

    def store(self, values: Tensor) -> None:
        """Hold `values` instead."""
        self.fold(values, weight=1.0, is_first=True)

    def zero(self) -> None:
        """Hold zeros: scale 0, and code 0 where there is no scale."""
        self.before_start()
        for tensor in self.packed.parts.tensors():
            tensor.zero_()
        self._is_new()

    def factor_to_change(self) -> Tensor:
        """The factor, for an operation that multiplies it in place."""
        self.settle()
        self.is_scaled = True
        return self.factor

    def clamp_min(self, floor: float) -> None:
        """Raise values to `floor`, later: where clip_grad_value_ asks for both bounds one by one, codes are rounded once."""
        self.settle()
        self.floor = floor

    def clamp_max(self, ceiling: float) -> None:
        """Lower values to `ceiling`."""
        self.store(self.decode(torch.float32).clamp_(max=ceiling))

    def settle(self) -> None:
        """Codes and factor say all."""
        if self.floor is not None:
            self.store(self.decode(torch.float32))

    def decode(self, dtype: torch.dtype) -> Tensor:
        """The values, contiguous: DQ * factor in float32, and then in `dtype`."""
        if not self.is_scaled and self.floor is None and dtype in DTYPES:
            return self.packed.decode(dtype)
        values = self.packed.decode(torch.float32)
        if self.is_scaled:
            values.mul_(self.factor)
        if self.floor is not None:
            values.clamp_(min=self.floor)
        return values.to(dtype)

    def copy(self, device: torch.device | None = None) -> GradientSum:
        """The same in buffers of its own."""
        parts, place = self.packed.parts, device or self.packed.device
        tensors = (parts.codes, parts.scales, parts.minimums, parts.tensor_scale)
        own = PackedParts(*(None if t is None else t.to(place, copy=True) for t in tensors))
        return replace(self, packed=replace(self.packed, parts=own), factor=self.factor.to(place, copy=True))

    def _is_new(self) -> None:
        """Nothing is left of what was asked of the values before."""
        self.floor = None
        if self.is_scaled:
            self.factor.fill_(1.0)
            self.is_scaled = False


def any_nonfinite(sums: list[GradientSum]) -> Tensor:
    """1.0 if a value of any of these is NaN or infinite and 0.0 otherwise, on their device: broken blocks have a scale that says so."""
    scales = [s.packed.scales for s in sums]
    floats = [t for t in scales if t is not None and t.is_floating_point() and t.numel()]
    norms = torch._foreach_norm(floats, torch.inf) if floats else ()
    rest = [s for s in sums if s.packed.scales is None or not s.packed.scales.is_floating_point()]
    largest = [s.packed.decode(torch.float32).abs().max() for s in rest if s.packed.shape.numel()]
    looked_at = torch.stack([t.float() for t in (*norms, *largest, *(s.factor for s in sums))])
    return (~looked_at.isfinite()).any().float()


def norms(sums: list[GradientSum]) -> list[Tensor | None]:
    """The Euclidean norm of each sum in float32, by kernels over all of them at once; None where there is no kernel for one."""
    found: list[Tensor | None] = [None] * len(sums)
    alike: dict[Any, list[int]] = {}
    for i, held in enumerate(sums):
        if held.floor is None:
            alike.setdefault((held.packed.format, held.packed.device), []).append(i)
    for places in alike.values():
        squares = square_sums([sums[i].packed for i in places])
        if squares is not None:
            factors = torch.stack([sums[i].factor for i in places])
            for i, norm in zip(places, (squares.sqrt() * factors.abs()).unbind(), strict=True):
                found[i] = norm
    return found


def _as_plain(grad: Tensor, packed: PackedTensor) -> Tensor:
    """A gradient as `fold` takes it: dense, of the right shape, contiguous, in a dtype of the codec."""
    if grad.layout is not torch.strided or grad.is_complex():
        what = "complex" if grad.is_complex() else f"sparse ({str(grad.layout).removeprefix('torch.')})"
        raise OptimError(
            f"a gradient is {what}, and packed accumulators hold dense real numbers. Make the embedding with sparse=False, or give the "
            "optimizer gradient=None for this parameter (tier='full')."
        )
    if grad.shape != packed.shape or grad.device != packed.device:
        raise OptimError(
            f"a gradient of shape {tuple(grad.shape)} on {grad.device} came to an accumulator of shape {tuple(packed.shape)} on "
            f"{packed.device}. Make the optimizer again after changing a parameter's shape or device."
        )
    grad = grad.detach().contiguous()
    return grad if grad.dtype in DTYPES else grad.float()


# --- A tensor over a sum of gradients in a format ---

View = tuple[Any, tuple[Any, ...], dict[str, Any], int | None]  # function, its arguments after the tensor, which of its results


@dataclass(eq=False)
class Lease:
    """What gradients over one sum share: the sum, until it is needed for a new one."""

    total: GradientSum
    last: weakref.ref[Lease] | None = field(default=None)  # the one that `lend` made


class GradientTensor(Tensor):
    """A gradient in a format. `packed` are its buffers; `factor` multiplies what they decode to. `PackedGradient` is the final class."""

    _lease: Lease
    _views: tuple[View, ...]
    _dtype: torch.dtype  # before any view
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def over(cls, lease: Lease, dtype: torch.dtype, views: tuple[View, ...] = (), like: Tensor | None = None) -> Self:
        """A tensor over a lease; `like` has the shape, strides and dtype after `views`."""
        packed = lease.total.packed
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            packed.shape if like is None else like.shape,
            strides=None if like is None else like.stride(),
            dtype=dtype if like is None else like.dtype,
            device=packed.device,
            storage_size=0 if views else packed.nbytes,
        )
        made._lease, made._views, made._dtype = lease, views, dtype
        return made

    def seen_through(self, view: View, like: Tensor) -> Self:
        """A view of this."""
        return self.over(self._lease, self._dtype, (*self._views, view), like)

    def alias(self) -> Self:
        """The same gradient in another tensor."""
        return self.over(self._lease, self._dtype, self._views, None if self.is_whole else self)

    @property
    def total(self) -> GradientSum:
        """The sum that this shows."""
        return self._lease.total

    @property
    def packed(self) -> PackedTensor:
        """Codes and scales; the optimizer owns them, and reads them together with `factor`."""
        self.total.settle()
        return self.total.packed

    @property
    def factor(self) -> Tensor:
        """What decoded values are multiplied with: always the same float32 tensor of no dimensions."""
        return self.total.factor

    @property
    def is_scaled(self) -> bool:
        """Whether `factor` may be another number than 1."""
        return self.total.is_scaled

    @property
    def weight(self) -> float:
        """What gradients from backward are multiplied with before they are added."""
        return self.total.weight

    @weight.setter
    def weight(self, value: float) -> None:
        self.total.weight = value

    @property
    def folds(self) -> int:
        """How many gradients came so far; it numbers the random bits."""
        return self.total.folds

    @folds.setter
    def folds(self, value: int) -> None:
        self.total.folds = value

    @property
    def is_whole(self) -> bool:
        """Whether this is all of the gradient, and no view of it."""
        return not self._views

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """The bytes that are really held."""
        return self.packed.nbytes + self.factor.nbytes

    def decode(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values as a plain tensor."""
        if not self._views:
            return self.total.decode(dtype or self._dtype)
        values = _through(self._views, self.total.decode(self._dtype))
        return values if dtype is None else values.to(dtype)

    def store(self, values: Tensor) -> None:
        """Hold `values` instead, rounded at random."""
        if values.shape != self.shape:
            raise OptimError(f"a packed gradient of shape {tuple(self.shape)} cannot become one of shape {tuple(values.shape)}.")
        if self._views:
            base = self.total.decode(self._dtype)
            _through(self._views, base).copy_(values)
            values = base
        self.total.store(values)

    def lend(self, dtype: torch.dtype) -> Self:
        """A gradient over the same buffers for `p.grad`, which are about to be written anew.

        One that was lent before and that somebody still holds keeps its values: it gets a copy of the buffers.
        """
        last = self._lease.last() if self._lease.last is not None else None
        if last is not None:
            last.total = last.total.copy()
        lease = Lease(self.total)
        self._lease.last = weakref.ref(lease)
        return self.over(lease, dtype)

    def lent(self, other: object) -> bool:
        """Whether `other` shows these buffers, all of them; they are then ready to be read."""
        if not isinstance(other, GradientTensor) or other._lease.total is not self._lease.total or other._views:
            return False
        self.total.settle()
        return True

    @property
    def is_lent(self) -> bool:
        """Whether a gradient over these buffers is held by a parameter or by somebody else."""
        return self._lease.last is not None and self._lease.last() is not None

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """The same gradient; assigned to, it takes the values, and their dtype and device as under model.to()."""
        return self.detach()

    @data.setter
    def data(self, values: Tensor) -> None:
        if values.device != self.device:
            self._lease.total = self.total.copy(values.device)
        if (values.dtype, values.device) != (self.dtype, self.device) and self.is_whole:
            Tensor.data.__set__(self, self.over(self._lease, values.dtype))  # type: ignore[attr-defined]
            self._dtype = values.dtype
        self.store(values)

    # --- what does not come through torch's dispatcher --------------------------------------------------------------------

    def __repr__(self, **_: Any) -> str:
        dtype, view = str(self.dtype).removeprefix("torch."), "" if self.is_whole else ", a view"
        what = f"{self.packed.format}, shape={tuple(self.shape)}, {dtype} on {self.device}"
        return f"PackedGradient({what}, {self.packed.nbytes} bytes{view})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return memo.setdefault(id(self), self.decode())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.decode().__reduce_ex__(protocol)

    def numpy(self, *, force: bool = False) -> Any:
        """The values as a numpy array, which does not share memory."""
        return self.decode().numpy(force=force)

    def tolist(self) -> Any:
        """The values as nested lists."""
        return self.decode().tolist()


def _through(views: tuple[View, ...], values: Tensor) -> Tensor:
    for func, args, kwargs, index in views:
        values = func(values, *args, **kwargs)
        values = values if index is None else values[index]
    return values
