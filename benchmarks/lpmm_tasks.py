"""What train_lpmm trains: models, data and settings of their optimizers."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from train_activations import Size, Task, find_file, picture_task, text_task

from paredown.models.small_networks import MLP

EXAMPLES_AT_ONCE = 5000  # when judging
MICROBATCH = 32


@dataclass(frozen=True)
class Setting:
    """A task, the data that it found, and how its optimizer is set."""

    task: Task
    data: str
    rule: str
    options: dict[str, Any]
    seeds: tuple[int, ...]
    ways: tuple[str, ...] | None = None  # None: all
    microbatches: int = 1
    max_norm: float | None = None


class Clothes:
    """Fashion-MNIST on the device as bytes, made numbers of mean 0 and deviation 1 batch by batch."""

    def __init__(self, path: Path, device: str) -> None:
        arrays = np.load(path)
        self.train, self.test = (torch.from_numpy(arrays[key]).to(device)[:, None] for key in ("x_train", "x_test"))
        self.train_labels, self.test_labels = (torch.from_numpy(arrays[key]).to(device).long() for key in ("y_train", "y_test"))
        values = self.train.float()
        self.mean, self.deviation, self.device = values.mean().item(), values.std().item(), device

    def numbers(self, pictures: Tensor) -> Tensor:
        """(num, 1, 28, 28) float32 of the bytes."""
        return (pictures.float() - self.mean) / self.deviation

    def batch(self, num: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
        """Pictures drawn at random."""
        which = torch.randint(len(self.train), (num,), generator=source, device=self.device)
        return self.numbers(self.train[which]), self.train_labels[which]

    def accuracy(self, model: nn.Module, num_judged: int) -> float:
        """The share of test pictures that `model` names right."""
        parts = self.test[:num_judged].split(EXAMPLES_AT_ONCE)
        named = torch.cat([model(self.numbers(part)).argmax(1) for part in parts])
        return (named == self.test_labels[:num_judged]).float().mean().item()


def small_cnn() -> nn.Module:
    """Two convolutions, each with pooling, and two linear layers."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * 7 * 7, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


def clothes_setting(
    name: str, build: Callable[[], nn.Module], size: Size, lr: float, microbatches: int, options: argparse.Namespace
) -> Setting:
    """One of the tasks on Fashion-MNIST; `size.num_steps` counts backward passes."""
    try:
        path = find_file(options.data, "images", "fashion_mnist_full.npz")
    except SystemExit:
        path = find_file(options.data, "images", "fashion_mnist.npz")
    data = Clothes(path, device_of(options))
    task = Task(
        *(f"{name} on Fashion-MNIST", "accuracy", 0.1, size),
        build=build,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=lr),
        peak_lr=lr,
        batches=data.batch,
        loss=cross_entropy,
        judge=lambda model: data.accuracy(model, size.num_judged),
    )
    rule = {"momentum": 0.9, "weight_decay": 1e-4}
    return Setting(task, f"{path.name}, {len(data.train)} pictures", "sgd", rule, (0, 1, 2, 3, 4), microbatches=microbatches)


def mlp_setting(options: argparse.Namespace) -> Setting:
    """784-256-128-10 in batches of 128: ten times all pictures."""
    size = Size(128, 12, 32, num_judged=256) if options.quick else Size(128, 4690, 128)
    return clothes_setting("mlp", partial(MLP, sizes=(784, 256, 128, 10)), size, 0.05, 1, options)


def cnn_setting(options: argparse.Namespace) -> Setting:
    """A small CNN in batches of 128: five times all pictures."""
    size = Size(32, 6, 16, num_judged=64) if options.quick else Size(32, 2345, 128)
    return clothes_setting("cnn", small_cnn, size, 0.05, 1, options)


def microbatch_setting(microbatches: int, options: argparse.Namespace) -> Setting:
    """The MLP in microbatches: four times all pictures, K of them to a step."""
    size = Size(128, 16, 8, num_judged=256) if options.quick else Size(128, 7504, MICROBATCH)
    build = partial(MLP, sizes=(784, 256, 128, 10))
    setting = clothes_setting(f"mlp K={microbatches}", build, size, 0.01 * microbatches, microbatches, options)
    return replace(setting, ways=("fp32", "lpmm", "lpmm-nearest"))


def resnet_setting(options: argparse.Namespace) -> Setting:
    """ResNet-18 on CIFAR-10."""
    size = Size(8, 6, 16, num_judged=128) if options.quick else Size(64, 900, 128)
    rule = {"momentum": 0.9, "nesterov": True, "weight_decay": 5e-4}
    return Setting(picture_task(options.data, device_of(options), size), "cifar10.npz", "sgd", rule, (0, 1, 2))


def gpt_setting(options: argparse.Namespace) -> Setting:
    """A GPT on bytes; gradients are clipped."""
    size = Size(32, 8, 4, 2, 64, 64) if options.quick else Size(256, 500, 64, 6, 256, 2048)
    rule = {"betas": (0.9, 0.95), "weight_decay": 0.1}
    task = text_task(options.data, device_of(options), size)
    return Setting(task, "sotu_en.txt.gz", "adamw", rule, (0, 1, 2), max_norm=1.0)


SETTINGS: dict[str, Callable[[argparse.Namespace], Setting]] = {
    "resnet18": resnet_setting,
    "gpt": gpt_setting,
    "mlp": mlp_setting,
    "cnn": cnn_setting,
    "mlp-k1": partial(microbatch_setting, 1),
    "mlp-k8": partial(microbatch_setting, 8),
}


def device_of(options: argparse.Namespace) -> str:
    """Where it runs."""
    return "cpu" if options.quick else "cuda"


def settings_of(options: argparse.Namespace) -> Iterator[Setting]:
    """The settings that were asked for."""
    for name in options.model or SETTINGS:
        setting = SETTINGS[name](options)
        size = replace(setting.task.size, num_steps=max(int(options.share * setting.task.size.num_steps), 1))
        yield replace(setting, task=replace(setting.task, size=size), seeds=tuple(options.seeds or setting.seeds))
