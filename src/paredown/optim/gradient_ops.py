"""`PackedGradient` is the p.grad of a packed sum of gradients; `HANDLERS` has a function for each torch operator on it.

    add_, sub_                        add to the packed sum
    mul_, div_, neg_, and in lists    change the factor, one number on the device; so do clip_grad_norm_ and GradScaler
    zero_, detach, copy_, norms       use the codes, or decode one gradient at a time
    anything else                     decoded; arguments that the schema marks for writing are encoded, rounded stochastically

A `PackedGradient` has the shape, dtype and device of the gradient, and codes instead of values. A view stores the functions that made it:
reading applies them to the decoded values, writing encodes the whole gradient.

A handler returns NotImplemented for arguments that it does not cover, such as views and factors of more than one number. Lists may hold
packed and ordinary gradients; each kind is processed separately.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from paredown.codec.packed import PackedTensor
from paredown.errors import OptimError
from paredown.formats.rounding import Seed
from paredown.optim.packed_gradient import GradientSum, Lease, any_nonfinite, norms

aten = torch.ops.aten
View = tuple[Any, tuple[Any, ...], dict[str, Any], int | None]  # function, its arguments after the tensor, which of its results


class PackedGradient(Tensor):
    """The p.grad of a parameter whose gradients are summed in a low-bit format: `packed`, decoded, times the number `factor`.

    `packed` is in the order of the parameter's indices. The n-th gradient that is added is rounded with the bits of `seed` at step n.
    """

    _lease: Lease
    _views: tuple[View, ...]
    _dtype: torch.dtype  # dtype before the functions in `_views`
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: type[PackedGradient], packed: PackedTensor, seed: Seed, *, weight: float = 1.0) -> PackedGradient:
        """Return a tensor that shows the values of `packed`; each gradient that is added to it is multiplied by `weight`."""
        return cls.over(Lease(GradientSum.over(packed, seed, weight=weight)), packed.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})

    @classmethod
    def over(cls, lease: Lease, dtype: torch.dtype, views: tuple[View, ...] = (), like: Tensor | None = None) -> PackedGradient:
        """Return a tensor that shows a packed sum of gradients, or the view of it that the functions in `views` make.

        `lease` refers to the sum. `like` has the view's shape, strides and dtype; None means those of the sum, in `dtype`.
        """
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

    @property
    def total(self) -> GradientSum:
        """The packed sum of gradients that this tensor shows."""
        return self._lease.total

    @property
    def packed(self) -> PackedTensor:
        """The codes and scales of the gradient, which are the optimizer's own buffers, not a copy."""
        self.total.settle()
        return self.total.packed

    @property
    def factor(self) -> Tensor:
        """The float32 scalar tensor that multiplies all decoded values: clipping and unscaling change it alone, in place."""
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
        """Replace the gradient's values by `values`, rounded stochastically to its format."""
        if values.shape != self.shape:
            raise OptimError(f"a packed gradient of shape {tuple(self.shape)} cannot become one of shape {tuple(values.shape)}.")
        if self._views:
            base = self.total.decode(self._dtype)
            _through(self._views, base).copy_(values)
            values = base
        self.total.store(values)

    def lend(self, dtype: torch.dtype) -> PackedGradient:
        """Return a new tensor that shows the same codes, to become `p.grad`; call it before the codes are overwritten.

        The tensor that the previous call of `lend` returned, if still referenced, gets a copy of the codes and so keeps its values.
        """
        last = self._lease.last() if self._lease.last is not None else None
        if last is not None:
            last.total = last.total.copy()
        lease = Lease(self.total)
        self._lease.last = weakref.ref(lease)
        return self.over(lease, dtype)

    def lent(self, other: object) -> bool:
        """Return whether `other` shows all of this gradient's codes; if so, encode a bound that `clamp_min` has set for them."""
        if not isinstance(other, PackedGradient) or other._lease.total is not self._lease.total or other._views:
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


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """Return func(*args, **kwargs) for a torch operator among whose arguments are packed gradients."""
    handler = HANDLERS.get(func)
    result = NotImplemented if handler is None else handler(func, args, kwargs)
    return on_values(func, args, kwargs) if result is NotImplemented else result


def on_values(func: Any, args: Any, kwargs: Any) -> Any:
    """Return func(*args, **kwargs) computed on decoded gradients; a gradient that `func` writes to is encoded again."""
    if _returns_views(func) and isinstance(args[0], PackedGradient):
        return _view(func, args[0], args[1:], kwargs)
    plain: dict[int, Tensor] = {}

    def value(x: Any) -> Any:
        if not isinstance(x, PackedGradient):
            return x
        if id(x) not in plain:
            plain[id(x)] = x.decode()
        return plain[id(x)]

    result = func(*tree_map(value, args), **tree_map(value, kwargs))
    written = {id(plain[id(g)]): g for g in _written(func, args, kwargs)}
    for gradient in written.values():
        gradient.store(plain[id(gradient)])
    return tree_map(lambda x: written.get(id(x), x), result)


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[PackedGradient]:
    """Yield the packed gradients among the arguments that a torch operator writes to, according to its schema."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            yield from (g for g in (value if isinstance(value, list | tuple) else (value,)) if isinstance(g, PackedGradient))


@lru_cache(maxsize=1024)
def _returns_views(func: Any) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def _view(func: Any, gradient: PackedGradient, args: Any, kwargs: Any) -> Any:
    """Return what `func`, an operator such as aten.view, returns for a packed gradient: a view, or a list of views.

    Reading a view applies `func` to the decoded values; writing to it encodes the whole gradient.
    """
    like = torch.empty_strided(gradient.shape, gradient.stride(), dtype=gradient.dtype, device="meta")
    result = func(like, *args, **kwargs)
    shapes = [(None, result)] if isinstance(result, Tensor) else list(enumerate(result))
    views = [gradient.over(gradient._lease, gradient._dtype, (*gradient._views, (func, args, kwargs, i)), t) for i, t in shapes]
    return views[0] if isinstance(result, Tensor) else views


# --- single gradients -------------------------------------------------------------------------------------------------


def is_whole(x: Any) -> bool:
    """Return whether `x` is a packed gradient rather than a view of one."""
    return isinstance(x, PackedGradient) and x.is_whole


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _number(x: Any, dims: int) -> Any:
    """Return `x` if it is a number, or as a 0-d tensor if it has one value and at most `dims` dimensions; otherwise None."""
    if isinstance(x, Tensor):
        return x.reshape(()) if x.numel() == 1 and x.dim() <= dims and not isinstance(x, PackedGradient) else None
    return x


def _add(func: Any, args: Any, kwargs: Any) -> Any:
    gradient, other = args[0], args[1]
    if not is_whole(gradient) or not isinstance(other, Tensor) or (other.layout is torch.strided and other.shape != gradient.shape):
        return NotImplemented
    alpha = kwargs.get("alpha", 1) * (1 if func is aten.add_.Tensor else -1)
    values = other.decode() if isinstance(other, PackedGradient) else other
    # autograd adds the gradient of a microbatch; user code adds final values
    weight = gradient.total.weight if _in_backward() else 1.0
    gradient.total.fold(values, weight=weight * alpha, is_first=False)
    return gradient


def _add_in_graph(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the sum of two gradients, as an ordinary tensor, which autograd computes under create_graph=True.

    The packed one is divided by `weight`, the factor that it got when it was added: ordinary gradients get it later.
    """
    gradient, other = args[0], args[1]
    if not (is_whole(gradient) and _in_backward()) or gradient.total.weight == 1.0 or isinstance(other, PackedGradient):
        return NotImplemented
    return gradient.decode().div_(gradient.total.weight) + other


def _scale(func: Any, args: Any, kwargs: Any) -> Any:
    numbers = [_number(x, args[0].dim()) for x in args[1:]]  # none for negation
    if kwargs or not is_whole(args[0]) or any(number is None for number in numbers):
        return NotImplemented
    func(args[0].total.factor_to_change(), *numbers)
    return args[0]


def _zero(func: Any, args: Any, kwargs: Any) -> Any:
    if not is_whole(args[0]):
        return NotImplemented
    args[0].total.zero()
    return args[0]


def _copy(func: Any, args: Any, kwargs: Any) -> Any:
    gradient, source = args[0], args[1]
    if not is_whole(gradient) or source.shape != gradient.shape or source.device != gradient.device:
        return NotImplemented
    gradient.store(source.decode() if isinstance(source, PackedGradient) else source)
    return gradient


def _alias(func: Any, args: Any, kwargs: Any) -> Any:
    gradient: PackedGradient = args[0]
    return gradient.over(gradient._lease, gradient._dtype, gradient._views, None if gradient.is_whole else gradient)


def _norm(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the norm of a packed gradient, computed in float32 and converted to its dtype."""
    gradient, dtype = args[0], kwargs.get("dtype")
    if not isinstance(gradient, PackedGradient):
        return NotImplemented
    return func(gradient.decode(torch.float32), *args[1:], **{**kwargs, "dtype": None}).to(dtype or gradient.dtype)


def _record_stream(func: Any, args: Any, kwargs: Any) -> Any:
    for tensor in args[0].packed.parts.tensors():
        func(tensor, *args[1:])


# --- lists of gradients, packed or ordinary ---------------------------------------------------------------------------


def _split(tensors: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    """Return two lists of indices into `tensors`: of packed gradients that are no views, and of all other tensors."""
    packed = [i for i, t in enumerate(tensors) if is_whole(t)]
    return packed, [i for i, t in enumerate(tensors) if not is_whole(t)]


def _has_views(tensors: Sequence[Tensor]) -> bool:
    return any(isinstance(t, PackedGradient) and not t.is_whole for t in tensors)


def _scale_each(func: Any, args: Any, kwargs: Any) -> Any:
    tensors, by = args[0], args[1] if len(args) > 1 else None
    packed, others = _split(tensors)
    if _has_views(tensors) or (isinstance(by, Tensor) and (by.numel() != 1 or isinstance(by, PackedGradient))):
        return NotImplemented

    def on(targets: list[Tensor], places: list[int]) -> None:
        if targets:
            func(targets, *([] if by is None else [[by[i] for i in places] if isinstance(by, list | tuple) else by]))

    on([tensors[i].total.factor_to_change() for i in packed], packed)
    on([tensors[i] for i in others], others)
    return None


def _zero_each(func: Any, args: Any, kwargs: Any) -> Any:
    for tensor in args[0]:
        tensor.zero_()


def _clamp_each(func: Any, args: Any, kwargs: Any) -> Any:
    tensors, bound = args
    packed, others = _split(tensors)
    if _has_views(tensors):
        return NotImplemented
    if others:
        func([tensors[i] for i in others], bound)
    for total in (tensors[i].total for i in packed):
        total.clamp_min(bound) if func is aten._foreach_clamp_min_.Scalar else total.clamp_max(bound)
    return None


def _norm_each(func: Any, args: Any, kwargs: Any) -> Any:
    tensors, rest = args[0], args[1:]
    packed, others = _split(tensors)
    plain = [t.decode() if isinstance(t, PackedGradient) else t for t in (tensors[i] for i in others)]
    norm_of: dict[int, Any] = dict(zip(others, func(plain, *rest, **kwargs) if plain else (), strict=True))
    order = rest[0] if rest else 2
    batched = packed if order == 2 else []
    norm_of |= dict(zip(batched, norms([tensors[i].total for i in batched]), strict=True))
    for i in [i for i in packed if norm_of.get(i) is None]:  # one at a time, so that only one decoded gradient exists
        norm_of[i] = _norm(aten.linalg_vector_norm.default, (tensors[i], order), dict(kwargs))
    dtype = kwargs.get("dtype")
    return [norm_of[i].to(dtype or tensors[i].dtype) for i in range(len(tensors))]


def _unscale_each(func: Any, args: Any, kwargs: Any) -> Any:
    """Multiply gradients by the inverse scale of a GradScaler; set its tensor found_inf to 1 if any value is not finite."""
    tensors, found_inf, inverse_scale = args
    packed, others = _split(tensors)
    if _has_views(tensors):
        return NotImplemented
    totals = [tensors[i].total for i in packed]
    for total in totals:
        total.before_unscale()
    if others:
        func([tensors[i] for i in others], found_inf, inverse_scale)
    if totals:
        found_inf.copy_(torch.maximum(found_inf, any_nonfinite(totals)))
        torch._foreach_mul_([total.factor_to_change() for total in totals], inverse_scale)
    return None


Handler = Callable[[Any, Any, Any], Any]
HANDLERS: dict[Any, Handler] = {
    aten.add_.Tensor: _add,
    aten.sub_.Tensor: _add,
    aten.add.Tensor: _add_in_graph,
    aten.mul_.Tensor: _scale,
    aten.mul_.Scalar: _scale,
    aten.div_.Tensor: _scale,
    aten.div_.Scalar: _scale,
    aten.neg_.default: _scale,
    aten.zero_.default: _zero,
    aten.copy_.default: _copy,
    aten.detach.default: _alias,
    aten.linalg_vector_norm.default: _norm,
    aten.record_stream.default: _record_stream,
    aten._foreach_mul_.Scalar: _scale_each,
    aten._foreach_mul_.ScalarList: _scale_each,
    aten._foreach_mul_.Tensor: _scale_each,
    aten._foreach_div_.Scalar: _scale_each,
    aten._foreach_div_.ScalarList: _scale_each,
    aten._foreach_div_.Tensor: _scale_each,
    aten._foreach_neg_.default: _scale_each,
    aten._foreach_zero_.default: _zero_each,
    aten._foreach_clamp_min_.Scalar: _clamp_each,
    aten._foreach_clamp_max_.Scalar: _clamp_each,
    aten._foreach_norm.Scalar: _norm_each,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale_each,
}
