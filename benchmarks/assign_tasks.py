"""What bench_assign trains: ResNet-18 and a small ViT on CIFAR-10, a small GPT on English bytes, all under bf16 autocast.

The GPT returns its loss, as the models of Hugging Face do, so that what the loss saves is among the slots too.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from train_activations import Size, Task, picture_task, text_task

from paredown.models import MODELS

GPT_RATE = 3e-3  # of AdamW at its highest
LOUD = 100.0  # what a loud task multiplies pictures with: the norms behind the first layer take it away again


@dataclass(frozen=True)
class Sizes:
    """Of one task: to judge by, and for a look on the CPU."""

    full: Size
    quick: Size


SIZES = {
    "resnet18": Sizes(Size(32, 600, 128), Size(8, 4, 32, num_judged=64)),
    "vit": Sizes(Size(128, 600, 128, 4), Size(32, 4, 8, 2, num_judged=64)),
    "gpt": Sizes(Size(128, 600, 16, 4, 256, 512), Size(64, 4, 4, 2, 64, 16)),
}


def vit_task(folder: Path, device: str, size: Size) -> Task:
    """A ViT of patches of 4 x 4: AdamW."""
    base = picture_task(folder, device, size)

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.05, fused=True)

    shape = {"dim": size.width, "num_layers": size.num_layers, "num_heads": max(size.width // 32, 1)}
    return replace(base, name="vit on CIFAR-10", build=lambda: MODELS["vit"](**shape), optimizer=optimizer, peak_lr=1e-3)


class WithLoss(nn.Module):
    """A GPT that is given inputs and targets (num, 2, length), and returns its loss."""

    def __init__(self, gpt: nn.Module) -> None:
        super().__init__()
        self.gpt = gpt

    def forward(self, pairs: Tensor) -> Tensor:
        """The mean loss of a byte."""
        return self.gpt(pairs[:, 0], pairs[:, 1]).loss


def gpt_task(folder: Path, device: str, size: Size) -> Task:
    """A GPT on bytes that returns its loss: AdamW at a high rate."""
    base = text_task(folder, device, size)

    def batches(num: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
        x, target = base.batches(num, source)
        return torch.stack((x, target), dim=1), target

    return replace(
        base,
        build=lambda: WithLoss(base.build()),
        batches=batches,
        loss=lambda output, target: output,
        judge=lambda model: base.judge(model.gpt),
        peak_lr=GPT_RATE,
    )


MAKERS: dict[str, Callable[[Path, str, Size], Task]] = {"resnet18": picture_task, "vit": vit_task, "gpt": gpt_task}
RULES = {"resnet18": "sgdm", "vit": "adamw", "gpt": "adamw"}  # as traces name them
LAYERS = {"resnet18": ("layer?.?",), "vit": ("layers.*",), "gpt": ("gpt.layers.*",)}  # what plain checkpointing computes again


def loud(task: Task) -> Task:
    """The same task on pictures of large numbers."""

    def batches(num: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
        x, target = task.batches(num, source)
        return LOUD * x, target

    def judge(model: nn.Module) -> float:
        handle = model.register_forward_pre_hook(lambda module, args: (LOUD * args[0], *args[1:]))
        try:
            return task.judge(model)
        finally:
            handle.remove()

    return replace(task, batches=batches, judge=judge)


def tasks_of(options: argparse.Namespace, device: str) -> Iterator[tuple[str, Task]]:
    """The tasks that were asked for, by name."""
    for name in options.model or MAKERS:
        sizes = SIZES[name]
        size = sizes.quick if options.quick else sizes.full
        steps = size.num_steps if options.quick else max(int(options.share * size.num_steps), 1)
        yield name, MAKERS[name](options.data, device, replace(size, num_steps=steps))
