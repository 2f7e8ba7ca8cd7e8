"""`DeferredLogits` are computed only if something reads them; cross entropy computes them chunk by chunk.

In training, the output head of a language model (loss/output_head.py) returns `DeferredLogits`, which hold the hidden states:

    .float(), .to(dtype), .half() ...                  recorded
    .view(), .reshape(), .flatten(), .contiguous()     recorded, if the last dimension stays
    logits[..., :-1, :]                                recorded, if the last dimension stays
    .transpose(1, 2), .permute(0, 2, 1) ...            recorded, if the last dimension becomes dimension 1
    c * logits, logits / c, .tanh()                    recorded, for Python numbers c: soft-capping
    shape, dtype, device, grad_fn ...                  known without values
    F.cross_entropy, nn.CrossEntropyLoss               computed in chunks, for targets that are class indices
    logits + c * other logits                          recorded, for those of an adapter such as LoRA's
    anything else                                      computed from all logits; `HeadUse` records the name of the function

All logits are computed at most once, under the autocast settings of the head's call, and gradients flow through them. A function that
writes into them, registers a hook on them, or returns something that shares their memory (`.data`, `.detach()`, a view) makes them
ordinary logits for all later functions.

The operands of the head are kept as they were at its call (loss/held_linear.py). Errors: logits that are first read after an operand has
changed, which cannot be computed any more; and requests of the logits' gradient after a loss in chunks, which has none.
"""

# pyright: reportPrivateUsage=false, reportIncompatibleMethodOverride=false, reportAttributeAccessIssue=false

from __future__ import annotations

import inspect
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map

from paredown.autograd.graph import has_storage
from paredown.loss.chunked_cross_entropy import CASTS, SCALES, ChunkSettings, CrossEntropy, chunked_cross_entropy, product_dtype
from paredown.loss.held_linear import HeldLinear
from paredown.loss.recorded_calls import (
    ELEMENTWISE,
    SWAPS,
    VIEWS,
    Layout,
    RecordedCall,
    is_elementwise,
    keeps_last,
    transform_of,
    without_device,
)
from paredown.optim.packed_parameter import KINDS, OTHERS, SIZES, WRITES

ABOUT = frozenset((*SIZES, *KINDS, *OTHERS, "__hash__", "requires_grad_"))  # functions that need no values
NEED_VALUES = frozenset(("T", "H", "mT", "mH", "real", "imag", "data", "grad"))  # attributes that need values
SUMS = frozenset(("add", "__add__", "__radd__"))
HOOKS = frozenset(("register_hook", "retain_grad", "register_post_accumulate_grad_hook"))
NUMBERS = (float, bool, str, type(None))  # results that share no memory
NO_GRADIENT = (
    "{name} of the logits of {path}: their loss was computed in chunks, and their gradient is not computed. Call {remedy} before the loss, "
    "or paredown.apply(plan, model, chunked_loss=False)."
)


@dataclass(eq=False)
class HeadUse:
    """Counts of what happened to the logits of the output head at `path`; deferred ones are computed later, or never.

    `num_deferred`: times that they were deferred. `num_losses`: losses in chunks (those inside of compiled graphs count once).
    `num_graphs`: compiled graphs that have the head. `requests`: the functions that needed all logits.
    """

    path: str
    device: str | None = None  # type of the device that a trace is for, which fake tensors do not have
    around: Callable[[], AbstractContextManager[Any]] = nullcontext  # of losses in chunks: in it traces record memory
    num_deferred: int = 0
    num_losses: int = 0
    num_graphs: int = 0
    requests: Counter[str] = field(default_factory=Counter[str])
    reasons: Counter[str] = field(default_factory=Counter[str])  # sentences: why calls of the head were not deferred


class LogitsFamily:
    """What deferred logits (not computed yet) from one call of the output head share: that call, and its logits once computed."""

    def __init__(self, use: HeadUse, linear: HeldLinear, dtype: torch.dtype | None = None) -> None:
        self.use, self.linear = use, linear
        self.device = use.device or linear.hidden.device.type
        self.dtype = dtype or product_dtype(linear.hidden, self.device)
        mixed = any(operand is not dtype for operand in linear.dtypes)
        self.is_autocast = torch.is_autocast_enabled(self.device) if dtype is None else mixed
        self.is_real = False  # whether all functions use real logits from now on
        self.has_loss = False  # whether a loss in chunks was computed
        self.members: list[weakref.ref[DeferredLogits]] = []
        self._logits: Tensor | None = None

    def logits(self) -> Tensor:
        """Return all logits of this call of the output head, computed at the first request."""
        if self._logits is None:
            linear = self.checked()
            with torch.inference_mode(False), torch.enable_grad(), self.autocast():
                self._logits = linear.forward()
        return self._logits

    def checked(self) -> HeldLinear:
        """Return the call of the output head; raise RuntimeError if its hidden states or parameters were modified since."""
        self.linear.check(self.use.path)
        return self.linear

    def autocast(self) -> Any:
        """Return a context with the autocast settings under which the output head was called."""
        return torch.autocast(self.device, dtype=self.dtype if self.is_autocast else None, enabled=self.is_autocast)

    def make_real(self) -> None:
        """Compute all logits of this call, and use real logits from now on, since something will write to them."""
        self.is_real = True
        for ref in self.members:
            member = ref()
            if member is not None:
                member.logits()


class DeferredLogits(Tensor):
    """Logits that are not computed yet: a tensor subclass that holds hidden states and the functions to apply after the head."""

    is_deferred = True
    family: LogitsFamily
    rows: Tensor  # hidden states, of the shape of the logits but for the last dimension
    calls: tuple[RecordedCall, ...]  # elementwise calls so far, in order
    form: Layout
    parent: DeferredLogits | None  # the logits from which `call` made these
    call: RecordedCall | None
    adapter: tuple[Tensor, DeferredLogits] | None  # an adapter's scaled hidden states, and its logits, which are added
    is_class_first: bool  # whether the classes are dimension 1, as cross entropy takes more than two dimensions
    _logits: Tensor | None

    @staticmethod
    def __new__(cls: type[DeferredLogits], family: LogitsFamily, rows: Tensor, layout: Layout) -> DeferredLogits:
        """Return deferred logits with the size, strides and dtype of `layout`, which take no memory; `rows`: hidden states."""
        made: DeferredLogits = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, layout.size, strides=layout.stride, dtype=layout.dtype, device=rows.device
        )
        made.family, made.rows, made.form = family, rows, layout
        made.calls, made.parent, made.call, made._logits = (), None, None, None
        made.is_class_first, made.adapter = False, None
        family.members.append(weakref.ref(made))
        return made

    def logits(self) -> Tensor:
        """Return these logits as an ordinary tensor, computed at the first request."""
        if self._logits is None:
            if self.parent is None or self.call is None:
                self._logits = self.family.logits()
            else:
                with torch.inference_mode(False), torch.enable_grad():
                    self._logits = self.call(self.parent.logits())
        return self._logits

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call_eagerly()(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator that C++ code calls with deferred logits, after computing them."""
        given = args, kwargs or {}
        if func._schema.is_mutable:
            make_real(given)
        args, kwargs = tree_map(_detached, given)
        return without_aliases(func(*args, **kwargs), given)


def call_deferred(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return func(*args, **kwargs) for a torch function with deferred logits as arguments; the result may be deferred, too."""
    name = name_of(func)
    first: Any = args[0] if args else None
    is_attribute = getattr(func, "__name__", "") == "__get__"
    if name in ABOUT or (is_attribute and name not in NEED_VALUES) or (name == "type" and len(args) == 1):
        given = (args, kwargs) if name == "__hash__" else current((args, kwargs))
        with torch._C.DisableTorchFunction():  # modes too
            return func(*given[0], **given[1])
    if name == "untyped_storage" and hasattr(first.rows, "fake_mode"):  # traces sum the bytes of tensors
        return torch.UntypedStorage(0)
    if name in HOOKS or func is torch.autograd.grad:
        wanted = deferred_in(args if name in HOOKS else kwargs.get("inputs", args[1:2]))
        if refused := [leaf.family.use.path for leaf in wanted if leaf.family.has_loss]:
            remedy = "it" if name in HOOKS else "logits.retain_grad()"
            raise RuntimeError(NO_GRADIENT.format(name=name, path=refused[0], remedy=remedy))
    if is_attribute and name == "grad" and first.family.has_loss and not first.family.is_real:
        warnings.warn(NO_GRADIENT.format(name=name, path=first.family.use.path, remedy="logits.retain_grad()"), stacklevel=3)
        return None
    if func is functional.cross_entropy:
        loss = chunked_loss_of(args, kwargs)
        if loss is not None:
            return loss
    elif isinstance(first, DeferredLogits) and torch.is_grad_enabled() and not first.family.is_real:
        recorded = sum_of(args) if name in SUMS and not kwargs else record(first, RecordedCall(name, func, args[1:], kwargs))
        if recorded is not None:
            return recorded
    return computed(func, name, args, kwargs)


def call_eagerly() -> Any:
    """Return `call_deferred` as a function that torch.compile does not trace, so that compiled loss functions can call it."""
    return _disabled() if "torch._dynamo" in sys.modules else call_deferred


@cache
def _disabled() -> Any:
    return torch.compiler.disable(call_deferred)


call_eagerly._torchdynamo_disable = True  # type: ignore[attr-defined]


def deferred_in(arguments: Any) -> list[DeferredLogits]:
    """Return the deferred logits (not computed yet) in the arguments of a call, which may be nested."""
    return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, DeferredLogits)]


def current(arguments: Any) -> Any:
    """Return `arguments`, in which deferred logits that something has made real are replaced by these real logits."""
    is_current = lambda leaf: isinstance(leaf, DeferredLogits) and leaf.family.is_real  # noqa: E731
    return tree_map(lambda leaf: leaf.logits() if is_current(leaf) else leaf, arguments)


def _detached(leaf: Any) -> Any:
    return real_of(leaf, "a call from C++").detach() if isinstance(leaf, DeferredLogits) else leaf


def name_of(func: Any) -> str:
    """Return the name of a function, or of the attribute that it gets or sets."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__", "__delete__"):
        owner = func.__self__
        return getattr(owner, "__name__", None) or owner.fget.__name__
    return name


def real_of(logits: DeferredLogits, name: str) -> Tensor:
    """Return the logits as an ordinary tensor, and record that the function `name` needed all of them."""
    logits.family.use.requests[name] += 1
    return logits.logits()


def make_real(arguments: Any) -> None:
    """Compute the deferred logits in `arguments` for good, since a function will write to them or may share their memory."""
    for leaf in deferred_in(arguments):
        leaf.family.make_real()


def computed(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Return func(*args, **kwargs) with computed logits in place of deferred ones; `name` is the function's."""
    given = args, kwargs
    if name in HOOKS or is_write(func, name, args, kwargs):
        make_real(given)
    args, kwargs = tree_map(lambda leaf: real_of(leaf, name) if isinstance(leaf, DeferredLogits) else leaf, given)
    return without_aliases(func(*args, **kwargs), given)


def is_write(func: Any, name: str, args: Any, kwargs: Any) -> bool:
    """Return whether a function, called `name`, may write to its arguments."""
    if getattr(func, "__name__", "") in ("__set__", "__delete__") or "out" in kwargs or kwargs.get("inplace"):
        return True
    overloads = [getattr(func, one) for one in func.overloads()] if isinstance(func, torch._ops.OpOverloadPacket) else [func]
    if any(isinstance(overload, torch._ops.OpOverload) and overload._schema.is_mutable for overload in overloads):
        return True
    is_positional = getattr(func, "__module__", "") == functional.__name__ and any(arg is True for arg in args)  # inplace=True
    return is_positional or name in WRITES or (name.endswith("_") and not name.endswith("__"))


def without_aliases(result: Any, arguments: Any) -> Any:
    """Return `result` of a function of computed logits; if it may share their memory, use real logits from now on.

    Later writes to such a result could change the logits, so all later functions must see them.
    """
    members = deferred_in(arguments)
    storages = {member.logits().untyped_storage()._cdata for member in members}
    for leaf in tree_leaves(result):
        if isinstance(leaf, Tensor) and has_storage(leaf) and leaf.layout is torch.strided:
            is_alias = leaf.untyped_storage()._cdata in storages
        else:
            is_alias = not isinstance(leaf, NUMBERS)
        if is_alias:
            make_real(members)
    return result


# --- recorded calls ---------------------------------------------------------------------------------------------------------------


def record(logits: DeferredLogits, call: RecordedCall) -> DeferredLogits | None:
    """Return the result of `call` on deferred logits, itself deferred; None if the call needs the logits' values at once."""
    if logits.is_class_first or any(isinstance(leaf, Tensor) for leaf in tree_leaves((call.args, call.kwargs))):
        return None
    if call.name in SWAPS:
        layout = logits.form.after(call)
        return derived(logits, call, layout) if layout == logits.form.class_first() else None
    call = without_device(logits, call) if call.name == "to" else call
    if call.name in ELEMENTWISE:
        is_recorded = is_elementwise(call)
    else:
        is_recorded = call.name in VIEWS or (call.name == "__getitem__" and keeps_last(call.args[0], logits.dim()))
    if not is_recorded:
        return None
    layout = logits.form.after(call)
    if layout.size[-1:] != logits.shape[-1:] or (call.name not in ELEMENTWISE and layout.dtype is not logits.dtype):
        return None
    return derived(logits, call, layout)


def sum_of(terms: Sequence[Any]) -> DeferredLogits | None:
    """Return the sum of the deferred logits of a head and of its LoRA adapter, itself deferred; None for other `terms`."""
    logits, other = terms[0], terms[-1]
    if len(terms) != 2 or not isinstance(other, DeferredLogits) or other.form.size != logits.form.size or other.family.is_real:
        return None
    if logits.calls or any((one.adapter or one.is_class_first) for one in (logits, other)) or other.family is logits.family:
        return None
    if other.family.linear.has_bias or any(call.name not in SCALES | CASTS for call in other.calls):
        return None
    scale = transform_of(tuple(call for call in other.calls if call.name in SCALES), torch.float32)
    rows = other.rows if scale is None else scale(other.rows)
    dtype = torch.promote_types(logits.dtype, other.dtype)

    def make() -> DeferredLogits:
        made = DeferredLogits(logits.family, logits.rows, replace(logits.form, dtype=dtype))
        made.adapter, made.parent, made.call = (
            (rows, other),
            logits,
            RecordedCall("add", lambda real: real + other.logits(), (), {}),
        )
        return made

    def gradients(grad: Tensor, needs: Sequence[bool]) -> Sequence[Tensor]:
        return grad.to(logits.dtype), grad.to(other.dtype)

    return Recorded.apply(make, gradients, logits, other)  # type: ignore[return-value]


def derived(logits: DeferredLogits, call: RecordedCall, layout: Layout) -> DeferredLogits:
    """Return the result of `call` on deferred logits, itself deferred, with the size, strides and dtype of `layout`."""

    def rows_of(rows: Tensor) -> Tensor:
        if call.name == "__getitem__":
            return call(rows)
        is_reshaped = layout.size != logits.form.size and call.name not in SWAPS
        return rows.reshape(*layout.size[:-1], rows.shape[-1]) if is_reshaped else rows

    rows = rows_of(logits.rows)
    adapter = (rows_of(logits.adapter[0]), logits.adapter[1]) if logits.adapter is not None else None

    def make() -> DeferredLogits:
        made = DeferredLogits(logits.family, rows, layout)
        made.adapter = adapter
        made.calls = (*logits.calls, call) if call.name in ELEMENTWISE else logits.calls
        made.parent, made.call, made.is_class_first = logits, call, call.name in SWAPS
        return made

    def gradients(grad: Tensor, needs: Sequence[bool]) -> Sequence[Tensor]:
        with torch.enable_grad():
            values = logits.logits().detach().requires_grad_()
            return torch.autograd.grad(call(values), values, grad)

    return Recorded.apply(make, gradients, logits)  # type: ignore[return-value]


def defer(use: HeadUse, linear: HeldLinear, dtype: torch.dtype | None = None) -> DeferredLogits:
    """Return the output of `linear` as deferred logits, to be computed later; `dtype`: of the product (None: autocast's)."""
    family = LogitsFamily(use, linear, dtype)
    use.num_deferred += 1
    layout = Layout.contiguous(*linear.hidden.shape[:-1], linear.num_classes, dtype=family.dtype)

    def make() -> DeferredLogits:
        return DeferredLogits(family, linear.hidden, layout)

    def gradients(grad: Tensor, needs: Sequence[bool]) -> Sequence[Tensor | None]:
        weight, bias = family.checked().values()
        rows, hidden = grad.reshape(-1, grad.shape[-1]).to(family.dtype), linear.hidden
        inputs = hidden.reshape(-1, hidden.shape[-1]).to(family.dtype)
        of_hidden = (rows @ weight.to(family.dtype)).reshape(hidden.shape).to(hidden.dtype) if needs[0] else None
        of_weight = (rows.t() @ inputs).to(weight.dtype) if needs[1] else None
        return of_hidden, of_weight, rows.sum(0).to(bias.dtype) if bias is not None and needs[2] else None

    return Recorded.apply(make, gradients, linear.hidden, *linear.operands())  # type: ignore[return-value]


class Recorded(torch.autograd.Function):
    """The autograd function that makes deferred logits, from the call of the output head or from other deferred logits.

    It gives them a grad_fn, for functions that autograd records without `__torch_function__`.
    """

    @staticmethod
    def forward(ctx: Any, make: Callable[[], Tensor], gradients: Callable[..., Sequence[Tensor | None]], *inputs: Any) -> Tensor:
        """Return the deferred logits that `make` returns; backward calls `gradients` for the gradients of `inputs`."""
        ctx.gradients = gradients
        return make()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        """Return the gradients of `inputs`, which the function given to forward computes from that of the deferred logits."""
        return None, None, *ctx.gradients(grad, ctx.needs_input_grad[2:])


# --- the loss ---------------------------------------------------------------------------------------------------------------------


@cache
def _signature() -> inspect.Signature:
    return inspect.signature(functional.cross_entropy)


def chunked_loss_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return F.cross_entropy(*args, **kwargs) for deferred logits, computed in chunks; None if the call needs all logits."""
    bound = _signature().bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    logits, target = given["input"], given["target"]
    if not isinstance(logits, DeferredLogits) or isinstance(target, DeferredLogits) or logits.family.is_real:
        return None
    is_matrix = logits.dim() == 2 or logits.is_class_first
    if not is_matrix or target.dtype is not torch.int64 or target.shape != logits.rows.shape[:-1]:
        return None
    if given["weight"] is not None and given["weight"].requires_grad:
        return None
    if given["size_average"] is not None or given["reduce"] is not None or given["reduction"] not in ("mean", "sum", "none"):
        return None
    family = logits.family
    is_decoded = given["reduction"] == "none" or not torch.is_grad_enabled()  # backward by rows reads the weight again
    weight, bias = family.checked().values() if is_decoded else family.checked().operands()  # packed, the loss decodes it itself
    adapter = (logits.adapter[0], logits.adapter[1].family.checked().values()[0]) if logits.adapter is not None else None
    options = CrossEntropy(given["weight"], given["ignore_index"], given["reduction"], given["label_smoothing"])
    transform = transform_of(logits.calls, family.dtype)
    settings = ChunkSettings(family.dtype, transform, loss_dtype=logits.dtype, device=family.device)
    family.use.num_losses += 1
    for part in (logits, *(logits.adapter[1:] if logits.adapter is not None else ())):
        part.family.has_loss |= torch.is_grad_enabled()
    with family.use.around():
        return chunked_cross_entropy(logits.rows, weight, target, bias=bias, adapter=adapter, options=options, settings=settings)
