"""Guards of two gloo processes: both act in the same way on what only one of them measures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import paredown as pare
from paredown.plan.footprint import peak_of
from tests.check.test_guards import LOUD, LOW, Loud, traced
from tests.session.nets import rows
from tests.support.processes import needs_gloo, run_on_two

pytestmark = needs_gloo
STEPS = 14


def replicated(rank: int) -> dict[str, Any]:
    plain = Loud()
    plan, trace = pare.Plan.uniform(activation=LOW), traced(plain)
    part = (rows(16, seed=20 + rank), rows(16, seed=30 + rank))
    model = DistributedDataParallel(plain)
    guard = pare.Guard(trace, "100%", limits=pare.Limits(every=1), batch=part, loss=mse_loss)
    session = pare.apply(plan, model, guard=guard)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return watched(rank, plain, model, optimizer, session, trace)


def sharded(rank: int) -> dict[str, Any]:
    """Packed weights and activations under fully_shard, where a guard measures errors and gradients, and has no batch to probe with."""
    plain = Loud()
    plan, trace = pare.Plan.uniform(activation=LOW, weight="int8/64@e8m0"), traced(plain)
    model = fully_shard(plain, mesh=init_device_mesh("cpu", (2,)))
    session = pare.apply(plan, model, guard=pare.Guard(trace, "100%", limits=pare.Limits(every=1)))
    return watched(rank, plain, model, torch.optim.SGD(model.parameters(), 0.1), session, trace)


def watched(rank: int, plain: Loud, model: nn.Module, optimizer: Any, session: pare.Session, trace: pare.Trace) -> dict[str, Any]:
    """Steps in which the second process becomes loud, and what the guard did."""
    peaks: list[int] = []
    for step in range(STEPS):
        plain.loudness = LOUD if rank == 1 and step >= 4 else 1.0
        optimizer.zero_grad()
        mse_loss(model(rows(seed=step * 2 + rank)), rows(seed=9)).backward()
        optimizer.step()
        peaks.append(peak_of(trace, session.plan))
    errors = session.sensitivities.errors if session.sensitivities is not None else {}
    return {
        "actions": [action.to_json() for action in session.actions],
        "plan": session.plan.to_json(),
        "errors": {name: dict(row) for name, row in errors.items()},
        "weights": [whole(p.detach()) for p in plain.parameters()],
        "within": max(peaks) <= peak_of(trace, pare.Plan()),
    }


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value.clone()


def worker(rank: int, folder: Path) -> dict[str, Any]:
    return {"replicated": replicated(rank), "sharded": sharded(rank)}


@pytest.mark.filterwarnings("ignore")  # of the libraries below, about this machine
def test_both_processes_do_the_same(tmp_path: Path) -> None:
    first, second = run_on_two(worker, tmp_path)
    for strategy in ("replicated", "sharded"):
        check(first[strategy], second[strategy], is_probed=strategy == "replicated")


def check(first: dict[str, Any], second: dict[str, Any], *, is_probed: bool) -> None:
    assert any(row[1] == "b:input" for row in first["actions"]), "the first did not see it itself"
    assert first["actions"] == second["actions"]
    assert first["plan"] == second["plan"]
    assert bool(first["errors"]) is is_probed and first["errors"] == second["errors"], "batches differ, and their mean decides"
    assert first["within"] and second["within"]
    for mine, theirs in zip(first["weights"], second["weights"], strict=True):
        assert mine.isfinite().all()
        assert torch.equal(mine, theirs)
