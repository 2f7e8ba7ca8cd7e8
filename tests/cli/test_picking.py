"""What `pick` writes and says beside the plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paredown.plan.plan import Plan
from paredown.plan.trial import Trial
from paredown.runs import measuring
from paredown.search.earlier_json import write
from paredown.search.earlier_made import made_up
from tests.cli.asking import asked_json

MLP = "digits#model=mlp,steps=3"


@pytest.fixture
def prior(folder: Path) -> str:
    """A made-up prior in a file."""
    write(made_up(), folder / "few.json")
    return "few.json"


def test_what_failed_is_told_without_where_it_lay(folder: Path, prior: str, monkeypatch: pytest.MonkeyPatch) -> None:
    count, evaluate = 0, measuring.evaluate

    def once(task: object, plan: Plan, **options: object) -> Trial:
        nonlocal count
        count += 1
        if count == 1:
            raise FileNotFoundError(2, "No such file or directory", str(folder / "my tables" / "words.txt"))
        return evaluate(task, plan, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(measuring, "evaluate", once)
    words = ("pick", MLP, "--budget", "80%", "--evaluations", "2", "--prior", prior, "--device", "cpu", "--record", "picked.json")
    value = asked_json(*words)
    written = Path("picked.json").read_text()
    assert {key: part for key, part in value.items() if key != "files"} == json.loads(written)
    assert "No such file or directory: 'words.txt'" in written, "it is told"
    assert str(folder) not in written
