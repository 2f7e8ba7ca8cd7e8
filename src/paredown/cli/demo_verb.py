"""`paredown demo`: the whole pipeline on handwritten digits, a few minutes on two cores of a CPU.

    trace -> footprint -> prior -> a few short trials -> frontier -> pick -> training under the plan and the baseline -> report

Numbers labelled "measured" are measured: errors on test digits, peak memory by torch's profiler. Digits and prior are those of the
package; nothing is downloaded.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paredown.cli.application import BUDGET, SHOW, DefaultBudget, Exit, JsonOption, app, option, verb
from paredown.cli.output import BASELINE, emit, heading, progress_bar, say, spinner, table, tell
from paredown.cli.train_verb import TrainingRun, runs_table

if TYPE_CHECKING:
    from paredown.cli.subject import Subject
    from paredown.plan.trace import Trace
    from paredown.study.pick.answer import Picked
    from paredown.study.tasks.task import Task

TASK = "digits#batch=128,side=16,lr=0.1,model=resnet18,width=8"
WIDEST = 100  # characters of a line
SHOWN_ROLES = ("activation", "weight", "gradient", "moment1", "temporary", "input")


@verb(app, "demo", "paredown demo", "paredown demo --budget 50% --evaluations 3", panel=SHOW)
def demo(
    budget: DefaultBudget = None,
    evaluations: Annotated[int, typer.Option(min=0, help="Number of short trials to choose the plan by.")] = 4,
    steps: Annotated[int, typer.Option(min=4, help="Steps of a short trial; the last two trainings have twice as many.")] = 40,
    prior: Annotated[str | None, option("The prior, by name or file.")] = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FOLDER", help="The folder for plan.json, picked.json and report.html.")
    ] = Path("demo"),
    is_json: JsonOption = False,
) -> None:
    """Train a small ResNet on digits in 40 % of its memory: plan, trials, pick, training, report. A few minutes on two cores."""
    begun, shown, budget = time.perf_counter(), DemoOutput(is_quiet=is_json), budget or BUDGET
    with spinner("starting torch"):
        import torch

        from paredown.cli.subject import find_any_task, of_task

        torch.set_num_threads(1)  # small tensors gain nothing from a second thread, and busy cores slow it down
        task = find_any_task(f"{TASK},steps={steps}")
        subject = of_task(task, "cpu")
    out.mkdir(parents=True, exist_ok=True)
    _footprint(shown, subject.trace(), budget)
    picked = _picked(shown, task, budget, evaluations, prior)
    if picked.plan is None:
        say(picked.reason)
        raise typer.Exit(Exit.DOES_NOT_FIT)
    runs = _trained(shown, task, picked)
    files = _written(subject, picked, runs, out)
    result = DemoResult(picked, runs[0], runs[1], time.perf_counter() - begun)
    if is_json:
        emit({**result.to_json(), "files": files})
    else:
        tell(*result.in_words(files))


@dataclass(frozen=True)
class DemoOutput:
    """Prints the parts of the demo; with `is_quiet`, for --json, it prints nothing."""

    is_quiet: bool

    def tell(self, title: str, lines: Sequence[str]) -> None:
        """Print a title and lines."""
        if not self.is_quiet:
            tell(heading(title), *lines, "")


def _footprint(shown: DemoOutput, trace: Trace, budget: str) -> None:
    """Print the predicted bytes of one step by role."""
    from paredown.plan.footprint import footprint
    from paredown.sizes import parse_bytes, say_bytes

    foot = footprint(trace)
    roles = {role.value: size for role, size in foot.by_role.items()}
    rows = [(role, say_bytes(roles[role]), f"{roles[role] / foot.peak_bytes:.0%}") for role in SHOWN_ROLES if role in roles]
    allowed = parse_bytes(budget, whole=foot.peak_bytes)
    lines = [f"  {line}" for line in table(("stored", "bytes", "of the peak"), rows)]
    last = f"Predicted peak {say_bytes(foot.peak_bytes)}; the budget is {budget} of it, {say_bytes(allowed)}."
    shown.tell("1. One training step of a small ResNet on 128 digits, traced without running it", [*lines, last])


def _picked(shown: DemoOutput, task: Task, budget: str, evaluations: int, prior: str | None) -> Picked:
    """Pick a plan from the prior and a few trials, and print trials and frontier."""
    from paredown.cli.pick_verbs import front
    from paredown.study.pick.pick import pick
    from paredown.study.report.studies import study_of_pick

    with progress_bar("2. short trials") as report:
        picked = pick(task, budget, evaluations, prior=prior, device="cpu", progress=report)
    labels = {point.plan.key: point.label for point in picked.frontier.points}
    trials = [
        (
            labels.get(trial.plan.key, "a plan"),
            f"{trial.error:.4f}" if trial.error is not None else trial.status.value,
            f"{trial.seconds or 0:.1f}",
        )
        for trial in picked.trials
    ]
    lines = [f"  {line}" for line in table(("plan", "error", "seconds"), trials)] if trials else ["  none"]
    fitted = f"Fitted to the prior {picked.prior}: {len(picked.frontier.points)} plans have a predicted error. Trials:"
    shown.tell("2. Plans that fit the budget, and a few short trials", [fitted, *lines])
    study = study_of_pick(picked)
    points = [f"  {line}" for line in front(study)]
    shown.tell(
        "3. The Pareto front: plans that no other plan is expected to beat in both bytes and error",
        [*points, *_wrapped(picked.reason)],
    )
    return picked


def _trained(shown: DemoOutput, task: Task, picked: Picked) -> list[TrainingRun]:
    """Train the baseline and the picked plan from the same seed, and print both."""
    from paredown.plan.plan import Plan

    assert picked.plan is not None
    longer = replace(task, steps=2 * task.steps, name=task.name.replace(f"steps={task.steps}", f"steps={2 * task.steps}"))
    runs = [TrainingRun(BASELINE, Plan()), TrainingRun(picked.label, picked.plan)]
    for run in runs:
        run.train(longer, seed=1, device="cpu", mode="store")
    lines = [f"  {line}" for line in runs_table(longer.name, runs)[1:]]
    shown.tell(f"4. {longer.steps} steps of the baseline and under the picked plan, from the same seed", lines)
    return runs


def _written(subject: Subject, picked: Picked, runs: Sequence[TrainingRun], out: Path) -> dict[str, str]:
    """Write the plan, the pick and the report; paths of the files by name."""
    from paredown.cli.inputs import answer_json, write_json
    from paredown.cli.report_verbs import with_memory
    from paredown.study.report.page import write
    from paredown.study.report.record import Record
    from paredown.study.report.studies import plans_to_show

    assert picked.plan is not None and subject.task is not None
    picked.plan.save(out / "plan.json")
    write_json(out / "picked.json", answer_json(picked))
    with _session(subject.task, picked) as session:
        record = Record.of_pick(picked, title="paredown demo: digits in less memory", session=session)
    record = with_memory(record, subject, plans_to_show(picked))
    labels = {point.label: point.plan for point in picked.frontier.points}
    write(record.with_trials([run.trial for run in runs], labels), out / "report.html")
    return {name: str(out / file) for name, file in (("plan", "plan.json"), ("answer", "picked.json"), ("page", "report.html"))}


@contextmanager
def _session(task: Task, picked: Picked) -> Generator[Any]:
    """A session after one training step, so that its changes are known; None for a plan without rules."""
    import torch

    from paredown.study.tasks.training import Loop, TrainingSetup

    assert picked.plan is not None
    setting = TrainingSetup(task, picked.plan, 0, torch.device("cpu"))
    x, answers = next(task.data.batches(task.batch, seed=0, device=setting.device))
    model = setting.model()
    with setting.session(model) as session:
        loop = Loop(setting, model, session)  # held in a variable: the session asks the live optimizer
        loop.step(x, answers, task.settings.lr)
        yield session if picked.plan.rules else None


@dataclass(frozen=True)
class DemoResult:
    """The pick, both training runs, and the seconds that all of it took."""

    picked: Picked
    baseline: TrainingRun
    packed: TrainingRun
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """The JSON value."""
        budget = {"budget_bytes": self.picked.budget_bytes, "full_bytes": self.picked.full_bytes, "seconds": self.seconds}
        runs = {"baseline": self.baseline.trial.to_json(), "with_plan": self.packed.trial.to_json()}
        return {"task": self.picked.task, "picked": self.picked.label, "reason": self.picked.reason, **budget, **runs}

    def in_words(self, files: dict[str, str]) -> list[str]:
        """Lines with the memory saved, its cost in error and time, and commands for one's own model."""
        lines = [*_wrapped(self._saved()), *_wrapped(self._cost()), ""]
        lines += [
            f"The report: {files['page']} (open it in a browser). The plan: {files['plan']}.",
            "",
            heading("For your own model"),
        ]
        return [*lines, *(f"  {line}".rstrip() for line in ADVICE)]

    def _saved(self) -> str:
        from paredown.sizes import say_bytes

        before, after = self.baseline.trial.measured_peak_bytes, self.packed.trial.measured_peak_bytes
        expected, unmodified = self.packed.trial.predicted_peak_bytes, self.baseline.trial.predicted_peak_bytes
        if not (before and after and expected and unmodified):
            return "Saved: unknown, since the peak could not be measured here."
        return (
            f"Saved: the peak of a step was {say_bytes(after)} instead of {say_bytes(before)}, measured: {1 - after / before:.0%} less, "
            f"{'within' if after <= self.picked.budget_bytes else 'above'} the budget of {say_bytes(self.picked.budget_bytes)}. "
            f"Predicted: {say_bytes(expected)} instead of {say_bytes(unmodified)}."
        )

    def _cost(self) -> str:
        before, after = self.baseline.trial, self.packed.trial
        if before.error is None or after.error is None:
            return f"Cost: {self.packed.name} ended as {after.status.value}, the baseline as {before.status.value}."
        slower = (after.seconds or 0.0) / (before.seconds or 1.0)
        return (
            f"Cost: {after.error:.1%} of the test digits are misclassified instead of {before.error:.1%} (one seed: a point or two "
            f"are chance), and the training took {slower:.1f}x as long on one core of a CPU. The demo took {self.seconds:.0f} s."
        )


ADVICE = (
    "paredown estimate model.py:make --input 3x224x224 --budget 8GiB   does it fit?",
    "paredown plan model.py:make --input 3x224x224 --budget 8GiB       a plan",
    "paredown pick tasks.py:mine --budget 8GiB --report report.html    after trials",
    "",
    "session = paredown.apply(paredown.Plan.load('plan.json'), model)  then train",
)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, min(get_terminal_size().columns, WIDEST))
