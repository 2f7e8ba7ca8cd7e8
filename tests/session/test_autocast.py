"""Autocast and a gradient scaler, on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from paredown import Plan, apply
from tests.session.nets import Net, assert_same, relative_error, rows
from tests.session.test_loops import PLANS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_a_gradient_scaler(dtype: torch.dtype) -> None:
    """Three steps of SGD; a factor of 2^24 makes the first one of float16 overflow, and is lowered by both alike."""

    def train(plan: Plan | None) -> tuple[list[Tensor], float]:
        net = Net(lambda net, x: net.b(net.more[0](net.a(x))), nn.Sequential(nn.LayerNorm(64), nn.GELU()))
        session = apply(plan, net) if plan is not None else None
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
        for number in range(3):
            with torch.autocast("cpu", dtype):
                loss = net(rows(seed=number)).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert session is None or session.stored_bytes == 0
        return [p.detach().clone() for p in net.parameters()], scaler.get_scale()

    plain, exact, eight = train(None), train(PLANS[0]), train(PLANS[1])
    assert_same(exact[0], plain[0])
    assert relative_error(eight[0], plain[0]) < 1e-3
    assert plain[1] == exact[1] == eight[1]
    assert (plain[1] < 2.0**24) is (dtype is torch.float16)
