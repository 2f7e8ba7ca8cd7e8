"""A tensor over a sum of gradients in a format: shape, dtype and device of the gradient, codes instead of values.

The buffers belong to an optimizer, which fills them anew at every step. Who holds the p.grad of an earlier step still sees its values:
tensors reach the sum through a `Lease`, and one that is still in use gets a copy before the buffers are written.
Views remember how they came about: read, they are taken of the decoded values; written, the whole is encoded again.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from paredown.codec.packed import PackedTensor
from paredown.errors import OptimError
from paredown.optim.gradient_sum import GradientSum

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
