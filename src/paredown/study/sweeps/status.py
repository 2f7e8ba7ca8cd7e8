"""Report the progress of sweeps: trials by state and status, trials per minute, time left, and the best plan of each task.

>>> print(SweepCounts("widths", waiting=3, running=1, by_status={"done": 5, "diverged": 1}))
widths: 6 of 10 finished (5 done, 1 diverged), 1 running, 3 waiting

The best plan of a task has the least mean error over its seeds. The standard error of the mean is the standard deviation of the seeds,
with n - 1 in its denominator, divided by the square root of their number n; one seed has none.

>>> print(BestPlan("digits", "lpmm", Plan.preset("lpmm"), {0: 0.02, 1: 0.03, 2: 0.04}))
digits: error 0.0300 with lpmm (mean of 3 seeds, standard error 0.0058)
>>> print(BestPlan("digits", "lpmm", Plan.preset("lpmm"), {0: 0.02}, num_not_done=1))
digits: error 0.0200 with lpmm (one seed, no standard error; 1 seed diverged or failed)

Infeasible trials (no plan of `assign` fits the budget) are finished without having run, and count for no plan:

>>> pair = InfeasibleTrials("digits", "assign 10% role", "no plan fits 1 MiB; the smallest needs 2 MiB. Raise the budget.", num_trials=3)
>>> print(say_infeasible([pair], 12))
3 of 12 trials are infeasible and do not run: digits, assign 10% role: no plan fits 1 MiB; the smallest needs 2 MiB.

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
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from statistics import fmean
from typing import Any

from sqlalchemy import and_, func, not_, select

from paredown.plan.plan import Plan
from paredown.sizes import say_seconds
from paredown.study.sweeps.database import FINISHED, RUNNING, TRIALS, WAITING, check_columns, check_text, readable
from paredown.study.sweeps.store import Store, parsed_plan
from paredown.study.sweeps.sweep import SweepCounts, TrialSettings, label_of
from paredown.study.tasks.trial import Status, Trial, standard_error


@dataclass(frozen=True)
class BestPlan:
    """The plan of least mean error on a task, its errors by seed, and how many of its trials did not end as DONE."""

    task: str
    label: str
    plan: Plan
    errors: Mapping[int, float]
    num_not_done: int = 0

    @property
    def error(self) -> float:
        """Return the mean error over seeds."""
        return fmean(self.errors.values())

    @property
    def standard_error(self) -> float | None:
        """Return the standard error of the mean; None for one seed."""
        return standard_error(list(self.errors.values()))

    def __str__(self) -> str:
        standard = self.standard_error
        num = len(self.errors)
        seeds = "one seed, no standard error" if standard is None else f"mean of {num} seeds, standard error {standard:.4f}"
        others = f"; {self.num_not_done} seed{'s' * (self.num_not_done > 1)} diverged or failed" if self.num_not_done else ""
        return f"{self.task}: error {self.error:.4f} with {self.label} ({seeds}{others})"

    def to_json(self) -> dict[str, Any]:
        """Return this as a dict for JSON; `error` is the mean over `seeds`, `standard_error` is null for one seed."""
        numbers = {"error": self.error, "standard_error": self.standard_error, "seeds": sorted(self.errors)}
        return {"task": self.task, "label": self.label, **numbers, "num_not_done": self.num_not_done, "plan": self.plan.to_json()}


@dataclass(frozen=True)
class InfeasibleTrials:
    """Trials of a task that do not run, since no plan of the template `label`, such as "assign 10% role", fits its budget."""

    task: str
    label: str
    reason: str
    num_trials: int = 1

    def __str__(self) -> str:
        return f"{self.task}, {self.label}: {self.reason.partition('. ')[0].rstrip('.')}."

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a dict for JSON."""
        return asdict(self)


NUM_NAMED_PAIRS = 3  # in one message


def say_infeasible(pairs: Sequence[InfeasibleTrials], total: int) -> str:
    """Return a message on trials without a plan that fits: their number out of `total`, and the first few with reasons."""
    num, more = sum(pair.num_trials for pair in pairs), len(pairs) - NUM_NAMED_PAIRS
    verbs = "is infeasible and does" if num == 1 else "are infeasible and do"
    others = f" And {more} more, which `paredown sweep status` lists." if more > 0 else ""
    return f"{num} of {total} trials {verbs} not run: {' '.join(map(str, pairs[:NUM_NAMED_PAIRS]))}{others}"


def find_infeasible(store: Store, sweep: str) -> list[InfeasibleTrials]:
    """Return a sweep's trials that cannot run, since no plan of their template fits its budget, by task and template."""
    columns = (TRIALS.c.task, TRIALS.c.label, TRIALS.c.plan, TRIALS.c.result)
    query = select(*columns).where(TRIALS.c.sweep == sweep, IS_INFEASIBLE).order_by(TRIALS.c.place)
    pairs: dict[tuple[str, str], InfeasibleTrials] = {}
    with readable("a trial"):
        for row in store.database.read(lambda connection: connection.execute(query).all()):
            check_columns(row)
            label = row.label or label_of(parsed_plan(row.plan))
            known = pairs.get((row.task, label)) or InfeasibleTrials(
                row.task, label, Trial.from_json(json.loads(row.result)).reason, 0
            )
            pairs[row.task, label] = replace(known, num_trials=known.num_trials + 1)
    return list(pairs.values())


def count(store: Store) -> list[SweepCounts]:
    """Return the numbers of trials of every sweep in a database of trials, by state."""
    columns = (TRIALS.c.sweep, TRIALS.c.state, TRIALS.c.status)
    rows = store.database.read(lambda c: c.execute(select(*columns, func.count()).group_by(*columns)).all())
    by_sweep: dict[str, dict[str, int]] = {}
    for sweep, state, status, num in rows:
        by_sweep.setdefault(check_text(sweep, "the name of a sweep"), {})[status if state == FINISHED else state] = num
    return [_counts(sweep, nums) for sweep, nums in sorted(by_sweep.items())]


def count_open(store: Store, sweep: str | None = None, *, without: Sequence[str] = ()) -> int:
    """Return how many trials of `sweep` (None: of all) have no result; trials of the tasks in `without` do not count."""
    conditions = [TRIALS.c.state != FINISHED]
    conditions += [] if sweep is None else [TRIALS.c.sweep == sweep]
    conditions += [TRIALS.c.task.not_in(without)] if without else []
    return store.database.read(lambda c: c.scalar(select(func.count()).where(and_(*conditions)))) or 0


IS_INFEASIBLE = TRIALS.c.status == Status.INFEASIBLE.value
RUN_COLUMNS = [TRIALS.c[name] for name in ("task", "plan", "settings", "seed", "status", "error", "label")]


def find_best(store: Store, sweep: str) -> list[BestPlan]:
    """Return for each task of a sweep the plan of least mean error over its trials of status DONE; of equal plans the first."""
    ran = and_(TRIALS.c.sweep == sweep, TRIALS.c.state == FINISHED, not_(IS_INFEASIBLE))
    query = select(*RUN_COLUMNS).where(ran).order_by(TRIALS.c.place)
    groups: dict[tuple[str, Hashable], list[Any]] = {}
    best: dict[str, BestPlan] = {}
    with readable("a trial"):
        for row in store.database.read(lambda connection: connection.execute(query).all()):
            check_columns(row)
            groups.setdefault((row.task, _same_run(row.plan, row.settings)), []).append(row)
        for (task, _), rows in groups.items():
            done = [row for row in rows if row.status == Status.DONE.value and row.error is not None]
            if done and (task not in best or fmean(row.error for row in done) < best[task].error):
                plan, errors = parsed_plan(done[0].plan), {row.seed: row.error for row in done}
                best[task] = BestPlan(task, done[0].label or label_of(plan), plan, errors, len(rows) - len(done))
    return [plan for _, plan in sorted(best.items())]


@lru_cache(maxsize=4096)
def _same_run(plan: str, settings: str) -> Hashable:
    """Return a key that is equal for trials of a task that differ only in their seed; `plan` and `settings` are JSON texts."""
    parsed = TrialSettings(**json.loads(settings))
    return parsed_plan(plan).key, parsed.mode, parsed.device


def _counts(sweep: str, nums: dict[str, int]) -> SweepCounts:
    by_status = {status.value: nums[status.value] for status in Status if status.value in nums}
    return SweepCounts(sweep, nums.get(WAITING, 0), nums.get(RUNNING, 0), by_status)


# --- Progress over time ---

WINDOW_SECONDS = 300.0


@dataclass
class Pace:
    """Measures how many trials finish per minute."""

    _counts: deque[tuple[float, int]] = field(default_factory=deque[tuple[float, int]])

    def add(self, finished: int, now: float) -> float | None:
        """Add a count of finished trials at time `now`, and return trials per minute over WINDOW_SECONDS; None if none ended."""
        self._counts.append((now, finished))
        while len(self._counts) > 2 and now - self._counts[0][0] > WINDOW_SECONDS:
            self._counts.popleft()
        start, first = self._counts[0]
        return 60 * (finished - first) / (now - start) if now > start and finished > first else None


@dataclass(frozen=True)
class SweepProgress:
    """The progress of a sweep at one moment: its counts of trials, their rate, and the best plan of each task."""

    counts: SweepCounts
    trials_per_minute: float | None
    best: tuple[BestPlan, ...]

    @property
    def seconds_left(self) -> float | None:
        """Return the predicted seconds until all trials are finished at the current rate; None while the rate is unknown."""
        left = self.counts.total - self.counts.finished
        return 60 * left / self.trials_per_minute if self.trials_per_minute else None

    def __str__(self) -> str:
        rate = f"{self.trials_per_minute:.1f} trials/min" if self.trials_per_minute else "no rate yet"
        left = f", {say_seconds(self.seconds_left)} left" if self.seconds_left else ""
        return f"{self.counts}; {rate}{left}"

    def to_json(self) -> dict[str, Any]:
        """Return the progress as a dict for a line of `--json` output."""
        rates = {"trials_per_minute": self.trials_per_minute, "seconds_left": self.seconds_left}
        return {"event": "progress", **self.counts.to_json(), **rates, "best": [plan.to_json() for plan in self.best]}


class SweepWatcher:
    """Reads the progress of `sweep` (None: of all sweeps) from a database of trials, at most once in `seconds`."""

    def __init__(self, store: Store, sweep: str | None = None, *, seconds: float = 1.0) -> None:
        self._store, self._sweep, self._seconds = store, sweep, seconds
        self._paces: dict[str, Pace] = {}
        self._next = 0.0

    def look(self, *, is_due: bool = False) -> list[SweepProgress]:
        """Return the progress of the sweeps; an empty list if the last reading is less than `seconds` old, unless `is_due`."""
        now = time.monotonic()
        if now < self._next and not is_due:
            return []
        self._next = now + self._seconds
        watched = [counts for counts in count(self._store) if self._sweep in (None, counts.sweep)]
        paces = [self._paces.setdefault(counts.sweep, Pace()).add(counts.finished, now) for counts in watched]
        best = [tuple(find_best(self._store, counts.sweep)) for counts in watched]
        return [SweepProgress(*row) for row in zip(watched, paces, best, strict=True)]
