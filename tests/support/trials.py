"""Trials without training, for tests of what runs trials: the task's name says how one behaves."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from paredown.plan.plan import Plan
from paredown.study.sweeps.sweep import DrawnTrial, Sweep, TrialSettings, TrialSpec
from paredown.study.tasks.trial import Status, Trial

PLANS = (Plan(), Plan.preset("activations4"))


def done(spec: TrialSpec) -> Trial:
    """A result that can be told from all others."""
    error = (spec.seed % 97 + 1) / 100 + len(spec.plan.rules) / 1000
    return Trial(spec.task, spec.plan, spec.seed, Status.DONE, error=error, seconds=0.01)


def nap(spec: TrialSpec) -> Trial:
    """A result after a while: 'nap:0.5'."""
    time.sleep(float(spec.task.partition(":")[2] or 0.2))
    return done(spec)


def _raise(spec: TrialSpec) -> Trial:
    raise ValueError("no such layer")


def _kill(spec: TrialSpec) -> Trial:
    os.kill(os.getpid(), signal.SIGKILL)
    return done(spec)


def _kill_once(spec: TrialSpec) -> Trial:
    """'kill_once:PATH': dies unless the file is there."""
    mark = Path(spec.task.partition(":")[2])
    if not mark.exists():
        mark.touch()
        return _kill(spec)
    return done(spec)


def _leave_a_child(spec: TrialSpec) -> Trial:
    """'orphan:PATH': starts a process that outlives it, writes its id to the file, and hangs."""
    child = os.fork()
    if child == 0:
        time.sleep(600)
    Path(spec.task.partition(":")[2]).write_text(f"{os.getpid()} {child}")
    return nap(TrialSpec("nap:600", spec.plan, spec.seed))


def _hold_first(spec: TrialSpec) -> Trial:
    """'hold_first:PATH': the first one makes the file and ends when PATH.go is there; others end at once."""
    mark = Path(spec.task.partition(":")[2])
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return done(spec)
    while not Path(f"{mark}.go").exists():
        time.sleep(0.02)
    return done(spec)


def _hold(spec: TrialSpec) -> Trial:
    """'hold:PATH': makes the file PATH.SEED, and ends when PATH.go is there."""
    mark = spec.task.partition(":")[2]
    Path(f"{mark}.{spec.seed}").touch()
    while not Path(f"{mark}.go").exists():
        time.sleep(0.02)
    return done(spec)


def _report_place(spec: TrialSpec) -> Trial:
    """'place:NAME': the reason is what this process has of the variable NAME, its GPUs, its folder's files, and its Ray node's labels."""
    import ray

    labels = ray.get_runtime_context().get_node_labels()
    own = {name: value for name, value in labels.items() if not name.startswith("ray.io/")}
    found = (os.environ.get(spec.task.partition(":")[2]), os.environ.get("CUDA_VISIBLE_DEVICES"), sorted(os.listdir()), own)
    return replace(done(spec), reason=json.dumps(found))


def _hoard(spec: TrialSpec) -> Trial:
    raise MemoryError("12 GiB")


def _chat(spec: TrialSpec) -> Trial:
    print("chatter of a task")
    return done(spec)


BEHAVIOURS: dict[str, Callable[[TrialSpec], Trial]] = {
    "noop": done,
    "nap": nap,
    "raise": _raise,
    "exit": lambda spec: sys.exit(3),
    "exit_hard": lambda spec: os._exit(4),
    "kill": _kill,
    "kill_once": _kill_once,
    "hang": lambda spec: nap(TrialSpec("nap:600", spec.plan, spec.seed)),
    "orphan": _leave_a_child,
    "hold_first": _hold_first,
    "hold": _hold,
    "place": _report_place,
    "hoard": _hoard,
    "chat": _chat,
}


def act(spec: TrialSpec) -> Trial:
    """Do what the task is called."""
    return BEHAVIOURS[spec.task.partition(":")[0]](spec)


def draw(
    *tasks: str, seeds: Sequence[int] = (0,), plans: Sequence[Plan] = PLANS[:1], timeout: float | None = None
) -> list[DrawnTrial]:
    """The trials of a full sweep over these."""
    return Sweep("s", tasks, tuple(plans), tuple(seeds), settings=TrialSettings(timeout_seconds=timeout)).draw()
