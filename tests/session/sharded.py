"""Networks, loops and counters for tests of fully_shard, which run in processes of gloo."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import paredown
from paredown import Plan, Session
from paredown.models.transformer import GPT, GPTConfig, token_loss
from paredown.optim import AdamW
from paredown.optim.packed_weight import weight_of
from paredown.optim.parameter_state import put
from paredown.optim.sharded.local_rows import local

LPMM = Plan.preset("lpmm")
EVERYTHING = LPMM.set("activation", "int8/64@bf16")
CONFIG = GPTConfig(dim=64, num_layers=1, num_heads=2, vocabulary=101, context=16)  # 101 rows: no number of processes divides them
GATHERS = ("all_gather_single", "all_gather_into_tensor")  # the first is the name since torch 2.12
REDUCES = ("reduce_scatter_single", "reduce_scatter_tensor")


class Pictures(nn.Module):
    """A convolutional network; `ten` has 10 rows and `five` has 5, so that the last of four processes has none of these."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(3, 160, 3), nn.BatchNorm2d(160)
        self.ten, self.up, self.five = nn.Linear(160 * 4, 10), nn.Linear(10, 820), nn.Linear(820, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.adaptive_avg_pool2d(self.norm(self.conv(x)).relu(), 2).flatten(1)
        return self.five(self.up(self.ten(x)))


def pictures(seed: int) -> Tensor:
    return torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(seed))


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(CONFIG)


def texts(seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shape = (2, CONFIG.context)
    return torch.randint(CONFIG.vocabulary, shape, generator=draw), torch.randint(CONFIG.vocabulary, shape, generator=draw)


def sharded(model: nn.Module, *shape: int) -> nn.Module:
    """The layers of a GPT and the model under fully_shard, over a mesh of `shape` (default: all processes)."""
    mesh = init_device_mesh("cpu", shape or (dist.get_world_size(),), mesh_dim_names=("replicas", "shards")[-len(shape or (1,)) :])
    for layer in getattr(model, "layers", ()):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


Codes = list[dict[str, Tensor]]  # of each parameter: codes, scales and numbers by name


def codes_of(optimizer: AdamW) -> Codes:
    """Codes and scales of weights, moments and sums of gradients that this process has, and the numbers of steps and gradients."""
    states = optimizer.state_dict()["state"]
    found = [{name: local(value).clone() for name, value in states[i].items()} for i in sorted(states)]
    for i, entry in enumerate(optimizer.entries):
        if entry.gradient is not None:
            put(found[i], "gradient", entry.gradient.packed.parts)
    return found


def joined(processes: list[Codes]) -> Codes:
    """The rows of all processes."""
    return [
        {name: torch.cat([codes[i][name] for codes in processes]) if first.dim() else first for name, first in state.items()}
        for i, state in enumerate(processes[0])
    ]


def assign(model: nn.Module, step: int) -> None:
    """Gradients that do not depend on the number of processes."""
    draw = torch.Generator().manual_seed(step)
    for p in model.parameters():
        grad = torch.randn(p.shape, generator=draw)
        p.grad = distribute_tensor(grad, p.device_mesh, p.placements) if isinstance(p, DTensor) else grad


def with_given_gradients(model: nn.Module) -> tuple[Session, AdamW]:
    """Three steps under `LPMM` with the gradients of `assign`."""
    session = paredown.apply(LPMM, model)
    optimizer = AdamW(model.parameters(), lr=0.01)
    for step in range(3):
        assign(model, step)
        optimizer.step()
        optimizer.zero_grad()
    return session, optimizer


NETWORKS = {"gpt": gpt, "pictures": Pictures}


def loss_of(model: nn.Module, seed: int) -> Tensor:
    """The loss of a batch."""
    if isinstance(model, Pictures):
        return nn.functional.cross_entropy(model(pictures(seed)), torch.arange(4))
    ids, targets = texts(seed)
    return token_loss(model(ids), targets)


def train(model: nn.Module, optimizer: Any, rank: int, steps: range) -> list[float]:
    """A loop with two microbatches a step and clipping; losses of this process."""
    losses: list[float] = []
    for step in steps:
        for part in range(2):
            loss = loss_of(model, 100 * step + 10 * part + rank)
            loss.backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def started(plan: Plan = LPMM, network: str = "gpt") -> tuple[nn.Module, Session, AdamW]:
    model = sharded(NETWORKS[network]())
    session = paredown.apply(plan, model)
    return model, session, AdamW(model.parameters(), lr=0.01)


def states(model: nn.Module, optimizer: AdamW) -> dict[str, Any]:
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def save(folder: str, model: nn.Module, optimizer: AdamW) -> None:
    dcp.save(states(model, optimizer), checkpoint_id=folder)


def load(folder: str, model: nn.Module, optimizer: AdamW, **options: Any) -> None:
    state = states(model, optimizer)
    dcp.load(state, checkpoint_id=folder, **options)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])


def gradient_of(rank: int) -> Tensor:
    """1024 values that 8 bits hold exactly, 0 in all but two processes; the sum of these two is rounded."""
    values = torch.randint(-127, 128, (16, 64), generator=torch.Generator().manual_seed(rank)).float()
    values[:, 0] = 127.0  # so that the scale of each block is 1
    return values.flatten() * (1.0, 1 / 16, 0.0, 0.0)[rank]


def stored_in_process(model: nn.Module, optimizer: AdamW) -> int:
    """Bytes of the storages of weights, gradients and moments in this process; call it while there are gradients."""
    tensors: list[Tensor] = []
    for p in model.parameters():
        entry, weight = optimizer.entry_of(p), weight_of(p)
        assert entry is not None and p.grad is not None
        tensors += [
            v for name, v in optimizer.state[p].items() if isinstance(v, Tensor) and v.dim() and not name.startswith("weight.")
        ]
        tensors += [local(p)] if weight is None else weight.packed.parts.tensors()
        tensors += [local(p.grad)] if entry.gradient is None else entry.gradient.packed.parts.tensors()
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}.values())


@contextmanager
def counted() -> Generator[dict[str, int]]:
    """Bytes that this process gives to all-gathers and gets from reduce-scatters of FSDP2."""
    sent = {"all_gather": 0, "reduce_scatter": 0}
    originals = {name: getattr(dist, name) for name in (*GATHERS, *REDUCES) if hasattr(dist, name)}

    def count(name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            tensors = [value for value in (*args, *options.values()) if isinstance(value, Tensor)]
            sent["all_gather" if name in GATHERS else "reduce_scatter"] += min(t.nbytes for t in tensors)
            return originals[name](*args, **options)

        return call

    for name in originals:
        setattr(dist, name, count(name))
    try:
        yield sent
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
