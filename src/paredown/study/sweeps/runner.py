"""Run a sweep: tasks of one folder, an engine that runs trials, and a store of results.

A store names tasks by text. A worker runs the task of that name from its own tasks folder. Files outside of this folder, by `..`, by an
absolute path or through a symbolic link, are refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from paredown.errors import SweepError, TaskError
from paredown.study.sweeps.engines.cuda_graphs import NUM_LANES, GraphsEngine
from paredown.study.sweeps.engines.engine import Engine, InlineEngine, LocalEngine, RunTrial
from paredown.study.sweeps.engines.ray import RayEngine, RayOptions
from paredown.study.sweeps.status import count, find_infeasible, say_infeasible
from paredown.study.sweeps.store import AddResult, Store
from paredown.study.sweeps.sweep import Cost, Sweep, TrialSpec
from paredown.study.sweeps.worker import WorkerOptions, work
from paredown.study.tasks.evaluate import evaluate, make_setting
from paredown.study.tasks.lookup import WITH_FILE, cached_task, find_file, is_inside
from paredown.study.tasks.threads import suited_threads
from paredown.study.tasks.training import TrainingSetup
from paredown.study.tasks.trial import Trial

__all__ = ["TaskFolder", "add_sweep", "engine_for", "find_gpus", "make_engine", "report_infeasible", "run_sweep"]


@dataclass(frozen=True)
class TaskFolder:
    """The function that engines call to run a trial, of a built-in task or of a task in a file under the folder `path`."""

    path: Path

    def refuses(self, task: str) -> str | None:
        """Return why this worker does not run a task, such as a missing file; None if it does. The task's code is not imported."""
        head = task.strip().partition("#")[0]
        kind, _, file = head.partition(":")
        try:
            if ".py:" in head:
                path = self.path / (named := Path(head.rpartition(":")[0]))
                if named.is_absolute() or not is_inside(path, self.path):
                    return "its file is outside of the tasks folder, and is not run."
                return None if path.is_file() else "the tasks folder has no such file."
            if kind in WITH_FILE and file:
                find_file(file, self.path)
        except TaskError as error:
            return str(error)
        except (OSError, ValueError):
            return "its file name is not valid."
        return None

    def __call__(self, spec: TrialSpec) -> Trial:
        """Run one trial and return its result."""
        setting = self.setting(spec)
        with suited_threads(setting.task, setting.device):
            trial = evaluate(setting.task, setting.plan, seed=setting.seed, device=setting.device, mode=setting.mode)
        return replace(trial, task=spec.task)  # the text of the sweep, which may differ from the task's name

    def setting(self, spec: TrialSpec) -> TrainingSetup:
        """Return the task, plan, seed, device and mode of a trial as a TrainingSetup; raise TaskError if the task is refused."""
        if (reason := self.refuses(spec.task)) is not None:
            raise TaskError(f"task {spec.task!r}: {reason}")
        task, settings = cached_task(spec.task, self.path), spec.settings
        return make_setting(task, spec.plan, seed=spec.seed, device=settings.device, mode=settings.mode)


ENGINES = ("local", "graphs", "inline", "ray")


def engine_for(sweep: Sweep) -> str:
    """Return the default engine of a sweep here: "graphs" for simulated trials on a GPU, otherwise "local" (processes)."""
    return "graphs" if sweep.settings.mode != "store" and find_gpus() and sweep.settings.device != "cpu" else "local"


def make_engine(name: str, run: RunTrial, *, slots: int | None = None, ray: RayOptions | None = None) -> Engine:
    """Return the engine of this name, which runs trials with `run`.

    `slots`: trials in parallel; None: one for each GPU, or one; NUM_LANES for the graphs engine. `ray`: the resources of a trial on a
    Ray cluster, for the ray engine alone.
    """
    if name not in ENGINES:
        raise SweepError(f"engine {name!r} is unknown. Allowed: {', '.join(ENGINES)}.")
    if ray is not None and name != "ray":
        raise SweepError(f"options for Ray were given with engine {name!r}. Use the ray engine, or leave them out.")
    if name == "ray":
        return RayEngine(run, slots=slots, options=ray)
    if name == "inline":
        if slots not in (None, 1):
            raise SweepError(f"the inline engine runs one trial at a time, not {slots}. Start more workers instead.")
        return InlineEngine(run)
    gpus = find_gpus()
    if name == "graphs":
        return GraphsEngine(run, lanes=slots or NUM_LANES, gpus=gpus)
    return LocalEngine(run, slots=slots or max(1, len(gpus)), gpus=gpus)


def add_sweep(sweep: Sweep, store: Store, *, cost: Cost | None = None) -> AddResult:
    """Add the trials of a sweep that `store`, a database, lacks, and count new and old ones.

    The method `cheap_first` needs `cost(task, plan)`, predicted bytes.
    """
    return store.add(sweep.name, sweep.draw(cost))


def run_sweep(sweep: Sweep, store: Store, engine: Engine, *, cost: Cost | None = None, options: WorkerOptions | None = None) -> int:
    """Add a sweep, report trials that no plan fits to `options.say`, run the others, and return how many this worker finished.

    The method `cheap_first` needs `cost(task, plan)`, predicted bytes.
    """
    options = replace(options or WorkerOptions(), sweep=sweep.name)
    add_sweep(sweep, store, cost=cost)
    report_infeasible(store, sweep.name, options.say)
    return work(store, engine, options)


def report_infeasible(store: Store, sweep: str, say: Callable[[str], object]) -> None:
    """Call `say` with a message about the trials of a sweep for which no plan fits the budget, if there are any."""
    if pairs := find_infeasible(store, sweep):
        say(say_infeasible(pairs, sum(counts.total for counts in count(store) if counts.sweep == sweep)))


def find_gpus() -> list[str]:
    """Return the names of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [part.strip() for part in visible.split(",") if part.strip()]
    return [str(i) for i in range(torch.cuda.device_count())]
