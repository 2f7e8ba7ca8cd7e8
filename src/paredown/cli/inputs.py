"""Read and write the files of subcommands: JSON, and records from stores and from the output of pick, train or report.

Reading a damaged file raises a ParedownError; no code that a file names is run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from paredown import serial
from paredown.errors import ParedownError, PlanError, ReportError

if TYPE_CHECKING:
    from paredown.study.pick.answer import Frontier, Picked
    from paredown.study.report.record import Record


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write `value` to a file as JSON; if that fails, no partial file is left."""
    serial.save_json(path, value, ParedownError, indent=1)


def check_places(files: Mapping[str, Path | None]) -> None:
    """Raise BadParameter, before the work starts, if an output file is a folder or its folder is missing; `files` maps options to files."""
    for option, path in files.items():
        if path is not None and path.is_dir():
            raise typer.BadParameter(f"{path} is a folder; give a file.", param_hint=option)
        if path is not None and not path.parent.is_dir():
            raise typer.BadParameter(f"there is no folder {path.parent}.", param_hint=option)


def check_new(path: Path, *, may_overwrite: bool) -> None:
    """Raise BadParameter before the work starts if the file of --out exists and may not be replaced."""
    if path.exists() and not path.is_dir() and not may_overwrite:
        raise typer.BadParameter(f"{path} exists: add --overwrite to replace it, or give another name.", param_hint="--out")


def read_json_file(path: Path) -> Any:
    """Return the value of a JSON file; raise PlanError if the file is missing or is no JSON."""
    if not path.is_file():
        raise PlanError(f"there is no file {path}.")
    return serial.read_json(path, "JSON file", PlanError)


def without_files(value: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON of a pick without the field `files`, paths of written files, which only `pick --json` adds."""
    return {name: part for name, part in value.items() if name != "files"}


def read_frontier(path: Path) -> tuple[Frontier, Picked | None]:
    """Return the Frontier (all plans with bytes and errors) in a JSON file, and the answer of `pick` if the file holds one."""
    from paredown.study.pick.answer import Frontier, Picked

    value = read_json_file(path)
    try:
        if isinstance(value, dict) and "frontier" in value:
            picked = Picked.from_json(without_files(value))
            return picked.frontier, picked
        return Frontier.from_json(value), None
    except ParedownError as error:
        raise PlanError(f"{path}: {error}") from None


def answer_json(picked: Picked) -> dict[str, Any]:
    """Return the answer of `pick` as a dict for JSON, without absolute paths, which messages of failed trials can contain."""
    from paredown.study.report.record import scrub

    value = picked.to_json()
    trials = [{**trial, "reason": scrub(trial["reason"])} for trial in value["trials"]]
    return value | {"trials": trials, "reason": scrub(picked.reason), "notes": [scrub(note) for note in picked.notes]}


# --- records for report and serve ------------------------------------------------------------------------------------


def read_source(source: str, *, sweep: str | None = None, title: str = "") -> Record:
    """Return the Record (what a report page shows) in `source`: a .json file, or a database of trials.

    `sweep` selects one sweep of the database; `title` is that of the page.
    """
    if not source.lower().endswith(".json"):
        from paredown.study.report.record import Record
        from paredown.study.sweeps.store import Store

        with Store(source, may_create=False) as store:
            return Record.of_store(store, sweep=sweep, title=title)
    value = read_json_file(Path(source))
    try:
        return _of_value(value, title)
    except ParedownError as error:
        raise ReportError(f"{source}: {error}") from None


def _of_value(value: Any, title: str) -> Record:
    """Return the Record, the content of a report page, for a JSON value: a record, or the output of `pick` or `train`."""
    from paredown.study.pick.answer import Picked
    from paredown.study.report.record import Record
    from paredown.study.tasks.trial import Trial

    if isinstance(value, dict) and "frontier" in value:
        return Record.of_pick(Picked.from_json(without_files(value)), title=title)
    if isinstance(value, dict) and "title" not in value and isinstance(value.get("runs"), list):
        runs = [
            {name: part for name, part in run.items() if name != "name"} if isinstance(run, dict) else run for run in value["runs"]
        ]
        return Record.of_trials(title or "Runs of a task", [Trial.from_json(run) for run in runs])
    if isinstance(value, dict) and "rules" in value:
        raise ReportError(
            "this is a plan, which has no trials. To print it: paredown explain FILE. A report is made from a store, or from the output "
            "of pick --record or train --out."
        )
    return Record.from_json(value)
