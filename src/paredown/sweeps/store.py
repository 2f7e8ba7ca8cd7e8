"""Trials in a database that many workers share: added, claimed, given back, finished once.

A claim is one statement that no two workers win. A result is written before anybody hears of it, the first one counts and later
ones change nothing, so a worker that was taken for dead loses time and no trial. Workers count heartbeats in the database;
who watches them (sweeps/worker.py) measures with a clock of its own, so clocks that differ or jump free nothing.

Every method may be repeated after a lost answer: what it already did is found by the worker's name or the claim's token.

Claims and results, as statements within one transaction; sweeps/store.py makes the transactions.

Statements are built once and bound to values at each call, since every trial runs them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from enum import Enum
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

from sqlalchemy import Connection, Row, Update, and_, bindparam, case, delete, select, update
from sqlalchemy.dialects import postgresql, sqlite

from paredown.plan.plan import Plan
from paredown.sweeps.database import FINISHED, RUNNING, TRIALS, WAITING, WORKERS, Database, check_columns, readable
from paredown.sweeps.sweep import DrawnTrial, TrialSettings, TrialSpec
from paredown.tasks.trial import Status, Trial

MAX_ATTEMPTS = 5  # a trial that took its process or its worker down so often is finished as killed
INSERTS: dict[str, Callable[..., Any]] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}
FREE = {"state": WAITING, "worker": None, "claim": None}
RESULT = ("state", "worker", "claim", "status", "error", "seconds", "result")


class Claim(NamedTuple):
    """A trial that is ours to run."""

    key: str
    sweep: str
    spec: TrialSpec
    token: str
    attempt: int  # 1: the first time


class EndedTrial(NamedTuple):
    """A claim and its result; None: the process died, and `reason` says how."""

    claim: Claim
    trial: Trial | None
    reason: str = ""


class WriteOutcome(str, Enum):
    """What became of a result that was handed in."""

    COUNTED = "counted"  # it is the trial's result
    LATE = "late"  # another worker's was there before
    AGAIN = "again"  # there is none: the process died, and the trial waits again


class WrittenResult(NamedTuple):
    """A fate, and the result that is now in the store if it is ours."""

    fate: WriteOutcome
    trial: Trial | None


class ClaimRequest(NamedTuple):
    """Who claims, the token of this claim, how many trials at most, of which sweep (None: any) and of which tasks not."""

    worker: str
    token: str
    num: int
    sweep: str | None = None
    without: tuple[str, ...] = ()


OPEN = and_(TRIALS.c.key == bindparam("of_key"), TRIALS.c.state != FINISHED)
OURS = and_(TRIALS.c.key == bindparam("of_key"), TRIALS.c.claim == bindparam("of_claim"), TRIALS.c.state == RUNNING)
WRITE_RESULT = update(TRIALS).where(OPEN).values({name: bindparam(name) for name in RESULT})
WAIT_AGAIN = update(TRIALS).where(OURS).values(FREE)
GIVE_BACK = update(TRIALS).where(OURS).values({**FREE, "attempts": TRIALS.c.attempts - 1})


def beat(connection: Connection, worker: str) -> None:
    """Count a heartbeat. A worker that was taken for dead is known again; what it held has gone to others."""
    connection.execute(_beat_statement(connection.dialect.name), {"id": worker})


def claim(connection: Connection, bid: ClaimRequest) -> list[Claim]:
    """Trials that waited and are now the bidder's, in turn."""
    if not bid.num:
        return []
    values = {"by": bid.worker, "token": bid.token, "num": bid.num, "of_sweep": bid.sweep, "without": list(bid.without)}
    statement = _claim_statement(bid.sweep is not None, bool(bid.without))
    rows = connection.execute(statement, {name: value for name, value in values.items() if value is not None and value != []}).all()
    for row in rows:
        check_columns(row)
    return [_to_claim(row) for row in sorted(rows, key=lambda row: (row.sweep, row.place))]


def held_claims(connection: Connection, bid: ClaimRequest) -> list[Claim]:
    """What this very bid claimed before: it was committed, and the answer was lost."""
    query = select(TRIALS).where(TRIALS.c.worker == bid.worker, TRIALS.c.claim == bid.token)
    return [_to_claim(row) for row in connection.execute(query)]


def finish(connection: Connection, ended: EndedTrial) -> WrittenResult:
    """Write a result, unless there is one; let a trial whose process died wait again, up to MAX_ATTEMPTS."""
    claim, trial = ended.claim, ended.trial
    if trial is None and claim.attempt < MAX_ATTEMPTS:
        give_back(connection, [claim], WAIT_AGAIN)
        return WrittenResult(WriteOutcome.AGAIN, None)
    trial = trial or killed(claim.spec, claim.attempt, ended.reason)
    if connection.execute(WRITE_RESULT, {**result_values(trial, claim.token), "of_key": claim.key}).rowcount:
        return WrittenResult(WriteOutcome.COUNTED, trial)
    by = connection.scalar(select(TRIALS.c.claim).where(TRIALS.c.key == claim.key))
    return WrittenResult(WriteOutcome.COUNTED, trial) if by == claim.token else WrittenResult(WriteOutcome.LATE, None)


def give_back(connection: Connection, claims: Sequence[Claim], statement: Update = GIVE_BACK) -> None:
    """Let trials wait again that are still ours."""
    for one in claims:
        connection.execute(statement, {"of_key": one.key, "of_claim": one.token})


def bury(connection: Connection, worker: str, condition: Any) -> int:
    """Forget a worker if it is as it was seen, and let what it holds wait again, or end as killed after MAX_ATTEMPTS."""
    if not connection.execute(delete(WORKERS).where(condition)).rowcount:
        return 0
    its = TRIALS.c.worker == worker
    for row in connection.execute(select(TRIALS).where(its, TRIALS.c.attempts >= MAX_ATTEMPTS)).all():
        trial = killed(to_spec(row), row.attempts, "its worker died")
        connection.execute(WRITE_RESULT, {**result_values(trial, row.claim), "of_key": row.key})
    return connection.execute(update(TRIALS).where(its).values(FREE)).rowcount


def to_spec(row: Row[Any]) -> TrialSpec:
    """What a row of TRIALS says is to be run."""
    with readable("a trial"):
        check_columns(row)
        return TrialSpec(row.task, Plan.from_json(json.loads(row.plan)), row.seed, TrialSettings(**json.loads(row.settings)))


def result_values(trial: Trial, token: str) -> dict[str, Any]:
    """The columns of a finished trial."""
    figures = {"status": trial.status.value, "error": trial.error, "seconds": trial.seconds}
    return {"state": FINISHED, "worker": None, "claim": token, **figures, "result": json.dumps(trial.to_json())}


def killed(spec: TrialSpec, attempts: int, reason: str) -> Trial:
    """The result of a trial that never came to an end."""
    said = f"{reason}; so it went {attempts} times, and it is not tried again"
    return Trial(spec.task, spec.plan, spec.seed, Status.KILLED, reason=said)


@cache
def _beat_statement(dialect: str) -> Any:
    statement = INSERTS[dialect](WORKERS).values(id=bindparam("id"), beats=1)
    return statement.on_conflict_do_update(index_elements=["id"], set_={"beats": WORKERS.c.beats + 1})


@cache
def _claim_statement(of_sweep: bool, has_without: bool) -> Any:
    """One statement: on PostgreSQL it passes over rows that others are claiming, on SQLite there is one writer at a time."""
    waiting = [TRIALS.c.state == WAITING]
    waiting += [TRIALS.c.sweep == bindparam("of_sweep")] if of_sweep else []
    waiting += [TRIALS.c.task.not_in(bindparam("without", expanding=True))] if has_without else []
    query = select(TRIALS.c.key).where(and_(*waiting)).order_by(TRIALS.c.sweep, TRIALS.c.place).limit(bindparam("num"))
    # A table of its own: PostgreSQL may run a plain subquery once a row, and would then claim more than `num`.
    turn = query.with_for_update(skip_locked=True).cte("turn")
    ours = {"state": RUNNING, "worker": bindparam("by"), "claim": bindparam("token"), "attempts": TRIALS.c.attempts + 1}
    return update(TRIALS).where(TRIALS.c.key.in_(select(turn.c.key)), TRIALS.c.state == WAITING).values(ours).returning(TRIALS)


def _to_claim(row: Row[Any]) -> Claim:
    return Claim(row.key, row.sweep, to_spec(row), row.claim, row.attempts)


# --- Trials in a database that many workers share ---

T = TypeVar("T")
BATCH = 200  # rows of one statement: SQLite takes 32766 values


class AddResult(NamedTuple):
    """What `Store.add` found: trials that are new, and those that were there."""

    num_new: int
    num_there: int


class Store:
    """A store of trials at a path or a PostgreSQL URL; made if it is not there, unless it is only to be read."""

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
        """Give the connections back."""
        self.database.close()

    def add(self, sweep: str, drawn: Iterable[DrawnTrial]) -> AddResult:
        """Put the trials of a sweep in, where they are not there yet; those that wait take the new turn and settings.

        A sweep whose share was raised goes on with what ran: a trial that both draws took was as likely as in the larger one.
        """
        rows = [_row(sweep, place, one) for place, one in enumerate(drawn)]
        keys = [row["key"] for row in rows]

        def work(connection: Connection) -> AddResult:
            there = sum(len(connection.scalars(select(TRIALS.c.key).where(TRIALS.c.key.in_(part))).all()) for part in _parts(keys))
            for part in _parts(rows):
                statement = INSERTS[connection.dialect.name](TRIALS).values(part)
                newer, waits = statement.excluded, TRIALS.c.state == WAITING
                kept = {name: case((waits, newer[name]), else_=TRIALS.c[name]) for name in ("place", "settings")}
                likelier = case((newer.propensity > TRIALS.c.propensity, newer.propensity), else_=TRIALS.c.propensity)
                statement = statement.on_conflict_do_update(index_elements=["key"], set_={**kept, "propensity": likelier})
                connection.execute(statement)
            return AddResult(len(rows) - there, there)

        return self.database.write(work)

    def claim(self, worker: str, num: int, *, sweep: str | None = None, without: Sequence[str] = ()) -> list[Claim]:
        """Up to `num` trials that waited and are now this worker's, in turn; none of the tasks `without`."""
        return self.exchange(worker, (), num, sweep=sweep, without=without)[1]

    def finish(self, worker: str, ended: EndedTrial) -> WrittenResult:
        """Write a result down."""
        return self.exchange(worker, (ended,), 0)[0][0]

    def exchange(
        self, worker: str, ended: Sequence[EndedTrial], num: int, *, sweep: str | None = None, without: Sequence[str] = ()
    ) -> tuple[list[WrittenResult], list[Claim]]:
        """`finish` and `claim` in one transaction: what became of our results, and what is ours to run next."""
        bid, tries = ClaimRequest(worker, uuid4().hex, num, sweep, tuple(without)), count()

        def work(connection: Connection) -> tuple[list[WrittenResult], list[Claim]]:
            beat(connection, worker)
            written = [finish(connection, one) for one in ended]
            ours = held_claims(connection, bid) if next(tries) else []
            return written, ours or claim(connection, bid)

        return self.database.write(work)

    def give_back(self, ours: Sequence[Claim]) -> None:
        """Let others run these; the attempt does not count."""
        if ours:
            self.database.write(lambda connection: give_back(connection, ours))

    def beat(self, worker: str) -> None:
        """Count one heartbeat."""
        self.database.write(lambda connection: beat(connection, worker))

    def beats(self) -> dict[str, int]:
        """The heartbeats of each worker that is known."""
        return self.database.read(lambda c: {row.id: row.beats for row in c.execute(select(WORKERS))})

    def leave(self, worker: str) -> int:
        """Forget a worker that ends; what it still holds waits again: how many trials."""
        return self.database.write(lambda connection: bury(connection, worker, WORKERS.c.id == worker))

    def free(self, worker: str, beats: int) -> int:
        """Take a worker for dead, unless it has a heartbeat since `beats`; how many trials wait again."""
        same = and_(WORKERS.c.id == worker, WORKERS.c.beats == beats)
        return self.database.write(lambda connection: bury(connection, worker, same))

    def reopen(self, sweep: str, statuses: Sequence[Status]) -> int:
        """Let trials of a sweep that ended so wait again, their results dropped; how many."""
        which = and_(TRIALS.c.sweep == sweep, TRIALS.c.status.in_([status.value for status in statuses]))
        fresh = {**FREE, "attempts": 0, "status": None, "error": None, "seconds": None, "result": None}
        return self.database.write(lambda c: c.execute(update(TRIALS).where(which).values(**fresh)).rowcount)


def _row(sweep: str, place: int, drawn: DrawnTrial) -> dict[str, Any]:
    spec = drawn.spec
    return {
        "key": spec.key(sweep),
        "sweep": sweep,
        "place": place,
        "task": spec.task,
        "plan": json.dumps(spec.plan.to_json()),
        "seed": spec.seed,
        "settings": json.dumps(asdict(spec.settings)),
        "propensity": drawn.propensity,
    }


def _parts(values: Sequence[T]) -> Iterator[Sequence[T]]:
    """Batches of rows, each for one statement."""
    return (values[i : i + BATCH] for i in range(0, len(values), BATCH))
