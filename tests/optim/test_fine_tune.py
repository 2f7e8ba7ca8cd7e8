"""Tier fine_tune at a learning rate of 1e-5: the sum of 300 updates against that of torch.optim.AdamW in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paredown
from paredown import Plan
from paredown.optim import AdamW
from tests.optim.nets import take_step

STEPS, LR = 300, 1e-5


def network() -> nn.Linear:
    """One matrix of 4096 values in rows of 256, which tiers pack; a checkpoint in bfloat16, as models for fine-tuning often are."""
    torch.manual_seed(0)
    model = nn.Linear(256, 16, bias=False)
    with torch.no_grad():
        model.weight.copy_(model.weight.bfloat16())
    return model


def total_update(model: nn.Linear, optimizer: Any) -> Tensor:
    """What `STEPS` steps on four batches change the weight by; the residue is part of the weight."""
    before = model.weight.detach().clone()
    made = torch.Generator().manual_seed(1)
    batches = [(torch.randn(16, 256, generator=made), torch.randint(16, (16,), generator=made)) for _ in range(4)]
    for i in range(STEPS):
        x, y = batches[i % 4]
        take_step(optimizer, nn.functional.cross_entropy(model(x), y))
    after, residue = model.weight.detach().clone(), optimizer.state[model.weight].get("residue")
    if residue is not None:
        after = ((after.view(torch.int32) >> 8) + residue.view(after.shape).int() << 8).view(torch.float32)
    return after - before


def packed(tier: str) -> Tensor:
    model = network()
    paredown.apply(Plan.preset(tier), model)
    return total_update(model, AdamW(model.parameters(), lr=LR))


@pytest.fixture(scope="module")
def expected() -> Tensor:
    model = network()
    return total_update(model, torch.optim.AdamW(model.parameters(), lr=LR))


@pytest.mark.parametrize(("tier", "least", "most"), [("fine_tune", 0.0, 0.1), ("half", 0.2, 0.5), ("lpmm", 0.5, 1.0)])
def test_relative_error_of_all_updates(tier: str, least: float, most: float, expected: Tensor) -> None:
    assert expected.abs().max() <= STEPS * LR * 1.1 and expected.norm() > 0.1 * STEPS * LR * 64
    error = ((packed(tier) - expected).norm() / expected.norm()).item()
    assert least <= error < most, error
