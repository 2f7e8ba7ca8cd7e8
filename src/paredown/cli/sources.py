"""What verbs that show things are given: a store, or a JSON file that pick, train or a report wrote. Nothing that a file names is run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from paredown.cli.files import read_json, without_files
from paredown.errors import ParedownError, ReportError

if TYPE_CHECKING:
    from paredown.report.record import Record


def read_source(source: str, *, sweep: str | None = None, title: str = "") -> Record:
    """The record of a file that ends in .json, or of a store."""
    if not source.lower().endswith(".json"):
        return _of_store(source, sweep, title)
    value = read_json(Path(source))
    try:
        return _of_value(value, title)
    except ParedownError as error:
        raise ReportError(f"{source}: {error}") from None


def _of_store(address: str, sweep: str | None, title: str) -> Record:
    from paredown.report.record import Record
    from paredown.report.sweeps import open_to_read

    with open_to_read(address) as store:
        return Record.of_store(store, sweep=sweep, title=title)


def _of_value(value: Any, title: str) -> Record:
    """A record itself, an answer of pick, or runs of train, told apart by what they have."""
    from paredown.plan.trial import Trial
    from paredown.report.record import Record
    from paredown.search.picked import Picked

    if isinstance(value, dict) and "frontier" in value:
        return Record.of_pick(Picked.from_json(without_files(value)), title=title)
    if isinstance(value, dict) and "title" not in value and isinstance(value.get("runs"), list):
        runs = [
            {name: part for name, part in run.items() if name != "name"} if isinstance(run, dict) else run for run in value["runs"]
        ]
        return Record.of_trials(title or "Runs of a task", [Trial.from_json(run) for run in runs])
    if isinstance(value, dict) and "rules" in value:
        raise ReportError(
            "this is a plan, and says nothing of trials. To read it: paredown explain FILE. A page is made of a store, or of what "
            "pick --record or train --out wrote."
        )
    return Record.from_json(value)
