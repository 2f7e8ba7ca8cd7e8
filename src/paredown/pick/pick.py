"""`pick(task, budget)`: the plan to train a task with within a budget, from earlier tasks and a few trials.

    candidates and their bytes  ->  what earlier tasks say of them  ->  trials, one after the other  ->  the frontier and the plan

Only plans within the budget are tried. Trials are those that are worth most to the choice (pick/acquisition.py); the last one is for the
plan that is about to be taken, if it was not tried. No trial at all is fine: then earlier tasks alone answer, with their bands.

>>> from paredown.pick.priors import made_up_prior
>>> picked = pick("digits#model=mlp,steps=30", "80%", evaluations=0, prior=made_up_prior(), device="cpu")
>>> picked.plan is not None, picked.point.predicted_bytes <= picked.budget_bytes, picked.trials
(True, True, ())
"""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paredown.errors import PlanError, TaskError
from paredown.pick import priors
from paredown.pick.answer import Picked
from paredown.pick.candidates import Candidates, TaskStep, candidates
from paredown.pick.pick_loop import PickLoop
from paredown.pick.prior_collection import family_of_task
from paredown.pick.prior_data import PriorData
from paredown.pick.task_prior import TaskPrior, blind_error
from paredown.plan.footprint import footprint
from paredown.plan.plan import Plan
from paredown.roles import Role
from paredown.simulate.outline import Outline
from paredown.simulate.peppp import plan_bytes
from paredown.sizes import parse_bytes
from paredown.sweeps.measurement import Runner, TrialCallback, measurer
from paredown.tasks.evaluate import device_name, find_device
from paredown.tasks.lookup import find_task
from paredown.tasks.task import Task
from paredown.tasks.task_trace import outline_task, trace_task
from paredown.trace.trace import Trace

MODES = {"store": "store", "simulate": "simulate", "peppp": "simulate"}  # and the mode of the prior that is asked


def pick(
    task: Task | str,
    budget: int | str = "40%",
    evaluations: int = 8,
    *,
    prior: str | os.PathLike[str] | PriorData | None = None,
    store: str | Path | None = None,
    mode: str = "store",
    seed: int = 0,
    device: Any = None,
    progress: TrialCallback | None = None,
) -> Picked:
    """The plan of least expected error whose predicted peak is within `budget`, after at most `evaluations` trials.

    `prior`: earlier tasks, by name or as they are; all that is known in this mode unless given. `store`: where trials are kept, a path or
    an URL; with it a pick that was interrupted goes on. `seed`: of the first trial of each plan. `progress` is told (trials done, trials
    at most, a sentence).
    """
    begun = time.perf_counter()
    found = _checked(task, evaluations, mode)
    earlier = _earlier(prior, mode)
    place = find_device(device)
    step = task_step(found, place.type, mode, earlier)
    budget_bytes = parse_bytes(budget, whole=step.full_bytes)
    runs = measurer(Runner(found, mode, None if device is None else str(place)), store, f"pick {budget_bytes} bytes")
    try:
        own, others = runs.known()
        rows = candidates(step, earlier, budget, [(f"trial of {trial.task}", trial.plan) for trial in (*own, *others)])
        picking = _begun(found, budget_bytes, step, rows, TaskPrior.of(earlier, _family(found)), place)
        picking.learn(own, others)
        picking.search(runs, evaluations, seed=seed, told=progress)
    finally:
        runs.close()
    return picking.answer(time.perf_counter() - begun)


def _begun(task: Task, budget_bytes: int, step: TaskStep, rows: Candidates, learned: TaskPrior, place: torch.device) -> PickLoop:
    """What is known before any trial; on a GPU measured peaks have to fit too."""
    about: dict[str, Any] = {"task": task.name, "metric": _metric(task), "unit": blind_of(task), "budget_bytes": budget_bytes}
    where: dict[str, Any] = {"is_strict": place.type == "cuda", "device": device_name(place)}
    return PickLoop(**about, step=step, candidates=rows, learned=learned, **where)


def _earlier(prior: str | os.PathLike[str] | PriorData | None, mode: str) -> PriorData:
    if isinstance(prior, PriorData):
        return prior
    return priors.known_prior(MODES[mode]) if prior is None else priors.load(prior)


def _checked(task: Any, evaluations: Any, mode: Any) -> Task:
    """The task, once all that was asked for makes sense."""
    if not isinstance(evaluations, int) or isinstance(evaluations, bool) or evaluations < 0:
        raise TaskError(f"evaluations is {evaluations!r}; it is a whole number from 0 up (0: earlier tasks alone answer).")
    if mode not in MODES:
        raise TaskError(f"mode {mode!r} is unknown. Allowed: {', '.join(MODES)}.")
    found = find_task(task) if isinstance(task, str) else task
    if not isinstance(found, Task):
        raise TaskError(f"pick takes a Task, or its name, and a budget, not {type(found).__name__}.")
    return found


def _metric(task: Task) -> str:
    return task.metric if isinstance(task.metric, str) else getattr(task.metric, "__name__", "metric")


def _family(task: Task) -> str:
    with torch.random.fork_rng(devices=[]):  # making a model draws numbers
        return family_of_task(task)


def blind_of(task: Task) -> float | None:
    """The error of a guess that knows nothing; None where that is not known."""
    if task.metric == "loss":
        return task.blind_loss
    return blind_error(task.metric, task.data.num_answers) if isinstance(task.metric, str) else None


def task_step(task: Task, device: str, mode: str, earlier: PriorData) -> TaskStep:
    """The step of a task, to be planned for: bytes are those that it stores; of PEPPP's configurations those that PEPPP counts."""

    def trace_of(plan: Plan) -> Trace:
        return trace_task(task, plan, device)

    def bytes_of(plan: Plan) -> int:
        return footprint(trace_of(plan), plan).peak_bytes

    if mode != "store" and any(row.plan is not None and is_peppp(Plan.from_json(row.plan)) for row in earlier.plans):
        counted = partial(_counted_bytes, outline_task(task))
        return TaskStep(counted, None, counted(Plan()))
    return TaskStep(bytes_of, trace_of if mode == "store" else None, bytes_of(Plan()))


def is_peppp(plan: Plan) -> bool:
    """Whether a plan has what tells PEPPP's configurations: low weights and high masters."""
    return all(plan.find(("*",), role).format is not None for role in (Role.WEIGHT, Role.MASTER))


def _counted_bytes(outline: Outline, plan: Plan) -> int:
    if not (is_peppp(plan) or plan.changes_nothing):
        raise PlanError("PEPPP counts the memory of its own configurations.")
    plan.check(outline.slots())
    try:
        return int(plan_bytes(outline, plan))
    except IndexError:
        raise PlanError("PEPPP counts the memory of its own network.") from None
