"""Simulated trials side by side in one long-lived process for each GPU, where they share captured graphs (`bench.py`).

Specs go to the process through a pipe, results come back as JSON. When it dies, all that it ran is tried again, each trial in a
process of its own (`local.py`), as are trials that store: what kills a process then harms no other.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Protocol, final

from paredown.plan.trial import Status, Trial
from paredown.runs.claims import Claim, Ended
from paredown.runs.engines.engine import Engine, Run, failed, of_error
from paredown.runs.engines.local import PRELOAD, LocalEngine, Room, cause_of, check_run, kill_group, settle, without_main
from paredown.runs.sweep import TrialSpec

BEGUN, ALONE, KNOWN = "begun", "alone", "known"  # what a child tells of a trial: it runs, it shares no graph, its result
PER_LANE = 2  # trials that are held for each lane, so that one waits where another ends


class Trains(Protocol):
    """A `Run` that can also say what a trial trains."""

    def __call__(self, spec: TrialSpec) -> Trial:
        """Train it."""
        ...

    def setting(self, spec: TrialSpec) -> Any:
        """Of `evaluate`."""
        ...


@dataclass
class Child:
    """The process of a GPU, our ends of its pipes, and what it has been given: claims with the times at which they must be over."""

    process: BaseProcess
    pipe: Connection
    life: Connection
    claims: dict[str, tuple[Claim, float | None]] = field(default_factory=dict[str, tuple[Claim, float | None]])


@final
class GraphsEngine(Engine):
    """Lanes on each GPU; without one, on the CPU."""

    def __init__(self, run: Run, *, lanes: int, gpus: Sequence[str] = (), preload: Sequence[str] = PRELOAD) -> None:
        check_run(run)
        self._run, self._lanes = run, lanes
        self._gpus: list[str | None] = [*gpus] or [None]
        self.slots = PER_LANE * lanes * len(self._gpus)
        self._children: dict[str | None, Child] = {}
        self._others = LocalEngine(run, slots=len(self._gpus), gpus=gpus, preload=preload)
        self._later: deque[Claim] = deque()  # for processes of their own, when there is room
        self._context: Any = get_context("forkserver")
        self._context.set_forkserver_preload([*preload, __name__])

    def start(self, claim: Claim) -> None:
        """Begin the claimed trial."""
        if claim.spec.settings.mode == "store" or claim.attempt > 1:
            self._start_alone(claim)
            return
        gpu = min(self._gpus, key=lambda gpu: len(self._children[gpu].claims) if gpu in self._children else 0)
        if gpu not in self._children:
            self._children[gpu] = self._child(gpu)
        self._children[gpu].claims[claim.key] = (claim, None)
        with suppress(OSError):  # it died: `wait` will find out
            self._children[gpu].pipe.send((claim.key, claim.spec))

    def _start_alone(self, *claims: Claim) -> None:
        """In a process for each, as many as there is room for."""
        self._later.extend(claims)
        while self._later and len(self._others.pipes) < self._others.slots:
            self._others.start(self._later.popleft())

    def _child(self, gpu: str | None) -> Child:
        (ours, theirs), (life, its_life) = self._context.Pipe(), self._context.Pipe()
        arguments = (theirs, its_life, self._run, Room(gpu, 1), self._lanes)
        process = self._context.Process(target=serve, args=arguments, daemon=False)
        with without_main():
            process.start()
        theirs.close()
        its_life.close()
        return Child(process, ours, life)

    def wait(self, seconds: float) -> list[Ended]:
        """The trials that ended, after at most `seconds`."""
        pipes = [child.pipe for child in self._children.values()]
        deadlines = [deadline for child in self._children.values() for _, deadline in child.claims.values() if deadline is not None]
        left = min([seconds, *(deadline - time.monotonic() for deadline in deadlines)])
        connection.wait([*pipes, *self._others.pipes], timeout=max(0.0, left))
        ended = [*self._others.wait(0.0), *(ended for gpu in list(self._children) for ended in self._look(gpu))]
        self._start_alone()
        return ended

    def _look(self, gpu: str | None) -> list[Ended]:
        """What a child has sent; if it is no more, what it ran goes back."""
        child = self._children[gpu]
        ended: list[Ended] = []
        try:
            while child.pipe.poll():
                told = json.loads(child.pipe.recv_bytes())
                claim = child.claims[told["key"]][0]
                if told["event"] == BEGUN:
                    limit = claim.spec.settings.timeout_seconds
                    child.claims[claim.key] = (claim, None if limit is None else time.monotonic() + limit)
                    continue
                del child.claims[claim.key]
                if told["event"] == ALONE:
                    self._start_alone(claim)
                else:
                    ended.append(Ended(claim, Trial.from_json(told["trial"])))
        except (EOFError, OSError):
            child.process.join()
            return [*ended, *self._drop(gpu, cause_of(child.process.exitcode))]
        late = [claim for claim, deadline in child.claims.values() if deadline is not None and time.monotonic() >= deadline]
        for claim in late:
            del child.claims[claim.key]
            reason = f"no result after {claim.spec.settings.timeout_seconds:g} s (timeout_seconds); its process was ended"
            ended.append(Ended(claim, failed(claim.spec, reason, Status.KILLED)))
        return [*ended, *(self._drop(gpu, "it ran beside a trial that took too long") if late else [])]

    def _drop(self, gpu: str | None, reason: str) -> list[Ended]:
        """End a child; all that it still had is tried again."""
        child = self._children.pop(gpu)
        kill_group(child.process)
        child.pipe.close()
        child.life.close()
        return [Ended(claim, None, reason) for claim, _ in child.claims.values()]

    def stop(self) -> list[Claim]:
        """End all running trials and return their claims."""
        dropped = [ended.claim for gpu in list(self._children) for ended in self._drop(gpu, "")]
        later = list(self._later)
        self._later.clear()
        return [*dropped, *later, *self._others.stop()]


def serve(pipe: Connection, life: Connection, run: Trains, room: Room, lanes: int) -> None:
    """All that a GPU's process does, until the pipe is closed."""
    settle(life, room)
    with suppress(EOFError, OSError):
        _serve(pipe, run, lanes)
    os._exit(0)


def _serve(pipe: Connection, run: Trains, lanes: int) -> None:
    from paredown.runs.bench import Bench

    bench, specs = Bench(lanes, evaluates=False), dict[str, TrialSpec]()
    while True:
        while pipe.poll(0 if bench.is_busy else None):
            key, spec = pipe.recv()
            specs[key] = spec
            try:
                bench.add(key, run.setting(spec))
            except BaseException as error:
                _send(pipe, key, KNOWN, of_error(specs.pop(key), error))
        known = bench.turn()
        for key in bench.begun:
            _send(pipe, key, BEGUN)
        bench.begun.clear()
        for key, trial in known:
            spec = specs.pop(key)
            if isinstance(trial, Trial):
                _send(pipe, key, KNOWN, trial, spec.task)
            else:
                _end_if_broken()
                _send(pipe, key, ALONE)


def _end_if_broken() -> None:
    """After a fault of the device nothing else works in this process: its trials run again, each alone."""
    import torch

    if torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            os._exit(1)


def _send(pipe: Connection, key: str, event: str, trial: Trial | None = None, task: str | None = None) -> None:
    told: dict[str, Any] = {"key": key, "event": event}
    if trial is not None:
        told["trial"] = trial.to_json() | ({} if task is None else {"task": task})  # as the sweep calls it
    pipe.send_bytes(json.dumps(told).encode())
