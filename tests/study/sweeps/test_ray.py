"""Trials on a Ray cluster of this machine: two nodes, one of which is killed, and a local cluster that the engine starts itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy")
if find_spec("ray") is None:
    pytest.skip("Ray is not installed", allow_module_level=True)

from paredown.study.sweeps.export import rows
from paredown.study.sweeps.status import count
from paredown.study.sweeps.store import Store
from tests.study.sweeps.test_sweep_cli import kill_and_go_on
from tests.study.sweeps.test_worker_faults import PATIENCE, attempts, finish, finished_keys, wait_for
from tests.support.ray_cluster import RayCluster, RayEnvironment
from tests.support.trials import draw
from tests.support.work import ROOT

CODE = """
import json, sys
from contextlib import redirect_stdout
from paredown.study.sweeps.engines.ray import RayEngine, RayOptions
from paredown.study.sweeps.store import Store
from paredown.study.sweeps.worker import WorkerOptions, work
from tests.support.trials import act
out = sys.stdout
with redirect_stdout(sys.stderr):  # Ray prints there
    engine = RayEngine(act, options=RayOptions(**json.loads(sys.argv[2])))
    options = WorkerOptions(on_result=lambda claim, trial: print(claim.key, file=out, flush=True))
    work(Store(sys.argv[1]), engine, options)
"""


@pytest.fixture
def environment() -> Iterator[RayEnvironment]:
    environment = RayEnvironment()
    yield environment
    environment.close()


@pytest.fixture
def cluster(environment: RayEnvironment) -> Iterator[RayCluster]:
    cluster = RayCluster(environment)
    yield cluster
    cluster.close()


def start(environment: RayEnvironment, address: str, **options: object) -> subprocess.Popen[str]:
    """A worker with the ray engine and these options."""
    command = [sys.executable, "-c", CODE, address, json.dumps(options)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=ROOT, env=environment.variables, text=True, **pipes)


def test_options_reach_a_trial_on_the_second_node(tmp_path: Path, environment: RayEnvironment, cluster: RayCluster) -> None:
    """A trial asks for half a GPU, a resource and a label that the second node has, and for an environment with a folder of files."""
    address, files = str(tmp_path / "options.db"), tmp_path / "files"
    files.mkdir()
    (files / "mine.txt").touch()
    env = {"env_vars": {"MINE": "here"}, "working_dir": str(files)}
    with Store(address) as store:
        store.add("s", draw("place:MINE"))
        finish(start(environment, address, gpus=0.5, resources={"disk": 1}, labels={"kind": "second"}, runtime_env=env))
        assert [json.loads(row["reason"]) for row in rows(store)] == [["here", "0", ["mine.txt"], {"kind": "second"}]]


@pytest.mark.full
def test_trials_on_two_nodes_of_which_one_is_killed(tmp_path: Path, environment: RayEnvironment, cluster: RayCluster) -> None:
    address, mark = str(tmp_path / "t.db"), tmp_path / "mark"
    with Store(address) as store:
        store.add("s", draw(f"hold:{mark}", seeds=range(3)))  # they fill both nodes
        worker = start(environment, address, gpus=0)
        wait_for(lambda: len(list(tmp_path.glob("mark.*"))) == 3 or worker.poll() is not None)
        store.add("s", draw("raise", "exit", f"kill_once:{tmp_path / 'killed'}"))
        store.add("s", draw("hang", timeout=1.0))
        cluster.kill_node()
        Path(f"{mark}.go").touch()
        reported = finish(worker)
        assert len(reported) == 7 and sorted(reported) == sorted(row["key"] for row in rows(store)), "0 lost, 0 doubled"
        found = {(row["task"].partition(":")[0], row["seed"]): (row["status"], row["reason"]) for row in rows(store)}
        num_again = sum(row.attempts > 1 for row in store.database.read(attempts))
    assert found == {
        **{("hold", seed): ("done", "") for seed in range(3)},
        ("raise", 0): ("failed", "ValueError: no such layer"),
        ("exit", 0): ("failed", "its code ended the process with exit status 3"),
        ("kill_once", 0): ("done", ""),
        ("hang", 0): ("killed", "no result after 1 s (timeout_seconds); its process was ended"),
    }
    assert num_again >= 3, "the two trials of the killed node, and the one that kills its process"


@pytest.mark.full
def test_200_trials_on_two_nodes_of_which_one_is_killed(tmp_path: Path, environment: RayEnvironment, cluster: RayCluster) -> None:
    address = str(tmp_path / "t.db")
    with Store(address) as store:
        store.add("s", draw("nap:0.05", seeds=range(200)))
        worker = start(environment, address, gpus=0)
        wait_for(lambda: len(finished_keys(store)) >= 20 or worker.poll() is not None)
        cluster.kill_node()
        reported = finish(worker, seconds=6 * PATIENCE)  # a process of Ray each, on one CPU: 6 s a trial on busy cores
        assert len(reported) == 200 and sorted(reported) == finished_keys(store), "0 lost, 0 doubled"


@pytest.mark.full
def test_what_no_node_has_is_refused(tmp_path: Path, environment: RayEnvironment, cluster: RayCluster) -> None:
    address = str(tmp_path / "t.db")
    with Store(address) as store:
        store.add("s", draw("noop"))
        for options, said in (
            (
                {"gpus": 0.5, "labels": {"kind": "third"}},
                "one needs CPU 1, GPU 0.5 on a node with labels kind third; the cluster has",
            ),
            ({"runtime_env": {"working_dir": str(tmp_path / "missing")}}, "Ray refuses the options of trials: directory"),
            ({"runtime_env": {"working_dir": f"file://{tmp_path}/missing.zip"}}, "Ray cannot set up the runtime environment"),
        ):
            worker = start(environment, address, **options)
            error = worker.communicate()[1]
            assert worker.returncode == 1 and f"SweepError: {said}" in error.replace(
                "no node of the Ray cluster can run a trial: ", ""
            )
        assert count(store)[0].waiting == 1


@pytest.mark.full
def test_a_sweep_on_ray_killed_and_started_again(
    tmp_path: Path, address: str, environment: RayEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in environment.variables.keys() - os.environ.keys():
        monkeypatch.setenv(name, environment.variables[name])
    kill_and_go_on(tmp_path, address, "--engine", "ray", num_seeds=2)
