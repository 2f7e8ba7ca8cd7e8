"""A folder with a network and a task, in which commands run; no store and no data of the user's."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder of a test."""
    from tests.cli.commands import NET, TASK

    for name in ("PAREDOWN_STORE", "PAREDOWN_DATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PAREDOWN_PRIORS", str(tmp_path / "priors"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "tasks.py").write_text(TASK)
    return tmp_path
