"""`paredown demo` trains a small ResNet that does not fit its budget, with the plan that fits and without it; a minute on two cores.

    trace -> peak of the baseline, measured -> budget -> assign -> trainings with and without the plan, steps in turn -> report

Digits are those of the package, and nothing is downloaded. Peaks, errors and times are measured, all on one core.
"""

from __future__ import annotations

import textwrap
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import get_terminal_size
from statistics import fmean, median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paredown.cli.application import SHOW, SIZES, Exit, JsonOption, app, check_size, verb
from paredown.cli.estimate_output import EstimateRow, bars, has_colour
from paredown.cli.output import BASELINE, LiveScreen, emit, heading, live_screen, say, tell
from paredown.sizes import parse_bytes, say_bytes, say_seconds

if TYPE_CHECKING:
    from paredown.cli.subject import Subject
    from paredown.plan.plan import Plan
    from paredown.study.tasks.paired_training import Training
    from paredown.study.tasks.task import Task
    from paredown.study.tasks.trial import Trial

TASK = "digits#batch=128,side=16,lr=0.1,model=resnet18,width=8"
NETWORK = "A small ResNet on handwritten digits"
PLAN = "plan"  # its name in tables
NUM_SEEDS = 3
WIDEST, NAME_WIDTH = 100, 10  # characters of a line, and of the names that rows begin with
PROGRESS, MEMORY = "progress", "memory"  # names of the live bars
OWN_MODEL = (
    'trace = paredown.trace_step(model, batch, loss=loss_fn, optimizer="adamw")',
    'plan = paredown.assign(trace, budget="50%")  # or "8GiB"',
    "session = paredown.apply(plan, model)  # then train as before",
)


@verb(app, "demo", "paredown demo", "paredown demo --budget 45% --seed 3", panel=SHOW)
def demo(
    budget: Annotated[str, typer.Option("--budget", help=SIZES, metavar="SIZE", callback=check_size)] = "50%",
    steps: Annotated[int, typer.Option(min=4, help="Steps of each of the six trainings.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="The first of three seeds.")] = 0,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", help="The folder for plan.json and report.html.")] = Path(
        "demo"
    ),
    is_json: JsonOption = False,
) -> None:
    """Train a small ResNet on digits in half of its memory, and compare with the baseline. About a minute on two cores."""
    begun = time.perf_counter()
    with live_screen("demo", counted=PROGRESS) as screen, ExitStack() as sessions:
        screen.tell([f"{NETWORK}: tracing a training step ..."])
        import torch

        from paredown.cli.subject import find_any_task, of_task

        torch.set_num_threads(1)  # small tensors gain nothing from a second thread, and step times are those of one
        task = find_any_task(f"{TASK},steps={steps}")
        subject = of_task(task, "cpu")
        out.mkdir(parents=True, exist_ok=True)
        fit = _fit(screen, subject, budget, seed)
        pairs = [_trained(screen, task, fit, first, seed, sessions) for first in range(seed, seed + NUM_SEEDS)]
        result = DemoResult.of(fit, pairs)
        files = _written(subject, result, pairs[-1][1].loop.session, out)
    result = replace(result, seconds=time.perf_counter() - begun)
    if is_json:
        emit({**result.to_json(), "files": files})
    elif result.is_done:
        tell(*result.in_words(files))
    if not result.is_done:
        say(" ".join(f"{trial.status.value}: {trial.reason}." for trial in result.trials if trial.error is None))
        raise typer.Exit(Exit.ENDED_BADLY)


@dataclass(frozen=True, eq=False)
class MeasuredFit:
    """Holds the demo's training step, which does not fit its budget, a plan with which it does, and both peaks in bytes."""

    subject: Subject
    full_bytes: int
    budget_bytes: int
    plan: Plan
    plan_bytes: int

    def bars(self) -> list[str]:
        """Return lines with bars of the memory at the peak by role, without the plan and with it."""
        from paredown.plan.plan import Plan

        rows = [self._row(BASELINE, Plan(), self.full_bytes), self._row(PLAN, self.plan, self.plan_bytes)]
        return bars(rows, self.budget_bytes, in_colour=has_colour(), columns=_columns())

    def _row(self, name: str, plan: Plan, nbytes: int) -> EstimateRow:
        """Return the row of `plan`, called `name`, for a bar of `nbytes`: predicted bytes by role, and the rest as workspace."""
        from paredown.plan.footprint import footprint

        foot = footprint(self.subject.trace(plan), plan)
        parts = {role.value: size for role, size in foot.at_peak.items()}
        workspace = foot.workspace_bytes + max(0, nbytes - foot.peak_bytes)
        fits = nbytes <= self.budget_bytes
        return EstimateRow(name, nbytes, foot.low_bytes, foot.high_bytes, fits, at_peak=parts, workspace_bytes=workspace)

    def story(self) -> list[str]:
        """Return the lines of the demo's first screen: what does not fit, bars of the memory, and what the plan does."""
        needs = f"takes {say_bytes(self.full_bytes)}, and the budget is {say_bytes(self.budget_bytes)}"
        first = _wrapped(f"{NETWORK}. A training step {needs}: it does not fit.")
        return [*first, "", *self.bars(), "", *_row("Plan", self.in_words())]

    def in_words(self) -> str:
        """Return a sentence that names the formats in which the plan stores tensors."""
        from paredown.formats.format import Format
        from paredown.plan.explanation import explain_slots

        slots = explain_slots(self.subject.trace(self.plan), self.plan)
        found = Counter((row.role.value, int(Format.parse(row.format).bits_per_value)) for row in slots.that("quantized"))
        texts = [f"{num} {role} tensors in {bits} bits" for (role, bits), num in found.items()]
        parts = [f"stores {' and '.join(texts)}"] if texts else []
        parts += [f"recomputes {num} others from them in backward"] if (num := len(slots.that("recomputed"))) else []
        parts += [f"runs {num} layers twice"] if (num := len(self.plan.recompute)) else []
        return f"{', '.join(parts)}; `assign` chose it for this budget."


def _fit(screen: LiveScreen, subject: Subject, budget: str, seed: int) -> MeasuredFit:
    """Measure the step's peak without a plan, make a plan for `budget`, show both on `screen`, and return them.

    If the measured peak is above its prediction, the difference is added to the prediction under the plan. Weights depend on `seed`.
    """
    from paredown.plan.footprint import peak_of
    from paredown.plan.plan import Plan
    from paredown.study.tasks.paired_training import Training

    assert subject.task is not None
    expected = peak_of(subject.trace(), Plan())
    with ExitStack() as sessions:
        measured = Training.start(subject.task, Plan(), seed=seed, sessions=sessions).peak_bytes or expected
    allowed = parse_bytes(budget, whole=measured)
    if measured <= allowed:
        raise typer.BadParameter(f"the step takes {say_bytes(measured)} and fits {say_bytes(allowed)}.", param_hint="--budget")
    screen.bar(MEMORY, measured, allowed, _of(measured, allowed, BASELINE))
    beyond = max(0, measured - expected)
    plan = subject.plan_within(str(max(0, allowed - beyond)))
    fit = MeasuredFit(subject, measured, allowed, plan, peak_of(subject.trace(plan), plan) + beyond)
    screen.tell(fit.story())
    return fit


def _trained(
    screen: LiveScreen, task: Task, fit: MeasuredFit, seed: int, first: int, sessions: ExitStack
) -> tuple[Training, Training]:
    """Train from `seed` without and with the plan of `fit`, a step of each in turn, and return both finished trainings.

    `screen` shows progress; `first` is the first of the demo's seeds. The plan stays applied until `sessions` closes.
    """
    from paredown.plan.plan import Plan
    from paredown.study.tasks.paired_training import Training

    baseline, packed = (Training.start(task, plan, seed=seed, sessions=sessions) for plan in (Plan(), fit.plan))
    peak, allowed, total = packed.peak_bytes or fit.plan_bytes, fit.budget_bytes, NUM_SEEDS * task.steps
    screen.bar(MEMORY, peak, allowed, _of(peak, allowed, PLAN))
    while packed.num_steps_left > 0:
        losses = baseline.step(), packed.step()
        done = (seed - first + 1) * task.steps - packed.num_steps_left
        screen.bar(PROGRESS, done, total, f"seed {seed}, loss {losses[0]:.2f} and {losses[1]:.2f}")
    return baseline, packed


def _written(subject: Subject, result: DemoResult, session: Any, out: Path) -> dict[str, str]:
    from paredown.cli.report_verbs import with_memory
    from paredown.plan.plan import Plan
    from paredown.study.report.page import write
    from paredown.study.report.record import Record

    plans = {BASELINE: Plan(), PLAN: result.fit.plan}
    record = Record.of_trials("paredown demo: digits in less memory", result.trials, labels=plans).with_session(session)
    judged = replace(record.studies[0], budget_bytes=result.fit.budget_bytes, picked=PLAN, reason=result.fit.plan.reason)
    write(with_memory(replace(record, studies=(judged,)), subject, plans), out / "report.html")
    result.fit.plan.save(out / "plan.json")
    return {name: str(out / file) for name, file in (("plan", "plan.json"), ("page", "report.html"))}


@dataclass(frozen=True, eq=False)
class DemoResult:
    """The result of the demo: trials without and with the plan, and the difference of their errors."""

    fit: MeasuredFit
    baseline: tuple[Trial, ...]
    packed: tuple[Trial, ...]
    difference: float
    standard_error: float
    seconds: float = 0.0

    @staticmethod
    def of(fit: MeasuredFit, pairs: Sequence[tuple[Training, Training]]) -> DemoResult:
        """Evaluate `pairs` of finished trainings, without and with the plan, on the test digits, and return the result."""
        import torch

        from paredown.study.tasks.paired_training import paired_difference

        baseline = [first.trial(first.median_seconds) for first, _ in pairs]
        packed = [second.trial(first.median_seconds) for first, second in pairs]
        wrong = [torch.stack([training.wrong() for training in column]) for column in zip(*pairs, strict=True)]
        peak = max((trial.measured_peak_bytes or fit.plan_bytes) for trial in packed)
        return DemoResult(replace(fit, plan_bytes=peak), tuple(baseline), tuple(packed), *paired_difference(*wrong))

    @property
    def trials(self) -> tuple[Trial, ...]:
        """Return the trials of all trainings, without and with the plan."""
        return *self.baseline, *self.packed

    @property
    def is_done(self) -> bool:
        """Return whether all trainings finished."""
        return all(trial.error is not None for trial in self.trials)

    @property
    def is_noise(self) -> bool:
        """Return whether the mean errors without and with the plan differ by at most two standard errors."""
        return abs(self.difference) <= 2 * self.standard_error

    @property
    def step_seconds(self) -> tuple[float, float]:
        """Return the median CPU seconds of a step, without and with the plan."""
        before, after = (median(trial.step_seconds or 0.0 for trial in trials) for trials in (self.baseline, self.packed))
        return before, after

    def to_json(self) -> dict[str, Any]:
        """Return the result as a dict for `paredown demo --json`."""
        before, after = self.step_seconds
        return {
            "task": self.baseline[0].task,
            "reason": self.fit.plan.reason,
            "budget_bytes": self.fit.budget_bytes,
            "full_bytes": self.fit.full_bytes,
            "peak_bytes": self.fit.plan_bytes,
            "error_difference": self.difference,
            "error_difference_standard_error": self.standard_error,
            "step_ratio": after / before,
            "seconds": self.seconds,
            "baseline": [trial.to_json() for trial in self.baseline],
            "with_plan": [trial.to_json() for trial in self.packed],
        }

    def in_words(self, files: dict[str, str]) -> list[str]:
        """Return the last screen: benefit and cost of the plan in a sentence, bars of memory, accuracy, time, and what to do next."""
        before, after = (1000 * seconds for seconds in self.step_seconds)
        rows = {
            "Plan": self.fit.in_words(),
            "Accuracy": self._accuracy(),
            "Time": f"a step takes {after:.0f} instead of {before:.0f} ms of CPU time, on one core, measured in turns.{_slow()}",
            "Report": f"{files['page']} (open it in a browser), after {say_seconds(self.seconds)}; the plan is {files['plan']}.",
            "Next": "paredown estimate model.py:make --input 3x224x224 --budget 8GiB   # does your model fit?",
        }
        lines = [*map(heading, _wrapped(self.headline())), "", *_wrapped(f"{NETWORK}; the {self._peak} of a training step:")]
        lines += ["", *self.fit.bars(), "", *(line for name, text in rows.items() for line in _row(name, text))]
        return [*lines, "", heading("For your own model, in Python:"), *(f"  {line}" for line in OWN_MODEL)]

    @property
    def _peak(self) -> str:
        """Return "peak" if all peaks were measured, otherwise "predicted peak"."""
        return "peak" if all(trial.measured_peak_bytes for trial in self.trials) else "predicted peak"

    def headline(self) -> str:
        """Return one sentence with peak, error and step time under the plan beside the baseline's."""
        peaks = [f"{nbytes / 2**20:.1f}" for nbytes in (self.fit.plan_bytes, self.fit.full_bytes, self.fit.budget_bytes)]
        above = "" if self.fit.plan_bytes <= self.fit.budget_bytes else "above the "
        errors = " instead of ".join(map(_mean_error, (self.packed, self.baseline)))
        before, after = self.step_seconds
        memory = f"{self._peak.capitalize()} {peaks[0]} instead of {peaks[1]} MiB ({above}budget {peaks[2]})"
        return f"{memory}, error {errors}, each step {after / before:.1f}x as long."

    def _accuracy(self) -> str:
        verdict = "the same within the noise" if self.is_noise else "not the same, by more than noise"
        share = f"{100 * self.difference:+.1f} % +- {100 * self.standard_error:.1f}"
        return f"{verdict}: the errors differ by {share} (+- is a standard error over seeds and test digits; up to two are noise)."


def _mean_error(trials: Sequence[Trial]) -> str:
    from paredown.study.tasks.trial import standard_error

    errors = [100 * (trial.error or 0.0) for trial in trials]
    return f"{fmean(errors):.1f} % +- {standard_error(errors) or 0.0:.1f}"


def _slow() -> str:
    """Return a sentence that advises to install numba, without which quantizing on a CPU is slow; "" if numba is installed."""
    from paredown.codec.cpu import has_numba

    return "" if has_numba() else " Quantizing is slow without numba: pip install 'paredown[cpu]'."


def _of(nbytes: int, allowed: int, what: str) -> str:
    verdict = "fits" if nbytes <= allowed else "does not fit"
    return f"{what}: {nbytes / 2**20:.2f} of {say_bytes(allowed)}, {verdict}"


def _columns() -> int:
    return min(get_terminal_size().columns, WIDEST)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _columns())


def _row(name: str, text: str) -> list[str]:
    return textwrap.wrap(f"{name:<{NAME_WIDTH}}{text}", _columns(), subsequent_indent=" " * NAME_WIDTH)
