"""`trace_task(task, plan)` traces a task's training step. `evaluate`, `pick`, sweeps and the command line predict bytes from the trace.

Nothing is trained: the step runs on fake tensors, and the footprint of a plan is arithmetic on its trace.

>>> from paredown.study.tasks.lookup import find_task
>>> task = find_task("digits#model=mlp,optimizer=adamw,lr=0.001")
>>> peak_of(trace_task(task, device="cpu"), Plan())
1630624

The optimizer's temporaries depend on the plan, and so does the trace:

- A plan without rules for weights, gradients and optimizer state trains with torch.optim's arithmetic (`paredown.optim` calls it), whose
  step allocates temporaries as large as all parameters on CUDA, or as the largest parameter on a CPU. These count at the peak.
- A plan with such rules trains with the optimizers of `paredown.optim`, and the trace counts no temporaries. On a CPU, where their plain
  torch reference runs, that is too little: the MLP below has a measured peak of 5.7 MB under `lpmm`, and a prediction of 1.0 MB.

Measured peaks of the AdamW baseline show that these temporaries must count. An MLP of width 2048 on digits has a peak of 155.2 MB on one
H200 (torch 2.11); its trace predicts 154.1 MB with the temporaries, and 137.0 MB without. The MLP above, of width 256, has a peak of
1,893,952 bytes on a CPU; its trace predicts 1,630,624 with the temporaries and 1,402,536 without (tests/study/tasks/test_task_trace.py).
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from paredown.errors import PlanError
from paredown.loss.output_head import CHUNKED_LOSS
from paredown.plan.footprint import peak_of
from paredown.plan.plan import Plan
from paredown.plan.selectors import Selector
from paredown.plan.trace import Trace
from paredown.predict.trace_step import trace_step
from paredown.roles import Role
from paredown.simulate.outline import Outline, outline
from paredown.simulate.peppp import plan_bytes
from paredown.study.tasks.data import Pair
from paredown.study.tasks.lookup import cached_task
from paredown.study.tasks.task import Task
from paredown.study.tasks.training import TrainingSetup, make_optimizer

CPU = torch.device("cpu")


def trace_task(
    task: Task,
    plan: Plan | None = None,
    device: str | None = None,
    *,
    batch_size: int | None = None,
    optimizer: str | None = None,
    compiled: bool = False,
    chunked_loss: bool = CHUNKED_LOSS,
) -> Trace:
    """Return the trace of one step of `task`, from which the footprint of `plan` (None: the baseline) is predicted.

    `device`: "cpu" or "cuda", with or without a number; CUDA if available when None. `batch_size` and the name `optimizer` replace the
    task's own. `compiled` and `chunked_loss`: as in `trace_step`. Traces are cached for the last few tasks.
    """
    kind = None if device is None else device.partition(":")[0]
    return _trace(task, kind, formats_state(plan or Plan()), batch_size, optimizer, (compiled, chunked_loss))


def formats_state(plan: Plan) -> bool:
    """Return whether a plan has rules for weights, gradients or optimizer state; the optimizer's temporaries are not traced then."""
    return any(Selector.parse(key).role not in (None, Role.ACTIVATION, Role.ERROR, Role.FROZEN) for key, _ in plan.rules)


@lru_cache(maxsize=4)
def _trace(
    task: Task, device: str | None, has_state_formats: bool, batch_size: int | None, optimizer: str | None, step: tuple[bool, bool]
) -> Trace:
    """Return the trace of a training step; `step` says whether it is compiled, and whether its loss is computed in chunks.

    With `has_state_formats` the optimizer is one of paredown.optim, whose temporaries are not traced.
    """
    with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []):
        model, batch = TrainingSetup(task, Plan(), 0, CPU).placed_model(), _first_batch(task)
    if batch_size is not None:
        batch = resized(batch, len(batch[0]), batch_size)
    # An optimizer by name has state and no temporaries; an instance has both.
    state: Any = optimizer or (task.settings.optimizer if has_state_formats else make_optimizer(task.settings, model))
    options: Any = {"device": device, "autocast": task.autocast, "compiled": step[0], "chunked_loss": step[1]}
    return trace_step(model, batch, loss=task.loss, optimizer=state, **options)


def resized(batch: Any, batch_size: int, new_batch_size: int) -> Any:
    """Return `batch`, nested tensors, with `new_batch_size` instead of `batch_size` examples; changed ones are on meta."""

    def change(tensor: Tensor) -> Tensor:
        if not tensor.ndim or len(tensor) != batch_size:
            return tensor
        made = torch.empty((new_batch_size, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")
        is_last = tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()
        return made.to(memory_format=torch.channels_last) if is_last else made

    return batch if new_batch_size == batch_size else tree_map_only(Tensor, change, batch)


def predicted_bytes(text: str, plan: Plan, folder: Path, device: str | None = None) -> int:
    """Return the predicted peak bytes of a plan on the task named `text`, by which sweeps with `cheap_first` sort trials.

    For a simulated plan with rules for values that no step stores, these are the bytes of PEPPP's memory model.
    """
    try:
        return peak_of(trace_task(_task_by_name(text, folder), plan, device), plan)
    except PlanError:
        return int(peppp_bytes(text, plan, folder))


def peppp_bytes(text: str, plan: Plan, folder: Path | None) -> float:
    """Return the bytes of a step of the task `text` in PEPPP's memory model: every tensor of the step in the plan's formats."""
    return plan_bytes(outline_task(_task_by_name(text, folder)), plan)


@lru_cache(maxsize=4)
def outline_task(task: Task) -> Outline:
    """Return the outline of a forward pass on the task's first batch: the list of all tensors that operations compute."""
    x, _ = _first_batch(task)
    return outline(TrainingSetup(task, Plan(), 0, CPU).model(), (x,))


@lru_cache(maxsize=4)
def _task_by_name(text: str, folder: Path | None) -> Task:
    """Return one Task object per name, since traces are cached by object; `cached_task` makes tasks of user code anew at each call."""
    return cached_task(text, folder)


def _first_batch(task: Task) -> Pair:
    return next(task.data.batches(task.batch, seed=0, device=CPU))
