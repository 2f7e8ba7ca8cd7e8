"""Language models beside other libraries: peak memory, step time, largest length, and losses; rows in results/language.json.

    python benchmarks/bench_language.py predict                           # peaks, without a GPU: results/language_predictions.json
    python benchmarks/bench_language.py lora full gpt2 loss --largest     # one GPU; Liger, PEFT and bitsandbytes from the folder peers/
    python benchmarks/bench_language.py lora-32k lora-110k lora-150k      # long texts; the last two within 24 GiB
    python benchmarks/bench_language.py full-8GiB                         # training of `full` within 8 GiB
    python benchmarks/bench_language.py lora_accuracy --data folder --states folder   # of the models that train_long.py has trained
    python benchmarks/bench_language.py --only lora:paredown,gpt2         # some rows; a job alone is all of its rows
    python benchmarks/bench_language.py --quick                           # tiny shapes on the CPU: whether it runs, no figures

The jobs and their ways are in language_steps.py, language_loss.py and language_training.py. Each row has a process of its own
(language_worker.py). Up to --jobs of them build their models and run their first steps at the same time, as many as the memory of the GPU
allows, then they take their times one after the other, and after that they search for their largest lengths, if that is asked for. Rows
that the file has for the same commit and device are not measured again.
Predictions are read from language_predictions.json in --out, or else in results.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from bench_compile import milliseconds, predicted, run_batch
from language_loss import LOSSES
from language_steps import JOBS, import_peers
from language_steps import predicted as prediction
from language_training import TOKENS, TRAININGS, packed_texts, write_tokens
from language_verdicts import loss_table, verdict_table
from loops import Log, failure, gib, training_options
from measure import RESULTS, version

from paredown.tables import Table

WORKER = Path(__file__).parent / "language_worker.py"
FILE, PREDICTIONS = "language.json", "language_predictions.json"
WAYS = {"loss": tuple(LOSSES), **{name: tuple(way.name for way in job.ways) for name, job in JOBS.items()}, **TRAININGS}
STEPS = ("lora", "lora-32k", "lora-110k", "lora-150k", "full", "full-8GiB", "gpt2", "loss")  # jobs without seeds
PREPARED_GIB = {
    "lora": 22, "lora-32k": 24, "lora-110k": 26, "lora-150k": 26, "full": 14, "full-8GiB": 9, "gpt2": 21, "loss": 26,
}  # of a process: gpt2 on average, others at most  # fmt: skip
LIMIT_GIB = 130  # for all processes together
SEEDS, QUICK_SEEDS = (0, 1, 2), (0,)
PEERS = ("liger-kernel", "peft", "bitsandbytes")


@dataclass(frozen=True)
class Cell:
    """One row to measure."""

    job: str
    way: str
    seed: int | None = None
    is_named: bool = False  # in --only, with its way

    @property
    def key(self) -> tuple[str, str, int | None]:
        """What a row is found by."""
        return self.job, self.way, self.seed

    @property
    def name(self) -> str:
        """Its name in print."""
        return f"{self.job}:{self.way}" + ("" if self.seed is None else f":{self.seed}")


@dataclass(frozen=True)
class Row:
    """One way of one job; None: not measured."""

    job: str
    way: str
    seed: int | None = None
    shape: tuple[int, ...] | None = None  # examples and tokens; of the loss alone: tokens, classes and hidden size
    peak_bytes: int | None = None
    predicted_bytes: int | None = None  # of the peak, before the first step
    base_bytes: int | None = None  # frozen weights in their stored formats
    model_bytes: int | None = None  # weights, optimizer state and gradients in their stored formats
    predicted_model_bytes: int | None = None
    reserved_bytes: int | None = None
    limit_bytes: int | None = None
    left_bytes: int | None = None  # more than before, after the tries of the largest length
    median_seconds: float | None = None  # of trainings: the mean
    p20_seconds: float | None = None
    p80_seconds: float | None = None
    host_seconds: float | None = None
    compile_seconds: float | None = None  # the first step
    first_loss: float | None = None
    last_loss: float | None = None
    num_steps: int | None = None
    num_changes: int | None = None
    largest_length: int | None = None
    largest_peak_bytes: int | None = None
    largest_seconds: float | None = None
    largest_tries: tuple[tuple[int, bool], ...] | None = None
    validation_loss: float | None = None
    validation_losses: tuple[tuple[int, float], ...] | None = None  # after so many steps
    note: str | None = None
    skipped: str | None = None
    error: str | None = None


Rows = dict[tuple[str, str, int | None], dict[str, Any]]


# --- which rows -------------------------------------------------------------------------------------------------------


def selected(jobs: Sequence[str], only: str | None, seeds: Sequence[int]) -> list[Cell]:
    """The rows that `only` names (job:way or job, by commas), or else all rows of these jobs; trainings once for each seed."""
    texts = [part.strip() for part in only.split(",") if part.strip()] if only else list(jobs)
    cells: list[Cell] = []
    for text in texts:
        job, _, way = text.partition(":")
        if job not in WAYS or (way and way not in WAYS[job]):
            known = ", ".join(WAYS) if job not in WAYS else ", ".join(f"{job}:{name}" for name in WAYS[job])
            raise SystemExit(f"--only names {text!r}; there are {known}")
        for name in (way,) if way else WAYS[job]:
            cells += [Cell(job, name, seed, bool(way)) for seed in (seeds if job in TRAININGS else (None,))]
    return list(dict.fromkeys(cells))


def measured(runs: Iterable[Mapping[str, Any]], commit: str, device: str) -> Rows:
    """The last rows of this commit on this device; one with an error, or skipped, replaces none."""
    found: Rows = {}
    for run in runs:
        if (run["commit"], run["device"]) == (commit, device):
            for row in run["rows"]:
                key = (row["job"], row["way"], row.get("seed"))
                if key not in found or not (row.get("error") or row.get("skipped")):
                    found[key] = row
    return found


def is_done(row: Mapping[str, Any] | None, options: argparse.Namespace) -> bool:
    """Whether a row needs no measurement."""
    if row is None or row.get("error") or row.get("skipped"):
        return False
    return not (options.largest and row["job"] == "lora" and row.get("largest_length") is None)


def batches(cells: Sequence[Cell], num_jobs: int, limit_gib: float = LIMIT_GIB) -> list[list[Cell]]:
    """The rows in their order, those of one job together, cut where one more would be more than `num_jobs` or would not fit."""
    found: list[list[Cell]] = []
    for cell in cells:
        last = found[-1] if found else []
        most = int(limit_gib / PREPARED_GIB.get(cell.job, 6))
        if last and last[-1].job == cell.job and len(last) < min(num_jobs, most):
            last.append(cell)
        else:
            found.append([cell])
    return found


# --- measuring --------------------------------------------------------------------------------------------------------


def known_length(way: str, path: Path = RESULTS / FILE) -> int | None:
    """The largest length that the last run in a file found for this way of `lora`."""
    runs = json.loads(path.read_text()) if path.exists() else []
    rows = [row for run in runs for row in run["rows"] if (row["job"], row["way"]) == ("lora", way)]
    return next((row["largest_length"] for row in reversed(rows) if row.get("largest_length")), None)


def command_of(cell: Cell, device: str, options: argparse.Namespace) -> list[str]:
    """The command line of a row's process."""
    request = {
        "job": cell.job, "way": cell.way, "seed": cell.seed, "device": device, "is_quick": options.quick, "is_named": cell.is_named,
        "num_steps": 3 if options.quick else options.steps, "largest": options.largest, "states": str(options.states),
        "begin": known_length(cell.way),
    }  # fmt: skip
    return [sys.executable, str(WORKER), json.dumps(request)]


def measure(cells: Sequence[Cell], device: str, options: argparse.Namespace) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """(row, reply) in the order of measurement, batch after batch."""
    for batch in batches(cells, options.jobs):
        print(f"at the same time: {', '.join(cell.name for cell in batch)}", flush=True)
        by_name = {cell.name: cell for cell in batch}
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            commands = {name: command_of(cell, device, options) for name, cell in by_name.items()}
            for name, reply in run_batch(commands, Path(folder), options.limit):
                yield by_name[name], reply


def row_of(cell: Cell, reply: Mapping[str, Any], predictions: Mapping[str, Any]) -> Row:
    """A row with what the process replied, and with its prediction."""
    known = {field.name for field in fields(Row)}
    guess = predictions.get(cell.name, {})
    guess = {name: guess.get(name) for name in ("predicted_bytes", "predicted_model_bytes")}
    return Row(cell.job, cell.way, cell.seed, **guess, **{k: v for k, v in reply.items() if k in known})


# --- predictions ------------------------------------------------------------------------------------------------------


def predict(options: argparse.Namespace) -> None:
    """Write the predicted peaks of all steps that are ours or unmodified, on any machine; --only names some, which replace theirs."""
    path = (options.out or RESULTS) / PREDICTIONS
    names = {cell.name for cell in selected(STEPS[:-1], options.only, ())}
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for job in JOBS.values():
        for way in job.ways:
            name = f"{job.name}:{way.name}"
            if way.is_peer or name not in names:
                continue
            try:
                found[name] = prediction(job, way, is_quick=options.quick)
            except Exception as error:
                found[name] = {"error": failure(error)}
            shown = gib(found[name].get("predicted_bytes"))
            print(f"{name:32s} {shown} GiB  {found[name].get('error', '')}", flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")


def read_predictions(options: argparse.Namespace) -> dict[str, Any]:
    """Predictions by name of the row; none for a quick run."""
    paths = [folder / PREDICTIONS for folder in (options.out, RESULTS) if folder is not None]
    return next((json.loads(path.read_text()) for path in paths if path.exists()), {}) if not options.quick else {}


# --- the tables -------------------------------------------------------------------------------------------------------


def step_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """One line of the table of steps."""
    name = (row["job"], row["way"])
    if row["error"] or row["skipped"]:
        return (*name, *("",) * 7, (row["error"] or f"skipped: {row['skipped']}").splitlines()[0][:100])
    bytes_used = (gib(row[key]).strip() for key in ("peak_bytes", "base_bytes", "model_bytes"))
    losses = " to ".join(f"{row[key]:.3f}" for key in ("first_loss", "last_loss") if row[key] is not None)
    largest = "" if row["largest_length"] is None else str(row["largest_length"])
    return (*name, *bytes_used, predicted(row), *milliseconds(row), largest, f"{losses} {row['note'] or ''}".strip())


def step_table(rows: Rows) -> Table:
    """Steps: peaks, base and model memory in GiB, times in ms."""
    head = ("job", "way", "peak", "base", "model", "predicted", "ms", "p20 - p80", "largest", "loss")
    return Table(head, [step_cells(row) for key, row in rows.items() if key[0] in STEPS], right=range(2, 9))


def print_tables(rows: Rows, cells: Iterable[Cell], *, is_quick: bool) -> None:
    """Steps, losses, and what they must show unless the run is quick."""
    jobs = {cell.job for cell in cells}
    found = {key: row for key, row in rows.items() if key[0] in jobs}
    found = dict(sorted(found.items(), key=lambda item: (list(WAYS).index(item[0][0]), WAYS[item[0][0]].index(item[0][1]))))
    if jobs & set(STEPS):
        print(step_table(found), flush=True)
        print("" if is_quick else f"\n{verdict_table(found)}", flush=True)
    if jobs & set(TRAININGS):
        print(loss_table(found), flush=True)
    for row in found.values():
        if row["job"] in TRAININGS and row["error"]:
            print(f"{row['job']}:{row['way']}:{row['seed']}: {row['error']}")
    skipped = [row for row in found.values() if row["skipped"]]
    print(
        f"{len(found)} rows, {sum(bool(row['error']) for row in found.values())} with an error, {len(skipped)} skipped", flush=True
    )


# --- the command ------------------------------------------------------------------------------------------------------


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = training_options(__doc__)
    parser.add_argument("job", nargs="*", choices=[[], *WAYS, "predict"], help="what to measure; without any, all")
    parser.add_argument("--only", help="rows by job:way, or all rows of a job, separated by commas")
    parser.add_argument("--largest", action="store_true", help="of lora: the largest length in 24 GiB, too")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), help="of trainings")
    parser.add_argument("--jobs", type=int, default=6, help="processes at the same time")
    parser.add_argument("--limit", type=float, default=560, help="seconds after which a process is killed")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each row")
    parser.add_argument("--states", type=Path, help="folder of the states of trainings: states in --out")
    return parser.parse_args()


def run(options: argparse.Namespace, device: str) -> None:
    """Measure what is missing, write the rows, print the tables."""
    cells = selected(options.job or list(WAYS), options.only, QUICK_SEEDS if options.quick else options.seeds)
    if not options.quick and any(cell.job in TRAININGS for cell in cells):
        write_tokens(packed_texts(options.data), options.states / TOKENS)
    log = Log(FILE, device, options)
    log.runs[-1]["versions"] |= {name: version(name) for name in PEERS}
    rows = measured(log.runs, log.runs[-1]["commit"], log.runs[-1]["device"])
    predictions = read_predictions(options)
    for cell, reply in measure([cell for cell in cells if not is_done(rows.get(cell.key), options)], device, options):
        log.add(row_of(cell, reply, predictions))
        rows[cell.key] = log.rows[-1]
        outcome = reply.get("error") or reply.get("skipped") or f"{reply.get('median_seconds') or 0:.4f} s"
        print(f"{cell.name}: {outcome}", flush=True)
    print_tables(rows, cells, is_quick=options.quick)


def main() -> None:
    """Predict or measure."""
    options = parsed()
    import_peers()
    if options.job == ["predict"]:
        predict(options)
        return
    device = "cuda" if torch.cuda.is_available() and not options.quick else "cpu"
    options.quick = device == "cpu"  # no file unless --out names a folder
    with tempfile.TemporaryDirectory() as folder:
        options.states = options.states or (options.out / "states" if options.out else Path(folder) / "states")
        run(options, device)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the processes, too
    main()
