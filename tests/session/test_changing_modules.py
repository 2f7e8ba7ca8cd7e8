"""A module whose forward changes between steps: whatever a session has cached of it, each step is right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from paredown import Plan, apply
from tests.session.nets import Net, rows, step
from tests.session.test_loops import PLANS, check


class Leaf(nn.Module):
    """A module without children whose forward the test changes between steps."""

    def __init__(self, *ways: Any) -> None:
        super().__init__()
        self.ways, self.number = ways, 0

    def forward(self, x: Tensor) -> Tensor:
        self.number += 1
        return self.ways[(self.number - 1) // 2 % len(self.ways)](x)  # each of them twice


PERMUTATION = torch.arange(128 * 64).flip(0)
WAYS: dict[str, tuple[Any, ...]] = {
    "indices": (lambda x: x.view(-1)[PERMUTATION.clone()].view(128, 64),),
    "another activation": (torch.tanh, torch.sigmoid, functional.gelu, torch.relu),
    "another order": (lambda x: torch.tanh(torch.sigmoid(x)), lambda x: torch.sigmoid(torch.tanh(x))),
    "another power": tuple(lambda x, e=exponent: x.square().add(0.05).pow(e) for exponent in (2, 0.5, 3)),
    "another bound": tuple(lambda x, b=bound: functional.hardtanh(x, -b, b) for bound in (0.1, 0.5, 6.0)),
    "another factor": (
        lambda x: x * torch.full((128, 64), -2.0),
        lambda x: x * (x > 0),
        lambda x: x * x,
        lambda x: x * x.detach().cos(),
    ),
    "another operand": (lambda x: torch.sin(x) * torch.cos(x), lambda x: torch.cos(x) * torch.sin(x)),
    "a number or a tensor": (lambda x: x.pow(2), lambda x: x.square().add(0.1).pow(torch.full((128, 64), 0.5))),
    "a custom part": (lambda x: checkpoint(torch.sin, x, use_reentrant=False), torch.sin),
    "the same or not": (lambda x: x, torch.sin, lambda x: x.view(64, 128).view(128, 64), lambda x: x.T.contiguous().T),
}


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("plan", PLANS)
def test_modules_that_do_something_else_in_another_step(name: str, plan: Plan) -> None:
    """Whatever a session has cached of a module, a step equals one without a session."""
    count = 4 * len(WAYS[name])
    net = Net(lambda net, x: net.b(net.more[0](net.a(x))), Leaf(*WAYS[name]))
    plain = [step(net, rows(seed=number)) for number in range(count)]
    net.more[0].number = 0
    apply(plan, net)
    for number in range(count):
        check(step(net, rows(seed=number)), plain[number], plan)


# --- what earlier passes decided ------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """Saves its input for backward only while its weight requires a gradient, or noise makes the input a tensor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.weight = nn.Linear(64, 64), nn.Linear(64, 64), nn.Parameter(torch.ones(64))
        self.has_noise = False

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.1 * torch.ones_like(x) if self.has_noise else x
        return self.last(torch.tanh(self.first(x)).square() * self.weight)


@pytest.mark.parametrize("change", ["unfrozen", "noise"])
def test_a_session_that_ran_before_stores_what_a_new_one_stores(change: str) -> None:
    stored: list[int] = []
    for num_before in (0, 2):
        torch.manual_seed(0)
        model, x = Scaled(), torch.randn(256, 64)
        with apply(Plan.uniform(activation="int8/64@bf16"), model) as session:
            model.weight.requires_grad_(change != "unfrozen")
            for _ in range(num_before):
                model(x).sum().backward()
            model.weight.requires_grad_()
            model.has_noise = change == "noise"
            model(x).sum().backward()
            loss = model(x).sum()
            stored.append(session.stored_bytes)
            del loss
    assert stored[0] == stored[1] > 0
