"""Worker processes that are killed: no finished trial is lost, and none is finished twice."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from glob import glob
from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy")

from paredown.study.sweeps.export import rows
from paredown.study.sweeps.status import count
from paredown.study.sweeps.store import Store
from tests.study.sweeps.test_worker import is_gone
from tests.support.postgres import Postgres
from tests.support.trials import PLANS, draw
from tests.support.work import announced, start

PATIENCE = 600.0  # seconds until what never comes is an error: long, for cores may be busy


def finish(*workers: subprocess.Popen[str], seconds: float = PATIENCE) -> list[str]:
    """What the workers announced, once all have ended well; those that do not end are killed."""
    try:
        outputs = [worker.communicate(timeout=seconds) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0] * len(workers), [error for _, error in outputs]
    return announced(*(out for out, _ in outputs))


def kill(worker: subprocess.Popen[str]) -> list[str]:
    """kill -9; what it had announced."""
    worker.send_signal(signal.SIGKILL)
    return announced(worker.communicate()[0])


def wait_for(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Until it holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.full)])
def new_address(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], str]:
    """Makes the address of an empty store, in `make test-all` on both databases."""
    return request.getfixturevalue("new_postgres") if request.param == "postgresql" else lambda: str(tmp_path / "store.db")


def finished_keys(store: Store) -> list[str]:
    """Keys of trials that are done."""
    return sorted(row["key"] for row in rows(store) if row["status"] == "done")


@pytest.mark.parametrize(("num_trials", "num_workers"), [(300, 3), pytest.param(2000, 8, marks=pytest.mark.full)])
def test_many_trials_in_many_workers(address: str, num_trials: int, num_workers: int) -> None:
    with Store(address) as store:
        seeds = range(num_trials // 2)
        store.add("s", draw("noop", seeds=seeds, plans=PLANS))
        reported = finish(*(start(address) for _ in range(num_workers)))
        assert len(reported) == num_trials and sorted(reported) == finished_keys(store), "0 lost, 0 doubled"
        assert {row["trial"]["error"] for row in rows(store)} == {(s % 97 + 1) / 100 + r / 1000 for s in seeds for r in (0, 1)}
        assert store.beats() == {}


def test_a_worker_killed_in_a_trial(address: str) -> None:
    """Long-lived workers; one is killed in the middle of a trial, which another then runs."""
    with Store(address) as store:
        store.add("s", draw("nap:0.3", seeds=range(12)))
        victim, other = start(address), start(address)
        wait_for(lambda: count(store)[0].finished >= 2)
        reported = kill(victim) + finish(other)
        assert sorted(reported) == finished_keys(store) and len(reported) == len(set(reported)) == 12


def test_a_parent_killed_takes_its_trials_along_and_the_next_one_goes_on(address: str, tmp_path: Path) -> None:
    """A process for each trial; the parent is killed, and its children end before their work is done again."""
    with Store(address) as store:
        ids = tmp_path / "ids"
        store.add("s", draw("noop", f"orphan:{ids}", timeout=None))
        parent = start(address, "local", "2")
        wait_for(lambda: ids.exists() and ids.read_text() and count(store)[0].finished == 1)
        reported = kill(parent)
        assert all(is_gone(int(process)) for process in ids.read_text().split()), "nothing goes on training"
        store.add("s", draw("noop", f"orphan:{ids}", timeout=1.0))  # waiting trials only: it is still held
        second = start(address, "local", "2", "")
        wait_for(lambda: count(store)[0].running == 1 and len(store.beats()) == 1)
        second.terminate()
        second.communicate()
        assert len(reported) == 1 and finished_keys(store) == reported


def test_two_parents_on_one_store(address: str) -> None:
    with Store(address) as store:
        store.add("s", draw("nap:0.05", seeds=range(30)))
        reported = finish(start(address, "local", "2"), start(address, "local", "2"))
        assert len(reported) == 30 and sorted(reported) == finished_keys(store)


@pytest.mark.parametrize("jump", ["86400", pytest.param("-86400", marks=pytest.mark.full)])
def test_a_clock_that_jumps_frees_and_loses_nothing(tmp_path: Path, jump: str) -> None:
    address = str(tmp_path / "t.db")
    with Store(address) as store:
        store.add("s", draw("nap:0.4", seeds=range(12)))
        workers = [start(address, CLOCK_JUMPS=jump), start(address)]
        outputs = [worker.communicate(timeout=PATIENCE) for worker in workers]
        reported = announced(*(out for out, _ in outputs))
        assert len(reported) == 12 and sorted(reported) == finished_keys(store)
        assert not any("stopped counting heartbeats" in error for _, error in outputs)
        assert {row.attempts for row in store.database.read(attempts)} == {1}


def attempts(connection: object) -> list[object]:
    from sqlalchemy import select

    from paredown.study.sweeps.database import TRIALS

    return connection.execute(select(TRIALS.c.attempts)).all()  # type: ignore[attr-defined]


@pytest.mark.parametrize("num_between", [50, pytest.param(1000, marks=pytest.mark.full)])
def test_16_workers_on_a_server_that_restarts_twice(
    postgres: Postgres, new_postgres: Callable[[], str], tmp_path: Path, num_between: int
) -> None:
    """A shutdown, then a kill -9, each while all 16 workers run a trial; they end their trials before the server runs again."""
    address = new_postgres()
    holds = {str(tmp_path / name): stop for name, stop in (("one", postgres.stop), ("two", postgres.kill))}
    parts = [
        part for mark in holds for part in (draw(f"hold:{mark}", seeds=range(16)), draw(f"noop:{mark}", seeds=range(num_between)))
    ]
    with Store(address) as store:
        store.add("s", [trial for part in parts for trial in part])
        workers = start(address, "inline", "1", "16")
        try:
            for mark, stop in holds.items():
                wait_for(lambda mark=mark: len(glob(f"{mark}.*")) == 16 or workers.poll() is not None)
                stop()
                Path(f"{mark}.go").touch()
                postgres.start()
            reported = finish(workers)
        finally:
            workers.kill()
        num_trials = 2 * (16 + num_between)
        assert len(reported) == num_trials and sorted(reported) == finished_keys(store), "0 lost, 0 doubled"
        assert store.beats() == {}


def test_a_stopped_worker_that_wakes_up_changes_nothing(tmp_path: Path) -> None:
    """SIGSTOP for longer than the others' patience: its trial runs elsewhere, and its own late result is dropped."""
    address, mark = str(tmp_path / "t.db"), tmp_path / "mark"
    with Store(address) as store:
        store.add("s", draw(f"hold_first:{mark}", seeds=range(2)))
        sleeper = start(address)
        wait_for(mark.exists)
        os.kill(sleeper.pid, signal.SIGSTOP)
        reported = finish(start(address))
        Path(f"{mark}.go").touch()
        os.kill(sleeper.pid, signal.SIGCONT)
        out, error = sleeper.communicate(timeout=PATIENCE)
        assert len(reported) == 2 and sorted(reported) == finished_keys(store)
        assert announced(out) == [] and "another worker has finished it already" in error
