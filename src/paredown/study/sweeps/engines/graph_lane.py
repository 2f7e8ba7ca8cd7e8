"""A lane trains one run after another with one captured CUDA graph, which reads formats, seeds, counts and learning rate from memory.

    begin     copy the weights and buffers of the seed, the plan's formats and random keys; zero the optimizer state and the step count
    a step    copy the next batch to the graph's inputs, replay; the graph adds the loss to `total`
    a point   of the loss curve: copy `total` to the host without synchronizing; it is read when the copy has arrived
    the end   replay a second graph, one for each size of a test batch, over the test examples: error and loss

The host synchronizes with the device only when more than MAX_PENDING points have not been read, and at the steps where a hopeless run may
be stopped. So several lanes run in parallel, each in its own CUDA stream. On a CPU nothing is captured, and the step is called directly.
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
from paredown.study.tasks.data import Pair
from paredown.study.tasks.training import Loop, LossCurve, TrainingSetup, task_learning_rate, with_scores
from paredown.study.tasks.trial import Status, Trial

MAX_PENDING = 3  # points of a loss curve that were queued on the device and not read yet
NUM_WARMUPS = 2  # calls before the capture: kernels are compiled, and libraries allocate their workspaces
NUM_CACHED_STATES = 4  # initial states of models that are kept on the device
Replay = Callable[[], object]


class InitialStates:
    """Caches the initial parameters and buffers of models on the device, by model and seed."""

    def __init__(self) -> None:
        self._states: OrderedDict[Any, list[Tensor]] = OrderedDict()

    def of(self, key: Any, setting: TrainingSetup) -> list[Tensor]:
        """Return the initial parameters and buffers of the model that `key` identifies, for the seed of `setting`."""
        state = self._states.pop((key, setting.seed), None)
        if state is None:
            state = [tensor.detach().to(setting.device) for tensor in tensors_of(setting.model())]
            synchronize(setting.device)  # other streams will read it, and may still read the state that is dropped below
        self._states[key, setting.seed] = state
        while len(self._states) > NUM_CACHED_STATES:
            self._states.popitem(last=False)
        return state


def tensors_of(model: nn.Module) -> list[Tensor]:
    """Return all parameters and buffers of a model."""
    return [*model.parameters(), *model.buffers()]


@dataclass
class LaneRun:
    """One training in a lane (a model with captured graphs): its loss curve, its data, and how much of it is queued."""

    setting: TrainingSetup
    head: Trial
    curve: LossCurve
    tests: list[Pair]
    batches: Iterator[Pair] = field(default_factory=lambda: iter(()))
    num_queued: int = 0  # steps queued so far
    is_judged: bool = False  # its evaluation on the test split is queued or done


class Lane:
    """Trains one run after another with one model and captured CUDA graphs of its training step and its evaluation."""

    def __init__(self, setting: TrainingSetup, key: Any, starts: InitialStates) -> None:
        self.setting, self._key, self._starts = setting, key, starts
        self.is_cuda = setting.device.type == "cuda"
        self._stream = torch.cuda.Stream(setting.device) if self.is_cuda else None
        self.run: LaneRun | None = None
        self._points: deque[tuple[Tensor, Any]] = deque()
        self._results: tuple[Tensor, Any] | None = None
        with self._in_stream():
            self._build(next(_batches(setting)))

    def _in_stream(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()

    # --- capture, once --------------------------------------------------------------------------------------------------

    def _build(self, batch: Pair) -> None:
        setting, device = self.setting, self.setting.device
        self._model = setting.placed_model()
        self._session = setting.session(self._model)
        self._loop = Loop(setting, self._model, self._session)
        self._x, self._answers = (part.clone() for part in batch)
        self._total = torch.zeros((), device=device)
        self._step = self._captured(lambda: self._total.add_(self._loop.run_step(self._x, self._answers).float()))
        self._judges: dict[Any, tuple[Replay, Pair, Tensor]] = {}

    def _judge_of(self, x: Tensor, answers: Tensor) -> tuple[Replay, Pair, Tensor]:
        """Return (replay function, inputs, output) of a new captured graph that evaluates test batches shaped like these."""
        scores = torch.zeros(2, dtype=torch.float64, device=self.setting.device)

        def judge() -> None:
            self._model.eval()
            with torch.no_grad():
                scores.copy_(torch.stack([score.double() for score in self._loop.scores(x, answers)]))
            self._model.train()

        return self._captured(judge), (x, answers), scores

    def _captured(self, call: Replay) -> Replay:
        states = _random_states(self.setting.device)
        for _ in range(NUM_WARMUPS if self.is_cuda else 1):
            with self._session.capturing():
                call()
        if _random_states(self.setting.device) != states:
            raise LayoutMismatch("its model draws random numbers, whose state runs in parallel would share")
        if not self.is_cuda:
            return call
        graph = torch.cuda.CUDAGraph()
        with self._session.capturing(), torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            call()
        return graph.replay

    # --- for each run ---------------------------------------------------------------------------------------------------

    def begin(self, run: LaneRun) -> None:
        """Start a run: copy its initial weights and its plan to the device, zero the optimizer state, and take its data."""
        self.run = self._results = None
        self._points.clear()
        setting = run.setting
        with self._in_stream():
            for x, answers in run.tests:  # before the model is reset: warm-up calls change it
                if layout(x, answers) not in self._judges:
                    self._judges[layout(x, answers)] = self._judge_of(x.clone(), answers.clone())
        with self._in_stream(), torch.no_grad():
            states = [
                tensor for state in self._loop.optimizer.state.values() for tensor in state.values() if isinstance(tensor, Tensor)
            ]
            torch._foreach_zero_([*states, self._total])
            torch._foreach_copy_([tensor.detach() for tensor in tensors_of(self._model)], self._starts.of(self._key, setting))
            self._session.set_plan(setting.plan, seed=setting.seed, forwards=0)
            batches = _batches(setting)
            first = next(batches)
            if layout(*first) != layout(self._x, self._answers):  # random bits are indexed in memory order
                raise LayoutMismatch("its batches have another shape, dtype or memory layout than the captured ones")
            run.batches = chain([first], batches)
        self.run = run  # last: nothing raises after this

    def advance(self, *, blocks: bool) -> Trial | None:
        """Queue the next step or the evaluation, and return the trial once its results are on the host; `blocks` waits for them."""
        run = self.run
        assert run is not None
        task = run.setting.task
        with self._in_stream():
            if run.curve.verdict is None and run.num_queued < task.steps:
                self._queue_step(run)
            elif not run.is_judged and (run.curve.verdict is None or run.curve.verdict.status is Status.STOPPED):
                self._queue_judging(run)
            elif self._has_arrived(run, blocks=blocks):
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
        self._loop.set_learning_rate(task_learning_rate(run.setting.task, run.num_queued))
        self._step()
        run.num_queued += 1
        if run.curve.is_point(run.num_queued):
            self._points.append(self._sent(self._total))
            self._total.zero_()
        limit = 0 if run.num_queued in run.curve.stop_steps else MAX_PENDING
        while self._points and run.curve.verdict is None and (len(self._points) > limit or _is_ready(self._points[0])):
            run.curve.point(_received(self._points.popleft()).item())

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

    def _has_arrived(self, run: LaneRun, *, blocks: bool) -> bool:
        """Return whether all losses and scores of a run are on the host; if so, complete its loss curve. `blocks` waits for them."""
        if not blocks and self._results is not None and not _is_ready(self._results):
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
        for (batch_error, batch_loss), (_, answers) in zip(_received(self._results).tolist(), run.tests, strict=True):
            error += batch_error * len(answers)  # in the order of `judge`: the same bits
            loss += batch_loss * len(answers)
            count += len(answers)
        return with_scores(trial, error / count, loss / count)

    # --- copies to the host ---------------------------------------------------------------------------------------------

    def _sent(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Start to copy a tensor to the host, and return the copy, and a CUDA event after which it is valid (None on a CPU)."""
        if not self.is_cuda:
            return tensor.clone(), None
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return host, event

    def close(self) -> None:
        """Close the session that applies plans to the lane's model, which restores the unmodified model."""
        self._session.close()


def synchronize(device: torch.device) -> None:
    """Wait until a CUDA device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def layout(x: Tensor, answers: Tensor) -> Any:
    """Return the shapes, strides and dtypes of a batch, which a captured graph cannot change."""
    return tuple((tuple(part.shape), part.stride(), part.dtype) for part in (x, answers))


def _batches(setting: TrainingSetup) -> Iterator[Pair]:
    return setting.task.data.batches_ahead(setting.task.batch, seed=setting.seed, device=setting.device)


def _is_ready(sent: tuple[Tensor, Any]) -> bool:
    return sent[1] is None or sent[1].query()


def _received(sent: tuple[Tensor, Any]) -> Tensor:
    """Return the host's copy of a tensor, from a pair that `Lane._sent` returned, after its CUDA event."""
    if sent[1] is not None:
        sent[1].synchronize()
    return sent[0]


def _random_states(device: torch.device) -> Any:
    on_device = torch.cuda.default_generators[device.index or 0].get_offset() if device.type == "cuda" else 0
    return on_device, torch.get_rng_state().numpy().tobytes(), random.getstate()


class LayoutMismatch(Exception):
    """Raised for a run that cannot use a captured graph; its text is the reason."""
