"""`paredown pick` and `paredown frontier`: the plan to take within a budget, and what else there is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paredown.cli.application import (
    CHOOSE,
    SHOW,
    BudgetOption,
    Exit,
    HereOption,
    JsonOption,
    ModeOption,
    NeededBudget,
    SeedOption,
    StoreOption,
    TaskArgument,
    app,
    kept_in_store,
    verb,
)
from paredown.cli.inputs import check_places
from paredown.cli.output import emit, heading, progress_bar, say, spinner, table, tell

if TYPE_CHECKING:
    from paredown.pick.answer import Picked
    from paredown.report.record import Record
    from paredown.report.studies import PlanMark, Study
    from paredown.tasks.task import Task

AllOption = Annotated[bool, typer.Option("--all", help="All plans, not only those that no other beats.")]


@verb(
    app,
    "pick",
    "paredown pick digits#steps=100 --budget 50% --evaluations 6",
    "paredown pick tasks.py:mine --budget 6GiB --store picks.db --report page.html",
    panel=CHOOSE,
)
def pick(
    task: TaskArgument,
    budget: NeededBudget = "40%",
    evaluations: Annotated[int, typer.Option(min=0, help="Trials at most; 0: earlier tasks alone answer.")] = 8,
    prior: Annotated[
        str | None, typer.Option(help="Earlier tasks, by name or file.  (default: all that are known)", show_default=False)
    ] = None,
    store: StoreOption = None,
    mode: ModeOption = "store",
    seed: SeedOption = 0,
    device: HereOption = None,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Where the plan is written.")] = Path("plan.json"),
    record: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write all of the answer too, for frontier and report.", show_default=False)
    ] = None,
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page too.", show_default=False)] = None,
    is_json: JsonOption = False,
) -> None:
    """The plan of least expected error within a budget, from earlier tasks and a few trials; with --store it goes on where it stopped."""
    check_places({"--out": out, "--record": record, "--report": report})
    with spinner("reading the task"):
        from paredown.cli.subject import find_any_task
        from paredown.pick.pick import pick as picked_for

        found = find_any_task(task)
    with kept_in_store(store is not None), progress_bar("picking") as told:
        options: dict[str, Any] = {"prior": prior, "store": store, "mode": mode, "seed": seed, "device": device}
        picked = picked_for(found, budget, evaluations, progress=told, **options)
    written = write_outputs(picked, found, device, plan=out, record=record, report=report)
    if is_json:
        from paredown.cli.inputs import answer_json

        emit({**answer_json(picked), "files": written})
    else:
        tell(*in_words(picked), *(f"The {what} is in {file}." for what, file in written.items()))
    if picked.plan is None:
        say(f"nothing fits {budget}: {picked.reason}")
        raise typer.Exit(Exit.DOES_NOT_FIT)


def write_outputs(
    picked: Picked, task: Task, device: str | None, *, plan: Path | None, record: Path | None, report: Path | None
) -> dict[str, str]:
    """Write what was asked for; what is where."""
    from paredown.cli.inputs import answer_json, write_json

    written: dict[str, str] = {}
    if plan is not None and picked.plan is not None:
        picked.plan.save(plan)
        written["plan"] = str(plan)
    if record is not None:
        write_json(record, answer_json(picked))
        written["answer"] = str(record)
    if report is not None:
        from paredown.report.page import write

        write(record_of(picked, task, device), report)
        written["page"] = str(report)
    return written


def record_of(picked: Picked, task: Task, device: str | None = None) -> Record:
    """What a page shows of a pick, the memory of its step included where that can be followed."""
    from paredown.cli.report_verbs import with_memory
    from paredown.cli.subject import of_task
    from paredown.errors import TraceError
    from paredown.report.record import Record
    from paredown.report.studies import plans_to_show

    record = Record.of_pick(picked)
    try:
        return with_memory(record, of_task(task, device), plans_to_show(picked))
    except TraceError:
        return record


def in_words(picked: Picked) -> list[str]:
    """The answer, the frontier as a table, and what else was found."""
    from paredown.report.studies import study_of_pick

    study = study_of_pick(picked)
    lines = [] if picked.plan is None else [heading(f"{picked.label} for {picked.task}"), picked.reason, ""]
    return [*lines, *front(study, is_all=False), "", *(f"note: {note}" for note in study.notes)]


def front(study: Study, *, is_all: bool) -> list[str]:
    """Points as a table, the fewest bytes first: predicted, then what was measured; a star before the one that was picked."""
    shown = [mark for mark in study.marks if is_all or mark.on_front or mark.label == study.picked]
    names = ("  plan", "peak", "of full", study.metric, _width(study), "measured", "peak")
    return table(names, [_cells(mark, study) for mark in shown])


def _width(study: Study) -> str:
    """What the half of a band is called; a reason's is one deviation."""
    from paredown.report.studies import NINE_OF_TEN, SEEDS

    return {NINE_OF_TEN: "+- 9 of 10", SEEDS: "+- seeds"}.get(study.band, "+-")


def _cells(mark: PlanMark, study: Study) -> tuple[str, ...]:
    from paredown.sizes import say_bytes

    star = "* " if mark.label == study.picked else "  "
    share = f"{mark.nbytes / study.full_bytes:.0%}" if study.full_bytes else ""
    half = (
        None if mark.low is None or mark.high is None or mark.error is None else max(mark.high - mark.error, mark.error - mark.low)
    )
    peak = "" if mark.measured_bytes is None else say_bytes(mark.measured_bytes)
    return (
        f"{star}{mark.label.replace('_', ' ')}",
        say_bytes(mark.nbytes),
        share,
        *map(_number, (mark.error, half, mark.measured)),
        peak,
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


@verb(
    app,
    "frontier",
    "paredown frontier picked.json --budget 40%",
    "paredown frontier trials.db --all",
    panel=SHOW,
)
def frontier(
    source: Annotated[str, typer.Argument(help="What pick --record wrote, a record, or a store.", show_default=False)],
    budget: BudgetOption = None,
    task: Annotated[str | None, typer.Option(help="Only this task.", show_default=False)] = None,
    is_all: AllOption = False,
    is_json: JsonOption = False,
) -> None:
    """Plans that no other beats in both bytes and error; with --budget the one to take."""
    from paredown.cli.inputs import read_source

    studies = [study for study in read_source(source).studies if task in (None, study.task)]
    if not studies:
        say(f"{source} has no {'task ' + repr(task) if task else 'finished trials'}.")
        raise typer.Exit(Exit.ERROR)
    taken = {study.task: _taken(study, budget) for study in studies} if budget is not None else {}
    if is_json:
        emit({"tasks": [_json(study, taken.get(study.task), is_all=is_all) for study in studies]})
    else:
        for study in studies:
            tell(heading(study.task), *front(study, is_all=is_all), *_said(study, budget, taken), "")
    if taken and not all(taken.values()):
        raise typer.Exit(Exit.DOES_NOT_FIT)


def _taken(study: Study, budget: str) -> str:
    """The label that a budget takes; empty where nothing fits."""
    from paredown.errors import BudgetError
    from paredown.sizes import parse_bytes

    if "%" in budget and study.full_bytes is None:
        raise BudgetError(
            f"{study.task}: {budget} is a share of the step as written, which is none of its plans: write bytes, such as 8GiB."
        )
    allowed = parse_bytes(budget, whole=study.full_bytes)
    return next((pick.label for pick in reversed(study.picks) if pick.nbytes <= allowed), "")


def _said(study: Study, budget: str | None, taken: dict[str, str]) -> list[str]:
    if budget is None:
        return []
    label = taken[study.task]
    if not study.marks:
        return [f"Nothing is known to fit {budget}: no trial says how many bytes its plan takes."]
    return [f"Within {budget}: {label}." if label else f"Nothing fits {budget}; the smallest is {study.marks[0].label}."]


def _json(study: Study, taken: str | None, *, is_all: bool) -> dict[str, Any]:
    from dataclasses import asdict

    marks = [asdict(mark) for mark in study.marks if is_all or mark.on_front]
    return {"task": study.task, "metric": study.metric, "full_bytes": study.full_bytes, "taken": taken, "points": marks}
