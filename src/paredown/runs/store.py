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
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

from sqlalchemy import Connection, and_, case, select, update

from paredown.plan.trial import Status
from paredown.runs import claims
from paredown.runs.claims import FREE, INSERTS, Bid, Claim, Ended, Written
from paredown.runs.database import Database
from paredown.runs.schema import TRIALS, WAITING, WORKERS
from paredown.runs.sweep import Drawn

T = TypeVar("T")
BATCH = 200  # rows of one statement: SQLite takes 32766 values


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

    def add(self, sweep: str, drawn: Iterable[Drawn]) -> Added:
        """Put the trials of a sweep in, where they are not there yet; those that wait take the new turn and settings.

        A sweep whose share was raised goes on with what ran: a trial that both draws took was as likely as in the larger one.
        """
        rows = [_row(sweep, place, one) for place, one in enumerate(drawn)]
        keys = [row["key"] for row in rows]

        def work(connection: Connection) -> Added:
            there = sum(len(connection.scalars(select(TRIALS.c.key).where(TRIALS.c.key.in_(part))).all()) for part in _parts(keys))
            for part in _parts(rows):
                statement = INSERTS[connection.dialect.name](TRIALS).values(part)
                newer, waits = statement.excluded, TRIALS.c.state == WAITING
                kept = {name: case((waits, newer[name]), else_=TRIALS.c[name]) for name in ("place", "settings")}
                likelier = case((newer.propensity > TRIALS.c.propensity, newer.propensity), else_=TRIALS.c.propensity)
                statement = statement.on_conflict_do_update(index_elements=["key"], set_={**kept, "propensity": likelier})
                connection.execute(statement)
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
        bid, tries = Bid(worker, uuid4().hex, num, sweep, tuple(without)), count()

        def work(connection: Connection) -> tuple[list[Written], list[Claim]]:
            claims.beat(connection, worker)
            written = [claims.finish(connection, one) for one in ended]
            ours = claims.held(connection, bid) if next(tries) else []
            return written, ours or claims.claim(connection, bid)

        return self.database.write(work)

    def give_back(self, ours: Sequence[Claim]) -> None:
        """Let others run these; the attempt does not count."""
        if ours:
            self.database.write(lambda connection: claims.give_back(connection, ours))

    def beat(self, worker: str) -> None:
        """Count one heartbeat."""
        self.database.write(lambda connection: claims.beat(connection, worker))

    def beats(self) -> dict[str, int]:
        """The heartbeats of each worker that is known."""
        return self.database.read(lambda c: {row.id: row.beats for row in c.execute(select(WORKERS))})

    def leave(self, worker: str) -> int:
        """Forget a worker that ends; what it still holds waits again: how many trials."""
        return self.database.write(lambda connection: claims.bury(connection, worker, WORKERS.c.id == worker))

    def free(self, worker: str, beats: int) -> int:
        """Take a worker for dead, unless it has a heartbeat since `beats`; how many trials wait again."""
        same = and_(WORKERS.c.id == worker, WORKERS.c.beats == beats)
        return self.database.write(lambda connection: claims.bury(connection, worker, same))

    def reopen(self, sweep: str, statuses: Sequence[Status]) -> int:
        """Let trials of a sweep that ended so wait again, their results dropped; how many."""
        which = and_(TRIALS.c.sweep == sweep, TRIALS.c.status.in_([status.value for status in statuses]))
        fresh = {**FREE, "attempts": 0, "status": None, "error": None, "seconds": None, "result": None}
        return self.database.write(lambda c: c.execute(update(TRIALS).where(which).values(**fresh)).rowcount)


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
