"""Gives fake tensors values where a model's shapes or decisions depend on them: experts that select tokens, masks, `if x.max() > limit`.

Fake tensors have no values. `ValuedFakeMode` records how small tensors are computed, and computes them if an operation needs values:

    batch, parameters and buffers          have their own values, if they have any
    tensors computed from these            are computed by the same operations
    other tensors: large activations       have assumed values: normal numbers, and 1 for integers and booleans

So a router with random logits sends equal shares of the tokens to all experts, and all experts together get as many tokens as in a real
step. A trace says where it assumed values (`places`).

    scores (fake)  -> topk -> chosen -> chosen == 3 -> nonzero        needs values: topk, == and nonzero run on random scores
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from operator import getitem
from typing import Any, final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

MAX_INTEGERS, MAX_FLOATS = 1 << 26, 1 << 17  # most values of a tensor whose computation is recorded
MAX_ASSUMED = 1 << 24  # most values of a float tensor that gets random values; larger tensors get zeros
SEED = 0
NUMBER = torch.ops.aten._local_scalar_dense.default
GROUPED_PRODUCT = torch.ops.aten._grouped_mm.default


@final
class Value:
    """The value of one fake tensor: a real tensor, or how to compute one from other values when it is needed."""

    __slots__ = ("_arguments", "_function", "_inputs", "_result", "is_assumed")

    def __init__(
        self,
        function: Callable[..., Tensor],
        arguments: Any = ((), {}),
        result: Tensor | None = None,
        *,
        is_assumed: bool = False,
    ) -> None:
        self._function, self._arguments, self._result = function, arguments, result
        self._inputs = [leaf for leaf in tree_leaves(arguments, is_leaf=_is_value) if isinstance(leaf, Value)]
        self.is_assumed = is_assumed or any(value.is_assumed for value in self._inputs)

    @property
    def is_known(self) -> bool:
        """Return whether the value was computed already, itself or as a part of another one."""
        return self._result is not None or (self._function is getitem and self._inputs[0].is_known)

    def tensor(self) -> Tensor:
        """Return the value as a real tensor, which the first call computes."""
        pending = [self]
        while pending:
            value = pending[-1]
            missing = [] if value._result is not None else [one for one in value._inputs if one._result is None]
            pending += missing
            if not missing:
                pending.pop()._compute()
        assert self._result is not None
        return self._result

    def _compute(self) -> None:
        if self._result is None:
            args, kwargs = tree_map(
                lambda leaf: leaf._result if isinstance(leaf, Value) else leaf, self._arguments, is_leaf=_is_value
            )
            self._result = self._function(*args, **kwargs)
            self._arguments, self._inputs = ((), {}), []  # what it was computed from can be freed


def _is_value(leaf: Any) -> bool:
    return isinstance(leaf, Value)


@final
class ValuedFakeMode(FakeTensorMode):
    """A fake tensor mode that also runs operations whose result depends on values of tensors, such as `nonzero`."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._values = WeakTensorKeyDictionary()  # fake tensor -> Value
        self.place: Callable[[], str] = str
        self.places: Counter[str] = Counter()  # modules in which assumed values were needed

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the fake result of the operation `func`, and record how its values could be computed."""
        kwargs = kwargs or {}
        inputs = self._inputs(args, kwargs) if func._schema.is_mutable else None  # before they are written to
        try:
            if func is GROUPED_PRODUCT and args[0].dtype is not torch.bfloat16:
                out = self._grouped_product(args, kwargs)
            else:
                out = super().dispatch(func, types, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            return self._with_values(func, args, kwargs)
        self._note(func, args, kwargs, out, inputs)
        return out

    def know(self, fake: Tensor, tensor: Tensor) -> None:
        """Record that the fake tensor `fake` has the values of `tensor`, unless `tensor` is large or has no values."""
        if tensor.numel() <= MAX_ASSUMED and not tensor.is_meta and not isinstance(tensor, FakeTensor):
            self._values[fake] = Value(lambda: tensor.detach().cpu())

    def forget(self) -> None:
        """Drop all recorded values and the function `place`, so that what they refer to can be freed."""
        self._values, self.place = WeakTensorKeyDictionary(), str

    def array(self, fake: Tensor) -> Any:
        """Return the values of a fake tensor as a NumPy array."""
        value = self._value(fake)
        self._count(value)
        with _computing():
            return value.tensor().numpy()

    def _count(self, value: Value) -> None:
        if value.is_assumed:
            self.places[self.place()] += 1

    def _number(self, value: Value) -> Any:
        """Return the number that `value`, of a tensor of one element, holds."""
        self._count(value)
        if not value.is_known:
            with _computing():
                value.tensor()
        with _disable_current_modes():
            return value.tensor().item()

    def _with_values(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation whose result depends on values; return a Python number, or fake tensors."""
        if func is NUMBER:
            return self._number(self._value(args[0]))
        value = Value(_runs(func), self._inputs(args, kwargs))
        self._count(value)
        with _computing():
            out: Any = value.tensor()
        return tree_map(lambda leaf: self._fake(leaf, value) if isinstance(leaf, Tensor) else leaf, out)

    def _fake(self, tensor: Tensor, source: Value) -> Tensor:
        with self:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        self._values[fake] = Value(torch.empty, result=tensor, is_assumed=source.is_assumed)
        return fake

    def _grouped_product(self, args: Any, kwargs: Any) -> Tensor:
        """Return the fake result of a grouped matrix product in other dtypes than bfloat16, which torch lacks."""
        with self:
            halves = (torch.empty_strided(t.shape, t.stride(), dtype=torch.bfloat16) for t in args[:2])
            out = GROUPED_PRODUCT(*halves, *args[2:], **kwargs)
            return torch.empty_strided(out.shape, out.stride(), dtype=args[0].dtype)

    def _note(self, func: Any, args: Any, kwargs: Any, out: Any, inputs: Any) -> None:
        """Record how the values of an operation's outputs, if they are small, could be computed from its inputs.

        `inputs` has the values of the inputs as they were before the operation if it writes to them; it is None for other operations.
        """
        if func._schema.name.removeprefix("aten::").removeprefix("new_").startswith("empty"):
            return
        outputs = [out] if isinstance(out, Tensor) else list(out) if isinstance(out, tuple | list) else []
        whole: Value | None = None  # the value of all outputs together, which is computed once
        for place, tensor in enumerate(outputs):
            if not isinstance(tensor, FakeTensor) or tensor.numel() > (MAX_FLOATS if tensor.is_floating_point() else MAX_INTEGERS):
                continue
            if whole is None:
                is_random = torch.Tag.nondeterministic_seeded in func.tags
                whole = Value(_runs(func), inputs or self._inputs(args, kwargs), is_assumed=is_random)
            self._values[tensor] = value = whole if out is tensor else Value(getitem, ((whole, place), {}))
            base = tensor._base
            if base is not None and func._schema.is_mutable:  # written through a view
                view = (tensor.shape, tensor.stride(), tensor.storage_offset() - base.storage_offset())
                self._values[base] = Value(torch.as_strided_scatter, ((self._value(base), value, *view), {}))

    def _inputs(self, args: Any, kwargs: Any) -> Any:
        return tree_map(lambda leaf: self._value(leaf) if isinstance(leaf, Tensor) else leaf, (args, kwargs))

    def _value(self, tensor: Tensor) -> Value:
        if not isinstance(tensor, FakeTensor):
            return Value(lambda: tensor.detach().cpu())
        found = self._values.get(tensor)
        return found if found is not None else Value(_assumed, ((tuple(tensor.shape), tensor.dtype), {}), is_assumed=True)


def _assumed(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if not dtype.is_floating_point:
        return torch.ones((), dtype=dtype).expand(shape)
    if torch.Size(shape).numel() > MAX_ASSUMED:
        return torch.zeros((), dtype=dtype).expand(shape)
    return torch.randn(shape, generator=torch.Generator().manual_seed(SEED)).to(dtype)


def _runs(func: Any) -> Callable[..., Any]:
    """Return a function that runs the operation `func` on real values without changing its inputs."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if func._schema.is_mutable:
            args, kwargs = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        return func(*args, **kwargs)

    return run


@contextmanager
def _computing() -> Generator[None]:
    """Return a context for operations on real values: no modes of torch, no gradients, a fixed seed."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad(), torch.random.fork_rng(devices=()):
        torch.manual_seed(SEED)
        yield
