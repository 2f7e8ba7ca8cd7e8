"""Workers: trials that harm their process, callbacks, and what remains in the store when a worker stops."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("sqlalchemy")

from paredown.errors import StoreError, SweepError
from paredown.study.sweeps import worker as worker_module
from paredown.study.sweeps.engines import engine as local
from paredown.study.sweeps.engines.engine import Engine, InlineEngine, LocalEngine
from paredown.study.sweeps.export import rows
from paredown.study.sweeps.status import SweepCounts, count
from paredown.study.sweeps.store import Store
from paredown.study.sweeps.sweep import Claim, EndedTrial
from paredown.study.sweeps.worker import WorkerOptions, work
from paredown.study.tasks.trial import Trial
from tests.support.trials import act, draw

PRELOAD = ["tests.support.trials"]  # no torch: trials of these tests train nothing


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "t.db")


def outcomes(store: Store) -> dict[str, tuple[str, str]]:
    """Task to status and reason."""
    return {row["task"].partition(":")[0]: (row["status"], row["reason"]) for row in rows(store)}


def test_whatever_a_trial_does_becomes_its_result(store: Store) -> None:
    store.add("s", draw("noop", "raise", "exit", "exit_hard", "hoard"))
    store.add("s", draw("hang", timeout=1.0))
    assert work(store, LocalEngine(act, slots=2, preload=PRELOAD)) == 6
    assert outcomes(store) == {
        "noop": ("done", ""),
        "raise": ("failed", "ValueError: no such layer"),
        "exit": ("failed", "its code ended the process with exit status 3"),
        "exit_hard": ("failed", "its process ended with exit status 4 and without a result"),
        "hoard": ("out_of_memory", "out of memory: 12 GiB"),
        "hang": ("killed", "no result after 1 s (timeout_seconds); its process was ended"),
    }
    assert store.beats() == {}, "it left"


def test_a_killed_process_is_tried_again_and_then_given_up(store: Store, tmp_path: Path) -> None:
    said: list[str] = []
    store.add("s", draw("kill", f"kill_once:{tmp_path / 'mark'}", "noop"))
    assert work(store, LocalEngine(act, slots=3, preload=PRELOAD), WorkerOptions(say=said.append)) == 3
    found = outcomes(store)
    assert found["kill_once"] == found["noop"] == ("done", "")
    assert found["kill"][0] == "killed" and "SIGKILL" in found["kill"][1] and "5 attempts" in found["kill"][1]
    assert len(said) == 4 + 1 and all("It will run again" in sentence for sentence in said)


def test_a_timeout_ends_what_the_trial_started_too(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's clock stands still until the trial has started a process, however slow that is, and then advances with each look."""
    ids, looks = tmp_path / "ids", itertools.count()
    monkeypatch.setattr(local, "time", SimpleNamespace(monotonic=lambda: next(looks) if ids.exists() and ids.read_text() else 0.0))
    store.add("s", draw(f"orphan:{ids}", timeout=1.0))
    work(store, LocalEngine(act, preload=PRELOAD))
    assert outcomes(store)["orphan"][0] == "killed"
    for process in ids.read_text().split():
        assert is_gone(int(process))


def is_gone(process: int, seconds: float = 120.0) -> bool:
    """Whether a process ends within so long; a dead one that nobody collects counts."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state in "ZX":
            return True
        time.sleep(0.05)
    return False


def test_what_a_trial_prints_does_not_reach_stdout(store: Store, capfd: pytest.CaptureFixture[str]) -> None:
    store.add("s", draw("chat"))
    work(store, LocalEngine(act, preload=PRELOAD))
    assert "chatter" not in capfd.readouterr().out


def test_slots_run_side_by_side_and_take_gpus_in_turn(store: Store) -> None:
    engine = LocalEngine(see_gpu, slots=4, gpus=("5", "7"), preload=PRELOAD)
    store.add("s", draw("a", "b", "c", "d"))
    for claim in store.claim("w", 4):
        engine.start(claim)
    ended: list[EndedTrial] = []
    while len(ended) < 4:
        ended += engine.wait(5.0)
    assert sorted(one.trial.device for one in ended if one.trial) == ["5", "5", "7", "7"]


def see_gpu(spec: object) -> Trial:
    """A trial that tells which GPU it may use; it takes as long as the others need to start."""
    from dataclasses import replace

    time.sleep(0.5)
    return replace(act(draw("noop")[0].spec), device=os.environ["CUDA_VISIBLE_DEVICES"])


def test_the_users_script_is_not_run_again_by_children(tmp_path: Path) -> None:
    """Without a guard under `if __name__`, multiprocessing would run the script once more in every child."""
    import subprocess

    script = tmp_path / "mine.py"
    script.write_text(f"""
print("once")
from paredown.study.sweeps.engines.engine import LocalEngine
from paredown.study.sweeps.store import Store
from paredown.study.sweeps.worker import work
from tests.support.trials import act, draw
store = Store({str(tmp_path / "t.db")!r})
store.add("s", draw("noop", seeds=(0, 1)))
print(work(store, LocalEngine(act, preload=["tests.support.trials"])))
""")
    root = Path(__file__).parent.parent.parent.parent
    env = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{root / 'src'}"}
    done = subprocess.run([sys.executable, str(script)], env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["once", "2"], done.stderr


@pytest.mark.parametrize("make", [InlineEngine, lambda run: LocalEngine(run, preload=PRELOAD)], ids=["inline", "local"])
def test_everything_is_in_the_store_before_it_is_told(store: Store, make: Callable[..., Engine]) -> None:
    store.add("s", draw("noop", seeds=range(4)))

    def on_result(claim: Claim, trial: Trial) -> None:
        written = {row["key"]: row["trial"] for row in rows(store)}
        assert written[claim.key] == trial.to_json()

    assert work(store, make(act), WorkerOptions(on_result=on_result)) == 4


def test_an_interrupted_worker_writes_what_has_ended_and_gives_the_rest_back(store: Store) -> None:
    store.add("s", draw("noop", "hang", "nap:0"))

    def stop(claim: Claim, trial: Trial) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work(store, LocalEngine(act, slots=2, preload=PRELOAD), WorkerOptions(on_result=stop))
    found = count(store)[0]
    assert found.finished >= 1 and found.running == 0
    assert [claim.attempt for claim in store.claim("w", 9)] == [1] * found.waiting
    assert "w" in store.beats() and len(store.beats()) == 1, "the interrupted one left"


def test_refused_tasks_are_left_to_others(store: Store) -> None:
    said: list[str] = []
    store.add("s", draw("noop", "theirs.py:task", seeds=range(3)))
    options = WorkerOptions(refuses=lambda task: "no such file." if "theirs" in task else None, say=said.append)
    with pytest.raises(SweepError, match=r"3 trials left to other workers; task 'theirs.py:task': no such file\."):
        work(store, InlineEngine(act), options)
    assert count(store) == [SweepCounts("s", waiting=3, by_status={"done": 3})]
    assert said == ["task 'theirs.py:task' is left to other workers: no such file."]
    assert [claim.attempt for claim in store.claim("w", 9)] == [1, 1, 1]


def test_a_worker_waits_for_the_trials_of_a_dead_one(store: Store) -> None:
    store.add("s", draw("noop", seeds=range(3)))
    store.claim("dead", 2)
    said: list[str] = []
    assert work(store, InlineEngine(act), WorkerOptions(patience_seconds=0.6, say=said.append)) == 3
    assert said == ["a worker has stopped counting heartbeats: 2 of its trials will run again."]


def test_a_worker_leaves_the_trials_of_a_living_one(store: Store) -> None:
    """Another worker is slow and beats; this one does not release its trials, which would need ten readings without a heartbeat."""
    store.add("s", draw("nap:3"))
    quick = WorkerOptions(patience_seconds=2.0)
    slow = threading.Thread(target=work, args=(store, InlineEngine(act), quick))
    slow.start()
    while not count(store)[0].running:
        time.sleep(0.02)
    assert work(store, InlineEngine(act), quick) == 0
    slow.join()
    assert count(store)[0].by_status == {"done": 1}


def test_a_worker_that_stays_takes_new_trials(store: Store) -> None:
    seen: list[str] = []

    def on_result(claim: Claim, trial: Trial) -> None:
        seen.append(trial.task)
        if len(seen) == 1:
            store.add("s", draw("nap:0"))
        else:
            raise KeyboardInterrupt

    store.add("s", draw("noop"))
    with pytest.raises(KeyboardInterrupt):
        work(store, InlineEngine(act), WorkerOptions(on_result=on_result, stays=True))
    assert seen == ["noop", "nap:0"]


def test_a_store_that_is_lost_ends_the_worker_with_a_sentence(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.add("s", draw("nap:0"))

    def lost(*_: object, **__: object) -> None:
        raise StoreError("the store is gone")

    engine = LocalEngine(act, preload=PRELOAD)
    results: list[object] = []
    monkeypatch.setattr(worker_module, "IDLE_SECONDS", 5.0)
    exchange = store.exchange
    monkeypatch.setattr(store, "exchange", lambda *a, **k: lost() if a[1] else exchange(*a, **k))
    with pytest.raises(StoreError, match="gone"):
        work(store, engine, WorkerOptions(on_result=lambda *result: results.append(result)))
    assert not results and count(store)[0].running == 1, "others free it: this worker is not heard of any more"
