"""JSON files that verbs write and read; whatever is in one, reading it gives a value or a sentence."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from paredown import serial
from paredown.errors import ParedownError, PlanError

if TYPE_CHECKING:
    from paredown.search.picked import Frontier, Picked


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """The value in a file, whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(value, allow_nan=False, indent=1) + "\n", encoding="utf-8", newline="\n")
    part.replace(path)


def check_places(files: Mapping[str, Path | None]) -> None:
    """A sentence before the work rather than after it where a file, here by its option, cannot be written."""
    for option, path in files.items():
        if path is not None and path.is_dir():
            raise typer.BadParameter(f"{path} is a folder; give a file.", param_hint=option)
        if path is not None and not path.parent.is_dir():
            raise typer.BadParameter(f"there is no folder {path.parent}.", param_hint=option)


def read_json(path: Path) -> Any:
    """What a JSON file says."""
    if not path.is_file():
        raise PlanError(f"there is no file {path}.")
    return serial.read_json(path, "JSON file", PlanError)


def without_files(value: dict[str, Any]) -> dict[str, Any]:
    """An answer without what `pick --json` says beside it: which files it wrote."""
    return {name: part for name, part in value.items() if name != "files"}


def read_frontier(path: Path) -> tuple[Frontier, Picked | None]:
    """A frontier, or that of a pick, and the pick."""
    from paredown.search.picked import Frontier, Picked

    value = read_json(path)
    try:
        if isinstance(value, dict) and "frontier" in value:
            picked = Picked.from_json(without_files(value))
            return picked.frontier, picked
        return Frontier.from_json(value), None
    except ParedownError as error:
        raise PlanError(f"{path}: {error}") from None


def answer_json(picked: Picked) -> dict[str, Any]:
    """A pick as a JSON value, its sentences without absolute paths: what failed says where it lay."""
    from paredown.report.scrub import scrub

    value = picked.to_json()
    trials = [{**trial, "reason": scrub(trial["reason"])} for trial in value["trials"]]
    return value | {"trials": trials, "reason": scrub(picked.reason), "notes": [scrub(note) for note in picked.notes]}
