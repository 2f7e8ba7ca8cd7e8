"""Trials of a store as rows for other programs: CSV, JSON, Parquet (with the extra).

One row a trial, finished or not, ordered by sweep and turn. CSV and Parquet have the plan as JSON text and no curve; JSON has the
whole trial. Nothing of the store's address or of the workers is in them. A file appears whole or not at all.

Two stores into one: every trial once, finished if either has finished it.

A trial that only the source has is copied; one that runs there waits here. One that both have takes the source's result if it has
none here. Where both finished it, the result that was here stays. Workers may be at work on both: what they finish later is found
by merging again.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from sqlalchemy import Connection, Row, select, update

from paredown.errors import StoreError
from paredown.serial import COUNT, NUMBER, TEXT, check_fields, or_none
from paredown.sweeps.database import FINISHED, TRIALS, WAITING, check_columns, is_same_store, readable
from paredown.sweeps.store import BATCH, INSERTS, RESULT, Store, to_spec
from paredown.tasks.trial import Trial

FIGURES = ("status", "error", "loss", "predicted_peak_bytes", "measured_peak_bytes", "seconds", "reason", "device", "commit")
CHECKS = {
    **dict.fromkeys(("status", "reason", "device", "commit"), or_none(TEXT)),
    **dict.fromkeys(("error", "loss", "seconds"), or_none(NUMBER)),
    **dict.fromkeys(("predicted_peak_bytes", "measured_peak_bytes"), or_none(COUNT)),
}
COLUMNS = ("key", "sweep", "task", "seed", "mode", "plan", "propensity", "state", *FIGURES)


def rows(store: Store, sweep: str | None = None) -> list[dict[str, Any]]:
    """The trials of a sweep, or of all, as plain values; `trial` is the whole result, None while there is none."""
    query = select(TRIALS).order_by(TRIALS.c.sweep, TRIALS.c.place, TRIALS.c.key)
    found = store.database.read(lambda c: c.execute(query if sweep is None else query.where(TRIALS.c.sweep == sweep)).all())
    return [_row(row) for row in found]


def export(store: Store, to: str | Path, *, sweep: str | None = None) -> int:
    """Write the trials to a file whose ending says how; the number of rows."""
    path = Path(to)
    if path.suffix not in WRITERS:
        raise StoreError(f"{path.name} has no ending that says how to write it. Allowed: {', '.join(WRITERS)}.")
    found = rows(store, sweep)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file, readable("a trial"):
            WRITERS[path.suffix](found, file)
        part.replace(path)
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror}.") from None
    finally:
        part.unlink(missing_ok=True)
    return len(found)


def _row(row: Any) -> dict[str, Any]:
    with readable("a trial"):
        check_columns(row)
        trial = json.loads(row.result) if row.state == FINISHED else None
        values = {name: getattr(row, name) for name in ("key", "sweep", "task", "seed", "propensity", "state")}
        values |= {"mode": json.loads(row.settings)["mode"], "plan": json.loads(row.plan), "trial": trial}
        figures = {name: None if trial is None else trial.get(name) for name in FIGURES}
        check_fields(figures, CHECKS, "trial in the store", StoreError)
        return values | figures


def _flat(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: json.dumps(row[name]) if name == "plan" else row[name] for name in COLUMNS} for row in found]


def _write_csv(found: list[dict[str, Any]], file: IO[bytes]) -> None:
    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    writer = csv.DictWriter(text, list[str](COLUMNS))
    writer.writeheader()
    writer.writerows(_flat(found))
    text.flush()
    text.detach()


def _write_json(found: list[dict[str, Any]], file: IO[bytes]) -> None:
    lines = ",\n".join(json.dumps(row, allow_nan=False) for row in found)
    file.write(f"[\n{lines}\n]\n".encode())


def _write_parquet(found: list[dict[str, Any]], file: IO[bytes]) -> None:
    try:
        arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    except ModuleNotFoundError:
        raise StoreError("Parquet needs pyarrow: pip install 'paredown[parquet]'. CSV and JSON need nothing.") from None
    kinds = {"seed": arrow.int64(), "predicted_peak_bytes": arrow.int64(), "measured_peak_bytes": arrow.int64()}
    kinds |= dict.fromkeys(("propensity", "error", "loss", "seconds"), arrow.float64())
    schema = arrow.schema([(name, kinds.get(name, arrow.string())) for name in COLUMNS])
    parquet.write_table(arrow.Table.from_pylist(_flat(found), schema=schema), file)


WRITERS: dict[str, Callable[[list[dict[str, Any]], IO[bytes]], None]] = {
    ".csv": _write_csv,
    ".json": _write_json,
    ".parquet": _write_parquet,
}


# --- Two stores into one ---

COPIED = tuple(column.name for column in TRIALS.columns if column.name != "worker")


@dataclass(frozen=True)
class MergeResult:
    """What a merge did: trials that are new here, results taken over, and trials that both had finished."""

    num_new: int = 0
    num_results: int = 0
    num_both: int = 0

    def __str__(self) -> str:
        return f"{self.num_new} new trials, {self.num_results} results for trials that had none, {self.num_both} finished in both"

    def __add__(self, other: MergeResult) -> MergeResult:
        return MergeResult(self.num_new + other.num_new, self.num_results + other.num_results, self.num_both + other.num_both)


def merge(into: Store, source: Store) -> MergeResult:
    """Bring the trials of `source` into `into`; the source stays as it is. A batch is one transaction, and merging again is safe."""
    if is_same_store(into.database.url, source.database.url):
        raise StoreError(f"{into.database.name} is both stores; a merge needs two.")
    total, last = MergeResult(), ""
    while found := _next_rows(source, last):
        total += into.database.write(lambda connection, rows=found: _take(connection, rows))
        last = found[-1].key
    return total


def _next_rows(source: Store, last: str) -> Sequence[Row[Any]]:
    query = select(TRIALS).where(TRIALS.c.key > last).order_by(TRIALS.c.key).limit(BATCH)
    return source.database.read(lambda connection: connection.execute(query).all())


def _take(connection: Connection, found: Sequence[Row[Any]]) -> MergeResult:
    query = select(TRIALS.c.key, TRIALS.c.state).where(TRIALS.c.key.in_([row.key for row in found]))
    here = {row.key: row.state for row in connection.execute(query)}
    new = [_copy(row) for row in found if row.key not in here]
    if new:
        connection.execute(INSERTS[connection.dialect.name](TRIALS).values(new).on_conflict_do_nothing())
    finished = [row for row in found if row.key in here and row.state == FINISHED]
    taken = sum(_take_result(connection, row) for row in finished)
    return MergeResult(len(new), taken, len(finished) - taken)


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
