"""Decodes frozen packed weights of many experts, (experts, ., .), one group of experts at a time.

    W             a packed parameter; torch.baddbmm(W, B, A, alpha=s) is W + s B A, the weight that PEFT's adapters of experts compute
    views         W.mT, W.transpose(1, 2), W[i]: nothing is decoded
    products      grouped_mm(x, W, offs), x @ W or bmm(x, W) of 3-D tensors, and x @ W[i] or F.linear(x, W[i])
    for experts [a, b) of a group:    w = decode(W[a:b]) + s B[a:b] A[a:b];    y[rows of a:b] = x[rows of a:b] w
    in backward, decoded again:       grad_x = grad_y w^T,    grad_w = x^T grad_y,    grad_B = s grad_w A^T,    grad_A = s B^T grad_w

A group has at most GROUP_BYTES, or one expert. Each expert is multiplied as with the whole weight. Grouped products read the ends of all
experts' rows on the host, once for each tensor of offsets: so a layer waits for its device once, and groups slice the rows that are theirs.

Any other function gets the whole weight (`ExpertSource.whole`), and adapters their sum with it.
"""

# pyright: reportPrivateUsage=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map

from paredown.errors import ApplyError
from paredown.optim.packed_parameter import PackedParameter
from paredown.optim.packed_weight import KEY, KINDS, SIZES, VALUES, Weight, weight_of

GROUP_BYTES = 64 << 20  # 10 experts of Qwen3-30B-A3B in bfloat16, and 13 groups: more launches take host time, fewer take memory
NDIM = 3
ENDS = "_paredown_ends"  # attribute of offsets: (their version, their values)
OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
IN_PLACE = tuple(f"__i{name}__" for name in OPERATORS)
REFUSED = ("register_hook", "retain_grad")  # of a weight that exists only inside of products
NOT_A_TENSOR = (
    "{} was called on a view of packed experts, or on their sum with adapters, whose values exist only inside of products: it would have "
    "no effect. Write to the parameter itself (weight[1] = values) or inside session.unpacked(); hooks belong on the adapters."
)
CHANGED_FACTORS = (
    "an adapter of packed experts was written to after it was added to their weight: the sum is computed where it is multiplied, and would "
    "have the new values. Add the adapter (torch.baddbmm) again after the update."
)
NODES = {"grouped_mm": "GroupedMm", "bmm": "Bmm", "mm": "Mm"}  # rows of the table of operations (autograd/operations.py)


class ExpertSource(Protocol):
    """A weight of (experts, ., .) that is decoded a few experts at a time."""

    size: torch.Size
    dtype: torch.dtype
    device_type: str
    version: int

    def decode_rows(self, first: int, last: int) -> Tensor:
        """Return the decoded values of the experts `first` to `last` - 1."""
        ...

    def check_version(self, version: int) -> None:
        """Raise autograd's error for modified saved tensors if the values were changed after they had this version number."""
        ...

    def ends(self, offsets: Tensor, num_rows: int) -> list[int]:
        """Return the values of `offsets`: the ends of the experts' rows, among `num_rows`."""
        ...

    def whole(self, function: str) -> Tensor:
        """Return all decoded values, since a function of this name needs them."""
        ...


def is_decoded_by_groups(module: nn.Module, parameter: Tensor) -> bool:
    """Return whether a frozen parameter of a module is decoded by groups: it has experts of more than GROUP_BYTES together.

    Convolutions of torch have parameters of three dimensions too.
    """
    with torch._C.DisableTorchFunctionSubclass():
        is_large = parameter.numel() * parameter.itemsize > GROUP_BYTES and parameter.shape[0] > 1
        is_plain = parameter.ndim == NDIM and parameter.is_contiguous() and not parameter.requires_grad
    return is_plain and is_large and not type(module).__module__.startswith("torch.nn.modules.")


def groups(first: int, last: int, expert_bytes: int) -> list[tuple[int, int]]:
    """Return the groups of the experts `first` to `last` - 1, of nearly equal sizes.

    >>> groups(0, 8, 24 << 20), groups(3, 4, 1 << 30)
    ([(0, 2), (2, 4), (4, 6), (6, 8)], [(3, 4)])
    """
    most = max(1, GROUP_BYTES // expert_bytes)
    size = -(-(last - first) // -(-(last - first) // most))
    return [(start, min(start + size, last)) for start in range(first, last, size)]


@dataclass(frozen=True)
class ExpertRange:
    """The values of the experts `first` to `last` - 1, without those of adapters, which are scaled by `alpha`.

    `is_transposed`: the last two dimensions are swapped. `is_single`: they are those of one expert, (., .).
    """

    source: ExpertSource
    first: int
    last: int
    alpha: float = 1.0
    is_transposed: bool = False
    is_single: bool = False

    @property
    def size(self) -> tuple[int, ...]:
        """The size of the values as a tensor."""
        rows, cols = self.source.size[1:]
        matrix = (cols, rows) if self.is_transposed else (rows, cols)
        return matrix if self.is_single else (self.last - self.first, *matrix)

    def groups(self) -> list[tuple[int, int]]:
        """Return the groups of experts, counted from `first`."""
        expert_bytes = self.source.size[1:].numel() * self.source.dtype.itemsize
        return groups(0, self.last - self.first, expert_bytes)

    def of_group(self, a: int, b: int, factors: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """Return the values of one group of experts with the product of the adapters' `factors`, in `dtype`."""
        values = self.source.decode_rows(self.first + a, self.first + b)
        if factors:
            values = values.baddbmm_(*(factor[a:b] for factor in factors), alpha=self.alpha)
        values = values.to(dtype)
        values = values.mT if self.is_transposed else values
        return values[0] if self.is_single else values


class DecodedByGroups:
    """What a session gives to weights that are decoded by groups: functions on them are computed here where BY_GROUPS has them."""

    def __init__(self, on_whole: weakref.WeakMethod[Callable[[Weight, str], None]]) -> None:
        """`on_whole` is called with a weight and the name of a function that needs all of it."""
        self._on_whole = on_whole

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return func(*args, **kwargs), or NotImplemented if it needs all experts."""
        if function_name(func) not in BY_GROUPS:
            return NotImplemented
        return call_by_groups(func, tuple(_experts_of(arg) for arg in args), kwargs)

    def show_whole(self, weight: Weight, function: str) -> None:
        """Give the parameter decoded memory if its module runs, since a function of this name needs all experts."""
        on_whole = self._on_whole()
        if on_whole is not None:
            on_whole(weight, function)


def _experts_of(argument: Any) -> Any:
    """Return the experts of a packed parameter that is decoded by groups; any other argument is returned itself."""
    weight = weight_of(argument) if type(argument) is PackedParameter else None
    if weight is None or weight.by_groups is None or weight.parameter is not argument:
        return argument
    with torch._C.DisableTorchFunctionSubclass():
        is_frozen = not argument.requires_grad
    return expert_weights(weight, weight.packed.device) if is_frozen else argument


class ExpertWeights(Tensor):
    """A weight of experts, or one of them, whose values are computed where a product needs them."""

    experts: ExpertRange
    factors: tuple[Tensor, ...]  # of adapters, (B, A) or none
    versions: tuple[int, ...]  # of the factors, when they were added

    @staticmethod
    def __new__(cls: type[ExpertWeights], experts: ExpertRange, factors: tuple[Tensor, ...], device: torch.device) -> ExpertWeights:
        """Return the weight that `experts`, and the `factors` of adapters, describe."""
        made: ExpertWeights = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, experts.size, dtype=experts.source.dtype, device=device
        )
        made.experts, made.factors, made.versions = experts, factors, tuple(map(version_of, factors))
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = call_by_groups(func, args, kwargs)
        if result is not NotImplemented:
            return result
        name = function_name(func)
        if (name in REFUSED or is_in_place(name)) and args and isinstance(args[0], ExpertWeights):
            raise ApplyError(NOT_A_TENSOR.format(name))
        is_attribute = getattr(func, "__name__", "") == "__get__" and name not in VALUES
        if is_attribute or name in (*SIZES, *KINDS):
            with torch._C.DisableTorchFunction():  # of modes too: a trace's would call this again
                return func(*args, **kwargs)
        args, kwargs = tree_map(lambda leaf: leaf.whole(name) if isinstance(leaf, ExpertWeights) else leaf, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        args, kwargs = tree_map(lambda leaf: leaf.whole(name) if isinstance(leaf, ExpertWeights) else leaf, (args, kwargs or {}))
        return func(*args, **kwargs)

    def whole(self, function: str) -> Tensor:
        """Return the values of all experts, which a function of this name needs."""
        self.check_factors()
        experts = self.experts
        whole = experts.source.whole(function)[experts.first : experts.last]
        if self.factors:
            with torch.autocast(experts.source.device_type, enabled=False):
                whole = torch.baddbmm(whole, *self.factors, alpha=experts.alpha)
        whole = whole.mT if experts.is_transposed else whole
        return whole[0] if experts.is_single else whole

    def replaced(self, factors: tuple[Tensor, ...], **changes: Any) -> ExpertWeights:
        """Return these weights with other factors of adapters, and other fields of `ExpertRange`."""
        experts = replace(self.experts, **changes)
        if not factors:
            return ExpertWeights(experts, (), self.device)
        made: Any = AdaptedWeights.apply(experts, self.device, *factors)
        made.versions = self.versions or made.versions
        return made

    def check_factors(self) -> None:
        """Raise ApplyError if an adapter was written to after it was added: its sum with the weight is computed only now."""
        if tuple(map(version_of, self.factors)) != self.versions:
            raise ApplyError(CHANGED_FACTORS)


class AdaptedWeights(torch.autograd.Function):
    """The autograd function behind `ExpertWeights` with adapters, for gradients of functions that take these for a tensor as any other.

    Such are functions of other autograd functions, which torch calls without asking the class of their arguments.
    """

    @staticmethod
    def forward(ctx: Any, experts: ExpertRange, device: torch.device, left: Tensor, right: Tensor) -> ExpertWeights:
        """Return the weights with adapters of these factors."""
        ctx.save_for_backward(left, right)
        ctx.experts = experts
        return ExpertWeights(experts, (left, right), device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the gradients of the factors, given that of their sum with the weight."""
        experts: ExpertRange = ctx.experts
        left, right = ctx.saved_tensors
        grad = grad.unsqueeze(0) if experts.is_single else grad
        return None, None, *_of_factors(grad.mT if experts.is_transposed else grad, left, right, experts.alpha)


def _of_factors(grad: Tensor, left: Tensor, right: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """Return the gradients of the factors of adapters, given that of the weights, as torch.baddbmm computes them."""
    grads = grad.bmm(right.mT), left.mT.bmm(grad)
    return grads if alpha == 1 else (grads[0] * alpha, grads[1] * alpha)


def expert_weights(source: ExpertSource, device: torch.device) -> ExpertWeights:
    """Return all experts of `source`."""
    return ExpertWeights(ExpertRange(source, 0, source.size[0]), (), device)


# --- functions of torch: they get their arguments with `ExpertWeights` among them, and return NotImplemented for what they do not cover ---


def call_by_groups(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of a function of torch that has `ExpertWeights` among its arguments; NotImplemented if it needs all of them."""
    name = function_name(func)
    form = BY_GROUPS.get(name)
    if form is None or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return NotImplemented
    if not args or not isinstance(args[name in PRODUCTS] if len(args) > 1 else args[0], ExpertWeights):
        return NotImplemented
    try:
        _signature(form).bind(*args, **kwargs)
    except TypeError:  # other arguments than those that the form takes
        return NotImplemented
    return form(*args, **kwargs)


_signature = cache(inspect.signature)


def version_of(tensor: Tensor) -> int:
    """Return the version counter of a tensor, which writes increase; 0 for inference tensors, which have none."""
    return 0 if tensor.is_inference() else tensor._version


def is_in_place(name: str) -> bool:
    """Return whether a function of torch with this name writes to its first argument."""
    is_method = name.endswith("_") and not name.endswith("__")
    return is_method or name == "__setitem__" or name in IN_PLACE


def function_name(func: Any) -> str:
    """Return the name of a function of torch, or of the attribute that it reads."""
    name = getattr(func, "__name__", "")
    if name != "__get__":
        return name
    return getattr(func.__self__, "__name__", None) or func.__self__.fget.__name__


def _transpose(weights: ExpertWeights, first: int = -1, second: int = -2) -> Any:
    ndim = weights.ndim
    if not {first, second} <= set(range(-ndim, ndim)) or {first % ndim, second % ndim} != {ndim - 2, ndim - 1}:
        return NotImplemented
    return weights.replaced(weights.factors, is_transposed=not weights.experts.is_transposed)


def _transpose_matrix(weights: ExpertWeights) -> Any:
    return _transpose(weights) if weights.experts.is_single else NotImplemented


def _select(weights: ExpertWeights, index: Any) -> Any:
    is_number = isinstance(index, int) and not isinstance(index, bool)
    is_tensor = isinstance(index, Tensor) and index.ndim == 0 and index.dtype in (torch.int64, torch.int32)
    if weights.experts.is_single or not (is_number or is_tensor):
        return NotImplemented
    number = int(index)
    if not -len(weights) <= number < len(weights):
        return NotImplemented  # torch raises the error
    number %= len(weights)
    first = weights.experts.first + number
    return weights.replaced(tuple(f[number : number + 1] for f in weights.factors), first=first, last=first + 1, is_single=True)


def _add_product(weights: Any, left: Any, right: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    experts, dtypes = weights.experts, {weights.dtype, left.dtype, right.dtype}
    is_autocast = torch.is_autocast_enabled(experts.source.device_type)
    if is_autocast and torch.get_autocast_dtype(experts.source.device_type) is not weights.dtype:
        return NotImplemented  # the sum has another dtype
    size = left.ndim == right.ndim == NDIM and (*left.shape[:2], right.shape[2])
    if weights.factors or experts.is_transposed or size != tuple(weights.shape) or beta != 1 or len(dtypes) > 1:
        return NotImplemented
    factors = (left, right) if torch.is_grad_enabled() else (left.detach(), right.detach())  # products may run with gradients
    return weights.replaced(factors, alpha=alpha)


def _product(x: Any, weights: Any) -> Any:
    if not _is_plain(x):
        return NotImplemented
    if not weights.experts.is_single:
        is_batch = x.ndim == NDIM and x.shape[::2] == weights.shape[:2]
        return _multiply(x, weights, "bmm") if is_batch else NotImplemented
    if x.ndim == 1:
        return NotImplemented
    return _multiply(x.reshape(-1, x.shape[-1]), weights, "mm").view(*x.shape[:-1], weights.shape[1])


def _linear(x: Any, weights: Any, bias: Any = None) -> Any:
    is_covered = weights.experts.is_single and bias is None
    return _product(x, _transpose(weights)) if is_covered else NotImplemented


def _grouped_product(x: Any, weights: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    if not (_is_plain(x) and _is_plain(offs)) or bias is not None:
        return NotImplemented
    dtypes = {x.dtype, weights.dtype, out_dtype or x.dtype}
    if (x.ndim, weights.ndim) != (NDIM - 1, NDIM) or len(dtypes) > 1:
        return NotImplemented
    known, ends = getattr(offs, ENDS, (-1, None))
    if ends is None or offs.is_inference() or known != offs._version:
        ends = weights.experts.source.ends(offs, len(x))
        setattr(offs, ENDS, (version_of(offs), ends))
    return _multiply(x, weights, "grouped_mm", offs, ends)


def _is_plain(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and not isinstance(tensor, ExpertWeights) and KEY not in vars(tensor)


def _multiply(x: Tensor, weights: ExpertWeights, kind: str, offsets: Tensor | None = None, ends: list[int] | None = None) -> Any:
    """Return the product of `x` with the weights, after the casts of autocast, which covers all kinds but grouped products."""
    weights.check_factors()
    dtype, device_type = weights.dtype, weights.experts.source.device_type
    if kind != "grouped_mm" and torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        x = x.to(dtype)
    product = Product(kind, weights.experts, dtype, tuple(ends or ()))
    return GroupedProduct.apply(product, x, offsets, *weights.factors)


PRODUCTS: dict[str, Callable[..., Any]] = {  # their second argument is the weight
    **dict.fromkeys(("bmm", "matmul", "__matmul__"), _product),
    "linear": _linear,
    **dict.fromkeys(("grouped_mm", "_grouped_mm"), _grouped_product),
}
BY_GROUPS: dict[str, Callable[..., Any]] = {
    **PRODUCTS,
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), lambda w, first, second: _transpose(w, first, second)),
    "mT": _transpose,
    **dict.fromkeys(("t", "T"), _transpose_matrix),
    "__getitem__": _select,
    "select": lambda weights, dim, index: _select(weights, index) if dim == 0 else NotImplemented,
    "baddbmm": _add_product,
}


# --- products ------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Product:
    """A product of rows with the weights of experts: "grouped_mm" (`ends` of each expert's rows), "bmm", or "mm" for one expert."""

    kind: str
    experts: ExpertRange
    dtype: torch.dtype
    ends: tuple[int, ...]

    def groups(self) -> Iterator[tuple[int, int, slice]]:
        """Yield the experts of each group as (first, last + 1), and their part of the rows; groups without rows are left out."""
        for a, b in self.experts.groups():
            rows = slice(a, b) if self.kind == "bmm" else slice(None)
            if self.kind == "grouped_mm":
                rows = slice(self.ends[a - 1] if a else 0, self.ends[b - 1])
                if rows.start == rows.stop:
                    continue
            yield a, b, rows

    def multiply(self, x: Tensor, other: Tensor, offsets: Tensor | None) -> Tensor:
        """Return the product of the rows of a group with its weights, or of two tensors of rows; `offsets`: of its experts' rows."""
        if self.kind == "grouped_mm":
            return torch.nn.functional.grouped_mm(x, other, offs=offsets)
        return x @ other

    def gradient(self, x: Tensor, grad: Tensor, offsets: Tensor | None) -> Tensor:
        """Return the gradient of the stored weights of a group as (experts, ., .), computed in their memory order as torch does."""
        if self.experts.is_transposed and self.kind != "bmm":
            made = self.multiply(grad.mT, x, offsets)
        else:
            made = self.multiply(x.mT, grad, offsets)
            made = made.mT if self.experts.is_transposed else made
        return made.unsqueeze(0) if self.experts.is_single else made


class GroupedProduct(torch.autograd.Function):
    """The autograd function for products with the weights of experts; it saves rows only for adapters."""

    @staticmethod
    def forward(ctx: Any, product: Product, x: Tensor, offsets: Tensor | None, *factors: Tensor) -> Tensor:
        """Return the product of the rows `x` with the weights; `offsets`: the ends of the experts' rows, as `product.ends`."""
        kept = {"offs": offsets, **(dict(zip(("self", "left", "right"), (x, *factors), strict=True)) if factors else {})}
        kept = {name: tensor for name, tensor in kept.items() if tensor is not None}
        ctx.save_for_backward(*kept.values())
        ctx.stands_for = NODES[product.kind], tuple(kept)
        ctx.product, ctx.version, ctx.names = product, product.experts.source.version, tuple(kept)
        ctx.size, ctx.rows_dtype = x.size(), x.dtype
        out = None
        for a, b, rows in product.groups():
            values = product.experts.of_group(a, b, factors, product.dtype)
            made = product.multiply(x[rows], values, _offsets(product, offsets, a, b))
            if len(made) == len(x):
                return made
            out = made.new_empty((*x.shape[:-1], made.shape[-1])) if out is None else out
            out[rows] = made
            del values, made
        return x.new_empty((*x.shape[:-1], product.experts.size[-1])) if out is None else out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the gradients of the rows and of the adapters' factors."""
        product: Product = ctx.product
        product.experts.source.check_version(ctx.version)
        kept = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        offsets, factors = kept.get("offs"), tuple(kept[name] for name in ("left", "right") if name in kept)
        of_x = torch.empty(ctx.size, dtype=ctx.rows_dtype, device=grad.device) if ctx.needs_input_grad[1] else None
        of_factors = [torch.zeros_like(factor) for factor in factors]
        for a, b, rows in product.groups():
            ends = _offsets(product, offsets, a, b)
            if of_x is not None:
                of_x[rows] = product.multiply(grad[rows], product.experts.of_group(a, b, factors, product.dtype).mT, ends)
            if factors:
                left, right = (factor[a:b] for factor in factors)
                of_weight = product.gradient(kept["self"][rows], grad[rows], ends).to(left.dtype)
                of_factors[0][a:b], of_factors[1][a:b] = _of_factors(of_weight, left, right, product.experts.alpha)
        return None, of_x, None, *of_factors


def _offsets(product: Product, offsets: Tensor | None, a: int, b: int) -> Tensor | None:
    """Return the ends of the rows of a group's experts, counted from its first row."""
    return None if offsets is None else offsets[a:b] - (product.ends[a - 1] if a else 0)
