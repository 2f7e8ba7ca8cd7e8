"""Trials on a Ray cluster of this machine. Ray is an extra: without it these are counted skips."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy")
if find_spec("ray") is None:
    pytest.skip("Ray is not installed", allow_module_level=True)

from paredown.sweeps.export import rows
from paredown.sweeps.store import Store
from tests.support.trials import draw
from tests.support.work import ROOT
from tests.sweeps.test_sweep_cli import kill_and_go_on

CODE = """
import sys
from paredown.sweeps.engines.ray import RayEngine
from paredown.sweeps.store import Store
from paredown.sweeps.worker import work
from tests.support.trials import act
finished = work(Store(sys.argv[1]), RayEngine(act, slots=2, cpus=0.5))
print()
print(finished)
"""


def test_what_trials_do_on_a_cluster_becomes_their_result(tmp_path: Path) -> None:
    address = str(tmp_path / "t.db")
    with Store(address) as store:
        store.add("s", draw("noop", "raise", "exit", f"kill_once:{tmp_path / 'mark'}"))
        store.add("s", draw("hang", timeout=3.0))
        env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"}
        done = subprocess.run([sys.executable, "-c", CODE, address], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
        assert done.stdout.splitlines()[-1] == "5", done.stderr
        found = {row["task"].partition(":")[0]: (row["status"], row["reason"]) for row in rows(store)}
    assert found == {
        "noop": ("done", ""),
        "raise": ("failed", "ValueError: no such layer"),
        "exit": ("failed", "its code ended the process with exit status 3"),
        "kill_once": ("done", ""),
        "hang": ("killed", "no result after 3 s (timeout_seconds); its process was ended"),
    }


def test_a_sweep_on_ray_killed_and_started_again(tmp_path: Path, address: str) -> None:
    kill_and_go_on(tmp_path, address, "--engine", "ray", num_seeds=2)
