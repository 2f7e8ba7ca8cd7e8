"""`paredown pick` picks a plan within a budget; `paredown frontier` prints the Pareto front of a pick, a record or a store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paredown.cli.application import (
    BUDGET,
    CHOOSE,
    PLAN_FILE,
    SHOW,
    BudgetOption,
    DefaultBudget,
    Exit,
    GpuOption,
    HereOption,
    JsonOption,
    ModeOption,
    OverwriteOption,
    PlanFileOption,
    ReportOption,
    SeedOption,
    StoreOption,
    TaskArgument,
    app,
    kept_in_store,
    verb,
)
from paredown.cli.budget import Budget, needed_budget, read_budget
from paredown.cli.inputs import check_new, check_places
from paredown.cli.output import emit, heading, progress_bar, say, spinner, table, tell
from paredown.errors import BudgetError
from paredown.sizes import parse_bytes, say_bytes_twice

if TYPE_CHECKING:
    from paredown.pick.answer import Picked
    from paredown.report.record import Record
    from paredown.report.studies import PlanMark, Study
    from paredown.tasks.task import Task

EvaluationsOption = Annotated[int, typer.Option(min=0, help="Trials at most; 0: decide by the prior alone.")]
MaxErrorIncreaseOption = Annotated[
    float | None,
    typer.Option(
        min=0,
        metavar="ERROR",
        help="Pick the smallest plan whose error is at most this much above the baseline's, such as 0.01.",
        show_default=False,
    ),
]
ConfidenceOption = Annotated[float, typer.Option(help="The least probability of that, above 0.5 and below 1.")]
PriorOption = Annotated[
    str | None, typer.Option(help="The prior, by name or file. (default: all installed priors)", show_default=False)
]
RecordOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Also write the whole result, for frontier and report.", show_default=False)
]
AllOption = Annotated[bool, typer.Option("--all", help="All plans, not only the Pareto front.")]


@verb(
    app,
    "pick",
    "paredown pick digits#steps=100 --budget 50% --evaluations 6",
    "paredown pick tasks.py:mine --budget 6GiB --store picks.db --report page.html",
    panel=CHOOSE,
)
def pick(
    task: TaskArgument,
    budget: DefaultBudget = None,
    gpu: GpuOption = None,
    evaluations: EvaluationsOption = 8,
    max_error_increase: MaxErrorIncreaseOption = None,
    confidence: ConfidenceOption = 0.9,
    prior: PriorOption = None,
    store: StoreOption = None,
    mode: ModeOption = "store",
    seed: SeedOption = 0,
    device: HereOption = None,
    out: PlanFileOption = PLAN_FILE,
    overwrite: OverwriteOption = False,
    record: RecordOption = None,
    report: ReportOption = None,
    is_json: JsonOption = False,
) -> None:
    """Pick the plan of least expected error within a budget, from a prior and a few trials; with --store it resumes.

    With --max-error-increase, pick the smallest plan whose error is that near to the baseline's; the budget is then 100% unless given.
    """
    within = needed_budget(budget, gpu, default=BUDGET if max_error_increase is None else "100%")
    check_new(out, may_overwrite=overwrite)
    check_places({"--out": out, "--record": record, "--report": report})
    size = None if budget is None and gpu is None else within.size
    options: dict[str, Any] = {"prior": prior, "store": store, "mode": mode, "seed": seed, "device": device}
    options |= {"max_error_increase": max_error_increase, "confidence": confidence}
    named_task, picked = _picked(task, size, evaluations, options)
    written = write_outputs(picked, named_task, device, plan=out, record=record, report=report)
    if is_json:
        from paredown.cli.inputs import answer_json

        emit({**answer_json(picked), "files": written})
    else:
        size = f"The budget is {within.say(picked.budget_bytes)}."
        tell(*in_words(picked), size, *(f"The {what} is in {file}." for what, file in written.items()))
    _exit_if_nothing_fits(picked, within)


def _picked(name: str, size: int | str | None, evaluations: int, options: dict[str, Any]) -> tuple[Task, Picked]:
    """The task of that name, and the plan picked for it; `options`: the others of `paredown.pick`."""
    with spinner("reading the task"):
        from paredown.cli.subject import find_any_task
        from paredown.pick.pick import pick as pick_plan
        from paredown.tasks.evaluate import find_device
        from paredown.tasks.threads import suited_threads

        task, place = find_any_task(name), find_device(options["device"])
    with kept_in_store(options["store"] is not None), suited_threads(task, place), progress_bar("picking") as progress:
        return task, pick_plan(task, size, evaluations, progress=progress, **options)


def _exit_if_nothing_fits(picked: Picked, within: Budget) -> None:
    if picked.plan is None:
        say(f"no plan fits {within.argument}, {say_bytes_twice(picked.budget_bytes)}: {picked.reason}")
        raise typer.Exit(Exit.DOES_NOT_FIT)


def write_outputs(
    picked: Picked, task: Task, device: str | None, *, plan: Path | None, record: Path | None, report: Path | None
) -> dict[str, str]:
    """Write the requested files; their paths by kind."""
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
    """The record of a pick, with the memory of its step if the step can be traced."""
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
    """The picked plan and its reason, the Pareto front as a table, and notes."""
    from paredown.report.studies import study_of_pick

    study = study_of_pick(picked)
    lines = [] if picked.plan is None else [heading(f"{picked.label} for {picked.task}"), picked.reason, ""]
    return [*lines, *front(study, is_all=False), "", *(f"note: {note}" for note in study.notes)]


def front(study: Study, *, is_all: bool) -> list[str]:
    """A table of plans by rising bytes, predicted and measured; a star marks the picked plan. `is_all`: beyond the Pareto front."""
    shown = [mark for mark in study.marks if is_all or mark.on_front or mark.label == study.picked]
    names = ("  plan", "peak", "of full", study.metric, _width(study), "measured", "peak")
    if not any(mark.step_source for mark in study.marks):
        return table(names, [_cells(mark, study) for mark in shown])
    return table((*names, "step"), [(*_cells(mark, study), _step(mark)) for mark in shown])


def _step(mark: PlanMark) -> str:
    """The step time, in times of the baseline's if that is known, else in milliseconds; a tilde where it was not measured on this task."""
    if not mark.step_source:
        return ""
    time = f"{mark.step_ratio:.2f}x" if mark.step_ratio is not None else f"{1000 * (mark.step_seconds or 0.0):.3g} ms"
    return time if mark.step_source == "measured" else f"~{time}"


STANDARD_ERROR = "standard error"


def _width(study: Study) -> str:
    """The column name of half the width of an interval: standard error, range of seeds (records of 0.1), or 90 % of the posterior."""
    if STANDARD_ERROR in study.band:
        return STANDARD_ERROR
    return "+- seeds" if "seed" in study.band else "+- 90 %" if study.band else "+-"


def _cells(mark: PlanMark, study: Study) -> tuple[str, ...]:
    from paredown.sizes import say_bytes

    star = "* " if mark.label == study.picked else "  "
    share = f"{mark.nbytes / study.full_bytes:.0%}" if study.full_bytes else ""
    half = (
        None if mark.low is None or mark.high is None or mark.error is None else max(mark.high - mark.error, mark.error - mark.low)
    )
    peak = "" if mark.measured_bytes is None else say_bytes(mark.measured_bytes)
    width = "one seed" if STANDARD_ERROR in study.band and mark.num_trials == 1 else _number(half)
    return (
        f"{star}{mark.label.replace('_', ' ')}",
        say_bytes(mark.nbytes),
        share,
        _number(mark.error),
        width,
        _number(mark.measured),
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
    source: Annotated[str, typer.Argument(help="The output of pick --record, a record, or a store.", show_default=False)],
    budget: BudgetOption = None,
    gpu: GpuOption = None,
    task: Annotated[str | None, typer.Option(help="Only this task.", show_default=False)] = None,
    is_all: AllOption = False,
    is_json: JsonOption = False,
) -> None:
    """Print the Pareto front of memory and error; with --budget the plan to use."""
    from paredown.cli.inputs import read_source

    within = read_budget(budget, gpu)
    studies = [study for study in read_source(source).studies if task in (None, study.task)]
    if not studies:
        say(f"{source} has no {'task ' + repr(task) if task else 'finished trials'}.")
        raise typer.Exit(Exit.ERROR)
    taken = {study.task: _taken(study, within) for study in studies} if within is not None else {}
    if is_json:
        emit({"tasks": [_json(study, taken.get(study.task), is_all=is_all) for study in studies]})
    else:
        for study in studies:
            tell(heading(study.task), *front(study, is_all=is_all), *_verdict(study, within, taken), "")
    if taken and not all(taken.values()):
        raise typer.Exit(Exit.DOES_NOT_FIT)


def _taken(study: Study, budget: Budget) -> str:
    """The label of the best plan within a budget; empty if no plan fits."""
    if "%" in budget.size and study.full_bytes is None:
        raise BudgetError(
            f"{study.task}: {budget.size} is relative to the baseline, which is none of its plans: write bytes, such as 8GiB."
        )
    allowed = parse_bytes(budget.size, whole=study.full_bytes)
    return next((pick.label for pick in reversed(study.picks) if pick.nbytes <= allowed), "")


def _verdict(study: Study, budget: Budget | None, taken: dict[str, str]) -> list[str]:
    if budget is None:
        return []
    label, size = taken[study.task], budget.say(parse_bytes(budget.size, whole=study.full_bytes))
    if not study.marks:
        return [f"No plan is known to fit the budget, {size}. No trial has the peak memory of its plan."]
    fit = f"{label} fits" if label else f"No plan fits; the smallest is {study.marks[0].label}"
    return [f"{fit}. The budget is {size}."]


def _json(study: Study, taken: str | None, *, is_all: bool) -> dict[str, Any]:
    from dataclasses import asdict

    marks = [asdict(mark) for mark in study.marks if is_all or mark.on_front]
    return {"task": study.task, "metric": study.metric, "full_bytes": study.full_bytes, "taken": taken, "points": marks}
