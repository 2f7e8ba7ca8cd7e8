"""`paredown estimate`: predicted bytes of a training step by role, module and plan, and the largest batch within a budget.

Nothing is trained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paredown.cli.application import (
    LOOK,
    AutocastOption,
    BudgetOption,
    CheckpointingOption,
    ChunkedLossOption,
    CompiledOption,
    DeviceOption,
    FrozenOption,
    GpuOption,
    InputOption,
    JsonOption,
    LengthOption,
    LoraOption,
    LoraTargetsOption,
    ModelArgument,
    OffloadOption,
    OptimizerOption,
    PlanOption,
    ReportOption,
    StrategyOption,
    WorldSizeOption,
    app,
    step_text,
    verb,
)
from paredown.cli.budget import Budget, largest_batch, read_budget
from paredown.cli.inputs import check_places
from paredown.cli.output import BASELINE, emit, heading, progress_bar, spinner, table, tell
from paredown.cli.verdict import (
    COMPILED,
    WORKSPACE,
    bars,
    exit_if_too_large,
    has_colour,
    length_that_fits,
    parts_at_peak,
    styled_verdict,
    verdict,
)
from paredown.sizes import parse_bytes, say_bytes

if TYPE_CHECKING:
    from paredown.cli.subject import Subject
    from paredown.plan.footprint import Footprint
    from paredown.plan.module_groups import Grouping
    from paredown.plan.plan import Plan
    from paredown.trace.trace import Trace


AUTO = "auto"
DepthOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Group modules by this many parts of their paths. (default: until no group has more than half of the bytes; layers joined)",
        show_default=False,
    ),
]
SHOWN = ("baseline", "activations8", "activations4", "activations2", "lpmm")  # plans that are shown by default
SHOWN_FOR_LORA = ("baseline", "activations8", "frozen8", "frozen4", "frozen4+activations8")
SHOWN_BESIDE_FROZEN = ("baseline", "activations8", "activations4")
SHOWN_MODULES = 10
SHOWN_NOTES = 5
SHOWN_BARS = 6
SHOWN_SLOTS = 3
LEAST_REASON = 100  # a reason is printed if its bytes are at least this part of the peak


@verb(
    app,
    "estimate",
    "paredown estimate digits#batch=256 --budget 8MiB",
    "paredown estimate resnet50#width=64,picture=224 --batch auto --budget 8GiB",
    "paredown estimate net.py:make --input 3x32x32 --plan activations4",
    "paredown estimate config.json --lora 16 --checkpointing --budget 24GiB",
    panel=LOOK,
)
def estimate(
    model: ModelArgument,
    budget: BudgetOption = None,
    gpu: GpuOption = None,
    plan: PlanOption = None,
    batch: Annotated[str | None, typer.Option(help="Batch size, or auto: the largest within --budget.", show_default=False)] = None,
    input: InputOption = None,
    length: LengthOption = None,
    lora: LoraOption = None,
    lora_targets: LoraTargetsOption = None,
    checkpointing: CheckpointingOption = False,
    offload: OffloadOption = False,
    frozen: FrozenOption = None,
    optimizer: OptimizerOption = None,
    device: DeviceOption = None,
    autocast: AutocastOption = None,
    compiled: CompiledOption = False,
    chunked_loss: ChunkedLossOption = None,
    world_size: WorldSizeOption = 1,
    strategy: StrategyOption = None,
    depth: DepthOption = None,
    report: ReportOption = None,
    is_json: JsonOption = False,
) -> None:
    """Does it fit? Predicted bytes of a training step by role, module and plan, before anything runs."""
    check_places({"--report": report})
    within, device, input = read_budget(budget, gpu), device or ("cuda" if gpu else None), _input(input, length)
    size, targets, shared = _batch(batch, within), _targets(lora, lora_targets), _shared(world_size, strategy, report)
    with spinner("tracing one step"):
        from paredown.cli.subject import SubjectOptions, find_subject

        options = SubjectOptions(size, input, device, autocast, optimizer, compiled, lora, targets, chunked_loss)
        subject = find_subject(model, options)
        plans = _plans(plan or _shown_plans(lora, frozen), frozen, _layers(subject) if checkpointing else (), offload=offload)
        _check_applicable(subject, length, frozen)
        feet = _footprints(subject, plans, shared)
        _check_offload(feet, offload=offload)
    allowed = None if within is None else _allowed(within, subject, feet, shared)
    largest = _largest_batches(subject, plans, allowed or 0, shared) if batch == AUTO else {}
    value = {**_head(subject, plans), "budget_bytes": allowed, "plans": _rows(feet, allowed, largest, depth), "notes": _notes(feet)}
    if report is not None:
        _write_report(report, subject, plans, value, requested=plan is not None)
    _show(value, within, requested=plan is not None, is_json=is_json)
    named = None if lora or checkpointing or frozen or shared else step_text(model, options)  # `paredown plan` has no such flags

    def peak(plan: str, length: int) -> int:
        other = find_subject(model, replace(options, input=_input(None, length)))
        return _footprints(other, {plan: plans[plan]}, shared)[plan].peak_bytes

    exit_if_too_large(value, requested=plan, model=named, budget=within, length=length_that_fits(value, peak, length))


def _shared(world_size: int, strategy: str | None, report: Path | None) -> dict[str, Any]:
    """The arguments of `footprint` for several processes; empty for one."""
    from paredown.plan.distribution import STRATEGIES

    if strategy not in (None, *STRATEGIES) or (strategy is None and world_size > 1):
        raise typer.BadParameter(f"--world-size needs a strategy: {' or '.join(STRATEGIES)}.", param_hint="--strategy")
    if strategy is not None and report is not None:
        raise typer.BadParameter("pages are of one process: leave --report or --strategy out.", param_hint="--report")
    return {"world_size": world_size, "strategy": strategy} if strategy is not None else {}


def _footprints(subject: Subject, plans: Mapping[str, Plan], shared: Mapping[str, Any]) -> dict[str, Footprint]:
    """The footprint of the step under each plan."""
    from paredown.plan.footprint import footprint

    return {name: footprint(_step(subject.trace(plan), name), plan, **shared) for name, plan in plans.items()}


def _step(trace: Trace, name: str) -> Trace:
    """The step of the plan called `name`: the baseline has no session, also where its layers are checkpointed."""
    return trace.unmodified or trace if name == BASELINE else trace


def _shown_plans(lora: int | None, frozen: str | None) -> tuple[str, ...]:
    """The plans that are shown without --plan."""
    return SHOWN_BESIDE_FROZEN if frozen else SHOWN if lora is None else SHOWN_FOR_LORA


def _show(value: dict[str, Any], within: Budget | None, *, requested: bool, is_json: bool) -> None:
    """Print the estimate."""
    if is_json:
        emit(value)
        return
    budget_line = [] if within is None else [f"The budget is {within.say(value['budget_bytes'] or 0)}."]
    tell(*_head_lines(value, requested=requested), *budget_line, "", *_lines(value))


def _input(input: str | None, length: int | None) -> str | None:
    """The value of --input that --length stands for."""
    if input is not None and length is not None:
        raise typer.BadParameter(f"--input {input} has the length already: leave one of them out.", param_hint="--length")
    return input if length is None else f"tokens:{length}"


def _check_applicable(subject: Subject, length: int | None, frozen: str | None) -> None:
    """BadParameter for options that would change nothing."""
    if subject.task is not None and length is not None:
        raise typer.BadParameter(
            f"{subject.name} is a task, which has its own batch: --length needs a config.json or a model of text.",
            param_hint="--length",
        )
    if frozen is not None and all(parameter.requires_grad for parameter in subject.model.parameters()):
        raise typer.BadParameter(
            "no weight of this model is frozen: add --lora 16, or freeze weights in the function that makes the model.",
            param_hint="--frozen",
        )


def _check_offload(feet: Mapping[str, Footprint], *, offload: bool) -> None:
    """BadParameter if no plan has anything in host memory."""
    foot = next(iter(feet.values()))
    if not offload or any(foot.host_bytes for foot in feet.values()):
        return
    where = "on a CPU all memory is the host's: add --device cuda, or --gpu" if foot.trace.device != "cuda" else ""
    compiled = "compiled sessions offload nothing: leave --compiled out" if foot.trace.is_compiled else ""
    packed = (
        "no plan packs an input of a checkpointed layer: add --checkpointing, and a plan with activations, such as activations8"
    )
    raise typer.BadParameter(f"{where or compiled or packed}.", param_hint="--offload")


def _targets(lora: int | None, text: str | None) -> tuple[str, ...]:
    if text is not None and lora is None:
        raise typer.BadParameter("adapters need a rank: add --lora 16.", param_hint="--lora-targets")
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def _plans(texts: Sequence[str], frozen: str | None, layers: tuple[str, ...], *, offload: bool) -> dict[str, Plan]:
    """The plans by name, with a format for frozen weights, with checkpointed layers, and with their packed inputs in host memory."""
    from paredown.cli.subject import name_of, read_plan

    plans = {name_of(text): read_plan(text).recomputing(*layers) for text in texts}
    plans = {name: plan.offloading() if offload and name != BASELINE else plan for name, plan in plans.items()}
    if frozen is None:
        return plans
    return {
        f"frozen={frozen}" if name == BASELINE else f"{name}, frozen": plan.set("frozen", frozen) for name, plan in plans.items()
    }


def _layers(subject: Subject) -> tuple[str, ...]:
    from paredown.session.checkpointing import repeated_layers_of

    return repeated_layers_of(subject.model)


def _largest_batches(subject: Subject, plans: Mapping[str, Plan], allowed: int, shared: Mapping[str, Any]) -> dict[str, int]:
    """The largest batch of each plan."""
    largest: dict[str, int] = {}
    with progress_bar("the largest batch") as progress:
        for number, (name, plan) in enumerate(plans.items()):
            progress(number, len(plans), name)
            largest[name] = _largest(subject, name, plan, allowed, shared)
    return largest


def _rows(
    feet: Mapping[str, Footprint], allowed: int | None, largest: Mapping[str, int], depth: int | None
) -> list[dict[str, Any]]:
    """What is printed of each plan."""
    grouping = _grouping(next(iter(feet.values())), depth)
    return [
        _row(name, foot, allowed, largest.get(name)) | _modules(foot, depth or 1, grouping) | {"not_packed": _not_packed(foot)}
        for name, foot in feet.items()
    ]


def _batch(text: str | None, budget: Budget | None) -> int | None:
    """The requested batch size; None for the model's own, or for auto."""
    if text is None or text == AUTO:
        if text == AUTO and budget is None:
            raise typer.BadParameter(
                "auto needs --budget or --gpu: it searches for the largest batch within the budget.", param_hint="--batch"
            )
        return None
    if not (text.isascii() and text.isdigit() and 0 < int(text[:12]) < 10**9):
        raise typer.BadParameter(f"{text!r} is no batch size; write a whole number from 1 up, or auto.", param_hint="--batch")
    return int(text)


def _head(subject: Subject, plans: Mapping[str, Plan]) -> dict[str, Any]:
    """Model, device, dtype, optimizer and batch of the estimate; adapters and checkpointed layers if there are any."""
    trace = subject.trace()
    rule = subject.optimizer if isinstance(subject.optimizer, str) else trace.optimizer
    step = {
        "model": subject.name,
        "device": trace.device,
        "dtype": trace.dtype,
        "optimizer": rule,
        "compiled": trace.is_compiled,
    }
    head: dict[str, Any] = {**step, "batch_size": subject.batch_size, "batch": list(trace.batch), "assumed": list(subject.assumed)}
    if subject.adapted:
        sizes = [(p.numel(), p.requires_grad) for p in subject.model.parameters()]
        trained, total = sum(n for n, is_trained in sizes if is_trained), sum(n for n, _ in sizes)
        head["lora"] = {"layers": len(subject.adapted), "trained_parameters": trained, "parameters": total}
    checkpointed = next(iter(plans.values())).checkpointed
    return {**head, **({"checkpointed": list(checkpointed)} if checkpointed else {})}


def _write_report(to: Path, subject: Subject, plans: dict[str, Plan], value: dict[str, Any], *, requested: bool) -> None:
    """The page of the memory of these plans, with the verdict, the budget and the step that the terminal shows."""
    from paredown.cli.report_verbs import with_memory
    from paredown.report.page import write
    from paredown.report.record import Record
    from paredown.report.studies import Study

    study = Study(subject.name, budget_bytes=value["budget_bytes"], reason=_verdict(value, requested=requested))
    record = Record(f"One training step of {subject.name}, predicted", studies=(study,), notes=tuple(_step_lines(value)))
    write(with_memory(record, subject, plans), to)


def _allowed(budget: Budget, subject: Subject, feet: Mapping[str, Footprint], shared: Mapping[str, Any]) -> int:
    """The bytes of the budget; a percentage is of the peak of the baseline, with activation checkpointing if the plans have it."""
    from paredown.plan.footprint import footprint
    from paredown.plan.plan import Plan

    plan = Plan(recompute=next(iter(feet.values())).plan.checkpointed)
    return parse_bytes(budget.size, whole=footprint(_step(subject.trace(plan), BASELINE), plan, **shared).peak_bytes)


def _largest(subject: Subject, name: str, plan: Plan, allowed: int, shared: Mapping[str, Any]) -> int:
    """The largest batch size whose predicted peak is within `allowed` bytes; 0 if a batch of one does not fit."""
    from paredown.plan.footprint import footprint

    def peak(num: int) -> int:
        return footprint(_step(subject.trace(plan, num), name), plan, **shared).peak_bytes

    return largest_batch(peak, allowed, start=subject.batch_size)


def _row(name: str, foot: Footprint, allowed: int | None, largest: int | None) -> dict[str, Any]:
    bounds = {"peak_bytes": foot.peak_bytes, "low_bytes": foot.low_bytes, "high_bytes": foot.high_bytes}
    roles = {role.value: n for role, n in foot.by_role.items() if n}
    at_peak = {role.value: n for role, n in foot.at_peak.items() if n}
    fits = None if allowed is None else foot.peak_bytes <= allowed
    parts = {"by_role": roles, "at_peak": at_peak, "workspace_bytes": foot.workspace_bytes, **_step_time(foot)}
    sent = {} if foot.distribution is None else {"model_bytes": foot.model_bytes, "sent_bytes": foot.communication.total}
    host = {"host_bytes": foot.host_bytes} if foot.plan.offload else {}
    return {"plan": name, **bounds, "fits": fits, "largest_batch": largest, **parts, **sent, **host}


def _step_time(foot: Footprint) -> dict[str, Any]:
    """Predicted seconds of the step, of device and host; the reason where they are not predicted."""
    from paredown.plan.calibration import calibration_for

    if foot.distribution is None:
        calibration_for(foot.trace)  # times its operations where the device is here
    time = foot.step_time
    if isinstance(time, str):
        return {"step_seconds": None, "step_seconds_reason": time}
    return {"step_seconds": time.seconds, "device_seconds": time.device_seconds, "host_seconds": time.host_seconds}


def _modules(foot: Footprint, depth: int, grouping: Grouping) -> dict[str, Any]:
    """Stored bytes by module to a depth, and bytes at the peak by group."""
    return {"by_module": foot.by_module(depth), "at_peak_by_module": grouping.sums(_module_sizes(foot))}


def _not_packed(foot: Footprint) -> list[dict[str, Any]]:
    """The slots that the plan has a rule for and cannot pack, by reason."""
    from paredown.plan.explanation import unpacked_slots

    groups = unpacked_slots(foot.trace, foot.plan)
    return [{"role": g.role.value, "why": g.why, "nbytes": g.nbytes, "slots": list(g.slots)} for g in groups]


def _grouping(foot: Footprint, depth: int | None) -> Grouping:
    """Groups of modules: those of a given depth, or those that show where the bytes of the first plan are."""
    from paredown.plan.module_groups import Grouping, useful_grouping

    return useful_grouping(_module_sizes(foot)) if depth is None else Grouping(depth)


def _module_sizes(foot: Footprint) -> dict[str, int]:
    """Bytes at the peak by module; with the workspace of libraries they add up to the peak."""
    sizes: Counter[str] = Counter()
    for (module, _), nbytes in foot.places_at_peak().items():
        sizes[module] += nbytes
    return dict(sizes)


def _notes(feet: dict[str, Footprint]) -> list[str]:
    """Notes of the footprints, each once; one that some plans do not have, with the names of those that do."""
    owners: dict[str, list[str]] = {}
    for name, foot in feet.items():
        for note in foot.notes:
            owners.setdefault(note, []).append(name)
    return [note if len(names) == len(feet) else f"{', '.join(names)}: {note}" for note, names in owners.items()]


def _head_lines(value: dict[str, Any], *, requested: bool) -> list[str]:
    """The verdict, bars of the plan that it judges and of the first that fits, the step, and what is assumed of it."""
    rows: list[dict[str, Any]] = value["plans"]
    allowed = value["budget_bytes"]
    fitting = [row for row in rows if row["fits"]]
    other = fitting[0] if fitting else min(rows, key=lambda row: row["peak_bytes"])
    shown = rows if requested or allowed is None else [rows[0], other] if other is not rows[0] else rows[:1]
    lines = [styled_verdict(_verdict(value, requested=requested)), ""]
    lines += [*bars(shown[:SHOWN_BARS], allowed, in_colour=has_colour()), ""]
    step, *details = _step_lines(value)
    return [*lines, heading(step), *details]


def _verdict(value: dict[str, Any], *, requested: bool) -> str:
    return verdict(value["plans"], value["budget_bytes"], requested=requested, device=_device(value))


def _device(value: dict[str, Any]) -> str:
    return f"{value['device']} {COMPILED}" if value["compiled"] else value["device"]


def _step_lines(value: dict[str, Any]) -> list[str]:
    """The step that is traced: model, device, dtype and optimizer; its batch; what is assumed of it."""
    where = f"{_device(value).replace(' ', ', ')}, {value['dtype']}, {value['optimizer'] or 'no optimizer'}, batch {value['batch_size']}"
    lines = [f"One training step of {value['model']} on {where}, predicted"]
    lines.append(f"Batch: {', '.join(text.partition(': ')[2] for text in value['batch'])}.")
    lines += _adaptation(value)
    return [*lines, *([f"Assumed: {', '.join(value['assumed'])}."] if value["assumed"] else [])]


def _adaptation(value: dict[str, Any]) -> list[str]:
    """A line about LoRA adapters, and one about checkpointed layers."""
    lora, layers = value.get("lora"), value.get("checkpointed")
    lines: list[str] = []
    if lora is not None:
        share = f"{lora['trained_parameters']:,} of {lora['parameters']:,} parameters are trained"
        lines.append(f"LoRA adapters on {lora['layers']} linear layers, in the dtype of the base: {share}.")
    return [*lines, *([f"Activation checkpointing: {len(layers)} layers, {layers[0]} to {layers[-1]}."] if layers else [])]


def _lines(value: dict[str, Any]) -> list[str]:
    """The estimate as tables: bytes at the peak by role and by module, which add up to it, bounds, and notes."""
    rows: list[dict[str, Any]] = value["plans"]
    names = [row["plan"] for row in rows]
    peaks = ("peak", *map(say_bytes, (row["peak_bytes"] for row in rows)))
    lines = table(("at the peak, by role", *names), [*_by([parts_at_peak(row) for row in rows]), peaks])
    lines += ["", *table(("at the peak, by module", *names), [*_by_module(rows), peaks])]
    lines += ["", *table(("whole step", *names), _totals(rows, value["budget_bytes"]))]
    reasons = [*_reasons(rows), *_untimed(rows)]
    return [*lines, *(["", *reasons] if reasons else []), *(f"note: {note}" for note in value["notes"][:SHOWN_NOTES])]


def _untimed(rows: Sequence[dict[str, Any]]) -> list[str]:
    """One line that says why no step time is predicted; none where it is."""
    reasons = [row["step_seconds_reason"] for row in rows if row["step_seconds"] is None]
    return [f"Step time: not predicted, {reasons[0]}"] if reasons else []


def _reasons(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Why tensors that plans have rules for are not packed: a line for each reason of more than a hundredth of the peak."""
    lines: dict[str, list[str]] = {}
    for row in rows:
        for group in row["not_packed"]:
            if LEAST_REASON * group["nbytes"] >= row["peak_bytes"]:
                slots = group["slots"]
                names = ", ".join(slots[:SHOWN_SLOTS]) + (", ..." if len(slots) > SHOWN_SLOTS else "")
                what = f"{group['role']} {say_bytes(group['nbytes'])} in {len(slots)} slot{'s' * (len(slots) > 1)} ({names})"
                lines.setdefault(f"{what}: {group['why']}.", []).append(row["plan"])
    return [f"Not packed under {', '.join(plans)}: {line}" for line, plans in lines.items()]


def _by(parts: Sequence[dict[str, int]]) -> list[tuple[str, ...]]:
    """A table row for each key, in the order of the first plan (modules: the largest first)."""
    keys = list(dict.fromkeys(key for row in parts for key in row))
    return [(key or "(the model itself)", *(say_bytes(row.get(key, 0)) for row in parts)) for key in keys]


def _by_module(rows: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """A table row for each of the largest modules, one for all others, and one for the workspace of libraries."""
    by_module: list[dict[str, int]] = [row["at_peak_by_module"] for row in rows]
    keys = list(dict.fromkeys(key for row in by_module for key in row))[:SHOWN_MODULES]
    largest = [{key: row[key] for key in keys if key in row} for row in by_module]
    num = len({key for row in by_module for key in row}) - len(keys)
    others = [f"{num} other module{'s' * (num != 1)}"] * bool(num)
    rest = [sum(row.values()) - sum(some.values()) for row, some in zip(by_module, largest, strict=True)]
    more = [(name, *map(say_bytes, rest)) for name in others]
    if any(row["workspace_bytes"] for row in rows):
        more.append((WORKSPACE, *(say_bytes(row["workspace_bytes"]) for row in rows)))
    return [*_by(largest), *more]


def _totals(rows: Sequence[dict[str, Any]], allowed: int | None) -> list[tuple[str, ...]]:
    kinds = {"peak": "peak_bytes", "at least": "low_bytes", "at most": "high_bytes"}
    kinds |= {"sent by a process": "sent_bytes"} if "sent_bytes" in rows[0] else {}
    lines = [(name, *(say_bytes(row[key]) for row in rows)) for name, key in kinds.items()]
    lines.append(("activations stored for backward", *(say_bytes(row["by_role"].get("activation", 0)) for row in rows)))
    if any("host_bytes" in row for row in rows):
        lines.append(("inputs in host memory", *(say_bytes(row.get("host_bytes", 0)) for row in rows)))
    if allowed is not None:
        lines.append((f"fits {say_bytes(allowed)}", *("yes" if row["fits"] else "no" for row in rows)))
    if any(row["step_seconds"] is not None for row in rows):
        seconds = [row["step_seconds"] for row in rows]
        lines.append(("step time", *("-" if one is None else f"{1e3 * one:.1f} ms" for one in seconds)))
    if rows[0]["largest_batch"] is not None:
        lines.append(("largest batch", *(str(row["largest_batch"]) for row in rows)))
    return lines
