"""The training loop of tasks, and the loss curve that decides whether a run diverged or is stopped early.

    forward and loss under autocast -> backward -> gradient clipping -> optimizer step

In store mode the optimizer is one of `paredown.optim`, which stores weights, gradients and optimizer state in the plan's formats. In
simulate mode it is torch's, and the session rounds its state. A plan without rules in store mode is the baseline.

The losses of a run are summed on the device and read by the host at most MAX_POINTS times, so that steps are not synchronized: a point of
the curve is the mean loss since the point before. A run has **diverged** when a point is not finite, or above DIVERGED_RATIO times the
larger of the first point and the loss of random guessing. It is **hopeless** when, at one half or three quarters of its steps, neither the
mean loss of the last quarter of the run nor that of the last tenth is below random guessing (equal odds for every answer; where that loss
is unknown, the first point). So a run whose loss falls late continues. Runs of fewer than MIN_STEPS_TO_STOP steps are never stopped.

>>> import torch
>>> curve = LossCurve(steps=100, blind_loss=math.log(10))
>>> points = [curve.add(torch.tensor(2.31)) for _ in range(50)]
>>> curve.verdict
Verdict(status=<Status.STOPPED: 'stopped'>, reason='hopeless: the mean training loss of steps 26 to 50 of 100 is 2.31, of the \
last 10 it is 2.31, and random guessing has 2.303')
"""


# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paredown import optim
from paredown.apply_plan import apply
from paredown.codec.runtime_formats import is_narrow
from paredown.errors import TaskError
from paredown.plan.plan import Plan
from paredown.study.tasks.data import Pair
from paredown.study.tasks.task import RULES, OptimizerSettings, Task
from paredown.study.tasks.trial import Status, Trial

MAX_POINTS = 100
DIVERGED_RATIO = 20.0
STOP_SHARES = (0.5, 0.75)  # shares of a run after which it may be stopped as hopeless
MIN_STEPS_TO_STOP = 100


class Verdict(NamedTuple):
    """Says why a run ended early: its status, DIVERGED or STOPPED, and the reason in words."""

    status: Status
    reason: str


class LossCurve:
    """Collects the loss curve of a run, points (step, mean loss since the last point), and decides whether the run must end early."""

    def __init__(self, steps: int, *, blind_loss: float | None = None, stops_early: bool = True) -> None:
        self.points: list[tuple[int, float]] = []
        self.step = 0
        self.verdict: Verdict | None = None
        self._steps, self._blind_loss = steps, blind_loss
        self._every = -(-steps // MAX_POINTS)
        # the first point at or after each share of the run: a run that looks hopeless there ends, and is evaluated as it is
        stops = [-(-math.ceil(share * steps) // self._every) * self._every for share in STOP_SHARES]
        self.stop_steps = stops if stops_early and steps >= MIN_STEPS_TO_STOP else []
        self._sum: Tensor | None = None

    def add(self, loss: Tensor) -> bool:
        """Add the loss of one more step, and return whether the curve got a new point."""
        loss = loss.detach().float()
        self._sum = loss if self._sum is None else self._sum + loss
        if not self.is_point(self.step + 1):
            self.step += 1
            return False
        self.point(self._sum.item())
        self._sum = None
        return True

    def is_point(self, step: int) -> bool:
        """Return whether the curve gets a point (the mean loss since the point before) at this step."""
        return step % self._every == 0 or step >= self._steps

    def point(self, total: float) -> None:
        """Add the next point to the curve, and set `verdict` if the run must end; `total` sums the losses since the last point."""
        last = self.step // self._every * self._every
        self.step = min(last + self._every, self._steps)
        mean = total / (self.step - last)
        self.verdict = self._diverged(mean)
        if math.isfinite(mean):
            self.points.append((self.step, mean))
        if self.verdict is None and self.stop_steps and self.step >= self.stop_steps[0]:
            self.stop_steps.pop(0)
            self.verdict = self._hopeless()

    def _diverged(self, mean: float) -> Verdict | None:
        at = f"at step {self.step} of {self._steps}"
        if not math.isfinite(mean):
            return Verdict(Status.DIVERGED, f"the training loss is {mean} {at}")
        limit = DIVERGED_RATIO * max(self.points[0][1] if self.points else mean, self._blind_loss or 0.0, 0.0)
        if self.points and mean > limit > 0:
            return Verdict(
                Status.DIVERGED, f"the training loss is {mean:.4g} {at}, above {DIVERGED_RATIO:g} times what it was at the start"
            )
        return None

    def _hopeless(self) -> Verdict | None:
        """Return a verdict STOPPED if the mean losses of the last quarter and tenth are not below random guessing's, else None."""
        quarter_start, tenth_start = self.step - self._steps // 4, self.step - self._steps // 10
        guessing_loss = self._blind_loss if self._blind_loss is not None else self.points[0][1]
        quarter, tenth = self._mean(quarter_start), self._mean(tenth_start)
        if min(quarter, tenth) < guessing_loss:
            return None
        reference = "random guessing has" if self._blind_loss is not None else "it began with"
        steps = f"steps {quarter_start + 1} to {self.step} of {self._steps} is {quarter:.4g}"
        means = f"{steps}, of the last {self.step - tenth_start} it is {tenth:.4g}"
        return Verdict(Status.STOPPED, f"hopeless: the mean training loss of {means}, and {reference} {guessing_loss:.4g}")

    def _mean(self, since: int) -> float:
        late = [loss for step, loss in self.points if step > since]
        return sum(late) / len(late)


# --- Training under a plan ---

WARMUP_PART = 10  # the first tenth of the steps
LAST_RATIO = 0.01  # the last learning rate over the peak one
CPU = torch.device("cpu")
FUSED: dict[str, dict[str, bool]] = {"SGD": {"fused": True}, "AdamW": {"fused": True, "capturable": True}}
ProgressCallback = Callable[[int, int, float], None]  # step, steps, training loss


def learning_rate(step: int, num_steps: int, peak: float) -> float:
    """Return the learning rate at a step, counted from 0.

    It rises linearly to `peak` in the first tenth of the steps, then falls to a hundredth of that along a cosine.
    """
    num_warmup = max(num_steps // WARMUP_PART, 1)
    if step < num_warmup:
        return peak * (step + 1) / num_warmup
    decay = 0.5 * (1 + math.cos(math.pi * (step - num_warmup) / max(num_steps - num_warmup, 1)))
    return peak * (LAST_RATIO + (1 - LAST_RATIO) * decay)


def task_learning_rate(task: Task, step: int) -> float:
    """Return the learning rate of a task at a step, counted from 0, by the task's schedule."""
    return task.settings.lr if task.settings.schedule == "constant" else learning_rate(step, task.steps, task.settings.lr)


def make_optimizer(settings: OptimizerSettings, model: nn.Module, *, seed: int = 0, mode: Any = "store") -> torch.optim.Optimizer:
    """Return the optimizer of `settings`: in mode "store" from paredown.optim, with the plan's formats, else torch's if any."""
    kind, implied = RULES[settings.optimizer]
    options = {"lr": settings.lr, **implied, **settings.options}
    if kind == "Muon":
        options["adamw_params"] = optim.embeddings_and_head(model)
    is_torchs = mode != "store" and kind != "Muon" and hasattr(torch.optim, kind)
    made: Any = getattr(torch.optim if is_torchs else optim, kind)
    device = next((p.device for p in model.parameters()), CPU)
    if is_torchs and device.type == "cuda":  # fused, learning rate in a tensor: the same numbers as in a captured graph
        options |= {"lr": torch.tensor(float(settings.lr), device=device), **FUSED[kind]}
    try:
        return made(model.parameters(), **options, **({} if is_torchs else {"seed": seed}))
    except TypeError as error:
        raise TaskError(f"optimizer {settings.optimizer!r} cannot be made of {', '.join(options)}: {error}.") from None


@dataclass(frozen=True)
class TrainingSetup:
    """Holds everything that decides the numbers of a trial: task, plan, seed, device and mode."""

    task: Task
    plan: Plan
    seed: int
    device: torch.device
    mode: Any = "store"

    def model(self) -> nn.Module:
        """Return a new model on the CPU. torch is seeded first, so that its random state afterwards depends on the seed alone."""
        torch.manual_seed(self.seed)
        return self.task.make_model(self.seed)

    def placed_model(self) -> nn.Module:
        """Return a new model on its device, in channels_last memory format where that is faster.

        Convolutions in fp32 without TF32, as wide simulated formats need them, are slow in channels_last.
        """
        model = self.model().to(self.device)
        is_faster = self.mode == "store" or any(is_narrow(assignment.format) for _, assignment in self.plan.rules)
        is_channels_last = self.task.channels_last and is_faster
        return model.to(memory_format=torch.channels_last) if is_channels_last else model  # type: ignore[call-overload]

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the autocast context in which the task's forward pass and loss run."""
        dtype = self.task.autocast
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)

    def session(self, model: nn.Module) -> Any:
        """Apply the plan to `model` and return the session; a context that does nothing if the plan is empty in mode "store"."""
        if self.mode == "store" and not (self.plan.rules or self.plan.recompute):
            return nullcontext()
        return apply(self.plan, model, seed=self.seed, mode=self.mode)


@dataclass
class Loop:
    """Trains a model on one batch after another; holds the model, its session, its optimizer and its loss scaler."""

    setting: TrainingSetup
    model: nn.Module
    session: Any
    optimizer: torch.optim.Optimizer = field(init=False)
    scaler: torch.amp.GradScaler | None = field(init=False)

    def __post_init__(self) -> None:
        settings, device = self.setting.task.settings, self.setting.device
        self.model.train()
        self.optimizer = make_optimizer(settings, self.model, seed=self.setting.seed, mode=self.setting.mode)
        scale = settings.loss_scale
        self.scaler = None if scale is None else torch.amp.GradScaler(device.type, init_scale=scale)

    def step(self, x: Tensor, answers: Tensor, lr: float) -> Tensor:
        """Train on a batch at learning rate `lr`, and return its loss."""
        self.set_learning_rate(lr)
        return self.run_step(x, answers)

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of the next steps."""
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def run_step(self, x: Tensor, answers: Tensor) -> Tensor:
        """Train on a batch at the learning rate that was set last, and return its loss."""
        with self.setting.autocast(), getattr(self.session, "following", nullcontext)():
            loss = self.setting.task.loss(self.model(x), answers)
        if self.scaler is None:
            self._backward(loss)
            self._clip()
            self.optimizer.step()
        else:
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            self._clip()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def _backward(self, loss: Tensor) -> None:
        """Compute the gradients; with a `loss_factor`, those of activations are that many times as large during backward."""
        factor = self.setting.task.settings.loss_factor
        if factor is None:
            loss.backward()
            return
        (loss * factor).backward()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        torch._foreach_mul_([g for g in gradients if type(g) is Tensor], 1 / factor)  # one kernel launch
        for packed in (g for g in gradients if type(g) is not Tensor):
            packed.mul_(1 / factor)

    def scores(self, x: Tensor, answers: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean error and the mean loss of the model on a batch."""
        with self.setting.autocast():
            output = self.model(x)
        output = output.float() if isinstance(output, Tensor) else output
        return self.setting.task.judge(output, answers), self.setting.task.loss(output, answers)

    def _clip(self) -> None:
        max_norm = self.setting.task.settings.max_norm
        if max_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)


def train(
    loop: Loop,
    batches: Iterator[Pair],
    curve: LossCurve,
    *,
    after: Callable[[int], None] | None = None,
    progress: ProgressCallback | None = None,
) -> None:
    """Train to the last step, or until the loss curve ends the run: it diverged, or is no better than random guessing.

    `after(step)` is called after each step, `progress(step, steps, training loss)` after each point of the loss curve.
    """
    task = loop.setting.task
    for step, (x, answers) in zip(range(task.steps), batches, strict=False):
        is_point = curve.add(loop.step(x, answers, task_learning_rate(task, step)))
        if after is not None:
            after(step + 1)
        if is_point and progress is not None and curve.points:
            progress(step + 1, task.steps, curve.points[-1][1])
        if curve.verdict is not None:
            return
    if curve.step < task.steps:
        raise TaskError(
            f"task {task.name!r}: its data gave {curve.step} batches and it has {task.steps} steps; batches() must not end."
        )


@torch.no_grad()
def judge(loop: Loop) -> tuple[float, float]:
    """Return the mean error and the mean loss of the trained model on all test examples, with the plan still applied."""
    task, setting = loop.setting.task, loop.setting
    error, loss, count = 0.0, 0.0, 0
    loop.model.eval()
    for x, answers in task.data.tests(task.batch, device=setting.device):
        batch_error, batch_loss = loop.scores(x, answers)
        error += batch_error.item() * len(answers)
        loss += batch_loss.item() * len(answers)
        count += len(answers)
    return error / count, loss / count


def with_scores(trial: Trial, error: float, loss: float) -> Trial:
    """Return the trial with its error and loss on the test split; its status is DIVERGED if one is not finite."""
    if not (math.isfinite(error) and math.isfinite(loss)):
        return replace(trial, status=Status.DIVERGED, reason=f"on the test split the error is {error:.4g} and the loss {loss:.4g}")
    return replace(trial, error=error, loss=loss)
