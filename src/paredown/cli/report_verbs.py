"""`paredown report` and `paredown serve`: one page of what was tried and picked, as a file or live."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paredown.cli.application import SHOW, JsonOption, SweepOption, app, verb
from paredown.cli.output import emit, say, spinner, tell

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paredown.cli.subject import Subject
    from paredown.plan.plan import Plan
    from paredown.report.record import Record

SourceArgument = Annotated[
    str, typer.Argument(help="A store, what pick --record or train --out wrote, or a record.", show_default=False)
]


@verb(app, "report", "paredown report trials.db -o report.html", "paredown report picked.json --model digits#steps=100", panel=SHOW)
def report(
    source: SourceArgument,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The page to write.")] = Path("report.html"),
    model: Annotated[str | None, typer.Option(help="Show where the memory of this one goes, too.", show_default=False)] = None,
    title: Annotated[str, typer.Option(help="Of the page.")] = "",
    sweep: SweepOption = None,
    is_json: JsonOption = False,
) -> None:
    """One HTML file that needs no network: frontier, budget slider, where the memory goes, trials, curves."""
    from paredown.cli.inputs import read_source
    from paredown.report.page import write

    with spinner("reading"):
        record = read_source(source, sweep=sweep, title=title)
        record = record if model is None else _with_memory(record, model)
    write(record, out)
    counts = {"tasks": len(record.studies), "plans": sum(len(s.marks) for s in record.studies), "trials": len(record.runs)}
    if is_json:
        emit({"file": str(out), "bytes": out.stat().st_size, **counts})
    else:
        tasks, plans, trials = (f"{num} {name[:-1] if num == 1 else name}" for name, num in counts.items())
        tell(f"{tasks}, {plans} and {trials} in {out}. Open it in a browser.")


def _with_memory(record: Record, model: str) -> Record:
    from paredown.cli.subject import SubjectOptions, find_subject, read_plan

    presets = ("as_written", "activations8", "activations4", "lpmm")
    plans = {name.replace("_", " "): read_plan(name) for name in presets}
    return with_memory(record, find_subject(model, SubjectOptions()), plans)


def with_memory(record: Record, subject: Subject, plans: Mapping[str, Plan]) -> Record:
    """Where the memory of a step goes under these plans: with the task of that name, or beside the tasks that are there."""
    from dataclasses import replace

    from paredown.report.studies import Study
    from paredown.tasks.task_trace import formats_state

    if subject.name not in (study.task for study in record.studies):
        record = replace(record, studies=(*record.studies, Study(subject.name)))
    for is_formatted in (False, True):  # traces of their own
        some = {label: plan for label, plan in plans.items() if formats_state(plan) == is_formatted}
        if some:
            record = record.with_footprints(subject.trace(next(iter(some.values()))), some, task=subject.name)
    return record


@verb(app, "serve", "paredown serve trials.db", "paredown serve picked.json --port 8000", panel=SHOW)
def serve(
    source: SourceArgument,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free one.")] = 0,
    sweep: SweepOption = None,
    is_json: JsonOption = False,
) -> None:
    """The same page, live over a running sweep; on this machine alone, for reading alone, until Ctrl-C."""
    from paredown.report.server import serve as run

    def told(sentence: str) -> None:
        if is_json:
            emit({"event": "serving", "url": sentence.split(" ")[0]} if sentence.startswith("http") else {"event": sentence})
        else:
            say(sentence)

    run(_source(source, sweep), port=port, say=told)


def _source(source: str, sweep: str | None) -> Any:
    """A store and a record's file are read again as they change; other files are shown as they are."""
    from paredown.cli.inputs import read_json, read_source
    from paredown.report.server import RecordSource, open_source

    value = read_json(Path(source)) if source.lower().endswith(".json") else None
    if value is None or (isinstance(value, dict) and "title" in value and "frontier" not in value):
        return open_source(source, sweep=sweep)
    found = read_source(source)

    class Once(RecordSource):
        """One record, that does not change."""

        record: Record | None = found

        def read(self) -> Record | None:
            """It, the first time."""
            record, self.record = self.record, None
            return record

    return Once()
