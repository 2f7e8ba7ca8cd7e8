"""`evaluate(task, plan, seed=0)` trains once and tells what came of it, as a Trial.

A run that diverged, that ran out of memory or that is hopeless is a trial with that status. What a model or a task of the user's raises is
raised here too. Task, plan, seed and device decide every number of a trial but its seconds (and some bytes of its measured peak: tables
that a process makes once). For that, torch is seeded and deterministic algorithms are asked for; torch's random state and settings are
afterwards what they were.

>>> from paredown.runs.tasks import find_task
>>> trial = evaluate(find_task("digits#model=mlp,steps=60"), Plan.preset("lpmm"), device="cpu")
>>> trial.status.value, trial.error < 0.5, len(trial.curve)
('done', True, 60)
"""

from __future__ import annotations

import gc
import re
import time
import warnings
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from paredown.errors import PlanError, TaskError, TraceError
from paredown.plan.footprint import footprint
from paredown.plan.keys import Key
from paredown.plan.plan import Plan
from paredown.plan.trace import Trace, trace_step
from paredown.plan.trial import Status, Trial
from paredown.roles import Role
from paredown.runs.curves import Curve
from paredown.runs.peaks import Meter, meter_of
from paredown.runs.tasks import Task, find_task
from paredown.runs.train import Loop, Progress, Setting, judge, make_optimizer, train, with_scores
from paredown.runs.where import commit, device_name, versions

# what libraries say, other than by an exception of their own, when there is no memory
NO_MEMORY = ("DefaultCPUAllocator", "out of memory", "STATUS_ALLOC_FAILED")
ASKED = re.compile(r"tried to allocate ([\d.]+ ?\w+)", re.IGNORECASE)


def evaluate(
    task: Task | str, plan: Plan, *, seed: int = 0, device: Any = None, mode: Any = "store", progress: Progress | None = None
) -> Trial:
    """Train `task` under `plan` from `seed` and judge it. `task` may be a name; `device` is CUDA where there is one, unless given.

    `mode`: "store" or "simulate", as `apply` takes it. `progress` is told (step, steps, training loss) up to a hundred times.
    """
    setting = make_setting(task, plan, seed=seed, device=device, mode=mode)
    meter = meter_of(setting.device)
    with seeded(setting), deterministic(setting.device):
        head, begun = head_of(setting), time.perf_counter()
        trial = _outcome(head, setting, meter, progress)
    measured = meter.bytes if setting.mode == "store" else None  # simulating saves nothing, and takes memory of its own
    return replace(trial, measured_peak_bytes=measured, seconds=time.perf_counter() - begun)


def head_of(setting: Setting) -> Trial:
    """What is known of a trial before it runs."""
    head = Trial(setting.task.name, setting.plan, setting.seed, Status.DONE, predicted_peak_bytes=_predicted(setting))
    return replace(head, device=device_name(setting.device), versions=versions(), commit=commit())


def curve_of(task: Task) -> Curve:
    """The empty curve of a task."""
    return Curve(task.steps, blind_loss=task.blind_loss, stops_early=task.stops_early)


def make_setting(task: Any, plan: Any, *, seed: Any = 0, device: Any = None, mode: Any = "store") -> Setting:
    """The arguments of `evaluate`, checked."""
    if isinstance(task, Plan):
        raise TaskError("evaluate takes the task first, then the plan: paredown.evaluate(task, plan).")
    task = find_task(task) if isinstance(task, str) else task
    if not isinstance(task, Task) or not isinstance(plan, Plan):
        raise TaskError(f"evaluate takes a Task, or its name, and a Plan, not {type(task).__name__} and {type(plan).__name__}.")
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63:
        raise TaskError(f"seed {seed!r} is none; it is a whole number from 0 to 2^63 - 1.")
    return Setting(task, plan, seed, find_device(device), mode)


def find_device(device: Any) -> torch.device:
    """The device of that name; CUDA where there is one, unless given."""
    num_gpus = torch.cuda.device_count()
    allowed = ["cpu", *(["cuda"] if num_gpus else []), *(f"cuda:{number}" for number in range(num_gpus))]
    wanted = str(device) if device is not None else "cuda" if num_gpus else "cpu"
    if wanted not in allowed:
        raise TaskError(f"device {wanted!r} is not here. Allowed: {', '.join(allowed)}.")
    return torch.device(wanted)


def _outcome(head: Trial, setting: Setting, meter: Meter, progress: Progress | None) -> Trial:
    """The trial without what is measured from outside; without memory, what the exception held is freed first."""
    task, curve = setting.task, curve_of(setting.task)
    try:
        return _run(head, setting, curve, meter, progress)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        asked = ASKED.search(str(error))
        reason = f"out of memory after {curve.step} of {task.steps} steps{f', asked for {asked[1]} more' if asked else ''}"
    finally:
        meter.stop()
    gc.collect()
    if setting.device.type == "cuda":
        torch.cuda.empty_cache()
    return replace(head, status=Status.OUT_OF_MEMORY, reason=reason, curve=tuple(curve.points))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that there is no memory."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(text in str(error) for text in NO_MEMORY)


def _run(head: Trial, setting: Setting, curve: Curve, meter: Meter, progress: Progress | None) -> Trial:
    """Train and judge; the session is closed whatever happens."""
    batches = setting.task.data.batches(setting.task.batch, seed=setting.seed, device=setting.device)
    meter.start()  # after the data, which is no part of a step
    model = setting.placed_model()
    with setting.session(model) as session:
        loop = Loop(setting, model, session)
        train(loop, batches, curve, after=meter.after, progress=progress)
        meter.stop()
        trial = replace(head, curve=tuple(curve.points))
        if curve.verdict is not None:
            trial = replace(trial, status=curve.verdict.status, reason=curve.verdict.reason)
        if trial.status is Status.DIVERGED:
            return trial
        error, loss = judge(loop)
    return with_scores(trial, error, loss)


# --- predicted bytes --------------------------------------------------------------------------------------------------


def _predicted(setting: Setting) -> int | None:
    """The footprint's peak; None where the step cannot be followed, or where a simulated plan speaks of values that no step stores."""
    keys = tuple(key for key, _ in setting.plan.rules)
    if setting.mode != "store" and keys in _refused.get(setting.task, ()):
        return None
    try:
        return footprint(traced(setting.task, setting.device.type, formats_state(setting.plan)), setting.plan).peak_bytes
    except TraceError:
        return None
    except PlanError as error:
        if setting.mode != "store":
            _refused.setdefault(setting.task, set()).add(keys)
            return None
        raise PlanError(f"task {setting.task.name!r}: {error}") from None


# Keys of simulated plans that speak of values that no step stores: asked once for all formats
_refused: weakref.WeakKeyDictionary[Task, set[tuple[str, ...]]] = weakref.WeakKeyDictionary()


@lru_cache(maxsize=4)
def traced(task: Task, device: str, formats_state: bool) -> Trace:
    """The step of a task as it is written; plans are arithmetic on it."""
    setting = Setting(task, Plan(), 0, torch.device("cpu"))
    model, (x, answers) = setting.model(), next(task.data.batches(task.batch, seed=0, device=setting.device))
    keeps = task.recipe.optimizer if formats_state else make_optimizer(task.recipe, model)
    return trace_step(model, (x, answers), loss=task.loss, optimizer=keeps, device=device, autocast=task.autocast)


def formats_state(plan: Plan) -> bool:
    """Whether a plan speaks of the model's memory: its optimizer then takes no scratch as torch's does."""
    return any(Key.parse(key).role not in (None, Role.ACTIVATION, Role.ERROR) for key, _ in plan.rules)


# --- the same numbers again -------------------------------------------------------------------------------------------


@contextmanager
def seeded(setting: Setting) -> Generator[None]:
    """torch's random states, seeded inside, and as they were afterwards."""
    devices = [setting.device] if setting.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(setting.seed)
        yield


@contextmanager
def deterministic(device: torch.device) -> Generator[None]:
    """Algorithms that give the same numbers again, where torch has them; a CPU's do."""
    if device.type != "cuda":
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    settings = [(torch.backends.cudnn, "benchmark", False), (torch.utils.deterministic, "fill_uninitialized_memory", False)]
    kept = [getattr(place, name) for place, name, _ in settings]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deterministic.*")
        try:
            torch.use_deterministic_algorithms(True, warn_only=True)
            for place, name, value in settings:
                setattr(place, name, value)
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            for (place, name, _), value in zip(settings, kept, strict=True):
                setattr(place, name, value)
