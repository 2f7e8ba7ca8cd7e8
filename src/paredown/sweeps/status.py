"""Progress of sweeps: trials by state and status, trials per minute, time left, and the least error of each task.

>>> print(SweepCounts("widths", waiting=3, running=1, by_status={"done": 5, "diverged": 1}))
widths: 6 of 10 finished (5 done, 1 diverged), 1 running, 3 waiting

Trials per minute are measured over the last WINDOW_SECONDS from the store's count of finished trials, so those of other machines count
too. cli/sweep_verbs.py prints these numbers.

>>> pace = Pace()
>>> [pace.add(finished, now) for finished, now in ((4, 0.0), (5, 30.0), (7, 60.0))]
[None, 2.0, 3.0]
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sqlalchemy import Connection, and_, func, select

from paredown.plan.plan import Plan
from paredown.sizes import say_seconds
from paredown.sweeps.database import FINISHED, RUNNING, TRIALS, WAITING, check_columns, check_text, readable
from paredown.sweeps.store import Store
from paredown.tasks.trial import Status


@dataclass(frozen=True)
class SweepCounts:
    """Numbers of trials of one sweep by state, and of finished ones by status."""

    sweep: str
    waiting: int = 0
    running: int = 0
    by_status: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def finished(self) -> int:
        """The number of trials with a result."""
        return sum(self.by_status.values())

    @property
    def total(self) -> int:
        """The number of all trials."""
        return self.waiting + self.running + self.finished

    def __str__(self) -> str:
        kinds = ", ".join(f"{num} {status}" for status, num in self.by_status.items())
        finished = f"{self.finished} of {self.total} finished" + (f" ({kinds})" if kinds else "")
        return f"{self.sweep}: {finished}, {self.running} running, {self.waiting} waiting"

    def to_json(self) -> dict[str, Any]:
        """The JSON value."""
        counts = {"sweep": self.sweep, "total": self.total, "finished": self.finished}
        return {**counts, "running": self.running, "waiting": self.waiting, "by_status": dict(self.by_status)}


class BestTrial(NamedTuple):
    """The finished trial of least error on a task."""

    task: str
    error: float
    plan: Plan
    seed: int

    def __str__(self) -> str:
        return f"{self.task}: error {self.error:.4f} with {say_plan(self.plan)}"

    def to_json(self) -> dict[str, Any]:
        """The JSON value."""
        return {"task": self.task, "error": self.error, "seed": self.seed, "plan": self.plan.to_json()}


def count(store: Store) -> list[SweepCounts]:
    """The counts of every sweep, by name."""
    columns = (TRIALS.c.sweep, TRIALS.c.state, TRIALS.c.status)
    rows = store.database.read(lambda c: c.execute(select(*columns, func.count()).group_by(*columns)).all())
    by_sweep: dict[str, dict[str, int]] = {}
    for sweep, state, status, num in rows:
        by_sweep.setdefault(check_text(sweep, "the name of a sweep"), {})[status if state == FINISHED else state] = num
    return [_counts(sweep, nums) for sweep, nums in sorted(by_sweep.items())]


def count_open(store: Store, sweep: str | None = None, *, without: Sequence[str] = ()) -> int:
    """The number of trials without a result, of tasks other than `without`."""
    conditions = [TRIALS.c.state != FINISHED]
    conditions += [] if sweep is None else [TRIALS.c.sweep == sweep]
    conditions += [TRIALS.c.task.not_in(without)] if without else []
    return store.database.read(lambda c: c.scalar(select(func.count()).where(and_(*conditions)))) or 0


def find_best(store: Store, sweep: str) -> list[BestTrial]:
    """For each task of a sweep, the trial of least error among those of status DONE."""
    done = and_(TRIALS.c.sweep == sweep, TRIALS.c.status == Status.DONE.value, TRIALS.c.error.is_not(None))

    def work(connection: Connection) -> list[BestTrial]:
        rank = func.row_number().over(partition_by=TRIALS.c.task, order_by=(TRIALS.c.error, TRIALS.c.place)).label("rank")
        ranked = select(TRIALS.c.task, TRIALS.c.error, TRIALS.c.plan, TRIALS.c.seed, rank).where(done).subquery()
        rows = connection.execute(select(ranked).where(ranked.c.rank == 1).order_by(ranked.c.task)).all()
        return [_best(row) for row in rows]

    return store.database.read(work)


def _best(row: Any) -> BestTrial:
    with readable("a trial"):
        check_columns(row)
        return BestTrial(row.task, row.error, Plan.from_json(json.loads(row.plan)), row.seed)


def say_plan(plan: Plan) -> str:
    """A plan as a short text: its first three rules, the number of others, and its checkpointed modules."""
    rules = [f"{key} {assignment}" for key, assignment in plan.rules[:3]]
    more = [f"{len(plan.rules) - 3} rules more"] if len(plan.rules) > 3 else []
    checkpointed = [f"{', '.join(plan.recompute)} checkpointed"] if plan.recompute else []
    return ", ".join([*rules, *more, *checkpointed]) or "baseline"


def _counts(sweep: str, nums: dict[str, int]) -> SweepCounts:
    by_status = {status.value: nums[status.value] for status in Status if status.value in nums}
    return SweepCounts(sweep, nums.get(WAITING, 0), nums.get(RUNNING, 0), by_status)


# --- Progress over time ---

WINDOW_SECONDS = 300.0


@dataclass
class Pace:
    """Trials per minute, from counts at times of one monotonic clock."""

    _counts: deque[tuple[float, int]] = field(default_factory=deque[tuple[float, int]])

    def add(self, finished: int, now: float) -> float | None:
        """Add a count; returns trials per minute over the window, None until a trial has finished in it."""
        self._counts.append((now, finished))
        while len(self._counts) > 2 and now - self._counts[0][0] > WINDOW_SECONDS:
            self._counts.popleft()
        start, first = self._counts[0]
        return 60 * (finished - first) / (now - start) if now > start and finished > first else None


@dataclass(frozen=True)
class SweepProgress:
    """The progress of a sweep at one time."""

    counts: SweepCounts
    trials_per_minute: float | None
    best: tuple[BestTrial, ...]

    @property
    def seconds_left(self) -> float | None:
        """Predicted seconds to the end at the current trials per minute; None while these are unknown."""
        left = self.counts.total - self.counts.finished
        return 60 * left / self.trials_per_minute if self.trials_per_minute else None

    def __str__(self) -> str:
        rate = f"{self.trials_per_minute:.1f} trials/min" if self.trials_per_minute else "no rate yet"
        left = f", {say_seconds(self.seconds_left)} left" if self.seconds_left else ""
        return f"{self.counts}; {rate}{left}"

    def to_json(self) -> dict[str, Any]:
        """The JSON value: one line of `--json` output."""
        rates = {"trials_per_minute": self.trials_per_minute, "seconds_left": self.seconds_left}
        return {"event": "progress", **self.counts.to_json(), **rates, "best": [trial.to_json() for trial in self.best]}


class SweepWatcher:
    """Reads the progress of a sweep of a store, or of all sweeps (None), at most every `seconds`."""

    def __init__(self, store: Store, sweep: str | None = None, *, seconds: float = 1.0) -> None:
        self._store, self._sweep, self._seconds = store, sweep, seconds
        self._paces: dict[str, Pace] = {}
        self._next = 0.0

    def look(self, *, is_due: bool = False) -> list[SweepProgress]:
        """The progress of the sweeps; empty less than `seconds` after the last call, unless `is_due`."""
        now = time.monotonic()
        if now < self._next and not is_due:
            return []
        self._next = now + self._seconds
        return [self._progress(counts, now) for counts in count(self._store) if self._sweep in (None, counts.sweep)]

    def _progress(self, counts: SweepCounts, now: float) -> SweepProgress:
        pace = self._paces.setdefault(counts.sweep, Pace())
        return SweepProgress(counts, pace.add(counts.finished, now), tuple(find_best(self._store, counts.sweep)))
