"""Trials in the worker's own process, one after the other. One that ends or blocks the process takes the worker with it."""

from __future__ import annotations

from typing import final

from paredown.runs.claims import Claim, Ended
from paredown.runs.engines.engine import Engine, Run, run_safely


@final
class InlineEngine(Engine):
    """Runs a trial when it is waited for."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._next: Claim | None = None

    def start(self, claim: Claim) -> None:
        """Begin the claimed trial."""
        self._next = claim

    def wait(self, seconds: float) -> list[Ended]:
        """The trials that ended, after at most `seconds`."""
        if self._next is None:
            return []
        ended = Ended(self._next, run_safely(self._run, self._next.spec))
        self._next = None
        return [ended]

    def stop(self) -> list[Claim]:
        """End all running trials and return their claims."""
        left = [] if self._next is None else [self._next]
        self._next = None
        return left
