"""Decodes frozen packed weights of linear layers inside the graphs of `session.compile()`, where they are multiplied.

    forward    y      = x decode(codes)^T + bias
    backward   grad_x = grad decode(codes)

Both are operations of torch (`paredown::frozen_linear`, `paredown::frozen_linear_input`) whose inputs are the codes and scales. A graph
saves nothing for them, and the decoded weight lives as long as the product, as in eager mode (`FrozenLinear`, optim/packed_parameter.py).
Dynamo, which traces the model, skips the code of `PackedParameter`: without these operations each weight would have to be decoded before.

A layer is chosen if it is an unmodified nn.Linear with a frozen weight and bias, its weight is in no other module, and it is neither a
router of experts, which stays exact, nor the output head, whose loss may be computed in chunks. Its `forward` is replaced while the
session is open.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections import Counter
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.distributed.tensor import DTensor
from torch.nn import functional

from paredown.autograd.checkpoints import router_weights
from paredown.codec.packed import PackedTensor
from paredown.codec.reference import PackedParts
from paredown.errors import ApplyError
from paredown.formats.format import Format
from paredown.optim.packed_weight import Weight, weight_of
from paredown.session.weights.saved_weights import is_frozen_linear

WEIGHT, KIND = "_paredown_weight", "_paredown_kind"  # attributes of a module whose forward is replaced
TRAINED = (
    "{} was frozen when session.compile() was called, and requires gradients now: its compiled graphs compute none. Call session.close(), "
    "apply the plan to the model as it is now, and compile again."
)

_LIBRARY = torch.library.Library("paredown", "FRAGMENT")
_LIBRARY.define("frozen_linear(Tensor x, Tensor[] parts, str format, int[] size, Tensor? bias) -> Tensor")
_LIBRARY.define("frozen_linear_input(Tensor grad, Tensor[] parts, str format, int[] size) -> Tensor")


def frozen_linear(x: Tensor, parts: list[Tensor], format: str, size: list[int], bias: Tensor | None) -> Tensor:
    """Return F.linear of `x` with the weight of `size` that `parts` store in `format`, decoded in the dtype of `x`."""
    return functional.linear(x, _decoded(parts, format, size, x.dtype), bias)


def frozen_linear_input(grad: Tensor, parts: list[Tensor], format: str, size: list[int]) -> Tensor:
    """Return the gradient of the input of `frozen_linear`, given the gradient of its output."""
    return grad @ _decoded(parts, format, size, grad.dtype)


def _decoded(parts: list[Tensor], format: str, size: list[int], dtype: torch.dtype) -> Tensor:
    how, given = Format.parse(format), iter(parts)
    codes, scales = next(given), next(given) if how.scale is not None else None
    minimums = next(given) if how.minimum is not None else None
    return PackedTensor(how, torch.Size(size), dtype, (0, 1), PackedParts(codes, scales, minimums, next(given, None))).decode(dtype)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, parts, ctx.format, ctx.size, _ = inputs
    ctx.save_for_backward(*parts)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    parts = list(ctx.saved_tensors)
    return torch.ops.paredown.frozen_linear_input(grad, parts, ctx.format, ctx.size), [None] * len(parts), None, None, None


for _name, _function, _side in (("frozen_linear", frozen_linear, 0), ("frozen_linear_input", frozen_linear_input, 1)):
    for _device in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _disable_dynamo(_function), _device)  # it would trace the codec where a graph breaks
    torch.library.register_fake(
        f"paredown::{_name}",
        lambda x, _parts, _format, size, *_, side=_side: x.new_empty((*x.shape[:-1], size[side])),
        lib=_LIBRARY,
    )
torch.library.register_autograd("paredown::frozen_linear", _backward, setup_context=_setup, lib=_LIBRARY)


class GraphLinears:
    """Chooses the linear layers whose frozen packed weights compiled graphs decode, and replaces their forward."""

    def __init__(self, model: nn.Module, head: nn.Module | None, packed_before: frozenset[str] = frozenset()) -> None:
        """Choose frozen linear layers, except the output `head`; `packed_before`: names of weights packed before `apply`."""
        self.packed_before = packed_before
        routers = {id(parameter) for parameter in router_weights(model).values()}
        uses = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
        self._modules = {
            name: module
            for name, module in model.named_modules()
            if module is not head
            and is_frozen_linear(module)
            and uses[id(module.weight)] == 1
            and not isinstance(module.weight, DTensor)
            and id(module.weight) not in routers
        }
        self._attached: dict[str, tuple[nn.Module, Weight]] = {}

    @property
    def names(self) -> set[str]:
        """Return the names of the parameters that may stay packed in compiled graphs."""
        return {f"{name}.weight" if name else "weight" for name in self._modules}

    @property
    def weights(self) -> set[int]:
        """Return the ids of the parameters that may stay packed in compiled graphs."""
        return {id(module.weight) for module in self._modules.values()}

    def attach(self) -> None:
        """Replace the forward of the chosen linear layers whose weights are packed."""
        for name, module in self._modules.items():
            weight = weight_of(module.get_parameter("weight"))
            if weight is not None:
                self._attached[name], weight.in_graphs = (module, weight), True
                kind = str(weight.format), list(weight.size), weight.dtype, weight.device_type
                vars(module).update({WEIGHT: weight, KIND: kind, "forward": MethodType(_forward, module)})
                for part in weight.packed.parts.tensors():
                    torch._dynamo.mark_static_address(part)

    def detach(self) -> None:
        """Restore the original forward of the layers."""
        for module, weight in self._attached.values():
            weight.in_graphs = False
            for name in (WEIGHT, KIND, "forward"):
                vars(module).pop(name, None)
        self._attached.clear()

    def check(self) -> None:
        """Raise ApplyError if a parameter of these layers requires a gradient, which compiled graphs do not compute."""
        with torch._C.DisableTorchFunctionSubclass():
            for name, (module, _) in self._attached.items():
                if any(p is not None and p.requires_grad for p in module._parameters.values()):
                    raise ApplyError(TRAINED.format(f"layer {name!r}"))


def _forward(self: Any, x: Tensor) -> Tensor:
    """Return the output of a linear layer with a packed weight, as a replacement of forward that Dynamo can trace."""
    weight: Weight | None = self._paredown_weight
    if weight is None:  # in a copy of the module, whose parameters are not packed
        return functional.linear(x, self.weight, self.bias)
    format, size, dtype, device = self._paredown_kind
    bias = self.bias
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
    elif x.dtype is not dtype:
        return functional.linear(x, x.new_empty(size, dtype=dtype), bias)  # raises torch's error about dtypes
    return torch.ops.paredown.frozen_linear(x, weight.packed.parts.tensors(), format, size, bias)
