"""How far a store is: counts by state and status, and the least error of each task.

>>> print(Counts("widths", waiting=3, running=1, by_status={"done": 5, "diverged": 1}))
widths: 6 of 10 finished (5 done, 1 diverged), 1 running, 3 waiting
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sqlalchemy import Connection, and_, func, select

from paredown.plan.plan import Plan
from paredown.plan.trial import Status
from paredown.runs.readable import check_columns, check_text, readable
from paredown.runs.schema import FINISHED, RUNNING, TRIALS, WAITING
from paredown.runs.store import Store


@dataclass(frozen=True)
class Counts:
    """The trials of one sweep, by state; finished ones by status."""

    sweep: str
    waiting: int = 0
    running: int = 0
    by_status: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def finished(self) -> int:
        """Those that have a result."""
        return sum(self.by_status.values())

    @property
    def total(self) -> int:
        """All of them."""
        return self.waiting + self.running + self.finished

    def __str__(self) -> str:
        kinds = ", ".join(f"{num} {status}" for status, num in self.by_status.items())
        finished = f"{self.finished} of {self.total} finished" + (f" ({kinds})" if kinds else "")
        return f"{self.sweep}: {finished}, {self.running} running, {self.waiting} waiting"

    def to_json(self) -> dict[str, Any]:
        """The JSON value."""
        counts = {"sweep": self.sweep, "total": self.total, "finished": self.finished}
        return {**counts, "running": self.running, "waiting": self.waiting, "by_status": dict(self.by_status)}


class Best(NamedTuple):
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


def count(store: Store) -> list[Counts]:
    """The counts of every sweep, by name."""
    columns = (TRIALS.c.sweep, TRIALS.c.state, TRIALS.c.status)
    rows = store.database.read(lambda c: c.execute(select(*columns, func.count()).group_by(*columns)).all())
    found: dict[str, dict[str, int]] = {}
    for sweep, state, status, num in rows:
        found.setdefault(check_text(sweep, "the name of a sweep"), {})[status if state == FINISHED else state] = num
    return [_counts(sweep, nums) for sweep, nums in sorted(found.items())]


def count_open(store: Store, sweep: str | None = None, *, without: Sequence[str] = ()) -> int:
    """Trials that have no result yet, of tasks other than `without`."""
    conditions = [TRIALS.c.state != FINISHED]
    conditions += [] if sweep is None else [TRIALS.c.sweep == sweep]
    conditions += [TRIALS.c.task.not_in(without)] if without else []
    return store.database.read(lambda c: c.scalar(select(func.count()).where(and_(*conditions)))) or 0


def find_best(store: Store, sweep: str) -> list[Best]:
    """For each task of a sweep, the trial of least error among those that are done."""
    done = and_(TRIALS.c.sweep == sweep, TRIALS.c.status == Status.DONE.value, TRIALS.c.error.is_not(None))

    def work(connection: Connection) -> list[Best]:
        turn = func.row_number().over(partition_by=TRIALS.c.task, order_by=(TRIALS.c.error, TRIALS.c.place)).label("turn")
        ranked = select(TRIALS.c.task, TRIALS.c.error, TRIALS.c.plan, TRIALS.c.seed, turn).where(done).subquery()
        rows = connection.execute(select(ranked).where(ranked.c.turn == 1).order_by(ranked.c.task)).all()
        return [_best(row) for row in rows]

    return store.database.read(work)


def _best(row: Any) -> Best:
    with readable("a trial"):
        check_columns(row)
        return Best(row.task, row.error, Plan.from_json(json.loads(row.plan)), row.seed)


def say_plan(plan: Plan) -> str:
    """A plan in a few words."""
    said = [f"{key} {assignment}" for key, assignment in plan.rules[:3]]
    more = [f"{len(plan.rules) - 3} rules more"] if len(plan.rules) > 3 else []
    again = [f"{', '.join(plan.recompute)} computed again"] if plan.recompute else []
    return ", ".join([*said, *more, *again]) or "nothing packed"


def _counts(sweep: str, nums: dict[str, int]) -> Counts:
    by_status = {status.value: nums[status.value] for status in Status if status.value in nums}
    return Counts(sweep, nums.get(WAITING, 0), nums.get(RUNNING, 0), by_status)
