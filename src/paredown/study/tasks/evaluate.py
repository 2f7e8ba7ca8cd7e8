"""`evaluate(task, plan, seed=0)` trains a task once and returns a Trial: error, loss, peak memory, step time and status.

A run that diverged, that ran out of memory or that was stopped as hopeless is a trial with that status. Exceptions of the user's model or
task propagate. Task, plan, seed and device decide every number of a trial except its times (and some bytes of its measured peak: tables
that a process allocates once). For that, torch is seeded and uses deterministic algorithms; both are restored afterwards.

>>> from paredown.study.tasks.lookup import find_task
>>> trial = evaluate(find_task("digits#model=mlp,steps=60"), Plan.preset("lpmm"), device="cpu")
>>> trial.status.value, trial.error < 0.5, len(trial.curve)
('done', True, 60)

Measured peak memory: on CUDA what torch's allocator counts over the whole run. The CPU allocator has no counter, so torch's profiler
records each allocation and release, temporaries inside of operators included, from before the model is made until NUM_MEASURED_STEPS
steps are done; by then all optimizer state is allocated.

A trial also records where it ran: device, versions and the commit of paredown; no path, host name or user name.
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
from collections import Counter, deque
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import lru_cache
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import autograd, nn

from paredown.check.out_of_memory import is_out_of_memory
from paredown.codec.cpu import load_loops
from paredown.errors import PlanError, TaskError, TraceError
from paredown.plan.footprint import peak_of
from paredown.plan.plan import Plan
from paredown.study.tasks import training
from paredown.study.tasks.lookup import find_task
from paredown.study.tasks.task import Task
from paredown.study.tasks.task_trace import trace_task
from paredown.study.tasks.trial import Status, Trial
from paredown.version import __version__

NUM_WARM_UP = 3  # steps
FEWEST_STEPS = 5  # timed steps that a median needs
MOST_STEPS = 200  # timed steps of a long run, its last ones
NUM_STEPS = NUM_WARM_UP + 9  # steps of a run that measures the step time alone
NUM_MEASURED_STEPS = NUM_WARM_UP  # on a CPU: the profiler slows steps down, so that they are not timed


class MemoryMeter:
    """Measures peak memory from `start`, before the model is made, to `stop`; `bytes` is None where it could not be measured.

    On CUDA it is torch's count of allocated bytes, less those at the start. On a CPU it is the largest running sum of the bytes that
    torch's profiler records in the first NUM_MEASURED_STEPS steps; nothing is measured if a profiler already runs in this process.
    """

    bytes: int | None = None

    def __init__(self, device: torch.device) -> None:
        self._device, self._before, self._runs = device, 0, False

    def start(self) -> None:
        """Start measuring, before the model is made."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            if clear := getattr(torch._C, "_cuda_clearCublasWorkspaces", None):
                clear()  # allocated by earlier trials of this process: each trial counts its own, as in a new process
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
        elif not hasattr(autograd, "_enable_profiler_legacy") or autograd._profiler_enabled():
            return
        else:
            gc.collect()  # garbage that is freed later could count as released by the training
            state, choices = autograd.ProfilerState.CPU, torch._C._profiler._ExperimentalConfig()  # type: ignore[attr-defined]
            autograd._enable_profiler_legacy(autograd.ProfilerConfig(state, False, True, False, False, False, choices))
        self._runs = True

    def after(self, step: int) -> None:
        """Stop measuring on a CPU if `step`, counted from 1, is NUM_MEASURED_STEPS."""
        if self._device.type != "cuda" and step >= NUM_MEASURED_STEPS:
            self.stop()

    def stop(self) -> None:
        """Stop measuring and set `bytes`; a second call does nothing."""
        if self._runs and self._device.type == "cuda":
            self.bytes = torch.cuda.max_memory_allocated(self._device) - self._before
        elif self._runs:
            self.bytes = largest_sum([event for thread in autograd._disable_profiler_legacy() for event in thread])
        self._runs = False


def largest_sum(events: list[Any]) -> int:
    """Return the largest running sum of allocated minus released bytes over the events of torch's profiler.

    A release does not count if its memory was allocated before the first event. Events have no addresses, so that a release counts if
    memory of the same size was allocated and is not released yet.
    """
    held = peak = 0
    num_held: Counter[int] = Counter()  # by size
    for event in events:
        if event.kind() != "memory_alloc":
            continue
        size = event.cpu_memory_usage()
        if size < 0 and not num_held[-size]:
            continue
        num_held[abs(size)] += 1 if size > 0 else -1
        held += size
        peak = max(peak, held)
    return peak


class StepTimer:
    """Records when each step of a run ends; `seconds` is the median time of a step.

    The first NUM_WARM_UP steps do not count: kernels are compiled, optimizer state is allocated, and on a CPU a profiler records the peak
    memory. On CUDA the ends are events on the stream, so that timing does not synchronize steps. The time includes making the batch.

    >>> timer = StepTimer(torch.device("cpu"), clock=iter((0.0, 0.5, 1.0, 1.5, 2.0, 9.0)).__next__)
    >>> for step in range(1, NUM_WARM_UP + 6):
    ...     timer.after(step)
    >>> timer.seconds()
    0.5
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._device, self._clock = device, clock
        self._ends: deque[Any] = deque(maxlen=MOST_STEPS + 1)

    def after(self, step: int) -> None:
        """Record the end of a step, counted from 1."""
        if step >= NUM_WARM_UP:
            self._ends.append(self._end())

    def _end(self) -> Any:
        if self._device.type != "cuda":
            return self._clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self) -> float | None:
        """Return the median seconds of a step; None after fewer than FEWEST_STEPS timed steps."""
        if len(self._ends) <= FEWEST_STEPS:
            return None
        if self._device.type != "cuda":
            return median(end - start for start, end in pairwise(self._ends))
        torch.cuda.synchronize(self._device)
        return median(start.elapsed_time(end) / 1000 for start, end in pairwise(self._ends))


# --- Where a trial ran ---

PACKAGES = ("torch", "numpy", "triton")
ROOT = Path(__file__).parents[4]  # of a checkout, which has src/paredown/study/tasks


def device_name(device: torch.device) -> str:
    """Return the name of a GPU, or the machine type of a CPU, such as 'x86_64 CPU'."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"


@lru_cache(maxsize=1)
def versions() -> dict[str, str]:
    """Return the versions of paredown, Python and the packages that numbers depend on, and of CUDA if torch has it."""
    by_name = {"paredown": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            by_name[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    by_name["torch"] = torch.__version__
    return by_name | ({"cuda": torch.version.cuda} if torch.version.cuda else {})


@lru_cache(maxsize=1)
def commit() -> str:
    """Return the commit of the checkout that paredown runs from, with `-dirty` if files were changed.

    Empty for an installed package. The environment variable PAREDOWN_COMMIT replaces it, for a checkout that was copied without its
    history.
    """
    if os.environ.get("PAREDOWN_COMMIT"):
        return os.environ["PAREDOWN_COMMIT"]
    if not (ROOT / ".git").exists() or not (ROOT / "pyproject.toml").exists():
        return ""
    try:
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


# --- Evaluate ---

REQUESTED = re.compile(r"tried to allocate ([\d.]+ ?\w+)", re.IGNORECASE)


def evaluate(
    task: Task | str,
    plan: Plan,
    *,
    seed: int = 0,
    device: Any = None,
    mode: Any = "store",
    progress: training.ProgressCallback | None = None,
) -> Trial:
    """Train `task`, a Task or a name, under `plan` from `seed`, evaluate it on the test split, and return the trial.

    `device`: CUDA if available when None. `mode`: "store" or "simulate", as in `apply`. `progress(step, steps, training loss)` is called
    up to a hundred times.
    """
    return trial_and_model(make_setting(task, plan, seed=seed, device=device, mode=mode), progress)[0]


def trial_and_model(
    setting: training.TrainingSetup, progress: training.ProgressCallback | None = None
) -> tuple[Trial, nn.Module | None]:
    """Return the trial of `evaluate`, and the trained model with unpacked weights (None after running out of memory)."""
    meter, timer, curve, model = MemoryMeter(setting.device), StepTimer(setting.device), curve_of(setting.task), None
    if setting.device.type == "cpu" and setting.plan.rules:
        load_loops()
    with seeded(setting), deterministic(setting.device):
        trial, begun = empty_trial(setting), time.perf_counter()
        try:
            trial, model = _trained(trial, setting, curve, (meter, timer), progress)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            requested = REQUESTED.search(str(error))
            more = f", requested {requested[1]} more" if requested else ""
            reason = f"out of memory after {curve.step} of {setting.task.steps} steps{more}"
            trial = replace(trial, status=Status.OUT_OF_MEMORY, reason=reason, curve=tuple(curve.points))
        finally:
            meter.stop()
        if model is None:  # the memory that the exception held is freed
            gc.collect()
            if setting.device.type == "cuda":
                torch.cuda.empty_cache()
    trial = replace(trial, seconds=time.perf_counter() - begun)
    if setting.mode != "store":  # simulate mode saves no memory and allocates more, and its steps take longer
        return trial, model
    has_time = trial.status is not Status.OUT_OF_MEMORY
    return replace(trial, measured_peak_bytes=meter.bytes, step_seconds=timer.seconds() if has_time else None), model


def baseline_step_seconds(task: Task, device: Any = None, seed: int = 0) -> float | None:
    """Return the median seconds of an unmodified step, from NUM_STEPS steps; None if they run out of memory."""
    setting = make_setting(task, Plan(), seed=seed, device=device)
    timer = StepTimer(setting.device)
    try:
        with seeded(setting), deterministic(setting.device):
            batches = task.data.batches(task.batch, seed=seed, device=setting.device)
            loop = training.Loop(setting, setting.placed_model(), nullcontext())
            for step, (x, answers) in zip(range(NUM_STEPS), batches, strict=False):
                loop.step(x, answers, training.task_learning_rate(task, step))
                timer.after(step + 1)
        return timer.seconds()
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return None


def empty_trial(setting: training.TrainingSetup) -> Trial:
    """Return a trial with what is known before it runs: task, plan, seed, predicted peak, device, versions and commit."""
    head = Trial(setting.task.name, setting.plan, setting.seed, Status.DONE, predicted_peak_bytes=_predicted(setting))
    return replace(head, device=device_name(setting.device), versions=versions(), commit=commit())


def curve_of(task: Task) -> training.LossCurve:
    """Return an empty loss curve for a run of a task."""
    return training.LossCurve(task.steps, blind_loss=task.blind_loss, stops_early=task.stops_early)


def make_setting(task: Any, plan: Any, *, seed: Any = 0, device: Any = None, mode: Any = "store") -> training.TrainingSetup:
    """Return the arguments of `evaluate`, checked, as a TrainingSetup."""
    if isinstance(task, Plan):
        raise TaskError("evaluate takes the task first, then the plan: paredown.evaluate(task, plan).")
    task = find_task(task) if isinstance(task, str) else task
    if not isinstance(task, Task) or not isinstance(plan, Plan):
        raise TaskError(f"evaluate takes a Task, or its name, and a Plan, not {type(task).__name__} and {type(plan).__name__}.")
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63:
        raise TaskError(f"seed is {seed!r}; it must be a whole number from 0 to 2^63 - 1.")
    return training.TrainingSetup(task, plan, seed, find_device(device), mode)


def find_device(device: Any) -> torch.device:
    """Return `device` as a torch.device of this machine; for None, CUDA if it is available."""
    num_gpus = torch.cuda.device_count()
    allowed = ["cpu", *(["cuda"] if num_gpus else []), *(f"cuda:{number}" for number in range(num_gpus))]
    wanted = str(device) if device is not None else "cuda" if num_gpus else "cpu"
    if wanted not in allowed:
        raise TaskError(f"device {wanted!r} is not available on this machine. Allowed: {', '.join(allowed)}.")
    return torch.device(wanted)


def _trained(
    head: Trial,
    setting: training.TrainingSetup,
    curve: training.LossCurve,
    meters: tuple[MemoryMeter, StepTimer],
    progress: training.ProgressCallback | None,
) -> tuple[Trial, nn.Module]:
    """Train and evaluate; return the trial (`head` with results added) and the model. An exception closes the session too.

    `curve` collects the losses, `meters` measure memory and step time.
    """

    def after(step: int) -> None:
        for meter in meters:
            meter.after(step)

    batches = setting.task.data.batches(setting.task.batch, seed=setting.seed, device=setting.device)
    meters[0].start()  # after the data, which does not count as memory of a step
    model = setting.placed_model()
    with setting.session(model) as session:
        loop = training.Loop(setting, model, session)
        training.train(loop, batches, curve, after=after, progress=progress)
        meters[0].stop()
        trial = replace(head, curve=tuple(curve.points))
        if curve.verdict is not None:
            trial = replace(trial, status=curve.verdict.status, reason=curve.verdict.reason)
        if trial.status is Status.DIVERGED:
            return trial, model
        error, loss = training.judge(loop)
    return training.with_scores(trial, error, loss), model


# --- predicted bytes --------------------------------------------------------------------------------------------------


def _predicted(setting: training.TrainingSetup) -> int | None:
    """Return the predicted peak bytes of a training; None if its step cannot be traced, or lacks values of a simulated plan."""
    keys = tuple(key for key, _ in setting.plan.rules)
    if setting.mode != "store" and keys in _refused.get(setting.task, ()):
        return None
    try:
        return peak_of(trace_task(setting.task, setting.plan, setting.device.type), setting.plan)
    except TraceError:
        return None
    except PlanError as error:
        if setting.mode != "store":
            _refused.setdefault(setting.task, set()).add(keys)
            return None
        raise PlanError(f"task {setting.task.name!r}: {error}") from None


# The selectors of simulated plans that match values that no step stores, by task: checked once for all formats of a sweep
_refused: weakref.WeakKeyDictionary[Task, set[tuple[str, ...]]] = weakref.WeakKeyDictionary()


# --- Reproducible numbers ---------------------------------------------------------------------------------------------


@contextmanager
def seeded(setting: training.TrainingSetup) -> Generator[None]:
    """Return a context in which torch is seeded with the setting's seed; torch's earlier random states are restored after it."""
    devices = [setting.device] if setting.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(setting.seed)
        yield


@contextmanager
def deterministic(device: torch.device) -> Generator[None]:
    """Return a context with deterministic CUDA algorithms where torch has them; on a CPU it does nothing."""
    if device.type != "cuda":
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    settings = [(torch.backends.cudnn, "benchmark", False), (torch.utils.deterministic, "fill_uninitialized_memory", False)]
    previous = [getattr(module, name) for module, name, _ in settings]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deterministic.*")
        try:
            torch.use_deterministic_algorithms(True, warn_only=True)
            for module, name, value in settings:
                setattr(module, name, value)
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            for (module, name, _), value in zip(settings, previous, strict=True):
                setattr(module, name, value)
