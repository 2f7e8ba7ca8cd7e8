"""What plans do to gradients, which is what methods minimise, on batches no plan has seen; rows in results/assign_gradients.json.

    python benchmarks/bench_assign.py --gradients                 # one GPU; --part and --merge as for the trainings
    python benchmarks/bench_assign.py --gradients --quick         # small ones on the CPU

A model is trained for some steps without a plan, probed and planned for. Then the gradients of several batches are taken unmodified
and with each plan, twice with different seeds of rounding: `value` is the mean over parameters of |difference|^2 / |gradient|^2.
`relative` is |difference| / |gradient| of all parameters together. `full` beside itself is what the device adds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from assign_ways import LEVELS, Planner, Way, low_share, without_pins
from loops import Table, failure, mean_of, release
from torch import Tensor, nn
from train_activations import Task, number, update

import paredown as pare
from paredown.plan.footprint import peak_of

FILE = "assign_gradients.json"
NUM_BATCHES, NUM_SEEDS = 4, 2
WARM_STEPS, QUICK_STEPS = 300, 4


@dataclass(frozen=True)
class Row:
    """One plan of one model (a seed), or what the plans of one way have in common (seed None)."""

    task: str
    way: str
    num_steps: int  # before gradients were taken
    batch: int
    seed: int | None = None
    value: float | None = None
    relative: float | None = None
    predicted_peak: int | None = None
    budget_bytes: int | None = None
    low_share: float | None = None
    predicted_error: str = ""
    status: str = "done"
    num_runs: int | None = None
    mean: float | None = None  # of the logarithms of values, taken back
    deviation: float | None = None  # of their logarithms: 0.7 is a factor of two
    error: str | None = None


def rows_of(name: str, task: Task, ways: Sequence[Way], seed: int, device: str) -> Iterator[Row]:
    """All plans for one model that has learned for a while."""
    release(device)
    num_steps = WARM_STEPS if device == "cuda" else QUICK_STEPS
    torch.manual_seed(seed)
    model = task.build().to(device).train()
    source = torch.Generator(device).manual_seed(2000 + seed)
    optimizer = task.optimizer(model)
    for step in range(num_steps):
        for p, gradient in zip(
            model.parameters(), gradients(task, model, task.batches(task.size.batch, source), device), strict=True
        ):
            p.grad = gradient
        update(task, model, optimizer, step)
    planner = Planner(name, task, model, task.batches(task.size.batch, source), device)
    batches = [task.batches(task.size.batch, source) for _ in range(NUM_BATCHES)]
    exact = [gradients(task, model, batch, device) for batch in batches]
    for way in ways:
        blank = Row(task.name, way.name, num_steps, task.size.batch, seed)
        try:
            yield measured(planner, way, blank, batches, exact)
        except Exception as error:
            yield replace(blank, status="failed", error=failure(error))


def measured(planner: Planner, way: Way, row: Row, batches: Sequence[tuple[Tensor, Tensor]], exact: Sequence[list[Tensor]]) -> Row:
    """The row of one way: a plan, and gradients with it beside the exact ones."""
    pinned = planner.trace
    with nullcontext() if way.has_pins else without_pins():
        planner = planner if way.has_pins else replace(planner, pinned=pinned)
        sensitivities = planner.probed(way) if way.method == "sensitivity" else None
        plan = planner.plan(way, sensitivities, row.seed or 0)
        found = [
            errors(gradients(planner.task, planner.model, batch, planner.device, plan, seed), wanted)
            for batch, wanted in zip(batches, exact, strict=True)
            for seed in range(NUM_SEEDS)
        ]
    value, relative = (statistics.mean(column) for column in zip(*found, strict=True))
    return replace(
        row,
        value=value if math.isfinite(value) else None,
        relative=relative if math.isfinite(relative) else None,
        status="done" if math.isfinite(value) else "diverged",
        predicted_peak=peak_of(planner.trace, plan),
        budget_bytes=planner.budget(way) if way.method else None,
        low_share=low_share(planner.trace, plan, LEVELS[way.levels][-1]) if way.levels else None,
        predicted_error=plan.reason.rpartition("error ")[2].rstrip("."),
    )


def gradients(
    task: Task, model: nn.Module, batch: tuple[Tensor, Tensor], device: str, plan: pare.Plan | None = None, seed: int = 0
) -> list[Tensor]:
    """Gradients of one batch, unmodified or under a plan."""
    with pare.apply(plan, model, seed=seed) if plan is not None else nullcontext():
        with torch.autocast(device, torch.bfloat16):
            loss = task.loss(model(batch[0]), batch[1])
        loss.backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    return found


def errors(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> tuple[float, float]:
    """The mean over parameters of the squared relative error, and the relative error of all together."""
    differences = torch.stack([(a.double() - b.double()).square().sum() for a, b in zip(found, wanted, strict=True)])
    energies = torch.stack([b.double().square().sum() for b in wanted])
    there = energies > 0
    return (differences[there] / energies[there]).mean().item(), (differences.sum() / energies.sum()).sqrt().item()


def summaries(rows: Sequence[Row]) -> Iterator[Row]:
    """One for each task and way."""
    for task, way in dict.fromkeys((row.task, row.way) for row in rows):
        like = [row for row in rows if row.task == task and row.way == way]
        logs = [math.log(row.value) for row in like if row.value]
        yield replace(
            like[0],
            seed=None,
            value=None,
            error=None,
            status="summary",
            relative=mean_of(like, "relative"),
            low_share=mean_of(like, "low_share"),
            num_runs=len(like),
            mean=math.exp(statistics.mean(logs)) if logs else None,
            deviation=statistics.stdev(logs) if len(logs) > 1 else None,
        )


def line(row: Row) -> str:
    """One line of the table."""
    low = "-" if row.low_share is None else f"{row.low_share:.0%}"
    peak = "-" if row.predicted_peak is None else f"{row.predicted_peak / 2**20:.1f}"
    head = f"{row.task:21s} {row.way:30s} predicted peak {peak:>7s} MiB  low {low:>4s}  relative {number(row.relative, '.4g'):>8s}"
    if row.seed is None:
        return (
            f"{head}  squared {number(row.mean, '.4g')}  deviation of its log {number(row.deviation, '.2f')} ({row.num_runs} seeds)"
        )
    return (
        f"{head}  squared {number(row.value, '.4g')} (predicted {row.predicted_error})  seed {row.seed}  {row.error or row.status}"
    )


def table(ways: Sequence[str]) -> Table:
    """Prints and joins rows."""
    return Table(FILE, Row, tuple(ways), summaries, line)
