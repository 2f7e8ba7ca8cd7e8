"""Several sweeps of `sweeps/` into one store, with many workers on one machine, for a given time.

    python benchmarks/collect.py stored stored_again --store stored.db --workers 12 --seconds 540

What is finished stays in the store; the same command goes on with what is left. Workers train one trial after the other in their own
process (`--engine inline`), so that data, kernels and the CUDA context are there for the next one. Simulated sweeps take `--engine graphs`
on a GPU.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from pathlib import Path

from paredown.study.sweeps.runner import TaskFolder, add_sweep
from paredown.study.sweeps.status import count
from paredown.study.sweeps.store import Store
from paredown.study.sweeps.sweep_file import load_sweep
from paredown.study.tasks.task_trace import predicted_bytes

FOLDER = Path(__file__).parent / "sweeps"
MAIN = "from paredown.cli import main; main()"
GRACE = 15.0  # seconds for workers to give back what they run


def add(name: str, store: Store, folder: Path) -> None:
    """Put the trials of a sweep into the store."""
    path = folder / f"{name}.toml"
    begun, sweep = time.monotonic(), load_sweep(path).sweep
    added = add_sweep(sweep, store, cost=lambda task, plan: predicted_bytes(task, plan, TaskFolder(folder.resolve()).path))
    print(f"{sweep.name}: {added.num_new} new, {added.num_there} there, {time.monotonic() - begun:.0f} s", flush=True)


def start(given: argparse.Namespace) -> subprocess.Popen[bytes]:
    """A worker on all sweeps of the store, one after the other."""
    where = ["--store", given.store, "--tasks", str(given.folder), "--engine", given.engine]
    slots = ["--slots", str(given.slots)] if given.slots else []
    return subprocess.Popen([sys.executable, "-c", MAIN, "worker", *where, *slots], stdout=subprocess.DEVNULL)


def work(given: argparse.Namespace, end: float) -> None:
    """Until all is finished, or the time is over."""
    workers = [start(given) for _ in range(given.workers)]
    while any(one.poll() is None for one in workers) and time.monotonic() < end:
        time.sleep(0.5)
    for one in workers:
        if one.poll() is None:
            one.send_signal(signal.SIGTERM)
    for one in workers:
        try:
            one.wait(GRACE)
        except subprocess.TimeoutExpired:
            one.kill()


def main() -> None:
    """Add all sweeps, then run what the store has."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("sweeps", nargs="+")
    parser.add_argument("--store", required=True)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--slots", type=int, help="of each worker, where its engine has several")
    parser.add_argument("--engine", default="inline")
    parser.add_argument("--seconds", type=float, default=3600.0)
    given = parser.parse_args()
    end = time.monotonic() + given.seconds
    with Store(given.store) as store:
        for name in given.sweeps:
            add(name, store, given.folder)
    work(given, end)
    with Store(given.store, may_create=False) as store:
        print(*count(store), sep="\n")


if __name__ == "__main__":
    main()
