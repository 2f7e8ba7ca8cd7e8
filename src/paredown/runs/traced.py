"""What tasks take, by arithmetic on a trace of one step: nothing is trained."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch

from paredown.errors import PlanError
from paredown.plan.footprint import footprint
from paredown.plan.outline import Outline, outline
from paredown.plan.plan import Plan
from paredown.plan.trace import Trace, trace_step
from paredown.runs.data import Pair
from paredown.runs.found import found_task
from paredown.runs.task import Task
from paredown.runs.train import Setting
from paredown.search.peppp import plan_bytes


def predicted_bytes(task: str, plan: Plan, folder: Path) -> int:
    """What a plan takes on a task; what `cheap_first` ranks by. Plans that speak of values that no step stores: by PEPPP's count."""
    try:
        return footprint(trace_of(task, folder), plan).peak_bytes
    except PlanError:
        return int(peppp_bytes(task, plan, folder))


def peppp_bytes(task: str, plan: Plan, folder: Path | None) -> float:
    """PEPPP's memory of a step: every tensor of it, in the words of the plan."""
    return plan_bytes(_outline(task, folder), plan)


@lru_cache(maxsize=4)
def trace_of(text: str, folder: Path, device: str | None = None) -> Trace:
    """The step of a task by name, for a GPU where there is one, unless given."""
    task, batch = _first(text, folder)
    kind = None if device is None else device.partition(":")[0]
    model = Setting(task, Plan(), 0, torch.device("cpu")).model()
    return trace_step(model, batch, loss=task.loss, optimizer=task.recipe.optimizer, device=kind, autocast=task.autocast)


@lru_cache(maxsize=4)
def _outline(text: str, folder: Path | None) -> Outline:
    task, (x, _) = _first(text, folder)
    return outline(Setting(task, Plan(), 0, torch.device("cpu")).model(), (x,))


def _first(text: str, folder: Path | None) -> tuple[Task, Pair]:
    """A task and its first batch."""
    task = found_task(text, folder)
    return task, next(task.data.batches(task.batch, seed=0, device=torch.device("cpu")))
