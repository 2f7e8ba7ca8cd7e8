"""Trials in parallel in one process: results, faults, and which trials run again alone. On the CPU, where nothing is captured."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, replace
from multiprocessing import Pipe, active_children
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("sqlalchemy")

from paredown import Plan
from paredown.study.sweeps.engines import cuda_graphs
from paredown.study.sweeps.engines import engine as engine_module
from paredown.study.sweeps.engines.cuda_graphs import GraphsEngine
from paredown.study.sweeps.export import rows
from paredown.study.sweeps.runner import TaskFolder, engine_for, run_sweep
from paredown.study.sweeps.store import Store
from paredown.study.sweeps.sweep import EndedTrial, Sweep, TrialSettings, TrialSpec
from paredown.study.sweeps.worker import WorkerOptions
from paredown.study.tasks.evaluate import make_setting
from paredown.study.tasks.training import TrainingSetup
from paredown.study.tasks.trial import Status, Trial
from tests.study.tasks.made import make_task

PLANS = tuple(Plan.uniform(activation=text) for text in ("e4m3fn", "e5m2"))
SIMULATED = TrialSettings(mode="simulate", device="cpu")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "t.db")


@dataclass(frozen=True)
class Blobs:
    """Runs a small task whatever it is called; some names do something else when they are asked for."""

    mark: str = ""

    def __call__(self, spec: TrialSpec) -> Trial:
        return Trial(spec.task, spec.plan, spec.seed, "done", error=0.5, device="alone")  # type: ignore[arg-type]

    def setting(self, spec: TrialSpec) -> TrainingSetup:
        if spec.task == "raise":
            raise ValueError("no such layer")
        if spec.task == "exit":
            raise SystemExit(3)
        if spec.task == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        steps = {"long": 10**6}.get(spec.task, 5)
        return make_setting(make_task(steps=steps), spec.plan, seed=spec.seed, device="cpu", mode="simulate")


def outcomes(store: Store) -> dict[str, set[tuple[str, str]]]:
    """Task to statuses and reasons."""
    found: dict[str, set[tuple[str, str]]] = {}
    for row in rows(store):
        found.setdefault(row["task"], set()).add((row["status"], row["reason"]))
    return found


def test_a_sweep_gives_what_each_trial_gives_alone(store: Store, tmp_path: Path) -> None:
    sweep = Sweep("s", ("digits#model=mlp,steps=6",), PLANS, (0, 1), settings=SIMULATED)
    folder = TaskFolder(tmp_path)
    assert run_sweep(sweep, store, GraphsEngine(folder, lanes=2)) == 4
    for row in rows(store):
        trial = Trial.from_json(row["trial"])
        alone = folder(TrialSpec(trial.task, trial.plan, trial.seed, SIMULATED))
        assert replace(trial, seconds=None, step_seconds=None) == replace(alone, seconds=None, step_seconds=None)


def test_what_a_task_does_harms_no_other(store: Store) -> None:
    sweep = Sweep("s", ("well", "raise", "exit"), PLANS, settings=SIMULATED)
    assert run_sweep(sweep, store, GraphsEngine(Blobs(), lanes=2)) == 6
    assert outcomes(store) == {
        "well": {("done", "")},
        "raise": {("failed", "ValueError: no such layer")},
        "exit": {("failed", "its code ended the process with exit status 3")},
    }


def test_when_the_process_dies_its_trials_run_again_alone(store: Store) -> None:
    said: list[str] = []
    sweep = Sweep("s", ("well", "kill"), PLANS, settings=SIMULATED)
    assert run_sweep(sweep, store, GraphsEngine(Blobs(), lanes=2), options=WorkerOptions(say=said.append)) == 4
    assert outcomes(store) == {"well": {("done", "")}, "kill": {("done", "")}}
    assert {row["trial"]["device"] for row in rows(store) if row["task"] == "kill"} == {"alone"}
    assert any("SIGKILL" in sentence and "It will run again" in sentence for sentence in said)


def test_a_trial_that_takes_too_long_is_ended_and_its_neighbours_run_again(store: Store) -> None:
    run_sweep(Sweep("quick", ("well",), PLANS, settings=SIMULATED), store, GraphsEngine(Blobs(), lanes=2))
    sweep = Sweep("s", ("long",), PLANS[:1], settings=replace(SIMULATED, timeout_seconds=0.5))
    assert run_sweep(sweep, store, GraphsEngine(Blobs(), lanes=2)) == 1
    ((status, reason),) = outcomes(store)["long"]
    assert status == "killed" and "no result after 0.5 s (timeout_seconds)" in reason


def test_nothing_is_left_when_a_sweep_is_over(store: Store, capfd: pytest.CaptureFixture[str]) -> None:
    engine = GraphsEngine(Blobs(), lanes=2)
    run_sweep(Sweep("s", ("well",), PLANS, settings=SIMULATED), store, engine)
    assert not engine._children
    assert "Traceback" not in capfd.readouterr().err


def test_stored_trials_have_a_process_each(store: Store) -> None:
    sweep = Sweep("s", ("well",), PLANS[:1])
    assert run_sweep(sweep, store, GraphsEngine(Blobs(), lanes=2)) == 1
    assert [row["trial"]["device"] for row in rows(store)] == ["alone"]


def test_waiting_does_not_count_as_time_of_a_trial(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test is the child process, and moves the engine's clock: a trial has 4 s from its beginning, not from when it was given."""
    seconds, (ours, theirs) = [0.0], Pipe()
    for module in (cuda_graphs, engine_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: seconds[0]))
    monkeypatch.setattr(cuda_graphs.processes, "kill_group", lambda process: None)
    engine = GraphsEngine(Blobs(), lanes=1)
    engine._children[None] = cuda_graphs.GpuProcess(None, ours, Pipe()[0])  # type: ignore[arg-type]
    store.add("s", Sweep("s", ("well",), PLANS, settings=replace(SIMULATED, timeout_seconds=4.0)).draw())
    first, second = store.claim("w", 2)
    for claim in (first, second):
        engine.start(claim)
    trial = Trial("well", first.spec.plan, 0, Status.DONE, error=0.5)
    sent = [((first, cuda_graphs.BEGUN),), ((first, cuda_graphs.ENDED, trial), (second, cuda_graphs.BEGUN)), (), ()]
    ended: list[list[EndedTrial]] = []
    for at, events in zip((0.0, 3.9, 7.8, 7.9), sent, strict=True):
        seconds[0] = at
        for claim, *event in events:
            cuda_graphs._send(theirs, claim.key, *event)
        ended.append(engine.wait(0.0))
    assert [[(one.claim.key, one.trial and one.trial.status) for one in found] for found in ended] == [
        *([], [(first.key, Status.DONE)], [], [(second.key, Status.KILLED)])
    ]


def test_trials_with_a_process_each_take_turns(store: Store) -> None:
    engine = GraphsEngine(Blobs(), lanes=4)
    store.add("s", Sweep("s", ("well",), PLANS, (0, 1)).draw())
    claims = store.claim("w", 4)
    for claim in claims:
        engine.start(claim)
    assert len(engine._others.pipes) == 1
    ended = []
    while len(ended) < 4:
        ended += engine.wait(5.0)
    assert {one.trial.device for one in ended if one.trial} == {"alone"}


def test_what_shares_no_graph_has_a_process_of_its_own(store: Store) -> None:
    sweep = Sweep("s", ("well",), (Plan.uniform(activation="int8/64@bf16"),), settings=SIMULATED)
    assert run_sweep(sweep, store, GraphsEngine(Blobs(), lanes=2)) == 1
    assert [row["trial"]["device"] for row in rows(store)] == ["alone"]


def test_what_is_stopped_has_no_result(store: Store) -> None:
    engine = GraphsEngine(Blobs(), lanes=1)
    store.add("s", Sweep("s", ("long",), PLANS, settings=SIMULATED).draw())
    claims = store.claim("w", 2)
    for claim in claims:
        engine.start(claim)
    assert engine.wait(0.5) == [] and active_children()
    engine.stop()
    assert engine.wait(0.5) == [] and not active_children()


@pytest.mark.parametrize(("mode", "device", "gpus", "expected"), [
    ("simulate", None, "0", "graphs"), ("peppp", "cuda", "0,1", "graphs"), ("store", None, "0", "local"),
    ("simulate", "cpu", "0", "local"), ("simulate", None, "", "local"),
])  # fmt: skip
def test_which_engine_suits(mode: str, device: str | None, gpus: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    assert engine_for(Sweep("s", ("digits",), PLANS, settings=TrialSettings(mode, device))) == expected
