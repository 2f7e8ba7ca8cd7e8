"""What the store and a process of its own add to a trial: rows in results/store.json.

    python benchmarks/bench_store.py                                   # SQLite in a new file of --folder
    python benchmarks/bench_store.py --postgres postgresql://...       # and a PostgreSQL database, which should be empty

Trials do nothing, so that what is measured is all overhead: the transaction that writes a result and claims the next trial (one worker,
one call after the other); eight long-lived workers on one store, seconds of the whole run by the number of trials; and a process for each
trial, forked from the server that has torch imported, from start to result.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from uuid import uuid4

from measure import append, machine

from paredown.plan.plan import Plan
from paredown.sweeps.database import parse_address
from paredown.sweeps.engines.engine import InlineEngine, LocalEngine
from paredown.sweeps.status import count
from paredown.sweeps.store import Store
from paredown.sweeps.sweep import EndedTrial, Sweep, TrialSpec
from paredown.sweeps.worker import WorkerOptions, work
from paredown.tasks.trial import Status, Trial

PACKAGES = ("sqlalchemy", "psycopg", "torch")
NUM_WORKERS = 8


@dataclass(frozen=True)
class Row:
    """Seconds of one trial, all of them overhead; for eight workers there is one figure, that of the whole run."""

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


def eight_workers(address: str, num_trials: int) -> Row:
    """Eight processes, from the moment that all are ready."""
    store, name = filled(address, num_trials)
    context = get_context("spawn")
    ready, go = context.Semaphore(0), context.Event()
    workers = [context.Process(target=long_lived, args=(address, name, ready, go)) for _ in range(NUM_WORKERS)]
    for worker in workers:
        worker.start()
    for _ in workers:
        ready.acquire()
    start = time.perf_counter()
    go.set()
    while (found := next(one for one in count(store) if one.sweep == name)).finished < num_trials:
        time.sleep(0.05)
    each = (time.perf_counter() - start) / num_trials
    for worker in workers:
        worker.join()
    assert found.by_status == {"done": num_trials}
    return Row("eight long-lived workers", kind(address), num_trials, each, each, each)


def long_lived(address: str, name: str, ready: object, go: object) -> None:
    """One of the eight."""
    with Store(address) as store:
        ready.release()
        go.wait()
        work(store, InlineEngine(noop), WorkerOptions(sweep=name))


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


def kind(address: str) -> str:
    """Which database."""
    return address if address == "fork server" else parse_address(address).get_backend_name()


def main() -> None:
    """Measure, print and append."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--postgres", help="URL of a PostgreSQL database")
    parser.add_argument("--folder", type=Path, help="where the SQLite file is made; a temporary folder unless given")
    parser.add_argument("--trials", type=int, default=2000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        addresses = [str(Path(folder) / "trials.db"), *([options.postgres] if options.postgres else [])]
        rows = [job(address, options.trials) for address in addresses for job in (one_worker, eight_workers)]
        rows.append(own_process(addresses[0], 40))
    print(f"{'job':40} {'who':12} {'trials':>7} {'median ms':>10} {'p20':>7} {'p80':>7}")
    for one in rows:
        figures = (one.median_seconds, one.p20_seconds, one.p80_seconds)
        print(
            f"{one.job:40} {one.who:12} {one.num_trials:7} {1e3 * figures[0]:10.2f} {1e3 * figures[1]:7.2f} {1e3 * figures[2]:7.2f}"
        )
    append("store.json", machine("cpu", PACKAGES), rows)


if __name__ == "__main__":
    main()
