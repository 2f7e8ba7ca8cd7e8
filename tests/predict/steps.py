"""Steps that tests trace: models, batches and losses, and what a real step on the CPU stores and allocates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import cross_entropy

from paredown.autograd.module_watch import Watch
from paredown.models import MODELS, OF_TEXT, random_batch
from paredown.models.transformer import token_loss
from paredown.plan.trace import Trace
from paredown.predict.trace_step import trace_step
from tests.support import memory

Step = tuple[nn.Module, tuple[Tensor, Tensor], Callable[..., Tensor]]


def step_of(name: str, num: int = 4) -> Step:
    """A small reference model, a batch of `num` for it, and its loss."""
    torch.manual_seed(0)
    return MODELS[name](), random_batch(name, num), token_loss if name in OF_TEXT else cross_entropy


def traced(name: str, num: int = 4, **options: Any) -> Trace:
    """The trace of that step, by default on the CPU."""
    model, batch, loss = step_of(name, num)
    return trace_step(model, batch, loss=loss, **{"device": "cpu", **options})


def saved_bytes(model: nn.Module, batch: tuple[Tensor, Tensor], loss: Callable[..., Tensor]) -> int:
    """Bytes of the storages that autograd holds after a real forward pass, without parameters, buffers and the batch."""
    initial = [*model.parameters(), *model.buffers(), *batch]
    initial_storages = {t.untyped_storage().data_ptr() for t in initial}
    held: dict[int, Tensor] = {}  # kept alive, so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in initial_storages:
            held[tensor.untyped_storage().data_ptr()] = tensor.detach()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        value = loss(model(batch[0]), batch[1])
    total = sum(t.untyped_storage().nbytes() for t in held.values())
    del value
    return total


def peak_bytes(model: nn.Module, batch: tuple[Tensor, Tensor], loss: Callable[..., Tensor]) -> int:
    """The most bytes that a real step holds at once beside parameters, buffers and the batch, by torch's profiler."""
    loss(model(batch[0]), batch[1]).backward()  # the first step allocates what later ones reuse
    model.zero_grad()

    def step() -> Tensor:
        output = model(batch[0])
        loss(output, batch[1]).backward()
        return output

    with TemporaryDirectory() as folder:
        return memory.peak_bytes(step, Path(folder))


def names_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> set[str]:
    """The names of the activations that a real forward pass saves."""
    names: set[str] = set()
    watch = Watch(model, lambda saved: names.add(saved.name) if saved.kind == "activation" else None)
    watch.attach()
    model(batch[0])
    watch.detach()
    return names
