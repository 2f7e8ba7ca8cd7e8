"""`PackedParameter` is the class of a packed weight outside of its modules, such as in optimizers and penalties.

    access                                              result
    size, dtype, device, grad, hooks, zeros_like ...    metadata of the parameter; nothing is decoded
    p.data, p.detach(), and views without a gradient    a view: a `PackedParameter` of the same weight under another size and strides,
                                                        which is no nn.Parameter; nn.Parameter(p.data) is one
    p.data = x                                          x is encoded, and the parameter takes over its dtype, device and size; if they
                                                        cannot be packed (float64), it becomes an ordinary parameter for good
    a function that writes (p.add_, p[0] = 1, out=p)    it writes into decoded values, which are then encoded, rounded to nearest;
                                                        several in a row on one parameter round once
    any other function                                  computed from the decoded values; gradients flow to the parameter
    copies, pickles, repr                               those of an ordinary parameter
    data_ptr, share_memory_, resize_, nn.Parameter(p)   OptimError: there is no memory to point to

Every function call decodes, so loops over single values are slow: take p.detach().clone() first. A view keeps the decoded values that it
was made from while it is alive, and writes to it are encoded into the weight. Views that require a gradient are views of a copy.

Some functions bypass `__torch_function__`: torch.tensor(p), torch.Tensor(p), torch.as_tensor(p, dtype=...), other.new_tensor(p), and
other.data = p.data. Builds for CUDA raise an error for these; builds without CUDA read invalid memory and crash. Take p.detach().clone().
"""

# pyright: reportPrivateUsage=false, reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves, tree_map

from paredown.codec.packed import DTYPES
from paredown.errors import OptimError
from paredown.optim.packed_weight import KEY, NO_MEMORY, Weight, weight_of

NEW_PARAMETER = (
    "nn.Parameter(p) of a packed weight: there is no memory that both could share. Put parametrizations such as weight_norm on before "
    "paredown.apply (session.close() gives the plain model back); for a copy, take nn.Parameter(p.detach().clone())."
)
# attribute of a view: whether it is an nn.Parameter; None for a view of the parameter itself, which must not become one
IS_PARAMETER = "_is_parameter"
HELD = "_held"  # attribute of a view: the version of the weight, and the decoded values that the view was made from
LEAF = "a leaf Variable that requires grad is being used in an in-place operation."
VALUES = frozenset(("T", "H", "mT", "mH", "real", "imag"))  # attributes that need values; all others are answered without decoding
# functions that do not read values
SIZES = ("size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "storage_offset", "dim_order", "__len__")
KINDS = ("is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_inference", "is_conj", "is_neg", "get_device")
OTHERS = (
    *("is_same_size", "is_set_to", "has_names", "_is_view", "_is_zerotensor"),
    *("_use_count", "__dir__", "result_type", "can_cast"),
)
GRADIENTS = ("requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "detach_", "grad", "backward")
LIKES = ("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like")
NEW = ("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full", "_has_compatible_shallow_copy_type")
ABOUT = frozenset((*SIZES, *KINDS, *OTHERS, *GRADIENTS, *LIKES, *NEW))
REFUSED = frozenset(("data_ptr", "__cuda_array_interface__", "share_memory_", "resize_", "resize_as_"))
OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "pow", "mod", "and", "or", "xor", "lshift", "rshift")
WRITES = frozenset(("__setitem__", *(f"__i{name}__" for name in OPERATORS)))
PLAIN_CLASSES = (Tensor, nn.Parameter)
is_dynamo_compiling = torch.compiler.is_dynamo_compiling  # True while Dynamo traces, which replaces the call
STORAGES = frozenset(("untyped_storage", "storage", "_typed_storage"))


class PackedParameter(Tensor):
    """The class of a parameter whose values are stored packed, and of its views; `weight_of(p)` returns the codes.

    Modules hold the parameter itself, an nn.Parameter without memory; `Weight.hide` gives it this class. Views are made by the constructor.
    A view can be the local tensor of a DTensor or an argument of a collective, so calls from C++ come to its `__torch_dispatch__`.
    """

    @staticmethod
    def __new__(cls: type[PackedParameter], weight: Weight, like: Tensor, base: Tensor | None = None) -> PackedParameter:
        """Return a view of a packed parameter with the size, strides and offset of `like`.

        `base`: the decoded values of which `like` is a view, kept to read from; None if there are none.
        """
        view: PackedParameter = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            like.size(),
            strides=like.stride(),
            storage_offset=like.storage_offset(),
            dtype=weight.dtype,
            device=weight.packed.device,
        )
        if hasattr(torch._C, "_set_storage_access_error_msg"):  # another tensor's .data may be set to this
            torch._C._set_storage_access_error_msg(view, NO_MEMORY)
        vars(view).update({KEY: weight, HELD: None if base is None else (weight.version, base), IS_PARAMETER: False})
        return view

    @property
    def _is_param(self) -> bool:
        """Whether isinstance(tensor, nn.Parameter) is true: for parameters, and not for their views."""
        return bool(vars(self).get(IS_PARAMETER, True))

    @_is_param.setter
    def _is_param(self, value: bool) -> None:
        """Set whether torch takes this tensor for an nn.Parameter, as nn.Parameter(x) does with x.detach()."""
        if vars(self).get(IS_PARAMETER) is None:
            raise OptimError(NEW_PARAMETER)
        vars(self)[IS_PARAMETER] = value

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = decoded_copy(self)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        copy = decoded_copy(self)
        if isinstance(self, nn.Parameter):
            vars(copy).update({name: value for name, value in vars(self).items() if name not in (KEY, HELD, IS_PARAMETER)})
        return copy.__reduce_ex__(protocol)

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(decoded_copy(self))

    def as_subclass(self, cls: Any) -> Any:
        """Return the decoded values as a tensor of class `cls`; torch's own method would read memory that does not exist."""
        return _computed(Tensor.as_subclass, "as_subclass", (self, cls), {})

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_dynamo_compiling():
            return call_in_compiled(func, args, kwargs or {})
        if any(hasattr(kind, "is_deferred") for kind in types):  # deferred logits, which first become real ones
            return NotImplemented
        if func is F.linear and not kwargs:
            result = _linear_of_frozen(*args)
            if result is not None:
                return result
        return call_outside_compile(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run, on decoded values, an operator that C++ code calls with a packed parameter, such as DistributedDataParallel's.

        Arguments that the operator's schema marks for writing are encoded again.
        """
        kwargs = kwargs or {}
        if func is torch.ops.aten.detach.default:  # of a DTensor, which dispatches to its local tensor
            return view_of(args[0])
        values = DecodedValues(tracks_gradients=False, writes=func._schema.is_mutable)
        result = func(*values.of(args), **values.of(kwargs))
        for work in [leaf for leaf in tree_leaves(result) if hasattr(leaf, "wait")]:
            work.wait()
        if func._schema.is_mutable or func.namespace == "c10d":
            values.store_changed(writes_unseen=True)
        return values.wrap(result)


class Decoded(torch.autograd.Function):
    """The autograd function that decodes a packed parameter; the gradient of the values is that of the parameter."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor) -> Tensor:
        """Return the values of a packed parameter, decoded."""
        ctx.weight = weight = _weight(packed)
        return _of_base(packed, weight.decode())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        """Return the gradient, unchanged, for the parameter."""
        return grad


class FrozenLinear(torch.autograd.Function):
    """The autograd function for F.linear with a frozen packed weight, which saves no values: backward decodes them again.

    torch.utils.checkpoint compares the tensors that both forward passes save. If the session is closed between them, F.linear saves the
    unpacked weight in the second; therefore this forward calls the checkpoint's hook with the weight, too, and drops the result.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Weight, dtype: torch.dtype, bias: Tensor | None, on_save: Any) -> Tensor:
        """Return F.linear of `x` and the decoded weight; `on_save` is the pack hook of a running checkpoint, or None."""
        values = weight.decode(dtype)
        ctx.weight, ctx.version, ctx.dtype = weight, weight.version, dtype
        if on_save is not None:
            on_save(values.t())
        return F.linear(x, values, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:  # type: ignore[override]
        """Return the gradient of `x`, and None for the other arguments of forward."""
        weight: Weight = ctx.weight
        weight.check_version(ctx.version)
        return grad @ weight.decode(ctx.dtype), None, None, None, None


_apply_frozen_linear: Any = super(torch.autograd.Function, FrozenLinear).apply  # without the checks for torch.func


def _linear_of_frozen(x: Tensor, packed: Any, bias: Tensor | None = None) -> Tensor | None:
    """Return F.linear(x, packed, bias) if `packed` is a frozen packed weight, without saving its values; None if it is not.

    As autocast does, casts are made before the product, so that the gradient of `x` is cast back once.
    """
    weight: Weight | None = vars(packed).get(KEY) if type(packed) is PackedParameter else None
    if weight is None or weight.hook_of_checkpoint is None or type(x) not in PLAIN_CLASSES or weight.parameter is not packed:
        return None
    with torch._C.DisableTorchFunctionSubclass():
        if packed.requires_grad or (bias is not None and bias.requires_grad) or x.dtype not in DTYPES:
            return None
        dtype = weight.dtype
        if torch.is_autocast_enabled(weight.device_type):
            dtype = torch.get_autocast_dtype(weight.device_type)
            x, bias = x.to(dtype), bias if bias is None else bias.to(dtype)
        if not (x.requires_grad and torch.is_grad_enabled()):
            return F.linear(x, weight.decode(dtype), bias)
        if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:  # `FrozenLinear` has no rule for these
            return None
        return _apply_frozen_linear(x, weight, dtype, bias, weight.hook_of_checkpoint())


def call_outside_compile(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return func(*args, **kwargs) as `call_decoded` does, but excluded from tracing by torch.compile."""
    if "torch._dynamo" not in sys.modules:
        return call_decoded(func, args, kwargs)
    return _call_decoded_eagerly()(func, args, kwargs)


def call_in_compiled(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return func(*args, **kwargs) as `call_decoded` does, excluded from tracing; mark the parameters as used by a graph."""
    for packed in [leaf for leaf in tree_leaves((args, kwargs)) if type(leaf) is PackedParameter]:
        if not _is_view(packed):
            _weight(packed).was_compiled = True
    return call_outside_compile(func, args, kwargs)


for _function in (call_outside_compile, call_in_compiled):
    _function._torchdynamo_disable = True  # type: ignore[attr-defined]
    _function._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
        "a weight is stored packed. Compile the model before paredown.apply, or call it once without fullgraph=True"
    )


@cache
def _call_decoded_eagerly() -> Any:
    return torch.compiler.disable(call_decoded)


def call_decoded(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return func(*args, **kwargs) for a torch function among whose arguments are packed parameters or views of them.

    Functions that need values get decoded ones; those about sizes, dtypes and gradients do not.
    """
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        owner = func.__self__
        return _attribute(func, name, getattr(owner, "__name__", None) or owner.fget.__name__, args)
    first: Any = args[0] if args else None
    if name in REFUSED and type(first) is PackedParameter:
        raise OptimError(f"{name} of a packed weight: {NO_MEMORY}")
    if name in ABOUT or (name == "type" and len(args) == 1 and not kwargs):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if name in STORAGES:
        storage = torch.UntypedStorage(0, device=first.device)
        is_untyped = name == "untyped_storage"
        return storage if is_untyped else torch.TypedStorage(wrap_storage=storage, dtype=first.dtype, _internal=True)
    if name == "detach" and type(first) is PackedParameter:
        return view_of(first)
    return _computed(func, name, args, kwargs)


def _attribute(func: Any, verb: str, name: str, args: tuple[Any, ...]) -> Any:
    if name in REFUSED:
        raise OptimError(f"{name} of a packed weight: {NO_MEMORY}")
    if name == "data":
        return view_of(args[0]) if verb == "__get__" else _set_data(*args)
    if name in VALUES:
        return _computed(func, name, args, {})
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args)


def _set_data(packed: Tensor, values: Tensor) -> None:
    weight, is_packed = _weight(packed), type(values) is PackedParameter
    if _is_view(packed):
        raise OptimError("setting .data of a view of a packed weight: write into it with copy_(), or set p.data of the parameter.")
    if not (is_packed and weight_of(values) is weight and _is_whole(values)):
        weight.store(_value(values) if is_packed else values)


def _computed(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return func(*args, **kwargs) computed on decoded values; a packed parameter that `func` writes to is encoded again."""
    is_collective = (getattr(func, "__module__", None) or "").startswith("torch.distributed")
    writes = name in WRITES or (name.endswith("_") and not name.endswith("__"))
    values, first = DecodedValues(torch.is_grad_enabled() and not is_collective, writes), torch._C._autograd._get_sequence_nr()
    args, kwargs = values.of(args), values.of(kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*args, **kwargs)
    if is_collective and hasattr(result, "wait"):
        result.wait()
    values.store_changed(writes_unseen=is_collective or name.startswith("_fused_"))
    values.report_use(result, first)
    return values.wrap(result)


class DecodedValues:
    """The decoded values of the packed parameters that one call of a torch function gets; written ones are encoded again."""

    def __init__(self, tracks_gradients: bool, writes: bool = False) -> None:
        """Prepare the call of one torch function.

        `tracks_gradients`: gradients flow through decoding to the parameters. `writes`: the function works in place; it gets the
        values that an earlier in-place function wrote, if these are not encoded yet.
        """
        self._tracks, self._writes = tracks_gradients, writes
        self._bases: dict[Weight, tuple[Tensor, int]] = {}  # decoded values, shared by all views of a weight, and their `_version`
        # id -> packed tensor, its values, their grad_fn and `_version`
        self._pairs: dict[int, tuple[Tensor, Tensor, Any, int]] = {}

    def of(self, arguments: Any) -> Any:
        """Return `arguments` of the function with decoded values in place of packed parameters."""
        return tree_map(lambda leaf: self._value(leaf) if type(leaf) is PackedParameter else leaf, arguments)

    def _value(self, packed: Tensor) -> Tensor:
        if id(packed) not in self._pairs:
            if self._tracks and packed.requires_grad:
                value: Tensor = Decoded.apply(packed)  # type: ignore[assignment]
            else:
                value = _of_base(packed, self._base(packed))
            self._pairs[id(packed)] = packed, value, value.grad_fn, value._version
        return self._pairs[id(packed)][1]

    def _base(self, packed: Tensor) -> Tensor:
        weight = _weight(packed)
        if weight not in self._bases:
            base = weight.written if self._writes else None
            base = _held(packed) if base is None else base
            base = weight.decode() if base is None else base
            self._bases[weight] = base, base._version
        return self._bases[weight][0]

    def store_changed(self, *, writes_unseen: bool) -> None:
        """Encode the decoded values that the function has written to.

        `writes_unseen`: the function may write without changing version numbers, so all decoded values are encoded. As in torch, writing to
        a leaf that requires grad raises while grad mode is enabled.
        """
        for packed, value, node, version in self._pairs.values():
            if node is not None and value._version != version:
                if value.grad_fn is not node:
                    raise RuntimeError(LEAF)
                base = _weight(packed).decode()
                _of_base(packed, base).copy_(value.detach())
                self._store(_weight(packed), base)
        for weight, (base, version) in self._bases.items():
            if base._version != version or writes_unseen:
                self._store(weight, base)

    def _store(self, weight: Weight, base: Tensor) -> None:
        if len(self._bases) + sum(node is not None for _, _, node, _ in self._pairs.values()) == 1:
            weight.write(base)
        else:
            weight.store(base)
        for packed, *_ in self._pairs.values():
            if _weight(packed) is weight:
                if _is_view(packed):  # from now on it reads what it wrote, after rounding
                    vars(packed)[HELD] = None
                if isinstance(packed, nn.Parameter):
                    torch._C._increment_version((packed,))

    def report_use(self, result: Any, first: int) -> None:
        """Pass the function's result and the decoded values to the session, which frees them until backward needs them.

        `first`: the sequence number of the first autograd node that the call made.
        """
        used = [(_weight(packed), value) for packed, value, *_ in self._pairs.values()]
        reports = [report for weight, _ in used if weight.on_use is not None and (report := weight.on_use()) is not None]
        if reports:
            reports[0](result, first, used)

    def wrap(self, result: Any) -> Any:
        """Return the function's result, in which decoded values and views of them are replaced by packed parameters."""
        originals = {id(value): packed for packed, value, *_ in self._pairs.values()}
        storages = {base.untyped_storage()._cdata: (weight, base) for weight, (base, _) in self._bases.items()}

        def wrapped(leaf: Any) -> Any:
            if id(leaf) in originals:
                return originals[id(leaf)]
            owner = storages.get(leaf.untyped_storage()._cdata) if storages and _may_be_view(leaf) else None
            return PackedParameter(owner[0], leaf, owner[1]) if owner is not None and leaf.dtype is owner[0].dtype else leaf

        return tree_map(wrapped, result)


def _may_be_view(result: Any) -> bool:
    """Return whether a function's result may be a view of decoded values: an ordinary strided tensor without grad_fn."""
    is_plain = type(result) is Tensor and result.grad_fn is None and result.layout is torch.strided and result.device.type != "meta"
    return is_plain and not torch._C._functorch.is_batchedtensor(result)


def _weight(packed: Tensor) -> Weight:
    weight = weight_of(packed)
    assert weight is not None
    return weight


def _is_view(packed: Tensor) -> bool:
    """Return whether a `PackedParameter` is a view of a parameter rather than the parameter itself."""
    return HELD in vars(packed)


def _held(packed: Tensor) -> Tensor | None:
    """Return the decoded values that a view keeps; None if it keeps none, or the parameter has changed since."""
    held = vars(packed).get(HELD)
    return held[1] if held is not None and held[0] == _weight(packed).version else None


def _of_base(packed: Tensor, base: Tensor) -> Tensor:
    if not _is_view(packed) or _is_whole(packed):
        return base
    with torch._C.DisableTorchFunctionSubclass():
        return base.as_strided(packed.size(), packed.stride(), packed.storage_offset())


def _is_whole(packed: Tensor) -> bool:
    weight = _weight(packed)
    with torch._C.DisableTorchFunctionSubclass():
        return packed.size() == weight.size and packed.stride() == weight.stride and packed.storage_offset() == 0


def _value(packed: Tensor) -> Tensor:
    base = _held(packed)
    return _of_base(packed, _weight(packed).decode() if base is None else base)


def view_of(packed: Tensor) -> PackedParameter:
    """Return a new view of `packed`, a packed parameter or a view of one, with the same size and strides."""
    with torch._C.DisableTorchFunctionSubclass():
        view = PackedParameter(_weight(packed), packed)
    vars(view).update({HELD: vars(packed).get(HELD), IS_PARAMETER: False if _is_view(packed) else None})
    return view


def decoded_copy(packed: PackedParameter) -> Tensor:
    """Return an nn.Parameter with the decoded values of a packed parameter, or an ordinary tensor for a view of one."""
    values = _value(packed)
    values = values.clone() if _is_view(packed) else values
    return nn.Parameter(values, packed.requires_grad) if isinstance(packed, nn.Parameter) else values
