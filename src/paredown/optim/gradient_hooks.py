"""These hooks process each gradient as soon as backward has completed it, so that its memory is freed inside backward.

    Accumulator    gradient --fold--> packed accumulator; p.grad is a PackedGradient that shows it; later backward passes add to it
    GradientMean   gradient * 1 / microbatches; p.grad is an ordinary tensor
    GradientCopy   a copy of a gradient that is a view: fully_shard frees the gradients of a module when nothing refers to any of them
    Releaser       gradient --update--> parameter, immediately; p.grad is a ReleasedGradient, which has a shape and no values

The first gradient after p.grad = None starts the sum, as in torch. A gradient that user code assigned is encoded at the next backward or
step. Under backward(create_graph=True) gradients have a graph, which codes cannot have: they stay ordinary tensors until the step.
Gradients that are not packed are sums; the accumulator stores them multiplied by its `weight` (1 / microbatches).

>>> from paredown.codec.packed import encode
>>> from paredown.formats.rounding import Seed
>>> p = torch.nn.Parameter(torch.zeros(2, 64))
>>> Accumulator(p, PackedGradient(encode(p.detach(), "int8/64@bf16", order="logical"), Seed(0))).attach()
>>> for _ in range(2):
...     (127 * p).sum().backward()
>>> p.grad
PackedGradient(int8/64@bf16, shape=(2, 64), float32 on cpu, 132 bytes)
>>> torch.nn.utils.clip_grad_norm_(p, 1.0), p.grad.norm()
(tensor(2873.6819), tensor(1.0000))
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor

from paredown.errors import OptimError
from paredown.optim.gradient_ops import PackedGradient
from paredown.optim.sharded.local_rows import distributed_like, local

aten = torch.ops.aten
GONE = (
    "release=True updates in backward and frees each gradient there, so that there is nothing left to read, clip or scale"
    " ({op}). Use release=False: packed gradients take clip_grad_norm_, clip_grad_value_ and GradScaler."
)
SECOND = (
    "release=True updates in backward, and a second backward ran before step(): use microbatches=K (release=False) to add gradients up,"
    " or call step() after each backward."
)
NOT_ZEROED = (
    "release=True used the last gradient and freed it, so that a new one cannot be added to it: call zero_grad() between step() and"
    " backward, or use release=False."
)


@contextmanager
def errors_of(name: str) -> Generator[None]:
    """Return a context in which the message of every OptimError gets the name of a parameter at its beginning."""
    try:
        yield
    except OptimError as error:
        raise OptimError(f"{name}: {error}") from None


class _Hook(ABC):
    """A hook on one parameter that processes its gradients inside backward; it does not keep the parameter alive."""

    def __init__(self, parameter: Tensor, name: str) -> None:
        if parameter.is_complex():
            raise OptimError(
                f"{name} is complex, and packed gradients hold real numbers: give torch.view_as_real(p), or tier='full'."
            )
        self.name = name
        self._parameter = weakref.ref(parameter)
        self._handle: Any = None

    @property
    def parameter(self) -> Tensor:
        """The parameter that has this hook; reading it raises OptimError if the parameter was deleted."""
        parameter = self._parameter()
        if parameter is None:
            raise OptimError(f"{self.name} was deleted, and its gradients with it.")
        return parameter

    def attach(self) -> None:
        """Register this hook on its parameter, unless it is registered already."""
        if self._handle is None:
            parameter = self.parameter
            # torch registers hooks only while it is true; they stay when it is set to False
            requires_grad = parameter.requires_grad
            self._handle = self._register(parameter.requires_grad_(True))
            parameter.requires_grad_(requires_grad)

    def _register(self, parameter: Tensor) -> Any:
        return parameter.register_post_accumulate_grad_hook(self._called)

    def remove(self) -> None:
        """Remove the hook from the parameter; p.grad is not changed."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _called(self, parameter: Tensor) -> None:
        if torch.is_grad_enabled():  # under create_graph
            with torch.no_grad():
                self._called(parameter)
            return
        with torch._C.DisableTorchFunctionSubclass():
            grad = parameter.grad
            if grad is not None:
                self._accumulated(parameter, grad)

    @abstractmethod
    def _accumulated(self, parameter: Tensor, grad: Tensor) -> None:
        """Process `grad`, which backward has just accumulated in p.grad."""


class Accumulator(_Hook):
    """A hook that adds each gradient of a parameter to a packed sum, which p.grad then shows."""

    def __init__(self, parameter: Tensor, gradient: PackedGradient, *, name: str = "a parameter") -> None:
        super().__init__(parameter, name)
        self.gradient = gradient

    def collect(self) -> bool:
        """Pack p.grad into the sum if user code has assigned an ordinary tensor to it; return whether p.grad exists."""
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            parameter = self.parameter
            grad = parameter.grad
            if grad is not None and not self.gradient.lent(local(grad)):
                self._take(parameter, grad.detach())
            return grad is not None

    def _accumulated(self, parameter: Tensor, grad: Tensor) -> None:
        if not (grad.requires_grad or self.gradient.lent(local(grad))):  # else it has a graph, or autograd has added in place
            self._take(parameter, grad)

    def _take(self, parameter: Tensor, grad: Tensor) -> None:
        with errors_of(self.name):
            self.gradient.total.before_start()
            lent, rows = self.gradient.lend(grad.dtype), local(grad)
            if isinstance(rows, PackedGradient):  # another accumulator: already weighted
                self.gradient.total.store(rows.decode(torch.float32))
            else:
                self.gradient.total.fold(rows, weight=self.gradient.total.weight, is_first=True)
        parameter.grad = distributed_like(lent, grad)


class GradientMean(_Hook):
    """A hook for microbatches whose gradients are not packed: it multiplies each by `weight`, before p.grad adds them up.

    After 1 / `weight` microbatches p.grad is their mean.
    """

    def __init__(self, parameter: Tensor, weight: float, before_start: Callable[[], None], *, name: str = "a parameter") -> None:
        super().__init__(parameter, name)
        self._weight, self._before_start = weight, before_start

    def _register(self, parameter: Tensor) -> Any:
        return parameter.register_hook(self._weighted)

    def _weighted(self, grad: Tensor) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            is_first = self.parameter.grad is None
        if is_first:
            with errors_of(self.name):
                self._before_start()
        return grad * self._weight

    def _accumulated(self, parameter: Tensor, grad: Tensor) -> None:
        pass


class GradientCopy(_Hook):
    """A hook that copies the gradient of a sharded parameter, because FSDP2 makes it a view of all gradients of a module.

    Without the copy, this small view would keep all of their memory alive.
    """

    def _accumulated(self, parameter: Tensor, grad: Tensor) -> None:
        rows = local(grad)
        if rows.untyped_storage().nbytes() > rows.nbytes:
            parameter.grad = distributed_like(rows.clone(), grad)


def clear_factors(gradients: Iterable[PackedGradient]) -> None:
    """Set to 1 the factor of each packed gradient that neither p.grad nor user code references any more.

    This takes two kernel launches for all of them, instead of one for each gradient in backward.
    """
    totals = [g.total for g in gradients if g.total.is_scaled and not g.is_lent]
    if totals:
        factors = [total.factor for total in totals]
        torch._foreach_zero_(factors)
        torch._foreach_add_(factors, 1.0)
    for total in totals:
        total.is_scaled = False


class Releaser(_Hook):
    """A hook that updates its parameter with each gradient inside backward, so that no gradient is stored in p.grad.

    `update` updates the parameter; `is_updated` returns whether it has done so since the optimizer's last step().
    """

    def __init__(
        self, parameter: Tensor, update: Callable[[Tensor], None], is_updated: Callable[[], bool], *, name: str = "a parameter"
    ) -> None:
        super().__init__(parameter, name)
        self._update, self._is_updated = update, is_updated

    def use(self, grad: Tensor) -> None:
        """Update the parameter with `grad`; raise OptimError if that has happened already since the optimizer's last step()."""
        if grad.layout is not torch.strided:
            raise OptimError(
                f"{self.name} has a sparse gradient, and packed state is dense. Make the embedding with sparse=False, or use"
                " torch.optim.SparseAdam for it."
            )
        if self._is_updated():
            raise OptimError(f"{self.name}: {SECOND}")
        self._update(grad)

    def refuse_sum(self) -> NoReturn:
        """Raise OptimError, because a gradient comes in addition to one with which the parameter was already updated."""
        raise OptimError(f"{self.name}: {SECOND if self._is_updated() else NOT_ZEROED}")

    def _accumulated(self, parameter: Tensor, grad: Tensor) -> None:
        if not isinstance(grad, ReleasedGradient):  # whose `_add` has already called `use`
            self.use(grad.detach())
            parameter.grad = ReleasedGradient(grad, self)


class ReleasedGradient(Tensor):
    """The p.grad of a parameter that was updated inside backward: a tensor subclass with a shape, but without values.

    Everything that would read values raises OptimError.
    """

    _releaser: weakref.ref[Releaser]
    _is_zero: bool
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: type[ReleasedGradient], like: Tensor, releaser: Releaser) -> ReleasedGradient:
        """Return a tensor of the shape, dtype and device of `like`, without memory; `releaser`: the hook that used its values."""
        made = Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)  # type: ignore[attr-defined]
        made._releaser, made._is_zero = weakref.ref(releaser), False
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._foreach_zero_.default:
            return _zero_each(args[0])
        if not isinstance(args[0], ReleasedGradient) or func not in (aten.zero_.default, aten.detach.default, aten.add_.Tensor):
            raise OptimError(GONE.format(op=str(func).removeprefix("aten.").split(".")[0]))
        released: ReleasedGradient = args[0]
        if func is aten.zero_.default:
            released._is_zero = True
        elif func is aten.add_.Tensor:
            released._add(args[1])
        return released if func is not aten.detach.default else released._alias()

    def _add(self, grad: Tensor) -> None:
        """Update the parameter with `grad`, which autograd adds to p.grad; raise OptimError if p.grad was not zeroed before."""
        releaser = self._releaser()
        if releaser is None or torch._C._current_graph_task_id() == -1:
            raise OptimError(GONE.format(op="add_"))
        if not self._is_zero:
            releaser.refuse_sum()
        releaser.use(grad.detach())
        self._is_zero = False

    def _alias(self) -> ReleasedGradient:
        releaser = self._releaser()
        if releaser is None:
            raise OptimError(GONE.format(op="detach"))
        return ReleasedGradient(self, releaser)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """The bytes of the values: 0, since there are none."""
        return 0

    def __repr__(self, **_: Any) -> str:
        return f"ReleasedGradient(shape={tuple(self.shape)}, used in backward)"

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # the copy of a parameter has no gradient

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise OptimError(GONE.format(op="saving"))

    def numpy(self, *, force: bool = False) -> Any:
        """Raise OptimError, since there are no values."""
        raise OptimError(GONE.format(op="numpy"))

    def tolist(self) -> Any:
        """Raise OptimError, since there are no values."""
        raise OptimError(GONE.format(op="tolist"))


def _zero_each(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        tensor.zero_()
