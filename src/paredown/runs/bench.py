"""Simulated trainings side by side: those that differ in data, rate, formats and seed alone share lanes, and with them captured graphs.

>>> from paredown.runs.evaluate import make_setting
>>> settings = [make_setting("digits#model=mlp,steps=5", Plan.uniform(activation=text), mode="simulate") for text in ("e4m3", "e5m2")]
>>> bench = Bench(num_lanes=2)
>>> for number, setting in enumerate(settings):
...     bench.add(number, setting)
>>> sorted((number, trial.status.value) for number, trial in bench.run())
[(0, 'done'), (1, 'done')]

Results are those of `evaluate`, bit by bit on the same device. What cannot share a graph (`why_alone`) is trained by `evaluate` itself.
"""

from __future__ import annotations

import gc
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from paredown.codec.live import is_live, is_narrow
from paredown.plan.plan import Plan
from paredown.plan.trial import Trial
from paredown.runs.data import Pair
from paredown.runs.evaluate import curve_of, deterministic, evaluate, head_of, is_out_of_memory, seeded
from paredown.runs.graphs import Lane, NotAlike, Run, Starts, wait_for
from paredown.runs.task import RULES
from paredown.runs.train import FUSED, Setting
from paredown.session.simulated import MODES, Simulate

log = logging.getLogger("paredown")
NUM_LANES = 8
KEPT_GROUPS = 3  # kinds of runs whose graphs are kept
LONGEST = 200  # letters of a reason
KEPT_TESTS = 8  # tasks whose test examples are kept on the device


def why_alone(setting: Setting) -> str | None:
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


def kind_of(setting: Setting) -> Any:
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


class Waiting(NamedTuple):
    """A training that was asked for."""

    key: Any
    setting: Setting


@dataclass
class Group:
    """Runs that share graphs, and the lanes that have them."""

    waiting: deque[Waiting] = field(default_factory=deque[Waiting])
    lanes: list[Lane] = field(default_factory=list[Lane])

    @property
    def idle(self) -> list[Lane]:
        """Lanes without a run."""
        return [lane for lane in self.lanes if lane.run is None]


class Bench:
    """Trains what is added; `turn` queues a step in every lane and gives the trials that have become known.

    `evaluates`: what cannot share a graph is trained here too, when no lane runs. Otherwise it comes back as NotAlike.
    """

    def __init__(self, num_lanes: int = NUM_LANES, *, evaluates: bool = True) -> None:
        self._num_lanes, self._evaluates = num_lanes, evaluates
        self._groups: OrderedDict[Any, Group] = OrderedDict()
        self._alone: deque[Waiting] = deque()
        self._begun: dict[int, tuple[Any, float]] = {}  # of lanes by id: the key of the run, and when it began
        self._starts, self._tests = Starts(), dict[Any, list[Pair]]()
        self._told = set[tuple[str, str]]()
        self.begun: list[Any] = []  # keys of runs that have begun, for whoever wants to know

    def add(self, key: Any, setting: Setting) -> None:
        """Ask for a training; `key` comes back with its trial."""
        waiting, reason = Waiting(key, setting), why_alone(setting)
        kind = kind_of(setting) if reason is None else None
        if kind is None or not _is_hashable(kind):
            self._leave(waiting, reason or "nothing tells whether another model is the same")
            return
        self._groups.setdefault(kind, Group()).waiting.append(waiting)
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
            return [(waiting.key, NotAlike("it shares no graph with others")) for waiting in refused]
        if self._alone and not self._begun:
            return [self._evaluate(self._alone.popleft())]
        found: list[tuple[Any, Trial | BaseException]] = []
        busy = [lane for group in self._groups.values() for lane in group.lanes if lane.run is not None]
        for lane in busy:
            try:
                trial: Trial | BaseException | None = lane.advance(waits=len(busy) == 1)
            except Exception as error:  # alone it gives its own error, or does not
                assert lane.run is not None
                self._leave(Waiting(self._begun.pop(id(lane))[0], lane.run.setting), _said(error))
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

    def _leave(self, waiting: Waiting, reason: str) -> None:
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

    def _start(self, group: Group, waiting: Waiting) -> None:
        setting = waiting.setting
        tests = self._tests_of(setting)
        if not group.idle:
            key = (model_key(setting.task.make_model), str(setting.device))
            group.lanes.append(Lane(setting, key, self._starts))
        lane, begun = group.idle[0], time.perf_counter()
        run = Run(setting, head_of(setting), curve_of(setting.task), tests)
        lane.begin(run)
        self._begun[id(lane)] = (waiting.key, begun)
        self.begun.append(waiting.key)

    def _forget(self) -> None:
        """Drop the graphs that were not needed for longest."""
        idle = [kind for kind, group in self._groups.items() if not group.waiting and len(group.idle) == len(group.lanes)]
        for kind in idle[: max(0, len(self._groups) - KEPT_GROUPS)]:
            for lane in self._groups.pop(kind).lanes:
                lane.close()

    def _tests_of(self, setting: Setting) -> list[Pair]:
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

    def _evaluate(self, waiting: Waiting) -> tuple[Any, Trial | BaseException]:
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
