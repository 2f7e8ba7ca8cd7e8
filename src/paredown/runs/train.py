"""Training under a plan: the loop that tasks share.

    forward and loss under autocast -> backward -> clipping -> the optimizer's step

In store mode the optimizer is one of `paredown.optim`, so that the plan's formats of weights, gradients and state are real; in simulate
mode it is torch's, whose state the session rounds. A plan without rules, in store mode, is the training as it is written.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from paredown import optim
from paredown.codec.live import is_narrow
from paredown.errors import TaskError
from paredown.plan.plan import Plan
from paredown.plan.trial import Status, Trial
from paredown.runs.curves import Curve
from paredown.runs.data import Pair
from paredown.runs.task import RULES, Recipe, Task
from paredown.session.session import apply

WARM_UP = 10  # one step in so many
LAST = 0.01  # of the peak learning rate
CPU = torch.device("cpu")
FUSED: dict[str, dict[str, bool]] = {"SGD": {"fused": True}, "AdamW": {"fused": True, "capturable": True}}
Progress = Callable[[int, int, float], None]  # step, steps, training loss


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


def make_optimizer(recipe: Recipe, model: nn.Module, *, seed: int = 0, mode: Any = "store") -> torch.optim.Optimizer:
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
class Setting:
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

    setting: Setting
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
    curve: Curve,
    *,
    after: Callable[[int], None] | None = None,
    progress: Progress | None = None,
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
