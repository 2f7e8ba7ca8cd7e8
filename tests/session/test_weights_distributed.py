"""Packed weights under DistributedDataParallel and FSDP2, two processes of gloo: the session begins before wrapping or after it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paredown import Plan, apply
from paredown.optim.packed_weight import weight_of
from tests.session.nets import assert_same, relative_error, rows, weighted
from tests.session.test_distributed import replicated, sharded, small
from tests.support.processes import needs_gloo, run_on_two

pytestmark = needs_gloo
PLAN = Plan.uniform(weight="int8/64@e8m0")


def of_rank(rank: int) -> nn.Sequential:
    """The same model, but with other values in each process: wrapping makes them those of the first."""
    model = apply_and_close(small())
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2.0**rank)
    return model


def apply_and_close(model: nn.Sequential) -> nn.Sequential:
    apply(PLAN, model).close()  # values that int8 has
    return model


def steps(
    wrap: Callable[[nn.Sequential], nn.Module], rank: int, *, packs: bool, is_first: bool
) -> tuple[list[Tensor], dict[str, Any]]:
    """Gradients summed over two steps, with an SGD step between them; and the session's changes."""
    plain = of_rank(rank if wrap is replicated else 0)
    before = apply(PLAN, plain) if packs and is_first else None
    model = wrap(plain)
    session = before or (apply(PLAN, model) if packs else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    for number in range(2):
        weighted(model(rows(seed=10 * number + rank))).backward()
        is_packed = all(weight_of(p) is not None for p in plain.parameters() if p.dim() > 1)
    found = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters() if p.grad is not None]
    said = {"packed": is_packed, "reasons": {row.reason for row in session.changes} if session else set()}
    assert optimizer.param_groups[0]["params"]
    return [g.clone() for g in found], said


def worker(rank: int, folder: Path) -> dict[Any, Any]:
    results: dict[Any, Any] = {
        (wrap.__name__, packs, is_first): steps(wrap, rank, packs=packs, is_first=is_first)
        for wrap in (replicated, sharded)
        for packs in (False, True)
        for is_first in (True, False)
    }
    net = of_rank(rank)
    session = apply(PLAN, net)
    dist.broadcast(net[1].weight.data, 0)
    dist.all_reduce(net[3].weight.detach())
    try:
        dist.broadcast(net[0][0].weight, 0, async_op=True).wait()
    except RuntimeError:  # before 2.13, where this goes by no way that can be followed: there is no data to point to
        assert torch.__version__ < "2.13"
        dist.broadcast(net[0][0].weight.data, 0)
    results["sent"] = net[1].weight.detach().clone(), net[3].weight.detach().clone(), net[0][0].weight.detach().clone()
    session.close()
    return results


@pytest.mark.filterwarnings("ignore")  # of the libraries below, about this machine
def test_two_processes(tmp_path: Path) -> None:
    results = run_on_two(worker, tmp_path)
    sent = [result.pop("sent") for result in results]
    assert_same(sent[0], sent[1])
    assert torch.equal(sent[0][0], of_rank(0)[1].weight)
    assert torch.equal(sent[0][2], of_rank(0)[0][0].weight)
    assert torch.equal(sent[0][1], apply_and_close(nn.Sequential(nn.Linear(64, 64), scaled(of_rank(0)[3], 3.0)))[1].weight)
    for (wrap, packs, is_first), (found, said) in results[0].items():
        assert_same(found, results[1][wrap, packs, is_first][0])  # all processes have the same
        plain, _ = results[0][wrap, False, is_first]
        if packs:
            assert_same(found, plain)
            is_replaced = wrap == "sharded" and is_first  # fully_shard makes new parameters
            assert said["packed"] is not is_replaced
            assert any("after apply" in reason for reason in said["reasons"]) is is_replaced
    assert relative_error(results[0]["sharded", False, True][0], results[0]["replicated", False, True][0]) < 1e-5


def scaled(layer: Any, factor: float) -> Any:
    with torch.no_grad():
        layer.weight.mul_(factor)
    return layer
