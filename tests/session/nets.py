"""Small networks and comparisons for the tests of sessions; the reference is always the same step without a session."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from paredown import Plan, Role, Session, apply, footprint, trace_step
from tests.support.memory import peak_bytes

INT8, INT4 = "int8/64@bf16", "int4/64@bf16"
ROWS, WIDTH = 128, 64  # 8192 values: more than the 4096 from which on tensors are packed
Forward = Callable[[Any, Tensor], Tensor]


class Net(nn.Module):
    """Two linear layers `a` and `b`, others as `more`, and a forward that the test writes."""

    def __init__(self, forward: Forward, *more: nn.Module, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.more, self.way = nn.Linear(width, width), nn.Linear(width, width), nn.ModuleList(more), forward

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)


def rows(num: int = ROWS, width: int = WIDTH, seed: int = 1) -> Tensor:
    """Normal values (num, width)."""
    return torch.randn(num, width, generator=torch.Generator().manual_seed(seed))


def pictures(num: int = 4, channels: int = 3, side: int = 32, seed: int = 1) -> Tensor:
    """Normal values (num, channels, side, side)."""
    return torch.randn(num, channels, side, side, generator=torch.Generator().manual_seed(seed))


def activations(format: str | None, rounding: str | None = None) -> Plan:
    """A plan with every activation in one format; None for unmodified."""
    return Plan.uniform(activation=format, rounding=rounding)


def gradients(model: nn.Module) -> list[Tensor]:
    """The gradients of the parameters that have one."""
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def weighted(y: Tensor) -> Tensor:
    """A loss whose gradient differs at every element."""
    return (y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum()


def step(model: nn.Module, *inputs: Any, loss: Callable[[Any], Tensor] = weighted, seed: int = 3) -> list[Tensor]:
    """The gradients of one step, after zeroing."""
    torch.manual_seed(seed)
    model.zero_grad()
    loss(model(*inputs)).backward()
    return gradients(model)


def both(model: nn.Module, *inputs: Any, plan: Plan, **options: Any) -> tuple[list[Tensor], list[Tensor], Session]:
    """The gradients without a session, those of a copy of the model in the third step with one, and the session.

    The third, since the first ones may teach a session what later ones do.
    """
    plain = step(copy.deepcopy(model), *inputs, **options)
    other = copy.deepcopy(model)
    session = apply(plan, other)
    first = step(other, *inputs, **options)
    if plan == Plan.uniform(activation="fp32"):
        assert_same(first, plain)
    step(other, *inputs, **options)
    return plain, step(other, *inputs, **options), session


def relative_error(found: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """|found - expected| / |expected|, all tensors together."""
    pairs = [(a.double(), b.double()) for a, b in zip(found, expected, strict=True)]
    return sqrt(sum((a - b).square().sum().item() for a, b in pairs) / sum(b.square().sum().item() for _, b in pairs))


def assert_same(found: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    """Bit for bit."""
    pairs = list(zip(found, expected, strict=True))
    assert pairs
    assert all(torch.equal(a, b) for a, b in pairs), f"relative error {relative_error(*zip(*pairs, strict=True)):g}"


def assert_exact(model: nn.Module, *inputs: Any, **options: Any) -> Session:
    """An exact plan changes no bit of the gradients."""
    plain, found, session = both(model, *inputs, plan=Plan.uniform(activation="fp32"), **options)
    assert_same(found, plain)
    return session


def error_of(model: nn.Module, *inputs: Any, format: str = INT8, **options: Any) -> float:
    """The relative error of the gradients with every activation in `format`."""
    plain, found, _ = both(model, *inputs, plan=activations(format), **options)
    assert all(g.isfinite().all() for g in found)
    return relative_error(found, plain)


def frozen_peaks(model: nn.Module, plan: Plan, x: Tensor, folder: Path) -> tuple[int, int]:
    """Predicted and measured peak of a step that trains `model` to return `x`, without what is stored: temporaries alone."""
    trace = trace_step(model, (x, x), loss=mse_loss, optimizer="sgd", device="cpu")
    foot = footprint(trace, plan)
    with apply(plan, model):

        def run() -> None:
            mse_loss(model(x), x).backward()
            model.zero_grad()

        run()
        measured = peak_bytes(run, folder)
    stored = sum(foot.by_role.get(role, 0) for role in (Role.WEIGHT, Role.INPUT))
    return foot.peak_bytes - stored, measured
