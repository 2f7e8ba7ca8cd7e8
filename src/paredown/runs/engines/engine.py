"""What an engine does: run claimed trials somewhere, and say which have ended. It never sees the store.

inline   in the worker's own process, one after the other: for trials that are trusted and short
local    a process for each trial on this machine
graphs   simulated trials side by side in one process for each GPU
ray      a process for each trial on a Ray cluster
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from paredown.plan.trial import Status, Trial
from paredown.runs.claims import Claim, Ended
from paredown.runs.sweep import TrialSpec

LONGEST_REASON = 2000  # characters: a message may hold a whole tensor
Run = Callable[[TrialSpec], Trial]


class Engine(ABC):
    """A place where up to `slots` trials run at a time."""

    slots: int = 1

    @abstractmethod
    def start(self, claim: Claim) -> None:
        """Begin a trial."""

    @abstractmethod
    def wait(self, seconds: float) -> list[Ended]:
        """The trials that have ended, as soon as there are any; none after so many seconds."""

    @abstractmethod
    def stop(self) -> Sequence[Claim]:
        """End what runs, without results; what ran. The engine can start trials again."""


def run_safely(run: Run, spec: TrialSpec) -> Trial:
    """The trial, whatever its code does: what it raises becomes a status and a reason."""
    try:
        trial = run(spec)
        if not isinstance(trial, Trial):
            return failed(spec, f"running it gave {type(trial).__name__}, not a Trial")
        return trial
    except BaseException as error:
        return of_error(spec, error)


def of_error(spec: TrialSpec, error: BaseException) -> Trial:
    """The trial whose code raised this; an interrupt is the user's, and is raised again."""
    if isinstance(error, KeyboardInterrupt):
        raise error
    if isinstance(error, MemoryError):
        return failed(spec, f"out of memory: {error}", Status.OUT_OF_MEMORY)
    if isinstance(error, SystemExit):
        return failed(spec, f"its code ended the process with exit status {error.code}")
    return failed(spec, f"{type(error).__name__}: {error}")


def failed(spec: TrialSpec, reason: str, status: Status = Status.FAILED) -> Trial:
    """The trial that has no numbers."""
    return Trial(spec.task, spec.plan, spec.seed, status, reason=reason[:LONGEST_REASON])
