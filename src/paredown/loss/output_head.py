"""`OutputHead` finds the output head of a language model and defers its logits, by a hook (loss/deferred_logits.py).

The hook replaces the input of the head by a `HeadInput`; the unmodified forward of nn.Linear calls `F.linear` with it, which returns
deferred logits. That happens in training mode with gradients enabled; evaluation and generation are not affected.
"""

# pyright: reportPrivateUsage=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.nn.modules import module as hooks
from torch.utils._pytree import tree_map

from paredown.autograd.graph import has_storage
from paredown.autograd.hooks import Hook
from paredown.errors import ApplyError
from paredown.loss.deferred_logits import HeadUse, defer
from paredown.loss.graph_head import rewrite_head
from paredown.loss.held_linear import HeldLinear
from paredown.sizes import say_bytes

CHUNKED_LOSS = True  # whether sessions, traces and tasks compute the loss of an output head in chunks by default
MIN_CLASSES, MIN_RATIO = 8192, 2  # outputs of a head, and outputs per input
ASKED, ALL, UNMODIFIED = "a chunked loss", "all logits", "unmodified"
COMPILED = "torch.compile runs it, and the compiled graph computes all logits; call session.compile() instead"
NOT_IN_GRAPHS = (
    "no graph of torch.compile has it: its weight is no input of them, or they were compiled in eval mode or without gradients"
)
BASE = "base_layer"  # attribute of PEFT's layers
ADAPTED = (
    "an adapter adds to its output that is no LoRA layer of PEFT, or torch.compile runs it: leave it out of the adapter's "
    "target_modules, or train all of it by modules_to_save, which may be in chunks"
)
HOOKED = "a full backward hook reads the gradient of its output"
SHARDED = (
    "fully_shard frees its weight after the forward pass: call paredown.loss.chunked_cross_entropy in the forward of its module"
)
LOSS_SLOTS = (":log_softmax.output", ":nll_loss.input", ":nll_loss.output")  # slots of a model that computes its loss
SUBCLASS = "its class is {}, not nn.Linear: call paredown.loss.chunked_cross_entropy(hidden, weight, target) instead"
NO_HEAD = (
    "no output head was found for {} x {:,} logits ({}): a head is the last nn.Linear with at least 8192 outputs, and twice as many as "
    "inputs, that is not in an nn.ModuleList. Call paredown.loss.chunked_cross_entropy(hidden, weight, target) instead"
)
FUSED = (
    "the model's forward is that of {}, which computes the loss of {:,} classes in chunks without calling it: nothing is left to do"
)
TRANSFORMED = "a transform of torch.func, or forward-mode differentiation, was active"
OTHER_CALL = "its forward called F.linear in another way than nn.Linear does"
NO_LEAF = "its weight was computed by other functions, such as a parametrization or the caller of functional_call"
FUSED_LIBRARIES = {"trl": "TRL", "liger_kernel": "Liger"}  # package of a forward that replaces a model's -> its name


class HeadInput(Tensor):
    """A tensor subclass that replaces the input of the output head, so that its F.linear returns deferred logits.

    All other functions get the hidden states themselves.
    """

    is_deferred = True
    hidden: Tensor
    use: HeadUse
    module: nn.Linear

    @staticmethod
    def __new__(cls: type[HeadInput], hidden: Tensor, use: HeadUse, module: nn.Linear) -> HeadInput:
        """Return a tensor that stands for `hidden`, the input of the output head `module`; `use` counts what happens."""
        made: HeadInput = Tensor._make_wrapper_subclass(cls, (0,), device=hidden.device)  # type: ignore[attr-defined]
        made.hidden, made.use, made.module = hidden, use, module
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0] if args else None
        if func is functional.linear and isinstance(first, HeadInput) and not kwargs:
            bias = args[2] if len(args) > 2 else None
            if args[1] is first.module.weight and bias is first.module.bias:
                return defer(first.use, HeldLinear(first.hidden, args[1], bias))
        if func is functional.linear and isinstance(first, HeadInput):
            first.use.reasons[OTHER_CALL] += 1
        args, kwargs = tree_map(lambda leaf: leaf.hidden if isinstance(leaf, HeadInput) else leaf, (args, kwargs or {}))
        return func(*args, **kwargs)

    __torch_dispatch__ = __torch_function__


class OutputHead:
    """The output head of a language model, with hooks that defer its logits, so that the loss is computed in chunks.

    It is the last nn.Linear with at least 8192 outputs, and at least twice as many as inputs, that is not in an nn.ModuleList (the
    repeated layers) and whose outputs are no other linear layer's inputs. Models without one are left unmodified.
    """

    def __init__(self, model: nn.Module, *, is_on: bool = True, traced_device: str | None = None) -> None:
        self._is_on = is_on
        path, module = find_head(model) if is_on else ("", None)
        self.use = HeadUse(path, traced_device)
        self._module = weakref.ref(module) if module is not None else None
        self._num_classes = module.out_features if module is not None else 0
        self._adapters = [weakref.ref(part) for part in adapters_of(model, path)]
        self._modules = [weakref.ref(part) for part in model.modules()] if module is not None else []
        self.reason = reason_to_leave(model, path, module)
        self._fused_by = library_of_loss(model, path)
        self._hook = Hook(self._enter)
        self._hook.is_traced = traced_device is not None
        self._handles: list[Any] = []
        self._num_compiled = 0  # number of compiled graphs

    @property
    def is_found(self) -> bool:
        """Whether the model has an output head, as this class defines it."""
        return self._module is not None

    @property
    def slots(self) -> frozenset[str]:
        """The names of those tensors that autograd saves in the unmodified model, and a loss in chunks does not."""
        return frozenset((f"{self.use.path}:input", *LOSS_SLOTS)) if self.use.num_deferred else frozenset()

    def attach(self) -> None:
        """Register the hooks that defer the logits, unless `reason` says why they must not be deferred."""
        module = self._module() if self._module is not None else None
        if module is not None and not self.reason:
            adapters = [part for ref in self._adapters if (part := ref()) is not None]
            self._handles = [part.register_forward_pre_hook(self._hook) for part in (module, *adapters)]

    def detach(self) -> None:
        """Remove the hooks, so that the head computes all logits."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def in_graph(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[Any, Sequence[Any]], Any] | None:
        """Rewrite a graph of Dynamo so that the head's loss is computed in chunks; return a function that restores outputs.

        The function makes a call's outputs from the graph's results and inputs; None if the outputs are unmodified.
        """
        module = self._module() if self._module is not None else None
        if self._adapters:
            self.reason = ADAPTED
        if module is None or self.reason or self._is_sharded():
            return None
        self._num_compiled += 1
        return rewrite_head(gm, inputs, module, self.use)

    def reason_missing(self, shape: Sequence[int], nbytes: int) -> str:
        """Return a sentence which says that no output head was found, though logits of this shape need one; "" otherwise.

        Logits with few classes need none: chunks would not pay off. `nbytes`: the bytes of the logits.
        """
        classes = shape[:2][-1] if shape else 0  # a cross entropy takes (rows, classes, ...) or (classes,)
        if not self._is_on or self.is_found or classes < MIN_CLASSES:
            return ""
        return NO_HEAD.format(f"{math.prod(shape) // classes:,}", classes, say_bytes(nbytes))

    def rows(self, losses: Mapping[str, tuple[Sequence[int], int]] | None = None) -> Iterator[tuple[str, str, str, str]]:
        """Yield a row (path, asked, given, reason) for `session.changes` for each reason why logits were not deferred.

        `losses`: shapes and bytes of the tensors that cross entropies inside of the model saved, by name.
        """
        for slot, (shape, nbytes) in (losses or {}).items():
            if missing := self.reason_missing(shape, nbytes):
                yield slot, ASKED, ALL, missing
                return
        is_absent = self._num_compiled > 0 and not self.use.num_graphs
        reason = COMPILED if self._hook.was_compiled else NOT_IN_GRAPHS if is_absent else self.reason
        if self._fused_by and not self.use.num_deferred and not self._hook.was_compiled and not self.reason:
            reason = FUSED.format(self._fused_by, self._num_classes)
        if reason and self.is_found:
            yield self.use.path, ASKED, UNMODIFIED, reason
        read = [f"{', '.join(self.use.requests)} read them"] if self.use.requests else []
        if read or self.use.reasons:
            yield self.use.path, ASKED, ALL, "; ".join([*self.use.reasons, *read])

    def _enter(self, module: nn.Linear, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not (module.training and torch.is_grad_enabled()) or bool(torch._C._get_tracing_state()) or len(args) != 1:
            return None
        if any(
            (module._backward_hooks, module._backward_pre_hooks, hooks._global_backward_hooks, hooks._global_backward_pre_hooks)
        ):
            self.reason = HOOKED
            return None
        hidden = args[0]
        if not isinstance(hidden, Tensor) or not has_storage(hidden):
            return None
        is_transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
        if is_transformed or not module.weight.is_leaf:
            self.use.reasons[TRANSFORMED if is_transformed else NO_LEAF] += 1
            return None
        if hidden.dim() < 1 or not hidden.is_floating_point() or not (hidden.requires_grad or module.weight.requires_grad):
            return None
        return (HeadInput(hidden, self.use, module),) if not self._is_sharded() else None

    def _is_sharded(self) -> bool:
        parts = [part for ref in self._modules if (part := ref()) is not None]
        if any(hasattr(type(part), "reshard") or hasattr(part, "_fsdp_wrapped_module") for part in parts):
            self.reason = SHARDED
        return self.reason == SHARDED


def find_head(model: nn.Module) -> tuple[str, nn.Linear | None]:
    """Return the path and module of a model's output head, as `OutputHead` defines it; ("", None) if it has none."""
    linears = [(path, part) for path, part in model.named_modules() if isinstance(part, nn.Linear) and path]
    widths = {part.in_features for _, part in linears}
    repeated = [f"{path}." for path, part in model.named_modules() if isinstance(part, nn.ModuleList)]
    found = [
        (path, part)
        for path, part in linears
        if part.out_features >= max(MIN_CLASSES, MIN_RATIO * part.in_features)
        and part.out_features not in widths
        and not path.startswith(tuple(repeated))
    ]
    bases = [(path, part) for path, part in found if path.endswith(f".{BASE}")]  # of an adapted head, whose adapters are as large
    return (bases or found or [("", None)])[-1]


def adapters_of(model: nn.Module, path: str) -> list[nn.Linear]:
    """Return the `lora_B` layers of LoRA adapters on the linear layer at `path`; [] if it has none, or others."""
    parent = model.get_submodule(path.rpartition(".")[0]) if path.endswith(f".{BASE}") else None
    layers: Any = getattr(parent, "lora_B", ())
    layers = list(layers.values()) if isinstance(layers, nn.ModuleDict) else [layers] if isinstance(layers, nn.Linear) else []
    return layers if all(type(layer) is nn.Linear and "bias" not in dict(layer.named_parameters()) for layer in layers) else []


def reason_to_leave(model: nn.Module, path: str, module: nn.Linear | None) -> str:
    """Return why the logits of the output head `module` must not be deferred; "" if they can be, or `module` is None."""
    if module is None:
        return ""
    ancestors = [path.rsplit(".", count)[0] for count in range(1, path.count(".") + 1)]
    if any(hasattr(model.get_submodule(ancestor), BASE) for ancestor in ancestors) and not adapters_of(model, path):
        return ADAPTED
    return "" if type(module) is nn.Linear else SUBCLASS.format(type(module).__name__)


def library_of_loss(model: nn.Module, path: str) -> str:
    """Return the name of a library (such as Liger) that has replaced the forward to fuse head and loss; "" if none has."""
    ancestors = [model.get_submodule(path.rsplit(".", count)[0]) for count in range(1, path.count(".") + 1)] if path else []
    for module in (model, *ancestors):
        function: Any = getattr(module.forward, "__func__", module.forward)
        while function is not None:  # decorators name the function that they wrap
            package = getattr(function, "__globals__", {}).get("__name__", "").partition(".")[0]
            if package in FUSED_LIBRARIES:
                return FUSED_LIBRARIES[package]
            function = getattr(function, "__wrapped__", None)
    return ""


@contextmanager
def chunked_loss(model: nn.Module, *, traced_device: str | None = None) -> Generator[OutputHead]:
    """Return a context in which the loss of a model without a session is computed in chunks, to save memory.

    `traced_device`: the device of `trace_step`, such as "cuda", if the model is traced inside the context.
    """
    head = OutputHead(model, traced_device=traced_device)
    if not head.is_found:
        raise ApplyError(
            f"{type(model).__name__} has no output head: an nn.Linear with at least {MIN_CLASSES} outputs and {MIN_RATIO} times as many as "
            "inputs, outside of repeated layers. Use paredown.loss.chunked_cross_entropy(hidden, weight, target) instead."
        )
    head.attach()
    try:
        yield head
    finally:
        head.detach()
