"""Simulated trainings side by side: those that differ in data, rate, formats and seed alone share lanes, and with them captured graphs.

>>> from paredown.tasks.evaluate import make_setting
>>> settings = [make_setting("digits#model=mlp,steps=5", Plan.uniform(activation=text), mode="simulate") for text in ("e4m3", "e5m2")]
>>> bench = GraphBench(num_lanes=2)
>>> for number, setting in enumerate(settings):
...     bench.add(number, setting)
>>> sorted((number, trial.status.value) for number, trial in bench.run())
[(0, 'done'), (1, 'done')]

Results are those of `evaluate`, bit by bit on the same device. What cannot share a graph (`why_alone`) is trained by `evaluate` itself.

Simulated trials side by side in one long-lived process for each GPU, where they share captured graphs (`bench.py`).

Specs go to the process through a pipe, results come back as JSON. When it dies, all that it ran is tried again, each trial in a
process of its own (`sweeps/engines/engine.py`), as are trials that store: what kills a process then harms no other.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, Protocol, final

import torch

from paredown.codec.runtime_formats import is_live, is_narrow
from paredown.plan.plan import Plan
from paredown.simulate.rounded_values import MODES, Simulate
from paredown.sweeps.engines.engine import (
    PRELOAD,
    Engine,
    LocalEngine,
    RunTrial,
    TrialResources,
    cause_of,
    check_run,
    failed,
    kill_group,
    of_error,
    settle,
    without_main,
)
from paredown.sweeps.engines.graph_lane import InitialStates, Lane, LaneRun, LayoutMismatch, wait_for
from paredown.sweeps.store import Claim, EndedTrial
from paredown.sweeps.sweep import TrialSpec
from paredown.tasks.data import Pair
from paredown.tasks.evaluate import curve_of, deterministic, empty_trial, evaluate, is_out_of_memory, seeded
from paredown.tasks.task import RULES
from paredown.tasks.training import FUSED, TrainingSetup
from paredown.tasks.trial import Status, Trial

log = logging.getLogger("paredown")
NUM_LANES = 8
KEPT_GROUPS = 3  # kinds of runs whose graphs are kept
LONGEST = 200  # letters of a reason
KEPT_TESTS = 8  # tasks whose test examples are kept on the device


def why_alone(setting: TrainingSetup) -> str | None:
    """Why a training cannot share a graph, or None."""
    recipe, how = setting.task.recipe, MODES.get(setting.mode) if isinstance(setting.mode, str) else setting.mode
    if not isinstance(how, Simulate):
        return "tensors that are stored in other formats have other sizes"
    if how.raised is not None or how.first_weights == "exact":
        return "what happens in a step depends on the steps before"
    if RULES[recipe.optimizer].kind not in FUSED:
        return f"torch has no {recipe.optimizer} that reads its rate from memory"
    if recipe.options.get("dampening"):
        return "the first step of SGD with dampening is unlike the others"
    if recipe.loss_scale is not None:
        return "torch's scaler of losses asks the device in each step"
    if not all(is_live(assignment.format) for _, assignment in setting.plan.rules):
        return "formats with blocks or tables are fixed in a graph"
    return None


def kind_of(setting: TrainingSetup) -> Any:
    """What runs in one group have in common: all that is fixed when a graph is captured."""
    task, recipe = setting.task, replace(setting.task.recipe, lr=1.0, schedule="constant")
    how = MODES.get(setting.mode, setting.mode) if isinstance(setting.mode, str) else setting.mode
    options = tuple(sorted((name, repr(value)) for name, value in recipe.options.items()))
    x, answers = next(iter(task.data.tests(1, device=torch.device("cpu"))))
    shapes = (x.shape[1:], x.dtype, answers.shape[1:], answers.dtype, task.batch, getattr(task.data, "look", None))
    fixed = (
        model_key(task.make_model),
        task.loss,
        task.judge,
        task.autocast,
        task.channels_last,
        recipe.optimizer,
        options,
        recipe.max_norm,
        recipe.loss_factor,
    )
    return (*fixed, how, shapes, str(setting.device), rounding_key(setting.plan))


def model_key(make: Callable[..., Any]) -> Any:
    """Equal for functions that make the same model: partials of the same with the same arguments."""
    if isinstance(make, partial):
        return (model_key(make.func), tuple(map(model_key, make.args)), tuple(sorted(make.keywords.items())))
    return make


def rounding_key(plan: Plan) -> Any:
    """What a graph has fixed of a plan: who is rounded, how, and whether by a format that TF32 keeps."""
    return tuple((key, a.rounding, a.format is None, is_narrow(a.format)) for key, a in plan.rules)


class QueuedTraining(NamedTuple):
    """A training that was asked for."""

    key: Any
    setting: TrainingSetup


@dataclass
class GraphGroup:
    """Runs that share graphs, and the lanes that have them."""

    waiting: deque[QueuedTraining] = field(default_factory=deque[QueuedTraining])
    lanes: list[Lane] = field(default_factory=list[Lane])

    @property
    def idle(self) -> list[Lane]:
        """Lanes without a run."""
        return [lane for lane in self.lanes if lane.run is None]


class GraphBench:
    """Trains what is added; `turn` queues a step in every lane and gives the trials that have become known.

    `evaluates`: what cannot share a graph is trained here too, when no lane runs. Otherwise it comes back as NotAlike.
    """

    def __init__(self, num_lanes: int = NUM_LANES, *, evaluates: bool = True) -> None:
        self._num_lanes, self._evaluates = num_lanes, evaluates
        self._groups: OrderedDict[Any, GraphGroup] = OrderedDict()
        self._alone: deque[QueuedTraining] = deque()
        self._begun: dict[int, tuple[Any, float]] = {}  # of lanes by id: the key of the run, and when it began
        self._starts, self._tests = InitialStates(), dict[Any, list[Pair]]()
        self._told = set[tuple[str, str]]()
        self.begun: list[Any] = []  # keys of runs that have begun, for whoever wants to know

    def add(self, key: Any, setting: TrainingSetup) -> None:
        """Ask for a training; `key` comes back with its trial."""
        waiting, reason = QueuedTraining(key, setting), why_alone(setting)
        kind = kind_of(setting) if reason is None else None
        if kind is None or not _is_hashable(kind):
            self._leave(waiting, reason or "nothing tells whether another model is the same")
            return
        self._groups.setdefault(kind, GraphGroup()).waiting.append(waiting)
        self._groups.move_to_end(kind)

    @property
    def is_busy(self) -> bool:
        """Whether anything runs or waits."""
        return bool(self._alone or self._begun or any(group.waiting for group in self._groups.values()))

    def run(self) -> Iterator[tuple[Any, Trial]]:
        """All trials, as they become known; what a task raises is raised."""
        while self.is_busy:
            for key, trial in self.turn():
                if isinstance(trial, BaseException):
                    raise trial
                yield key, trial

    def turn(self) -> list[tuple[Any, Trial | BaseException]]:
        """One step of everything; trials that have become known, or what their tasks raised."""
        self._fill()
        if self._alone and not self._evaluates:
            refused, self._alone = self._alone, deque()
            return [(waiting.key, LayoutMismatch("it shares no graph with others")) for waiting in refused]
        if self._alone and not self._begun:
            return [self._evaluate(self._alone.popleft())]
        found: list[tuple[Any, Trial | BaseException]] = []
        busy = [lane for group in self._groups.values() for lane in group.lanes if lane.run is not None]
        for lane in busy:
            try:
                trial: Trial | BaseException | None = lane.advance(waits=len(busy) == 1)
            except Exception as error:  # alone it gives its own error, or does not
                assert lane.run is not None
                self._leave(QueuedTraining(self._begun.pop(id(lane))[0], lane.run.setting), _said(error))
                lane.run = trial = None
            if trial is not None:
                found.append(self._ended(lane, trial))
        return found

    def _ended(self, lane: Lane, trial: Trial | BaseException) -> tuple[Any, Trial | BaseException]:
        key, begun = self._begun.pop(id(lane))
        if isinstance(trial, Trial):
            trial = replace(trial, seconds=time.perf_counter() - begun)
        return key, trial

    # --- who runs where -------------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Give lanes to what waits, new ones as far as there may be more."""
        for group in list(self._groups.values()):
            while group.waiting and len(self._begun) < self._num_lanes:
                waiting = group.waiting.popleft()
                try:
                    with seeded(waiting.setting), deterministic(waiting.setting.device):
                        self._start(group, waiting)
                except Exception as error:
                    if not is_out_of_memory(error) or not self._has_made_room():
                        self._leave(waiting, _said(error))  # what cannot be captured, too: alone it runs, or gives its own error
                    else:
                        group.waiting.appendleft(waiting)
                        return
        self._forget()

    def _leave(self, waiting: QueuedTraining, reason: str) -> None:
        """It is trained alone, which is slower: the reason is told once for each task."""
        self._alone.append(waiting)
        name = waiting.setting.task.name
        if (name, reason) not in self._told:
            self._told.add((name, reason))
            log.warning("Trials of task %r share no captured graph and run alone: %s.", name, reason)

    def _has_made_room(self) -> bool:
        """Whether there is hope for memory: idle lanes were dropped, or fewer will run."""
        dropped = self._drop_idle()
        if self._begun:
            self._num_lanes = len(self._begun)
        return dropped or bool(self._begun)

    def _drop_idle(self) -> bool:
        """Give the memory of lanes without a run back; whether there were any."""
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

    def _start(self, group: GraphGroup, waiting: QueuedTraining) -> None:
        setting = waiting.setting
        tests = self._tests_of(setting)
        if not group.idle:
            key = (model_key(setting.task.make_model), str(setting.device))
            group.lanes.append(Lane(setting, key, self._starts))
        lane, begun = group.idle[0], time.perf_counter()
        run = LaneRun(setting, empty_trial(setting), curve_of(setting.task), tests)
        lane.begin(run)
        self._begun[id(lane)] = (waiting.key, begun)
        self.begun.append(waiting.key)

    def _forget(self) -> None:
        """Drop the graphs that were not needed for longest."""
        idle = [kind for kind, group in self._groups.items() if not group.waiting and len(group.idle) == len(group.lanes)]
        for kind in idle[: max(0, len(self._groups) - KEPT_GROUPS)]:
            for lane in self._groups.pop(kind).lanes:
                lane.close()

    def _tests_of(self, setting: TrainingSetup) -> list[Pair]:
        """The test examples of a task on the device, kept from one run to the next."""
        key = (setting.task.data, setting.task.batch, str(setting.device))
        if key not in self._tests:
            found = list(setting.task.data.tests(setting.task.batch, device=setting.device))
            wait_for(setting.device)
            self._tests[key] = found
            while len(self._tests) > KEPT_TESTS:
                wait_for(setting.device)
                del self._tests[next(iter(self._tests))]
        return self._tests[key]

    def _evaluate(self, waiting: QueuedTraining) -> tuple[Any, Trial | BaseException]:
        setting = waiting.setting
        self._drop_idle()  # graphs have addresses of workspaces that a trial alone may give back
        self.begun.append(waiting.key)
        try:
            return waiting.key, evaluate(setting.task, setting.plan, seed=setting.seed, device=setting.device, mode=setting.mode)
        except Exception as error:
            return waiting.key, error


def _said(error: Exception) -> str:
    """Its first line."""
    return str(error).partition("\n")[0][:LONGEST] or type(error).__name__


def _is_hashable(kind: Any) -> bool:
    """Not where a model is made of lists, say: nothing tells whether another is the same."""
    try:
        hash(kind)
    except TypeError:
        return False
    return True


# --- Simulated trials side by side in one long-lived process for each GPU, where they share captured graphs (`bench.py`) ---

BEGUN, ALONE, KNOWN = "begun", "alone", "known"  # what a child tells of a trial: it runs, it shares no graph, its result
PER_LANE = 2  # trials that are held for each lane, so that one waits where another ends


class Trains(Protocol):
    """A `RunTrial` that can also say what a trial trains."""

    def __call__(self, spec: TrialSpec) -> Trial:
        """Train it."""
        ...

    def setting(self, spec: TrialSpec) -> Any:
        """Of `evaluate`."""
        ...


@dataclass
class GpuProcess:
    """The process of a GPU, our ends of its pipes, and what it has been given: claims with the times at which they must be over."""

    process: BaseProcess
    pipe: Connection
    life: Connection
    claims: dict[str, tuple[Claim, float | None]] = field(default_factory=dict[str, tuple[Claim, float | None]])


@final
class GraphsEngine(Engine):
    """Lanes on each GPU; without one, on the CPU."""

    def __init__(self, run: RunTrial, *, lanes: int, gpus: Sequence[str] = (), preload: Sequence[str] = PRELOAD) -> None:
        check_run(run)
        self._run, self._lanes = run, lanes
        self._gpus: list[str | None] = [*gpus] or [None]
        self.slots = PER_LANE * lanes * len(self._gpus)
        self._children: dict[str | None, GpuProcess] = {}
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

    def _child(self, gpu: str | None) -> GpuProcess:
        (ours, theirs), (life, its_life) = self._context.Pipe(), self._context.Pipe()
        arguments = (theirs, its_life, self._run, TrialResources(gpu, 1), self._lanes)
        process = self._context.Process(target=serve, args=arguments, daemon=False)
        with without_main():
            process.start()
        theirs.close()
        its_life.close()
        return GpuProcess(process, ours, life)

    def wait(self, seconds: float) -> list[EndedTrial]:
        """The trials that ended, after at most `seconds`."""
        pipes = [child.pipe for child in self._children.values()]
        deadlines = [deadline for child in self._children.values() for _, deadline in child.claims.values() if deadline is not None]
        left = min([seconds, *(deadline - time.monotonic() for deadline in deadlines)])
        connection.wait([*pipes, *self._others.pipes], timeout=max(0.0, left))
        ended = [*self._others.wait(0.0), *(ended for gpu in list(self._children) for ended in self._look(gpu))]
        self._start_alone()
        return ended

    def _look(self, gpu: str | None) -> list[EndedTrial]:
        """What a child has sent; if it is no more, what it ran goes back."""
        child = self._children[gpu]
        ended: list[EndedTrial] = []
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
                    ended.append(EndedTrial(claim, Trial.from_json(told["trial"])))
        except (EOFError, OSError):
            child.process.join()
            return [*ended, *self._drop(gpu, cause_of(child.process.exitcode))]
        late = [claim for claim, deadline in child.claims.values() if deadline is not None and time.monotonic() >= deadline]
        for claim in late:
            del child.claims[claim.key]
            reason = f"no result after {claim.spec.settings.timeout_seconds:g} s (timeout_seconds); its process was ended"
            ended.append(EndedTrial(claim, failed(claim.spec, reason, Status.KILLED)))
        return [*ended, *(self._drop(gpu, "it ran beside a trial that took too long") if late else [])]

    def _drop(self, gpu: str | None, reason: str) -> list[EndedTrial]:
        """End a child; all that it still had is tried again."""
        child = self._children.pop(gpu)
        kill_group(child.process)
        child.pipe.close()
        child.life.close()
        return [EndedTrial(claim, None, reason) for claim, _ in child.claims.values()]

    def stop(self) -> list[Claim]:
        """End all running trials and return their claims."""
        dropped = [ended.claim for gpu in list(self._children) for ended in self._drop(gpu, "")]
        later = list(self._later)
        self._later.clear()
        return [*dropped, *later, *self._others.stop()]


def serve(pipe: Connection, life: Connection, run: Trains, room: TrialResources, lanes: int) -> None:
    """All that a GPU's process does, until the pipe is closed."""
    settle(life, room)
    with suppress(EOFError, OSError):
        _serve(pipe, run, lanes)
    os._exit(0)


def _serve(pipe: Connection, run: Trains, lanes: int) -> None:

    bench, specs = GraphBench(lanes, evaluates=False), dict[str, TrialSpec]()
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
