"""Small networks whose gradients go to packed accumulators, as an optimizer arranges it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from paredown.codec.packed import PackedTensor, encode
from paredown.formats.rounding import Seed
from paredown.optim.gradient_hooks import Accumulator
from paredown.optim.gradient_ops import PackedGradient

FORMAT = "int8/64@bf16"


def mlp() -> nn.Sequential:
    """Two matrices to pack (one with ragged rows) and two biases that stay plain; the same numbers each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 70), nn.GELU(), nn.Linear(70, 32))


def take_step(optimizer: Any, loss: Tensor) -> None:
    """Backward, and what a loop does after it."""
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def batches(count: int, size: int = 5) -> list[Tensor]:
    """Inputs of `mlp`."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 64, generator=generator) for _ in range(count)]


def zeros_like(parameter: Tensor, format: str = FORMAT) -> PackedTensor:
    """An empty accumulator."""
    return encode(torch.zeros_like(parameter.detach()).contiguous(), format, order="logical")


def pack(parameter: Tensor, *, number: int = 0, weight: float = 1.0, format: str = FORMAT) -> Accumulator:
    """A packed accumulator on one parameter, attached."""
    gradient = PackedGradient(zeros_like(parameter, format), Seed(0, 8 * number + 3), weight=weight)
    made = Accumulator(parameter, gradient, name=f"parameter {number}")
    made.attach()
    return made


def pack_all(model: nn.Module, *, weight: float = 1.0, format: str = FORMAT) -> list[Accumulator]:
    """Packed accumulators on the matrices of a model."""
    return [pack(p, number=n, weight=weight, format=format) for n, p in enumerate(model.parameters()) if p.dim() > 1]


def grad_of(parameter: Tensor) -> PackedGradient:
    """p.grad, which is packed."""
    assert isinstance(parameter.grad, PackedGradient)
    return parameter.grad


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Distance over length."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm())
