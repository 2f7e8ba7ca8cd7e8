"""A sweep from its description to its last result: tasks of one folder, an engine, a store.

A store says which task to run, in words; what runs is what this machine's own folder has under that name. A file outside of the
folder, by `..`, by an absolute path or through a link, is refused, whoever asks for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from paredown.errors import SweepError, TaskError
from paredown.sweeps.engines.cuda_graphs import NUM_LANES, GraphsEngine
from paredown.sweeps.engines.engine import Engine, InlineEngine, LocalEngine, RunTrial
from paredown.sweeps.engines.ray import RayEngine
from paredown.sweeps.store import AddResult, Store
from paredown.sweeps.sweep import Cost, Sweep, TrialSpec
from paredown.sweeps.worker import WorkerOptions, work
from paredown.tasks.evaluate import evaluate, make_setting
from paredown.tasks.lookup import WITH_FILE, cached_task, find_file, is_inside
from paredown.tasks.training import TrainingSetup
from paredown.tasks.trial import Trial

__all__ = ["TaskFolder", "add_sweep", "engine_for", "find_gpus", "make_engine", "run_sweep"]


@dataclass(frozen=True)
class TaskFolder:
    """Runs the trials whose tasks are built in or lie under `path`."""

    path: Path

    def refuses(self, task: str) -> str | None:
        """Why this machine does not run a task, or None. Looks for its file and imports nothing."""
        head = task.strip().partition("#")[0]
        kind, _, file = head.partition(":")
        try:
            if ".py:" in head:
                path = self.path / (own := Path(head.rpartition(":")[0]))
                if own.is_absolute() or not is_inside(path, self.path):
                    return "its file is outside of the folder that tasks may come from, and is not run."
                return None if path.is_file() else "the folder that tasks may come from has no such file."
            if kind in WITH_FILE and file:
                find_file(file, self.path)
        except TaskError as error:
            return str(error)
        except (OSError, ValueError):
            return "no file may have such a name."
        return None

    def __call__(self, spec: TrialSpec) -> Trial:
        """Train it."""
        given = self.setting(spec)
        trial = evaluate(given.task, given.plan, seed=given.seed, device=given.device, mode=given.mode)
        return replace(trial, task=spec.task)  # as the sweep calls it

    def setting(self, spec: TrialSpec) -> TrainingSetup:
        """What a trial trains."""
        if (reason := self.refuses(spec.task)) is not None:
            raise TaskError(f"task {spec.task!r}: {reason}")
        how = spec.settings
        return make_setting(cached_task(spec.task, self.path), spec.plan, seed=spec.seed, device=how.device, mode=how.mode)


def _local(run: RunTrial, slots: int | None) -> Engine:
    gpus = find_gpus()
    return LocalEngine(run, slots=slots or max(1, len(gpus)), gpus=gpus)


def _graphs(run: RunTrial, slots: int | None) -> Engine:
    return GraphsEngine(run, lanes=slots or NUM_LANES, gpus=find_gpus())


def _inline(run: RunTrial, slots: int | None) -> Engine:
    if slots not in (None, 1):
        raise SweepError(f"the inline engine runs one trial at a time, not {slots}. Start more workers instead.")
    return InlineEngine(run)


ENGINES: dict[str, Callable[[RunTrial, int | None], Engine]] = {
    "local": _local,
    "graphs": _graphs,
    "inline": _inline,
    "ray": RayEngine.make,
}


def engine_for(sweep: Sweep) -> str:
    """What suits a sweep on this machine."""
    return "graphs" if sweep.settings.mode != "store" and find_gpus() and sweep.settings.device != "cpu" else "local"


def make_engine(name: str, run: RunTrial, *, slots: int | None = None) -> Engine:
    """The engine of that name; `slots` None: one for each GPU, or one; of lanes with graphs, NUM_LANES."""
    if name not in ENGINES:
        raise SweepError(f"engine {name!r} is unknown. Allowed: {', '.join(ENGINES)}.")
    return ENGINES[name](run, slots)


def add_sweep(sweep: Sweep, store: Store, *, cost: Cost | None = None) -> AddResult:
    """Put a sweep's trials into a store; those that are there stay as they are."""
    return store.add(sweep.name, sweep.draw(cost))


def run_sweep(sweep: Sweep, store: Store, engine: Engine, *, cost: Cost | None = None, duty: WorkerOptions | None = None) -> int:
    """Run what is left of a sweep, with whoever else works on it; how many trials were finished here."""
    add_sweep(sweep, store, cost=cost)
    return work(store, engine, replace(duty or WorkerOptions(), sweep=sweep.name))


def find_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES spells them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [part.strip() for part in given.split(",") if part.strip()]
    return [str(i) for i in range(torch.cuda.device_count())]
