"""Steps of `assign(prefer="speed")` beside activation checkpointing, at equal budgets; rows in results/assign_speed.json.

    python benchmarks/bench_assign.py --speed                        # alone on one GPU, with transformers; all networks
    python benchmarks/bench_assign.py --speed --task gpt2 --resume   # some of them, without rows that the file has for this commit
    python benchmarks/bench_assign.py --speed --quick                # small ones on the CPU: whether it runs, no figures

    checkpointing                   every layer through torch.utils.checkpoint, as a user writes it
    checkpointing, every second     every second layer
    speed at ...                    assign(trace, budget, prefer="speed") for the measured peaks of these two, and 80, 60 and 40 % of the
                                    baseline's predicted peak; operations of the step are timed first

A row is compared with the quickest of baseline and both checkpointings whose measured peak is within its budget: it is slower where its
20th percentile is above the other's 80th. A measured peak above the budget is marked. Networks are those of assign_times.py.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from assign_times import Planner, full_jobs, measured, quick_jobs
from loops import Log, failure, gib

import paredown as pare
from paredown.plan.calibration import Calibration
from paredown.plan.step_time import predict_step

FILE = "assign_speed.json"
SHARES = ("80%", "60%", "40%")
EVERY, SECOND = "checkpointing", "checkpointing, every second"


@dataclass(frozen=True)
class Row:
    """One way of one network. `ratio`: of its time to that of `against`, the quickest way without formats within the budget."""

    job: str
    way: str
    size: int
    num_layers: int = 0
    num_checkpointed: int = 0
    budget_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    predicted_seconds: float | None = None
    optimizer: str = ""
    median_seconds: float | None = None
    p20_seconds: float | None = None
    p80_seconds: float | None = None
    peak_bytes: int | None = None
    host_seconds: float | None = None
    last_loss: float | None = None
    reserved_bytes: int | None = None
    against: str = ""
    ratio: float | None = None
    is_slower: bool = False
    is_over: bool = False
    reason: str = ""
    error: str | None = None


def speed_rows(planner: Planner, num_steps: int, done: Sequence[Row] = ()) -> Iterator[Row]:
    """Rows of one network that `done` does not have."""
    calibration = pare.calibrate(planner.device, traces=[planner.trace])
    rows = [row for row in done if row.job == planner.job.name]
    known = {row.way for row in rows}
    second = tuple(sorted(planner.layers)[::2])
    for way, layers in (("baseline", ()), (EVERY, tuple(planner.layers)), (SECOND, second)):
        if way not in known:
            rows.append(plain_row(planner, way, layers, calibration, num_steps))
            yield rows[-1]
    plain = {row.way: row for row in rows if not row.way.startswith("speed")}
    budgets = {
        f"speed at {way}": plain[way].peak_bytes or planner.predicted(plan_of(plain[way], planner)) for way in (EVERY, SECOND)
    }
    whole = planner.predicted(pare.Plan())
    budgets |= {f"speed at {share}": whole * int(share[:-1]) // 100 for share in SHARES}
    for way, budget in budgets.items():
        if way not in known:
            yield judged(speed_row(planner, way, budget, calibration, num_steps), list(plain.values()))


def plan_of(row: Row, planner: Planner) -> pare.Plan:
    """The plan that stands for checkpointing by hand."""
    layers = planner.layers if row.way == EVERY else sorted(planner.layers)[::2]
    return pare.Plan((), recompute=tuple(layers))


def plain_row(planner: Planner, way: str, layers: tuple[str, ...], calibration: Calibration, num_steps: int) -> Row:
    """The baseline, or layers checkpointed by hand."""
    plan = pare.Plan((), recompute=layers)
    blank = Row(planner.job.name, way, planner.job.size, len(planner.layers), len(layers))
    row = replace(blank, predicted_peak_bytes=planner.predicted(plan), predicted_seconds=seconds(planner, plan, calibration))
    try:
        return replace(row, **measured(planner, None, num_steps, by_hand=layers))
    except Exception as error:
        return replace(row, error=failure(error))


def speed_row(planner: Planner, way: str, budget: int, calibration: Calibration, num_steps: int) -> Row:
    """The quickest plan for a budget."""
    row = Row(planner.job.name, way, planner.job.size, len(planner.layers), budget_bytes=budget)
    try:
        plan = pare.assign(planner.trace, budget, prefer="speed", calibration=calibration)
        row = replace(row, num_checkpointed=len(plan.recompute), reason=plan.reason, predicted_peak_bytes=planner.predicted(plan))
        row = replace(row, predicted_seconds=seconds(planner, plan, calibration))
        return replace(row, **measured(planner, plan if plan.rules or plan.recompute else None, num_steps))
    except Exception as error:
        return replace(row, error=failure(error))


def seconds(planner: Planner, plan: pare.Plan, calibration: Calibration) -> float:
    """Predicted seconds of a step."""
    return predict_step(planner.trace, plan, calibration=calibration).seconds


def judged(row: Row, plain: Sequence[Row]) -> Row:
    """The row beside the quickest way without formats that its budget allows."""
    if row.median_seconds is None or row.budget_bytes is None:
        return row
    fitting = [one for one in plain if one.median_seconds and (one.peak_bytes or one.predicted_peak_bytes or 0) <= row.budget_bytes]
    row = replace(row, is_over=(row.peak_bytes or 0) > row.budget_bytes)
    if not fitting:
        return row
    other = min(fitting, key=lambda one: one.median_seconds or 0.0)
    is_slower = (row.p20_seconds or 0.0) > (other.p80_seconds or 0.0)
    return replace(row, against=other.way, ratio=row.median_seconds / (other.median_seconds or 1.0), is_slower=is_slower)


def line(row: Row) -> str:
    """One line of the table."""
    head = f"{row.job:16s} {row.way:36s} {row.num_checkpointed:2d} of {row.num_layers:2d} layers"
    if row.error or row.median_seconds is None:
        return f"{head}  {row.error}"
    ms = " ".join(f"{1e3 * (s or 0):7.1f}" for s in (row.median_seconds, row.p20_seconds, row.p80_seconds, row.predicted_seconds))
    budget = "" if row.budget_bytes is None else f" of {gib(row.budget_bytes)}{' OVER' * row.is_over}"
    against = f"  {row.ratio:.3f}x of {row.against}{' SLOWER' * row.is_slower}" if row.ratio is not None else ""
    return f"{head}  {gib(row.peak_bytes)} GiB{budget} ({gib(row.predicted_peak_bytes)} predicted)  {ms} ms{against}"


def speed_all(options: argparse.Namespace, device: str) -> None:
    """All networks that were asked for."""
    jobs = quick_jobs() if options.quick else full_jobs()
    log = Log(FILE, device, options, continues=options.resume)
    done = [Row(**row) for row in log.rows]
    print(
        "peak GiB of budget; step ms: median, p20, p80, predicted; ratio to the quickest way without formats in the budget",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("PAREDOWN_CACHE", folder)
        for name in options.model or jobs:
            begun = time.perf_counter()
            for row in network_rows(Planner(*jobs[name], device), done, quick=options.quick):
                log.add(row)
                print(line(row), flush=True)
            print(f"  {name} took {time.perf_counter() - begun:.0f} s", flush=True)


def network_rows(planner: Planner, done: Sequence[Row], *, quick: bool) -> Iterator[Row]:
    """`speed_rows`; an error of the trace or of the calibration is a row."""
    try:
        yield from speed_rows(planner, 2 if quick else 8, done)
    except Exception as error:
        yield Row(planner.job.name, "all", planner.job.size, error=failure(error))
