"""LoRA adapters as PEFT adds them to linear layers and to experts: y = base(x) + B(A(x)) * scale, with a frozen base.

`add_lora` is for predictions of memory and for examples: adapters on the meta device need no memory. Models of PEFT do not need it.

>>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
>>> add_lora(model, rank=2, targets=("0",))
['0']
>>> [name for name, p in model.named_parameters() if p.requires_grad]
['0.lora_A.weight', '0.lora_B.weight']

Experts whose weights are one parameter of (experts, outputs, inputs) have one A and one B for all of them. Nothing but the weight is
visible from outside of such a module, so its forward reads W + B A * scale, which exists while it runs and is saved for backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

ALPHA = 2.0  # scale of an adapter; predictions do not depend on it
TRANSPOSED = "Conv1D"  # the linear layer of GPT-2 in transformers, whose weight is (inputs, outputs)
ROUTER = "Router"  # the end of the names of routers' classes in transformers, which use their weight as linear layers do
EXPERTS_NDIM, ROUTER_NDIM = 3, 2
FUSED = "gate_up_proj"  # two linear layers in one parameter: PEFT gives it twice the rank
SHOWN = 6  # names of layers that an error lists


class LoraLinear(nn.Module):
    """A frozen linear layer with a LoRA adapter: it returns base(x) + B(A(x)) * scale."""

    def __init__(self, base: nn.Module, rank: int) -> None:
        super().__init__()
        weight: Any = base.weight
        outputs, inputs = reversed(weight.shape) if type(base).__name__ == TRANSPOSED else weight.shape
        self.base_layer = base
        self.lora_A, self.lora_B = _adapter(weight, inputs, rank, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the frozen layer plus the scaled output of the adapter."""
        return self.base_layer(x) + self.lora_B(self.lora_A(x)) * ALPHA


class LoraParameter(nn.Module):
    """A frozen module that computes with W + B A * scale in place of W, its parameter of name `name`."""

    def __init__(self, base: nn.Module, name: str, rank: int) -> None:
        super().__init__()
        weight: Any = getattr(_owner(base), name)
        *experts, outputs, inputs = weight.shape
        self.base_layer, self.name, self.num = base, name, experts[0] if experts else 1
        self.lora_A, self.lora_B = _adapter(weight, inputs, rank * self.num * (2 if name == FUSED else 1), outputs)

    def forward(self, *args: Any, **keywords: Any) -> Any:
        """Return the output of the frozen module, computed with W + B A * scale in place of W."""
        owner = _owner(self.base_layer)
        weight = owner._parameters.pop(self.name)
        assert weight is not None
        try:
            setattr(owner, self.name, self._with_adapter(weight))
            return self.base_layer(*args, **keywords)
        finally:
            delattr(owner, self.name)
            owner.register_parameter(self.name, weight)

    def _with_adapter(self, weight: Tensor) -> Tensor:
        a = self.lora_A.weight.unflatten(0, (self.num, -1))  # (experts, rank, inputs)
        b = self.lora_B.weight.unflatten(1, (-1, self.num)).permute(2, 0, 1)  # (experts, outputs, rank)
        return torch.baddbmm(weight.view(self.num, *weight.shape[-2:]), b, a, alpha=ALPHA).view(weight.shape)


def _adapter(weight: Tensor, inputs: int, rank: int, outputs: int) -> tuple[nn.Linear, nn.Linear]:
    """Return the layers A and B of an adapter for `weight`; B is zero, so that the adapted model first computes the same."""
    where: Any = {"device": weight.device, "dtype": weight.dtype}
    a, b = nn.Linear(inputs, rank, bias=False, **where), nn.Linear(rank, outputs, bias=False, **where)
    nn.init.zeros_(b.weight)
    return a, b


def _owner(module: nn.Module) -> Any:
    """Return the module that has the adapted parameter: `module` itself, or the module inside of its adapters."""
    while isinstance(module, LoraParameter):
        module = module.base_layer
    return module


def add_lora(model: nn.Module, rank: int, targets: Sequence[str] = ()) -> list[str]:
    """Freeze `model`, add adapters to its linear layers, experts and routers; return the paths of those that got one.

    `targets`: patterns of paths, or last parts of paths as in PEFT (q_proj, to_out.0). Without targets, all but the head get one.
    """
    linear = [path for path, layer in model.named_modules() if type(layer) is nn.Linear or type(layer).__name__ == TRANSPOSED]
    weights = {**dict.fromkeys(linear), **_parameters(model)}
    chosen = [path for path in weights if _is_target(path, targets)] if targets else _without_head(model, list(weights))
    missed = [target for target in targets if not any(_is_target(path, [target]) for path in weights)]
    if not chosen or missed:
        names = ", ".join(list(dict.fromkeys(path.rpartition(".")[2] for path in weights))[:SHOWN])
        unmatched = f"{', '.join(missed)} matches none of {len(weights)}, which are named {names}. Name some of these."
        reason = unmatched if targets else "it has none, and LoRA needs nn.Linear."
        raise ValueError(f"no linear layer of {type(model).__name__} can have an adapter: {reason}")
    model.requires_grad_(False)
    for path in chosen:
        name = weights[path]
        layer = path if name is None else path.removesuffix(f".{name}")
        base = model.get_submodule(layer)
        model.set_submodule(layer, LoraLinear(base, rank) if name is None else LoraParameter(base, name, rank))
    return chosen


def _parameters(model: nn.Module) -> dict[str, str]:
    """Return path and name of each parameter that gets an adapter: weights of experts, and of the routers beside them.

    Experts of (experts, inputs, outputs), which transformers marks as transposed, have no adapters: PEFT leaves them alone, too.
    """
    experts: dict[str, str] = {}
    routers: dict[str, str] = {}
    for path, module in model.named_modules():
        if not path or type(module).__module__.startswith("torch.") or getattr(module, "is_transposed", False):
            continue
        weights = {name: weight.ndim for name, weight in module.named_parameters(recurse=False) if weight.is_floating_point()}
        experts |= {f"{path}.{name}": name for name, ndim in weights.items() if ndim == EXPERTS_NDIM}
        if type(module).__name__.endswith(ROUTER) and weights.get("weight") == ROUTER_NDIM:
            routers[f"{path}.weight"] = "weight"
    return {**experts, **routers} if experts else {}


def _is_target(path: str, targets: Sequence[str]) -> bool:
    return any(fnmatchcase(path, target) or path.endswith(f".{target}") for target in targets)


def _without_head(model: nn.Module, paths: list[str]) -> list[str]:
    """Return `paths` without that of the output head, which a Hugging Face model names; else the last outside ModuleLists."""
    find: Any = getattr(model, "get_output_embeddings", lambda: None)
    head = find()
    outside = [path for path in paths if not any(part.isdigit() for part in path.split("."))]
    last = outside[-1] if head is None and 0 < len(outside) < len(paths) else None
    heads = {path for path, module in model.named_modules() if module is head}
    return [path for path in paths if path not in heads and path != last]
