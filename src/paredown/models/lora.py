"""LoRA adapters on the linear layers of a model, as PEFT adds them: y = base(x) + B(A(x)) * scale, with a frozen base.

`add_lora` is for predictions and examples: adapters on the meta device need no memory. PEFT's own models need none of this.

>>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
>>> add_lora(model, rank=2, targets=("0",))
['0']
>>> [name for name, p in model.named_parameters() if p.requires_grad]
['0.lora_A.weight', '0.lora_B.weight']
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

ALPHA = 2.0  # scale of an adapter; predictions do not depend on it
TRANSPOSED = "Conv1D"  # the linear layer of GPT-2 in transformers, whose weight is (inputs, outputs)
SHOWN = 6  # names of layers in an error


class LoraLinear(nn.Module):
    """A frozen linear layer with an adapter of low rank."""

    def __init__(self, base: nn.Module, rank: int) -> None:
        super().__init__()
        weight: Any = base.weight
        outputs, inputs = reversed(weight.shape) if type(base).__name__ == TRANSPOSED else weight.shape
        where = {"device": weight.device, "dtype": weight.dtype}
        self.base_layer = base
        self.lora_A = nn.Linear(inputs, rank, bias=False, **where)
        self.lora_B = nn.Linear(rank, outputs, bias=False, **where)
        nn.init.zeros_(self.lora_B.weight)  # the adapted model starts as its base

    def forward(self, x: Tensor) -> Tensor:
        """The output of the base and of the adapter, added."""
        return self.base_layer(x) + self.lora_B(self.lora_A(x)) * ALPHA


def add_lora(model: nn.Module, rank: int, targets: Sequence[str] = ()) -> list[str]:
    """Freeze `model`, and give its linear layers adapters; returns their paths.

    `targets`: patterns of paths, or last parts of paths as in PEFT (q_proj). Without any, all linear layers but the output head.
    """
    layers = {path: module for path, module in model.named_modules() if _is_linear(module)}
    chosen = [path for path in layers if _is_target(path, targets)] if targets else _without_head(model, layers)
    missed = [target for target in targets if not any(_is_target(path, [target]) for path in layers)]
    if not chosen or missed:
        names = ", ".join(list(dict.fromkeys(path.rpartition(".")[2] for path in layers))[:SHOWN])
        unmatched = f"{', '.join(missed)} matches none of {len(layers)}, which are named {names}. Name some of these."
        reason = unmatched if targets else "it has none, and LoRA needs nn.Linear."
        raise ValueError(f"no linear layer of {type(model).__name__} can have an adapter: {reason}")
    model.requires_grad_(False)
    for path in chosen:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, LoraLinear(layers[path], rank))
    return chosen


def _is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear or type(module).__name__ == TRANSPOSED


def _is_target(path: str, targets: Sequence[str]) -> bool:
    return any(fnmatchcase(path, target) or path.rpartition(".")[2] == target for target in targets)


def _without_head(model: nn.Module, layers: dict[str, nn.Module]) -> list[str]:
    """The paths of all layers but the output head: the one that a Hugging Face model returns, else the last one outside of lists."""
    find: Any = getattr(model, "get_output_embeddings", lambda: None)
    head = find()
    outside = [path for path in layers if not any(part.isdigit() for part in path.split("."))]
    last = outside[-1] if head is None and 0 < len(outside) < len(layers) else None
    return [path for path, module in layers.items() if module is not head and path != last]
