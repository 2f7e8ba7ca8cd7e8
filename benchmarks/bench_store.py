"""What the store and a process of its own add to a trial: rows in results/store.json.

    python benchmarks/bench_store.py                                   # SQLite in a new file of --folder
    python benchmarks/bench_store.py --postgres postgresql://...       # and a PostgreSQL database, which should be empty
    python benchmarks/bench_store.py --postgres postgresql://... --only server     # many workers and heartbeats on that server alone

Trials do nothing, so that what is measured is all overhead: the transaction that writes a result and claims the next trial (one worker,
one call after the other); 8, 16 and 64 long-lived workers on one store, seconds of a whole run by the number of trials, five runs; a
heartbeat of one worker among many; 128 workers with trials of five seconds, what each trial takes longer than that; and a process for each
trial, forked from the server that has torch imported, from start to result.

128 workers need `max_connections` of 270 or more: each worker has two connections, one of them for its heartbeat.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from uuid import uuid4

from measure import append, machine
from sqlalchemy import text

from paredown.plan.plan import Plan
from paredown.study.sweeps.database import parse_address
from paredown.study.sweeps.engines.engine import InlineEngine, LocalEngine, RunTrial
from paredown.study.sweeps.status import count
from paredown.study.sweeps.store import Store
from paredown.study.sweeps.sweep import EndedTrial, Sweep, TrialSpec
from paredown.study.sweeps.worker import WorkerOptions, work
from paredown.study.tasks.trial import Status, Trial

PACKAGES = ("sqlalchemy", "psycopg", "torch")
NAMES = {8: "eight", 16: "16", 64: "64"}  # numbers of workers on PostgreSQL; SQLite has one writer, and is measured with eight
NUM_RUNS = 5
NUM_BEATING = (16, 256, 1024)
NUM_BEATS = 200
NUM_NAPPING, NAP_SECONDS, NUM_NAPS = 128, 5.0, 5


@dataclass(frozen=True)
class Row:
    """Seconds of one trial, all of them overhead; for several workers one figure for each run."""

    job: str
    who: str
    num_trials: int
    median_seconds: float
    p20_seconds: float
    p80_seconds: float


def noop(spec: TrialSpec) -> Trial:
    """A trial that trains nothing; its curve is that of a real one."""
    curve = tuple((step, 1.0 / step) for step in range(1, 101))
    return Trial(spec.task, spec.plan, spec.seed, Status.DONE, error=0.1, loss=0.2, seconds=1.0, curve=curve)


def filled(address: str, num_trials: int) -> tuple[Store, str]:
    """A store with a new sweep of so many trials."""
    store, name = Store(address), uuid4().hex[:8]
    store.add(name, Sweep(name, ("noop",), (Plan.preset("lpmm"),), tuple(range(num_trials))).draw())
    return store, name


def one_worker(address: str, num_trials: int) -> Row:
    """A result written and the next trial claimed, in one transaction."""
    store, name = filled(address, num_trials)
    seconds: list[float] = []
    claims = store.claim("bench", 1, sweep=name)
    while claims:
        ended = [EndedTrial(claim, noop(claim.spec)) for claim in claims]
        start = time.perf_counter()
        _, claims = store.exchange("bench", ended, 1, sweep=name)
        seconds.append(time.perf_counter() - start)
    store.leave("bench")
    return row("write a result and claim the next", address, seconds)


def many_workers(address: str, num_trials: int, num_workers: int) -> Row:
    """Several processes on one store, NUM_RUNS times."""
    seconds = [one_run(address, num_trials, num_workers) for _ in range(NUM_RUNS)]
    return replace(row(f"{NAMES[num_workers]} long-lived workers", address, seconds), num_trials=num_trials)


def one_run(address: str, num_trials: int, num_workers: int, run: RunTrial = noop) -> float:
    """Seconds of the run by its number of trials, from the moment that all processes are ready."""
    store, name = filled(address, num_trials)
    store.close()  # no connection is shared with the processes that are forked
    context = get_context("fork")
    ready, go = context.Semaphore(0), context.Event()
    workers = [context.Process(target=long_lived, args=(address, name, run, ready, go)) for _ in range(num_workers)]
    for worker in workers:
        worker.start()
    for _ in workers:
        ready.acquire()
    store = Store(address)
    start = time.perf_counter()
    go.set()
    while (found := next(one for one in count(store) if one.sweep == name)).finished < num_trials:
        time.sleep(0.1)
    each = (time.perf_counter() - start) / num_trials
    for worker in workers:
        worker.join()
    assert found.by_status == {"done": num_trials}
    store.close()
    return each


def nap(spec: TrialSpec) -> Trial:
    """A trial of NAP_SECONDS."""
    time.sleep(NAP_SECONDS)
    return noop(spec)


def napping_workers(address: str) -> Row:
    """Many workers whose trials take seconds, as real ones do: what a trial takes longer than its nap; one figure for each run."""
    runs = [one_run(address, NUM_NAPPING * NUM_NAPS, NUM_NAPPING, nap) for _ in range(3)]
    seconds = [NUM_NAPPING * each - NAP_SECONDS for each in runs]
    job = f"{NUM_NAPPING} workers, overhead of a trial of {NAP_SECONDS:g} s"
    return replace(row(job, address, seconds), num_trials=NUM_NAPPING * NUM_NAPS)


def heartbeat(address: str, num_workers: int) -> Row:
    """What a worker does every two seconds: count its heartbeat, and read those of all workers."""
    seconds: list[float] = []
    with Store(address) as store:
        names = [f"bench {number}" for number in range(num_workers)]
        for name in names:
            store.beat(name)
        for name in (names * NUM_BEATS)[:NUM_BEATS]:
            start = time.perf_counter()
            store.beat(name)
            assert len(store.beats()) >= num_workers
            seconds.append(time.perf_counter() - start)
        for name in names:
            store.leave(name)
    return row(f"a heartbeat among {num_workers} workers", address, seconds)


def long_lived(address: str, name: str, run: RunTrial, ready: object, go: object) -> None:
    """One of several."""
    with Store(address) as store:
        ready.release()
        go.wait()
        work(store, InlineEngine(run), WorkerOptions(sweep=name))


def own_process(address: str, num_trials: int) -> Row:
    """A process for each trial, one at a time."""
    store, name = filled(address, num_trials + 1)
    engine = LocalEngine(import_module("bench_store").noop)  # children find it by the name of its module
    seconds: list[float] = []
    for claim in store.claim("bench", num_trials + 1, sweep=name):
        start = time.perf_counter()
        engine.start(claim)
        while not engine.wait(10.0):
            pass
        seconds.append(time.perf_counter() - start)
    store.leave("bench")
    return row("a process of its own, start to result", "fork server", seconds[1:])  # the first one starts the server


def row(job: str, address: str, seconds: list[float]) -> Row:
    """The figures of single trials."""
    p20, _, _, p80 = statistics.quantiles(seconds, n=5)
    return Row(job, kind(address), len(seconds), statistics.median(seconds), p20, p80)


def server_version(address: str) -> str:
    """The version of a PostgreSQL server."""
    with Store(address) as store:
        return store.database.read(lambda connection: str(connection.scalar(text("SHOW server_version"))).split()[0])


def kind(address: str) -> str:
    """Which database."""
    return address if address == "fork server" else parse_address(address).get_backend_name()


def measured(sqlite: str, postgres: str | None, num_trials: int, only: str | None) -> list[Row]:
    """The rows of all jobs, or of those that load a server."""
    rows = [] if only else [one_worker(sqlite, num_trials), many_workers(sqlite, num_trials, 8), own_process(sqlite, 40)]
    if postgres:
        rows += [] if only else [one_worker(postgres, num_trials)]
        rows += [many_workers(postgres, num_trials, num) for num in NAMES]
        rows += [heartbeat(postgres, num) for num in NUM_BEATING]
        rows.append(napping_workers(postgres))
    return rows


def main() -> None:
    """Measure, print and append."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--postgres", help="URL of a PostgreSQL database")
    parser.add_argument("--folder", type=Path, help="where the SQLite file is made; a temporary folder unless given")
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--only", choices=("server",), help="many workers and heartbeats on --postgres alone")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        rows = measured(str(Path(folder) / "trials.db"), options.postgres, options.trials, options.only)
    print(f"{'job':40} {'who':12} {'trials':>7} {'median ms':>10} {'p20':>7} {'p80':>7}")
    for one in rows:
        figures = (one.median_seconds, one.p20_seconds, one.p80_seconds)
        print(
            f"{one.job:40} {one.who:12} {one.num_trials:7} {1e3 * figures[0]:10.2f} {1e3 * figures[1]:7.2f} {1e3 * figures[2]:7.2f}"
        )
    where = machine("cpu", PACKAGES)
    if options.postgres:
        where["versions"] = {**where["versions"], "postgresql": server_version(options.postgres)}
    append("store.json", where, rows)


if __name__ == "__main__":
    main()
