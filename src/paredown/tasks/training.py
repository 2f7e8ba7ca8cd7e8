"""Training under a plan: the loop that tasks share.

    forward and loss under autocast -> backward -> clipping -> the optimizer's step

In store mode the optimizer is one of `paredown.optim`, so that the plan's formats of weights, gradients and state are real; in simulate
mode it is torch's, whose state the session rounds. A plan without rules, in store mode, is the training as it is written.

The training loss as it goes, and what it tells: whether a run diverged, and whether it is hopeless.

The losses of a run are added up on the device and read at most POINTS times, so that steps need not wait: a point of the curve is the mean
since the last one. A run has **diverged** when a point is not finite, or above LIMIT times the larger of the first point and the loss of
blind guessing. It is **hopeless** when at one half or three quarters of its steps neither the mean over the last quarter of the
run nor the mean over its last tenth is better than blind guessing: equal odds for every answer, or, where that is unknown, the
first point. So a run that falls late goes on. Runs of fewer than FEWEST steps are never called hopeless.

>>> import torch
>>> curve = LossCurve(steps=100, blind_loss=math.log(10))
>>> points = [curve.add(torch.tensor(2.31)) for _ in range(50)]
>>> curve.verdict
Verdict(status=<Status.STOPPED: 'stopped'>, reason='hopeless: the mean training loss of steps 26 to 50 of 100 is 2.31, of the \
last 10 it is 2.31, and blind guessing has 2.303')
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
from paredown.codec.runtime_formats import is_narrow
from paredown.errors import TaskError
from paredown.plan.plan import Plan
from paredown.session.session import apply
from paredown.tasks.data import Pair
from paredown.tasks.task import RULES, OptimizerSettings, Task
from paredown.tasks.trial import Status, Trial

POINTS = 100
LIMIT = 20.0
LOOKS = (0.5, 0.75)  # shares of a run after which it may be called hopeless
FEWEST = 100


class Verdict(NamedTuple):
    """Why a run ends before its last step."""

    status: Status
    reason: str


class LossCurve:
    """Points (step, mean loss since the last point), steps counted from 1."""

    def __init__(self, steps: int, *, blind_loss: float | None = None, stops_early: bool = True) -> None:
        self.points: list[tuple[int, float]] = []
        self.step = 0
        self.verdict: Verdict | None = None
        self._steps, self._blind_loss = steps, blind_loss
        self._every = -(-steps // POINTS)
        looks = [-(-math.ceil(share * steps) // self._every) * self._every for share in LOOKS]  # the first point from there on
        self._looks = looks if stops_early and steps >= FEWEST else []
        self._sum: Tensor | None = None

    def add(self, loss: Tensor) -> bool:
        """Take the loss of one more step; whether there is a new point."""
        loss = loss.detach().float()
        self._sum = loss if self._sum is None else self._sum + loss
        if not self.is_point(self.step + 1):
            self.step += 1
            return False
        self.point(self._sum.item())
        self._sum = None
        return True

    def is_point(self, step: int) -> bool:
        """Whether a point of the curve is at this step."""
        return step % self._every == 0 or step >= self._steps

    def may_stop(self, step: int) -> bool:
        """Whether a run may be called hopeless at this step: it is judged as it is then."""
        return step in self._looks

    def point(self, total: float) -> None:
        """Take the sum of all losses since the last point, up to the next one."""
        last = self.step // self._every * self._every
        self.step = min(last + self._every, self._steps)
        mean = total / (self.step - last)
        self.verdict = self._diverged(mean)
        if math.isfinite(mean):
            self.points.append((self.step, mean))
        if self.verdict is None and self._looks and self.step >= self._looks[0]:
            self._looks.pop(0)
            self.verdict = self._hopeless()

    def _diverged(self, mean: float) -> Verdict | None:
        at = f"at step {self.step} of {self._steps}"
        if not math.isfinite(mean):
            return Verdict(Status.DIVERGED, f"the training loss is {mean} {at}")
        limit = LIMIT * max(self.points[0][1] if self.points else mean, self._blind_loss or 0.0, 0.0)
        if self.points and mean > limit > 0:
            return Verdict(Status.DIVERGED, f"the training loss is {mean:.4g} {at}, above {LIMIT:g} times what it was at the start")
        return None

    def _hopeless(self) -> Verdict | None:
        """Of the last quarter and the last tenth of the run."""
        since, lately = self.step - self._steps // 4, self.step - self._steps // 10
        bar = self._blind_loss if self._blind_loss is not None else self.points[0][1]
        quarter, tenth = self._mean(since), self._mean(lately)
        if min(quarter, tenth) < bar:
            return None
        than = f"blind guessing has {bar:.4g}" if self._blind_loss is not None else f"it began with {bar:.4g}"
        place = f"steps {since + 1} to {self.step} of {self._steps} is {quarter:.4g}, of the last {self.step - lately} it is {tenth:.4g}"
        return Verdict(Status.STOPPED, f"hopeless: the mean training loss of {place}, and {than}")

    def _mean(self, since: int) -> float:
        """Over the points after a step."""
        late = [loss for step, loss in self.points if step > since]
        return sum(late) / len(late)


# --- Training under a plan ---

WARM_UP = 10  # one step in so many
LAST = 0.01  # of the peak learning rate
CPU = torch.device("cpu")
FUSED: dict[str, dict[str, bool]] = {"SGD": {"fused": True}, "AdamW": {"fused": True, "capturable": True}}
ProgressCallback = Callable[[int, int, float], None]  # step, steps, training loss


def learning_rate(step: int, num_steps: int, peak: float) -> float:
    """Up to the peak in the first tenth, then down to a hundredth of it along a cosine."""
    warm_up = max(num_steps // WARM_UP, 1)
    if step < warm_up:
        return peak * (step + 1) / warm_up
    down = 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(num_steps - warm_up, 1)))
    return peak * (LAST + (1 - LAST) * down)


def rate_of(task: Task, step: int) -> float:
    """Of a step of a task, counted from 0."""
    return task.recipe.lr if task.recipe.schedule == "constant" else learning_rate(step, task.steps, task.recipe.lr)


def make_optimizer(recipe: OptimizerSettings, model: nn.Module, *, seed: int = 0, mode: Any = "store") -> torch.optim.Optimizer:
    """The optimizer that `recipe` names; its formats are those of the model's session."""
    kind, implied = RULES[recipe.optimizer]
    options = {"lr": recipe.lr, **implied, **recipe.options}
    is_torchs = mode != "store" and hasattr(torch.optim, kind)
    made: Any = getattr(torch.optim if is_torchs else optim, kind)
    device = next((p.device for p in model.parameters()), CPU)
    if is_torchs and device.type == "cuda":  # one launch, which reads its rate from memory: the same in a captured graph
        options |= {"lr": torch.tensor(float(recipe.lr), device=device), **FUSED[kind]}
    try:
        return made(model.parameters(), **options, **({} if is_torchs else {"seed": seed}))
    except TypeError as error:
        raise TaskError(f"optimizer {recipe.optimizer!r} cannot be made of {', '.join(options)}: {error}.") from None


@dataclass(frozen=True)
class TrainingSetup:
    """What is trained, how its tensors wait, from which seed and where."""

    task: Task
    plan: Plan
    seed: int
    device: torch.device
    mode: Any = "store"

    def model(self) -> nn.Module:
        """A fresh model on the CPU; torch's random state is then the same whenever it was made."""
        torch.manual_seed(self.seed)
        return self.task.make_model(self.seed)

    def placed_model(self) -> nn.Module:
        """The same where it is trained. Products of fp32 that are no TF32 are slow channels last: such simulations do not lie so."""
        model = self.model().to(self.device)
        is_quick = self.mode == "store" or any(is_narrow(assignment.format) for _, assignment in self.plan.rules)
        turns = self.task.channels_last and is_quick and self.device.type == "cuda"
        return model.to(memory_format=torch.channels_last) if turns else model  # type: ignore[call-overload]

    def autocast(self) -> AbstractContextManager[Any]:
        """The context around forward and loss."""
        dtype = self.task.autocast
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)

    def session(self, model: nn.Module) -> Any:
        """The plan at work on `model`; none where there is nothing to do."""
        if self.mode == "store" and not (self.plan.rules or self.plan.recompute):
            return nullcontext()
        return apply(self.plan, model, seed=self.seed, mode=self.mode)


@dataclass
class Loop:
    """A model in training; `step` is one batch."""

    setting: TrainingSetup
    model: nn.Module
    session: Any
    optimizer: torch.optim.Optimizer = field(init=False)
    scaler: torch.amp.GradScaler | None = field(init=False)

    def __post_init__(self) -> None:
        recipe, device = self.setting.task.recipe, self.setting.device
        self.model.train()
        self.optimizer = make_optimizer(recipe, self.model, seed=self.setting.seed, mode=self.setting.mode)
        scale = recipe.loss_scale
        self.scaler = None if scale is None else torch.amp.GradScaler(device.type, init_scale=scale)

    def step(self, x: Tensor, answers: Tensor, lr: float) -> Tensor:
        """The loss of the batch, the model changed."""
        self.set_rate(lr)
        return self.learn(x, answers)

    def set_rate(self, lr: float) -> None:
        """The learning rate of the steps to come."""
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def learn(self, x: Tensor, answers: Tensor) -> Tensor:
        """A step at the rate that was set; its loss."""
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
        """Gradients of the loss; on the way they are `loss_factor` times as large."""
        factor = self.setting.task.recipe.loss_factor
        if factor is None:
            loss.backward()
            return
        (loss * factor).backward()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        torch._foreach_mul_([g for g in gradients if type(g) is Tensor], 1 / factor)  # in one launch
        for packed in (g for g in gradients if type(g) is not Tensor):
            packed.mul_(1 / factor)

    def scores(self, x: Tensor, answers: Tensor) -> tuple[Tensor, Tensor]:
        """Error and loss of a batch."""
        with self.setting.autocast():
            output = self.model(x)
        output = output.float() if isinstance(output, Tensor) else output
        return self.setting.task.judge(output, answers), self.setting.task.loss(output, answers)

    def _clip(self) -> None:
        max_norm = self.setting.task.recipe.max_norm
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
    """Train to the last step or until `curve`, which is told every loss, says that this is the end.

    `after` is told each step, `progress` each point of the curve.
    """
    task = loop.setting.task
    for step, (x, answers) in zip(range(task.steps), batches, strict=False):
        is_point = curve.add(loop.step(x, answers, rate_of(task, step)))
        if after is not None:
            after(step + 1)
        if is_point and progress is not None and curve.points:
            progress(step + 1, task.steps, curve.points[-1][1])
        if curve.verdict is not None:
            return
    if curve.step < task.steps:
        raise TaskError(
            f"task {task.name!r}: its data gave {curve.step} batches and it has {task.steps} steps; batches() has no end."
        )


@torch.no_grad()
def judge(loop: Loop) -> tuple[float, float]:
    """Error and loss on all test examples, the plan still at work."""
    task, setting = loop.setting.task, loop.setting
    error, loss, count = 0.0, 0.0, 0
    loop.model.eval()
    for x, answers in task.data.tests(task.batch, device=setting.device):
        of_batch = loop.scores(x, answers)
        error += of_batch[0].item() * len(answers)
        loss += of_batch[1].item() * len(answers)
        count += len(answers)
    return error / count, loss / count


def with_scores(trial: Trial, error: float, loss: float) -> Trial:
    """The trial with its scores on the test split; diverged where they are not finite."""
    if not (math.isfinite(error) and math.isfinite(loss)):
        return replace(trial, status=Status.DIVERGED, reason=f"on the test split the error is {error:.4g} and the loss {loss:.4g}")
    return replace(trial, error=error, loss=loss)
