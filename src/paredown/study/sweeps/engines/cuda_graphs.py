"""Run simulated trials in parallel on a GPU: those that differ only in data, learning rate, formats and seed share CUDA graphs.

>>> from paredown.plan.plan import Plan
>>> from paredown.study.tasks.evaluate import make_setting
>>> settings = [make_setting("digits#model=mlp,steps=5", Plan.uniform(activation=text), mode="simulate") for text in ("e4m3", "e5m2")]
>>> bench = GraphBench(num_lanes=2)
>>> for number, setting in enumerate(settings):
...     bench.add(number, setting)
>>> found = {}
>>> while bench.is_busy:
...     found |= bench.turn()
>>> [found[number].status.value for number in (0, 1)]
['done', 'done']

Results equal those of `evaluate` on the same device, bit for bit. Runs that cannot share a graph (`why_alone`) are returned untrained.

`GraphsEngine` has one long-lived process with a GraphBench for each GPU. Trials are sent to it through a pipe, results returned as JSON.
When it dies, its trials run again, each in a process of its own (engines/engine.py), as do trials in store mode, so that a trial that kills
its process does not affect others again.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, final

import torch

from paredown.check.out_of_memory import is_out_of_memory
from paredown.codec.runtime_formats import is_live, is_narrow
from paredown.simulate.rounded_values import MODES, Simulate
from paredown.study.sweeps.engines import engine as processes
from paredown.study.sweeps.engines.graph_lane import InitialStates, Lane, LaneRun, LayoutMismatch, synchronize
from paredown.study.sweeps.sweep import Claim, EndedTrial, TrialSpec
from paredown.study.tasks.data import Pair
from paredown.study.tasks.evaluate import curve_of, deterministic, empty_trial, seeded
from paredown.study.tasks.task import RULES
from paredown.study.tasks.training import FUSED, TrainingSetup
from paredown.study.tasks.trial import Trial

log = logging.getLogger("paredown")
NUM_LANES = 8
MAX_GROUPS = 3  # groups of runs whose graphs are kept
MAX_REASON_CHARS = 200
MAX_CACHED_TESTS = 8  # tasks whose test examples are kept on the device


def why_alone(setting: TrainingSetup) -> str | None:
    """Return why the training `setting` cannot share a captured CUDA graph with others; None if it can."""
    settings, mode = setting.task.settings, MODES.get(setting.mode) if isinstance(setting.mode, str) else setting.mode
    if not isinstance(mode, Simulate):
        return "it is not simulated, and tensors that are stored in different formats have different sizes"
    if mode.raised is not None or mode.first_weights == "exact":
        return "what happens in a step depends on the steps before"
    if RULES[settings.optimizer].kind not in FUSED:
        return f"torch has no {settings.optimizer} that reads its learning rate from memory"
    if settings.options.get("dampening"):
        return "the first step of SGD with dampening differs from the others"
    if settings.loss_scale is not None:
        return "torch.amp.GradScaler synchronizes with the device in each step"
    if not all(is_live(assignment.format) for _, assignment in setting.plan.rules):
        return "formats with blocks or tables are fixed in a graph"
    return None


def kind_of(setting: TrainingSetup) -> Any:
    """Return a key that is equal for trainings that can share captured CUDA graphs."""
    task, settings = setting.task, replace(setting.task.settings, lr=1.0, schedule="constant")
    mode = MODES.get(setting.mode, setting.mode) if isinstance(setting.mode, str) else setting.mode
    options = tuple(sorted((name, repr(value)) for name, value in settings.options.items()))
    x, answers = next(iter(task.data.tests(1, device=torch.device("cpu"))))
    shapes = (x.shape[1:], x.dtype, answers.shape[1:], answers.dtype, task.batch, getattr(task.data, "look", None))
    fixed = (
        model_key(task.make_model),
        task.loss,
        task.judge,
        task.autocast,
        task.channels_last,
        settings.optimizer,
        options,
        settings.max_norm,
        settings.loss_factor,
    )
    roundings = tuple((key, a.rounding, a.format is None, is_narrow(a.format)) for key, a in setting.plan.rules)
    return (*fixed, mode, shapes, str(setting.device), roundings)


def model_key(make: Callable[..., Any]) -> Any:
    """Return a key by which functions that make the same model are recognized; partials are compared by function and arguments."""
    if isinstance(make, partial):
        return (model_key(make.func), tuple(map(model_key, make.args)), tuple(sorted(make.keywords.items())))
    return make


class QueuedTraining(NamedTuple):
    """A training in the queue for a lane (a model with a captured graph); `turn` returns its trial under `key`."""

    key: Any
    setting: TrainingSetup


@dataclass
class GraphGroup:
    """Groups trainings that can share captured graphs: those in the queue, and the lanes (models with graphs) they run in."""

    queue: deque[QueuedTraining] = field(default_factory=deque[QueuedTraining])
    lanes: list[Lane] = field(default_factory=list[Lane])

    @property
    def idle(self) -> list[Lane]:
        """Return the lanes (models with captured graphs) of this group that train nothing now."""
        return [lane for lane in self.lanes if lane.run is None]


class GraphBench:
    """Trains many runs in parallel, each in a Lane, a model with captured CUDA graphs; `turn` queues a step in every lane."""

    def __init__(self, num_lanes: int = NUM_LANES) -> None:
        self._num_lanes = num_lanes
        self._groups: OrderedDict[Any, GraphGroup] = OrderedDict()
        self._alone: dict[Any, LayoutMismatch] = {}  # keys of runs that share no graph
        self._begun: dict[int, tuple[Any, float]] = {}  # id of a lane -> key of its run, and when it began
        self._starts, self._tests = InitialStates(), dict[Any, list[Pair]]()
        self._reported = set[tuple[str, str]]()
        self.begun: list[Any] = []  # keys of runs that have begun; the caller clears it

    def add(self, key: Any, setting: TrainingSetup) -> None:
        """Queue a training; `turn` returns its trial under `key`."""
        queued, reason = QueuedTraining(key, setting), why_alone(setting)
        kind = kind_of(setting) if reason is None else None
        try:
            hash(kind)
        except TypeError:  # an argument of the model is a list
            reason = "arguments of its model are not hashable, and graphs are found by them"
        if reason is not None:
            self._leave(queued, reason)
            return
        self._groups.setdefault(kind, GraphGroup()).queue.append(queued)
        self._groups.move_to_end(kind)

    @property
    def is_busy(self) -> bool:
        """Return whether any run is queued or running."""
        return bool(self._alone or self._begun or any(group.queue for group in self._groups.values()))

    def turn(self) -> dict[Any, Trial | LayoutMismatch]:
        """Queue one step in every busy lane, and return by key what has ended: trials, and errors of runs that fit no graph."""
        self._fill()
        results: dict[Any, Trial | LayoutMismatch] = {}
        busy = [lane for group in self._groups.values() for lane in group.lanes if lane.run is not None]
        for lane in busy:
            try:
                trial = lane.advance(blocks=len(busy) == 1)
            except Exception as error:  # alone the run raises it again, or succeeds without a graph
                assert lane.run is not None
                self._leave(QueuedTraining(self._begun.pop(id(lane))[0], lane.run.setting), _first_line(error))
                lane.run = trial = None
            if trial is not None:
                key, begun = self._begun.pop(id(lane))
                results[key] = replace(trial, seconds=time.perf_counter() - begun)
        alone, self._alone = self._alone, {}
        return results | alone

    # --- queues and lanes -----------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        for group in list(self._groups.values()):
            while group.queue and len(self._begun) < self._num_lanes:
                queued = group.queue.popleft()
                try:
                    with seeded(queued.setting), deterministic(queued.setting.device):
                        self._start(group, queued)
                except Exception as error:
                    if not is_out_of_memory(error) or not self._has_freed_memory():
                        self._leave(queued, _first_line(error))  # also where the capture failed: alone it needs none
                    else:
                        group.queue.appendleft(queued)
                        return
        self._forget()

    def _leave(self, queued: QueuedTraining, reason: str) -> None:
        """Mark a queued run as one that cannot share a graph, for `reason`; `turn` then returns it untrained."""
        self._alone[queued.key] = LayoutMismatch(reason)
        name = queued.setting.task.name
        if (name, reason) not in self._reported:
            self._reported.add((name, reason))
            log.warning("Trials of task %r share no captured graph and run alone: %s.", name, reason)

    def _has_freed_memory(self) -> bool:
        """After an allocation failed, free idle lanes (models with graphs), allow no more lanes, and return whether to retry."""
        dropped = self._drop_idle()
        if self._begun:
            self._num_lanes = len(self._begun)
        return dropped or bool(self._begun)

    def _drop_idle(self) -> bool:
        idle = [lane for group in self._groups.values() for lane in group.idle]
        for group in self._groups.values():
            group.lanes = [lane for lane in group.lanes if lane.run is not None]
        for lane in idle:
            lane.close()
        num_idle = len(idle)
        idle.clear()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return num_idle > 0

    def _start(self, group: GraphGroup, queued: QueuedTraining) -> None:
        setting = queued.setting
        tests = self._tests_of(setting)
        if not group.idle:
            key = (model_key(setting.task.make_model), str(setting.device))
            group.lanes.append(Lane(setting, key, self._starts))
        lane, begun = group.idle[0], time.perf_counter()
        run = LaneRun(setting, empty_trial(setting), curve_of(setting.task), tests)
        lane.begin(run)
        self._begun[id(lane)] = (queued.key, begun)
        self.begun.append(queued.key)

    def _forget(self) -> None:
        """Close idle groups of lanes (models with graphs), those unused for longest first, until MAX_GROUPS are left at most."""
        idle = [kind for kind, group in self._groups.items() if not group.queue and len(group.idle) == len(group.lanes)]
        for kind in idle[: max(0, len(self._groups) - MAX_GROUPS)]:
            for lane in self._groups.pop(kind).lanes:
                lane.close()

    def _tests_of(self, setting: TrainingSetup) -> list[Pair]:
        key = (setting.task.data, setting.task.batch, str(setting.device))
        if key not in self._tests:
            self._tests[key] = list(setting.task.data.tests(setting.task.batch, device=setting.device))
            synchronize(setting.device)  # before lanes read it in their streams
            while len(self._tests) > MAX_CACHED_TESTS:
                synchronize(setting.device)
                del self._tests[next(iter(self._tests))]
        return self._tests[key]


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:MAX_REASON_CHARS] or type(error).__name__


# --- The graphs engine ---

BEGUN, ALONE, ENDED = "begun", "alone", "ended"  # events of a child: a trial runs, it can share no graph, it has a result
PER_LANE = 2  # claims for each lane, so that the next trial is at hand when one ends


@dataclass
class GpuProcess:
    """Holds the child process that trains on one GPU, its pipes, and the trials that were sent to it.

    `claims` has each trial by its key, with its deadline once it runs.
    """

    process: BaseProcess
    pipe: Connection
    life: Connection
    claims: dict[str, tuple[Claim, float | None]] = field(default_factory=dict[str, tuple[Claim, float | None]])


@final
class GraphsEngine(processes.Engine):
    """Runs simulated trials in parallel, `lanes` (models with captured graphs) on each GPU, or on the CPU if there is none."""

    def __init__(self, run: processes.RunTrial, *, lanes: int, gpus: Sequence[str] = ()) -> None:
        processes.check_run(run)
        self._run, self._lanes = run, lanes
        self._gpus: list[str | None] = [*gpus] or [None]
        self.slots = PER_LANE * lanes * len(self._gpus)
        self._children: dict[str | None, GpuProcess] = {}
        self._others = processes.LocalEngine(run, slots=len(self._gpus), gpus=gpus)
        self._later: deque[Claim] = deque()  # trials that will run in a process of their own, when a slot is free
        self._context: Any = get_context("forkserver")
        self._context.set_forkserver_preload([*processes.PRELOAD, __name__])

    def start(self, claim: Claim) -> None:
        if claim.spec.settings.mode == "store" or claim.attempt > 1:
            self._start_alone(claim)
            return
        gpu = min(self._gpus, key=lambda gpu: len(self._children[gpu].claims) if gpu in self._children else 0)
        if gpu not in self._children:
            self._children[gpu] = self._child(gpu)
        self._children[gpu].claims[claim.key] = (claim, None)
        with suppress(OSError):  # the process died: `wait` will notice
            self._children[gpu].pipe.send((claim.key, claim.spec))

    def _start_alone(self, *claims: Claim) -> None:
        """Queue trials that need a process of their own each, and start as many queued trials as may run in parallel."""
        self._later.extend(claims)
        while self._later and len(self._others.pipes) < self._others.slots:
            self._others.start(self._later.popleft())

    def _child(self, gpu: str | None) -> GpuProcess:
        (parent_pipe, child_pipe), (life, child_life) = self._context.Pipe(), self._context.Pipe()
        arguments = (child_pipe, child_life, self._run, processes.TrialResources(gpu, 1), self._lanes)
        process = self._context.Process(target=serve, args=arguments, daemon=False)
        with processes.without_main():
            process.start()
        child_pipe.close()
        child_life.close()
        return GpuProcess(process, parent_pipe, life)

    def wait(self, seconds: float) -> list[EndedTrial]:
        pipes = [child.pipe for child in self._children.values()]
        deadlines = [deadline for child in self._children.values() for _, deadline in child.claims.values() if deadline is not None]
        left = min([seconds, *(deadline - time.monotonic() for deadline in deadlines)])
        connection.wait([*pipes, *self._others.pipes], timeout=max(0.0, left))
        ended = [*self._others.wait(0.0), *(ended for gpu in list(self._children) for ended in self._receive(gpu))]
        self._start_alone()
        return ended

    def _receive(self, gpu: str | None) -> list[EndedTrial]:
        """Return the trials that ended in the child process of `gpu`; all, without results, if it died or one ran out of time."""
        child = self._children[gpu]
        ended: list[EndedTrial] = []
        try:
            while child.pipe.poll():
                message = json.loads(child.pipe.recv_bytes())
                claim = child.claims[message["key"]][0]
                if message["event"] == BEGUN:
                    child.claims[claim.key] = (claim, processes.deadline_of(claim))
                    continue
                del child.claims[claim.key]
                if message["event"] == ALONE:
                    self._start_alone(claim)
                else:
                    ended.append(EndedTrial(claim, Trial.from_json(message["trial"])))
        except (EOFError, OSError):
            child.process.join()
            return [*ended, *self._drop(gpu, processes.cause_of(child.process.exitcode))]
        now = time.monotonic()
        overdue = [claim for claim, deadline in child.claims.values() if deadline is not None and now >= deadline]
        for claim in overdue:
            del child.claims[claim.key]
            ended.append(processes.late(claim))
        return [*ended, *(self._drop(gpu, "it ran in one process with a trial that exceeded timeout_seconds") if overdue else [])]

    def _drop(self, gpu: str | None, reason: str) -> list[EndedTrial]:
        """Kill the child process of one GPU, and return its trials without results but with `reason`, so that they run again."""
        child = self._children.pop(gpu)
        processes.kill_group(child.process)
        child.pipe.close()
        child.life.close()
        return [EndedTrial(claim, None, reason) for claim, _ in child.claims.values()]

    def stop(self) -> None:
        for gpu in list(self._children):
            self._drop(gpu, "")
        self._later.clear()
        self._others.stop()


def serve(pipe: Connection, life: Connection, run: Any, resources: processes.TrialResources, lanes: int) -> None:
    """Run trials that arrive through `pipe` on one GPU until `pipe` is closed; this is the main function of a child process.

    `run.setting(spec)` is the setup of a trial, `resources` names the GPU, and `lanes` trials run in parallel. The process also ends
    when the parent's end of `life` is closed.
    """
    processes.settle(life, resources)
    with suppress(EOFError, OSError):
        _serve(pipe, run, lanes)
    os._exit(0)


def _serve(pipe: Connection, run: Any, lanes: int) -> None:
    bench, specs = GraphBench(lanes), dict[str, TrialSpec]()
    while True:
        while pipe.poll(0 if bench.is_busy else None):
            key, spec = pipe.recv()
            specs[key] = spec
            try:
                bench.add(key, run.setting(spec))
            except BaseException as error:
                _send(pipe, key, ENDED, processes.of_error(specs.pop(key), error))
        results = bench.turn()
        for key in bench.begun:
            _send(pipe, key, BEGUN)
        bench.begun.clear()
        for key, trial in results.items():
            spec = specs.pop(key)
            if isinstance(trial, Trial):
                _send(pipe, key, ENDED, trial, spec.task)
            else:
                _end_if_broken()
                _send(pipe, key, ALONE)


def _end_if_broken() -> None:
    """Exit after a device fault, when no CUDA call of this process works any more: its trials then run again, each alone."""
    if torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            os._exit(1)


def _send(pipe: Connection, key: str, event: str, trial: Trial | None = None, task: str | None = None) -> None:
    message: dict[str, Any] = {"key": key, "event": event}
    if trial is not None:
        message["trial"] = trial.to_json() | ({} if task is None else {"task": task})  # the sweep's text
    pipe.send_bytes(json.dumps(message).encode())
