"""Milliseconds of a step at the peak of plain checkpointing, and checkpointing at the peak of 4 bits; rows in results/assign_times.json.

    python benchmarks/bench_assign.py --timed                     # alone on one GPU, with transformers; all networks
    python benchmarks/bench_assign.py --timed --task gpt2 vit_b16 # some of them
    python benchmarks/bench_assign.py --timed --quick             # small ones on the CPU: whether it runs, no figures

    checkpointing           every layer through torch.utils.checkpoint, as a user writes it; its measured peak is P
    assign                  assign(trace, P): the quickest of its plans with small errors, by its own prediction
    assign, activations     formats of activations alone, and layers where they do not suffice: torch's own optimizer
    assign, formats         assign(trace, P, recompute=False): formats of activations, weights and optimizer state
    assign, 8 bits          assign(trace, P, recompute=True): no more error than 8 bits everywhere; more layers are checkpointed
    assign, speed           assign(trace, P, prefer="speed"): by the calibration of this device (paredown calibrate), if there is one
    int4                    all activations in 4 bits; its measured peak is Q
    checkpointing as int4   as few layers as bring the predicted peak to Q, all of them where they do not

The first plan is for P, or for the predicted peak of checkpointing where that is more; a plan whose measured peak is above P is
replaced by one for as much less. Steps are timed as in bench_session.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from bench_session import WARM_UP, cpu_times, cuda_times, gpt2, texts
from loops import Batch, Job, Log, build, failure, gib, make_optimizer, make_step, pictures, release
from networks import llama
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import paredown as pare
from paredown.assignment.checkpointed_layers import added_seconds, repeated_layers
from paredown.models import MODELS
from paredown.models.resnet import resnet50
from paredown.models.transformer import ViT
from paredown.plan.checkpointed_trace import outermost
from paredown.plan.footprint import peak_of
from paredown.roles import Role

FILE = "assign_times.json"
INT4 = "int4/64@bf16"
LADDER = (None, "int8/64@bf16", INT4, "uint2/64@bf16+bf16")
PARAMETERS = (Role.WEIGHT, Role.GRADIENT, Role.MOMENT1, Role.MOMENT2)
NUM_TRIES = 3  # plans for one peak
SLACK = 1.001  # what the allocator rounds
# fused, as the baseline's: parameters with nothing packed are updated by torch
LEARNS = {
    "sgdm": partial(pare.optim.SGD, lr=0.01, momentum=0.9, fused=True),
    "adamw": partial(pare.optim.AdamW, lr=1e-4, fused=True),
}


@dataclass(frozen=True)
class Row:
    """One variant of one network; ratios of time are to the baseline and to checkpointing."""

    job: str
    way: str
    size: int
    optimizer: str
    num_layers: int = 0  # that are there
    num_again: int = 0  # checkpointed layers
    budget_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    median_seconds: float | None = None
    p20_seconds: float | None = None
    p80_seconds: float | None = None
    host_seconds: float | None = None
    last_loss: float | None = None
    peak_ratio: float | None = None
    time_ratio: float | None = None
    checkpointing_ratio: float | None = None
    foreseen_seconds: float | None = None  # that the plan adds, by assignment/checkpointed_layers.py
    reason: str = ""
    error: str | None = None


# --- networks ---------------------------------------------------------------------------------------------------------


def tokens(size: int, device: str, *, length: int = 1024, vocabulary: int = 256) -> Batch:
    """Random ones, for the models of paredown.models."""
    ids = torch.randint(vocabulary, (size, length), device=device)
    return {"ids": ids, "targets": ids}


def full_jobs() -> dict[str, tuple[Job, str]]:
    """Networks of real size, and the small ones of bench_assign; with each, what its layers are called."""
    last = partial(pictures, channels_last=True)
    tiny = partial(pictures, side=32, num_classes=10)
    tiny_last = partial(tiny, channels_last=True)
    small_vit = partial(MODELS["vit"], dim=384, num_layers=12, num_heads=12)
    resnet18 = partial(MODELS["resnet18"], width=64)
    small_gpt = partial(MODELS["gpt"], vocabulary=256, dim=768, num_layers=12, num_heads=24, context=1024)
    words = partial(texts, vocabulary=32000)
    return {
        "resnet50": (Job("ResNet-50", 256, resnet50, last, "sgdm", channels_last=True), "layer?.*"),
        "llama": (Job("Llama 0.4B", 8, llama, words, "adamw"), "model.layers.*"),
        "vit_b16": (Job("ViT-B/16", 128, ViT, pictures, "adamw"), "layers.*"),
        "gpt2": (Job("GPT-2 124M", 16, gpt2, texts, "adamw"), "transformer.h.*"),
        "resnet18": (Job("small ResNet-18", 4096, resnet18, tiny_last, "sgdm", channels_last=True), "layer?.*"),
        "vit": (Job("small ViT", 2048, small_vit, tiny, "adamw"), "layers.*"),
        "gpt": (Job("small GPT", 64, small_gpt, tokens, "adamw"), "layers.*"),
    }


def quick_jobs() -> dict[str, tuple[Job, str]]:
    """Small ones, to see whether all of it runs."""
    tiny = partial(pictures, side=32, num_classes=10)
    short = partial(tokens, length=64)
    gpt = partial(MODELS["gpt"], vocabulary=256, dim=64, num_layers=4, num_heads=2, context=64)
    return {
        "resnet18": (Job("tiny ResNet-18", 16, partial(MODELS["resnet18"], width=8), tiny, "sgdm"), "layer?.*"),
        "gpt": (Job("tiny GPT", 8, gpt, short, "adamw"), "layers.*"),
    }


# --- plans ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Planner:
    """Plans of one network, from its trace alone."""

    job: Job
    pattern: str
    device: str
    traces: Path | None = None  # folder with traces that were made before

    @staticmethod
    def path(folder: Path, job: Job) -> Path:
        """The file of a trace."""
        return folder / f"{job.name.replace('/', '-')}.json"

    @cached_property
    def trace(self) -> pare.Trace:
        """The baseline."""
        if self.traces is not None and self.path(self.traces, self.job).exists():
            return pare.Trace.load(self.path(self.traces, self.job))
        batch = self.job.batch(self.job.size, "cpu")
        loss = None if isinstance(batch, Mapping) else cross_entropy
        keywords: dict[str, Any] = {"optimizer": self.job.optimizer, "device": self.device, "autocast": torch.bfloat16}
        return pare.trace_step(build(self.job, "meta"), batch, loss=loss, **keywords)

    @cached_property
    def layers(self) -> list[str]:
        """What is repeated, the layer that saves most first."""
        return repeated_layers(self.trace)

    @cached_property
    def checkpointing(self) -> pare.Plan:
        """Every layer checkpointed, nothing packed."""
        return pare.Plan((), recompute=tuple(self.layers))

    def predicted(self, plan: pare.Plan) -> int:
        """Footprint's peak."""
        return peak_of(self.trace, plan)

    def lowers_parameters(self, plan: pare.Plan) -> bool:
        """Whether the optimizer has to be one of paredown.optim."""
        names = [slot.name for slot in self.trace.of(Role.WEIGHT)]
        return any(plan.find((name,), role).format is not None for name in names for role in PARAMETERS)

    def fewest(self, budget_bytes: int) -> pare.Plan:
        """As few checkpointed layers as fit, nothing packed; all of them if none fit."""
        plans = [pare.Plan((), recompute=tuple(self.layers[:num])) for num in range(1, len(self.layers) + 1)]
        return next((plan for plan in plans if self.predicted(plan) <= budget_bytes), plans[-1])


ASSIGNED: dict[str, dict[str, Any]] = {
    "assign": {},
    "assign, activations": {"levels": LADDER},
    "assign, formats": {"recompute": False},
    "assign, 8 bits": {"recompute": True},
    "assign, speed": {"prefer": "speed"},
}


def checkpointed(model: nn.Module, patterns: Sequence[str]) -> None:
    """Layers behind torch.utils.checkpoint."""
    modules = dict(model.named_modules())
    for path in outermost(modules, tuple(patterns)):
        modules[path].forward = partial(checkpoint, modules[path].forward, use_reentrant=False)


# --- measuring --------------------------------------------------------------------------------------------------------


class Training(NamedTuple):
    """A fresh model under a plan, its session or None, its optimizer, and one step of its training."""

    model: nn.Module
    session: pare.Session | None
    optimizer: torch.optim.Optimizer
    step: Callable[[], Tensor]

    def close(self) -> None:
        """Close the session, if there is one."""
        if self.session is not None:
            self.session.close()


def prepared(planner: Planner, plan: pare.Plan | None, by_hand: Sequence[str]) -> Training:
    """A fresh model for a way. `by_hand`: layers behind torch.utils.checkpoint."""
    job, device = planner.job, planner.device
    torch.manual_seed(0)
    model, batch = build(job, device), job.batch(job.size, device)
    if by_hand:
        checkpointed(model, by_hand)
    session = pare.apply(plan, model) if plan is not None else None
    is_ours = plan is not None and planner.lowers_parameters(plan)
    optimizer = LEARNS[job.optimizer](model.parameters()) if is_ours else make_optimizer(job.optimizer, model)
    return Training(model, session, optimizer, make_step(model, batch, optimizer, device))


def optimizer_name(job: Job, optimizer: torch.optim.Optimizer) -> str:
    """The column `optimizer` of a row: whose it is, and its rule."""
    return f"{type(optimizer).__module__.partition('.')[0]} {job.optimizer}"


def measured(planner: Planner, plan: pare.Plan | None, num_steps: int, *, by_hand: Sequence[str] = ()) -> dict[str, Any]:
    """Columns of a row: a fresh model, warm-up, then `num_steps` steps. `by_hand`: layers behind torch.utils.checkpoint."""
    device = planner.device
    release(device)
    training = prepared(planner, plan, by_hand)
    try:
        for _ in range(WARM_UP if device == "cuda" else 1):
            training.step()
        times = (cuda_times if device == "cuda" else cpu_times)(training.step, num_steps)
        return {**times, "optimizer": optimizer_name(planner.job, training.optimizer)}
    finally:
        training.close()


def attempt(row: Row, measure: Callable[[], dict[str, Any]]) -> Row:
    """The row with what was measured, an error being a row too."""
    try:
        return replace(row, **measure())
    except Exception as error:
        return replace(row, error=failure(error))


def assigned(planner: Planner, row: Row, peak_bytes: int, num_steps: int) -> Row:
    """A plan whose measured peak is within `peak_bytes`; otherwise plans for smaller budgets are tried, as long as there are some."""
    budget, found = max(peak_bytes, planner.predicted(planner.checkpointing)), None
    for _ in range(NUM_TRIES):
        try:
            plan = pare.assign(planner.trace, budget, **ASSIGNED[row.way])
        except pare.errors.BudgetError:
            if found is None:
                raise
            break
        planned = {"budget_bytes": budget, "predicted_peak_bytes": planner.predicted(plan), "reason": plan.reason}
        planned |= {"num_again": len(plan.recompute), "foreseen_seconds": added_seconds(planner.trace, plan)}
        found = replace(row, **planned, **measured(planner, plan, num_steps))
        over = (found.peak_bytes or 0) - peak_bytes
        if over <= (SLACK - 1) * peak_bytes:
            break
        budget -= over
    assert found is not None
    return found


def rows_of(planner: Planner, num_steps: int) -> Iterator[Row]:
    """All ways of one network."""
    job, layers = planner.job, planner.layers
    blank = Row(job.name, "full", job.size, job.optimizer, len(layers), predicted_peak_bytes=planner.predicted(pare.Plan()))
    full = attempt(blank, lambda: measured(planner, None, num_steps))
    yield compared(full, full, full)
    every = planner.checkpointing
    row = replace(blank, way="checkpointing", num_again=len(layers), predicted_peak_bytes=planner.predicted(every))
    plain = attempt(row, lambda: measured(planner, None, num_steps, by_hand=[planner.pattern]))
    yield compared(plain, full, plain)
    peak = plain.peak_bytes or planner.predicted(every)
    for way in ASSIGNED:
        row = replace(blank, way=way, predicted_peak_bytes=None)
        yield compared(attempt(row, lambda: vars(assigned(planner, row, peak, num_steps))), full, plain)  # noqa: B023
    plan = pare.Plan.uniform(activation=INT4)
    row = replace(blank, way="int4", predicted_peak_bytes=planner.predicted(plan))
    packed = attempt(row, lambda: measured(planner, plan, num_steps))
    yield compared(packed, full, plain)
    plan = planner.fewest(packed.peak_bytes or planner.predicted(plan))
    row = replace(blank, way="checkpointing as int4", predicted_peak_bytes=planner.predicted(plan), num_again=len(plan.recompute))
    yield compared(attempt(row, lambda: measured(planner, plan, num_steps)), full, plain)


def compared(row: Row, full: Row, plain: Row) -> Row:
    """`row` with its ratios."""
    if row.median_seconds is None or full.median_seconds is None:
        return row
    peak = row.peak_bytes / full.peak_bytes if row.peak_bytes and full.peak_bytes else None
    against = row.median_seconds / plain.median_seconds if plain.median_seconds else None
    return replace(row, peak_ratio=peak, time_ratio=row.median_seconds / full.median_seconds, checkpointing_ratio=against)


def line(row: Row) -> str:
    """One line of the table."""
    head = f"{row.job:16s} {row.way:22s} {row.num_again:2d} of {row.num_layers:2d} layers again"
    if row.error or row.median_seconds is None:
        return f"{head}  {row.error}"
    ms = " ".join(f"{1e3 * (s or 0):7.1f}" for s in (row.median_seconds, row.p20_seconds, row.p80_seconds, row.host_seconds))
    ratios = " ".join("     -" if x is None else f"{x:5.3f}x" for x in (row.peak_ratio, row.time_ratio, row.checkpointing_ratio))
    return f"{head}  {gib(row.peak_bytes)} GiB ({gib(row.predicted_peak_bytes)} predicted)  {ms} ms  {ratios}  {row.optimizer}"


def time_all(options: argparse.Namespace, device: str) -> None:
    """All networks that were asked for."""
    jobs = quick_jobs() if options.quick else full_jobs()
    log = Log(FILE, device, options)
    print("peak GiB; step ms: median, p20, p80, host; ratios of peak and time to full, of time to checkpointing", flush=True)
    for name in options.model or jobs:
        job, pattern = jobs[name]
        for row in rows_of(Planner(job, pattern, device), 2 if options.quick else 15):
            log.add(row)
            print(line(row), flush=True)
