"""Steps, peaks and their predictions: the baseline, packed activations, checkpointing, and `assign(prefer="speed")` at equal peaks.

    python benchmarks/bench_time.py                              # alone on one GPU, with torchvision and transformers; about 9 minutes
    python benchmarks/bench_time.py --model resnet50 gpt2 --resume --seconds 120    # some networks that the file lacks, 2 minutes at most
    python benchmarks/bench_time.py --prepare --traces FOLDER    # traces alone, which need no GPU; runs with --traces FOLDER read them
    python benchmarks/bench_time.py --quick                      # small ones on the CPU: whether it runs, no figures

Rows are in results/time.json; those of the first three ways are in results/session.json too, with the columns of bench_session.py.

    baseline, int8, int4            as in bench_session.py, with kernels by the profiler and host time of packed tensors
    checkpointing                   every layer through torch.utils.checkpoint, as a user writes it
    checkpointing, every second     every second layer
    speed at ...                    assign(trace, budget, prefer="speed") for 60 and 40 % of the baseline's predicted peak; of SPEED
                                    also for 80 % and for the measured peaks of the two ways before

The device is calibrated first, in a folder of its own unless PAREDOWN_CACHE is set. Each network has a process of its own, in which its
operations are timed one by one. Then all of its ways take turns (turns.py), on one CPU of the host: a shared machine is faster in one
second than in the next. Kernels are measured last: after torch's profiler has run, every launch of the process takes longer (an empty
operation 8.6 us instead of 6.2).
The speed of the host is measured before and after each turn. `ratio` is the median over turns of predicted over measured seconds, each for
the speed in that turn; predicted seconds of a row are for the median speed, by timed operations, by rates of the device alone, and with the
host's speed as calibrated at the start. `relative_ratio` compares a way's predicted time over the baseline's with the measured one, which
is what `assign` needs. Checkpointing by hand is predicted from the step without a session, which has all logits. A plan is compared with
the quickest of baseline and both checkpointings whose measured peak is within its budget: it is slower where it is in at least four fifths
of the rounds. A measured peak above the budget is marked. A network that ends the process stays in the file as a row "not finished", which
--resume skips. With --out, the calibration with the timed operations of each network is written too.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import assign_times
import bench_session
import torch
from assign_times import SLACK, Planner, optimizer_name, prepared
from bench_session import SMALL, WARM_UP, count_packed, empty_op_us, kernel_seconds
from loops import (
    BASELINE,
    Job,
    Log,
    Way,
    common_options,
    failure,
    make_step,
    release,
)
from time_rows import TITLE, Row, beside_baseline, line, summary, with_ratios
from torch import Tensor
from turns import Runner, median_ratio, pin_to_quickest_cpu, take_turns

import paredown as pare
from paredown.plan.calibration import Calibration
from paredown.plan.step_time import StepTime, predict_step
from paredown.predict.device_calibration import calibrate
from paredown.predict.host_time import HostSpeed
from paredown.predict.operation_time import with_operations

FILE, SESSION_FILE, CALIBRATION_FILE = "time.json", "session.json", "calibration.json"
SESSION_WAYS = (BASELINE, Way("int8/64@bf16", "int8/64@bf16"), Way("int4/64@bf16", "int4/64@bf16"))
SESSION_NAMES = tuple(way.name for way in SESSION_WAYS)
EVERY, SECOND = "checkpointing", "checkpointing, every second"
PLAIN = (BASELINE.name, EVERY, SECOND)  # ways without formats
SHARES, MORE_SHARES = ("60%", "40%"), ("80%",)
SMALL_NETWORKS = {"resnet18": "small_resnet18", "vit": "small_vit", "gpt": "small_gpt"}  # of assign_times.py
SPEED = ("resnet50", "llama", "gpt2", "vit", *SMALL_NETWORKS.values())
ORDER = ("resnet50", "llama", "gpt2", "vit", "swin", "densenet121", "scan", "attention_unet", "graph", "lstm")
MOST_TIMING = 12.0  # seconds for the operations of one network; cuDNN's choice of algorithms is part of it, which later steps need
NOT_FINISHED = "not finished"
SLOWER_SHARE = 0.8  # of the rounds


class Deadline:
    """Seconds that are left."""

    def __init__(self, seconds: float) -> None:
        self.end = time.perf_counter() + seconds

    @property
    def seconds_left(self) -> float:
        """Seconds until the end, negative after it."""
        return self.end - time.perf_counter()

    @property
    def is_over(self) -> bool:
        """Whether none are left."""
        return self.seconds_left < 0


@dataclass(eq=False)
class Network:
    """A network, its two calibrations (with timed operations and without), and its ways in memory with their plans."""

    planner: Planner
    timed: Calibration
    rates: Calibration
    speed: Callable[[], float] = lambda: 1.0
    runners: dict[str, Runner] = field(default_factory=dict[str, Runner])
    plans: dict[str, tuple[pare.Plan | None, int | None]] = field(default_factory=dict[str, Any])  # (plan, budget) of a way

    def predicted(self, way: str, host_speed: float) -> Row:
        """A row with predictions; those of a step without a session are of the trace with all logits."""
        (plan, budget), job, trace = self.plans[way], self.planner.job, self.planner.trace
        trace = trace.unmodified or trace if way in (EVERY, SECOND) else trace
        now = self.timed.with_host_speed(host_speed)
        calibrations = now, self.rates.with_host_speed(host_speed), self.timed
        time, by_rates, at_start = (predict_step(trace, plan, calibration=one) for one in calibrations)
        foot = pare.footprint(trace, plan)
        return Row(
            *(job.name, way, job.size, len(self.planner.layers), len(plan.recompute) if plan is not None else 0),
            budget_bytes=budget,
            predicted_peak_bytes=foot.peak_bytes,
            bound_bytes=foot.bound_bytes,
            predicted_seconds=time.seconds,
            predicted_device_seconds=time.device_seconds,
            predicted_host_seconds=time.host_seconds,
            predicted_seconds_by_rates=by_rates.seconds,
            predicted_seconds_at_start=at_start.seconds,
            host_speed=host_speed,
            num_timed=len(self.timed.timed),
            empty_operation_seconds=now.host.empty_operation,
            reason=plan.reason if plan is not None else "",
        )

    def budgets(self, *, has_peaks: bool) -> Iterator[tuple[str, int]]:
        """(way, bytes) of the plans for speed."""
        whole = self.planner.predicted(pare.Plan())
        yield from ((f"speed at {share}", whole * int(share[:-1]) // 100) for share in SHARES)
        if has_peaks:
            found = (way for way in (EVERY, SECOND) if way in self.runners)
            yield from ((f"speed at {way}", self.peak_bytes(way)) for way in found)
            yield from ((f"speed at {share}", whole * int(share[:-1]) // 100) for share in MORE_SHARES)

    def peak_bytes(self, way: str) -> int:
        """The measured peak, or the predicted one where none is measured."""
        return self.runners[way].columns.get("peak_bytes") or self.predicted(way, 1.0).predicted_peak_bytes or 0

    def add(self, way: str, plan: pare.Plan | None, budget: int | None = None) -> None:
        """Build a way, measure its peak, and keep it for the turns."""
        self.plans[way] = plan, budget
        by_hand = plan.recompute if plan is not None and way in (EVERY, SECOND) else ()
        applied = None if by_hand or plan is None or plan.changes_nothing else plan
        self.runners[way] = build_runner(self.planner, way, applied, by_hand=by_hand, has_small_step=way in SESSION_NAMES)

    def measure_kernels(self) -> None:
        """The kernels of the ways in SESSION_NAMES that took their turns, by the profiler, after which nothing else is timed."""
        for runner in (runner for way, runner in self.runners.items() if way in SESSION_NAMES and runner.turns):
            runner.columns["kernel_seconds"] = kernel_seconds(runner.step)

    def add_all(self, name: str, limit: Callable[[], bool]) -> Iterator[tuple[str, Exception]]:
        """All ways of the network, as long as there is time; yields those that could not be built."""
        layers, trace = self.planner.layers, self.planner.trace
        num_session_ways = 1 if name in SMALL_NETWORKS.values() else None
        plans: dict[str, Any] = {way.name: None if way is BASELINE else way.plan() for way in SESSION_WAYS[:num_session_ways]}
        if layers:
            plans |= {EVERY: pare.Plan((), recompute=tuple(layers)), SECOND: pare.Plan((), recompute=tuple(sorted(layers)[::2]))}
        yield from self._attempts({way: lambda plan=plan: (plan, None) for way, plan in plans.items()}, limit)
        now = self.timed.with_host_speed(self.speed())

        def assigned(budget: int) -> tuple[pare.Plan, int]:
            return pare.assign(trace, budget, prefer="speed", calibration=now), budget

        budgets = dict(self.budgets(has_peaks=name in SPEED))
        yield from self._attempts({way: lambda budget=budget: assigned(budget) for way, budget in budgets.items()}, limit)

    def _attempts(self, makes: dict[str, Callable[[], Any]], is_late: Callable[[], bool]) -> Iterator[tuple[str, Exception]]:
        for way, make in makes.items():
            if is_late():
                print(f"{self.planner.job.name} {way}: no time left", flush=True)
                return
            try:
                self.add(way, *make())
            except Exception as error:
                yield way, error

    def rows(self) -> list[Row]:
        """The rows of the ways that took their turns, with ratios."""
        ran = {way: runner for way, runner in self.runners.items() if runner.turns}
        rows = {
            way: replace(self.predicted(way, runner.times["host_speed"]), **self.columns(runner)) for way, runner in ran.items()
        }
        rows = {way: replace(with_ratios(row), ratio=self.turn_ratio(way)) for way, row in rows.items()}
        plain = rows.get(BASELINE.name)
        return [self.judged(beside_baseline(row, plain), rows) for row in rows.values()]

    def turn_ratio(self, way: str) -> float:
        """The median over turns of predicted over measured seconds."""
        at = [(row.predicted_device_seconds, row.predicted_host_seconds) for row in (self.predicted(way, s) for s in (1.0, 2.0))]
        is_cpu = self.planner.device == "cpu"
        return median_ratio(self.runners[way], *(StepTime(device or 0.0, host or 0.0, is_cpu) for device, host in at))

    def columns(self, runner: Runner) -> dict[str, Any]:
        """What was measured of a way, as columns of a row."""
        found = {**runner.columns, **runner.times}
        return {name: value for name, value in found.items() if name in ROW_FIELDS}

    def judged(self, row: Row, rows: Mapping[str, Row]) -> Row:
        """The row of a plan beside the quickest way without formats that its budget allows, round by round."""
        if row.budget_bytes is None:
            return row
        fitting = [way for way in PLAIN if way in rows and self.peak_bytes(way) <= row.budget_bytes]
        row = replace(row, is_over=(row.peak_bytes or 0) > SLACK * row.budget_bytes)
        if not fitting:
            return row
        other = min(fitting, key=lambda way: rows[way].median_seconds or 0.0)
        ratios = self.runners[row.way].ratios(self.runners[other])
        is_slower = sum(ratio > 1 for ratio in ratios) >= SLOWER_SHARE * len(ratios)
        return replace(row, against=other, against_ratio=median(ratios), is_slower=is_slower)

    def session_rows(self) -> Iterator[bench_session.Row]:
        """The rows of baseline, int8 and int4 with the columns of bench_session.py."""
        plain = None
        for way in SESSION_WAYS:
            runner = self.runners.get(way.name)
            if runner is None or not runner.turns:
                continue
            found = {**runner.columns, **runner.times, "predicted_peak_bytes": self.predicted(way.name, 1.0).predicted_peak_bytes}
            columns = {name: value for name, value in found.items() if name in SESSION_FIELDS}
            row = bench_session.Row(self.planner.job.name, way.name, self.planner.job.size, way.kind, way.rounding, **columns)
            plain = plain or row
            yield bench_session.compared(row, plain)

    def close(self) -> None:
        """Release all ways."""
        for runner in self.runners.values():
            runner.close()
        self.runners.clear()
        release(self.planner.device)


ROW_FIELDS = frozenset(Row.__dataclass_fields__) - {"job", "way", "size"}
SESSION_FIELDS = frozenset(bench_session.Row.__dataclass_fields__) - {"job", "way", "size", "kind", "rounding"}


def build_runner(planner: Planner, way: str, plan: pare.Plan | None, *, by_hand: Sequence[str], has_small_step: bool) -> Runner:
    """A fresh model with its optimizer, after warm-up steps, with its peak above what other ways hold. `by_hand`: checkpointed layers."""
    job, device = planner.job, planner.device
    release(device)
    others = torch.cuda.memory_allocated() if device == "cuda" else 0
    training = prepared(planner, plan, by_hand)
    step, session = training.step, training.session
    losses = [step() for _ in range(WARM_UP if device == "cuda" else 1)]
    columns: dict[str, Any] = {"optimizer": optimizer_name(job, training.optimizer)}
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        losses.append(step())
        columns |= {"peak_bytes": torch.cuda.max_memory_allocated() - others}
    columns |= {"first_loss": float(losses[0]), "last_loss": float(losses[-1])}
    small = None
    if has_small_step:
        batch = job.batch(max(2, job.size // SMALL), device)
        small = without_trying(make_step(training.model, batch, training.optimizer, device))
        small()
        columns |= {"empty_op_us": empty_op_us(device)}
        if session is not None:
            columns |= {"num_packed": count_packed(session, small), "num_changes": len(session.changes)}
    return Runner(way, step, training.close, small, columns)


def without_trying(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The step without cuDNN's trials of algorithms, which take longer than steps with small batches."""

    def step_without() -> Tensor:
        was_trying, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, False
        try:
            return step()
        finally:
            torch.backends.cudnn.benchmark = was_trying

    return step_without


class Run:
    """One run of the benchmark: its files, its deadline, and the calibration of the device."""

    def __init__(self, options: argparse.Namespace, device: str) -> None:
        self.options, self.device = options, device
        self.deadline = Deadline(options.seconds)
        self.log = Log(FILE, device, options, continues=options.resume)
        self.session_log = Log(SESSION_FILE, device, options, continues=options.resume)
        self.done = [Row(**row) for row in self.log.rows]
        begun = time.perf_counter()
        self.calibration = replace(calibrate(device), timed={})
        self.speed = HostSpeed(self.calibration)
        print(f"calibrated in {time.perf_counter() - begun:.1f} s: {self.calibration}", flush=True)
        if options.out:
            self.calibration.save(options.out / CALIBRATION_FILE)

    def network(self, name: str, job: Job) -> None:
        """All ways of a network, as far as time allows; what fails is a row too."""
        begun, limit = time.perf_counter(), Deadline(self.options.network_seconds)
        self.log.add(Row(job.name, "all", job.size, error=NOT_FINISHED))
        rows: list[Row] = []
        network = None
        try:
            network = self.prepared(name, job)
            rows = list(self.measured(name, network, lambda: limit.is_over or self.deadline.is_over))
            for found in network.session_rows():
                self.session_log.add(found)
                print(bench_session.line(found), flush=True)
        except Exception as error:
            rows.append(Row(job.name, "all", job.size, error=failure(error)))
        finally:
            if network is not None:
                network.close()
        for number, row in enumerate(rows):
            self.log.add(row) if number else self.log.amend(row)
            print(line(row), flush=True)
        self.done += rows
        print(f"  {name} took {time.perf_counter() - begun:.0f} s", flush=True)
        if self.device == "cuda":
            torch.cuda.synchronize()  # ends the process after an error that CUDA does not recover from

    def prepared(self, name: str, job: Job) -> Network:
        """The network with its operations timed."""
        begun, planner = time.perf_counter(), Planner(job, "", self.device, self.options.traces)
        timed = with_operations(self.calibration, [planner.trace], most_seconds=MOST_TIMING)
        if self.options.out:
            timed.save(self.options.out / f"calibration-{name}.json")
        untimed, took = timed.num_untimed(planner.trace), time.perf_counter() - begun
        print(f"{name}: {len(timed.timed)} operations, {untimed} not timed, {took:.1f} s", flush=True)
        return Network(planner, timed, self.calibration, self.speed)

    def measured(self, name: str, network: Network, is_late: Callable[[], bool]) -> Iterator[Row]:
        """The rows of a network: those that failed, then the others."""
        job = network.planner.job
        for way, error in network.add_all(name, is_late):
            yield Row(job.name, way, job.size, error=failure(error))
        numbers = {"num_rounds": 2 if self.options.quick else self.options.rounds, "num_steps": self.options.steps}
        for runner, error in take_turns(list(network.runners.values()), self.speed, self.device, **numbers):
            yield Row(job.name, runner.name, job.size, error=failure(error))
            runner.turns.clear()
        if self.device == "cuda":
            network.measure_kernels()
        yield from network.rows()


def jobs_of(options: argparse.Namespace) -> dict[str, Job]:
    """The networks that were asked for, in that order, or else in the order of their value."""
    session = bench_session.quick_jobs() if options.quick else bench_session.full_jobs()
    small = assign_times.quick_jobs() if options.quick else assign_times.full_jobs()
    jobs = {job.name: job for job in session}
    jobs = {name: jobs[name] for name in ORDER if name in jobs}
    jobs |= {name: small[key][0] for key, name in SMALL_NETWORKS.items() if key in small}
    return {name: jobs[name] for name in options.model or jobs}


def prepare(options: argparse.Namespace, device: str) -> None:
    """Write the traces."""
    for name, job in jobs_of(options).items():
        begun = time.perf_counter()
        try:
            Planner(job, "", device, options.traces).trace.save(Planner.path(options.traces, job))
            print(f"{name} traced in {time.perf_counter() - begun:.1f} s", flush=True)
        except Exception as error:
            print(f"{name} was not traced: {failure(error)}", flush=True)


def parse_options() -> argparse.Namespace:
    """What to run, and for how long."""
    parser = common_options(__doc__)
    parser.add_argument("--rounds", type=int, default=6, help="turns of each way")
    parser.add_argument("--steps", type=int, default=2, help="timed steps of each turn")
    parser.add_argument("--seconds", type=float, default=3600.0, help="no way is built after this many seconds")
    parser.add_argument("--network-seconds", type=float, default=600.0, help="the same for one network")
    parser.add_argument("--traces", type=Path, help="folder of traces")
    parser.add_argument("--prepare", action="store_true", help="write traces into that folder, and measure nothing")
    parser.add_argument("--resume", action="store_true", help="continue the last run of this commit in the file")
    return parser.parse_args()


def main() -> None:
    """Calibrate, then predict and measure all networks that were asked for."""
    options = parse_options()
    device = "cpu" if options.quick else "cuda"
    if options.prepare:
        options.traces.mkdir(parents=True, exist_ok=True)
        prepare(options, device)
        return
    jobs = jobs_of(options)
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("PAREDOWN_CACHE", folder)
        print(TITLE, flush=True)
        if device == "cpu":
            rows = run_networks(options, device, jobs)
        else:
            print("on CPU {}, whose loop of Python takes {:.2g} s".format(*pin_to_quickest_cpu()), flush=True)
            rows = run_in_processes(options, list(jobs))
        print(summary(rows), flush=True)


def run_networks(options: argparse.Namespace, device: str, jobs: Mapping[str, Job]) -> list[Row]:
    """Calibrate, then predict and measure these networks; returns all rows of the run, of earlier processes too."""
    torch.backends.cudnn.benchmark = device == "cuda"
    run = Run(options, device)
    for name, job in jobs.items():
        if job.name in {row.job for row in run.done}:
            continue  # of the run that is resumed
        if run.deadline.is_over:
            print(f"{name}: no time left", flush=True)
            continue
        run.network(name, job)
    return run.done


def run_in_processes(options: argparse.Namespace, names: Sequence[str]) -> list[Row]:
    """Each network in a process of its own on the GPU, whose rows are added to those of the ones before; returns all rows."""
    deadline, context = Deadline(options.seconds), multiprocessing.get_context("spawn")
    for name in names:
        part = argparse.Namespace(**{**vars(options), "model": [name], "seconds": deadline.seconds_left})
        process = context.Process(target=run_one, args=(part,))
        process.start()
        process.join()
        if process.exitcode:
            print(f"{name}: its process ended with status {process.exitcode}, and what it had not written is lost", flush=True)
        options = argparse.Namespace(**{**vars(options), "resume": True})  # the next ones add to the same run
    return [Row(**row) for row in Log(FILE, "cuda", options, continues=True).rows]


def run_one(options: argparse.Namespace) -> None:
    """The main function of a process: one network on the GPU."""
    run_networks(options, "cuda", jobs_of(options))


if __name__ == "__main__":
    main()
