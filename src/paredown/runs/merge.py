"""Two stores into one: every trial once, finished if either has finished it.

A trial that only the source has is copied; one that runs there waits here. One that both have takes the source's result if it has
none here. Where both finished it, the result that was here stays. Workers may be at work on both: what they finish later is found
by merging again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, select, update

from paredown.errors import StoreError
from paredown.plan.trial import Trial
from paredown.runs.address import is_same_store
from paredown.runs.claims import INSERTS, RESULT, to_spec
from paredown.runs.readable import readable
from paredown.runs.schema import FINISHED, TRIALS, WAITING
from paredown.runs.store import BATCH, Store

COPIED = tuple(column.name for column in TRIALS.columns if column.name != "worker")


@dataclass(frozen=True)
class Merged:
    """What a merge did: trials that are new here, results taken over, and trials that both had finished."""

    num_new: int = 0
    num_results: int = 0
    num_both: int = 0

    def __str__(self) -> str:
        return f"{self.num_new} new trials, {self.num_results} results for trials that had none, {self.num_both} finished in both"

    def __add__(self, other: Merged) -> Merged:
        return Merged(self.num_new + other.num_new, self.num_results + other.num_results, self.num_both + other.num_both)


def merge(into: Store, source: Store) -> Merged:
    """Bring the trials of `source` into `into`; the source stays as it is. A batch is one transaction, and merging again is safe."""
    if is_same_store(into.database.url, source.database.url):
        raise StoreError(f"{into.database.name} is both stores; a merge needs two.")
    total, last = Merged(), ""
    while found := _next_rows(source, last):
        total += into.database.write(lambda connection, rows=found: _take(connection, rows))
        last = found[-1].key
    return total


def _next_rows(source: Store, last: str) -> Sequence[Row[Any]]:
    query = select(TRIALS).where(TRIALS.c.key > last).order_by(TRIALS.c.key).limit(BATCH)
    return source.database.read(lambda connection: connection.execute(query).all())


def _take(connection: Connection, found: Sequence[Row[Any]]) -> Merged:
    query = select(TRIALS.c.key, TRIALS.c.state).where(TRIALS.c.key.in_([row.key for row in found]))
    here = {row.key: row.state for row in connection.execute(query)}
    new = [_copy(row) for row in found if row.key not in here]
    if new:
        connection.execute(INSERTS[connection.dialect.name](TRIALS).values(new).on_conflict_do_nothing())
    finished = [row for row in found if row.key in here and row.state == FINISHED]
    taken = sum(_take_result(connection, row) for row in finished)
    return Merged(len(new), taken, len(finished) - taken)


def _copy(row: Row[Any]) -> dict[str, Any]:
    _check(row)
    values = {name: getattr(row, name) for name in COPIED} | {"worker": None}
    return values if row.state == FINISHED else values | {"state": WAITING, "claim": None}


def _check(row: Row[Any]) -> None:
    """What cannot be read is not brought in."""
    to_spec(row)
    with readable("a result"):
        if row.state == FINISHED:
            Trial.from_json(json.loads(row.result))


def _take_result(connection: Connection, row: Row[Any]) -> int:
    _check(row)
    values = {name: getattr(row, name) for name in RESULT}
    return connection.execute(update(TRIALS).where(TRIALS.c.key == row.key, TRIALS.c.state != FINISHED).values(**values)).rowcount
