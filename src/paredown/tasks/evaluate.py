"""`evaluate(task, plan, seed=0)` trains once and tells what came of it, as a Trial.

A run that diverged, that ran out of memory or that is hopeless is a trial with that status. What a model or a task of the user's raises is
raised here too. Task, plan, seed and device decide every number of a trial but its seconds (and some bytes of its measured peak: tables
that a process makes once). For that, torch is seeded and deterministic algorithms are asked for; torch's random state and settings are
afterwards what they were.

>>> from paredown.tasks.lookup import find_task
>>> trial = evaluate(find_task("digits#model=mlp,steps=60"), Plan.preset("lpmm"), device="cpu")
>>> trial.status.value, trial.error < 0.5, len(trial.curve)
('done', True, 60)

The most bytes of tensors that a training holds at one time, measured.

On CUDA that is what torch's allocator counts, over the whole run. On a CPU the allocator keeps no count: torch's profiler writes
down each allocation and release, temporaries inside of operators included, from before the model is made until the first STEPS steps
are done; by then all state of the optimizer is there.

Where a trial ran: device, versions and the commit of paredown; no path, no host, no user.
"""


# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import gc
import os
import platform
import re
import subprocess
import time
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, final

import torch
from torch import autograd

from paredown.errors import PlanError, TaskError, TraceError
from paredown.plan.footprint import footprint
from paredown.plan.plan import Plan
from paredown.tasks.lookup import find_task
from paredown.tasks.task import Task
from paredown.tasks.task_trace import trace_task
from paredown.tasks.training import Loop, LossCurve, ProgressCallback, TrainingSetup, judge, train, with_scores
from paredown.tasks.trial import Status, Trial

STEPS = 3  # that are measured on a CPU


class Meter(ABC):
    """Counts from `start` on; `bytes` is None where nothing could be measured."""

    bytes: int | None = None

    @abstractmethod
    def start(self) -> None:
        """Before the model is there."""

    @abstractmethod
    def stop(self) -> None:
        """After the last step, or earlier; a second call does nothing."""

    @abstractmethod
    def after(self, step: int) -> None:
        """After each step, counted from 1."""


@final
class CudaMeter(Meter):
    """What the allocator counts, beyond what was there before."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._before, self._runs = device, 0, False

    def start(self) -> None:
        """Before the model is there."""
        torch.cuda.synchronize(self._device)
        if clear := getattr(torch._C, "_cuda_clearCublasWorkspaces", None):
            clear()  # kept from the trials before in this process: each takes its own, as in a process of its own
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before, self._runs = torch.cuda.memory_allocated(self._device), True

    def after(self, step: int) -> None:
        """The allocator goes on counting."""

    def stop(self) -> None:
        """Reads the peak."""
        if self._runs:
            self.bytes, self._runs = torch.cuda.max_memory_allocated(self._device) - self._before, False


@final
class CpuMeter(Meter):
    """What the profiler writes down; a process in which it runs already is not measured."""

    def __init__(self) -> None:
        self._runs = False

    def start(self) -> None:
        """Before the model is there."""
        if not hasattr(autograd, "_enable_profiler_legacy") or autograd._profiler_enabled():
            return
        gc.collect()  # what is freed now is not freed while the profiler looks on
        state, choices = autograd.ProfilerState.CPU, torch._C._profiler._ExperimentalConfig()  # type: ignore[attr-defined]
        autograd._enable_profiler_legacy(autograd.ProfilerConfig(state, False, True, False, False, False, choices))
        self._runs = True

    def after(self, step: int) -> None:
        """The profiler slows steps down, so that it ends after some."""
        if step >= STEPS:
            self.stop()

    def stop(self) -> None:
        """Adds up what was written down."""
        if self._runs:
            self._runs = False
            self.bytes = largest_sum([event for thread in autograd._disable_profiler_legacy() for event in thread])


def largest_sum(events: list[Any]) -> int:
    """The largest running sum of bytes taken and given back."""
    held = peak = 0
    for event in events:
        if event.kind() == "memory_alloc":
            held += event.cpu_memory_usage()
            peak = max(peak, held)
    return peak


def meter_of(device: torch.device) -> Meter:
    """The one for this device."""
    return CudaMeter(device) if device.type == "cuda" else CpuMeter()


# --- Where a trial ran ---

PACKAGES = ("torch", "numpy", "triton")
ROOT = Path(__file__).parents[3]  # of a checkout: src/paredown/runs lies in it


def device_name(device: torch.device) -> str:
    """What the device calls itself."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"


@lru_cache(maxsize=1)
def versions() -> dict[str, str]:
    """Of paredown, Python and the packages that numbers depend on; CUDA's where torch has it."""
    own: str = import_module("paredown").__version__  # the one name of the public surface that is needed here
    found = {"paredown": own, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    found["torch"] = torch.__version__
    return found | ({"cuda": torch.version.cuda} if torch.version.cuda else {})


@lru_cache(maxsize=1)
def commit() -> str:
    """Of the checkout that paredown is run from, with `-dirty` where files were changed; empty where it was installed.

    The environment variable PAREDOWN_COMMIT says it where a checkout was copied without its history.
    """
    if os.environ.get("PAREDOWN_COMMIT"):
        return os.environ["PAREDOWN_COMMIT"]
    if not (ROOT / ".git").exists() or not (ROOT / "pyproject.toml").exists():
        return ""
    try:
        asked = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
        return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


# --- `evaluate(task, plan, seed=0)` trains once and tells what came of it, as a Trial ---

# what libraries say, other than by an exception of their own, when there is no memory
NO_MEMORY = ("DefaultCPUAllocator", "out of memory", "STATUS_ALLOC_FAILED")
ASKED = re.compile(r"tried to allocate ([\d.]+ ?\w+)", re.IGNORECASE)


def evaluate(
    task: Task | str,
    plan: Plan,
    *,
    seed: int = 0,
    device: Any = None,
    mode: Any = "store",
    progress: ProgressCallback | None = None,
) -> Trial:
    """Train `task` under `plan` from `seed` and judge it. `task` may be a name; `device` is CUDA where there is one, unless given.

    `mode`: "store" or "simulate", as `apply` takes it. `progress` is told (step, steps, training loss) up to a hundred times.
    """
    setting = make_setting(task, plan, seed=seed, device=device, mode=mode)
    meter = meter_of(setting.device)
    with seeded(setting), deterministic(setting.device):
        head, begun = empty_trial(setting), time.perf_counter()
        trial = _outcome(head, setting, meter, progress)
    measured = meter.bytes if setting.mode == "store" else None  # simulating saves nothing, and takes memory of its own
    return replace(trial, measured_peak_bytes=measured, seconds=time.perf_counter() - begun)


def empty_trial(setting: TrainingSetup) -> Trial:
    """What is known of a trial before it runs."""
    head = Trial(setting.task.name, setting.plan, setting.seed, Status.DONE, predicted_peak_bytes=_predicted(setting))
    return replace(head, device=device_name(setting.device), versions=versions(), commit=commit())


def curve_of(task: Task) -> LossCurve:
    """The empty curve of a task."""
    return LossCurve(task.steps, blind_loss=task.blind_loss, stops_early=task.stops_early)


def make_setting(task: Any, plan: Any, *, seed: Any = 0, device: Any = None, mode: Any = "store") -> TrainingSetup:
    """The arguments of `evaluate`, checked."""
    if isinstance(task, Plan):
        raise TaskError("evaluate takes the task first, then the plan: paredown.evaluate(task, plan).")
    task = find_task(task) if isinstance(task, str) else task
    if not isinstance(task, Task) or not isinstance(plan, Plan):
        raise TaskError(f"evaluate takes a Task, or its name, and a Plan, not {type(task).__name__} and {type(plan).__name__}.")
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63:
        raise TaskError(f"seed {seed!r} is none; it is a whole number from 0 to 2^63 - 1.")
    return TrainingSetup(task, plan, seed, find_device(device), mode)


def find_device(device: Any) -> torch.device:
    """The device of that name; CUDA where there is one, unless given."""
    num_gpus = torch.cuda.device_count()
    allowed = ["cpu", *(["cuda"] if num_gpus else []), *(f"cuda:{number}" for number in range(num_gpus))]
    wanted = str(device) if device is not None else "cuda" if num_gpus else "cpu"
    if wanted not in allowed:
        raise TaskError(f"device {wanted!r} is not here. Allowed: {', '.join(allowed)}.")
    return torch.device(wanted)


def _outcome(head: Trial, setting: TrainingSetup, meter: Meter, progress: ProgressCallback | None) -> Trial:
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


def _run(head: Trial, setting: TrainingSetup, curve: LossCurve, meter: Meter, progress: ProgressCallback | None) -> Trial:
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


def _predicted(setting: TrainingSetup) -> int | None:
    """The footprint's peak; None where the step cannot be followed, or where a simulated plan speaks of values that no step stores."""
    keys = tuple(key for key, _ in setting.plan.rules)
    if setting.mode != "store" and keys in _refused.get(setting.task, ()):
        return None
    try:
        return footprint(trace_task(setting.task, setting.plan, setting.device.type), setting.plan).peak_bytes
    except TraceError:
        return None
    except PlanError as error:
        if setting.mode != "store":
            _refused.setdefault(setting.task, set()).add(keys)
            return None
        raise PlanError(f"task {setting.task.name!r}: {error}") from None


# Keys of simulated plans that speak of values that no step stores: asked once for all formats
_refused: weakref.WeakKeyDictionary[Task, set[tuple[str, ...]]] = weakref.WeakKeyDictionary()


# --- the same numbers again -------------------------------------------------------------------------------------------


@contextmanager
def seeded(setting: TrainingSetup) -> Generator[None]:
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
