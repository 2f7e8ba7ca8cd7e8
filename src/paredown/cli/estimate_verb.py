"""`paredown estimate` predicts the bytes of a training step by role, module and plan, and the largest batch within a budget.

    EstimateRequest -> PlannedStep (the step and its plans) -> Footprint for each plan -> EstimatedStep -> text, JSON or a page

Nothing is trained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paredown.cli import application as cli
from paredown.cli.budget import Budget, largest_batch, read_budget, shorter
from paredown.cli.estimate_output import Adapters, EstimatedStep, EstimateRow, Grouping, smallest, useful_grouping
from paredown.cli.inputs import check_places
from paredown.cli.output import BASELINE, emit, progress_bar, say, spinner, tell
from paredown.sizes import parse_bytes, say_bytes, say_bytes_twice

if TYPE_CHECKING:
    from paredown.cli.subject import Subject
    from paredown.plan.footprint import Footprint
    from paredown.plan.plan import Plan

AUTO = "auto"
TILES = "tiles of {}"  # name of a plan with tiles alone
BatchOption = Annotated[str | None, cli.option("Batch size, or auto: the largest within --budget.")]
SHOWN = ("baseline", "activations8", "activations4", "activations2", "lpmm")  # plans that are shown by default
SHOWN_FOR_LORA = ("baseline", "activations8", "frozen8", "frozen4", "frozen4+activations8")
SHOWN_BESIDE_FROZEN = ("baseline", "activations8", "activations4")


@dataclass(frozen=True, kw_only=True)
class EstimateRequest:
    """The arguments of one call of `paredown estimate`."""

    model: cli.ModelArgument
    budget: cli.BudgetOption = None
    gpu: cli.GpuOption = None
    plan: Annotated[
        list[str] | None,
        cli.option(
            "A preset, a plan.json, or role=format,... May be repeated.",
            metavar="PLAN",
            autocompletion=cli.starting(cli.plan_names),
        ),
    ] = None
    batch: BatchOption = None
    length: Annotated[int | None, cli.option("Tokens of one example; the same as --input tokens:N.", min=1)] = None
    step: cli.SubjectOptions
    lora: Annotated[int | None, cli.option("LoRA adapters of this rank; all else is frozen.", min=1, metavar="RANK")] = None
    lora_targets: Annotated[
        str | None,
        cli.option(
            "Layers with adapters: q_proj,v_proj or patterns of paths. (default: all linear layers but the output head)",
            metavar="NAMES",
        ),
    ] = None
    checkpointing: Annotated[bool, typer.Option("--checkpointing", help="Activation checkpointing of every layer.")] = False
    tile: Annotated[
        int | None,
        cli.option(
            "MLPs, norms and adapted projections of every layer run over pieces of so many tokens.", min=1, metavar="TOKENS"
        ),
    ] = None
    offload: Annotated[bool, typer.Option("--offload", help="Packed inputs of checkpointed layers are in host memory.")] = False
    host_budget: cli.HostBudgetOption = None
    frozen: Annotated[str | None, cli.option("Store frozen weights in it: nf4/64@bf16, int8/64@bf16.", metavar="FORMAT")] = None
    world_size: Annotated[
        int, typer.Option("--world-size", min=1, help="Processes that train the model together; bytes are those of one.")
    ] = 1
    strategy: Annotated[str | None, cli.option("How they share it: ddp, or fsdp2 (fully_shard).")] = None
    depth: Annotated[
        int | None,
        cli.option(
            "Group modules by this many parts of their paths. (default: until no group has more than half of the bytes; layers joined)",
            min=1,
        ),
    ] = None
    report: cli.ReportOption = None
    is_json: cli.JsonOption = False

    @property
    def names_plans(self) -> bool:
        """Return whether the user has named plans; otherwise a few presets are shown."""
        return self.plan is not None

    def subject_options(self) -> cli.SubjectOptions:
        """Return the options that change the step; raise BadParameter if they contradict each other."""
        if self.step.input is not None and self.length is not None:
            raise typer.BadParameter(
                f"--input {self.step.input} has the length already: leave one of them out.", param_hint="--length"
            )
        if self.host_budget is not None and self.budget is None and self.gpu is None:
            raise typer.BadParameter("it is one of two budgets: add --budget or --gpu.", param_hint="--host-budget")
        size = self._batch_size()
        if self.lora_targets is not None and self.lora is None:
            raise typer.BadParameter("adapters need a rank: add --lora 16.", param_hint="--lora-targets")
        targets = tuple(part.strip() for part in (self.lora_targets or "").split(",") if part.strip())
        step = self.step if self.length is None else replace(self.step, input=f"tokens:{self.length}")
        return replace(step.on_device_of(self.gpu), batch=size, lora=self.lora, lora_targets=targets)

    def _batch_size(self) -> int | None:
        if self.batch is None or self.batch == AUTO:
            if self.batch == AUTO and self.budget is None and self.gpu is None:
                raise typer.BadParameter(
                    "auto needs --budget or --gpu: it searches for the largest batch within the budget.", param_hint="--batch"
                )
            return None
        if not (self.batch.isascii() and self.batch.isdigit() and 0 < int(self.batch[:12]) < 10**9):
            raise typer.BadParameter(
                f"{self.batch!r} is no batch size; write a whole number from 1 up, or auto.", param_hint="--batch"
            )
        return int(self.batch)

    def check_processes(self) -> None:
        """Raise BadParameter if --world-size has no valid --strategy, or if --strategy is given with --report."""
        from paredown.plan.distribution import STRATEGIES

        if self.strategy not in (None, *STRATEGIES) or (self.strategy is None and self.world_size > 1):
            raise typer.BadParameter(f"--world-size needs a strategy: {' or '.join(STRATEGIES)}.", param_hint="--strategy")
        if self.strategy is not None and self.report is not None:
            raise typer.BadParameter("pages are of one process: leave --report or --strategy out.", param_hint="--report")

    def check_subject(self, subject: Subject) -> None:
        """Raise BadParameter if --length or --frozen would change nothing in the training step `subject`."""
        if subject.task is not None and self.length is not None:
            raise typer.BadParameter(
                f"{subject.name} is a task, which has its own batch: --length needs a config.json or a model of text.",
                param_hint="--length",
            )
        if self.frozen is not None and all(parameter.requires_grad for parameter in subject.model.parameters()):
            raise typer.BadParameter(
                "no weight of this model is frozen: add --lora 16, or freeze weights in the function that makes the model.",
                param_hint="--frozen",
            )

    def plans_for(self, subject: Subject) -> dict[str, Plan]:
        """Return the plans to show for the step `subject`, by name, changed by options such as --checkpointing and --tile."""
        from paredown.cli.subject import name_of, read_plan
        from paredown.session.checkpointing import repeated_layers_of

        layers = repeated_layers_of(subject.model) if self.checkpointing or self.tile else ()
        presets = SHOWN_BESIDE_FROZEN if self.frozen else SHOWN if self.lora is None else SHOWN_FOR_LORA
        checkpointed = layers if self.checkpointing else ()
        plans = {name_of(text): read_plan(text).recomputing(*checkpointed) for text in self.plan or presets}
        plans = {name: plan.offloading() if self.offload and name != BASELINE else plan for name, plan in plans.items()}
        if self.tile is not None:
            alone = {TILES.format(self.tile): plan for name, plan in plans.items() if name == BASELINE and self.frozen is None}
            unmodified = {BASELINE: plans.pop(BASELINE)} if alone else {}
            plans = unmodified | {name: plan.tiling(*layers, length=self.tile) for name, plan in (alone | plans).items()}
        if (format := self.frozen) is None:
            return plans
        named = {name: f"frozen={format}" if name == BASELINE else f"{name}, frozen" for name in plans}
        return {named[name]: plan.set("frozen", format) for name, plan in plans.items()}


@cli.verb(
    cli.app,
    "estimate",
    "paredown estimate digits#batch=256 --budget 8MiB",
    "paredown estimate resnet50#width=64,picture=224 --batch auto --budget 8GiB",
    "paredown estimate net.py:make --input 3x32x32 --plan activations4",
    "paredown estimate config.json --lora 16 --checkpointing --budget 24GiB",
    panel=cli.LOOK,
)
def estimate(request: EstimateRequest) -> None:
    """Does it fit? Predicted bytes of a training step by role, module and plan, before anything runs."""
    check_places({"--report": request.report})
    within, options = read_budget(request.budget, request.gpu), request.subject_options()
    request.check_processes()
    with spinner("tracing one step"):
        from paredown.cli.subject import find_subject

        subject = find_subject(request.model, options)
        step = PlannedStep(request, options, subject, request.plans_for(subject))
        request.check_subject(subject)
        feet = {name: step.footprint(name, plan) for name, plan in step.plans.items()}
        if request.offload or request.host_budget is not None:
            _check_offload(feet)
    value = _estimate_of(step, feet, None if within is None else step.allowed(within))
    if request.report is not None:
        _write_report(request.report, step, value)
    if request.is_json:
        emit(value.to_json())
    else:
        tell(*value.lines(within, requested=request.names_plans))
    if within is not None:
        _exit_if_too_large(step, value, within)


@dataclass(frozen=True)
class PlannedStep:
    """Predicts the bytes of the training step of `paredown estimate` under each of `plans`, a mapping from names to plans."""

    request: EstimateRequest
    options: cli.SubjectOptions
    subject: Subject
    plans: Mapping[str, Plan]

    def footprint(self, name: str, plan: Plan, batch_size: int | None = None) -> Footprint:
        """Return the predicted memory of the step under `plan`, called `name`; `batch_size` replaces the step's own."""
        from paredown.plan.footprint import footprint

        trace = self.subject.trace(plan, batch_size)
        trace = trace.unmodified or trace if name == BASELINE else trace
        return footprint(trace, plan, world_size=self.request.world_size, strategy=self.request.strategy)

    def allowed(self, budget: Budget) -> int:
        """Return the bytes of `budget`; percentages are of the baseline's peak, with checkpointing if the plans have it."""
        from paredown.plan.plan import Plan

        plan = Plan(recompute=next(iter(self.plans.values())).checkpointed)
        return parse_bytes(budget.size, whole=self.footprint(BASELINE, plan).peak_bytes)

    def largest_batches(self, allowed: int) -> dict[str, int]:
        """Return for each plan the largest batch whose predicted peak is within `allowed` bytes; 0 if not even one example fits."""
        largest: dict[str, int] = {}

        def needed(name: str, batch_size: int) -> int:
            return self.needed_bytes(self.footprint(name, self.plans[name], batch_size), allowed)

        with progress_bar("the largest batch") as progress:
            for name in self.plans:
                progress(len(largest), len(self.plans), name)
                largest[name] = largest_batch(partial(needed, name), allowed, start=self.subject.batch_size)
        return largest

    def needed_bytes(self, foot: Footprint, allowed: int) -> int:
        """Return a number that is at most `allowed`, the budget in bytes, only if the step's memory `foot` also fits --host-budget.

        It is the larger of the peak and `allowed` times the share of --host-budget that the step takes.
        """
        if self.request.host_budget is None or not foot.host_bytes:
            return foot.peak_bytes
        return max(foot.peak_bytes, -(-allowed * foot.host_bytes // parse_bytes(self.request.host_budget)))

    def peak_of_length(self, name: str, length: int) -> int:
        """Return the predicted peak bytes under the plan `name` if an example has `length` tokens."""
        from paredown.cli.subject import find_subject

        subject = find_subject(self.request.model, replace(self.options, input=f"tokens:{length}"))
        return replace(self, subject=subject).footprint(name, self.plans[name]).peak_bytes


def _check_offload(feet: Mapping[str, Footprint]) -> None:
    """Raise BadParameter, after --offload or --host-budget, if none of the footprints `feet`, by plan, uses host memory."""
    foot = next(iter(feet.values()))
    if any(foot.host_bytes for foot in feet.values()):
        return
    where = "on a CPU all memory is the host's: add --device cuda, or --gpu" if foot.trace.device != "cuda" else ""
    compiled = "compiled sessions offload nothing: leave --compiled out" if foot.trace.is_compiled else ""
    packed = (
        "no plan packs an input of a checkpointed layer: add --checkpointing, and a plan with activations, such as activations8"
    )
    raise typer.BadParameter(f"{where or compiled or packed}.", param_hint="--offload")


# --- the answer ------------------------------------------------------------------------------------------------------


def _estimate_of(step: PlannedStep, feet: Mapping[str, Footprint], allowed: int | None) -> EstimatedStep:
    subject, trace, depth = step.subject, step.subject.trace(), step.request.depth
    grouping = useful_grouping(_module_sizes(next(iter(feet.values())))) if depth is None else Grouping(depth)
    rows = [_row(name, foot, depth or 1, grouping) for name, foot in feet.items()]
    if allowed is not None:
        rows = [replace(row, fits=step.needed_bytes(feet[row.plan], allowed) <= allowed) for row in rows]
    if step.request.batch == AUTO:
        largest = step.largest_batches(allowed or 0)
        rows = [replace(row, largest_batch=largest[row.plan]) for row in rows]
    return EstimatedStep(
        model=subject.name,
        device=trace.device,
        dtype=trace.dtype,
        optimizer=subject.optimizer if isinstance(subject.optimizer, str) else trace.optimizer,
        compiled=trace.is_compiled,
        batch_size=subject.batch_size,
        batch=trace.batch,
        assumed=subject.assumed,
        lora=_adapters(subject),
        checkpointed=next(iter(step.plans.values())).checkpointed,
        tile=step.request.tile,
        budget_bytes=allowed,
        plans=tuple(rows),
        notes=tuple(_notes(feet)),
    )


def _adapters(subject: Subject) -> Adapters | None:
    sizes = [(p.numel(), p.requires_grad) for p in subject.model.parameters()]
    trained, total = sum(n for n, is_trained in sizes if is_trained), sum(n for n, _ in sizes)
    return Adapters(len(subject.adapted), trained, total) if subject.adapted else None


def _row(name: str, foot: Footprint, depth: int, grouping: Grouping) -> EstimateRow:
    """Return `foot`, the predicted memory and time under the plan `name`, as a row of the output; `fits` is not set yet.

    Bytes of modules are summed by `depth` parts of their paths for the whole step, and by `grouping` at the peak.
    """
    from paredown.plan.explanation import unpacked_slots
    from paredown.predict.device_calibration import calibration_for

    is_shared = foot.distribution is not None
    row = EstimateRow(
        plan=name,
        peak_bytes=foot.peak_bytes,
        low_bytes=foot.low_bytes,
        high_bytes=foot.high_bytes,
        by_role={role.value: n for role, n in foot.by_role.items() if n},
        at_peak={role.value: n for role, n in foot.at_peak.items() if n},
        workspace_bytes=foot.workspace_bytes,
        model_bytes=foot.model_bytes if is_shared else None,
        sent_bytes=foot.communication.total if is_shared else None,
        host_bytes=foot.host_bytes if foot.plan.offload else None,
        by_module=foot.by_module(depth),
        at_peak_by_module=grouping.sums(_module_sizes(foot)),
        not_packed=tuple(unpacked_slots(foot.trace, foot.plan)),
    )
    if not is_shared:
        calibration_for(foot.trace)  # times its operations where the device is here
    if isinstance(time := foot.step_time, str):
        return replace(row, step_seconds_reason=time)
    return replace(row, step_seconds=time.seconds, device_seconds=time.device_seconds, host_seconds=time.host_seconds)


def _module_sizes(foot: Footprint) -> dict[str, int]:
    """Return the bytes at the peak of each module; with the libraries' workspace they add up to the peak."""
    sizes: Counter[str] = Counter()
    for (module, _), nbytes in foot.places_at_peak().items():
        sizes[module] += nbytes
    return sizes


def _notes(feet: Mapping[str, Footprint]) -> list[str]:
    """Return the notes of the footprints `feet`, by plan, each once; a note that only some plans have begins with their names."""
    owners: dict[str, list[str]] = {}
    for name, foot in feet.items():
        for note in foot.notes:
            owners.setdefault(note, []).append(name)
    return [note if len(names) == len(feet) else f"{', '.join(names)}: {note}" for note, names in owners.items()]


def _write_report(to: Path, step: PlannedStep, value: EstimatedStep) -> None:
    """Write a report page to the file `to`: the memory of `step` under its plans, with the verdict and the budget of `value`."""
    from paredown.cli.report_verbs import with_memory
    from paredown.study.report.page import write
    from paredown.study.report.record import Record
    from paredown.study.report.studies import Study

    study = Study(value.model, budget_bytes=value.budget_bytes, reason=value.verdict(requested=step.request.names_plans))
    record = Record(f"One training step of {value.model}, predicted", studies=(study,), notes=tuple(value.step_lines()))
    write(with_memory(record, step.subject, step.plans), to)


# --- what does not fit -----------------------------------------------------------------------------------------------

WITH_LENGTH = ("activation", "temporary", "input")  # roles whose bytes grow with the length, nearly all of them


def _exit_if_too_large(step: PlannedStep, value: EstimatedStep, budget: Budget) -> None:
    """Exit with status 3 if no requested plan fits the budget; without requested plans, if the baseline does not fit."""
    if any(row.is_within for row in (value.plans if step.request.names_plans else value.plans[:1])):
        return
    allowed, fitting = value.budget_bytes or 0, [row.plan for row in value.plans if row.is_within]
    if not fitting and (beside := [row for row in value.plans if row.host_bytes and row.peak_bytes <= allowed]):
        needed = say_bytes(beside[0].host_bytes or 0)
        say(f"{beside[0].plan} needs {needed} of host memory, more than --host-budget {step.request.host_budget}: raise it.")
        raise typer.Exit(cli.Exit.DOES_NOT_FIT)
    others = f"These presets do: {', '.join(fitting)}. " if fitting else ""
    request = step.request
    if not (
        request.lora or request.checkpointing or request.frozen or request.strategy
    ):  # steps that `paredown plan` can make plans for
        command = cli.step_text(step.request.model, step.options)
        advice = f"{others}To make a plan that fits: paredown plan {command} {budget.argument}"
    else:
        advice = others or _smallest_that_fits(step, smallest(value.plans), allowed)
    say(f"it does not fit {say_bytes_twice(allowed)}. {advice}".rstrip())
    raise typer.Exit(cli.Exit.DOES_NOT_FIT)


def _smallest_that_fits(step: PlannedStep, least: EstimateRow, allowed: int) -> str:
    """Return advice for a step above `allowed` bytes: the plan `least`, of the smallest peak, and a --length that fits then."""
    advice = f"{least.plan} has the smallest peak, {say_bytes(least.peak_bytes)}: lower --batch or --length, or raise the budget."
    if step.request.length is None:
        return advice
    fixed = least.peak_bytes - sum(least.at_peak.get(role, 0) for role in WITH_LENGTH)
    with spinner("a shorter text"):
        peak = partial(step.peak_of_length, least.plan)
        found = shorter(peak, step.request.length, least.peak_bytes, fixed_bytes=fixed, budget_bytes=allowed)
    return advice if found is None else f"{advice} --length {found[0]} fits with it: {say_bytes(found[1])}."
