"""A lane: one training of a task at a time, each step a captured CUDA graph that reads formats, seeds, counts and rate from memory.

    begin     weights and buffers of the seed, no momentum, formats and keys of the plan, count 0      -> all by copies
    a step    next batch into x and answers -> replay                                                  -> loss added to `total`
    a point   `total` on its way to the host, read when it has come                                    -> the curve
    the end   a graph for each size of a test batch, replayed over the test examples                   -> error and loss

Nothing waits for the device but for points that lie AHEAD of what was read, and before a look at which a hopeless run may be stopped.
So several lanes run side by side, each in a stream of its own. On a CPU nothing is captured: the same code calls the step.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from paredown.errors import TaskError
from paredown.tasks.data import Pair
from paredown.tasks.training import Loop, LossCurve, TrainingSetup, rate_of, with_scores
from paredown.tasks.trial import Status, Trial

AHEAD = 3  # points of a curve that may be on their way
WARM_UPS = 2  # calls before one is captured: kernels are compiled, and libraries make their workspaces
KEPT_STARTS = 4  # first states of models that are kept on the device
Replay = Callable[[], None]


class InitialStates:
    """The first states of models, by seed, on the device."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Any, list[Tensor]] = OrderedDict()

    def of(self, key: Any, setting: TrainingSetup) -> list[Tensor]:
        """Parameters and buffers of a fresh model; `key` tells models apart."""
        found = self._kept.pop((key, setting.seed), None)
        if found is None:
            found = [tensor.detach().to(setting.device) for tensor in tensors_of(setting.model())]
            wait_for(setting.device)  # other streams read it too, and what goes out may still be read
        self._kept[key, setting.seed] = found
        while len(self._kept) > KEPT_STARTS:
            self._kept.popitem(last=False)
        return found


def tensors_of(model: nn.Module) -> list[Tensor]:
    """All that training changes in a model."""
    return [*model.parameters(), *model.buffers()]


@dataclass
class LaneRun:
    """A training in a lane: what is known of its trial so far, and where it is."""

    setting: TrainingSetup
    head: Trial
    curve: LossCurve
    tests: list[Pair]
    batches: Iterator[Pair] = field(default_factory=lambda: iter(()))
    num_queued: int = 0  # steps
    is_judged: bool = False  # or on its way to be


class Lane:
    """A model, its session and its optimizer, with which one run after the other is trained."""

    def __init__(self, setting: TrainingSetup, key: Any, starts: InitialStates) -> None:
        self.setting, self._key, self._starts = setting, key, starts
        self.is_cuda = setting.device.type == "cuda"
        self._stream = torch.cuda.Stream(setting.device) if self.is_cuda else None
        self.run: LaneRun | None = None
        self._points: deque[tuple[Tensor, Any]] = deque()
        self._results: tuple[Tensor, Any] | None = None
        with self._streaming():
            self._build(next(_batches(setting)))

    def _streaming(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()

    # --- once -----------------------------------------------------------------------------------------------------------

    def _build(self, batch: Pair) -> None:
        setting, device = self.setting, self.setting.device
        self._model = setting.placed_model()
        self._session = setting.session(self._model)
        self._loop = Loop(setting, self._model, self._session)
        self._x, self._answers = (part.clone() for part in batch)
        self._total = torch.zeros((), device=device)
        self._step = self._captured(self._learn)
        self._judges: dict[Any, tuple[Replay, Pair, Tensor]] = {}

    def _learn(self) -> None:
        self._total.add_(self._loop.learn(self._x, self._answers).float())

    def _judge_of(self, x: Tensor, answers: Tensor) -> tuple[Replay, Pair, Tensor]:
        """For test batches of this size: what to call, where the batch goes, and where error and loss come out."""
        scores = torch.zeros(2, dtype=torch.float64, device=self.setting.device)

        def judge() -> None:
            self._model.eval()
            with torch.no_grad():
                scores.copy_(torch.stack([score.double() for score in self._loop.scores(x, answers)]))
            self._model.train()

        return self._captured(judge), (x, answers), scores

    def _captured(self, call: Replay) -> Replay:
        """`call` as a graph."""
        drawn = _drawn(self.setting.device)
        for _ in range(WARM_UPS if self.is_cuda else 1):
            with self._session.capturing():
                call()
        if _drawn(self.setting.device) != drawn:
            raise LayoutMismatch("its model draws random numbers, which runs side by side would share")
        if not self.is_cuda:
            return call
        graph = torch.cuda.CUDAGraph()
        with self._session.capturing(), torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            call()
        return graph.replay

    # --- for each run ---------------------------------------------------------------------------------------------------

    def begin(self, run: LaneRun) -> None:
        """Start a run; what the last one left is forgotten."""
        self.run = self._results = None
        self._points.clear()
        setting = run.setting
        with self._streaming():
            for x, answers in run.tests:  # before the model is reset, which capturing changes
                if layout(x, answers) not in self._judges:
                    self._judges[layout(x, answers)] = self._judge_of(x.clone(), answers.clone())
        with self._streaming(), torch.no_grad():
            states = [
                tensor for state in self._loop.optimizer.state.values() for tensor in state.values() if isinstance(tensor, Tensor)
            ]
            torch._foreach_zero_([*states, self._total])
            torch._foreach_copy_([tensor.detach() for tensor in tensors_of(self._model)], self._starts.of(self._key, setting))
            self._session.set_plan(setting.plan, seed=setting.seed, forwards=0)
            batches = _batches(setting)
            first = next(batches)
            if layout(*first) != layout(self._x, self._answers):  # random bits follow the order of memory
                raise LayoutMismatch("its batches lie otherwise in memory than those that were captured")
            run.batches = chain([first], batches)
        self.run = run  # now that nothing can be refused any more

    def advance(self, *, waits: bool) -> Trial | None:
        """Queue what comes next; the trial once it is known. `waits`: for the device, where nothing else is to be done."""
        run = self.run
        assert run is not None
        task = run.setting.task
        with self._streaming():
            if run.curve.verdict is None and run.num_queued < task.steps:
                self._queue_step(run)
            elif self._needs_judging(run):
                self._queue_judging(run)
            elif self._is_known(run, waits=waits):
                self.run = None
                return self._trial(run)
        return None

    def _queue_step(self, run: LaneRun) -> None:
        batch = next(run.batches, None)
        if batch is None:
            task = run.setting.task
            raise TaskError(f"task {task.name!r}: its data gave {run.num_queued} batches and it has {task.steps} steps.")
        self._x.copy_(batch[0])
        self._answers.copy_(batch[1])
        self._loop.set_rate(rate_of(run.setting.task, run.num_queued))
        self._step()
        run.num_queued += 1
        if run.curve.is_point(run.num_queued):
            self._points.append(self._sent(self._total))
            self._total.zero_()
        limit = 0 if run.curve.may_stop(run.num_queued) else AHEAD
        while self._points and run.curve.verdict is None and (len(self._points) > limit or _has_come(self._points[0])):
            run.curve.point(_received(self._points.popleft()).item())

    def _needs_judging(self, run: LaneRun) -> bool:
        verdict = run.curve.verdict
        return not run.is_judged and (verdict is None or verdict.status is Status.STOPPED)

    def _queue_judging(self, run: LaneRun) -> None:
        run.is_judged = True
        scores: list[Tensor] = []
        for x, answers in run.tests:
            replay, into, out = self._judges[layout(x, answers)]
            into[0].copy_(x)
            into[1].copy_(answers)
            replay()
            scores.append(out.clone())
        self._results = self._sent(torch.stack(scores))

    def _is_known(self, run: LaneRun, *, waits: bool) -> bool:
        """Whether all that is on its way has come."""
        if not waits and self._results is not None and not _has_come(self._results):
            return False
        while self._points and run.curve.verdict is None:
            run.curve.point(_received(self._points.popleft()).item())
        return True

    def _trial(self, run: LaneRun) -> Trial:
        trial, verdict = replace(run.head, curve=tuple(run.curve.points)), run.curve.verdict
        if verdict is not None:
            trial = replace(trial, status=verdict.status, reason=verdict.reason)
        if trial.status is Status.DIVERGED:
            return trial
        assert self._results is not None
        error, loss, count = 0.0, 0.0, 0
        for of_batch, (_, answers) in zip(_received(self._results).tolist(), run.tests, strict=True):
            error += of_batch[0] * len(answers)  # as `judge` adds them
            loss += of_batch[1] * len(answers)
            count += len(answers)
        return with_scores(trial, error / count, loss / count)

    # --- from the device ------------------------------------------------------------------------------------------------

    def _sent(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """A copy on its way to the host, and the event that says it has come."""
        if not self.is_cuda:
            return tensor.clone(), None
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return host, event

    def close(self) -> None:
        """Give the memory back."""
        self._session.close()


def wait_for(device: torch.device) -> None:
    """Until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def layout(x: Tensor, answers: Tensor) -> Any:
    """What a graph has fixed of a batch: sizes, dtypes, and how it lies in memory."""
    return tuple((tuple(part.shape), part.stride(), part.dtype) for part in (x, answers))


def _batches(setting: TrainingSetup) -> Iterator[Pair]:
    return setting.task.data.batches_ahead(setting.task.batch, seed=setting.seed, device=setting.device)


def _has_come(sent: tuple[Tensor, Any]) -> bool:
    return sent[1] is None or sent[1].query()


def _received(sent: tuple[Tensor, Any]) -> Tensor:
    """Waits for it."""
    if sent[1] is not None:
        sent[1].synchronize()
    return sent[0]


def _drawn(device: torch.device) -> Any:
    """Where the generators of random numbers are, of the device and of the host."""
    on_device = torch.cuda.default_generators[device.index or 0].get_offset() if device.type == "cuda" else 0
    return on_device, torch.get_rng_state().numpy().tobytes(), random.getstate()


class LayoutMismatch(Exception):
    """Why runs cannot share a graph."""
