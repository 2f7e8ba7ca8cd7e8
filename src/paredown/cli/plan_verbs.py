"""`paredown plan` makes a plan within a budget; `paredown explain` prints a plan, and with a model each slot of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from paredown.cli.application import (
    CHOOSE,
    LOOK,
    PLAN_FILE,
    AutocastOption,
    BudgetOption,
    ChunkedLossOption,
    CompiledOption,
    DeviceOption,
    GpuOption,
    InputOption,
    JsonOption,
    ModelArgument,
    OptimizerOption,
    OverwriteOption,
    PlanFileOption,
    SeedOption,
    app,
    step_text,
    verb,
)
from paredown.cli.budget import needed_budget
from paredown.cli.inputs import check_new
from paredown.cli.output import emit, heading, spinner, table, tell

if TYPE_CHECKING:
    from paredown.cli.subject import Subject
    from paredown.plan.plan import Plan
    from paredown.trace.trace import Trace

SHOWN_SLOTS = 40
MethodOption = Annotated[
    str, typer.Option(help="role, fine_tune, sensitivity (one forward and 16 backward passes), size, operator or random.")
]
RecomputeOption = Annotated[
    bool | None,
    typer.Option(
        "--recompute/--no-recompute",
        help="Use activation checkpointing: also for layers with large errors, or never.",
        show_default=False,
    ),
]
PreferOption = Annotated[
    str | None,
    typer.Option(help="speed (the least predicted step time, see paredown calibrate) or accuracy.", show_default=False),
]
AllowanceOption = Annotated[
    float | None,
    typer.Option(
        metavar="ERROR", help="With --prefer speed: the largest predicted squared gradient error.", show_default=False, min=0.0
    ),
]


@verb(
    app,
    "plan",
    "paredown plan digits#batch=256 --budget 50% -o plan.json",
    "paredown plan gpt2/config.json --device cuda --batch 16 --budget 8GiB",
    panel=CHOOSE,
)
def make_plan(
    model: ModelArgument,
    budget: BudgetOption = None,
    gpu: GpuOption = None,
    out: PlanFileOption = PLAN_FILE,
    overwrite: OverwriteOption = False,
    method: MethodOption = "role",
    recompute: RecomputeOption = None,
    prefer: PreferOption = None,
    error_allowance: AllowanceOption = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Batch size.", show_default=False)] = None,
    input: InputOption = None,
    optimizer: OptimizerOption = None,
    device: DeviceOption = None,
    autocast: AutocastOption = None,
    compiled: CompiledOption = False,
    chunked_loss: ChunkedLossOption = None,
    seed: SeedOption = 0,
    is_json: JsonOption = False,
) -> None:
    """A plan whose predicted peak memory is within a budget; by arithmetic on a trace, without training."""
    check_new(out, may_overwrite=overwrite)
    within, device = needed_budget(budget, gpu), device or ("cuda" if gpu else None)
    with within.in_errors(), spinner("making a plan"):
        from paredown.cli.subject import SubjectOptions, find_subject
        from paredown.plan.footprint import footprint

        options = SubjectOptions(batch, input, device, autocast, optimizer, compiled, chunked_loss=chunked_loss)
        subject = find_subject(model, options)
        errors = _probed(subject, subject.trace()) if method == "sensitivity" else None
        wanted = {"recompute": recompute, "prefer": prefer, "error_allowance": error_allowance}
        made = subject.plan_within(within.size, method=method, sensitivities=errors, seed=seed, **wanted)
        foot, baseline = footprint(subject.trace(made), made), footprint(subject.trace())
        allowed = _budget(within.size, baseline.peak_bytes)
    made.save(out)
    if is_json:
        sizes = {"peak_bytes": foot.peak_bytes, "high_bytes": foot.high_bytes, "baseline_bytes": baseline.peak_bytes}
        value = {"model": subject.name, "budget_bytes": allowed, **sizes, "file": str(out)}
        return emit({**value, "plan": made.to_json()})
    fit = repr(foot.fits(allowed))
    hint = f"The plan is in {out}. Slot by slot: paredown explain {out} --model {step_text(model, options)}"
    tell(made.reason, fit[0].upper() + fit[1:], f"The budget is {within.say(allowed)}.", "", hint)


def _budget(text: str, whole: int) -> int:
    from paredown.sizes import parse_bytes

    return parse_bytes(text, whole=whole)


def _probed(subject: Subject, trace: Trace) -> Any:
    """Measured gradient errors of each slot; PlanError for a model on the meta device, which cannot run."""
    from paredown.errors import PlanError
    from paredown.session.probe import probe

    if any(p.is_meta for p in subject.model.parameters()):
        raise PlanError(
            "method sensitivity runs the model, and this one has shapes only: give a task, or a function that returns (model, batch)."
        )
    return probe(subject.model, subject.batch, trace, loss=subject.loss)


@verb(
    app,
    "explain",
    "paredown explain plan.json",
    "paredown explain plan.json --model digits#batch=256",
    "paredown explain lpmm",
    panel=LOOK,
)
def explain(
    plan: Annotated[str, typer.Argument(metavar="PLAN", help="A plan.json, a preset, or role=format,...", show_default=False)],
    model: Annotated[str | None, typer.Option(help="Print every slot of this model.", show_default=False)] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Batch size.", show_default=False)] = None,
    input: InputOption = None,
    optimizer: OptimizerOption = None,
    device: DeviceOption = None,
    autocast: AutocastOption = None,
    compiled: CompiledOption = False,
    chunked_loss: ChunkedLossOption = None,
    is_json: JsonOption = False,
) -> None:
    """Print the rules of a plan; with --model every slot: quantized, pinned or unmodified, and why."""
    from paredown.cli.subject import read_plan

    parsed = read_plan(plan)
    if model is None:
        value: dict[str, Any] = {"words": parsed.explain().splitlines(), "plan": parsed.to_json()}
    else:
        with spinner("tracing one step"):
            from paredown.cli.subject import SubjectOptions, find_subject

            value = _slots(
                find_subject(model, SubjectOptions(batch, input, device, autocast, optimizer, compiled, chunked_loss=chunked_loss)),
                parsed,
            )
    if is_json:
        emit(value)
    else:
        tell(*value["words"], *_slot_lines(value))


def _slots(subject: Subject, plan: Plan) -> dict[str, Any]:
    from paredown.plan.explanation import explain_slots
    from paredown.plan.footprint import footprint

    trace = subject.trace(plan)
    peaks = {"baseline_bytes": footprint(subject.trace()).peak_bytes, "peak_bytes": footprint(trace, plan).peak_bytes}
    slots = [
        {"slot": row.slot, "role": row.role.value, "baseline_bytes": row.baseline_bytes, "nbytes": row.nbytes}
        | {"format": row.format, "what": row.what, "why": row.why}
        for row in explain_slots(trace, plan)
    ]
    return {
        "words": plan.explain().splitlines(),
        "plan": plan.to_json(),
        "model": subject.name,
        **peaks,
        "slots": slots,
    }


def _slot_lines(value: dict[str, Any]) -> list[str]:
    """A table of the slots, the largest first."""
    from paredown.sizes import say_bytes

    if "slots" not in value:
        return []
    rows = sorted(value["slots"], key=lambda row: -row["baseline_bytes"])
    cells = [
        (
            row["slot"],
            row["role"],
            say_bytes(row["baseline_bytes"]),
            say_bytes(row["nbytes"]),
            row["format"],
            row["what"],
            row["why"],
        )
        for row in rows[:SHOWN_SLOTS]
    ]
    more = [f"... {len(rows) - SHOWN_SLOTS} smaller slots; --json prints all"] if len(rows) > SHOWN_SLOTS else []
    peaks = f"Peak {say_bytes(value['peak_bytes'])} instead of {say_bytes(value['baseline_bytes'])}, predicted."
    return [
        "",
        heading(f"On {value['model']}"),
        peaks,
        "",
        *table(("slot", "role", "baseline", "stored", "format", "what", "why"), cells, left=2),
        *more,
    ]
