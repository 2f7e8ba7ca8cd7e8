"""Compiled training steps with packed activations beside plain torch.compile: step time, peak memory, compile time.

    python benchmarks/bench_compile.py                                    # one GPU; torchvision and transformers installed
    python benchmarks/bench_compile.py --only resnet50:int8,gpt2:compiled # some rows; `resnet50` alone is all of its rows
    python benchmarks/bench_compile.py --losses --batch                   # losses after 100 steps; the largest batch in 16 GiB
    python benchmarks/bench_compile.py --quick                            # a toy on the CPU: whether it runs, no figures

Ways: compiled (plain torch.compile, the baseline of all ratios), budget=0.8, 0.5 and 0.3 (torch's activation_memory_budget), int8 and
int4 (`pare.apply(plan, model).compile()` with the plans of bench_session.py), eager; on request also recompute (a plan that packs nothing),
fit=6.6 (the plan that `assign` makes of these formats for the compiled step in so many GiB), eager-int8, eager-int4 and joins like
int8+budget=0.6. All under bf16 autocast with fused AdamW. --predict traces each compiled step first, and predicts its peak.

Each row has a process of its own with empty compile caches (compile_worker.py). Up to --jobs processes compile and warm up at the same
time, as many as the memory of the GPU allows; when the last of them is ready they take their times one after the other, and each exits
before the next begins. Compile seconds are those of the first step, with --jobs - 1 other processes on the same cores: compare them
within a run, or measure with --jobs 1. Rows are written one by one, and those that the file has for the same commit and device are not
measured again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from threading import Timer
from typing import Any

import torch
from compile_worker import Way
from loops import Log, common_options, gib

from paredown.tables import Table

WORKER = Path(__file__).parent / "compile_worker.py"
STEP_WAYS = ("compiled", "budget=0.8", "budget=0.5", "budget=0.3", "int8", "uint4", "int4", "eager")
LIMIT_GIB = 130  # for all processes together
PACKED_SHARE = 0.65  # of the peak, with packed activations
OVERHEAD_GIB = 1.5  # a process beyond its peak: CUDA context, workspaces, memory that the allocator holds back
TRAINING_STEPS = 100
QUICK = "toy:compiled,toy:int8,toy:int4,toy:eager"


@dataclass(frozen=True)
class Case:
    """One network and what is measured of it: steps, losses or largest. Rough peaks decide which rows are prepared at the same time."""

    job: str
    kind: str
    eager_gib: float
    compiled_gib: float
    ways: tuple[str, ...] = STEP_WAYS


CASES = (
    Case("resnet50", "steps", 11, 11),
    Case("vit_b_16", "steps", 10, 10),
    Case("gpt2", "steps", 24, 13),
    Case("llama", "steps", 17, 13),
    Case("unet", "steps", 2, 2),
    Case("toy", "steps", 1, 1, ways=()),  # on request
    Case("resnet18-losses", "losses", 2, 2, ways=("compiled", "int8", "int4")),
    Case("gpt-losses", "losses", 2, 2, ways=("compiled", "int8", "int4")),
    Case("toy-losses", "losses", 1, 1, ways=()),  # on request
    Case("resnet50-largest", "largest", 20, 20, ways=("compiled", "int8", "int4", "eager")),
)


@dataclass(frozen=True)
class Cell:
    """One row to measure."""

    case: Case
    way: str

    @property
    def name(self) -> str:
        """As --only has it."""
        return f"{self.case.job}:{self.way}"

    @property
    def gib(self) -> float:
        """Memory that its process may need at most, roughly."""
        share = PACKED_SHARE if "int" in self.way else 1.0
        return OVERHEAD_GIB + share * (self.case.eager_gib if Way.parse(self.way).is_eager else self.case.compiled_gib)


@dataclass(frozen=True)
class Row:
    """One way of one job; None: not measured."""

    job: str
    way: str
    kind: str = "steps"
    size: int | None = None
    shape: tuple[int, ...] | None = None
    peak_bytes: int | None = None
    predicted_bytes: int | None = None  # of the peak, before the first step
    reserved_bytes: int | None = None
    limit_bytes: int | None = None
    stored_bytes: int | None = None
    median_seconds: float | None = None
    p20_seconds: float | None = None
    p80_seconds: float | None = None
    host_seconds: float | None = None  # to issue one step
    compile_seconds: float | None = None  # the first step, with empty caches
    num_at_once: int | None = None  # processes that compiled at the same time
    first_loss: float | None = None
    last_loss: float | None = None
    num_changes: int | None = None
    num_steps: int | None = None  # of a training
    losses: tuple[float, ...] | None = None  # after a training, one for each seed
    error: str | None = None


# --- which rows, and when ---------------------------------------------------------------------------------------------


def selected(only: str | None, kinds: Iterable[str], jobs: Sequence[str] | None = None) -> list[Cell]:
    """The rows that `only` names (job:way or job, by commas), or else all rows of these kinds, of these jobs alone if given."""
    by_name = {case.job: case for case in CASES}
    if only is None:
        asked = [case for case in CASES if case.kind in kinds and (jobs is None or case.job in jobs)]
        return [Cell(case, way) for case in asked for way in case.ways]
    cells: list[Cell] = []
    for text in filter(None, (part.strip() for part in only.split(","))):
        job, _, way = text.partition(":")
        if job not in by_name:
            raise SystemExit(f"--only names the job {job!r}; there are {', '.join(by_name)}")
        case = by_name[job]
        cells += [Cell(case, name) for name in ([way] if way else case.ways or ("compiled",))]
    return list(dict.fromkeys(cells))


def measured(runs: Sequence[Mapping[str, Any]], commit: str, device: str) -> dict[tuple[str, str], dict[str, Any]]:
    """(job, way) -> the last row of this commit on this device; a row without an error is not replaced by one with an error."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for run in runs:
        if (run["commit"], run["device"]) == (commit, device):
            for row in run["rows"]:
                key = (row["job"], row["way"])
                if row["error"] is None or key not in found:
                    found[key] = row
    return found


def batches(cells: Sequence[Cell], num_jobs: int, limit_gib: float = LIMIT_GIB) -> list[list[Cell]]:
    """The rows in their order, cut where one more would be more than `num_jobs` or would not fit; a row that never fits is alone."""
    found: list[list[Cell]] = []
    for cell in cells:
        last = found[-1] if found else []
        is_full = len(last) == num_jobs or sum(one.gib for one in last) + cell.gib > limit_gib
        if not last or is_full or last[-1].case.kind != cell.case.kind:
            found.append([cell])
        else:
            last.append(cell)
    return found


# --- processes --------------------------------------------------------------------------------------------------------


class Process:
    """A worker that prepares one row. Its replies are lines of JSON; what it prints otherwise is in `log`."""

    def __init__(self, command: Sequence[str], folder: Path, num_threads: int) -> None:
        folder.mkdir(parents=True)
        self.log = folder / "log.txt"
        caches = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton")}
        env = {**os.environ, **caches, "TORCHINDUCTOR_COMPILE_THREADS": str(num_threads)}
        with self.log.open("w") as log:
            self.popen = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=env, text=True, process_group=0
            )
        self.is_late = self.is_ended = False

    def reply(self, limit_seconds: float) -> dict[str, Any]:
        """The next reply; one with an error if the process ends or the limit passes without it."""
        timer = Timer(limit_seconds, self.kill, (True,))
        timer.start()
        try:
            assert self.popen.stdout is not None
            line = self.popen.stdout.readline()
        finally:
            timer.cancel()
        if line:
            return json.loads(line)
        status = self.popen.wait()
        why = f"killed after {limit_seconds:g} s" if self.is_late else f"the process ended with status {status}"
        return {"error": f"{why}: {self.tail(1)}"}

    def go(self) -> None:
        """Let the process take its times."""
        assert self.popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.popen.stdin.write("go\n")
            self.popen.stdin.flush()

    def kill(self, is_late: bool = False) -> None:
        """End the process and those that it started."""
        self.is_late = self.is_late or is_late
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill the process if it runs, and close its pipes; a second call does nothing."""
        if self.is_ended:
            return
        self.is_ended = True
        self.kill()
        self.popen.wait()
        for pipe in (self.popen.stdin, self.popen.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def tail(self, num_lines: int) -> str:
        """The last lines of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-num_lines:])


def known_peaks(cell: Cell, rows: Mapping[tuple[str, str], Mapping[str, Any]]) -> dict[int, int]:
    """The peak of the step that the search for the largest batch of a row begins with, if it is measured."""
    row = rows.get((cell.case.job.split("-")[0], cell.way), {}) if cell.case.kind == "largest" else {}
    return {row["size"]: row["peak_bytes"]} if row.get("peak_bytes") else {}


def command_of(cell: Cell, device: str, options: argparse.Namespace, lock: Path, known: Mapping[int, int]) -> list[str]:
    """The command line of a row's process."""
    count = TRAINING_STEPS if cell.case.kind == "losses" else options.steps
    way = Way.parse(cell.way)
    predicts = options.predict and not way.is_eager and way.budget is None  # traces have neither
    request = {
        "job": cell.case.job,
        "way": cell.way,
        "kind": cell.case.kind,
        "device": device,
        "num_steps": count,
        "lock": str(lock),
        "predicts": predicts,
        "known": known,
    }
    return [sys.executable, str(WORKER), json.dumps(request)]


def run_batch(commands: Mapping[str, Sequence[str]], folder: Path, limit_seconds: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """Start all commands; when each is ready or has failed, let one after the other take its times. Yields (name, reply).

    A process that is ready once more after its times runs again when all others have taken theirs.
    """
    num_threads = max(2, math.ceil((os.cpu_count() or 2) / len(commands)))
    processes: dict[str, Process] = {}
    with ThreadPoolExecutor(len(commands)) as threads:
        try:
            for number, (name, command) in enumerate(commands.items()):
                processes[name] = Process(command, folder / str(number), num_threads)
            replies = threads.map(lambda one: one.reply(limit_seconds), processes.values())
            waiting = dict(zip(processes, list(replies), strict=True))
            while waiting:
                for name in list(waiting):
                    waiting[name] = timed_reply(processes[name], waiting[name], limit_seconds)
                    if not waiting[name].get("ready"):
                        yield name, last_reply(name, processes[name], waiting.pop(name))
        finally:
            for process in processes.values():
                process.end()


def timed_reply(process: Process, reply: dict[str, Any], limit_seconds: float) -> dict[str, Any]:
    """The next reply of a process that is ready, or the one that it has sent."""
    if not reply.get("ready"):
        return reply
    process.go()
    return process.reply(limit_seconds)


def last_reply(name: str, process: Process, reply: dict[str, Any]) -> dict[str, Any]:
    """The last reply of a process, which has ended then; the end of its log is printed if it failed."""
    if reply.get("error"):
        print(f"{name}: {process.tail(25)}", flush=True)
    process.end()
    return reply


def row_of(cell: Cell, reply: Mapping[str, Any], num_at_once: int) -> Row:
    """A row with what the process replied."""
    known = {field.name for field in fields(Row)}
    return Row(cell.case.job, cell.way, cell.case.kind, num_at_once=num_at_once, **{k: v for k, v in reply.items() if k in known})


def measure(
    cells: Sequence[Cell], device: str, options: argparse.Namespace, rows: Mapping[tuple[str, str], Mapping[str, Any]]
) -> Iterator[Row]:
    """Rows in the order of measurement, batch after batch; `rows`: those that are measured."""
    for batch in batches(cells, options.jobs):
        print(f"at the same time: {', '.join(cell.name for cell in batch)}", flush=True)
        by_name = {cell.name: cell for cell in batch}
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            lock = Path(folder) / "device.lock"
            commands = {name: command_of(cell, device, options, lock, known_peaks(cell, rows)) for name, cell in by_name.items()}
            for name, reply in run_batch(commands, Path(folder), options.limit):
                yield row_of(by_name[name], reply, len(batch))


# --- the tables -------------------------------------------------------------------------------------------------------


def ratio(value: float | None, baseline: float | None) -> str:
    """A ratio for a table."""
    return f"{value / baseline:.3f}x" if value and baseline else "-"


def number(value: float | None, digits: int = 1) -> str:
    """A number for a table."""
    return "-" if value is None else f"{value:.{digits}f}"


def milliseconds(row: Mapping[str, Any]) -> tuple[str, str]:
    """Median, and the 20th and 80th percentile."""
    median, low, high = (row[name] and 1e3 * row[name] for name in ("median_seconds", "p20_seconds", "p80_seconds"))
    return number(median, 2), f"{number(low, 2)} - {number(high, 2)}"


def predicted(row: Mapping[str, Any]) -> str:
    """The predicted peak beside the measured one."""
    guess, peak = row.get("predicted_bytes"), row["peak_bytes"]
    return f"{gib(guess).strip()} ({guess / peak - 1:+.1%})" if guess and peak else ""


def step_cells(row: Mapping[str, Any], plain: Mapping[str, Any]) -> tuple[str, ...]:
    """One line of the table of steps."""
    name = (row["job"], row["way"], str(row["size"] or ""))
    if row["error"]:
        return (*name, *("",) * 9, row["error"].splitlines()[0][:80])  # in the last column
    stored, changes = row["stored_bytes"], row["num_changes"]
    return (
        *name, *milliseconds(row), ratio(row["median_seconds"], plain.get("median_seconds")), gib(row["peak_bytes"]).strip(),
        ratio(row["peak_bytes"], plain.get("peak_bytes")), predicted(row), number(row["compile_seconds"]),
        "" if stored is None else gib(stored).strip(), "" if changes is None else str(changes), number(row["last_loss"], 4),
    )  # fmt: skip


def step_table(rows: Mapping[tuple[str, str], Mapping[str, Any]]) -> Table:
    """Steps, with ratios to plain torch.compile."""
    measured = ("ms", "p20 - p80", "ratio", "peak GiB", "ratio", "predicted", "compile s")
    head = ("job", "way", "batch", *measured, "stored GiB", "changes", "loss")
    return Table(head, [step_cells(row, rows.get((job, "compiled"), {})) for (job, _), row in rows.items()], right=range(2, 12))


def largest_table(rows: Mapping[tuple[str, str], Mapping[str, Any]]) -> Table:
    """The largest batches, with the ratios of examples per second to plain eager and plain torch.compile."""
    speeds = {key: row["size"] / row["median_seconds"] for key, row in rows.items() if row["median_seconds"]}
    lines = [
        (job, way, str(row["size"] or row["error"]), gib(row["peak_bytes"]).strip(), number(speeds.get((job, way))),
         *(ratio(speeds.get((job, way)), speeds.get((job, base))) for base in ("eager", "compiled")))
        for (job, way), row in rows.items()
    ]  # fmt: skip
    return Table(("job", "way", "batch", "peak GiB", "examples/s", "x eager", "x compiled"), lines, right=range(2, 7))


def loss_table(rows: Mapping[tuple[str, str], Mapping[str, Any]]) -> Table:
    """Mean and standard deviation of the losses over seeds."""
    lines: list[tuple[str, ...]] = []
    for (job, way), row in rows.items():
        losses = row["losses"] or ()
        spread = (number(statistics.mean(losses), 4), number(statistics.stdev(losses), 4)) if len(losses) > 1 else ("-", "-")
        lines.append((job, way, *spread, row["error"] or " ".join(number(loss, 4) for loss in losses)))
    return Table(("job", "way", "mean loss", "standard deviation", "each seed"), lines, right=(2, 3))


TABLES = {"steps": step_table, "largest": largest_table, "losses": loss_table}


def print_tables(rows: Mapping[tuple[str, str], Mapping[str, Any]], cells: Iterable[Cell]) -> None:
    """A table of each kind among the rows of the jobs in `cells`, in the order of CASES."""
    jobs = {cell.case.job for cell in cells}
    order = [case.job for case in CASES]
    for kind, table in TABLES.items():
        found = {key: row for key, row in rows.items() if row["kind"] == kind and key[0] in jobs}
        if found:
            print(table(dict(sorted(found.items(), key=lambda item: order.index(item[0][0])))), flush=True)


# --- the command ------------------------------------------------------------------------------------------------------


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = common_options(__doc__)
    parser.add_argument("--only", help="rows by job:way, or all rows of a job, separated by commas")
    parser.add_argument("--losses", action="store_true", help="losses after 100 steps instead of the steps")
    parser.add_argument("--batch", action="store_true", help="the largest batch of ResNet-50 in 16 GiB instead of the steps")
    parser.add_argument("--jobs", type=int, default=6, help="processes that compile at the same time")
    parser.add_argument("--limit", type=float, default=400, help="seconds after which a process is killed")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each row")
    parser.add_argument("--predict", action="store_true", help="predict the peaks of compiled steps, too")
    parser.add_argument("--resume", action=argparse.BooleanOptionalAction, default=True, help="skip rows that the file has")
    parser.add_argument("--retry", action="store_true", help="measure rows again that the file has with an error")
    return parser.parse_args()


def main() -> None:
    """Measure what is missing, write the rows, print the tables."""
    options = parsed()
    device = "cuda" if torch.cuda.is_available() and not options.quick else "cpu"
    kinds = [kind for kind, asked in (("losses", options.losses), ("largest", options.batch)) if asked] or ["steps"]
    cells = selected(options.only or (QUICK if options.quick else None), kinds, options.model)
    options.quick = device == "cpu"  # no file unless --out names a folder
    log = Log("compile.json", device, options)
    run = log.runs[-1]
    rows = measured(log.runs, run["commit"], run["device"])
    done = {key for key, row in rows.items() if options.resume and not (options.retry and row["error"])}
    for row in measure([cell for cell in cells if (cell.case.job, cell.way) not in done], device, options, rows):
        log.add(row)
        rows[row.job, row.way] = log.rows[-1]
    print_tables(rows, cells)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the processes, too
    main()
