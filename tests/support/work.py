"""A worker as a process of its own, which tests may kill: `python -m tests.support.work ADDRESS [inline|local] [slots] [processes]`.

Several processes are forked once all is imported. A worker prints the key of each trial once its result is in the store, and beats fast, so
that deaths are noticed within a second or two.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from paredown.study.sweeps.engines.engine import Engine, InlineEngine, LocalEngine
from paredown.study.sweeps.store import Store
from paredown.study.sweeps.sweep import Claim
from paredown.study.sweeps.worker import WorkerOptions, work
from paredown.study.tasks.trial import Trial
from tests.support.trials import act

ROOT = Path(__file__).parent.parent.parent
PR_SET_PDEATHSIG = 1  # of Linux's prctl
PATIENCE_SECONDS = 2.0


def told(claim: Claim, trial: Trial) -> None:
    """Announce a result, in one write: several processes share the pipe."""
    os.write(1, f"{claim.key} {trial.status.value}\n".encode())


def make_engine(kind: str, slots: int) -> Engine:
    """An engine that needs no torch."""
    return InlineEngine(act) if kind == "inline" else LocalEngine(act, slots=slots, preload=["tests.support.trials"])


def main(address: str, kind: str = "inline", slots: str = "1", processes: str = "1") -> None:
    """Work until all is done, in so many processes."""
    children = fork(int(processes) - 1)
    assert "torch" not in sys.modules, "what hands out trials starts without torch"
    if jump := os.environ.get("CLOCK_JUMPS"):
        clock = time.time
        time.time = lambda: clock() + float(jump) * (int(clock() * 5) % 2)  # back and forth, five times a second
    options = WorkerOptions(on_result=told, say=lambda text: print(text, file=sys.stderr), patience_seconds=PATIENCE_SECONDS)
    with Store(address, patience_seconds=30) as store:
        work(store, make_engine(kind, int(slots)), options)
    assert all(os.waitpid(child, 0)[1] == 0 for child in children)


def fork(num: int) -> list[int]:
    """The ids of `num` copies of this process, which are killed when it ends; none in the copies."""
    children: list[int] = []
    for _ in range(num):
        children += [os.fork()]
        if not children[-1]:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            return []
    return children


def start(address: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    """Start such a process."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}", **variables}
    command = [sys.executable, "-W", "error", "-m", "tests.support.work", address, *arguments]
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def announced(*outputs: str) -> list[str]:
    """The keys that workers announced, of all of them."""
    return [line.split()[0] for text in outputs for line in text.splitlines()]


if __name__ == "__main__":
    main(*sys.argv[1:])
