"""Packed gradients: `GradientSum`, an accumulator stored in a format, and `GradientTensor`, the tensor that p.grad shows of it.

    sum <- encode(decode(sum) * factor + gradient * weight), rounded stochastically

    codes (rows, row_bytes) uint8, scales (rows, blocks)     written in place, as long as the optimizer is alive
    factor () float32                                        value = decoded * factor: clipping and unscaling change one number

Fold n, counted from 1 over all steps, draws the random bits of Seed(step=n), so that a resumed run gives the same bits. Nothing here
synchronizes with the device.

A `GradientTensor` has the shape, dtype and device of the gradient, and codes instead of values. The optimizer reuses the buffers at every
step. A p.grad of an earlier step that user code still references keeps its values: tensors refer to the sum through a `Lease`, and a lease
that is still referenced gets a copy of the buffers before they are overwritten. A view stores the functions that made it: reading applies
them to the decoded values, writing encodes the whole gradient.

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
from paredown.errors import OptimError
from paredown.formats.rounding import Rounding, Seed
from paredown.optim.batched_update import fold, square_sums
from paredown.optim.reference import Fold


@dataclass(eq=False)
class GradientSum:
    """A packed sum of the gradients of one parameter, which `GradientTensor` shows to user code.

    The optimizer changes its buffers in place; other code reads them through a `GradientTensor`.
    """

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
        """Return a sum that is stored in `packed`, whose codes are in the order of the parameter's indices.

        `weight`: the factor of each gradient before it is added. `seed`: of stochastic rounding.
        """
        if packed.order != tuple(range(len(packed.shape))):
            raise OptimError(
                f"an accumulator is packed in the order of its dimensions, not in {packed.order}: encode with order='logical'."
            )
        return GradientSum(packed, seed, torch.ones((), device=packed.device), weight)

    def fold(self, grad: Tensor, *, weight: float, is_first: bool) -> None:
        """Add `grad` * `weight` to the sum; start a new sum with it if `is_first`."""
        grad = _as_plain(grad, self.packed)
        if not is_first:
            self.settle()
        self.folds += 1
        seed = Seed(self.seed.value, self.seed.tensor, self.folds, self.seed.first_index)
        factor = self.factor if self.is_scaled and not is_first else None
        fold(self.packed, grad, Fold(weight, factor, seed, is_first, self.rounding))
        self._reset_factor()

    def store(self, values: Tensor) -> None:
        """Replace the sum of gradients by `values`."""
        self.fold(values, weight=1.0, is_first=True)

    def zero(self) -> None:
        """Set the sum to zero: codes 0, and scales 0 if there are any."""
        self.before_start()
        for tensor in self.packed.parts.tensors():
            tensor.zero_()
        self._reset_factor()

    def factor_to_change(self) -> Tensor:
        """Return the scalar tensor that multiplies all decoded values, for an operation that changes it in place."""
        self.settle()
        self.is_scaled = True
        return self.factor

    def clamp_min(self, floor: float) -> None:
        """Clamp the sum's values to at least `floor`; the codes change when they are next read.

        clip_grad_value_ clamps at each bound in a call of its own; because the first is deferred, codes are rounded once.
        """
        self.settle()
        self.floor = floor

    def clamp_max(self, ceiling: float) -> None:
        """Clamp the sum's values to at most `ceiling`."""
        self.store(self.decode(torch.float32).clamp_(max=ceiling))

    def settle(self) -> None:
        """Encode the sum again if `clamp_min` has set a lower bound that the codes do not have yet."""
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
        """Return a copy of the sum in new buffers, on `device`, or on the same device for None."""
        target = device or self.packed.device
        copied = self.packed.mapped(lambda part: part.to(target, copy=True))
        return replace(self, packed=copied, factor=self.factor.to(target, copy=True))

    def _reset_factor(self) -> None:
        """Set the factor to 1 and forget the lower bound of `clamp_min`, since new codes include both."""
        self.floor = None
        if self.is_scaled:
            self.factor.fill_(1.0)
            self.is_scaled = False


def any_nonfinite(sums: list[GradientSum]) -> Tensor:
    """Return a tensor with 1.0 if any value of these packed sums is NaN or infinite, and 0.0 otherwise.

    Blocks that are not finite have scale NaN.
    """
    scales = [s.packed.scales for s in sums]
    floats = [t for t in scales if t is not None and t.is_floating_point() and t.numel()]
    norms = torch._foreach_norm(floats, torch.inf) if floats else ()
    rest = [s for s in sums if s.packed.scales is None or not s.packed.scales.is_floating_point()]
    largest = [s.packed.decode(torch.float32).abs().max() for s in rest if s.packed.shape.numel()]
    checked = torch.stack([t.float() for t in (*norms, *largest, *(s.factor for s in sums))])
    return (~checked.isfinite()).any().float()


def norms(sums: list[GradientSum]) -> list[Tensor | None]:
    """Return the Euclidean norm of each packed sum in float32; None where no kernel reads the format.

    Kernels compute them in one launch for each format.
    """
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
    """Return a gradient as a contiguous tensor of a dtype that the codec encodes; raise OptimError if it cannot be added to `packed`."""
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


# --- the tensor that p.grad shows -------------------------------------------------------------------------------------

View = tuple[Any, tuple[Any, ...], dict[str, Any], int | None]  # function, its arguments after the tensor, which of its results


@dataclass(eq=False)
class Lease:
    """A reference to a packed sum, shared by tensors that show it; it changes to a copy before the optimizer overwrites the sum."""

    total: GradientSum
    last: weakref.ref[Lease] | None = field(default=None)  # the lease of the current p.grad, made by `lend`


class GradientTensor(Tensor):
    """A tensor subclass that shows a packed gradient: `packed` has the codes, and `factor` multiplies decoded values.

    p.grad is an object of its subclass `PackedGradient`.
    """

    _lease: Lease
    _views: tuple[View, ...]
    _dtype: torch.dtype  # before any view
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def over(cls, lease: Lease, dtype: torch.dtype, views: tuple[View, ...] = (), like: Tensor | None = None) -> Self:
        """Return a tensor that shows a packed gradient through `views`.

        `like` has the resulting shape, strides and dtype; None: those of the gradient, in `dtype`."""
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

    def with_view(self, view: View, like: Tensor) -> Self:
        """Return a tensor that shows this gradient through one more view, with the shape, strides and dtype of `like`."""
        return self.over(self._lease, self._dtype, (*self._views, view), like)

    def alias(self) -> Self:
        """Return a new tensor that shows the same gradient."""
        return self.over(self._lease, self._dtype, self._views, None if self.is_whole else self)

    @property
    def total(self) -> GradientSum:
        """The packed sum of gradients that this tensor shows."""
        return self._lease.total

    @property
    def packed(self) -> PackedTensor:
        """The codes and scales of the gradient, which belong to the optimizer."""
        self.total.settle()
        return self.total.packed

    @property
    def factor(self) -> Tensor:
        """The float32 scalar tensor by which decoded values are multiplied; it stays the same object."""
        return self.total.factor

    @property
    def is_whole(self) -> bool:
        """Whether this tensor shows the whole gradient, rather than a view of it."""
        return not self._views

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """The bytes of codes, scales and factor."""
        return self.packed.nbytes + self.factor.nbytes

    def decode(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the decoded values as an ordinary tensor, in `dtype` if given."""
        if not self._views:
            return self.total.decode(dtype or self._dtype)
        values = _through(self._views, self.total.decode(self._dtype))
        return values if dtype is None else values.to(dtype)

    def store(self, values: Tensor) -> None:
        """Replace the gradient by `values`, rounded stochastically."""
        if values.shape != self.shape:
            raise OptimError(f"a packed gradient of shape {tuple(self.shape)} cannot become one of shape {tuple(values.shape)}.")
        if self._views:
            base = self.total.decode(self._dtype)
            _through(self._views, base).copy_(values)
            values = base
        self.total.store(values)

    def lend(self, dtype: torch.dtype) -> Self:
        """Return a new tensor over the same codes, to be assigned to `p.grad`; the optimizer is about to overwrite the codes.

        The tensor that the previous call of `lend` returned, if still referenced, gets a copy of the codes and so keeps its values.
        """
        last = self._lease.last() if self._lease.last is not None else None
        if last is not None:
            last.total = last.total.copy()
        lease = Lease(self.total)
        self._lease.last = weakref.ref(lease)
        return self.over(lease, dtype)

    def lent(self, other: object) -> bool:
        """Return whether `other` shows the whole of this gradient's codes; if it does, apply the bound of `clamp_min` to them."""
        if not isinstance(other, GradientTensor) or other._lease.total is not self._lease.total or other._views:
            return False
        self.total.settle()
        return True

    @property
    def is_lent(self) -> bool:
        """Whether p.grad or user code still holds a tensor that `lend` returned."""
        return self._lease.last is not None and self._lease.last() is not None

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """The detached gradient; assigning to `data` replaces values, dtype and device, as model.to() does."""
        return self.detach()

    @data.setter
    def data(self, values: Tensor) -> None:
        if values.device != self.device:
            self._lease.total = self.total.copy(values.device)
        if (values.dtype, values.device) != (self.dtype, self.device) and self.is_whole:
            Tensor.data.__set__(self, self.over(self._lease, values.dtype))  # type: ignore[attr-defined]
            self._dtype = values.dtype
        self.store(values)

    # --- methods that bypass torch's dispatcher ---------------------------------------------------------------------------

    def __repr__(self, **_: Any) -> str:
        dtype, view = str(self.dtype).removeprefix("torch."), "" if self.is_whole else ", a view"
        what = f"{self.packed.format}, shape={tuple(self.shape)}, {dtype} on {self.device}"
        return f"PackedGradient({what}, {self.packed.nbytes} bytes{view})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return memo.setdefault(id(self), self.decode())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.decode().__reduce_ex__(protocol)

    def numpy(self, *, force: bool = False) -> Any:
        """Return the decoded values as a numpy array."""
        return self.decode().numpy(force=force)

    def tolist(self) -> Any:
        """Return the decoded values as nested lists."""
        return self.decode().tolist()


def _through(views: tuple[View, ...], values: Tensor) -> Tensor:
    for func, args, kwargs, index in views:
        values = func(values, *args, **kwargs)
        values = values if index is None else values[index]
    return values
