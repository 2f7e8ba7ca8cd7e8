"""`paredown pick` picks a plan within a budget, and prints the Pareto front of memory and error."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paredown.cli import application as cli
from paredown.cli.budget import Budget, needed_budget
from paredown.cli.inputs import check_new, check_places
from paredown.cli.output import emit, heading, progress_bar, say, spinner, table, tell
from paredown.sizes import say_bytes, say_bytes_twice

if TYPE_CHECKING:
    from paredown.study.pick.answer import Picked
    from paredown.study.report.record import Record
    from paredown.study.report.studies import PlanMark, Study
    from paredown.study.tasks.task import Task


@dataclass(frozen=True, kw_only=True)
class PickRequest:
    """The arguments of one call of `paredown pick`."""

    task: cli.TaskArgument
    budget: cli.DefaultBudget = None
    gpu: cli.GpuOption = None
    evaluations: Annotated[int, typer.Option(min=0, help="Trials at most; 0: decide by the prior alone.")] = 8
    max_error_increase: Annotated[
        float | None,
        cli.option(
            "Pick the smallest plan whose error is at most this much above the baseline's, such as 0.01.", min=0, metavar="ERROR"
        ),
    ] = None
    confidence: Annotated[float, typer.Option(help="The least probability of that, above 0.5 and below 1.")] = 0.9
    prior: Annotated[str | None, cli.option("The prior, by name or file. (default: all installed priors)")] = None
    store: cli.StoreOption = None
    mode: cli.ModeOption = "store"
    seed: cli.SeedOption = 0
    device: cli.HereOption = None
    out: cli.PlanFileOption = cli.PLAN_FILE
    overwrite: cli.OverwriteOption = False
    record: Annotated[Path | None, cli.option("Also write the whole result, for report and train --frontier.", metavar="FILE")] = (
        None
    )
    report: cli.ReportOption = None
    is_json: cli.JsonOption = False


@cli.verb(
    cli.app,
    "pick",
    "paredown pick digits#steps=100 --budget 50% --evaluations 6",
    "paredown pick tasks.py:mine --budget 6GiB --store picks.db --report page.html",
    panel=cli.CHOOSE,
)
def pick(request: PickRequest) -> None:
    """Pick the plan of least expected error within a budget, from a prior and a few trials; with --store it resumes.

    With --max-error-increase, pick the smallest plan whose error is that near to the baseline's; the budget is then 100% unless given.
    """
    within = needed_budget(request.budget, request.gpu, default=cli.BUDGET if request.max_error_increase is None else "100%")
    check_new(request.out, may_overwrite=request.overwrite)
    check_places({"--out": request.out, "--record": request.record, "--report": request.report})
    task, picked = _picked(request, within)
    written = _write_files(request, task, picked)
    if request.is_json:
        from paredown.cli.inputs import answer_json

        emit({**answer_json(picked), "files": written})
    else:
        size = f"The budget is {within.say(picked.budget_bytes)}."
        tell(*_in_words(picked), size, *(f"The {what} is in {file}." for what, file in written.items()))
    if picked.plan is None:
        say(f"no plan fits {within.argument}, {say_bytes_twice(picked.budget_bytes)}: {picked.reason}")
        raise typer.Exit(cli.Exit.DOES_NOT_FIT)


def _picked(request: PickRequest, within: Budget) -> tuple[Task, Picked]:
    with spinner("reading the task"):
        from paredown.cli.subject import find_any_task
        from paredown.study.pick.pick import pick as pick_plan
        from paredown.study.tasks.evaluate import find_device
        from paredown.study.tasks.threads import suited_threads

        task, place = find_any_task(request.task), find_device(request.device)
    size = None if request.budget is None and request.gpu is None else within.size
    with cli.kept_in_store(request.store is not None), suited_threads(task, place), progress_bar("picking") as progress:
        return task, pick_plan(
            task,
            size,
            request.evaluations,
            prior=request.prior,
            store=request.store,
            mode=request.mode,
            seed=request.seed,
            device=request.device,
            max_error_increase=request.max_error_increase,
            confidence=request.confidence,
            progress=progress,
        )


def _write_files(request: PickRequest, task: Task, picked: Picked) -> dict[str, str]:
    from paredown.cli.inputs import answer_json, write_json

    written: dict[str, str] = {}
    if picked.plan is not None:
        picked.plan.save(request.out)
        written["plan"] = str(request.out)
    if request.record is not None:
        write_json(request.record, answer_json(picked))
        written["answer"] = str(request.record)
    if request.report is not None:
        from paredown.study.report.page import write

        write(record_of(picked, task, request.device), request.report)
        written["page"] = str(request.report)
    return written


def record_of(picked: Picked, task: Task, device: str | None = None) -> Record:
    """Return the content of a report page on a pick, with the predicted memory of the task's step if that can be traced."""
    from paredown.cli.report_verbs import with_memory
    from paredown.cli.subject import of_task
    from paredown.errors import TraceError
    from paredown.study.report.record import Record
    from paredown.study.report.studies import plans_to_show

    record = Record.of_pick(picked)
    try:
        return with_memory(record, of_task(task, device), plans_to_show(picked))
    except TraceError:
        return record


def _in_words(picked: Picked) -> list[str]:
    from paredown.study.report.studies import study_of_pick

    study = study_of_pick(picked)
    lines = [] if picked.plan is None else [heading(f"{picked.label} for {picked.task}"), picked.reason, ""]
    return [*lines, *front(study), "", *(f"note: {note}" for note in study.notes)]


def front(study: Study) -> list[str]:
    """Return a table of the Pareto front in `study`, a report's part on one task; a star marks the picked plan."""
    shown = [mark for mark in study.marks if mark.on_front or mark.label == study.picked]
    names = ("  plan", "peak", "of full", study.metric, "+- 90 %", "measured", "peak")
    if not any(mark.step_source for mark in study.marks):
        return table(names, [_cells(mark, study) for mark in shown])
    return table((*names, "step"), [(*_cells(mark, study), _step(mark)) for mark in shown])


def _step(mark: PlanMark) -> str:
    """Return a plan's step time, as a multiple of the baseline's if known; "~" means not measured here, "" unknown."""
    if not mark.step_source:
        return ""
    time = f"{mark.step_ratio:.2f}x" if mark.step_ratio is not None else f"{1000 * (mark.step_seconds or 0.0):.3g} ms"
    return time if mark.step_source == "measured" else f"~{time}"


def _cells(mark: PlanMark, study: Study) -> tuple[str, ...]:
    star = "* " if mark.label == study.picked else "  "
    bounds = (
        None if mark.low is None or mark.high is None or mark.error is None else (mark.high - mark.error, mark.error - mark.low)
    )
    return (
        f"{star}{mark.label.replace('_', ' ')}",
        say_bytes(mark.nbytes),
        f"{mark.nbytes / study.full_bytes:.0%}" if study.full_bytes else "",
        _number(mark.error),
        _number(bounds and max(bounds)),
        _number(mark.measured),
        "" if mark.measured_bytes is None else say_bytes(mark.measured_bytes),
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
