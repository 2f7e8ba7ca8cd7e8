"""Steps, peaks and their predictions: the baseline, packed activations, checkpointing, and `assign(prefer="speed")` at equal peaks.

    python benchmarks/bench_time.py                              # alone on one GPU, with torchvision and transformers; about 8 minutes
    python benchmarks/bench_time.py --model resnet50 gpt2 --resume --seconds 120    # some networks, what the file lacks, 2 minutes at most
    python benchmarks/bench_time.py --prepare --traces FOLDER    # traces alone, which need no GPU; runs with --traces FOLDER read them
    python benchmarks/bench_time.py --quick                      # small ones on the CPU: whether it runs, no figures

Rows are in results/time.json; those of the first three ways are in results/session.json too, as bench_session.py writes them.

    baseline, int8, int4            as in bench_session.py, with kernels by the profiler and host time of packed tensors
    checkpointing                   every layer through torch.utils.checkpoint, as a user writes it
    checkpointing, every second     every second layer
    speed at ...                    assign(trace, budget, prefer="speed") for 60 and 40 % of the baseline's predicted peak; of SPEED
                                    also for 80 % and for the measured peaks of the two ways before

The device is calibrated first, in a folder of its own unless PAREDOWN_CACHE is set, and the operations of each network are timed one by
one. The host of a shared machine is faster in one minute than in the next: right before each way its speed is measured again, in a third of
a second, and all predictions of a row are for that speed. Three predictions of time stand in a row: with timed operations; by rates of the
device alone; and with timed operations and the host's speed as calibrated at the start. `relative_ratio` compares a way's predicted time
over the baseline's with the measured one, which is what `assign` needs of a prediction. Checkpointing by hand is predicted from the step
without a session, which has all logits. A plan is compared with the quickest of baseline and both checkpointings whose measured peak is
within its budget: it is slower where its 20th percentile is above the other's 80th. A measured peak above the budget is marked. A way that
ends the process stays in the file as a row with its error or "not finished", which --resume skips. With --out, the calibration with the
timed operations of each network is written too.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import assign_times
import bench_session
import torch
from assign_times import SLACK, Planner, measured
from loops import BASELINE, Job, Log, Way, common_options, failure, gib

import paredown as pare
from paredown.calibrate.device_calibration import calibrate
from paredown.calibrate.host_time import with_present_host
from paredown.calibrate.operation_time import with_operations
from paredown.plan.calibration import Calibration
from paredown.plan.step_time import predict_step

FILE, SESSION_FILE, CALIBRATION_FILE = "time.json", "session.json", "calibration.json"
SESSION_WAYS = (BASELINE, Way("int8/64@bf16", "int8/64@bf16"), Way("int4/64@bf16", "int4/64@bf16"))
EVERY, SECOND = "checkpointing", "checkpointing, every second"
PLAIN = (BASELINE.name, EVERY, SECOND)  # ways without formats
SHARES, MORE_SHARES = ("60%", "40%"), ("80%",)
SMALL_NETWORKS = {"resnet18": "small_resnet18", "vit": "small_vit", "gpt": "small_gpt"}  # of assign_times.py
SPEED = ("resnet50", "llama", "gpt2", "vit", *SMALL_NETWORKS.values())
ORDER = ("resnet50", "llama", "gpt2", "vit", "swin", "densenet121", "scan", "attention_unet", "graph", "lstm")
WITHIN, PEAK_WITHIN = 0.15, 0.05
MOST_TIMING = 12.0  # seconds for the operations of one network; cuDNN's choice of algorithms is part of it, which later steps need
NOT_FINISHED = "not finished"


@dataclass(frozen=True)
class Row:
    """One way of one network. `ratio`: predicted to measured seconds, with timed operations; `against_ratio`: to those of `against`.

    `host_speed`: seconds of a small step right before the way over those at calibration; `ratio_at_start`: `ratio` without it;
    `relative_ratio`: `ratio` over the baseline's.
    """

    job: str
    way: str
    size: int
    num_layers: int = 0
    num_checkpointed: int = 0
    budget_bytes: int | None = None
    peak_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    bound_bytes: int | None = None  # the predicted peak with its margin
    reserved_bytes: int | None = None
    median_seconds: float | None = None
    p20_seconds: float | None = None
    p80_seconds: float | None = None
    host_seconds: float | None = None
    predicted_seconds: float | None = None
    predicted_device_seconds: float | None = None
    predicted_host_seconds: float | None = None
    predicted_seconds_by_rates: float | None = None
    predicted_seconds_at_start: float | None = None
    ratio: float | None = None
    ratio_by_rates: float | None = None
    host_speed: float | None = None
    ratio_at_start: float | None = None
    relative_ratio: float | None = None
    kernel_seconds: float | None = None
    small_step_seconds: float | None = None
    against: str = ""
    against_ratio: float | None = None
    is_slower: bool = False
    is_over: bool = False
    last_loss: float | None = None
    optimizer: str = ""
    num_timed: int = 0  # operations
    empty_operation_seconds: float | None = None
    reason: str = ""
    error: str | None = None


class Deadline:
    """Seconds that are left."""

    def __init__(self, seconds: float) -> None:
        self.end = time.perf_counter() + seconds

    @property
    def is_over(self) -> bool:
        """Whether none are left."""
        return time.perf_counter() > self.end


@dataclass(eq=False)
class Network:
    """A network, its two calibrations (with timed operations and without), the rows that it has, and how fast the host is now."""

    planner: Planner
    timed: Calibration
    rates: Calibration
    num_steps: int
    rows: list[Row] = field(default_factory=list[Row])
    host_speed: float = 1.0

    @property
    def now(self) -> Calibration:
        """The calibration with timed operations, for the present speed of the host."""
        return self.timed.with_host_speed(self.host_speed)

    def blank(self, way: str, plan: pare.Plan | None, *, in_session: bool = True, **columns: Any) -> Row:
        """A row with predictions; those of a step without a session are of the trace with all logits."""
        job, trace = self.planner.job, self.planner.trace
        trace = trace if in_session else trace.unmodified or trace
        calibrations = self.now, self.rates.with_host_speed(self.host_speed), self.timed
        time, by_rates, at_start = (predict_step(trace, plan, calibration=one) for one in calibrations)
        foot = pare.footprint(trace, plan)
        return Row(
            *(job.name, way, job.size, len(self.planner.layers), len(plan.recompute) if plan is not None else 0),
            predicted_peak_bytes=foot.peak_bytes,
            bound_bytes=foot.bound_bytes,
            predicted_seconds=time.seconds,
            predicted_device_seconds=time.device_seconds,
            predicted_host_seconds=time.host_seconds,
            predicted_seconds_by_rates=by_rates.seconds,
            predicted_seconds_at_start=at_start.seconds,
            host_speed=self.host_speed,
            num_timed=len(self.timed.timed),
            empty_operation_seconds=self.now.host.empty_operation,
            reason=plan.reason if plan is not None else "",
            **columns,
        )

    def budgets(self, *, has_peaks: bool) -> Iterator[tuple[str, int]]:
        """(way, bytes) of the plans for speed."""
        whole = self.planner.predicted(pare.Plan())
        yield from ((f"speed at {share}", whole * int(share[:-1]) // 100) for share in SHARES)
        if has_peaks:
            peaks = {row.way: row.peak_bytes or row.predicted_peak_bytes for row in self.rows if not row.error}
            yield from ((f"speed at {way}", peaks[way] or 0) for way in (EVERY, SECOND) if way in peaks)
            yield from ((f"speed at {share}", whole * int(share[:-1]) // 100) for share in MORE_SHARES)

    def packed_row(self, way: Way, plain: bench_session.Row | None) -> tuple[Row, bench_session.Row]:
        """The row of a way of bench_session.py, in both forms."""
        plan = None if way is BASELINE else way.plan()
        row, planner = self.blank(way.name, plan), self.planner
        found = bench_session.attempt(planner.job, way, planner.device, self.num_steps)
        found = replace(bench_session.compared(found, plain or found), predicted_peak_bytes=row.predicted_peak_bytes)
        columns = {name: value for name, value in asdict(found).items() if name in ROW_FIELDS and value is not None}
        return replace(row, **columns), found

    def checkpointed_row(self, way: str) -> Row:
        """Layers checkpointed by hand."""
        layers = self.planner.layers if way == EVERY else sorted(self.planner.layers)[::2]
        row = self.blank(way, pare.Plan((), recompute=tuple(layers)), in_session=False)
        return replace(row, **measured(self.planner, None, self.num_steps, by_hand=layers))

    def speed_row(self, way: str, budget: int) -> Row:
        """The quickest plan for a budget."""
        plan = pare.assign(self.planner.trace, budget, prefer="speed", calibration=self.now)
        row = self.blank(way, plan, budget_bytes=budget)
        return replace(row, **measured(self.planner, None if plan.changes_nothing else plan, self.num_steps))

    def judged(self, row: Row) -> Row:
        """The row with its ratios, beside the quickest way without formats that its budget allows."""
        if row.median_seconds is None:
            return row
        ratios = {"ratio": row.predicted_seconds, "ratio_by_rates": row.predicted_seconds_by_rates}
        ratios |= {"ratio_at_start": row.predicted_seconds_at_start}
        row = replace(row, **{name: (seconds or 0.0) / row.median_seconds for name, seconds in ratios.items()})
        row = beside_baseline(row, next((one for one in (*self.rows, row) if one.way == BASELINE.name), None))
        assert row.median_seconds is not None
        if row.budget_bytes is None:
            return row
        plain = [one for one in self.rows if one.way in PLAIN and one.median_seconds]
        fitting = [one for one in plain if (one.peak_bytes or one.predicted_peak_bytes or 0) <= row.budget_bytes]
        row = replace(row, is_over=(row.peak_bytes or 0) > SLACK * row.budget_bytes)
        if not fitting:
            return row
        other = min(fitting, key=lambda one: one.median_seconds or 0.0)
        is_slower = (row.p20_seconds or 0.0) > (other.p80_seconds or 0.0)
        assert row.median_seconds is not None
        return replace(
            row, against=other.way, against_ratio=row.median_seconds / (other.median_seconds or 1.0), is_slower=is_slower
        )


def beside_baseline(row: Row, plain: Row | None) -> Row:
    """The measured row with its ratio relative to the baseline of its network, if that was measured."""
    return row if plain is None or not plain.ratio or row.ratio is None else replace(row, relative_ratio=row.ratio / plain.ratio)


ROW_FIELDS = frozenset(Row.__dataclass_fields__) - {"job", "way", "size"}


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
        print(f"calibrated in {time.perf_counter() - begun:.1f} s: {self.calibration}", flush=True)
        if options.out:
            self.calibration.save(options.out / CALIBRATION_FILE)

    def network(self, name: str, job: Job) -> None:
        """All ways of a network that the file lacks, as far as time allows; what fails before the first is a row too."""
        begun, limit = time.perf_counter(), Deadline(self.options.network_seconds)
        try:
            planner = Planner(job, "", self.device, self.options.traces)
            trace = planner.trace
            timed = with_operations(self.calibration, [trace], most_seconds=MOST_TIMING)
            took = time.perf_counter() - begun
            if self.options.out:
                timed.save(self.options.out / f"calibration-{name}.json")
            print(f"{name}: {len(timed.timed)} operations, {timed.num_untimed(trace)} not timed, {took:.1f} s", flush=True)
            num_steps = 3 if self.options.quick else self.options.steps
            rows = [row for row in self.done if row.job == job.name]
            self.ways(name, Network(planner, timed, self.calibration, num_steps, rows), limit)
        except Exception as error:
            self.add(Row(job.name, "all", job.size, error=failure(error)))
            if self.device == "cuda":
                torch.cuda.synchronize()
        print(f"  {name} took {time.perf_counter() - begun:.0f} s", flush=True)

    def ways(self, name: str, network: Network, limit: Deadline) -> None:
        """The ways of one network, one after the other."""
        of_job = (row for row in self.session_log.rows if (row["job"], row["way"]) == (network.planner.job.name, BASELINE.name))
        plain = next((bench_session.Row(**row) for row in of_job), None)

        def packed(way: Way) -> Row:
            nonlocal plain
            row, found = network.packed_row(way, plain)
            plain = plain or found
            self.session_log.add(found)
            print(bench_session.line(found), flush=True)
            return row

        is_small = name in SMALL_NETWORKS.values()
        measures: dict[str, Any] = {way.name: (lambda way=way: packed(way)) for way in SESSION_WAYS[: 1 if is_small else None]}
        if network.planner.layers:
            measures |= {way: (lambda way=way: network.checkpointed_row(way)) for way in (EVERY, SECOND)}
        self.measure(network, measures, limit)
        budgets = network.budgets(has_peaks=name in SPEED)
        self.measure(network, {way: (lambda way=way, n=n: network.speed_row(way, n)) for way, n in budgets}, limit)

    def measure(self, network: Network, measures: dict[str, Any], limit: Deadline) -> None:
        """Rows of the ways in `measures`."""
        job, known = network.planner.job, {row.way for row in network.rows}
        for way in measures:
            if way in known:
                continue
            if limit.is_over or self.deadline.is_over:
                print(f"{job.name} {way}: no time left", flush=True)
                return
            started = Row(job.name, way, job.size, error=NOT_FINISHED)
            self.log.add(started)
            try:
                network.host_speed = with_present_host(self.calibration).host.step / self.calibration.host.step
                row = network.judged(measures[way]())
            except Exception as error:
                row = replace(started, error=failure(error))
            network.rows.append(row)
            self.log.amend(row)
            self.done.append(row)
            print(line(row), flush=True)
            if row.error and self.device == "cuda":
                torch.cuda.synchronize()  # ends the process after an error that CUDA does not recover from

    def add(self, row: Row) -> None:
        """A row that is not one of the ways."""
        self.done.append(row)
        self.log.add(row)
        print(line(row), flush=True)


def summary(rows: Sequence[Row]) -> str:
    """How many predictions hold, the worst of each network, and which plans are slower than checkpointing or above their budget."""
    off = {(row.job, row.way): row.ratio - 1 for row in rows if row.ratio is not None}
    worst = {job: max((pair for pair in off.items() if pair[0][0] == job), key=lambda pair: abs(pair[1])) for job, _ in off}
    texts = [f"{job} {value:+.0%} ({way})" for job, ((_, way), value) in worst.items()]
    within = sum(abs(value) <= WITHIN for value in off.values())
    others = {"with the host as calibrated at the start": "ratio_at_start", "relative to the baseline": "relative_ratio"}
    peaks = {(row.job, row.way): (row.predicted_peak_bytes or 0) / row.peak_bytes - 1 for row in rows if row.peak_bytes}
    close = sum(abs(value) <= PEAK_WITHIN for value in peaks.values())
    far = [f"{job} {way} {value:+.1%}" for (job, way), value in peaks.items() if abs(value) > PEAK_WITHIN]
    compared = [row for row in rows if row.against]
    lines = [
        f"{within} of {len(off)} predicted times within {WITHIN:.0%}; the worst of each network: {', '.join(texts)}",
        "; ".join(f"{text}: {_num_within(rows, name)}" for text, name in others.items()),
        f"{close} of {len(peaks)} predicted peaks within {PEAK_WITHIN:.0%}; others: {', '.join(far) or 'none'}",
        f"{sum(row.is_slower for row in compared)} of {len(compared)} plans slower than what they are compared with: "
        + (", ".join(f"{row.job} {row.way} {row.against_ratio:.3f}x" for row in compared if row.is_slower) or "none"),
        "above their budgets: " + (", ".join(f"{row.job} {row.way}" for row in rows if row.is_over) or "none"),
    ]
    return "\n".join(lines)


def _num_within(rows: Sequence[Row], name: str) -> str:
    values: list[float] = [value for row in rows if (value := getattr(row, name)) is not None]
    return f"{sum(abs(value - 1) <= WITHIN for value in values)} of {len(values)} within {WITHIN:.0%}"


def line(row: Row) -> str:
    """One line of the table."""
    head = f"{row.job:16s} {row.way:36s} {row.num_checkpointed:2d} of {row.num_layers:2d} layers"
    if row.error or row.ratio is None or row.ratio_by_rates is None:
        return f"{head}  {row.error}"
    ms = lambda *seconds: " ".join("      -" if one is None else f"{1e3 * one:7.1f}" for one in seconds)  # noqa: E731
    predicted = ms(row.predicted_seconds, row.predicted_device_seconds, row.predicted_host_seconds)
    spread = ms(row.median_seconds, row.p20_seconds, row.p80_seconds, row.host_seconds)
    off = f" {(row.predicted_peak_bytes or 0) / row.peak_bytes - 1:+.1%}" if row.peak_bytes else ""
    budget = "" if row.budget_bytes is None else f" of {gib(row.budget_bytes)}{' OVER' * row.is_over}"
    beside = "".join("      -" if one is None else f" {one:5.2f}x" for one in (row.ratio_at_start, row.relative_ratio))
    against = f"  {row.against_ratio:.3f}x of {row.against}{' SLOWER' * row.is_slower}" if row.against_ratio is not None else ""
    peaks = f"{gib(row.peak_bytes)}{budget} ({gib(row.predicted_peak_bytes)}{off})"
    speed = "" if row.host_speed is None else f" at {row.host_speed:4.2f}"
    return f"{head} {peaks} {spread} | {predicted}{speed} {row.ratio:5.2f}x {row.ratio_by_rates:5.2f}x{beside}{against}"


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
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each way")
    parser.add_argument("--seconds", type=float, default=3600.0, help="no way begins after this many seconds")
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
    torch.backends.cudnn.benchmark = not options.quick
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("PAREDOWN_CACHE", folder)
        run = Run(options, device)
        print(
            "peak GiB of budget (predicted); ms: median, p20, p80, host | predicted: step, device, host, at a small step over that of the "
            "calibration; ratios: timed operations, rates, host as calibrated at the start, relative to the baseline; ratio to the "
            "quickest way without formats in the budget",
            flush=True,
        )
        for name, job in jobs_of(options).items():
            if run.deadline.is_over:
                print(f"{name}: no time left", flush=True)
                continue
            run.network(name, job)
        print(summary(run.done), flush=True)


if __name__ == "__main__":
    main()
