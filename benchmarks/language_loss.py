"""The job `loss` of bench_language.py: a linear layer and cross entropy alone, ours and Liger's.

Forward and backward of 16,384 tokens x 128,256 classes x 4096 values in bfloat16. Peak: the most allocated during one call, without the
hidden states, the weight and the target, which exist before it; the gradients of both are included.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from measure import time_call
from torch import Tensor, nn
from torch.nn import functional

from paredown.loss import ChunkSettings, chunked_cross_entropy, chunked_loss

SHAPE, QUICK_SHAPE = (16_384, 128_256, 4096), (64, 8192, 16)  # tokens, classes, hidden size
Loss = Callable[[Tensor, nn.Parameter, Tensor], Tensor]


class Head(nn.Module):
    """An output head alone, in a module of its own."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.head.weight = weight

    def forward(self, hidden: Tensor) -> Tensor:
        """The logits."""
        return self.head(hidden)


def plain(hidden: Tensor, weight: nn.Parameter, target: Tensor) -> Tensor:
    """torch's cross entropy of all logits, in float32 as Hugging Face's models."""
    return functional.cross_entropy(functional.linear(hidden, weight).float(), target)


def chunked(hidden: Tensor, weight: nn.Parameter, target: Tensor) -> Tensor:
    """Our function alone."""
    return chunked_cross_entropy(hidden, weight, target, settings=ChunkSettings(loss_dtype=torch.float32))


def deferred(hidden: Tensor, weight: nn.Parameter, target: Tensor) -> Tensor:
    """The same code, with deferred logits."""
    model = Head(weight)
    with chunked_loss(model):
        return functional.cross_entropy(model(hidden).float(), target)


def liger(hidden: Tensor, weight: nn.Parameter, target: Tensor) -> Tensor:
    """Liger's fused linear cross entropy."""
    function: Any = import_module("liger_kernel.ops.fused_linear_cross_entropy").LigerFusedLinearCrossEntropyFunction
    result = function.apply(hidden, weight, target)
    return result[0] if isinstance(result, tuple) else result


LOSSES: dict[str, Loss] = {"torch": plain, "paredown": chunked, "paredown-deferred": deferred, "liger": liger}


class LossStep:
    """Forward and backward of one loss on the same tensors."""

    def __init__(self, shape: tuple[int, int, int], device: str) -> None:
        num_tokens, num_classes, size = shape
        generator = torch.Generator(device).manual_seed(0)
        options: Any = {"device": device, "dtype": torch.bfloat16, "generator": generator}
        self.hidden = torch.randn(num_tokens, size, **options).requires_grad_()
        self.weight = nn.Parameter(torch.randn(num_classes, size, **options).mul_(size**-0.5))
        self.target = torch.randint(num_classes, (num_tokens,), device=device, generator=generator)

    def __call__(self, function: Loss) -> Tensor:
        """The loss; the gradients are freed."""
        value = function(self.hidden, self.weight, self.target)
        value.backward()
        self.hidden.grad = self.weight.grad = None
        return value.detach()

    def peak_bytes(self, function: Loss) -> int:
        """The most bytes that are allocated during a step beside its inputs."""
        self(function)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self(function)
        return torch.cuda.max_memory_allocated() - before


def loss_fields(way: str, device: str, ready: Callable[[], None], *, is_quick: bool) -> dict[str, Any]:
    """Peak and time of one forward and backward."""
    shape = QUICK_SHAPE if is_quick else SHAPE
    function, step = LOSSES[way], LossStep(shape, device)
    value = float(step(function))
    ready()
    peak = step.peak_bytes(function) if device == "cuda" else None
    times = time_call(partial(step, function), device, repeats=2 if is_quick else 5, calls=2)
    names = ("median_seconds", "p20_seconds", "p80_seconds")
    return {"shape": list(shape), "peak_bytes": peak, "first_loss": value, **dict(zip(names, times, strict=True))}
