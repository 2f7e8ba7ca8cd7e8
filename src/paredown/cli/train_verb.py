"""`paredown train`: train a task under a plan, print error and memory, and save the weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paredown.cli import application as cli
from paredown.cli.budget import Budget, read_budget
from paredown.cli.inputs import check_places, write_json
from paredown.cli.output import BASELINE, emit, heading, progress_bar, say, spinner, table, tell
from paredown.errors import ParedownError
from paredown.serial import replaced_file
from paredown.sizes import parse_bytes

if TYPE_CHECKING:
    from torch import nn

    from paredown.check.verification import Verification
    from paredown.plan.plan import Plan
    from paredown.study.pick.answer import Frontier
    from paredown.study.tasks.task import Task
    from paredown.study.tasks.trial import Trial

MUCH_MORE = 1.15  # measured over predicted peak, above which a note is printed


@dataclass(frozen=True, kw_only=True)
class TrainRequest:
    """The arguments of one call of `paredown train`."""

    task: cli.TaskArgument
    plan: Annotated[
        str | None,
        cli.option("A plan.json, a preset, or role=format,...", metavar="PLAN", autocompletion=cli.starting(cli.plan_names)),
    ] = None
    budget: cli.BudgetOption = None
    gpu: cli.GpuOption = None
    compare: Annotated[bool, typer.Option("--compare", help="Also train the baseline (no plan) from the same seed.")] = False
    verify: Annotated[
        bool, typer.Option("--verify", help="First compare gradients under the plan with those of the unmodified model.")
    ] = False
    seed: cli.SeedOption = 0
    device: cli.HereOption = None
    mode: cli.ModeOption = "store"
    save: Annotated[Path | None, cli.option("Save the weights here: .safetensors or .pt.", metavar="FILE")] = None
    out: Annotated[Path | None, cli.option("Write the result here.", "--out", "-o", metavar="FILE")] = None
    frontier: Annotated[
        Path | None,
        cli.option("The output of pick --record; if memory runs out, a smaller plan is suggested from it.", metavar="FILE"),
    ] = None
    is_json: cli.JsonOption = False

    def checked_budget(self) -> Budget | None:
        """Return the budget, None without one; raise BadParameter if other options contradict it."""
        budget = read_budget(self.budget, self.gpu)
        if self.plan is not None and budget is not None:
            raise typer.BadParameter("give a plan or a budget, not both: a budget makes its own plan.", param_hint="--budget")
        if self.verify and self.mode != "store":
            raise typer.BadParameter(
                "simulate mode also rounds the forward pass, so its gradients differ by design; use --mode store.",
                param_hint="--verify",
            )
        return budget


@cli.verb(
    cli.app,
    "train",
    "paredown train digits#steps=200 --plan plan.json --compare",
    "paredown train tasks.py:mine --budget 6GiB --save weights.safetensors",
    panel=cli.CHOOSE,
)
def train(request: TrainRequest) -> None:
    """Train a task under a plan, or under a plan made for a budget; without either, train the baseline."""
    within = request.checked_budget()
    check_places({"--save": request.save, "--out": request.out})
    check_weights_file(request.save)
    with spinner("reading the task"):
        from paredown.cli.inputs import read_frontier
        from paredown.cli.subject import find_any_task, name_of, of_task, read_plan

        task, frontier = find_any_task(request.task), None if request.frontier is None else read_frontier(request.frontier)[0]
        if within is None:
            name, plan = name_of(request.plan) if request.plan else BASELINE, read_plan(request.plan or BASELINE)
        else:
            with within.in_errors():
                name, plan = f"within {request.budget or request.gpu}", of_task(task, request.device).plan_within(within.size)
    last = TrainingRun(name, plan)
    has_baseline = request.compare and not plan.changes_nothing
    runs = [TrainingRun(BASELINE, replace(plan, rules=(), recompute=(), reason="")), last] if has_baseline else [last]
    verified = _verified(last, task, request) if request.verify else {}
    for run in runs:
        keeps_model = request.save is not None and run is last
        run.train(task, seed=request.seed, device=request.device, mode=request.mode, keeps_model=keeps_model)
    ends: list[str] = []
    if request.save is not None and last.is_done:
        write_weights(last.model, request.save)
        ends.append(f"The weights are in {request.save}.")
    advice = last.advice(task, frontier)
    value = {"task": task.name, "runs": [run.to_json() for run in runs], "advice": advice, **verified}
    if request.out is not None:
        write_json(request.out, value)
    if within:
        from paredown.plan.footprint import footprint
        from paredown.study.tasks.task_trace import trace_task

        whole = footprint(trace_task(task, device=request.device)).peak_bytes
        ends.append(f"The budget is {within.say(parse_bytes(within.size, whole=whole))}.")
    emit(value) if request.is_json else tell(*runs_table(task.name, runs), *ends)
    if not last.is_done:
        say(f"{last.name}: {last.trial.status.value}: {last.trial.reason}." + (f" {advice}" if advice else ""))
        raise typer.Exit(cli.Exit.ENDED_BADLY)


def _verification(task: Task, plan: Plan, request: TrainRequest) -> Verification:
    from paredown.check.verify import verify
    from paredown.study.tasks.evaluate import deterministic, make_setting, seeded

    setting = make_setting(task, plan, seed=request.seed, device=request.device)
    with spinner("verifying gradients"), seeded(setting), deterministic(setting.device):
        model = setting.placed_model().train()
        batch = next(task.data.batches(task.batch, seed=request.seed, device=setting.device))
        return verify(model, batch, plan, loss=task.loss, autocast=task.autocast, seed=request.seed)


def _verified(run: TrainingRun, task: Task, request: TrainRequest) -> dict[str, Any]:
    """Compare the gradients under the plan of `run` with the unmodified model's, and return the comparison for the JSON.

    If they differ too much, the process exits before it trains.
    """
    from paredown.check.verification import TOO_COARSE

    result = _verification(task, run.plan, request)
    field = {"verification": result.to_json()}
    if not request.is_json:
        tell(repr(result))
    if result.verdict == TOO_COARSE:
        say(f"{run.name}: {result.summary}. Plan: {result.meaning}.")
    if result.ok:
        return field
    value = {"task": task.name, "runs": [], "advice": None, **field}
    if request.out is not None:
        write_json(request.out, value)
    if request.is_json:
        emit(value)
    say(f"{run.name}: gradients under the plan are not those of the unmodified model; nothing was trained. See the slots at fault.")
    raise typer.Exit(cli.Exit.ENDED_BADLY)


@dataclass
class TrainingRun:
    """Holds one training of `paredown train`: its plan, and after `train` its result (`trial`) and the model, if kept."""

    name: str
    plan: Plan
    trial: Any = None  # the measured Trial
    model: Any = None  # the trained nn.Module, with unpacked weights

    @property
    def is_done(self) -> bool:
        """Return whether all steps ran."""
        return self.trial.status.value == "done"

    def train(self, task: Task, *, seed: int, device: str | None, mode: str, keeps_model: bool = False) -> None:
        """Train `task` under the plan, with a progress bar; store the result in `trial`, and the model if `keeps_model`."""
        from paredown.study.tasks.evaluate import make_setting, trial_and_model
        from paredown.study.tasks.threads import suited_threads

        setting = make_setting(task, self.plan, seed=seed, device=device, mode=mode)
        with suited_threads(task, setting.device), progress_bar(f"training {self.name}") as report:
            progress = lambda step, steps, loss: report(step, steps, f"loss {loss:.4f}")  # noqa: E731
            self.trial, model = trial_and_model(setting, progress)
        self.model = model if keeps_model else None

    def advice(self, task: Task, frontier: Frontier | None) -> str | None:
        """Return advice if the run was out of memory: the role that grew most, and a smaller plan of `frontier`; otherwise None."""
        if self.trial.status.value != "out_of_memory":
            return None
        from torch import cuda

        from paredown.check.out_of_memory import explain_shortage
        from paredown.cli.subject import of_task

        front = {point.label: point.predicted_bytes for point in frontier.front()} if frontier else None
        available = cuda.mem_get_info()[1] if cuda.is_available() else None
        return explain_shortage(of_task(task).trace(self.plan), self.plan, candidates=front, available_bytes=available)

    def to_json(self) -> dict[str, Any]:
        """Return the result of the training as a dict for JSON, with the run's name."""
        return {"name": self.name, **self.trial.to_json()}


def runs_table(task: str, runs: list[TrainingRun]) -> list[str]:
    """Return lines of text: a heading, a table of the runs, and a note for each run whose peak is far above its prediction."""
    from paredown.sizes import say_bytes

    def cells(trial: Trial) -> tuple[str, ...]:
        errors = ["none" if value is None else f"{value:.4f}" for value in (trial.error, trial.loss)]
        sizes = (trial.measured_peak_bytes, trial.predicted_peak_bytes)
        peaks = ["unknown" if size is None else say_bytes(size) for size in sizes]
        return (trial.status.value, *errors, *peaks, f"{trial.seconds or 0:.1f}")

    rows = [(run.name, *cells(run.trial)) for run in runs]
    names = ("plan", "ended", "error", "loss", "peak, measured", "peak, predicted", "seconds")
    first = runs[0].trial
    return [heading(f"{task}, seed {first.seed}, {first.device}"), *table(names, rows, left=2), *filter(None, map(_excess, runs))]


def _excess(run: TrainingRun) -> str:
    """Return a note if the peak measured on a GPU is far above the predicted one; "" if it is not, or on a CPU."""
    from paredown.sizes import say_bytes

    measured, predicted = run.trial.measured_peak_bytes, run.trial.predicted_peak_bytes
    if measured is None or predicted is None or measured <= MUCH_MORE * predicted or run.trial.device.endswith("CPU"):
        return ""
    more = f"{run.name} took {say_bytes(measured - predicted)} more than predicted: workspace of operators."
    return f"{more} Where these are convolutions, Task(..., channels_last=True) avoids most of it (docs/limits.md)."


def check_weights_file(path: Path | None) -> None:
    """Raise an error, before training starts, if weights cannot be saved to `path`."""
    if path is not None and path.suffix not in (".safetensors", ".pt"):
        raise typer.BadParameter(f"{path} ends in {path.suffix!r}; the name must end in .safetensors or .pt.", param_hint="--save")
    if path is not None and path.suffix == ".safetensors" and find_spec("safetensors") is None:
        raise ParedownError(cli.say_missing("safetensors"))


def write_weights(model: nn.Module, path: Path) -> None:
    """Save the state_dict of a model as ordinary tensors, loadable with weights_only=True; on failure no partial file is left."""
    import torch

    with replaced_file(path, ParedownError) as part:
        if path.suffix == ".pt":
            state = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
            with part.open("wb") as file:
                torch.save(state, file)
            return
        from safetensors import SafetensorError
        from safetensors.torch import save_model

        try:
            save_model(model, str(part))
        except SafetensorError as error:  # of a full disk, too
            raise OSError(None, str(error)) from None
