"""Guards of two gloo processes: both act in the same way on what only one of them measures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import paredown as pare
from paredown.plan.footprint import peak_of
from tests.session.nets import rows
from tests.session.test_guards import LOUD, LOW, Loud, traced
from tests.support.processes import needs_gloo, run_on_two

pytestmark = needs_gloo
STEPS = 14


def worker(rank: int, folder: Path) -> dict[str, Any]:
    plain = Loud()
    plan, trace = pare.Plan.uniform(activation=LOW), traced(plain)
    part = (rows(16, seed=20 + rank), rows(16, seed=30 + rank))
    model = DistributedDataParallel(plain)
    guard = pare.Guard(trace, "100%", limits=pare.Limits(every=1), batch=part, loss=mse_loss)
    session = pare.apply(plan, model, guard=guard)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
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
        "weights": [p.detach().clone() for p in plain.parameters()],
        "within": max(peaks) <= peak_of(trace, pare.Plan()),
    }


@pytest.mark.filterwarnings("ignore")  # of the libraries below, about this machine
def test_both_processes_do_the_same(tmp_path: Path) -> None:
    first, second = run_on_two(worker, tmp_path)
    assert any(row[1] == "b:input" for row in first["actions"]), "the first did not see it itself"
    assert first["actions"] == second["actions"]
    assert first["plan"] == second["plan"]
    assert first["errors"] and first["errors"] == second["errors"], "batches differ, and their mean decides"
    assert first["within"] and second["within"]
    for mine, theirs in zip(first["weights"], second["weights"], strict=True):
        assert mine.isfinite().all()
        assert torch.equal(mine, theirs)
