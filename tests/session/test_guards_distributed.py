"""Guards of two processes of gloo: what only one of them sees, both act upon, in the same way."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import paredown as pare
from paredown.plan.footprint import peak_of
from tests.session.nets import rows
from tests.session.test_guards import LOUD, LOW, Loud, traced

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch is built without gloo")
STEPS = 14


def worker(rank: int, port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=60))
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
    state = {
        "actions": [action.to_json() for action in session.actions],
        "plan": session.plan.to_json(),
        "errors": {name: dict(row) for name, row in errors.items()},
        "weights": [p.detach().clone() for p in plain.parameters()],
        "within": max(peaks) <= peak_of(trace, pare.Plan()),
    }
    torch.save(state, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")  # of the libraries below, about this machine
def test_both_processes_do_the_same(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(worker, (port, str(tmp_path)), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert any(row[1] == "b:input" for row in first["actions"]), "the first did not see it itself"
    assert first["actions"] == second["actions"]
    assert first["plan"] == second["plan"]
    assert first["errors"] and first["errors"] == second["errors"], "batches differ, and their mean decides"
    assert first["within"] and second["within"]
    for mine, theirs in zip(first["weights"], second["weights"], strict=True):
        assert mine.isfinite().all()
        assert torch.equal(mine, theirs)
