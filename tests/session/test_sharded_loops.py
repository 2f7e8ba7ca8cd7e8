"""Ways to train a packed model under fully_shard, in two gloo processes: the weights are those of one process with the mean loss of both.

Weights are packed, rounded to nearest, and gradients plain, so that both differ by the order of sums alone; where gradients are packed,
their random bits are the same, and few codes differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import paredown
from paredown import Plan, Session
from paredown.optim import AdamW
from paredown.optim.packed_weight import weight_of
from paredown.optim.sharded.local_rows import local
from tests.support.processes import needs_gloo, run_on_two

pytestmark = [needs_gloo, pytest.mark.filterwarnings("ignore")]  # of the libraries below, about this machine
WORLD, WIDTH, ODD = 2, 64, 131
WEIGHTS, LPMM = Plan.uniform(weight="int8/64@e8m0"), Plan.preset("lpmm")
FLIPPED = 2e-3  # relative difference of weights in which few codes differ by one


class Net(nn.Module):
    """Two blocks and a head; the first block has an odd number of rows. With `is_tied` the head has the matrix of the last block."""

    def __init__(self, *, is_tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, ODD), nn.Linear(ODD, 96)])
        self.inner, self.head = nn.Linear(96, 96), nn.Linear(96, 96)
        if is_tied:
            self.head.weight = self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x.to(block.weight.dtype)).tanh()
        return self.head(self.inner(x.float()).tanh())


def sharded(model: Net, **options: Any) -> Net:
    mesh = init_device_mesh("cpu", (WORLD,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def inputs(seed: int, num_rows: int = 8) -> Tensor:
    return torch.randn(num_rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, seeds: Iterable[int]) -> Tensor:
    """The mean over batches; in one process those of all processes."""
    return torch.stack([model(inputs(seed)).square().sum(1).mean() for seed in seeds]).mean()


def seeds_of(model: nn.Module, step: int, part: int = 0) -> list[int]:
    """This process's batch of a sharded model, all batches of another."""
    ranks = [dist.get_rank()] if hasattr(model, "reshard") else range(WORLD)
    return [100 * step + 10 * part + rank for rank in ranks]


def values_of(model: nn.Module) -> list[Tensor]:
    return [p.full_tensor().detach() if isinstance(p, DTensor) else p.detach().clone() for p in model.parameters()]


def apart(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest relative difference of two tensors."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))


Run = Callable[[Net], list[Tensor]]  # trains a model and returns its weights


def trained(
    plan: Plan, make_optimizer: Callable[[Any], Any], *, prepare: Callable[[Net], object] = lambda model: None, clip: float = 1e9
) -> Run:
    """Three steps, with an evaluation after each."""

    def run(model: Net) -> list[Tensor]:
        prepare(model)
        session = paredown.apply(plan, model)
        optimizer = make_optimizer(model.parameters())
        for step in range(3):
            loss_of(model, seeds_of(model, step)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                loss_of(model, [7])
        values = values_of(reshard(model))
        session.close()
        return values

    return run


def reshard(model: Net) -> Net:
    if hasattr(model, "reshard"):
        model.reshard()  # the evaluation leaves the root's parameters whole
    return model


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


def adamw_one_by_one(parameters: Any) -> torch.optim.Optimizer:
    """Weight decay and update are two functions in place, which round once together."""
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.3, foreach=False)


def adamw(parameters: Any) -> AdamW:
    return AdamW(parameters, lr=0.01)


def freeze(model: Net) -> None:
    """One matrix of a block, and all of another block."""
    for p in (model.blocks[0].weight, *model.blocks[1].parameters()):
        p.requires_grad_(False)


def in_two_dtypes() -> Net:
    model = Net()
    model.blocks[0].to(torch.bfloat16)
    return model


def accumulated(*, stays_whole: bool) -> Run:
    """Two steps of three microbatches, reduced after the last of them; in one process they are one batch, so that both round once."""

    def run(model: Net) -> list[Tensor]:
        session = paredown.apply(LPMM, model)
        optimizer = adamw(model.parameters())
        for step in range(2):
            parts = [seeds_of(model, step, part) for part in range(3)]
            if hasattr(model, "reshard"):
                for i, seeds in enumerate(parts):
                    model.set_requires_gradient_sync(i == 2)  # type: ignore[operator]
                    model.set_reshard_after_backward(i == 2 or not stays_whole)  # type: ignore[operator]
                    loss_of(model, seeds).backward()
            else:
                torch.stack([loss_of(model, seeds) for seeds in parts]).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        values = values_of(model)
        session.close()
        return values

    return run


def replanned(model: Net) -> list[Tensor]:
    """A step under one plan, one under another, one without any."""
    for plan in (WEIGHTS, Plan.uniform(weight="int8/32@bf16"), Plan()):
        session = paredown.apply(plan, model)
        optimizer = sgd(model.parameters())
        loss_of(model, seeds_of(model, 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
        session.close()
    return values_of(model)


def without_rows(model: Net) -> list[Tensor]:
    """The second process has no rows in its batch."""
    session = paredown.apply(LPMM.set("activation", "int8/64@bf16"), model)
    optimizer = sgd(model.parameters())
    is_sharded = hasattr(model, "reshard")
    num_rows = 8 if not is_sharded or dist.get_rank() == 0 else 0
    (model(inputs(1, num_rows)).square().sum() / (1 if is_sharded else WORLD)).backward()
    optimizer.step()
    session.close()
    return values_of(model)


def frozen_4_bits(model: Net) -> list[Tensor]:
    """Weights in 4 bits that are not trained, as under LoRA."""
    for block in model.blocks:
        block.requires_grad_(False)
    session = paredown.apply(Plan.preset("frozen4"), model)
    assert weight_of(model.blocks[0].weight) is not None
    optimizer = sgd([p for p in model.parameters() if p.requires_grad])
    loss_of(model, seeds_of(model, 0)).backward()
    optimizer.step()
    values = values_of(model)
    session.close()
    return values


def unscaled(rank: int) -> dict[str, Any]:
    """A GradScaler whose gradients are infinite in one row: which weights changed, and the scale that follows."""
    model = sharded(Net())
    session: Session = paredown.apply(LPMM, model)
    optimizer, scaler = adamw(model.parameters()), torch.amp.GradScaler("cpu", init_scale=64.0)
    before = values_of(model)
    weights = torch.ones(96)
    weights[-1] = float("inf")  # rows of the head that the last process has
    scaler.scale((model(inputs(rank)) * weights).sum()).backward()
    rows = local(model.head.weight.grad)
    has_infinite = not bool(rows.clone().isfinite().all())
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    changed = apart(values_of(model), before)
    session.close()
    return {"infinite": has_infinite, "changed": changed, "scale": scaler.get_scale()}


def deferred(rank: int) -> list[int]:
    """How many weights have values that are not encoded yet, after a step of torch.optim and when fully_shard begins to gather."""
    model = sharded(Net())
    session = paredown.apply(WEIGHTS, model)
    optimizer = adamw_one_by_one(list(model.parameters())[::-1])  # last the first block, which is gathered when it runs
    loss_of(model, [rank]).backward()
    optimizer.step()
    packed = [weight for p in model.parameters() if (weight := weight_of(p)) is not None]
    counts: list[int] = []
    count = lambda *_: counts.append(sum(weight.written is not None for weight in packed))  # noqa: E731
    count()
    handle = model.register_forward_pre_hook(count)  # after the session's own
    loss_of(model, [rank])
    handle.remove()
    session.close()
    return counts


@dataclass(frozen=True)
class Way:
    """How a model is made and trained, and options of fully_shard."""

    run: Run
    make: Callable[[], Net] = Net
    options: Mapping[str, Any] = field(default_factory=dict)


WAYS = {
    "SGD": Way(trained(WEIGHTS, sgd)),
    "gathered once": Way(trained(WEIGHTS, sgd), options={"reshard_after_forward": False}),
    "AdamW of torch": Way(trained(WEIGHTS, adamw_one_by_one)),
    "clipped": Way(trained(WEIGHTS, sgd, clip=0.05)),
    "tied": Way(trained(WEIGHTS, sgd), partial(Net, is_tied=True)),
    "frozen": Way(trained(WEIGHTS, sgd, prepare=freeze)),
    "in two dtypes": Way(trained(WEIGHTS, sgd), in_two_dtypes),
    "accumulated": Way(accumulated(stays_whole=False)),
    "accumulated, whole": Way(accumulated(stays_whole=True)),
    "another plan": Way(replanned),
    "no rows": Way(without_rows),
    "frozen in 4 bits": Way(frozen_4_bits),
    "everything": Way(trained(LPMM, adamw, clip=0.5)),
}


def worker(rank: int, folder: Path) -> dict[str, Any]:
    ways = {name: way.run(sharded(way.make(), **way.options)) for name, way in WAYS.items()}
    return {"ways": ways, "unscaled": unscaled(rank), "deferred": deferred(rank)}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_on_two(worker, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("name", WAYS)
def test_weights_are_those_of_one_process(two: list[dict[str, Any]], name: str) -> None:
    way = WAYS[name]
    expected, (found, others) = way.run(way.make()), (process["ways"][name] for process in two)
    assert all(map(torch.equal, found, others))
    assert apart(found, expected) < FLIPPED and apart(expected, values_of(way.make())) > 0.05


def test_a_step_that_one_process_must_skip_is_skipped_by_all(two: list[dict[str, Any]]) -> None:
    assert [process["unscaled"]["infinite"] for process in two] == [False, True]
    assert all(process["unscaled"]["changed"] == 0.0 and process["unscaled"]["scale"] == 32.0 for process in two)


def test_deferred_values_are_encoded_before_gathers(two: list[dict[str, Any]]) -> None:
    assert [process["deferred"] for process in two] == [[1, 0]] * 2
