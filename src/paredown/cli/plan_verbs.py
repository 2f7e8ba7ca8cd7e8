"""`paredown plan` makes a plan within a budget; `paredown explain` prints a plan, and with a model each slot of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paredown.cli.application import (
    CHOOSE,
    LOOK,
    PLAN_FILE,
    BatchOption,
    BudgetOption,
    GpuOption,
    HostBudgetOption,
    JsonOption,
    ModelArgument,
    OverwriteOption,
    PlanFileOption,
    SeedOption,
    SubjectOptions,
    app,
    option,
    step_text,
    verb,
)
from paredown.cli.budget import Budget, needed_budget
from paredown.cli.inputs import check_new
from paredown.cli.output import emit, heading, spinner, table, tell
from paredown.sizes import parse_bytes, say_bytes

if TYPE_CHECKING:
    from paredown.cli.subject import Subject
    from paredown.plan.explanation import PlannedSlot
    from paredown.plan.plan import Plan
    from paredown.plan.trace import Trace

SHOWN_SLOTS = 40


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The arguments of one call of `paredown plan`."""

    model: ModelArgument
    budget: BudgetOption = None
    gpu: GpuOption = None
    out: PlanFileOption = PLAN_FILE
    overwrite: OverwriteOption = False
    method: Annotated[
        str, typer.Option(help="role, fine_tune, sensitivity (one forward and 16 backward passes), size, operator or random.")
    ] = "role"
    recompute: Annotated[
        bool | None,
        option("Use activation checkpointing: also for layers with large errors, or never.", "--recompute/--no-recompute"),
    ] = None
    prefer: Annotated[str | None, option("speed (the least predicted step time, see paredown calibrate) or accuracy.")] = None
    error_allowance: Annotated[
        float | None, option("With --prefer speed: the largest predicted squared gradient error.", metavar="ERROR", min=0.0)
    ] = None
    host_budget: HostBudgetOption = None
    batch: BatchOption = None
    step: SubjectOptions
    seed: SeedOption = 0
    is_json: JsonOption = False

    @property
    def subject_options(self) -> SubjectOptions:
        """The options that change the step."""
        return replace(self.step, batch=self.batch).on_device_of(self.gpu)


@verb(
    app,
    "plan",
    "paredown plan digits#batch=256 --budget 50% -o plan.json",
    "paredown plan gpt2/config.json --device cuda --batch 16 --budget 8GiB",
    panel=CHOOSE,
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
    fit, step = repr(foot.fits(allowed)), step_text(request.model, options)
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
    """Return the gradient errors of each slot, measured by `probe`; raise PlanError for a model on the meta device, which cannot run."""
    from paredown.check.probe import probe
    from paredown.errors import PlanError

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
    model: Annotated[str | None, option("Print every slot of this model.")] = None,
    batch: BatchOption = None,
    *,
    step: SubjectOptions,
    is_json: JsonOption = False,
) -> None:
    """Print the rules of a plan; with --model every slot: quantized, pinned or unmodified, and why."""
    from paredown.cli.subject import read_plan

    parsed, told = read_plan(plan), None
    if model is not None:
        with spinner("tracing one step"):
            from paredown.cli.subject import find_subject

            told = ExplainedStep.of(find_subject(model, replace(step, batch=batch)), parsed)
    words = parsed.explain().splitlines()
    if is_json:
        emit({"words": words, "plan": parsed.to_json(), **({} if told is None else asdict(told))})
    else:
        tell(*words, *(() if told is None else told.lines()))


@dataclass(frozen=True)
class ExplainedStep:
    """The result of `paredown explain --model`: how a plan stores each slot of a step."""

    model: str
    baseline_bytes: int
    peak_bytes: int
    slots: tuple[PlannedSlot, ...]

    @staticmethod
    def of(subject: Subject, plan: Plan) -> ExplainedStep:
        """Return how the plan stores each slot of a step, with the predicted peak under the plan and without it."""
        from paredown.plan.explanation import explain_slots
        from paredown.plan.footprint import footprint

        trace = subject.trace(plan)
        peaks = footprint(subject.trace()).peak_bytes, footprint(trace, plan).peak_bytes
        return ExplainedStep(subject.name, *peaks, tuple(explain_slots(trace, plan)))

    def lines(self) -> list[str]:
        """Return the peaks and a table of the slots, the largest first."""
        rows = sorted(self.slots, key=lambda row: -row.baseline_bytes)
        cells = [
            (row.slot, row.role.value, say_bytes(row.baseline_bytes), say_bytes(row.nbytes), row.format, row.what, row.why)
            for row in rows[:SHOWN_SLOTS]
        ]
        printed = table(("slot", "role", "baseline", "stored", "format", "what", "why"), cells, left=2)
        more = [f"... {len(rows) - SHOWN_SLOTS} smaller slots; --json prints all"] if len(rows) > SHOWN_SLOTS else []
        peaks = f"Peak {say_bytes(self.peak_bytes)} instead of {say_bytes(self.baseline_bytes)}, predicted."
        return ["", heading(f"On {self.model}"), peaks, "", *printed, *more]
