"""Small tasks and files that the tests of tasks and sweeps share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from paredown import Plan, Trial, evaluate
from paredown.study.tasks.data import Examples
from paredown.study.tasks.task import OptimizerSettings, Task

CPU = torch.device("cpu")
NUM_CLASSES = 4
DATA = Path(os.environ.get("PAREDOWN_DATA", "no such folder"))
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="PAREDOWN_DATA names no folder")


def blobs(num: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points (num, 16) around a corner for each class: easy to learn."""
    source = torch.Generator().manual_seed(seed)
    y = torch.randint(NUM_CLASSES, (num,), generator=source)
    x = 0.3 * torch.randn(num, 16, generator=source)
    x[torch.arange(num), y] += 2.0
    return x, y


def examples(num: int = 128) -> Examples:
    """Blobs, sorted by class so that an order that is not shuffled shows."""
    x, y = blobs(num, seed=0)
    order = y.argsort()
    return Examples(x[order], y[order], *blobs(64, seed=1))


def net(seed: int) -> nn.Module:
    """Large enough that its first weight is packed."""
    return nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, NUM_CLASSES))


def make_task(make_model: Callable[[int], nn.Module] = net, **changes: Any) -> Task:
    """Blobs for `net`."""
    given: dict[str, Any] = {"steps": 12, "batch": 32, "settings": OptimizerSettings("sgdm", 0.1), **changes}
    return Task("blobs", make_model, given.pop("data", None) or examples(), **given)


def run(task: Task, plan: Plan | None = None, **options: Any) -> Trial:
    """A trial on the CPU; the baseline without a plan."""
    return evaluate(task, plan if plan is not None else Plan(), device="cpu", **options)


def pictures(num: int, *shape: int, num_classes: int = 3, seed: int = 0) -> tuple[Any, Any]:
    """Bytes (num, *shape) and labels, every class in turn."""
    return np.random.default_rng(seed).integers(0, 256, (num, *shape), dtype=np.uint8), np.arange(num) % num_classes


def write_npz(path: Path, shape: tuple[int, ...] = (6, 6), **changes: Any) -> Path:
    """An `.npz` with the usual four arrays, or with `changes` to them; None leaves one out."""
    x_train, y_train = pictures(30, *shape)
    x_test, y_test = pictures(9, *shape, seed=1)
    arrays = {"x_train": x_train, "y_train": y_train, "x_test": x_test, "y_test": y_test, **changes}
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return path
