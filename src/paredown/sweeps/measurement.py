"""Trials of one task, one after the other: run here, or run once and found again in a store.

With a store, what was measured is in it as soon as it is known: an interrupted search goes on where it was, and no trial runs twice. Trials
of other sweeps of the same task are known from the start.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

from paredown.errors import TaskError
from paredown.plan.plan import Plan
from paredown.tasks.evaluate import evaluate
from paredown.tasks.task import Task
from paredown.tasks.training import ProgressCallback
from paredown.tasks.trial import Status, Trial


@dataclass(frozen=True)
class Runner:
    """How trials of a task run."""

    task: Task
    mode: str = "store"
    device: str | None = None

    def __call__(self, plan: Plan, seed: int, progress: ProgressCallback | None = None) -> Trial:
        """One trial; what its code raises makes it a failed one."""
        try:
            return evaluate(self.task, plan, seed=seed, device=self.device, mode=self.mode, progress=progress)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            return Trial(self.task.name, plan, seed, Status.FAILED, reason=reason[:LONGEST_REASON])


LONGEST_REASON = 2000  # characters


class Measurer(ABC):
    """Where trials come from."""

    @abstractmethod
    def known(self) -> tuple[list[Trial], list[Trial]]:
        """Finished trials that an earlier call made for this very purpose, and others of the same task."""

    @abstractmethod
    def measure(self, plan: Plan, seed: int, progress: ProgressCallback | None = None) -> list[Trial]:
        """The trial, and whatever else was finished with it."""

    @abstractmethod
    def close(self) -> None:
        """Nothing more is asked."""


@final
@dataclass
class DirectMeasurer(Measurer):
    """Runs and forgets."""

    runner: Runner

    def known(self) -> tuple[list[Trial], list[Trial]]:
        """None and none: nothing is stored."""
        return [], []

    def measure(self, plan: Plan, seed: int, progress: ProgressCallback | None = None) -> list[Trial]:
        """Run the plan with this seed."""
        return [self.runner(plan, seed, progress)]

    def close(self) -> None:
        """Release what is open."""
        pass


@final
@dataclass
class StoredMeasurer(Measurer):
    """Runs through a store, as one sweep of its own; needs SQLAlchemy (`paredown[sweeps]`)."""

    runner: Runner
    address: str | Path
    name: str  # what these trials are for
    _store: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        try:
            from paredown.sweeps.store import Store
        except ModuleNotFoundError as error:
            raise TaskError(f"a store needs {error.name}: pip install 'paredown[sweeps]'. Without one, leave store out.") from None
        self._store = Store(self.address)

    @property
    def sweep(self) -> str:
        """What the trials are called in the store."""
        return f"{self.name} {self.runner.task.name}"

    def known(self) -> tuple[list[Trial], list[Trial]]:
        """Finished trials of this sweep, and others of the same task, from the store."""
        self._store.reopen(self.sweep, [Status.FAILED, Status.KILLED])
        found = [(row["sweep"] == self.sweep, Trial.from_json(row["trial"])) for row in self._rows()]
        return [trial for is_own, trial in found if is_own], [trial for is_own, trial in found if not is_own]

    def measure(self, plan: Plan, seed: int, progress: ProgressCallback | None = None) -> list[Trial]:
        """Run the plan with this seed."""
        from paredown.sweeps.engines.engine import InlineEngine
        from paredown.sweeps.sweep import DrawnTrial, TrialSettings, TrialSpec
        from paredown.sweeps.worker import WorkerOptions, work

        spec = TrialSpec(self.runner.task.name, plan, seed, TrialSettings(self.runner.mode, self.runner.device))
        self._store.add(self.sweep, [DrawnTrial(spec, 1.0)])
        before = self._own()
        work(self._store, InlineEngine(lambda one: self._run(one, progress)), WorkerOptions(sweep=self.sweep))
        after = self._own()
        return [trial for key, trial in after.items() if key not in before or key == spec.key(self.sweep)]

    def close(self) -> None:
        """Release what is open."""
        self._store.close()

    def _run(self, spec: Any, progress: ProgressCallback | None) -> Trial:
        return replace(self.runner(spec.plan, spec.seed, progress), task=spec.task)

    def _rows(self, sweep: str | None = None) -> list[dict[str, Any]]:
        from paredown.sweeps.export import rows

        told = {"task": self.runner.task.name, "mode": self.runner.mode}
        found = (row for row in rows(self._store, sweep) if row["trial"] is not None)
        return [row for row in found if all(row[name] == value for name, value in told.items())]

    def _own(self) -> dict[str, Trial]:
        return {row["key"]: Trial.from_json(row["trial"]) for row in self._rows(self.sweep)}


def measurer(runner: Runner, store: str | Path | None, name: str) -> Measurer:
    """Through a store where one is given; there, trials of the same name go on."""
    return DirectMeasurer(runner) if store is None else StoredMeasurer(runner, store, name)


TrialCallback = Callable[[float, int, str], object]  # trials done, trials at most, a sentence
