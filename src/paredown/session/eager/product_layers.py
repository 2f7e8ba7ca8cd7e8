"""`ProductLayers`: the linear layers of a model that multiply 8-bit codes (codec/products.py), as a plan requests.

In eager mode a hook on such a layer replaces its input by a `ProductInput`; the unmodified forward of nn.Linear calls `F.linear` with it,
which multiplies codes. Compiled sessions replace `F.linear` in their graphs (session/compiled/graph_products.py).

What is not multiplied in 8 bits, although a rule matches it, is a row of `session.changes`. A rule with the path of a layer beats the
reasons that are about speed alone: narrow layers, few rows, the output head.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional

from paredown.autograd.graph import has_storage
from paredown.autograd.hooks import Hook
from paredown.codec.products import DTYPES, MULTIPLE, SharedCodes, reason_without, row_linear
from paredown.errors import ApplyError, PlanError
from paredown.loss.output_head import find_head
from paredown.optim.packed_weight import weight_of
from paredown.plan.plan import Plan
from paredown.plan.product_rules import AUTO, PRODUCT
from paredown.plan.selectors import closest
from paredown.session.changes import UNMODIFIED, Change, SlotExplanation

# Steps of Llama-like networks of width 2048 and 4096 take 0.93x and 0.78x of plain torch.compile's time, those of a DiT-XL (1152) 2.7x
# (its kernels 1.34x): casts cost in proportion to widths, products to their squares (one H200, 8192 rows, results/products.json).
MIN_WIDTH = 2048  # inputs and outputs of a layer
MIN_ROWS = 4096  # of its input; fewer than 8192 were not measured in steps
NARROW = f"it has fewer than {MIN_WIDTH} inputs or outputs: casts would take longer than its products gain"
FEW_ROWS = f"its input had fewer than {MIN_ROWS} rows in some calls, which are quicker in the model's dtype"
HEAD = "it is the output head or shares its weight with an embedding: rounding logits is rarely worth its time"
SIZES = f"its {{}} x {{}} values are no multiples of {MULTIPLE}"
SUBCLASS = "its class is {}, not nn.Linear, or its forward was replaced"
ATTENTION = "nn.MultiheadAttention multiplies in a function of torch, without its layers"
DTYPE = "its values are {}, not float32, bfloat16 or float16"
PACKED = "its weight is stored packed: it is decoded, and multiplied in the model's dtype"
TRANSFORMED = "a transform of torch.func, or forward-mode differentiation, was active"
SUBCLASSED = "its input or weight was of type {}"
COMPILED = "torch.compile runs it: call session.compile() instead"
NOT_IN_GRAPHS = "no compiled graph has it with its own weight"
NONE_FOUND = "the model has no linear layers"
MULTIPLIED = "forward changes: it multiplies 8-bit codes of input, weight and gradient, with a scale for each row"


class ProductInput:
    """Stands for the input of a linear layer, so that `F.linear` multiplies 8-bit codes of it."""

    __slots__ = ("layers", "path", "tensor")

    def __init__(self, tensor: Tensor, layers: ProductLayers, path: str) -> None:
        self.tensor, self.layers, self.path = tensor, layers, path

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operands: tuple[Any, ...] = (*args, None)
        x, weight, bias = operands[:3]
        if func is functional.linear and isinstance(x, ProductInput) and not kwargs:
            return x.layers.linear(x.path, x.tensor, weight, bias)
        args = tuple(arg.tensor if isinstance(arg, ProductInput) else arg for arg in args)
        return func(*args, **kwargs or {})


class ProductLayers:
    """Makes linear layers multiply 8-bit codes of input and weight, as the plan requests, and records why others do not."""

    def __init__(self, plan: Plan, model: nn.Module) -> None:
        self.elements: dict[str, str] = {}
        self.left: dict[str, tuple[str, str]] = {}  # path -> element that the plan requests, and why it is not used
        self.in_graphs: set[str] | None = None  # layers that compiled graphs have; None before the first graph
        self._named = {path for path, _ in model.named_modules() if plan.product_of(path)[1]}
        self._layers: dict[str, weakref.ref[nn.Module]] = {}
        self._hooks: dict[str, Hook] = {}
        self._handles: list[Any] = []
        self._shared = SharedCodes()
        self._asked = [f"{key}: {element}" for key, element in plan.products if element is not None]
        if plan.multiplies:
            _check_rules(plan, model)
            self._choose(plan, model)

    def _choose(self, plan: Plan, model: nn.Module) -> None:
        heads = {find_head(model)[1], *_tied_to_embeddings(model)}
        for path, module in model.named_modules(remove_duplicate=False):
            asked, is_named = plan.product_of(path)
            if asked is None or not isinstance(module, nn.Linear | nn.MultiheadAttention):
                continue
            device = next((p.device for p in module.parameters()), torch.device("cpu"))
            element = _resolved(asked, device)
            reason = _reason_to_leave(module, by_speed=not is_named, is_head=module in heads)
            if reason:
                self.left[path] = element, reason
                continue
            if lacking := reason_without(element, device):
                raise ApplyError(f"layer {path!r}: {lacking}")
            self.elements[path], self._layers[path] = element, weakref.ref(module)

    # --- eager ---

    def attach(self) -> None:
        """Register the hooks that make the layers multiply codes."""
        for path, ref in self._layers.items():
            if (module := ref()) is not None:
                self._hooks[path] = hook = Hook(_Enter(self, path))
                self._handles.append(module.register_forward_pre_hook(hook))

    def detach(self) -> None:
        """Remove the hooks, so that layers multiply in the model's dtype."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @contextmanager
    def paused(self) -> Generator[None]:
        """Return a context in which layers multiply in the model's dtype."""
        was_attached = bool(self._handles)
        self.detach()
        try:
            yield
        finally:
            if was_attached:
                self.attach()

    def linear(self, path: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output of the layer at `path`, as a product of codes if the operands allow it."""
        reason = self.reason_at_call(path, x, weight)
        if reason:
            self.left[path] = self.elements[path], reason
            return functional.linear(x, weight, bias)
        if lacking := reason_without(self.elements[path], x.device):
            raise ApplyError(f"layer {path!r}: {lacking}")
        return row_linear(x, weight, bias, self.elements[path], self._shared)

    def reason_at_call(self, path: str, x: Tensor, weight: Tensor) -> str:
        """Return why this call of a layer does not multiply codes; "" if it does."""
        rows = x.numel() // max(1, x.shape[-1])
        if rows == 0 or (rows < MIN_ROWS and path not in self._named):
            return FEW_ROWS
        if weight_of(weight) is not None:
            return PACKED
        if not (has_storage(x) and has_storage(weight)):
            return SUBCLASSED.format(f"{type(x).__name__} and {type(weight).__name__}")
        if x.dtype not in DTYPES or weight.dtype not in DTYPES:
            return DTYPE.format(f"{x.dtype} and {weight.dtype}".replace("torch.", ""))
        is_transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
        return TRANSFORMED if is_transformed else ""

    # --- what happened ---

    @property
    def multiplied(self) -> dict[str, str]:
        """Return {path: type of the codes, such as "int8"} of the layers that have multiplied codes in all their calls."""
        unused = self._unused()
        return {path: element for path, element in self.elements.items() if path not in self.left and path not in unused}

    def _unused(self) -> dict[str, str]:
        """Return {path: reason} of the layers that should multiply codes, but that no hook and no compiled graph changed."""
        if self.in_graphs is not None:
            return dict.fromkeys(self.elements.keys() - self.in_graphs - self.left.keys(), NOT_IN_GRAPHS)
        return {path: COMPILED for path, hook in self._hooks.items() if hook.was_compiled}

    def changes(self) -> Iterator[Change]:
        """Yield a `Change` for the layers that multiply each type of codes, and for each layer that should and does not."""
        multiplied = self.multiplied
        for element in dict.fromkeys(multiplied.values()):
            paths = [path for path, of in multiplied.items() if of == element]
            text = f"{PRODUCT} in {element}"
            which = f"{paths[0]} and {len(paths) - 1} other linear layers" if len(paths) > 1 else paths[0]
            yield Change(which, text, text, MULTIPLIED)
        left = {**self.left, **{path: (self.elements[path], reason) for path, reason in sorted(self._unused().items())}}
        for path, (element, reason) in left.items():
            yield Change(f"{PRODUCT}={path}", element, UNMODIFIED, reason)
        if self._asked and not self.elements and not self.left:
            yield Change(PRODUCT, "; ".join(self._asked), "nothing", NONE_FOUND)

    def explain(self) -> list[SlotExplanation]:
        """Return a row of `session.explain()` for each layer that multiplies 8-bit codes."""
        return [SlotExplanation(f"{PRODUCT}={path}", of, of, MULTIPLIED) for path, of in self.multiplied.items()]

    def say(self) -> str:
        """Return the summary's text on layers that multiply 8-bit codes; "" if the plan has no rules for products."""
        multiplied = self.multiplied
        if not self._asked:
            return ""
        which = ", ".join(dict.fromkeys(multiplied.values())) or "8 bits"
        return f", {len(multiplied)} of {len({*self.elements, *self.left})} linear layers multiply in {which}"


class _Enter:
    """Replaces the input of one layer by a `ProductInput`, as its forward pre-hook."""

    def __init__(self, layers: ProductLayers, path: str) -> None:
        self._layers, self._path = layers, path

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        is_call = len(args) == 1 and isinstance(args[0], Tensor) and args[0].dim() > 0
        return (ProductInput(args[0], self._layers, self._path),) if is_call else None


def _resolved(element: str, device: torch.device) -> str:
    if element != AUTO:
        return element
    return "int8" if reason_without("e4m3fn", device) and not reason_without("int8", device) else "e4m3fn"


def _reason_to_leave(module: nn.Module, *, by_speed: bool, is_head: bool) -> str:
    """Return the reason why a linear layer must not multiply codes; "" if it may.

    `by_speed`: whether reasons of speed alone count too. `is_head`: whether the layer is the output head.
    """
    if isinstance(module, nn.MultiheadAttention):
        return ATTENTION
    assert isinstance(module, nn.Linear)
    if type(module) is not nn.Linear or "forward" in vars(module):
        return SUBCLASS.format(type(module).__name__)
    if module.in_features % MULTIPLE or module.out_features % MULTIPLE:
        return SIZES.format(module.out_features, module.in_features)
    if module.weight.dtype not in DTYPES:
        return DTYPE.format(str(module.weight.dtype).removeprefix("torch."))
    if by_speed and is_head:
        return HEAD
    return NARROW if by_speed and min(module.in_features, module.out_features) < MIN_WIDTH else ""


def _tied_to_embeddings(model: nn.Module) -> Iterator[nn.Module]:
    embedded = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    yield from (module for module in model.modules() if isinstance(module, nn.Linear) and id(module.weight) in embedded)


def _check_rules(plan: Plan, model: nn.Module) -> None:
    """Raise PlanError if a rule of `plan` for products has a path or pattern that matches no linear layer."""
    paths = [path for path, module in model.named_modules() if isinstance(module, nn.Linear | nn.MultiheadAttention)]
    for key, element in plan.products:
        text = key.partition("=")[2]
        if text and not any(Plan(products=((key, element or AUTO),)).product_of(path)[0] for path in paths):
            raise PlanError(
                f"rule {key!r} matches no linear layer. Closest of {len(paths)}: {closest(text, paths) or 'none'}. Correct it, or leave it "
                f"out with plan.without({key!r})."
            )
