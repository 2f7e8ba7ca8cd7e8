"""`paredown train`: train a task under a plan, tell error and memory, keep the weights."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paredown.cli.application import (
    CHOOSE,
    BudgetOption,
    Exit,
    HereOption,
    JsonOption,
    ModeOption,
    OutOption,
    SeedOption,
    TaskArgument,
    app,
    say_missing,
    verb,
)
from paredown.cli.inputs import check_places, write_json
from paredown.cli.output import emit, heading, progress_bar, say, spinner, table, tell
from paredown.errors import ParedownError

if TYPE_CHECKING:
    from torch import nn

    from paredown.pick.answer import Frontier
    from paredown.plan.plan import Plan
    from paredown.session.verification import Verification
    from paredown.tasks.task import Task
    from paredown.tasks.trial import Trial

AS_WRITTEN = "as written"
MUCH_MORE = 1.15  # measured over predicted
OnePlanOption = Annotated[
    str | None, typer.Option("--plan", metavar="PLAN", help="A plan.json, a preset, or role=format,...", show_default=False)
]
SaveOption = Annotated[Path | None, typer.Option(metavar="FILE", help="Keep the weights: .safetensors or .pt.", show_default=False)]
VerifyOption = Annotated[bool, typer.Option("--verify", help="First compare gradients under the plan with the unmodified model's.")]
FrontierOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="What pick wrote: where to look for the next plan down.", show_default=False)
]


@verb(
    app,
    "train",
    "paredown train digits#steps=200 --plan plan.json --compare",
    "paredown train tasks.py:mine --budget 6GiB --save weights.safetensors",
    panel=CHOOSE,
)
def train(
    task: TaskArgument,
    plan: OnePlanOption = None,
    budget: BudgetOption = None,
    compare: Annotated[bool, typer.Option("--compare", help="Train as written too, from the same seed.")] = False,
    verify: VerifyOption = False,
    seed: SeedOption = 0,
    device: HereOption = None,
    mode: ModeOption = "store",
    save: SaveOption = None,
    out: OutOption = None,
    frontier: FrontierOption = None,
    is_json: JsonOption = False,
) -> None:
    """Train a task under a plan, or under one made for a budget; the step as it is written without either."""
    if plan is not None and budget is not None:
        raise typer.BadParameter("a plan or a budget, not both: with a budget the plan is made.", param_hint="--budget")
    if verify and mode != "store":
        raise typer.BadParameter("simulate mode rounds the forward pass too: its gradients are others.", param_hint="--verify")
    check_places({"--save": save, "--out": out})
    check_weights_file(save)
    with spinner("reading the task"):
        from paredown.cli.subject import AS_WRITTEN as NONE
        from paredown.cli.subject import find_any_task, name_of, read_plan

        found = find_any_task(task)
        known = None if frontier is None else _frontier(frontier)
        chosen = read_plan(plan or NONE) if budget is None else plan_for_budget(found, budget, device)
    name = name_of(plan) if plan else f"within {budget}" if budget else AS_WRITTEN
    runs = [*_beside(chosen, compares=compare), TrainingRun(name, chosen)]
    told_first = {} if not verify else _verified(runs[-1], found, seed=seed, device=device, out=out, is_json=is_json)
    for run in runs:
        run.train(found, seed=seed, device=device, mode=mode)
    last = runs[-1]
    if save is not None and last.is_done:
        write_weights(last.model, save)
    advice = last.advice(found, known)
    value = {"task": found.name, "runs": [run.to_json() for run in runs], "advice": advice, **told_first}
    if out is not None:
        write_json(out, value)
    saved = [f"The weights are in {save}."] if save and last.is_done else []
    emit(value) if is_json else tell(*runs_table(found.name, runs), *saved)
    _end_badly(last, advice)


def verification(task: Task, plan: Plan, *, seed: int, device: str | None) -> Verification:
    """Gradients of the first batch under a plan against those of the unmodified model."""
    from paredown.session.verify import verify
    from paredown.tasks.evaluate import deterministic, make_setting, seeded

    setting = make_setting(task, plan, seed=seed, device=device)
    with spinner("verifying gradients"), seeded(setting), deterministic(setting.device):
        model = setting.placed_model().train()
        batch = next(task.data.batches(task.batch, seed=seed, device=setting.device))
        return verify(model, batch, plan, loss=task.loss, autocast=task.autocast, seed=seed)


def _verified(run: TrainingRun, task: Task, *, seed: int, device: str | None, out: Path | None, is_json: bool) -> dict[str, Any]:
    """The verification before a training, for its JSON value; the end where gradients are off."""
    found = verification(task, run.plan, seed=seed, device=device)
    told = {"verification": found.to_json()}
    if not is_json:
        tell(repr(found))
    if found.ok:
        return told
    value = {"task": task.name, "runs": [], "advice": None, **told}
    if out is not None:
        write_json(out, value)
    if is_json:
        emit(value)
    say(f"{run.name}: gradients under the plan are not those of the unmodified model; nothing was trained. See the slots at fault.")
    raise typer.Exit(Exit.ENDED_BADLY)


def _beside(plan: Plan, *, compares: bool) -> list[TrainingRun]:
    """The step as it is written, where a plan is compared with it and is another."""
    return (
        [TrainingRun(AS_WRITTEN, replace(plan, rules=(), recompute=(), reason=""))] if compares and not plan.changes_nothing else []
    )


def _end_badly(last: TrainingRun, advice: str | None) -> None:
    """The exit status of a run that did not come to its end, and why."""
    if not last.is_done:
        say(f"{last.name}: {last.trial.status.value}: {last.trial.reason}." + (f" {advice}" if advice else ""))
        raise typer.Exit(Exit.ENDED_BADLY)


@dataclass
class TrainingRun:
    """One training: its plan, and what came of it."""

    name: str
    plan: Plan
    _trial: Trial | None = None
    _made: list[nn.Module] = field(default_factory=list["nn.Module"])

    @property
    def trial(self) -> Trial:
        """What was measured."""
        assert self._trial is not None
        return self._trial

    @property
    def model(self) -> nn.Module:
        """The model that was trained, plain again."""
        return self._made[-1]

    @property
    def is_done(self) -> bool:
        """Whether it came to its end."""
        return self.trial.status.value == "done"

    def train(self, task: Task, *, seed: int, device: str | None, mode: str) -> None:
        """Train, with a bar on a terminal."""
        from paredown.tasks.evaluate import evaluate

        def make(number: int) -> nn.Module:
            self._made[:] = [task.make_model(number)]  # only the last one is trained: others are traced
            return self._made[-1]

        with progress_bar(f"training {self.name}") as report:
            told = lambda step, steps, loss: report(step, steps, f"loss {loss:.4f}")  # noqa: E731
            kept = replace(task, make_model=make)
            self._trial = evaluate(kept, self.plan, seed=seed, device=device, mode=mode, progress=told)

    def advice(self, task: Task, frontier: Frontier | None) -> str | None:
        """Which role grew, and the next plan down, where there was no memory."""
        if self.trial.status.value != "out_of_memory":
            return None
        from paredown.cli.subject import of_task
        from paredown.integrations.out_of_memory import explain_shortage

        return str(explain_shortage(of_task(task).trace(self.plan), self.plan, frontier=frontier, available_bytes=_available()))

    def to_json(self) -> dict[str, Any]:
        """The JSON value: the trial and its name."""
        return {"name": self.name, **self.trial.to_json()}


def runs_table(task: str, runs: list[TrainingRun]) -> list[str]:
    """A table of runs, and what the last one saved and cost against the first."""
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
    """A sentence where much more was measured on a GPU than predicted, else nothing; a CPU's operators always have scratch."""
    from paredown.sizes import say_bytes

    measured, predicted = run.trial.measured_peak_bytes, run.trial.predicted_peak_bytes
    if measured is None or predicted is None or measured <= MUCH_MORE * predicted or run.trial.device.endswith("CPU"):
        return ""
    more = f"{run.name} took {say_bytes(measured - predicted)} more than predicted: room that operators take for themselves."
    return f"{more} Where these are convolutions, Task(..., channels_last=True) spares most of it (docs/limits.md)."


def plan_for_budget(task: Task, budget: str, device: str | None) -> Plan:
    """The plan for a budget."""
    from paredown.cli.subject import of_task

    return of_task(task, device).plan_within(budget)


def check_weights_file(path: Path | None) -> None:
    """A sentence before the training rather than after it."""
    if path is not None and path.suffix not in (".safetensors", ".pt"):
        raise typer.BadParameter(f"{path} ends in {path.suffix!r}; it ends in .safetensors or .pt.", param_hint="--save")
    if path is not None and path.suffix == ".safetensors" and find_spec("safetensors") is None:
        raise ParedownError(say_missing("safetensors"))


def write_weights(model: nn.Module, path: Path) -> None:
    """The state of a model as tensors alone, loadable with weights_only."""
    import torch

    state = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    if path.suffix == ".pt":
        torch.save(state, path)
        return
    from safetensors.torch import save_model

    save_model(model, str(path))


def _frontier(path: Path) -> Frontier:
    from paredown.cli.inputs import read_frontier

    return read_frontier(path)[0]


def _available() -> int | None:
    """What the GPU has in all; None without one."""
    import torch

    return torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else None
