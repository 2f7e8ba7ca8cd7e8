"""Logits that are not computed until something reads them: cross entropy reads them in chunks, so that all of them never exist.

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
writes into them, or registers a hook on them, makes them ordinary logits for all later functions.

Logits that are first read after the weight has changed cannot be computed any more: that is an error.
"""

# pyright: reportPrivateUsage=false, reportIncompatibleMethodOverride=false, reportAttributeAccessIssue=false

from __future__ import annotations

import inspect
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map

from paredown.loss.chunked_cross_entropy import CASTS, SCALES, ChunkSettings, CrossEntropy, chunked_cross_entropy, product_dtype
from paredown.loss.recorded_calls import (
    ELEMENTWISE,
    SWAPS,
    VIEWS,
    Call,
    Layout,
    is_elementwise,
    keeps_last,
    transform_of,
    without_device,
)
from paredown.optim.packed_parameter import KINDS, OTHERS, SIZES, WRITES, Decoded, PackedParameter
from paredown.optim.packed_weight import weight_of
from paredown.optim.parameter_state import owner_of

ABOUT = frozenset((*SIZES, *KINDS, *OTHERS, "__hash__", "requires_grad_"))  # functions that need no values
NEED_VALUES = frozenset(("T", "H", "mT", "mH", "real", "imag", "data", "grad"))  # attributes that do
SUMS = frozenset(("add", "__add__", "__radd__"))
HOOKS = frozenset(("register_hook", "retain_grad", "register_post_accumulate_grad_hook"))
CHANGED = (
    "the logits of {path} were not computed, because the loss reads them in chunks, and {what} changed since: they cannot be computed any "
    "more. Read them before optimizer.step(), or call paredown.apply(plan, model, chunked_loss=False)."
)


@dataclass(eq=False)
class HeadUse:
    """What became of the logits of the head at `path`.

    The number of times they were deferred, of losses in chunks (those inside of compiled graphs count once), of compiled graphs that have
    the head, and the functions that needed all logits.
    """

    path: str
    device: str | None = None  # type of the device of the loss, where that is not the device of the tensors (traces)
    around: Callable[[], AbstractContextManager[Any]] = nullcontext  # of losses in chunks: traces record their memory
    num_deferred: int = 0
    num_losses: int = 0
    num_graphs: int = 0
    requests: Counter[str] = field(default_factory=Counter[str])


class LogitsFamily:
    """One output of the head, and all deferred tensors made from it."""

    def __init__(self, use: HeadUse, module: nn.Linear, hidden: Tensor, dtype: torch.dtype | None = None) -> None:
        self.use, self.module, self.hidden = use, module, hidden
        self.device = use.device or hidden.device.type
        self.dtype = dtype or product_dtype(hidden, self.device)
        mixed = any(t.dtype is not dtype for t in (hidden, *self.parameters()))
        self.is_autocast = torch.is_autocast_enabled(self.device) if dtype is None else mixed
        self.is_real = False  # whether all functions use real logits from now on
        self.members: list[weakref.ref[DeferredLogits]] = []
        self._versions = hidden._version, *map(version_of, self.parameters())
        self._logits: Tensor | None = None

    def parameters(self) -> list[nn.Parameter]:
        """The weight, and the bias if there is one."""
        return [p for p in (self.module.weight, self.module.bias) if p is not None]  # type: ignore[misc]

    def check(self) -> None:
        """RuntimeError if the hidden states or the parameters have changed since the head was called."""
        names = ("the input of the layer", "its weight", "its bias")
        for name, before, now in zip(
            names, self._versions, (self.hidden._version, *map(version_of, self.parameters())), strict=False
        ):
            if before != now:
                raise RuntimeError(CHANGED.format(path=self.use.path, what=name))

    def logits(self) -> Tensor:
        """All logits, computed at the first call."""
        if self._logits is None:
            self.check()
            with torch.enable_grad(), self.autocast():
                self._logits = functional.linear(self.hidden, self.module.weight, self.module.bias)
        return self._logits

    def autocast(self) -> Any:
        """The autocast settings under which the head was called."""
        return torch.autocast(self.device, dtype=self.dtype if self.is_autocast else None, enabled=self.is_autocast)

    def operands(self) -> tuple[Tensor, Tensor | None]:
        """The parameters, packed or not, for a loss that decodes a packed weight itself; `values` where gradients are off."""
        if not torch.is_grad_enabled():
            return self.values()
        self.check()
        return self.module.weight, self.module.bias

    def values(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias, decoded if they are packed; gradients flow to them."""
        self.check()
        values = [parameter_values(p) for p in self.parameters()]
        return values[0], values[1] if len(values) > 1 else None

    def make_real(self) -> None:
        """Compute the logits of all members, before one of them is written."""
        self.is_real = True
        for ref in self.members:
            member = ref()
            if member is not None:
                member.logits()


class DeferredLogits(Tensor):
    """Logits of which the hidden states `rows` and the recorded calls are known."""

    is_deferred = True
    family: LogitsFamily
    rows: Tensor  # hidden states, of the shape of the logits but for the last dimension
    calls: tuple[Call, ...]  # elementwise ones, in order
    form: Layout
    parent: DeferredLogits | None  # with the call that made this from it
    call: Call | None
    adapter: tuple[Tensor, DeferredLogits] | None  # scaled rows of the logits that are added, and those
    is_class_first: bool  # whether the classes are dimension 1, as cross entropy takes more than two dimensions
    _logits: Tensor | None

    @staticmethod
    def __new__(cls: type[DeferredLogits], family: LogitsFamily, rows: Tensor, layout: Layout) -> DeferredLogits:
        """Logits of this layout."""
        made: DeferredLogits = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, layout.size, strides=layout.stride, dtype=layout.dtype, device=rows.device
        )
        made.family, made.rows, made.form = family, rows, layout
        made.calls, made.parent, made.call, made._logits = (), None, None, None
        made.is_class_first, made.adapter = False, None
        family.members.append(weakref.ref(made))
        return made

    def logits(self) -> Tensor:
        """Real logits, computed at the first call."""
        if self._logits is None:
            if self.parent is None or self.call is None:
                self._logits = self.family.logits()
            else:
                with torch.enable_grad():
                    self._logits = self.call(self.parent.logits())
        return self._logits

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call_eagerly()(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls from C++, which autograd has recorded already."""
        if func._schema.is_mutable:
            make_real((args, kwargs))
        args, kwargs = tree_map(_detached, (args, kwargs or {}))
        return func(*args, **kwargs)


def call_deferred(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a torch function, some of the arguments of which are deferred logits."""
    name = name_of(func)
    first = args[0] if args else None
    is_attribute = getattr(func, "__name__", "") == "__get__"
    if name in ABOUT or (is_attribute and name not in NEED_VALUES) or (name == "type" and len(args) == 1):
        with torch._C.DisableTorchFunction():  # modes too
            return func(*args, **kwargs)
    if name == "untyped_storage" and args[0]._logits is None:  # tools that sum the bytes of tensors
        return torch.UntypedStorage(0)
    if func is functional.cross_entropy:
        loss = chunked_loss_of(args, kwargs)
        if loss is not None:
            return loss
    elif isinstance(first, DeferredLogits) and torch.is_grad_enabled() and not first.family.is_real:
        recorded = sum_of(args) if name in SUMS and not kwargs else record(first, Call(name, func, args[1:], kwargs))
        if recorded is not None:
            return recorded
    return computed(func, name, args, kwargs)


def call_eagerly() -> Any:
    """`call_deferred`, excluded from torch.compile, as in a compiled loss function."""
    return _disabled() if "torch._dynamo" in sys.modules else call_deferred


@cache
def _disabled() -> Any:
    return torch.compiler.disable(call_deferred)


call_eagerly._torchdynamo_disable = True  # type: ignore[attr-defined]


def _detached(leaf: Any) -> Any:
    return real_of(leaf, "a call from C++").detach() if isinstance(leaf, DeferredLogits) else leaf


def name_of(func: Any) -> str:
    """The name of a function, or of the attribute that it gets or sets."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__", "__delete__"):
        owner = func.__self__
        return getattr(owner, "__name__", None) or owner.fget.__name__
    return name


def real_of(logits: DeferredLogits, name: str) -> Tensor:
    """Real logits, which the function `name` needs."""
    logits.family.use.requests[name] += 1
    return logits.logits()


def make_real(arguments: Any) -> None:
    """Use real logits from now on in place of the deferred ones in `arguments`, which something will write."""
    for leaf in tree_leaves(arguments):
        if isinstance(leaf, DeferredLogits):
            leaf.family.make_real()


def computed(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """The result of `func` on real logits."""
    writes = name in WRITES or name in HOOKS or getattr(func, "__name__", "") in ("__set__", "__delete__") or "out" in kwargs
    if writes or (name.endswith("_") and not name.endswith("__")):
        make_real((args, kwargs))
    args, kwargs = tree_map(lambda leaf: real_of(leaf, name) if isinstance(leaf, DeferredLogits) else leaf, (args, kwargs))
    return func(*args, **kwargs)


# --- recorded calls ---------------------------------------------------------------------------------------------------------------


def record(logits: DeferredLogits, call: Call) -> DeferredLogits | None:
    """The deferred result of a call; None if it has to be computed."""
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
    """Logits of a head plus those of an adapter, scaled by numbers; None for other sums."""
    logits, other = terms[0], terms[-1]
    if len(terms) != 2 or not isinstance(other, DeferredLogits) or other.form.size != logits.form.size or other.family.is_real:
        return None
    if logits.calls or any((one.adapter or one.is_class_first) for one in (logits, other)) or other.family is logits.family:
        return None
    if any(call.name not in SCALES | CASTS for call in other.calls):
        return None
    scale = transform_of(tuple(call for call in other.calls if call.name in SCALES), torch.float32)
    rows = other.rows if scale is None else scale(other.rows)
    dtype = torch.promote_types(logits.dtype, other.dtype)

    def make() -> DeferredLogits:
        made = DeferredLogits(logits.family, logits.rows, replace(logits.form, dtype=dtype))
        made.adapter, made.parent, made.call = (rows, other), logits, Call("add", lambda real: real + other.logits(), (), {})
        return made

    return Summed.apply(logits, other, make)  # type: ignore[return-value]


class Summed(torch.autograd.Function):
    """A recorded sum in autograd."""

    @staticmethod
    def forward(ctx: Any, logits: DeferredLogits, other: DeferredLogits, make: Any) -> Tensor:
        """The deferred logits that `make` returns."""
        ctx.dtypes = logits.dtype, other.dtype
        return make()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        """The gradient, for both terms."""
        return *(grad.to(dtype) for dtype in ctx.dtypes), None


def derived(logits: DeferredLogits, call: Call, layout: Layout) -> DeferredLogits:
    """The deferred result of a call that can be recorded."""

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

    return Recorded.apply(logits, call, make)  # type: ignore[return-value]


def defer(use: HeadUse, module: nn.Linear, hidden: Tensor, dtype: torch.dtype | None = None) -> DeferredLogits:
    """The deferred output of `module`; `dtype`: of its matrix product, if that is not the one of autocast at this moment."""
    family = LogitsFamily(use, module, hidden, dtype)
    use.num_deferred += 1
    layout = Layout.contiguous(*hidden.shape[:-1], module.out_features, dtype=family.dtype)

    def make() -> DeferredLogits:
        return DeferredLogits(family, hidden, layout)

    return Deferred.apply(hidden, module.weight, module.bias, family, make)  # type: ignore[return-value]


class Deferred(torch.autograd.Function):
    """The head in autograd: gives deferred logits their grad_fn, for functions that autograd records without `__torch_function__`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, family: LogitsFamily, make: Any) -> Tensor:
        """The deferred logits that `make` returns."""
        ctx.family = family
        return make()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        """The gradients of a linear layer."""
        family: LogitsFamily = ctx.family
        with torch.no_grad():
            weight, _ = family.values()
            rows = grad.reshape(-1, grad.shape[-1]).to(family.dtype)
            hidden, needs = family.hidden, ctx.needs_input_grad
            inputs = hidden.reshape(-1, hidden.shape[-1]).to(family.dtype)
            of_hidden = (rows @ weight.to(family.dtype)).reshape(hidden.shape).to(hidden.dtype) if needs[0] else None
            of_weight = (rows.t() @ inputs).to(weight.dtype) if needs[1] else None
            return of_hidden, of_weight, rows.sum(0).to(family.module.bias.dtype) if needs[2] else None, None, None


class Recorded(torch.autograd.Function):
    """A recorded call in autograd."""

    @staticmethod
    def forward(ctx: Any, logits: DeferredLogits, call: Call, make: Any) -> Tensor:
        """The deferred logits that `make` returns."""
        ctx.logits, ctx.call = logits, call
        return make()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        """The gradient of the call's input."""
        with torch.enable_grad():
            values = ctx.logits.logits().detach().requires_grad_()
            return torch.autograd.grad(ctx.call(values), values, grad)[0], None, None


# --- the loss ---------------------------------------------------------------------------------------------------------------------


@cache
def _signature() -> inspect.Signature:
    return inspect.signature(functional.cross_entropy)


def chunked_loss_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The cross entropy of deferred logits in chunks; None where all logits are needed."""
    bound = _signature().bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    logits, target = given["input"], given["target"]
    if not isinstance(logits, DeferredLogits) or isinstance(target, DeferredLogits) or logits.family.is_real:
        return None
    is_matrix = logits.dim() == 2 or logits.is_class_first
    if not is_matrix or target.dtype is not torch.int64 or target.shape != logits.rows.shape[:-1]:
        return None
    if given["size_average"] is not None or given["reduce"] is not None or given["reduction"] not in ("mean", "sum", "none"):
        return None
    family = logits.family
    is_by_row = given["reduction"] == "none"  # backward reads the weight again
    weight, bias = family.values() if is_by_row else family.operands()
    adapter = (logits.adapter[0], logits.adapter[1].family.values()[0]) if logits.adapter is not None else None
    options = CrossEntropy(given["weight"], given["ignore_index"], given["reduction"], given["label_smoothing"])
    transform = transform_of(logits.calls, family.dtype)
    settings = ChunkSettings(family.dtype, transform, loss_dtype=logits.dtype, device=family.device)
    family.use.num_losses += 1
    with family.use.around():
        return chunked_cross_entropy(logits.rows, weight, target, bias=bias, adapter=adapter, options=options, settings=settings)


def parameter_values(parameter: nn.Parameter) -> Tensor:
    """The parameter, or its decoded values if it is packed."""
    if type(parameter) is not PackedParameter:
        return parameter
    weight = weight_of(parameter)
    assert weight is not None
    if parameter.requires_grad and torch.is_grad_enabled():
        return Decoded.apply(parameter)  # type: ignore[return-value]
    return weight.shared(weight.dtype)


def version_of(parameter: nn.Parameter) -> Any:
    """A value that changes whenever the parameter is written."""
    weight, owner = weight_of(parameter), owner_of(parameter)
    return parameter._version if weight is None else weight.version, owner.updates if owner is not None else 0
