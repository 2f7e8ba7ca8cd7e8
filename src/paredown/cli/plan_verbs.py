"""`paredown plan` makes a plan within a budget; `paredown explain` prints a plan, and with a model how each tensor is stored."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paredown.cli import application as cli
from paredown.cli.budget import Budget, needed_budget
from paredown.cli.inputs import check_new
from paredown.cli.output import emit, heading, spinner, table, tell
from paredown.sizes import parse_bytes, say_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paredown.cli.subject import Subject
    from paredown.plan.explanation import PlannedSlot
    from paredown.plan.plan import Plan
    from paredown.plan.trace import Trace

SHOWN_SLOTS = 40


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The arguments of one call of `paredown plan`."""

    model: cli.ModelArgument
    budget: cli.BudgetOption = None
    gpu: cli.GpuOption = None
    out: cli.PlanFileOption = cli.PLAN_FILE
    overwrite: cli.OverwriteOption = False
    method: Annotated[
        str, typer.Option(help="role, fine_tune, sensitivity (one forward and 16 backward passes), size, operator or random.")
    ] = "role"
    recompute: Annotated[
        bool | None,
        cli.option("Use activation checkpointing: also for layers with large errors, or never.", "--recompute/--no-recompute"),
    ] = None
    prefer: Annotated[str | None, cli.option("speed (the least predicted step time, see paredown calibrate) or accuracy.")] = None
    error_allowance: Annotated[
        float | None, cli.option("With --prefer speed: the largest predicted squared gradient error.", metavar="ERROR", min=0.0)
    ] = None
    host_budget: cli.HostBudgetOption = None
    batch: cli.BatchOption = None
    step: cli.SubjectOptions
    seed: cli.SeedOption = 0
    is_json: cli.JsonOption = False

    @property
    def subject_options(self) -> cli.SubjectOptions:
        """Return the options of this request that change the training step, with --batch, and CUDA as the device if --gpu is given."""
        return replace(self.step, batch=self.batch).on_device_of(self.gpu)


@cli.verb(
    cli.app,
    "plan",
    "paredown plan digits#batch=256 --budget 50% -o plan.json",
    "paredown plan gpt2/config.json --device cuda --batch 16 --budget 8GiB",
    panel=cli.CHOOSE,
)
def make_plan(request: PlanRequest) -> None:
    """Make a plan whose predicted peak memory is within a budget, by arithmetic alone."""
    check_new(request.out, may_overwrite=request.overwrite)
    within, options = needed_budget(request.budget, request.gpu), request.subject_options
    with within.in_errors(), spinner("making a plan"):
        from paredown.cli.subject import find_subject
        from paredown.plan.footprint import footprint

        subject = find_subject(request.model, options)
        made = _made(request, subject, within)
        foot, baseline = footprint(subject.trace(made), made), footprint(subject.trace())
        allowed = parse_bytes(within.size, whole=baseline.peak_bytes)
    made.save(request.out)
    if request.is_json:
        sizes = {"peak_bytes": foot.peak_bytes, "high_bytes": foot.high_bytes, "baseline_bytes": baseline.peak_bytes}
        sizes |= {"host_bytes": foot.host_bytes} if made.offload else {}
        value = {"model": subject.name, "budget_bytes": allowed, **sizes, "file": str(request.out)}
        return emit({**value, "plan": made.to_json()})
    fit, step = repr(foot.fits(allowed)), cli.step_text(request.model, options)
    hint = f"The plan is in {request.out}. Slot by slot: paredown explain {request.out} --model {step}"
    tell(made.reason, fit[0].upper() + fit[1:], f"The budget is {within.say(allowed)}.", "", hint)


def _made(request: PlanRequest, subject: Subject, within: Budget) -> Plan:
    return subject.plan_within(
        within.size,
        method=request.method,
        sensitivities=_probed(subject, subject.trace()) if request.method == "sensitivity" else None,
        seed=request.seed,
        recompute=request.recompute,
        prefer=request.prefer,
        error_allowance=request.error_allowance,
        host_budget=request.host_budget,
    )


def _probed(subject: Subject, trace: Trace) -> Any:
    """Run the model to measure the gradient error of each slot (tensor) in each format; its weights must have values."""
    from paredown.check.probe import probe
    from paredown.errors import PlanError

    if any(p.is_meta for p in subject.model.parameters()):
        raise PlanError(
            "method sensitivity runs the model, and this one has shapes only: give a task, or a function that returns (model, batch)."
        )
    return probe(subject.model, subject.batch, trace, loss=subject.loss)


@cli.verb(
    cli.app,
    "explain",
    "paredown explain plan.json",
    "paredown explain plan.json --model digits#batch=256",
    "paredown explain lpmm",
    panel=cli.LOOK,
)
def explain(
    plan: Annotated[str, typer.Argument(metavar="PLAN", help="A plan.json, a preset, or role=format,...", show_default=False)],
    model: Annotated[str | None, cli.option("Print every slot of this model.")] = None,
    batch: cli.BatchOption = None,
    *,
    step: cli.SubjectOptions,
    is_json: cli.JsonOption = False,
) -> None:
    """Print the rules of a plan; with --model how every slot (tensor of a step) is stored, and why."""
    from paredown.cli.subject import read_plan

    parsed, on_model, lines = read_plan(plan), dict[str, Any](), list[str]()
    if model is not None:
        with spinner("tracing one step"):
            from paredown.cli.subject import find_subject
            from paredown.plan.explanation import explain_slots
            from paredown.plan.footprint import footprint

            subject = find_subject(model, replace(step, batch=batch))
            trace = subject.trace(parsed)
            slots = explain_slots(trace, parsed)
            baseline, peak = footprint(subject.trace()).peak_bytes, footprint(trace, parsed).peak_bytes
        on_model = {"model": subject.name, "baseline_bytes": baseline, "peak_bytes": peak, "slots": [asdict(row) for row in slots]}
        peaks = f"Peak {say_bytes(peak)} instead of {say_bytes(baseline)}, predicted."
        lines = ["", heading(f"On {subject.name}"), peaks, "", *_slot_lines(slots)]
    words = parsed.explain().splitlines()
    if is_json:
        emit({"words": words, "plan": parsed.to_json(), **on_model})
    else:
        tell(*words, *lines)


def _slot_lines(slots: Sequence[PlannedSlot]) -> list[str]:
    """Return the lines of a table of `slots`, the tensors of the step: the largest, and how many are left out."""
    rows = sorted(slots, key=lambda row: -row.baseline_bytes)
    cells = [
        (row.slot, row.role.value, say_bytes(row.baseline_bytes), say_bytes(row.nbytes), row.format, row.what, row.why)
        for row in rows[:SHOWN_SLOTS]
    ]
    printed = table(("slot", "role", "baseline", "stored", "format", "what", "why"), cells, left=2)
    more = [f"... {len(rows) - SHOWN_SLOTS} smaller slots; --json prints all"] if len(rows) > SHOWN_SLOTS else []
    return [*printed, *more]
