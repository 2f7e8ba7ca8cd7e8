"""Two processes of gloo: DDP replicas stay equal, sharded state (FSDP2) is that of one process, through a distributed checkpoint too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import paredown
from paredown import Plan, trace_step
from paredown.errors import OptimError
from paredown.optim import SGD, AdamW, reduce_in_8_bits
from tests.optim.nets import take_step
from tests.support.processes import needs_gloo, run_on_two

pytestmark = needs_gloo
MOMENTS: dict[str, Any] = {"moment1": "int8/64@bf16", "moment2": "uint4/64@bf16"}


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 130), nn.ReLU(), nn.Linear(130, 64), nn.Linear(64, 64))


def rows(seed: int) -> Tensor:
    return torch.randn(16, 96, generator=torch.Generator().manual_seed(seed))


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(p.shape, generator=generator) for p in small().parameters()]


def ddp(rank: int) -> dict[str, Any]:
    """Three steps in tier lpmm under DDP: weights, and the changes that the session reports for gradients."""
    model = DistributedDataParallel(small())
    session = paredown.apply(Plan.preset("lpmm"), model)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(3):
        take_step(optimizer, model(rows(10 * step + rank)).square().mean())
    return {"weights": model.module.state_dict(), "changes": repr(session.changes)}


def state_of(optimizer: AdamW) -> list[dict[str, Tensor]]:
    """The whole state, gathered."""
    states = optimizer.state_dict()["state"]
    whole = lambda t: t.full_tensor() if isinstance(t, DTensor) else t.clone()  # noqa: E731
    return [{name: whole(value) for name, value in states[i].items()} for i in sorted(states)]


def assign(model: nn.Module, step: int) -> None:
    for p, grad in zip(model.parameters(), gradients(step), strict=True):
        p.grad = distribute_tensor(grad, p.device_mesh, p.placements) if isinstance(p, DTensor) else grad


def fsdp(folder: str) -> dict[str, Any]:
    """Three steps with given gradients, a distributed checkpoint, a fourth step."""
    model = fully_shard(small(), mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (2,)))
    optimizer = AdamW(model.parameters(), lr=0.01, **MOMENTS)
    for step in range(3):
        assign(model, step)
        optimizer.step()
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=f"{folder}/checkpoint")
    third = state_of(optimizer)
    assign(model, 3)
    optimizer.step()
    weights = [p.full_tensor().detach() for p in model.parameters()]
    return {"third": third, "fourth": state_of(optimizer), "weights": weights}


def trained(rank: int) -> list[float]:
    """A usual loop under FSDP2."""
    model = fully_shard(small(), mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (2,)))
    optimizer = AdamW(model.parameters(), lr=0.01, gradient="int8/64@bf16", **MOMENTS)
    found: list[float] = []
    for _ in range(8):
        loss = model(rows(rank)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def reduced(rank: int, *, is_sharded: bool) -> dict[str, Any]:
    """Gradients of two backward passes that travelled in 8 bits, and bytes of the codes and scales that this process sent."""
    plain = small()
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    model: nn.Module = fully_shard(plain, mesh=mesh) if is_sharded else DistributedDataParallel(plain)
    reduction = reduce_in_8_bits(model)
    found, sent, send, gathered, gather = [], [], torch.distributed.all_to_all_single, [], torch.distributed.all_gather

    def count(received: Tensor, data: Tensor, **options: Any) -> Any:
        sent.append(data.nbytes)
        return send(received, data, **options)

    def count_gathered(received: list[Tensor], data: Tensor, **options: Any) -> Any:
        gathered.append(data.nbytes)
        return gather(received, data, **options)

    torch.distributed.all_to_all_single = count  # type: ignore[assignment]
    torch.distributed.all_gather = count_gathered
    for _ in range(2):
        model(rows(rank)).square().mean().backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        found.append([grad.full_tensor() if isinstance(grad, DTensor) else grad.clone() for grad in grads])
        model.zero_grad()
    torch.distributed.all_to_all_single, torch.distributed.all_gather = send, gather
    in_a_pass = {"sent": sum(sent) // 2 // 2, "gathered": sum(gathered) // 2}  # half of what is exchanged stays here
    return {"found": found, **in_a_pass, "state": reduction.state_dict()}


def worker(rank: int, folder: Path) -> dict[str, Any]:
    in_8_bits = {is_sharded: reduced(rank, is_sharded=is_sharded) for is_sharded in (False, True)}
    return {"reduced": in_8_bits, "ddp": ddp(rank), "fsdp": fsdp(str(folder)), "trained": trained(rank)}


def one_process(folder: Path) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]], list[Tensor]]:
    """The checkpoint of two processes in one: its state, the state after the fourth step, and the weights."""
    model = small()
    optimizer = AdamW(model.parameters(), lr=0.01, **MOMENTS)
    for step in range(3):
        assign(model, step)
        optimizer.step()
    with torch.no_grad():
        for value in (v for state in optimizer.state.values() for v in state.values()):
            value.zero_()  # what is loaded must come from the file
    state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=str(folder / "checkpoint"), no_dist=True)
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    third = state_of(optimizer)
    assign(model, 3)
    optimizer.step()
    return third, state_of(optimizer), [p.detach() for p in model.parameters()]


@pytest.mark.filterwarnings("ignore")  # of the libraries below, about this machine
def test_two_processes(tmp_path: Path) -> None:
    first, second = run_on_two(worker, tmp_path)

    for name, weight in first["ddp"]["weights"].items():  # replicas round alike
        assert torch.equal(weight, second["ddp"]["weights"][name])
    assert "DistributedDataParallel" in first["ddp"]["changes"]

    third, fourth, weights = one_process(tmp_path)
    for mine, theirs in ((third, first["fsdp"]["third"]), (fourth, first["fsdp"]["fourth"])):
        for a, b in zip(mine, theirs, strict=True):
            assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    for a, b in zip(weights, first["fsdp"]["weights"], strict=True):
        assert torch.equal(a, b)
    assert first["trained"][-1] < 0.8 * first["trained"][0]
    check_reductions(first["reduced"], second["reduced"])


def check_reductions(first: dict[bool, Any], second: dict[bool, Any]) -> None:
    """Against float32: the same in both processes, close, rounded anew in the second pass; and as many bytes as `footprint` says."""
    model = small()
    sum(model(rows(rank)).square().mean() / 2 for rank in range(2)).backward()  # type: ignore[union-attr]
    exact = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    trace = trace_step(small(), (rows(0), torch.zeros(16, 64)), loss=nn.functional.mse_loss, optimizer="sgd", device="cpu")
    for is_sharded in (False, True):
        mine, theirs = first[is_sharded], second[is_sharded]
        passes = [torch.cat([grad.flatten() for grad in grads]) for grads in mine["found"]]
        assert torch.equal(passes[0], torch.cat([grad.flatten() for grad in theirs["found"][0]]))
        assert not torch.equal(*passes)
        assert all(1e-4 < (found - exact).norm() / exact.norm() < 0.02 for found in passes)
        strategy = "fsdp2" if is_sharded else "ddp"
        foot = paredown.footprint(
            trace, world_size=2, strategy=strategy, units=() if is_sharded else None, reduction="int8/64@bf16"
        )
        assert mine["sent"] == foot.communication.all_to_all > 0
        assert is_sharded or mine["gathered"] == foot.communication.all_gather == mine["sent"]
        assert mine["state"] == {"seed": 0, "counts": {"0": 2}}


def test_reductions_that_cannot_be() -> None:
    with pytest.raises(OptimError, match="under DistributedDataParallel or fully_shard"):
        reduce_in_8_bits(small())
    with pytest.raises(OptimError, match="block scales"):
        reduce_in_8_bits(small(), format="bf16")
