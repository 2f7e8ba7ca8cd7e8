"""A store holds trials in a database that many workers share. Trials are added, claimed, released, and finished once.

A worker claims a trial before it runs it. A claim is one SQL statement, and no two workers claim the same trial. A result is committed
before it is reported; the first result of a trial counts and later ones change nothing, so a worker that was wrongly taken for dead costs
time and no trial. Workers count heartbeats in the database; the workers that watch them (study/sweeps/worker.py) measure time with their
own clock, so wrong clocks release nothing. The times of trials, `started_at` and `finished_at`, are those of the worker's clock; they are
for readers, and nothing depends on them.

Every method may run again after a lost reply: it recognizes its first run by the worker's id or the token of the claim.

The module functions are statements within one transaction; the methods of Store make the transactions. Statements are built once, since
every trial runs them.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from enum import Enum
from functools import cache, lru_cache
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

from sqlalchemy import Connection, Row, Update, and_, bindparam, case, delete, func, select, update
from sqlalchemy.dialects import postgresql, sqlite

from paredown.errors import StoreError
from paredown.plan.plan import Plan
from paredown.study.sweeps.database import FINISHED, RUNNING, TRIALS, WAITING, WORKERS, Database, check_columns, readable
from paredown.study.sweeps.sweep import Claim, DrawnTrial, EndedTrial, TrialSettings, TrialSpec, label_of
from paredown.study.tasks.trial import Status, Trial

MAX_ATTEMPTS = 5  # a trial whose process or worker died so often is finished as killed
INSERTS: dict[str, Callable[..., Any]] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}
FREE = {"state": WAITING, "worker": None, "claim": None, "started_at": None, "host": None}
RESULT = ("state", "worker", "claim", "status", "error", "seconds", "result", "started_at", "finished_at", "host")


class WriteOutcome(str, Enum):
    """Says what happened to a result that a worker wrote: it counted, came too late, or the trial runs again."""

    COUNTED = "counted"  # it is the trial's result
    LATE = "late"  # the trial already had the result of another worker
    AGAIN = "again"  # no result: the process died, and the trial can be claimed again


class WrittenResult(NamedTuple):
    """Says what happened to a result, with the trial that was written if the result counted."""

    fate: WriteOutcome
    trial: Trial | None


def utc_now() -> str:
    """Return the time of this machine's clock in UTC, to the second: `2026-01-31T12:00:00Z`."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


OPEN = and_(TRIALS.c.key == bindparam("of_key"), TRIALS.c.state != FINISHED)
OURS = and_(TRIALS.c.key == bindparam("of_key"), TRIALS.c.claim == bindparam("of_claim"), TRIALS.c.state == RUNNING)
WRITE_RESULT = update(TRIALS).where(OPEN).values({name: bindparam(name) for name in RESULT})
RELEASE = update(TRIALS).where(OURS).values(FREE)
RELEASE_UNCOUNTED = update(TRIALS).where(OURS).values({**FREE, "attempts": TRIALS.c.attempts - 1})


def beat(connection: Connection, worker: str) -> None:
    """Count a heartbeat of a worker. A worker that was removed as dead, which released its trials, is registered again."""
    connection.execute(_beat_statement(connection.dialect.name), {"id": worker})


def claim(connection: Connection, values: dict[str, Any]) -> list[Claim]:
    """Reserve up to `num` unfinished trials that no worker runs, in the order of their sweep, and return them as claims.

    `values` are the parameters of the SQL statement by name, `num` among them.
    """
    if not values["num"]:
        return []
    rows = connection.execute(_claim_statement("of_sweep" in values, "without" in values), values).all()
    for row in rows:
        check_columns(row)
    return [_to_claim(row) for row in sorted(rows, key=lambda row: (row.sweep, row.place))]


def held_claims(connection: Connection, worker: str, token: str) -> list[Claim]:
    """Return the trials that `worker` has reserved under `token` in a committed transaction whose reply was lost; often none."""
    query = select(TRIALS).where(TRIALS.c.worker == worker, TRIALS.c.claim == token)
    return [_to_claim(row) for row in connection.execute(query)]


def finish(connection: Connection, ended: EndedTrial, now: str) -> WrittenResult:
    """Write the result of a trial that ended at time `now`, unless it has one, and return what was written.

    If the trial's process died, the trial is released, up to MAX_ATTEMPTS times.
    """
    claim, trial = ended.claim, ended.trial
    if trial is None and claim.attempt < MAX_ATTEMPTS:
        give_back(connection, [claim], RELEASE)
        return WrittenResult(WriteOutcome.AGAIN, None)
    trial = trial or killed(claim.spec, claim.attempt, ended.reason)
    values = result_values(trial, claim.token, claim.started_at, now, ended.host or claim.host)
    if connection.execute(WRITE_RESULT, {**values, "of_key": claim.key}).rowcount:
        return WrittenResult(WriteOutcome.COUNTED, trial)
    by = connection.scalar(select(TRIALS.c.claim).where(TRIALS.c.key == claim.key))
    return WrittenResult(WriteOutcome.COUNTED, trial) if by == claim.token else WrittenResult(WriteOutcome.LATE, None)


def give_back(connection: Connection, claims: Sequence[Claim], statement: Update = RELEASE_UNCOUNTED) -> None:
    """Release the trials of `claims` that their worker still holds; by default `statement` does not count the attempt."""
    for held in claims:
        connection.execute(statement, {"of_key": held.key, "of_claim": held.token})


def bury(connection: Connection, worker: str, condition: Any) -> int:
    """Remove a worker if `condition`, SQL on its row, holds, and return how many of its trials other workers may run now.

    A trial that has been attempted MAX_ATTEMPTS times ends as killed instead.
    """
    if not connection.execute(delete(WORKERS).where(condition)).rowcount:
        return 0
    is_its_trial = TRIALS.c.worker == worker
    for row in connection.execute(select(TRIALS).where(is_its_trial, TRIALS.c.attempts >= MAX_ATTEMPTS)).all():
        trial = killed(to_spec(row), row.attempts, "its worker died")
        values = result_values(trial, row.claim, row.started_at, utc_now(), row.host)
        connection.execute(WRITE_RESULT, {**values, "of_key": row.key})
    return connection.execute(update(TRIALS).where(is_its_trial).values(FREE)).rowcount


def to_spec(row: Row[Any]) -> TrialSpec:
    """Return what a trial is to run, from its row in the database."""
    with readable("a trial"):
        check_columns(row)
        return TrialSpec(row.task, parsed_plan(row.plan), row.seed, TrialSettings(**json.loads(row.settings)))


@lru_cache(maxsize=1024)
def parsed_plan(text: str) -> Plan:
    """Return the plan of a row's JSON `text`; cached, since rows of one sweep repeat it for every task and seed."""
    return Plan.from_json(json.loads(text))


def result_values(trial: Trial, token: str | None, started_at: str | None, finished_at: str, host: str | None) -> dict[str, Any]:
    """Return the values of the database's columns for a finished trial; `token` says under which reservation it ran."""
    numbers = {"status": trial.status.value, "error": trial.error, "seconds": trial.seconds}
    times = {"started_at": started_at, "finished_at": finished_at, "host": host}
    return {"state": FINISHED, "worker": None, "claim": token, **numbers, "result": json.dumps(trial.to_json()), **times}


def killed(spec: TrialSpec, attempts: int, reason: str) -> Trial:
    """Return the result of a trial whose process or worker died in every attempt."""
    text = f"{reason}; this happened in {attempts} attempts, and the trial is not run again"
    return Trial(spec.task, spec.plan, spec.seed, Status.KILLED, reason=text)


@cache
def _beat_statement(dialect: str) -> Any:
    statement = INSERTS[dialect](WORKERS).values(id=bindparam("id"), beats=1)
    return statement.on_conflict_do_update(index_elements=["id"], set_={"beats": WORKERS.c.beats + 1})


@cache
def _claim_statement(of_sweep: bool, has_without: bool) -> Any:
    """Return the SQL statement that reserves trials: of one sweep if `of_sweep`, without some tasks if `has_without`.

    On PostgreSQL it skips rows that other workers are reserving; SQLite has one writer.
    """
    is_open = [TRIALS.c.state == WAITING]
    is_open += [TRIALS.c.sweep == bindparam("of_sweep")] if of_sweep else []
    is_open += [TRIALS.c.task.not_in(bindparam("without", expanding=True))] if has_without else []
    query = select(TRIALS.c.key).where(and_(*is_open)).order_by(TRIALS.c.sweep, TRIALS.c.place).limit(bindparam("num"))
    # A CTE: PostgreSQL may run a plain subquery once per row, and would then claim more than `num`.
    chosen = query.with_for_update(skip_locked=True).cte("turn")
    claimed = {"state": RUNNING, "worker": bindparam("by"), "claim": bindparam("token"), "attempts": TRIALS.c.attempts + 1}
    claimed |= {"started_at": bindparam("now"), "host": bindparam("here")}
    return update(TRIALS).where(TRIALS.c.key.in_(select(chosen.c.key)), TRIALS.c.state == WAITING).values(claimed).returning(TRIALS)


def _to_claim(row: Row[Any]) -> Claim:
    spec = to_spec(row)
    return Claim(row.key, row.sweep, spec, row.claim, row.attempts, row.label or label_of(spec.plan), row.started_at, row.host)


# --- The store ---

T = TypeVar("T")
BATCH = 200  # rows of one statement: SQLite allows 32766 values


class AddResult(NamedTuple):
    """Counts the trials that `Store.add` added, and those that the database had already."""

    num_new: int
    num_there: int


class Store:
    """Adds, hands out and finishes trials in a database at a path or PostgreSQL URL, which is created unless `may_create` is False."""

    def __init__(
        self,
        address: str | Path,
        *,
        may_create: bool = True,
        patience_seconds: float = 120.0,
        say: Callable[[str], object] | None = None,
    ) -> None:
        self.database = Database(address, patience_seconds=patience_seconds, say=say)
        try:
            self.database.open(may_create=may_create)
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"Store({self.database.name})"

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections to the database."""
        self.database.close()

    def add(self, sweep: str, drawn: Iterable[DrawnTrial]) -> AddResult:
        """Add the trials of a sweep that the database does not have, and return how many were new.

        Trials that are still open get the new order and settings; all trials get the new labels. A sweep with a raised share continues with
        its finished trials: if a trial was drawn before and now, it has the larger of its two propensities (probabilities to be drawn).
        Infeasible trials are added as finished. They are deleted if a plan fits now, for example after the task was changed.
        """
        drawn = list(drawn)
        rows = [_row(sweep, place, trial) for place, trial in enumerate(drawn)]
        keys = [row["key"] for row in rows]
        feasible_now = [key for trial in drawn for key in trial.infeasible_keys(sweep)]

        def work(connection: Connection) -> AddResult:
            for part in _parts(feasible_now):
                connection.execute(delete(TRIALS).where(TRIALS.c.key.in_(part)))
            num_present = sum(
                len(connection.scalars(select(TRIALS.c.key).where(TRIALS.c.key.in_(part))).all()) for part in _parts(keys)
            )
            for part in _parts(rows):
                statement = INSERTS[connection.dialect.name](TRIALS).values(part)
                new, is_open = statement.excluded, TRIALS.c.state == WAITING
                updated = {name: case((is_open, new[name]), else_=TRIALS.c[name]) for name in ("place", "settings")}
                larger = case((new.propensity > TRIALS.c.propensity, new.propensity), else_=TRIALS.c.propensity)
                updated |= {"propensity": larger, "label": func.coalesce(new.label, TRIALS.c.label)}
                statement = statement.on_conflict_do_update(index_elements=["key"], set_=updated)
                connection.execute(statement)
            return AddResult(len(rows) - num_present, num_present)

        return self.database.write(work)

    def claim(self, worker: str, num: int, *, sweep: str | None = None, without: Sequence[str] = ()) -> list[Claim]:
        """Reserve up to `num` unfinished trials for a worker, in the order of their sweep, and return them as claims.

        `sweep` limits them to one sweep; trials of the tasks in `without` are left out.
        """
        return self.exchange(worker, (), num, sweep=sweep, without=without)[1]

    def finish(self, worker: str, ended: EndedTrial) -> WrittenResult:
        """Write the result of a trial that `worker` has reserved and run, and return what happened to the result."""
        return self.exchange(worker, (ended,), 0)[0][0]

    def exchange(
        self, worker: str, ended: Sequence[EndedTrial], num: int, *, sweep: str | None = None, without: Sequence[str] = ()
    ) -> tuple[list[WrittenResult], list[Claim]]:
        """Write the results of `ended` trials and reserve up to `num` new ones in one transaction, as `finish` and `claim` do."""
        now, attempts = utc_now(), count()  # one time for all attempts to write
        token = uuid4().hex
        values: dict[str, Any] = {"by": worker, "token": token, "num": num, "now": now, "here": socket.gethostname()}
        values |= ({} if sweep is None else {"of_sweep": sweep}) | ({"without": list(without)} if without else {})

        def work(connection: Connection) -> tuple[list[WrittenResult], list[Claim]]:
            beat(connection, worker)
            written = [finish(connection, result, now) for result in ended]
            held = held_claims(connection, worker, token) if next(attempts) else []
            return written, held or claim(connection, values)

        return self.database.write(work)

    def give_back(self, claims: Sequence[Claim]) -> None:
        """Release trials that a worker has reserved, so that other workers can run them; the attempt does not count."""
        if claims:
            self.database.write(lambda connection: give_back(connection, claims))

    def beat(self, worker: str) -> None:
        """Count one heartbeat of a worker."""
        self.database.write(lambda connection: beat(connection, worker))

    def beats(self) -> dict[str, int]:
        """Return the number of heartbeats of each registered worker."""
        return self.database.read(lambda c: {row.id: row.beats for row in c.execute(select(WORKERS))})

    def leave(self, worker: str) -> int:
        """Remove a worker that ends, release its trials, and return their number."""
        return self.database.write(lambda connection: bury(connection, worker, WORKERS.c.id == worker))

    def free(self, worker: str, beats: int) -> int:
        """Remove a dead worker and release its trials, unless it has counted other heartbeats than `beats`; return their number."""
        same = and_(WORKERS.c.id == worker, WORKERS.c.beats == beats)
        return self.database.write(lambda connection: bury(connection, worker, same))

    def reopen(self, sweep: str, statuses: Sequence[Status]) -> int:
        """Reopen the trials of a sweep that ended with one of `statuses`: delete their results, and return the number of trials."""
        if Status.INFEASIBLE in statuses:
            raise StoreError(
                "infeasible trials have no plan to run again. Raise the budgets of their plans in the sweep file, or change their tasks."
            )
        condition = and_(TRIALS.c.sweep == sweep, TRIALS.c.status.in_([status.value for status in statuses]))
        values = {**FREE, "attempts": 0, **dict.fromkeys(("status", "error", "seconds", "result", "finished_at"))}
        return self.database.write(lambda c: c.execute(update(TRIALS).where(condition).values(**values)).rowcount)


NO_RESULT = {**FREE, **dict.fromkeys(name for name in RESULT if name not in FREE)}


def _row(sweep: str, place: int, drawn: DrawnTrial) -> dict[str, Any]:
    spec, values = drawn.spec, NO_RESULT
    if drawn.infeasible:  # no worker runs it, since no plan fits its budget
        trial = Trial(spec.task, spec.plan, spec.seed, Status.INFEASIBLE, reason=drawn.infeasible)
        values = result_values(trial, None, None, utc_now(), None)
    return {
        **values,
        "key": drawn.key(sweep),
        "sweep": sweep,
        "place": place,
        "task": spec.task,
        "plan": json.dumps(spec.plan.to_json()),
        "seed": spec.seed,
        "settings": json.dumps(asdict(spec.settings)),
        "propensity": drawn.propensity,
        "label": drawn.label or None,
    }


def _parts(values: Sequence[T]) -> Iterator[Sequence[T]]:
    return (values[i : i + BATCH] for i in range(0, len(values), BATCH))
