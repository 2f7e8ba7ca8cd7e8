"""`report` and `serve`: which file changes under a page, and whose memory is whose."""

from __future__ import annotations

import json
from pathlib import Path

from paredown import Plan, Trial
from paredown.cli.report_verbs import _source, with_memory  # pyright: ignore[reportPrivateUsage]
from paredown.cli.subject import SubjectOptions, find_subject
from paredown.study.report.record import Record
from paredown.study.tasks.trial import Status

MLP = "digits#model=mlp,steps=3"


def trial(task: str, seed: int = 0) -> Trial:
    """One that ended well."""
    return Trial(task, Plan(), seed, Status.DONE, error=0.5, predicted_peak_bytes=100)


def test_a_records_file_is_read_again_when_it_changes(folder: Path) -> None:
    path = folder / "record.json"
    Record.of_trials("first", [trial("t")]).save(path)
    source = _source(str(path), None)
    assert source.read().title == "first" and source.read() is None
    Record.of_trials("second one", [trial("t"), trial("t", 1)]).save(path)
    found = source.read()
    assert found is not None and (found.title, len(found.runs)) == ("second one", 2)


def test_runs_are_shown_as_they_are(folder: Path) -> None:
    path = folder / "runs.json"
    path.write_text(json.dumps({"task": "t", "runs": [{"name": "baseline", **trial("t").to_json()}], "advice": None}))
    source = _source(str(path), None)
    assert len(source.read().runs) == 1 and source.read() is None


def test_memory_is_shown_with_its_own_task() -> None:
    record = Record.of_trials("tasks", [trial("another"), trial(MLP)])
    subject, plans = find_subject(MLP, SubjectOptions(device="cpu")), {"baseline": Plan(), "lpmm": Plan.preset("lpmm")}
    studies = {study.task: len(study.kept) for study in with_memory(record, subject, plans).studies}
    assert studies == {"another": 0, MLP: 2}
    alone = Record.of_trials("tasks", [trial("another")])
    studies = {study.task: len(study.kept) for study in with_memory(alone, subject, plans).studies}
    assert studies == {"another": 0, MLP: 2}, "a model that is none of them is beside them"
