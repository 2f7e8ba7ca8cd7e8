"""Run the trials of one task for `pick` in this process, with or without a store of results.

With a store, each trial is written as soon as it has ended: an interrupted search resumes, and no trial runs twice. Finished trials of
other sweeps of the same task are used from the start.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paredown.errors import TaskError
from paredown.plan.plan import Plan
from paredown.study.tasks.evaluate import baseline_step_seconds, evaluate
from paredown.study.tasks.task import Task
from paredown.study.tasks.training import ProgressCallback
from paredown.study.tasks.trial import Status, Trial


@dataclass
class Runner:
    """Runs trials of one task, in one mode ("store" or "simulate") and on one device."""

    task: Task
    mode: str = "store"
    device: str | None = None
    _baseline: list[float | None] = field(default_factory=list[float | None], repr=False)  # the baseline's step time, once measured

    def __call__(self, plan: Plan, seed: int, progress: ProgressCallback | None = None) -> Trial:
        """Run one trial and return it; an exception gives a trial of status FAILED."""
        try:
            trial = evaluate(self.task, plan, seed=seed, device=self.device, mode=self.mode, progress=progress)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            return Trial(self.task.name, plan, seed, Status.FAILED, reason=reason[:MAX_REASON_CHARS])
        if trial.step_seconds is None:
            return trial
        if not self._baseline:
            seconds = trial.step_seconds if plan.changes_nothing else None
            with suppress(Exception):  # a plan that trains is a result, whether or not the unmodified step does
                seconds = seconds or baseline_step_seconds(self.task, self.device, seed)
            self._baseline.append(seconds)
        return replace(trial, baseline_step_seconds=self._baseline[0])


MAX_REASON_CHARS = 2000


@dataclass
class Measurer:
    """Runs trials of one task, and returns those that earlier picks finished.

    With `address`, that of a database of trials (it needs `paredown[sweeps]`), they are a sweep there, named by `name` and the task.
    """

    runner: Runner
    address: str | Path | None
    name: str
    _store: Any = field(init=False, default=None, repr=False)

    def __post_init__(self) -> None:
        if self.address is None:
            return
        try:
            from paredown.study.sweeps.store import Store
        except ModuleNotFoundError as error:
            raise TaskError(
                f"a store needs {error.name}: pip install 'paredown[sweeps]'. To run without a store, leave out store=."
            ) from None
        self._store = Store(self.address)

    @property
    def sweep(self) -> str:
        """Return the name that the trials have as a sweep in the database."""
        return f"{self.name} {self.runner.task.name}"

    def known(self) -> tuple[list[Trial], list[Trial]]:
        """Return two lists of finished trials of the task: those of this sweep, from an earlier pick, and those of other sweeps."""
        if self._store is None:
            return [], []
        self._store.reopen(self.sweep, [Status.FAILED, Status.KILLED])
        trials = [(row["sweep"] == self.sweep, Trial.from_json(row["trial"])) for row in self._rows()]
        return [t for is_of_sweep, t in trials if is_of_sweep], [t for is_of_sweep, t in trials if not is_of_sweep]

    def measure(self, plan: Plan, seed: int, progress: ProgressCallback | None = None) -> list[Trial]:
        """Run the trial of this plan and seed, and return it with trials of the sweep that other workers finished meanwhile."""
        if self._store is None:
            return [self.runner(plan, seed, progress)]
        from paredown.study.sweeps.engines.engine import InlineEngine
        from paredown.study.sweeps.sweep import DrawnTrial, TrialSettings, TrialSpec
        from paredown.study.sweeps.worker import WorkerOptions, work

        spec = TrialSpec(self.runner.task.name, plan, seed, TrialSettings(self.runner.mode, self.runner.device))
        self._store.add(self.sweep, [DrawnTrial(spec, 1.0)])
        before = self._sweep_trials()
        work(self._store, InlineEngine(lambda queued: self._run(queued, progress)), WorkerOptions(sweep=self.sweep))
        after = self._sweep_trials()
        return [trial for key, trial in after.items() if key not in before or key == spec.key(self.sweep)]

    def close(self) -> None:
        """Close the database of trials, if there is one."""
        if self._store is not None:
            self._store.close()

    def _run(self, spec: Any, progress: ProgressCallback | None) -> Trial:
        return replace(self.runner(spec.plan, spec.seed, progress), task=spec.task)

    def _rows(self, sweep: str | None = None) -> list[dict[str, Any]]:
        from paredown.study.sweeps.export import rows

        task, mode = self.runner.task.name, self.runner.mode
        finished = (
            row for row in rows(self._store, sweep) if row["trial"] is not None and row["status"] != Status.INFEASIBLE.value
        )
        return [row for row in finished if row["task"] == task and row["mode"] == mode]

    def _sweep_trials(self) -> dict[str, Trial]:
        return {row["key"]: Trial.from_json(row["trial"]) for row in self._rows(self.sweep)}


TrialCallback = Callable[[float, int, str], object]  # number of trials done, most trials, a sentence
