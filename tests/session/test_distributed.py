"""DistributedDataParallel and FSDP2 with two processes of gloo on this machine: the gradients of the same step without a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from paredown import Plan, apply
from tests.session.nets import INT8, activations, assert_same, relative_error, rows, weighted
from tests.support.processes import needs_gloo, run_on_two

pytestmark = needs_gloo
PRODUCTS = Plan().set("product=1", "int8").set("product=3", "e4m3fn")
PLANS = {"none": None, "exact": Plan.uniform(activation="fp32"), "int8": activations(INT8), "products": PRODUCTS}


def small() -> nn.Sequential:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 64), nn.GELU())
    return nn.Sequential(layer, nn.Linear(64, 64), nn.Sigmoid(), nn.Linear(64, 64))


def replicated(model: nn.Sequential) -> nn.Module:
    return DistributedDataParallel(model)


def sharded(model: nn.Sequential) -> nn.Module:
    """Each layer by itself, resharded after its forward pass: its parameters are freed and gathered again for backward."""
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    fully_shard(model[0], mesh=mesh, reshard_after_forward=True)
    return fully_shard(model, mesh=mesh, reshard_after_forward=True)


def steps(
    wrap: Callable[[nn.Sequential], nn.Module], plan: Plan | None, rank: int, *, is_first: bool
) -> tuple[list[Tensor], set[str]]:
    """Gradients summed over two steps, and the slots that were packed; the session begins before wrapping or after it."""
    plain = small()
    before = apply(plan, plain) if plan is not None and is_first else None
    model = wrap(plain)
    session = before or (apply(plan, model) if plan is not None else None)
    for number in range(2):
        weighted(model(rows(seed=10 * number + rank))).backward()
    found = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters() if p.grad is not None]
    assert session is None or session.stored_bytes == 0
    slots = set() if session is None else {n for n, d in session._activations.decisions.items() if d.format is not None}
    return [g.clone() for g in found], slots


def worker(rank: int, folder: Path) -> dict[Any, Any]:
    return {
        (wrap.__name__, name, is_first): steps(wrap, plan, rank, is_first=is_first)
        for wrap in (replicated, sharded)
        for name, plan in PLANS.items()
        for is_first in (True, False)
    }


def in_one_process(alone: nn.Module) -> list[Tensor]:
    for number in range(2):
        for rank in range(2):
            (weighted(alone(rows(seed=10 * number + rank))) / 2).backward()
    return [p.grad for p in alone.parameters() if p.grad is not None]


@pytest.mark.filterwarnings("ignore")  # of the libraries below, about this machine
def test_two_processes(tmp_path: Path) -> None:
    results = run_on_two(worker, tmp_path)
    expected = in_one_process(small())
    with apply(PRODUCTS, model := small()):
        of_products = in_one_process(model)
    for (wrap, name, is_first), (found, slots) in results[0].items():
        assert_same(found, results[1][wrap, name, is_first][0])  # all processes have the same
        plain, _ = results[0][wrap, "none", is_first]
        assert relative_error(plain, expected) < 1e-5
        if name == "exact":
            assert_same(found, plain)
        if name == "int8":
            assert 1e-4 < relative_error(found, plain) < 0.03
            assert slots
            assert not {slot for slot in slots if slot.endswith("weight")}, wrap
        if name == "products":
            assert relative_error(found, of_products) < 1e-5 and relative_error(found, plain) > 1e-3
    packed = [slots for (_, name, _), (_, slots) in results[0].items() if name == "int8"]
    assert all(slots == packed[0] for slots in packed) or print(packed)
