"""Which assignments train as well as bf16 autocast, at equal peaks, three seeds; rows in results/assign.json.

    PAREDOWN_DATA=folder python benchmarks/bench_assign.py                         # one GPU, one process; --data folder does the same
    python benchmarks/bench_assign.py --part 3/12 --out part3                      # every twelfth run, for processes side by side
    python benchmarks/bench_assign.py --gradients                                  # errors of gradients instead (assign_gradients.py)
    python benchmarks/bench_assign.py --timed                                      # milliseconds of steps, alone (assign_times.py)
    python benchmarks/bench_assign.py --merge part*/assign.json --out folder       # what several processes found, with its means
    python benchmarks/bench_assign.py --quick                                      # a few steps of small ones on the CPU

ResNet-18 and a small ViT learn CIFAR-10, a small GPT learns English byte by byte, all under bf16 autocast, which is `full`. Ways
differ in which saved activations wait in which format (assign_ways.py). Runs of one seed start alike and see the same batches. `difference`
is that of the means from full, with its standard error; `train_loss` is that of the last steps, with the deviation of the seeds.
Times of runs that share a GPU say nothing: those of --timed do.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import assign_gradients
import torch
from assign_tasks import loud, tasks_of
from assign_times import time_all
from assign_ways import LEVELS, MIXED, WAYS, Planner, Way, kept_bytes, low_share, without_pins
from loops import Log, Table, compared, failure, mean_of, release, training_options
from measure import RESULTS
from torch import nn
from train_activations import CHECK_EVERY, Task, number, update

import paredown as pare
from paredown.plan.footprint import peak_of
from paredown.session.changes import THE_PROBE, THE_STEP

FILE = "assign.json"
WARM = 10  # steps before times are taken


@dataclass(frozen=True)
class Row:
    """One run, or what the runs of one way have in common (seed None)."""

    task: str
    way: str
    metric: str
    num_steps: int
    batch: int
    seed: int | None = None
    value: float | None = None
    train_loss: float | None = None
    predicted_peak: int | None = None
    peak_bytes: int | None = None  # measured, without the data of all tasks
    kept_bytes: int | None = None  # activations between forward and backward, predicted
    saved_bytes: int | None = None  # the same, measured: what a forward pass leaves allocated
    low_share: float | None = None  # of the bytes that are at the low level
    budget_bytes: int | None = None
    step_ms: float | None = None
    probe_ms: float | None = None  # of one probe, 16 backwards of a part of the batch
    num_left_out: int | None = None  # steps, by a guard
    num_moves: int | None = None
    status: str = "done"  # or "diverged", "failed", "summary"
    num_runs: int | None = None
    mean: float | None = None
    deviation: float | None = None
    train_deviation: float | None = None
    difference: float | None = None  # of the means, from full
    standard_error: float | None = None
    paired_error: float | None = None  # of the difference, by seeds that both ran with: they start alike and see the same batches
    num_diverged: int | None = None
    error: str | None = None


@dataclass
class Measured:
    """What was measured while a model trained."""

    train_loss: float = math.nan
    saved_bytes: int | None = None
    step_ms: float | None = None


# --- runs -------------------------------------------------------------------------------------------------------------


def run(name: str, task: Task, way: Way, seed: int, device: str, data_bytes: int) -> Row:
    """Train once and judge. `data_bytes`: of all tasks, which are not counted; workspaces of libraries are."""
    release(device)
    task = loud(task) if way.is_loud and task.larger_is_better else task
    torch.manual_seed(seed)
    model = task.build().to(device).train()
    planner = Planner(name, task, model, task.batches(task.size.batch, torch.Generator(device).manual_seed(seed)), device)
    pinned = planner.trace
    with nullcontext() if way.has_pins else without_pins():
        planner = planner if way.has_pins else replace(planner, pinned=pinned)
        row, measured, session = _trained(planner, way, first_row(task, way, seed))
        peak = torch.cuda.max_memory_allocated() - data_bytes if device == "cuda" else None
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        value = task.judge(model.eval())
    is_better = value > 1.2 * task.guessing if task.larger_is_better else value < task.guessing
    is_done = math.isfinite(measured.train_loss) and math.isfinite(value) and is_better
    left_out = [action for action in session.actions if action.slot == THE_STEP]
    return replace(
        row,
        value=value if math.isfinite(value) else None,
        train_loss=measured.train_loss if math.isfinite(measured.train_loss) else None,
        peak_bytes=peak,
        saved_bytes=measured.saved_bytes,
        step_ms=measured.step_ms,
        num_left_out=len(left_out),
        num_moves=sum(action.slot not in (THE_STEP, THE_PROBE) for action in session.actions),
        status="done" if is_done else "diverged",
    )


def _trained(planner: Planner, way: Way, row: Row) -> tuple[Row, Measured, pare.Session]:
    """Plan, apply and train."""
    seed = row.seed or 0
    sensitivities, probe_ms = None, None
    if way.method == "sensitivity":
        begun = now(planner.device)
        sensitivities = planner.probed(way)
        probe_ms = (now(planner.device) - begun) * 1e3
    plan = planner.plan(way, sensitivities, seed)
    guard = planner.guard(way, plan, sensitivities)
    session = pare.apply(plan, planner.model, seed=seed, guard=guard)
    if planner.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    try:
        source = torch.Generator(planner.device).manual_seed(1000 + seed)
        measured = train(planner.task, planner.model, source, planner.device)
    finally:
        session.close()
    low = LEVELS[way.levels][-1] if way.levels else way.plan if "/" in way.plan else None
    row = replace(
        row,
        probe_ms=probe_ms,
        predicted_peak=peak_of(planner.trace, session.plan),
        kept_bytes=kept_bytes(planner.trace, session.plan),
        low_share=low_share(planner.trace, session.plan, low),
        budget_bytes=session.budget_bytes if guard is not None else planner.budget(way) if way.method else None,
    )
    return row, measured, session


def train(task: Task, model: nn.Module, source: torch.Generator, device: str) -> Measured:
    """All steps, or as many as the loss is finite for when looked at."""
    optimizer, num_steps, found = task.optimizer(model), task.size.num_steps, Measured()
    total, since, begun = torch.zeros((), device=device), 0, 0.0
    for step in range(num_steps):
        if step == min(WARM, num_steps - 1):
            begun = now(device)
        x, target = task.batches(task.size.batch, source)
        before = torch.cuda.memory_allocated() if device == "cuda" else 0
        with torch.autocast(device, torch.bfloat16):
            loss = task.loss(model(x), target)
        if device == "cuda" and step == num_steps - 1:
            found.saved_bytes = torch.cuda.memory_allocated() - before
        loss.backward()
        update(task, model, optimizer, step)
        total, since = total + loss.detach(), since + 1
        if step % CHECK_EVERY == CHECK_EVERY - 1 or step == num_steps - 1:
            found.train_loss, total, since = total.item() / since, torch.zeros_like(total), 0
            if not math.isfinite(found.train_loss):
                break
    found.step_ms = (now(device) - begun) / max(step + 1 - min(WARM, num_steps - 1), 1) * 1e3
    return found


def now(device: str) -> float:
    """Seconds, when the device is done with what it was given."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def first_row(task: Task, way: Way, seed: int) -> Row:
    """What is asked for."""
    return Row(task.name, way.name, task.metric, task.size.num_steps, task.size.batch, seed)


def attempt(name: str, task: Task, way: Way, seed: int, device: str, data_bytes: int) -> Row:
    """`run`, an error being a row too."""
    try:
        return run(name, task, way, seed, device, data_bytes)
    except Exception as error:
        return replace(first_row(task, way, seed), status="failed", error=failure(error))


# --- the table --------------------------------------------------------------------------------------------------------


def summary(rows: Sequence[Row], full: Sequence[Row]) -> Row:
    """Means over the seeds of one way, runs that diverged left out and counted; held against `full` with the same seeds."""
    full = [row for row in full if row.seed in {own.seed for own in rows if own.status == "done"}]
    values, others = ([row.value for row in of if row.status == "done" and row.value is not None] for of in (rows, full))
    losses = [row.train_loss for row in rows if row.status == "done" and row.train_loss is not None]
    bytes_of = {key: mean_of(rows, key) for key in ("predicted_peak", "peak_bytes", "kept_bytes", "saved_bytes", "budget_bytes")}
    return replace(
        rows[0],
        **{"seed": None, "value": None, "error": None, "status": "summary"},
        **{key: None if found is None else int(found) for key, found in bytes_of.items()},
        **{key: mean_of(rows, key) for key in ("train_loss", "low_share", "step_ms", "probe_ms")},
        num_runs=len(rows),
        **compared(values, others),
        paired_error=paired_error(rows, full),
        train_deviation=statistics.stdev(losses) if len(losses) > 1 else None,
        num_diverged=sum(row.status != "done" for row in rows),
    )


def paired_error(rows: Sequence[Row], full: Sequence[Row]) -> float | None:
    """The standard error of the mean difference from full, seed by seed."""
    there = {row.seed: row.value for row in full if row.status == "done" and row.value is not None}
    both = [(row.value, there[row.seed]) for row in rows if row.status == "done" and row.value is not None and row.seed in there]
    found = [value - other for value, other in both]
    return statistics.stdev(found) / math.sqrt(len(found)) if len(found) > 1 else None


def summaries(rows: Sequence[Row]) -> Iterator[Row]:
    """One for each task and way, in the order of the runs."""
    for task, way in dict.fromkeys((row.task, row.way) for row in rows):
        like = [row for row in rows if row.task == task]
        yield summary([row for row in like if row.way == way], [row for row in like if row.way == "full"])


def line(row: Row) -> str:
    """One line of the table."""
    mib = " ".join("       -" if count is None else f"{count / 2**20:8.1f}" for count in (row.peak_bytes, row.saved_bytes))
    predicted = "-" if row.predicted_peak is None else f"{row.predicted_peak / 2**20:.1f}"
    low = "" if row.low_share is None else f"  low {row.low_share:.0%}"
    head = f"{row.task:21s} {row.way:30s} peak, saved {mib} MiB (predicted {predicted}){low}  {number(row.step_ms, '.1f')} ms"
    head += "" if row.probe_ms is None else f", probe {row.probe_ms:.0f} ms"
    if row.seed is None:
        lost = f"  {row.num_diverged} LOST" if row.num_diverged else ""
        spread = f"{number(row.mean)} +- {number(row.deviation)}"
        against = (
            f"{number(row.difference, '+.4f')} +- {number(row.standard_error)} (paired {number(row.paired_error)}) against full"
        )
        trained = f"train loss {number(row.train_loss)} +- {number(row.train_deviation)}"
        return f"{head}  {row.metric} {spread} ({row.num_runs} runs)  {against}  {trained}{lost}"
    acted = f"  left out {row.num_left_out}, moved {row.num_moves}" if row.num_left_out or row.num_moves else ""
    figures = f"{row.metric} {number(row.value)}  train loss {number(row.train_loss)}"
    return f"{head}  seed {row.seed}  {figures}{acted}  {row.error or row.status}"


TABLE = Table(FILE, Row, tuple(WAYS), summaries, line)


def parse_options() -> argparse.Namespace:
    """What to run, and on which data."""
    parser = training_options(__doc__)
    parser.add_argument("--task", nargs="+", dest="model", help="only these")
    parser.add_argument("--way", nargs="+", default=[""], help="only ways whose name contains one of these")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--part", default="0/1", help="i/n: every n-th run from the i-th on")
    parser.add_argument("--gradients", action="store_true", help="look at gradients instead of training")
    parser.add_argument("--timed", action="store_true", help="take times instead of training")
    return parser.parse_args()


def part_of(runs: Sequence[Any], options: argparse.Namespace) -> Sequence[Any]:
    """The runs of this process."""
    part, num_parts = map(int, options.part.split("/"))
    return runs[part::num_parts]


def named(names: Iterable[str], options: argparse.Namespace) -> list[Way]:
    """The ways that were asked for."""
    return [WAYS[name] for name in names if any(text in name for text in options.way)]


def train_all(options: argparse.Namespace, device: str) -> None:
    """Seed by seed, so that what is there when it is stopped can be compared."""
    tasks, log, rows = dict(tasks_of(options, device)), Log(FILE, device, options), list[Row]()
    ways = named(WAYS, options)
    data_bytes = torch.cuda.memory_allocated() if device == "cuda" else 0
    every = [(name, way, seed) for seed in options.seeds for way in ways for name in tasks]
    for name, way, seed in part_of(every, options):
        rows.append(attempt(name, tasks[name], way, seed, device, data_bytes))
        TABLE.tell(log, rows[-1:])
    TABLE.tell(log, summaries(rows))


def compare_gradients(options: argparse.Namespace, device: str) -> None:
    """A model for each task and seed, and all plans on it."""
    tasks, rows = dict(tasks_of(options, device)), list[assign_gradients.Row]()
    log, table = Log(assign_gradients.FILE, device, options), assign_gradients.table(MIXED)
    for name, seed in part_of([(name, seed) for seed in options.seeds for name in tasks], options):
        for row in assign_gradients.rows_of(name, tasks[name], named(MIXED, options), seed, device):
            rows.append(row)
            table.tell(log, rows[-1:])
    table.tell(log, assign_gradients.summaries(rows))


def main() -> None:
    """All runs, then what those of one way have in common."""
    options = parse_options()
    if options.merge:
        (assign_gradients.table(MIXED) if options.gradients else TABLE).merge(options.merge, options.out or RESULTS)
        return
    device = "cpu" if options.quick else "cuda"
    torch.backends.cudnn.benchmark = not options.quick
    run_all = time_all if options.timed else compare_gradients if options.gradients else train_all
    run_all(options, device)


if __name__ == "__main__":
    main()
