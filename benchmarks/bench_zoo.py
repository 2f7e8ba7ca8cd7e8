"""Steps of many networks, none of which paredown was tuned for, in 8 and 4 bits beside the unmodified step.

    python benchmarks/bench_zoo.py                                # one GPU with transformers: all networks, all ways
    python benchmarks/bench_zoo.py --model dit bert --ways compiled,int8 --predict
    python benchmarks/bench_zoo.py --quick --model vit            # small networks on the CPU: whether it runs, no figures
    python benchmarks/bench_zoo.py --quick --jobs 1 --warm 16 --ways eager,eager-int4,eager-int4/64@bf16:stochastic --out benchmarks/results

The networks are those of zoo_networks.py. Ways: compiled (plain torch.compile), int8 and int4 (the presets activations8 and activations4,
compiled by the session), eager, eager-int8 and eager-int4, all under bf16 autocast with fused AdamW; a format in place of a preset, and a
rounding behind it, are a plan for all activations. Ratios are to the unmodified step in
the same mode, in the same process, in turns (zoo_worker.py). --predict: the peaks of all steps, before they run.

Up to --jobs processes compile at the same time, one network each. A network whose ways are compiled is timed at once, while the processes
of all others are stopped; then the next one starts in its place. --within ends all: by then a network is timed with the ways that it has.
Rows are written network by network, and networks that the file has for the same commit, device and ways are not measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from bench_compile import Process, last_reply
from compile_worker import DeviceLock
from loops import Log, common_options
from zoo_networks import ZOO

from paredown.tables import Table

WORKER = Path(__file__).parent / "zoo_worker.py"
WAYS = ("compiled", "int8", "int4", "eager", "eager-int8", "eager-int4")
Rows = Mapping[tuple[str, str], Mapping[str, Any]]  # by network and way


@dataclass(frozen=True)
class Row:
    """One way of one network; None: not measured."""

    network: str
    kind: str
    way: str
    median_seconds: float | None = None
    gpu_seconds: float | None = None  # of the GPU alone
    host_seconds: float | None = None  # to issue a step
    compile_seconds: float | None = None  # the first forward and backward pass
    peak_bytes: int | None = None
    state_bytes: int | None = None  # of the peak: what is allocated between steps
    predicted_bytes: int | None = None
    stored_bytes: int | None = None
    error: float | None = None  # of the gradient, from that of a float32 step
    distance: float | None = None  # of the gradient, from that of the unmodified step in the same mode
    num_changes: int | None = None
    failure: str | None = None


def unmodified(way: str) -> str:
    """The way that a way is compared with."""
    return "eager" if way.startswith("eager") else "compiled"


# --- measuring ------------------------------------------------------------------------------------------------------------------------


@dataclass
class Queue:
    """Networks in order, of which up to `jobs` compile at the same time; at most one is timed, while all others are stopped."""

    options: argparse.Namespace
    device: str
    folder: Path
    begun: float = field(default_factory=time.perf_counter)
    stopped_seconds: float = 0.0
    replies: dict[Future[dict[str, Any]], tuple[str, Process]] = field(
        default_factory=dict[Future[dict[str, Any]], tuple[str, Process]]
    )

    def __post_init__(self) -> None:
        self._lock_file = self.folder / "device.lock"
        self.lock = DeviceLock(str(self._lock_file))

    @property
    def left(self) -> float:
        """Seconds until --within."""
        return self.options.within - (time.perf_counter() - self.begun)

    def measure(self, names: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (network, last reply) in the order in which networks are ready; those that do not begin in time are left out."""
        waiting = list(reversed(names))
        with ThreadPoolExecutor(self.options.jobs) as threads:
            try:
                while self.replies or (waiting and self.left > 0):
                    while waiting and len(self.replies) < self.options.jobs and self.left > 0:
                        self._start(waiting.pop(), threads)
                    for done in wait(self.replies, return_when=FIRST_COMPLETED).done:
                        name, process = self.replies.pop(done)
                        yield name, last_reply(name, process, self._timed(process, done.result()))
            finally:
                for _, process in self.replies.values():
                    process.kill()
                    process.end()

    def _start(self, name: str, threads: ThreadPoolExecutor) -> None:
        late = max(self.left - self.options.reserve, 1.0)
        request = {"network": name, "device": self.device, "ways": self.options.ways, "predicts": self.options.predict}
        request |= {"warm": self.options.warm, "deadline": late, "lock": str(self._lock_file)}
        num_threads = max(2, (os.cpu_count() or 2) // 2)  # processes compile kernels at different times
        process = Process([sys.executable, str(WORKER), json.dumps(request)], self.folder / name, num_threads)
        self.replies[threads.submit(process.reply, max(self.left, 1.0))] = name, process

    def _timed(self, process: Process, reply: dict[str, Any]) -> dict[str, Any]:
        """Return the reply of a process that takes its times, or the one that it has sent if it is not ready."""
        if not reply.get("ready"):
            return reply
        begun = time.perf_counter()
        with self.lock:  # so that no stopped process holds it, which the timed one may need
            self._signal(signal.SIGSTOP)
        try:
            process.go()
            return process.reply(max(self.left, 10.0))
        finally:
            self.stopped_seconds += time.perf_counter() - begun
            self._lock_file.write_text(f"{self.stopped_seconds:012.3f}")  # compile times are without them
            self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        for _, process in self.replies.values():
            with suppress(ProcessLookupError):
                os.killpg(process.popen.pid, number)


def measure(names: Sequence[str], device: str, options: argparse.Namespace) -> Iterator[Row]:
    """The rows of all networks that are measured in time."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for name, reply in Queue(options, device, Path(folder)).measure(names):
            failed = [{"way": way, "failure": reply.get("error")} for way in options.ways]
            for row in reply.get("rows", failed):
                yield Row(**{"network": name, "kind": ZOO[name].kind, **row})


def measured(runs: Sequence[Mapping[str, Any]], commit: str, device: str) -> dict[tuple[str, str], dict[str, Any]]:
    """The rows without a failure of this commit on this device."""
    found = [row for run in runs if (run["commit"], run["device"]) == (commit, device) for row in run["rows"]]
    return {(row["network"], row["way"]): row for row in found if row["failure"] is None}


# --- ratios ---------------------------------------------------------------------------------------------------------------------------


def activations(row: Mapping[str, Any]) -> float | None:
    """Bytes at the peak less those that are there between steps."""
    return row["peak_bytes"] - row["state_bytes"] if row.get("peak_bytes") else None


def to_unmodified(value: Callable[[Mapping[str, Any]], float | None]) -> Callable[[Rows, Mapping[str, Any]], float | None]:
    """The ratio of a value of a row to that of the unmodified step in the same mode."""

    def ratio(rows: Rows, row: Mapping[str, Any]) -> float | None:
        own, base = value(row), value(rows.get((row["network"], unmodified(row["way"])), {}))
        return own / base if own and base else None

    return ratio


def prediction(_: Rows, row: Mapping[str, Any]) -> float | None:
    """How far the predicted peak is from the measured one, as a part of it."""
    return abs(row["predicted_bytes"] / row["peak_bytes"] - 1) if row.get("predicted_bytes") and row.get("peak_bytes") else None


RATIOS: dict[str, Callable[[Rows, Mapping[str, Any]], float | None]] = {
    "whole step": to_unmodified(lambda row: row.get("median_seconds")),
    "GPU alone": to_unmodified(lambda row: row.get("gpu_seconds")),
    "peak": to_unmodified(lambda row: row.get("peak_bytes")),
    "peak less weights and state": to_unmodified(activations),
    "compile time": to_unmodified(lambda row: row.get("compile_seconds")),
    "gradient: distance from unmodified": lambda _, row: row.get("distance"),
    "gradient: error, to unmodified": to_unmodified(lambda row: row.get("error")),
    "predicted peak: distance from measured": prediction,
}


def summaries(rows: Rows) -> Iterator[tuple[str, str, int, float, float, float, str]]:
    """(way, what, count, median, 90th percentile, worst, the network of the worst) of every ratio."""
    for way in dict.fromkeys(way for _, way in rows):
        for what, ratio in RATIOS.items():
            found = [
                (value, name) for (name, other), row in rows.items() if other == way and (value := ratio(rows, row)) is not None
            ]
            if not found or (way == unmodified(way) and not what.startswith("predicted")):
                continue
            values = sorted(value for value, _ in found)
            tenth = values[min(int(0.9 * len(values)), len(values) - 1)]
            yield way, what, len(values), statistics.median(values), tenth, *max(found)


def summary_table(rows: Rows) -> Table:
    """Median, 90th percentile and worst of every ratio."""
    head = ("way", "", "networks", "median", "90 %", "worst", "of")
    lines = [(way, what, str(n), *(f"{x:.3f}" for x in numbers), name) for way, what, n, *numbers, name in summaries(rows)]
    return Table(head, lines, right=range(2, 6))


def number(value: float | None, scale: float = 1.0, digits: int = 2) -> str:
    """A number for a table."""
    return "-" if value is None else f"{value * scale:.{digits}f}"


def row_table(rows: Rows) -> Table:
    """All rows, with their ratios to the unmodified step."""
    head = (
        "network",
        "way",
        "ms",
        "ratio",
        "GPU ms",
        "host ms",
        "peak GiB",
        "ratio",
        "less state",
        "predicted",
        "compile s",
        "distance",
        "error",
    )
    lines: list[tuple[str, ...]] = []
    for (name, way), row in rows.items():
        if row["failure"]:
            lines.append((name, way, row["failure"].splitlines()[0][:80], *[""] * 10))
            continue
        step, _, peak, less, *_ = (ratio(rows, row) for ratio in RATIOS.values())
        guess = row["predicted_bytes"] / row["peak_bytes"] - 1 if row["predicted_bytes"] and row["peak_bytes"] else None
        lines.append((
            name, way, number(row["median_seconds"], 1e3), number(step), number(row["gpu_seconds"], 1e3), number(row["host_seconds"], 1e3),
            number(row["peak_bytes"], 2**-30), number(peak), number(less), "-" if guess is None else f"{guess:+.1%}",
            number(row["compile_seconds"], digits=0), number(row["distance"], digits=4), number(row["error"], digits=4),
        ))  # fmt: skip
    return Table(head, lines, right=range(3, 13))


# --- the command ----------------------------------------------------------------------------------------------------------------------


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = common_options(__doc__)
    parser.add_argument("--ways", type=lambda text: text.split(","), default=list(WAYS), help="separated by commas")
    parser.add_argument("--jobs", type=int, default=12, help="networks that compile at the same time")
    parser.add_argument("--within", type=float, default=500, help="seconds after which all processes are killed")
    parser.add_argument("--reserve", type=float, default=40, help="seconds before --within at which compilation ends")
    parser.add_argument("--predict", action="store_true", help="predict all peaks")
    parser.add_argument("--warm", type=int, default=0, help="unmodified steps before gradients are compared")
    options = parser.parse_args()
    unknown = [name for name in options.model or () if name not in ZOO]
    if unknown:
        parser.error(f"--model names {', '.join(unknown)}; there are {', '.join(ZOO)}")
    return options


def main() -> None:
    """Measure what is missing, write the rows, print them and their summary."""
    options = parsed()
    device = "cuda" if torch.cuda.is_available() and not options.quick else "cpu"
    options.quick = device == "cpu"  # no file unless --out names a folder
    log = Log("zoo.json", device, options)
    run = log.runs[-1]
    rows = measured(log.runs, run["commit"], run["device"])
    names = [name for name in options.model or ZOO if any((name, way) not in rows for way in options.ways)]
    for row in measure(names, device, options):
        log.add(row)
        rows[row.network, row.way] = log.rows[-1]
    print(row_table(rows), flush=True)
    print(summary_table(rows), flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the processes, too
    main()
