"""Trials in a database that many workers share: added, claimed, given back, finished once.

A claim is one statement that no two workers win. A result is written before anybody hears of it, the first one counts and later
ones change nothing, so a worker that was taken for dead loses time and no trial. Workers count heartbeats in the database;
who watches them (watch.py) measures with a clock of its own, so clocks that differ or jump free nothing.

Every method may be repeated after a lost answer: what it already did is found by the worker's name or the claim's token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from enum import Enum
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

from sqlalchemy import Connection, Row, and_, delete, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite

from paredown.plan.plan import Plan
from paredown.plan.trial import Status, Trial
from paredown.runs.database import Database
from paredown.runs.schema import FINISHED, RUNNING, TRIALS, WAITING, WORKERS
from paredown.runs.sweep import Drawn, Settings, TrialSpec

T = TypeVar("T")
MAX_ATTEMPTS = 5  # a trial that took its process or its worker down so often is finished as killed
BATCH = 200  # rows of one statement: SQLite takes 32766 values
INSERTS: dict[str, Callable[..., Any]] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}
FREE = {"state": WAITING, "worker": None, "claim": None}


class Claim(NamedTuple):
    """A trial that is ours to run."""

    key: str
    sweep: str
    spec: TrialSpec
    token: str
    attempt: int  # 1: the first time


class Ended(NamedTuple):
    """A claim and its result; None: the process died, and `reason` says how."""

    claim: Claim
    trial: Trial | None
    reason: str = ""


class Fate(str, Enum):
    """What became of a result that was handed in."""

    COUNTED = "counted"  # it is the trial's result
    LATE = "late"  # another worker's was there before
    AGAIN = "again"  # there is none: the process died, and the trial waits again


class Written(NamedTuple):
    """A fate, and the result that is now in the store if it is ours."""

    fate: Fate
    trial: Trial | None


class Added(NamedTuple):
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
        self.database.open(may_create=may_create)

    def __repr__(self) -> str:
        return f"Store({self.database.name})"

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the connections back."""
        self.database.close()

    def add(self, sweep: str, drawn: Iterable[Drawn]) -> Added:
        """Put the trials of a sweep in, where they are not there yet; those that wait take the new turn and settings."""
        rows = [_row(sweep, place, one) for place, one in enumerate(drawn)]
        keys = [row["key"] for row in rows]

        def work(connection: Connection) -> Added:
            there = sum(len(connection.scalars(select(TRIALS.c.key).where(TRIALS.c.key.in_(part))).all()) for part in _parts(keys))
            for part in _parts(rows):
                statement = INSERTS[connection.dialect.name](TRIALS).values(part)
                newer = {name: statement.excluded[name] for name in ("place", "settings")}
                connection.execute(
                    statement.on_conflict_do_update(index_elements=["key"], set_=newer, where=TRIALS.c.state == WAITING)
                )
            return Added(len(rows) - there, there)

        return self.database.write(work)

    def claim(self, worker: str, num: int, *, sweep: str | None = None, without: Sequence[str] = ()) -> list[Claim]:
        """Up to `num` trials that waited and are now this worker's, in turn; none of the tasks `without`."""
        return self.exchange(worker, (), num, sweep=sweep, without=without)[1]

    def finish(self, worker: str, ended: Ended) -> Written:
        """Write a result down."""
        return self.exchange(worker, (ended,), 0)[0][0]

    def exchange(
        self, worker: str, ended: Sequence[Ended], num: int, *, sweep: str | None = None, without: Sequence[str] = ()
    ) -> tuple[list[Written], list[Claim]]:
        """`finish` and `claim` in one transaction: what became of our results, and what is ours to run next."""
        token, tries = uuid4().hex, count()

        def work(connection: Connection) -> tuple[list[Written], list[Claim]]:
            _beat(connection, worker)
            is_again = next(tries) > 0
            written = [_finish(connection, one) for one in ended]
            ours = _held(connection, worker, token) if is_again else []  # committed, and the answer was lost
            return written, ours or _claim(connection, Bid(worker, token, num), _waiting(sweep, without))

        return self.database.write(work)

    def give_back(self, claims: Sequence[Claim]) -> None:
        """Let others run these; the attempt does not count."""
        if claims:
            ours = or_(*(and_(TRIALS.c.key == claim.key, TRIALS.c.claim == claim.token) for claim in claims))
            fewer = {"attempts": TRIALS.c.attempts - 1}
            self.database.write(lambda c: c.execute(update(TRIALS).where(TRIALS.c.state == RUNNING, ours).values(**FREE, **fewer)))

    def beat(self, worker: str) -> None:
        """Count one heartbeat."""
        self.database.write(lambda connection: _beat(connection, worker))

    def beats(self) -> dict[str, int]:
        """The heartbeats of each worker that is known."""
        return self.database.read(lambda c: {row.id: row.beats for row in c.execute(select(WORKERS))})

    def leave(self, worker: str) -> int:
        """Forget a worker that ends; what it still holds waits again: how many trials."""
        return self.database.write(lambda connection: _bury(connection, worker, WORKERS.c.id == worker))

    def free(self, worker: str, beats: int) -> int:
        """Take a worker for dead, unless it has a heartbeat since `beats`; how many trials wait again."""
        same = and_(WORKERS.c.id == worker, WORKERS.c.beats == beats)
        return self.database.write(lambda connection: _bury(connection, worker, same))

    def reopen(self, sweep: str, statuses: Sequence[Status]) -> int:
        """Let trials of a sweep that ended so wait again, their results dropped; how many."""
        which = and_(TRIALS.c.sweep == sweep, TRIALS.c.status.in_([status.value for status in statuses]))
        fresh = {**FREE, "attempts": 0, "status": None, "error": None, "seconds": None, "result": None}
        return self.database.write(lambda c: c.execute(update(TRIALS).where(which).values(**fresh)).rowcount)


class Bid(NamedTuple):
    """Who claims, the token of this claim, and how many trials at most."""

    worker: str
    token: str
    num: int


def to_spec(row: Row[Any]) -> TrialSpec:
    """What a row of TRIALS says is to be run."""
    return TrialSpec(row.task, Plan.from_json(json.loads(row.plan)), row.seed, Settings(**json.loads(row.settings)))


def result_values(trial: Trial) -> dict[str, Any]:
    """The columns of a finished trial."""
    return {
        "state": FINISHED,
        "worker": None,
        "status": trial.status.value,
        "error": trial.error,
        "seconds": trial.seconds,
        "result": json.dumps(trial.to_json()),
    }


def _row(sweep: str, place: int, drawn: Drawn) -> dict[str, Any]:
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


def _beat(connection: Connection, worker: str) -> None:
    # Inserted again if it was taken for dead: what it held has gone to others.
    statement = INSERTS[connection.dialect.name](WORKERS).values(id=worker, beats=1)
    connection.execute(statement.on_conflict_do_update(index_elements=["id"], set_={"beats": WORKERS.c.beats + 1}))


def _waiting(sweep: str | None, without: Sequence[str]) -> Any:
    conditions = [TRIALS.c.state == WAITING]
    conditions += [] if sweep is None else [TRIALS.c.sweep == sweep]
    conditions += [TRIALS.c.task.not_in(without)] if without else []
    return and_(*conditions)


def _held(connection: Connection, worker: str, token: str) -> list[Claim]:
    return [_to_claim(row) for row in connection.execute(select(TRIALS).where(TRIALS.c.worker == worker, TRIALS.c.claim == token))]


def _claim(connection: Connection, bid: Bid, waiting: Any) -> list[Claim]:
    """One statement: on PostgreSQL it passes over rows that others are claiming, on SQLite there is one writer at a time."""
    if not bid.num:
        return []
    turn = select(TRIALS.c.key).where(waiting).order_by(TRIALS.c.sweep, TRIALS.c.place).limit(bid.num)
    ours = {"state": RUNNING, "worker": bid.worker, "claim": bid.token, "attempts": TRIALS.c.attempts + 1}
    taken = update(TRIALS).where(TRIALS.c.key.in_(turn.with_for_update(skip_locked=True)), TRIALS.c.state == WAITING)
    rows = connection.execute(taken.values(**ours).returning(TRIALS)).all()
    return [_to_claim(row) for row in sorted(rows, key=lambda row: (row.sweep, row.place))]


def _to_claim(row: Row[Any]) -> Claim:
    return Claim(row.key, row.sweep, to_spec(row), row.claim, row.attempts)


def _finish(connection: Connection, ended: Ended) -> Written:
    claim, trial = ended.claim, ended.trial
    if trial is None and claim.attempt < MAX_ATTEMPTS:
        ours = and_(TRIALS.c.key == claim.key, TRIALS.c.claim == claim.token, TRIALS.c.state == RUNNING)
        connection.execute(update(TRIALS).where(ours).values(**FREE))
        return Written(Fate.AGAIN, None)
    trial = trial or _killed(claim.spec, claim.attempt, ended.reason)
    open_still = and_(TRIALS.c.key == claim.key, TRIALS.c.state != FINISHED)
    values = {**result_values(trial), "claim": claim.token}
    if connection.execute(update(TRIALS).where(open_still).values(**values)).rowcount:
        return Written(Fate.COUNTED, trial)
    by = connection.scalar(select(TRIALS.c.claim).where(TRIALS.c.key == claim.key))
    return Written(Fate.COUNTED, trial) if by == claim.token else Written(Fate.LATE, None)


def _bury(connection: Connection, worker: str, condition: Any) -> int:
    """Forget a worker if it is as it was seen, and let what it holds wait again, or end as killed after MAX_ATTEMPTS."""
    if not connection.execute(delete(WORKERS).where(condition)).rowcount:
        return 0
    held = TRIALS.c.worker == worker
    for row in connection.execute(select(TRIALS).where(held, TRIALS.c.attempts >= MAX_ATTEMPTS)).all():
        trial = _killed(to_spec(row), row.attempts, "its worker died")
        connection.execute(update(TRIALS).where(TRIALS.c.key == row.key, held).values(**result_values(trial)))
    return connection.execute(update(TRIALS).where(held).values(**FREE)).rowcount


def _killed(spec: TrialSpec, attempts: int, reason: str) -> Trial:
    said = f"{reason}; so it went {attempts} times, and it is not tried again"
    return Trial(spec.task, spec.plan, spec.seed, Status.KILLED, reason=said)
