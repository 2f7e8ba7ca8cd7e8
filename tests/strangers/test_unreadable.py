"""Files that are missing, that are folders, or that this user may not read: a sentence with the file's name, each time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import paredown as pare
from paredown.assignment.sensitivity import Sensitivities
from paredown.cli.inputs import read_frontier, read_source
from paredown.errors import ParedownError
from paredown.study.priors.prior_collection import read_rows
from paredown.study.priors.prior_files import read_prior
from paredown.study.report.record import Record
from paredown.study.tasks.data_files import read_text

LOADERS: dict[str, Callable[[Path], Any]] = {
    "plan": pare.Plan.load,
    "trace": pare.Trace.load,
    "sensitivities": Sensitivities.load,
    "record": Record.load,
    "prior": read_prior,
    "pick": read_frontier,
    "page": lambda path: read_source(str(path)),
    "export": read_rows,
    "text": lambda path: read_text(path, 8),
}


@pytest.mark.parametrize("name", LOADERS)
def test_a_folder_a_missing_file_and_one_that_may_not_be_read_are_sentences(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "file.json"
    with pytest.raises(ParedownError, match=r"file\.json"):
        LOADERS[name](path)
    path.mkdir()
    with pytest.raises(ParedownError, match=r"file\.json"):
        LOADERS[name](path)
    path.rmdir()
    path.write_text("{}")

    def refused(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refused)  # the superuser may read all files
    monkeypatch.setattr(Path, "read_text", refused)
    with pytest.raises(ParedownError, match=r"file\.json.*Permission denied"):
        LOADERS[name](path)


def test_a_sweep_that_cannot_be_read_is_a_sentence(tmp_path: Path) -> None:
    pytest.importorskip("sqlalchemy")
    from paredown.study.sweeps.sweep_file import load_sweep

    path = tmp_path / "sweep.toml"
    path.write_text(f'tasks = ["digits"]\nseeds = [{"9" * 6000}]\n[[plans]]\n')
    with pytest.raises(pare.errors.SweepError, match=r"sweep\.toml cannot be read: .*digits"):
        load_sweep(path)
