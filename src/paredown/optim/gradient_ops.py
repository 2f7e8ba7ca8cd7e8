"""torch functions on packed gradients: `HANDLERS` has one function for each; all others run on decoded values.

    add_, sub_                        fold
    mul_, div_, neg_, and in lists    change the factor, one number on the device; so do clip_grad_norm_ and GradScaler
    zero_, detach, copy_, norms       use the codes, or decode one gradient at a time
    anything else                     decoded; arguments that the schema marks for writing are encoded, rounded stochastically

A handler returns NotImplemented for arguments that it does not cover, such as views and factors of more than one number. Lists may hold
packed and plain gradients; each kind is processed separately.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from paredown.optim.packed_gradient import GradientTensor, any_nonfinite, norms

aten = torch.ops.aten


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """Return func(*args, **kwargs) for a torch operator that has packed gradients among its arguments."""
    handler = HANDLERS.get(func)
    result = NotImplemented if handler is None else handler(func, args, kwargs)
    return on_values(func, args, kwargs) if result is NotImplemented else result


def on_values(func: Any, args: Any, kwargs: Any) -> Any:
    """Return func(*args, **kwargs) computed on decoded gradients; gradients that it writes to are encoded again."""
    if _returns_views(func) and isinstance(args[0], GradientTensor):
        return _view(func, args[0], args[1:], kwargs)
    plain: dict[int, Tensor] = {}

    def value(x: Any) -> Any:
        if not isinstance(x, GradientTensor):
            return x
        if id(x) not in plain:
            plain[id(x)] = x.decode()
        return plain[id(x)]

    result = func(*tree_map(value, args), **tree_map(value, kwargs))
    written = {id(plain[id(g)]): g for g in _written(func, args, kwargs)}
    for gradient in written.values():
        gradient.store(plain[id(gradient)])
    return tree_map(lambda x: written.get(id(x), x), result)


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[GradientTensor]:
    """Yield the packed gradients among the arguments that a torch operator writes to, according to its schema."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            yield from (g for g in (value if isinstance(value, list | tuple) else (value,)) if isinstance(g, GradientTensor))


@lru_cache(maxsize=1024)
def _returns_views(func: Any) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def _view(func: Any, gradient: GradientTensor, args: Any, kwargs: Any) -> Any:
    """Return what `func`, an operator such as aten.view, makes of a packed gradient: a view, or a list of views.

    Reading a view applies `func` to the decoded values; writing to it encodes the whole gradient.
    """
    like = torch.empty_strided(gradient.shape, gradient.stride(), dtype=gradient.dtype, device="meta")
    result = func(like, *args, **kwargs)
    shapes = [(None, result)] if isinstance(result, Tensor) else list(enumerate(result))
    views = [gradient.with_view((func, args, kwargs, i), t) for i, t in shapes]
    return views[0] if isinstance(result, Tensor) else views


# --- single gradients -------------------------------------------------------------------------------------------------


def is_whole(x: Any) -> bool:
    """Return whether `x` is a packed gradient rather than a view of one."""
    return isinstance(x, GradientTensor) and x.is_whole


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _number(x: Any, dims: int) -> Any:
    """Return a number `x` itself, a one-valued tensor as a 0-d one; None for more values, more than `dims` dimensions or packed ones."""
    if isinstance(x, Tensor):
        return x.reshape(()) if x.numel() == 1 and x.dim() <= dims and not isinstance(x, GradientTensor) else None
    return x


def _add(func: Any, args: Any, kwargs: Any) -> Any:
    gradient, other = args[0], args[1]
    if not is_whole(gradient) or not isinstance(other, Tensor) or (other.layout is torch.strided and other.shape != gradient.shape):
        return NotImplemented
    alpha = kwargs.get("alpha", 1) * (1 if func is aten.add_.Tensor else -1)
    values = other.decode() if isinstance(other, GradientTensor) else other
    weight = (
        gradient.total.weight if _in_backward() else 1.0
    )  # autograd adds the gradient of a microbatch; user code adds final values
    gradient.total.fold(values, weight=weight * alpha, is_first=False)
    return gradient


def _add_in_graph(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the sum of two gradients that autograd computes under create_graph=True, as a plain tensor.

    Like all plain gradients, this sum is not multiplied by `weight` yet.
    """
    gradient, other = args[0], args[1]
    if not (is_whole(gradient) and _in_backward()) or gradient.total.weight == 1.0 or isinstance(other, GradientTensor):
        return NotImplemented
    return gradient.decode().div_(gradient.total.weight) + other


def _scale(func: Any, args: Any, kwargs: Any) -> Any:
    number = _number(args[1], args[0].dim()) if is_whole(args[0]) else None
    if number is None or kwargs:
        return NotImplemented
    func(args[0].total.factor_to_change(), number)
    return args[0]


def _negate(func: Any, args: Any, kwargs: Any) -> Any:
    if not is_whole(args[0]):
        return NotImplemented
    func(args[0].total.factor_to_change())
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
    gradient.store(source.decode() if isinstance(source, GradientTensor) else source)
    return gradient


def _alias(func: Any, args: Any, kwargs: Any) -> Any:
    return args[0].alias()


def _norm(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the norm of a packed gradient, computed in float32 and converted to its dtype."""
    gradient, dtype = args[0], kwargs.get("dtype")
    if not isinstance(gradient, GradientTensor):
        return NotImplemented
    return func(gradient.decode(torch.float32), *args[1:], **{**kwargs, "dtype": None}).to(dtype or gradient.dtype)


def _record_stream(func: Any, args: Any, kwargs: Any) -> Any:
    for tensor in args[0].packed.parts.tensors():
        func(tensor, *args[1:])


# --- lists of gradients, packed and plain -----------------------------------------------------------------------------


def _split(tensors: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    """Return the indices of packed gradients among `tensors`, and those of all others."""
    packed = [i for i, t in enumerate(tensors) if is_whole(t)]
    return packed, [i for i, t in enumerate(tensors) if not is_whole(t)]


def _has_views(tensors: Sequence[Tensor]) -> bool:
    return any(isinstance(t, GradientTensor) and not t.is_whole for t in tensors)


def _scale_each(func: Any, args: Any, kwargs: Any) -> Any:
    tensors, by = args[0], args[1] if len(args) > 1 else None
    packed, others = _split(tensors)
    if _has_views(tensors) or (isinstance(by, Tensor) and (by.numel() != 1 or isinstance(by, GradientTensor))):
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
    plain = [t.decode() if isinstance(t, GradientTensor) else t for t in (tensors[i] for i in others)]
    norm_of: dict[int, Any] = dict(zip(others, func(plain, *rest, **kwargs) if plain else (), strict=True))
    order = rest[0] if rest else 2
    batched = packed if order == 2 else []
    norm_of |= dict(zip(batched, norms([tensors[i].total for i in batched]), strict=True))
    for i in [i for i in packed if norm_of.get(i) is None]:  # one at a time, so that only one decoded gradient exists
        norm_of[i] = _norm(aten.linalg_vector_norm.default, (tensors[i], order), dict(kwargs))
    dtype = kwargs.get("dtype")
    return [norm_of[i].to(dtype or tensors[i].dtype) for i in range(len(tensors))]


def _unscale_each(func: Any, args: Any, kwargs: Any) -> Any:
    """Multiply a list of gradients by GradScaler's inverse scale, and set its tensor found_inf to 1 if a value is not finite."""
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
    aten.neg_.default: _negate,
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
