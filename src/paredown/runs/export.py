"""Trials of a store as rows for other programs: CSV, JSON, Parquet (with the extra).

One row a trial, finished or not, ordered by sweep and turn. CSV and Parquet have the plan as JSON text and no curve; JSON has the
whole trial. Nothing of the store's address or of the workers is in them. A file appears whole or not at all.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from sqlalchemy import select

from paredown.errors import StoreError
from paredown.runs.readable import check_columns, readable
from paredown.runs.schema import FINISHED, TRIALS
from paredown.runs.store import Store
from paredown.serial import COUNT, NUMBER, TEXT, check_fields, or_none

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
