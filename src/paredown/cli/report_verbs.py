"""`paredown report` writes trials and picks as one HTML page; `paredown serve` shows the same page live."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paredown.cli.application import SHOW, JsonOption, SweepOption, app, option, verb
from paredown.cli.output import BASELINE, emit, say, spinner, tell

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paredown.cli.subject import Subject
    from paredown.plan.plan import Plan
    from paredown.study.report.record import Record

SourceArgument = Annotated[
    str, typer.Argument(help="A store, the output of pick --record or train --out, or a record.", show_default=False)
]


@verb(app, "report", "paredown report trials.db -o report.html", "paredown report picked.json --model digits#steps=100", panel=SHOW)
def report(
    source: SourceArgument,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The page to write.")] = Path("report.html"),
    model: Annotated[str | None, option("Also show the memory of a step of this model.")] = None,
    title: Annotated[str, typer.Option(help="Title of the page.")] = "",
    sweep: SweepOption = None,
    is_json: JsonOption = False,
) -> None:
    """Write one self-contained HTML file: a chart of memory and error with a budget slider, memory over a step and by role, curves."""
    from paredown.cli.inputs import read_source
    from paredown.study.report.page import write

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

    plans = {name: read_plan(name) for name in (BASELINE, "activations8", "activations4", "lpmm")}
    return with_memory(record, find_subject(model, SubjectOptions()), plans)


def with_memory(record: Record, subject: Subject, plans: Mapping[str, Plan]) -> Record:
    """Return `record`, a report's content, with the predicted memory of the step `subject` under `plans`."""
    from dataclasses import replace

    from paredown.study.report.studies import Study
    from paredown.study.tasks.task_trace import formats_state

    if subject.name not in (study.task for study in record.studies):
        record = replace(record, studies=(*record.studies, Study(subject.name)))
    for is_formatted in (False, True):  # plans that format optimizer state have their own trace
        some = {label: plan for label, plan in plans.items() if formats_state(plan) == is_formatted}
        if some:
            record = record.with_footprints(subject.trace(next(iter(some.values()))), some, task=subject.name)
    return record


@verb(app, "serve", "paredown serve trials.db", "paredown serve picked.json --port 8000", panel=SHOW)
def serve(
    source: SourceArgument,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 for a free one.")] = 0,
    sweep: SweepOption = None,
    is_json: JsonOption = False,
) -> None:
    """Serve the report page of a store live, on loopback and read-only, until Ctrl-C."""
    from paredown.study.report.server import serve as run

    def announce(message: str) -> None:
        if is_json:
            emit({"event": "serving", "url": message.split(" ")[0]} if message.startswith("http") else {"event": message})
        else:
            say(message)

    run(_source(source, sweep), port=port, say=announce)


def _source(source: str, sweep: str | None) -> Any:
    """Return the RecordSource that `serve` shows: a database of trials or a record file is read again when it changes."""
    from paredown.cli.inputs import read_json_file, read_source
    from paredown.study.report.server import RecordSource, open_source

    value = read_json_file(Path(source)) if source.lower().endswith(".json") else None
    if value is None or (isinstance(value, dict) and "title" in value and "frontier" not in value):
        return open_source(source, sweep=sweep)
    loaded = read_source(source)
    return RecordSource(lambda: 0, lambda: loaded)
