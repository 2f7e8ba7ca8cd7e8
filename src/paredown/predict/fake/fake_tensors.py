"""Puts a model on fake tensors while it is traced, and makes operations run as they do on the target device.

`with_fake_tensors` replaces parameters and buffers by fake CPU tensors of the same sizes and strides: tied ones stay tied, and models on
the meta device are treated like any other. Whatever the forward pass does to its modules in the context (counters, caches, hooks, lists
of weights of recurrent layers) is undone at the end, also after an error.

`DeviceForms` runs a step's CUDA operations on fake CPU tensors. A plain CPU trace of GPT-2 (16 x 1024) reports 40 GiB of saved tensors;
with these forms it reports what a GPU saves. Tables:

    FORMS       operations with another implementation on CUDA: attention, dropout, RNNs, rms_norm (batch norm and pooling save the same)
    LOWER       operations that autocast runs in 16 bits: their inputs are cast, parameters once a step
    CAST        operations that it runs in float32 by casting their inputs
    SET_DTYPE   operations that it runs in float32 by passing dtype=float32
    PROMOTE     operations that it runs in the widest dtype of their inputs

`autocast("cuda")` disables itself on machines without CUDA, and a fake tensor on cuda aborts the process there: so the autocast state is
set directly, and any device that the model names becomes the CPU. Functions of torch that are written in Python, such as
F.multi_head_attention_forward, would run with the function mode off; their bodies are run with it on. So are those of backward, in
which activation checkpointing recomputes: it compares what it recomputes with what the forward pass saved.
"""

# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import FunctionType
from typing import Any, NamedTuple, cast, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map, tree_map_only

from paredown.autograd.hooks import Hook
from paredown.errors import TraceError
from paredown.predict.fake import device_ops
from paredown.predict.fake.cuda_autocast import autocast_backward, cuda_autocast
from paredown.predict.fake.tensor_values import ValuedFakeMode
from paredown.session.weights.packed_experts import BY_GROUPS, ExpertWeights, expert_weights, function_name, is_decoded_by_groups

IS_DEFERRED = "is_deferred"  # attribute of tensor classes that record operations (loss/deferred_logits.py)
HOOK_TABLES = ("_forward_pre_hooks", "_forward_hooks")
PACKED = "PackedParameter"  # type of a packed weight of a session: it has shape, strides and dtype, which is all that a trace reads
# types of parameters that bitsandbytes has quantized: a trace counts the bytes of their codes, and reads their attributes from the fakes
QUANTIZED = frozenset({"Params4bit", "Int8Params"})
WRAPPER_LIBRARIES = ("torchao",)
WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


def casts_on_cuda(op: str) -> bool:
    """Return whether autocast for CUDA casts the arguments of `op`, in this version of torch."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{op}", "AutocastCUDA")


LOWER = _names("""
    _convolution addbmm addmm addmv addr baddbmm bmm chain_matmul conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d
    conv_transpose3d convolution cudnn_convolution cudnn_convolution_transpose einsum gru_cell linalg_multi_dot linalg_vecdot linear
    lstm_cell matmul mm mv prelu rmatmul rnn_relu_cell rnn_tanh_cell scaled_dot_product_attention _scaled_dot_product_flash_attention
    _thnn_fused_gru_cell _thnn_fused_lstm_cell lstm gru rnn_tanh rnn_relu _cudnn_rnn
""")
CAST = _names("""
    acos asin binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss cosine_similarity dist erfinv exp expm1
    frobenius_norm group_norm hinge_embedding_loss huber_loss kl_div l1_loss layer_norm log log10 log1p log2 logsumexp
    margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss native_layer_norm nll_loss nll_loss2d nll_loss_nd norm
    nuclear_norm pdist poisson_nll_loss pow rdiv reciprocal renorm rms_norm rpow rsqrt rtruediv sinh smooth_l1_loss soft_margin_loss
    softplus tan triplet_margin_loss _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d
    _upsample_nearest_exact2d _upsample_nearest_exact3d upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d
    upsample_nearest2d upsample_nearest3d upsample_trilinear3d
""") - (_names("") if casts_on_cuda("rms_norm") else _names("rms_norm"))
SET_DTYPE = _names("cumprod cumsum linalg_matrix_norm linalg_vector_norm log_softmax prod softmax sum")
PROMOTE = _names("addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot vdot")
BANNED = _names("binary_cross_entropy")  # autocast on CUDA raises an error for it
HALVES = (torch.float16, torch.bfloat16)
CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
IN_PYTHON = ("torch.nn.functional", "torch.functional")  # modules whose functions are written in Python
BACKWARD = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)  # checkpoints recompute inside of these
ATTRIBUTES = frozenset({"__get__", "__set__", "__delete__"})  # access to attributes of tensors, which is no operation
TO_NUMPY = (Tensor.numpy, Tensor.__array__)
DEVICE_METHODS = frozenset({"cuda", "pin_memory", "record_stream"})  # tensor methods that only move a tensor: they return it


class FakeTensors:
    """Makes and remembers a fake CPU tensor for each tensor of a model, of the same size, strides and dtype."""

    def __init__(self) -> None:
        self.mode = ValuedFakeMode()
        self.around: Callable[[], AbstractContextManager[None]] = nullcontext  # a context entered while a fake is made
        # id of the original -> (original, fake); the original is held so that its id is not reused
        self._made: dict[int, tuple[Tensor, Tensor]] = {}
        self._codes: dict[tuple[int, torch.Size], Tensor] = {}  # address and shape of quantized parameters -> fake
        self.experts: dict[int, FakeExperts] = {}  # id of a fake parameter -> what decodes it by groups, as sessions do
        self._wrappers: dict[int, Tensor] = {}  # id -> tensor of another library's class, whose inner tensors are fake

    def of(self, tensor: Tensor) -> Tensor:
        """Return the fake CPU tensor for `tensor`; if `tensor` is such a fake tensor itself, return it unchanged."""
        if (isinstance(tensor, FakeTensor) and tensor.fake_mode is self.mode) or id(tensor) in self._wrappers:
            return tensor
        pair = self._made.get(id(tensor))
        if pair is None:
            self._made[id(tensor)] = pair = (tensor, self._make(tensor))
            if type(tensor) in (Tensor, nn.Parameter, nn.Buffer):
                self.mode.know(pair[1], tensor)
        return pair[1]

    def _make(self, tensor: Tensor) -> Tensor:
        if tensor.layout is not torch.strided:
            raise TraceError(
                f"a tensor of shape {tuple(tensor.shape)} is {tensor.layout}; only dense (strided) tensors can be traced."
            )
        if is_wrapper(tensor):
            return self._wrapped(tensor)
        is_plain = type(tensor) in (Tensor, nn.Parameter)
        codes = self._codes.get((tensor.data_ptr(), tensor.shape)) if self._codes and is_plain else None
        if codes is not None:  # Linear8bitLt has its codes a second time, as the attribute of an object
            with self.mode:
                return codes.detach()
        with torch.device("cpu"), self.mode, self.around():
            fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
            if isinstance(tensor, nn.Parameter):
                parameter = nn.Parameter(fake, requires_grad=tensor.requires_grad)
                if type(tensor).__name__ in QUANTIZED:
                    vars(parameter).update(vars(tensor))
                    self._codes[tensor.data_ptr(), tensor.shape] = fake  # not `parameter`: the layer sets its data
                return parameter
            return fake.requires_grad_(tensor.requires_grad)

    def _wrapped(self, tensor: Any) -> Tensor:
        """Return a torchao tensor of the same class as `tensor` whose inner tensors are fake."""
        names, context = tensor.__tensor_flatten__()
        inner = {name: self.of(getattr(tensor, name)) for name in names}
        made = type(tensor).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
        made = nn.Parameter(made, requires_grad=False) if isinstance(tensor, nn.Parameter) else made
        self._wrappers[id(made)] = made
        return made

    def decode_by_groups(self, model: nn.Module) -> None:
        """Decode the frozen weights of many experts of `model`, which has fake parameters, one group at a time from now on."""
        for module in model.modules():
            for parameter in module._parameters.values():
                if isinstance(parameter, FakeTensor) and is_decoded_by_groups(module, parameter):
                    self.experts[id(parameter)] = FakeExperts(parameter)

    def experts_of(self, argument: Any) -> Any:
        """Return the `ExpertWeights` of a parameter that is decoded by groups; any other argument itself."""
        source = self.experts.get(id(argument))
        if source is None or source.is_whole:
            return argument
        return expert_weights(source, argument.device)

    def batch(self, batch: Any) -> Any:
        """Return `batch` (any nest of containers) with fake tensors in place of its tensors."""
        return tree_map_only(Tensor, self.of, batch)


class FakeExperts:
    """A fake parameter that is decoded one group of experts at a time, until a function needs all of it (`is_whole`)."""

    def __init__(self, parameter: Tensor) -> None:
        self._parameter, self.is_whole, self.version = parameter, False, 0
        self.size, self.dtype, self.device_type = parameter.size(), parameter.dtype, parameter.device.type

    def decode_rows(self, first: int, last: int) -> Tensor:
        """Return new memory for some experts."""
        return torch.empty((last - first, *self.size[1:]), dtype=self.dtype)

    def check_version(self, version: int) -> None:
        """Do nothing: a fake weight is never changed."""

    def ends(self, offsets: Tensor, num_rows: int) -> list[int]:
        """Return the ends of equal numbers of rows."""
        return [num_rows * (expert + 1) // len(offsets) for expert in range(len(offsets))]

    def whole(self, function: str) -> Tensor:
        """Return the parameter, which is decoded as a whole from now on."""
        self.is_whole = True
        return self._parameter


def is_wrapper(tensor: Tensor) -> bool:
    """Return whether a tensor is of a torchao class that wraps inner tensors."""
    return type(tensor).__module__.partition(".")[0] in WRAPPER_LIBRARIES and is_traceable_wrapper_subclass(tensor)


def inner_tensors(tensor: Any) -> dict[str, Tensor]:
    """Return the inner tensors of a torchao tensor by attribute name; {} for other tensors."""
    if not is_wrapper(tensor):
        return {}
    parts = {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}
    return {path: part for name, value in parts.items() for path, part in _flat(name, value)}


def _flat(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    parts = inner_tensors(tensor)
    return [(f"{name}.{path}", part) for path, part in parts.items()] if parts else [(name, tensor)]


def check_model(model: nn.Module) -> None:
    """Raise TraceError if `model` is no module, is wrapped for several processes, or has untraceable tensors."""
    if not isinstance(model, nn.Module):
        raise TraceError(f"the model is a torch.nn.Module, not {type(model).__name__}: trace_step(model, batch, ...).")
    if type(model).__name__ in WRAPPERS:
        raise TraceError(f"the model is wrapped in {type(model).__name__}: trace the module inside, trace_step(model.module, ...).")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        kind = type(tensor)
        if kind in (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer):
            raise TraceError(f"{name!r} has no shape yet: run the model once on a batch, then trace it.")
        if kind.__name__ == "DTensor":
            raise TraceError(
                f"{name!r} is a DTensor: trace the model before fully_shard or distribute_tensor, with one rank's batch."
            )
        is_plain = kind in (Tensor, nn.Parameter, nn.Buffer) or isinstance(tensor, FakeTensor) or is_wrapper(tensor)
        if not is_plain and kind.__name__ not in (PACKED, *QUANTIZED):
            raise TraceError(
                f"{name!r} of {' x '.join(map(str, tensor.shape))} values is a {kind.__name__}, not a plain tensor, and not one of "
                f"bitsandbytes ({', '.join(sorted(QUANTIZED))}) or torchao, and its bytes are not known: trace the model before its "
                "tensors are converted, with frozen='nf4/64@bf16' in the plan for a base of 4.25 bits a value, or 'int8/64@bf16' for 8.25."
            )


@contextmanager
def with_fake_tensors(model: nn.Module, fakes: FakeTensors) -> Generator[None]:
    """Return a context in which `model` has fake parameters and buffers; all its attributes are restored at the end.

    Hooks that paredown put on modules are removed meanwhile, except those that are marked to run in a trace (`is_traced`).
    """
    modules = list(model.modules())
    states = [_state_of(module) for module in modules]
    rng_states = torch.get_rng_state(), random.getstate()
    try:
        for module in modules:
            for tensors in cast("tuple[dict[str, Any], ...]", (module._parameters, module._buffers)):
                tensors.update({name: fakes.of(t) for name, t in tensors.items() if t is not None})
            for hooks in (getattr(module, name) for name in HOOK_TABLES):
                for key in [key for key, hook in hooks.items() if isinstance(hook, Hook) and not hook.is_traced]:
                    del hooks[key]
            module._compiled_call_impl = None  # run the module's own forward, not the compiled one
        yield
    finally:
        for module, state in zip(modules, states, strict=True):
            _restore(module, *state)
        torch.set_rng_state(rng_states[0])
        random.setstate(rng_states[1])


def _state_of(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the attributes of a module, and copies of the attributes that are dicts, lists or sets."""
    attributes = dict(vars(module))
    return attributes, {name: value.copy() for name, value in attributes.items() if isinstance(value, dict | list | set)}


def _restore(module: nn.Module, attributes: dict[str, Any], copies: dict[str, Any]) -> None:
    current = vars(module)
    for name in [name for name in current if name not in attributes]:
        del current[name]
    current.update(attributes)
    for name, copy in copies.items():
        container = attributes[name]
        if isinstance(container, list):
            container[:] = copy
        elif not _same(container, copy):
            container.clear()
            container.update(copy)


def _same(container: Any, copy: Any) -> bool:
    """Return whether `container` (a dict or set) still has the same objects, in the same order, as its earlier copy."""
    if isinstance(container, set):
        return container == copy
    return len(container) == len(copy) and all(a == b and container[a] is copy[b] for a, b in zip(container, copy, strict=True))


@final
class DeviceForms(TorchFunctionMode):
    """A torch function mode in which operations on fake CPU tensors behave as they do on `device`.

    With `in_graph`, torch.compile traces the operations: then they are CUDA's aten operations, not stand-ins, and real tensors are not
    replaced by fake ones.
    """

    def __init__(self, device: str, fakes: FakeTensors, *, in_graph: bool = False) -> None:
        super().__init__()
        self._is_cuda = device == "cuda"
        self._in_graph = in_graph
        self._fakes = fakes
        self._bodies: dict[Any, Callable[..., Any] | None] = {}
        # like autocast's cache: each parameter is cast once a step
        self._casts: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        kwargs = kwargs or {}
        if self._fakes.experts and function_name(func) in BY_GROUPS:
            args = tuple(self._fakes.experts_of(arg) for arg in args)
            types = [type(arg) for arg in args]
        deferred = next((kind for kind in types if getattr(kind, IS_DEFERRED, False) or kind is ExpertWeights), None)
        if deferred is not None:
            with self:
                return deferred.__torch_function__(func, types, args, kwargs)
        if name in ATTRIBUTES:
            return func(*args, **kwargs)
        if func in TO_NUMPY and isinstance(args[0], FakeTensor):
            return self._fakes.mode.array(args[0])
        if isinstance(func, FunctionType) and (func.__module__ in IN_PYTHON or func in BACKWARD):
            body = self._body(func)
            if body is not None:
                with self, autocast_backward() if self._in_graph and func in BACKWARD else nullcontext():
                    return body(*args, **kwargs)
        if not self._in_graph:
            args, kwargs = self._on_fake_cpu_tensors(name, args, kwargs)
        if name in DEVICE_METHODS:
            return args[0]
        if not self._is_cuda:
            return func(*args, **kwargs)
        name = name.strip("_") if name.startswith("__") else name
        args, kwargs = self._autocast(name, args, kwargs)
        form = (GRAPH_FORMS if self._in_graph else FORMS).get(name)
        result = form(*args, **kwargs) if form is not None else NotImplemented
        return func(*args, **kwargs) if result is NotImplemented else result

    def _body(self, func: FunctionType) -> Callable[..., Any] | None:
        """Return a copy of torch's Python function `func` whose inner operations reach this mode too.

        It is None if `func` has no check for tensor overrides (CHECKS), since then its operations reach the mode without a copy.
        """
        if func not in self._bodies:
            checks = [check for check in CHECKS if check in func.__code__.co_names]
            body = None
            if checks:
                names = {**func.__globals__, **dict.fromkeys(checks, lambda *args: False)}
                body = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
                body.__kwdefaults__ = func.__kwdefaults__
            self._bodies[func] = body
        return self._bodies[func]

    def _on_fake_cpu_tensors(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return an operation's arguments with fake tensors instead of real ones, and the CPU as any device."""
        if any(type(arg) is not FakeTensor and isinstance(arg, Tensor | list | tuple) for arg in (*args, *kwargs.values())):
            args, kwargs = tree_map_only(Tensor, self._fakes.of, (args, kwargs))
        if name == "to" or "device" in kwargs:
            args, kwargs = tree_map(_on_cpu, (args, kwargs))
        return args, kwargs

    # --- autocast ---

    def _autocast(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments of the operation `name`, cast as autocast on CUDA would cast them."""
        if not torch.is_autocast_enabled("cuda"):
            return args, kwargs
        if name in BANNED:
            raise TraceError(
                f"torch does not allow {name} under autocast on CUDA: use {name}_with_logits, or disable autocast around it."
            )
        if name in LOWER:
            lower = torch.get_autocast_dtype("cuda")
            return self._cast(args, kwargs, (torch.float32, *HALVES), lower)
        if name in CAST and not (self._in_graph and "upsample" in name):  # torch.compile decomposes these before autocast sees them
            return self._cast(args, kwargs, HALVES, torch.float32)
        if name in PROMOTE and any(isinstance(a, Tensor) and a.dtype is torch.float32 for a in args):
            return self._cast(args, kwargs, HALVES, torch.float32)
        if name in SET_DTYPE and args and isinstance(args[0], Tensor) and args[0].dtype in HALVES and "dtype" not in kwargs:
            return args, {**kwargs, "dtype": torch.float32}
        return args, kwargs

    def _cast(self, args: Any, kwargs: Any, dtypes: tuple[torch.dtype, ...], to: torch.dtype) -> tuple[Any, Any]:
        """Return an operation's arguments with tensors of one of `dtypes` cast to the dtype `to`.

        Casts of parameters are cached, as autocast does.
        """

        def cast(tensor: Tensor) -> Tensor:
            if tensor.dtype not in dtypes or tensor.dtype is to:
                return tensor
            is_parameter = tensor.is_leaf and tensor.requires_grad and tensor.dtype is torch.float32
            if self._in_graph or not (is_parameter and torch.is_autocast_cache_enabled()):
                return tensor.to(to)
            key = (id(tensor), to)
            if key not in self._casts:
                with torch.enable_grad():  # a cast that is cached under no_grad serves operations outside of it too
                    self._casts[key] = (tensor, tensor.to(to))
            return self._casts[key][1]

        return tree_map_only(Tensor, cast, (args, kwargs))

    @contextmanager
    def autocast(self, dtype: torch.dtype | None) -> Generator[None]:
        """Return a context with autocast of the target device in `dtype`; None turns autocast off.

        Cached casts of parameters are freed at its end. Use None around backward, where checkpoints set the autocast state of their forward
        pass themselves.
        """
        if self._is_cuda:
            with cuda_autocast(dtype, self._casts.clear), device_ops.trl_kernels():
                yield
        elif dtype is None and not torch.is_autocast_enabled("cpu"):  # a context would keep casts until its own end
            yield
        else:
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                yield


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if isinstance(value, str):
        with suppress(RuntimeError):
            torch.device(value)
            return "cpu"
    return value


# --- forms on CUDA: they take the operation's arguments and return NotImplemented where the CPU operation is the same ---


class AttentionCall(NamedTuple):
    """The arguments of scaled_dot_product_attention that decide which kernel CUDA runs."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout: float
    is_causal: bool
    scale: float | None
    is_grouped: bool

    @property
    def facts(self) -> tuple[tuple[Any, ...], dict[str, bool]]:
        """Return the (positional, keyword) arguments for functions of `device_ops` about this attention."""
        return (self.query, self.key, self.value, self.mask), {"causal": self.is_causal, "grouped": self.is_grouped}


def _attention(fused: Callable[[AttentionCall], Any]) -> Callable[..., Any]:
    """Return a stand-in for scaled_dot_product_attention: `fused`, or where that returns None, unfused attention."""

    def form(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Any:
        is_grouped = bool(options.get("enable_gqa")) and key.shape[-3] != query.shape[-3]
        result = fused(AttentionCall(query, key, value, attn_mask, dropout_p, is_causal, options.get("scale"), is_grouped))
        if result is not None:
            return result
        unfused = torch.ops.aten._scaled_dot_product_attention_math
        return unfused(query, key, value, attn_mask, dropout_p, is_causal, **options)[0]

    return form


def _described_attention(call: AttentionCall) -> Any:
    tensors, facts = call.facts
    return device_ops.attention(*tensors, **facts)


def _aten_attention(call: AttentionCall) -> Any:
    """Return the output of the aten operation of the fused kernel that CUDA would select; None if there is none."""
    tensors, facts = call.facts
    kernel = device_ops.attention_kernel(*tensors, **facts)
    query, key, value, mask = tensors
    if kernel is device_ops.Flash:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, call.dropout, call.is_causal, False, scale=call.scale)[0]
    if kernel is not device_ops.Efficient:
        return None
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask.logical_not(), float("-inf"))
    bias = None if mask is None else device_ops.bias_of_mask(mask, query, key)
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, bias, True, call.dropout, call.is_causal, scale=call.scale)[0]


def _dropout(input: Tensor, p: float = 0.5, train: bool = True) -> Any:
    return torch.native_dropout(input, p, True)[0] if train and 0 < p < 1 and input.numel() else NotImplemented


def _softmax(node: str) -> Callable[..., Any]:
    def form(input: Tensor, dim: Any = None, dtype: torch.dtype | None = None, **names: Any) -> Any:
        return device_ops.Softmax.apply(input, node) if dtype is torch.float32 and input.dtype is torch.float16 else NotImplemented

    return form


def _cross_entropy(input: Tensor, target: Tensor, weight: Any = None, reduction: int = 1, *rest: Any, **named: Any) -> Any:
    smoothing = named.get("label_smoothing", 0.0) or sum(rest[1:])
    if not (torch.is_autocast_enabled("cuda") and input.dtype in HALVES) or target.is_floating_point() or smoothing:
        return NotImplemented
    # log_softmax gets the input's dtype as an argument, which autocast keeps; nll_loss then casts its result to float32
    logs = torch.ops.aten._log_softmax(input, 1 if input.dim() > 1 else 0, False).float()
    return torch._C._nn.nll_loss_nd(logs, target, weight, reduction, *rest[:1], **named)


def _rms_norm(input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Any:
    return device_ops.RMSNorm.apply(input, weight, len(normalized_shape))


def _recurrent(kind: str) -> Callable[..., Any]:
    def form(x: Tensor, states: Any, *rest: Any) -> Any:
        if isinstance(rest[0], Tensor):  # a packed sequence: (data, batch_sizes, states, weights, ...)
            return NotImplemented
        weights, _, num_layers, _, _, _, batch_first = rest
        state_tensors = states if isinstance(states, tuple | list) else (states,)
        return device_ops.recurrent(kind, x, tuple(state_tensors), list(weights), num_layers, batch_first)

    return form


FORMS: dict[str, Callable[..., Any]] = {
    "scaled_dot_product_attention": _attention(_described_attention),
    "dropout": _dropout,
    "softmax": _softmax("Softmax"),
    "log_softmax": _softmax("LogSoftmax"),
    "cross_entropy_loss": _cross_entropy,
    "rms_norm": _rms_norm,
    **{kind: _recurrent(kind) for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
}
GRAPH_FORMS = {
    "scaled_dot_product_attention": _attention(_aten_attention),
    "dropout": _dropout,
    "cross_entropy_loss": _cross_entropy,
}
