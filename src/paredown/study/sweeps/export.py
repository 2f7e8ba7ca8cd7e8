"""Export trials of a store to CSV, JSON or Parquet (`paredown[parquet]`), and merge one store into another.

An export has one row per trial, finished or not, in the order of sweeps and their trials. CSV and Parquet have the plan as JSON text and no
loss curve; JSON has the whole trial. `label` is the name of the plan. `started_at` and `finished_at` are times in UTC, and `host` is the
machine of the worker. Neither the store's address nor worker ids are exported. Files are written atomically.

A merge copies the trials that only the source has; those that are running there are open in the target. A trial of both gets the source's
result if it has none in the target; where both have finished it, the target's result stays. Workers may use both stores meanwhile: merge
again to copy what they finish later.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from sqlalchemy import Connection, Row, func, select, update

from paredown.errors import StoreError
from paredown.serial import COUNT, NUMBER, TEXT, check_fields, or_none, replaced_file
from paredown.study.sweeps.database import FINISHED, TRIALS, check_columns, is_same_store, readable
from paredown.study.sweeps.store import BATCH, FREE, INSERTS, RESULT, Store, parsed_plan, to_spec
from paredown.study.sweeps.sweep import label_of
from paredown.study.tasks.trial import Trial

RESULT_COLUMNS = ("status", "error", "loss", "predicted_peak_bytes", "measured_peak_bytes", "seconds", "reason", "device", "commit")
CHECKS = {
    **dict.fromkeys(("status", "reason", "device", "commit"), or_none(TEXT)),
    **dict.fromkeys(("error", "loss", "seconds"), or_none(NUMBER)),
    **dict.fromkeys(("predicted_peak_bytes", "measured_peak_bytes"), or_none(COUNT)),
}
RUN_COLUMNS = ("started_at", "finished_at", "host")
COLUMNS = ("key", "sweep", "task", "seed", "mode", "label", "plan", "propensity", "state", *RESULT_COLUMNS, *RUN_COLUMNS)


def rows(store: Store, sweep: str | None = None) -> list[dict[str, Any]]:
    """Return the trials of a sweep (None: of all sweeps) as JSON values; the field `trial` is the result, None if unfinished."""
    query = select(TRIALS).order_by(TRIALS.c.sweep, TRIALS.c.place, TRIALS.c.key)
    trials = store.database.read(lambda c: c.execute(query if sweep is None else query.where(TRIALS.c.sweep == sweep)).all())
    return [_row(row) for row in trials]


def export(store: Store, to: str | Path, *, sweep: str | None = None) -> int:
    """Write trials to a .csv, .json or .parquet file, and return the number of rows."""
    path = Path(to)
    if path.suffix not in WRITERS:
        raise StoreError(f"{path.name} has suffix {path.suffix!r}, which is no format of an export. Allowed: {', '.join(WRITERS)}.")
    trials = rows(store, sweep)
    with replaced_file(path, StoreError) as part, part.open("wb") as file, readable("a trial"):
        WRITERS[path.suffix](trials, file)
    return len(trials)


def _row(row: Any) -> dict[str, Any]:
    with readable("a trial"):
        check_columns(row)
        trial = json.loads(row.result) if row.state == FINISHED else None
        values = {name: getattr(row, name) for name in ("key", "sweep", "task", "seed", "propensity", "state", *RUN_COLUMNS)}
        values |= {"label": row.label or label_of(parsed_plan(row.plan))}
        values |= {"mode": json.loads(row.settings)["mode"], "plan": json.loads(row.plan), "trial": trial}
        results = {name: None if trial is None else trial.get(name) for name in RESULT_COLUMNS}
        check_fields(results, CHECKS, "trial in the store", StoreError)
        return values | results


def _flat(trials: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: json.dumps(row[name]) if name == "plan" else row[name] for name in COLUMNS} for row in trials]


def _write_csv(trials: list[dict[str, Any]], file: IO[bytes]) -> None:
    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    writer = csv.DictWriter(text, list[str](COLUMNS))
    writer.writeheader()
    writer.writerows(_flat(trials))
    text.flush()
    text.detach()


def _write_json(trials: list[dict[str, Any]], file: IO[bytes]) -> None:
    lines = ",\n".join(json.dumps(row, allow_nan=False) for row in trials)
    file.write(f"[\n{lines}\n]\n".encode())


def _write_parquet(trials: list[dict[str, Any]], file: IO[bytes]) -> None:
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ModuleNotFoundError:
        raise StoreError("Parquet needs pyarrow: pip install 'paredown[parquet]'. CSV and JSON do not.") from None
    kinds = {"seed": arrow.int64(), "predicted_peak_bytes": arrow.int64(), "measured_peak_bytes": arrow.int64()}
    kinds |= dict.fromkeys(("propensity", "error", "loss", "seconds"), arrow.float64())
    schema = arrow.schema([(name, kinds.get(name, arrow.string())) for name in COLUMNS])
    parquet.write_table(arrow.Table.from_pylist(_flat(trials), schema=schema), file)


WRITERS: dict[str, Callable[[list[dict[str, Any]], IO[bytes]], None]] = {
    ".csv": _write_csv,
    ".json": _write_json,
    ".parquet": _write_parquet,
}


# --- Merge ---

COPIED = tuple(column.name for column in TRIALS.columns if column.name != "worker")


@dataclass(frozen=True)
class MergeResult:
    """Counts the trials of a merge: new ones, results added to trials without one, and trials that both stores had finished."""

    num_new: int
    num_results: int
    num_both: int

    def __str__(self) -> str:
        return f"{self.num_new} new trials, {self.num_results} results for trials that had none, {self.num_both} finished in both"


def merge(into: Store, source: Store) -> MergeResult:
    """Copy the trials of `source` to `into`; `source` is unmodified. Each batch is one transaction, and merging twice is safe."""
    if is_same_store(into.database.url, source.database.url):
        raise StoreError(f"{into.database.name} is the source and the target; a merge needs two stores.")
    taken, last = [(0, 0, 0)], ""
    while True:
        query = select(TRIALS).where(TRIALS.c.key > last).order_by(TRIALS.c.key).limit(BATCH)
        batch = source.database.read(lambda connection, query=query: connection.execute(query).all())
        if not batch:
            return MergeResult(*map(sum, zip(*taken, strict=True)))
        taken.append(into.database.write(lambda connection, rows=batch: _take(connection, rows)))
        last = batch[-1].key


def _take(connection: Connection, source_rows: Sequence[Row[Any]]) -> tuple[int, int, int]:
    """Copy trials and results from rows of another database, and return how many are new, gained a result, or had one already."""
    query = select(TRIALS.c.key, TRIALS.c.state).where(TRIALS.c.key.in_([row.key for row in source_rows]))
    states = {row.key: row.state for row in connection.execute(query)}
    new = [_copy(row) for row in source_rows if row.key not in states]
    if new:
        connection.execute(INSERTS[connection.dialect.name](TRIALS).values(new).on_conflict_do_nothing())
    finished = [row for row in source_rows if row.key in states and row.state == FINISHED]
    taken = sum(_take_result(connection, row) for row in finished)
    return len(new), taken, len(finished) - taken


def _copy(row: Row[Any]) -> dict[str, Any]:
    _check(row)
    values = {name: getattr(row, name) for name in COPIED} | {"worker": None}
    return values if row.state == FINISHED else values | FREE


def _check(row: Row[Any]) -> None:
    to_spec(row)
    with readable("a result"):
        if row.state == FINISHED:
            Trial.from_json(json.loads(row.result))


def _take_result(connection: Connection, row: Row[Any]) -> int:
    _check(row)
    values = {name: getattr(row, name) for name in RESULT} | {"label": func.coalesce(TRIALS.c.label, row.label)}
    return connection.execute(update(TRIALS).where(TRIALS.c.key == row.key, TRIALS.c.state != FINISHED).values(**values)).rowcount
