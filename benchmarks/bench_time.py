"""Predicted and measured time of a step, for the baseline, packed activations, checkpointing and assigned plans; rows in results/time.json.

    python benchmarks/bench_time.py                           # alone on one GPU, with torchvision and transformers
    python benchmarks/bench_time.py --model resnet50 gpt2     # some networks
    python benchmarks/bench_time.py --quick                   # small ones on the CPU: whether it runs, no figures

Networks are those of bench_session.py. The device is calibrated first, in a folder of its own unless PAREDOWN_CACHE is set. Two predictions
stand in a row: by rates of the device alone, and with the operations of the network timed one by one. With --parts the baseline and int8
have `kernel_seconds`, the sum of kernel times of one step by the profiler, and `small_batch_seconds`, the time of a step whose tensors are
so small that the host is the limit: what the two parts of a prediction are compared with. Steps are timed as in bench_session.py. A network
that fails is a row with its error. At the end stand the largest deviations of predicted times.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from assign_times import LEARNS, Planner, measured
from bench_session import WARM_UP, full_jobs, quick_jobs
from loops import Job, Log, build, common_options, failure, gib, make_optimizer, make_step, release

import paredown as pare
from paredown.calibrate.device_calibration import calibrate
from paredown.plan.calibration import Calibration
from paredown.plan.step_time import predict_step

FILE = "time.json"
INT8, INT4 = "int8/64@bf16", "int4/64@bf16"
BUDGETS = ("60%", "40%")
SMALL_STEPS = 12
WITHIN = 0.15


@dataclass(frozen=True)
class Row:
    """One plan of one network. Predictions without a suffix have timed operations, `_by_rates` have none."""

    job: str
    way: str
    size: int
    num_checkpointed: int = 0
    median_seconds: float | None = None
    p20_seconds: float | None = None
    p80_seconds: float | None = None
    host_seconds: float | None = None
    peak_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    predicted_seconds: float | None = None
    predicted_device_seconds: float | None = None
    predicted_host_seconds: float | None = None
    predicted_seconds_by_rates: float | None = None
    ratio: float | None = None  # predicted to measured
    ratio_by_rates: float | None = None
    kernel_seconds: float | None = None
    small_batch_seconds: float | None = None
    last_loss: float | None = None
    reserved_bytes: int | None = None
    optimizer: str = ""
    calibration_seconds: float | None = None
    empty_operation_seconds: float | None = None
    reason: str = ""
    error: str | None = None


def plans_of(planner: Planner, calibration: Calibration) -> Iterator[tuple[str, pare.Plan | None]]:
    """(name, plan) of each way; the baseline has none. A budget that no plan fits is left out."""
    yield "baseline", None
    yield "int8", pare.Plan.uniform(activation=INT8)
    yield "int4", pare.Plan.uniform(activation=INT4)
    layers = planner.layers
    if layers:
        yield "checkpointing", pare.Plan((), recompute=tuple(layers))
        yield "checkpointing, every second", pare.Plan((), recompute=tuple(sorted(layers)[::2]))
    for budget in BUDGETS:
        try:
            yield f"assign {budget}", pare.assign(planner.trace, budget, **SPEED, calibration=calibration)
        except pare.errors.BudgetError as error:
            print(f"{planner.job.name} {budget}: {error}"[:200], flush=True)


SPEED: dict[str, Any] = {"prefer": "speed"}


def with_prediction(row: Row, planner: Planner, plan: pare.Plan | None, calibrations: tuple[Calibration, Calibration]) -> Row:
    """The row with both predictions; `calibrations`: with timed operations and without."""
    timed, rates = (predict_step(planner.trace, plan, calibration=one) for one in calibrations)
    return replace(
        row,
        num_checkpointed=len(plan.recompute) if plan is not None else 0,
        predicted_seconds=timed.seconds,
        predicted_device_seconds=timed.device_seconds,
        predicted_host_seconds=timed.host_seconds,
        predicted_seconds_by_rates=rates.seconds,
        predicted_peak_bytes=planner.predicted(plan or pare.Plan()),
        reason=plan.reason if plan is not None else "",
    )


def with_times(row: Row, planner: Planner, plan: pare.Plan | None, num_steps: int) -> Row:
    """The row with what was measured."""
    row = replace(row, **measured(planner, plan, num_steps))
    assert row.median_seconds and row.predicted_seconds and row.predicted_seconds_by_rates
    return replace(
        row,
        ratio=row.predicted_seconds / row.median_seconds,
        ratio_by_rates=row.predicted_seconds_by_rates / row.median_seconds,
    )


def step_of(planner: Planner, plan: pare.Plan | None, size: int) -> tuple[Callable[[], Any], Any]:
    """A step of the network with a batch of `size`, warmed up, and its session."""
    job, device = planner.job, planner.device
    release(device)
    model, batch = build(job, device), job.batch(size, device)
    session = pare.apply(plan, model) if plan is not None else None
    is_ours = plan is not None and planner.lowers_parameters(plan)
    optimizer = LEARNS[job.optimizer](model.parameters()) if is_ours else make_optimizer(job.optimizer, model)
    step = make_step(model, batch, optimizer, device)
    for _ in range(WARM_UP):
        step()
    return step, session


def kernel_seconds(planner: Planner, plan: pare.Plan | None) -> float | None:
    """The sum of kernel times of one step by the profiler; None where it has no kernels."""
    from torch.profiler import ProfilerActivity, profile

    step, session = step_of(planner, plan, planner.job.size)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    if session is not None:
        session.close()
    kernels = [event.self_device_time_total for event in profiler.key_averages()]
    return sum(kernels) / 1e6 or None


def small_batch_seconds(planner: Planner, plan: pare.Plan | None) -> float:
    """Seconds of a step whose batch is small, one after the other without synchronization."""
    step, session = step_of(planner, plan, 1 if isinstance(planner.job.batch(1, "cpu"), Mapping) else 4)
    seconds: list[float] = []
    for _ in range(SMALL_STEPS):
        begun = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begun)
    torch.cuda.synchronize()
    if session is not None:
        session.close()
    return statistics.median(seconds)


def parts(planner: Planner, plan: pare.Plan | None, row: Row) -> Row:
    """The row with the two parts measured, as far as they can be."""
    found: dict[str, float | None] = {}
    for name, measure in (("kernel_seconds", kernel_seconds), ("small_batch_seconds", small_batch_seconds)):
        try:
            found[name] = measure(planner, plan)
        except Exception as error:
            print(f"  {row.job} {row.way} {name}: {failure(error)}"[:300], flush=True)
    return replace(row, **found)


def rows_of(planner: Planner, calibration: Calibration, num_steps: int, *, has_parts: bool = False) -> Iterator[Row]:
    """All ways of one network."""
    job = planner.job
    begun = time.perf_counter()
    timed = calibrate(planner.device, traces=[planner.trace])
    took = time.perf_counter() - begun
    blank = Row(job.name, "baseline", job.size, calibration_seconds=took, empty_operation_seconds=calibration.host.empty_operation)
    for way, plan in plans_of(planner, timed):
        row = replace(blank, way=way)
        try:
            row = with_prediction(row, planner, plan, (timed, calibration))
            row = with_times(row, planner, plan, num_steps)
            if has_parts and planner.device == "cuda" and way in ("baseline", "int8"):
                row = parts(planner, plan, row)
        except Exception as error:
            row = replace(row, error=failure(error))
        yield row


def network_rows(job: Job, device: str, calibration: Calibration, options: argparse.Namespace) -> Iterator[Row]:
    """`rows_of` a network; an error of its trace or calibration is a row."""
    try:
        num_steps = 3 if options.quick else options.steps
        yield from rows_of(Planner(job, "", device), calibration, num_steps, has_parts=options.parts)
    except Exception as error:
        yield Row(job.name, "all", job.size, error=failure(error))


def summary(rows: Sequence[Row]) -> str:
    """How many predicted times are within 15 %, and the worst of each network."""
    off = {(row.job, row.way): row.ratio - 1 for row in rows if row.ratio is not None}
    worst = {job: max((pair for pair in off.items() if pair[0][0] == job), key=lambda pair: abs(pair[1])) for job, _ in off}
    texts = [f"{job} {value:+.0%} ({way})" for job, ((_, way), value) in worst.items()]
    within = sum(abs(value) <= WITHIN for value in off.values())
    return f"{within} of {len(off)} predicted times within {WITHIN:.0%}; the worst of each network: {', '.join(texts)}"


def line(row: Row) -> str:
    """One line of the table."""
    head = f"{row.job:13s} {row.way:28s} {row.num_checkpointed:2d}"
    ms = lambda seconds: "      -" if seconds is None else f"{1e3 * seconds:7.1f}"  # noqa: E731
    predicted = " ".join(ms(one) for one in (row.predicted_seconds, row.predicted_device_seconds, row.predicted_host_seconds))
    if row.error or row.ratio is None or row.ratio_by_rates is None:
        return f"{head}  predicted {predicted}  {row.error}"
    kernels = f"  kernels {ms(row.kernel_seconds)} small batch {ms(row.small_batch_seconds)}" if row.kernel_seconds else ""
    spread = " ".join(ms(one) for one in (row.median_seconds, row.p20_seconds, row.p80_seconds, row.host_seconds))
    peaks = f"{gib(row.peak_bytes)} ({gib(row.predicted_peak_bytes)})"
    return f"{head} {peaks}  {spread}  {predicted} {row.ratio:5.2f}x {row.ratio_by_rates:5.2f}x{kernels}"


def main() -> None:
    """Calibrate, then predict and measure all networks that were asked for."""
    parser = common_options(__doc__)
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each plan")
    parser.add_argument("--parts", action="store_true", help="measure kernels and host of the baseline and int8 apart")
    options = parser.parse_args()
    device = "cpu" if options.quick else "cuda"
    torch.backends.cudnn.benchmark = not options.quick
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("PAREDOWN_CACHE", folder)
        begun = time.perf_counter()
        calibration = replace(calibrate(device, is_forced=True), timed={})
        print(f"calibrated in {time.perf_counter() - begun:.1f} s: {calibration}\n{calibration.to_json()}", flush=True)
        jobs, log = quick_jobs() if options.quick else full_jobs(), Log(FILE, device, options)
        print(
            "checkpointed layers; peak GiB (predicted); ms: median, p20, p80, host; predicted: step, device, host; ratios",
            flush=True,
        )
        rows: list[Row] = []
        for job in jobs:
            if options.model and job.name not in options.model:
                continue
            begun = time.perf_counter()
            for row in network_rows(job, device, calibration, options):
                rows.append(row)
                log.add(row)
                print(line(row), flush=True)
            print(f"  {job.name} took {time.perf_counter() - begun:.0f} s", flush=True)
        print(summary(rows))


if __name__ == "__main__":
    main()
