"""A task: model, data, loss, optimizer and number of steps. Plans are compared on tasks.

>>> from torch import nn
>>> from paredown.study.tasks.data import Examples
>>> x, y = torch.randn(100, 8), torch.arange(100) % 4
>>> task = Task("mine", lambda seed: nn.Linear(8, 4), Examples(x[:80], y[:80], x[80:], y[80:]), steps=20, batch=16)
>>> task
Task(mine: 20 steps of 16, sgdm at 0.05; 80 training examples, 20 test examples, 4 answers)
>>> Task("mine", task.make_model, task.data, batch=128)
Traceback (most recent call last):
    ...
paredown.errors.TaskError: task 'mine': a batch of 128 is larger than the 80 training examples. Take a smaller batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath, PureWindowsPath
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paredown.errors import TaskError
from paredown.models.transformer import token_loss
from paredown.plan.selectors import closest
from paredown.study.tasks.data import Data

Loss = Callable[[Any, Tensor], Tensor]  # (output, answers) -> scalar tensor, the mean over the batch


class NamedOptimizer(NamedTuple):
    """What an optimizer's name in RULES stands for: a class of torch.optim or paredown.optim, and arguments such as a momentum."""

    kind: str
    options: Mapping[str, Any]


RULES: Mapping[str, NamedOptimizer] = MappingProxyType(
    {
        "sgd": NamedOptimizer("SGD", {}),
        "sgdm": NamedOptimizer("SGD", {"momentum": 0.9}),
        "adamw": NamedOptimizer("AdamW", {}),
        "lion": NamedOptimizer("Lion", {}),
        "muon": NamedOptimizer("Muon", {"adjust_lr_fn": "match_rms_adamw"}),  # one learning rate for its AdamW parameters too
    }
)
SCHEDULES = ("cosine", "constant")


@dataclass(frozen=True)
class OptimizerSettings:
    """Names the optimizer of a task, with its learning rate, schedule and further arguments (`options`).

    `schedule`: "cosine" is a linear warmup in the first tenth of the run and a cosine decay to `lr` / 100, "constant" has neither.
    `max_norm`: clip gradients to this norm. `loss_scale`: the initial scale of a torch.amp.GradScaler; None: no scaler. `loss_factor`: a
    constant loss scale: the loss is multiplied by it, and gradients of parameters are divided by it before clipping and the optimizer step,
    so that small gradients of activations do not underflow.
    """

    optimizer: str = "sgdm"
    lr: float = 0.05
    options: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)
    schedule: str = "cosine"
    max_norm: float | None = None
    loss_scale: float | None = None
    loss_factor: float | None = None

    def __post_init__(self) -> None:
        for what, value, allowed in (("optimizer", self.optimizer, RULES), ("schedule", self.schedule, SCHEDULES)):
            if value not in allowed:
                raise TaskError(
                    f"{what} {value!r} is unknown. Closest: {closest(str(value), allowed)}. Allowed: {', '.join(allowed)}."
                )
        for what in ("lr", "max_norm", "loss_scale", "loss_factor"):
            value = getattr(self, what)
            if value is not None and not value > 0:
                raise TaskError(f"{what} is {value}; it must be above 0.")


def share_wrong(output: Tensor, answers: Tensor) -> Tensor:
    """Return the share of wrong answers: argmax of logits (..., num_answers) compared with class numbers (...)."""
    return (output.argmax(-1) != answers).float().mean()


METRICS: Mapping[str, Loss | None] = MappingProxyType({"error": share_wrong, "loss": None})  # None: the task's own loss


@dataclass(frozen=True, repr=False, eq=False)
class Task:
    """Defines a training on which plans are compared: a model, data, a loss, an optimizer and a number of training steps.

    `make_model(seed)` returns a new model on the CPU; torch is seeded before the call. `loss(output, answers)` is the mean over a batch;
    cross entropy by default. `metric`: "error" is the share of wrong answers, "loss" the loss; a function is called like the loss and
    returns the mean error of a batch; lower is better. `autocast`: the dtype of the autocast context around forward and loss.
    `stops_early`: whether a trial ends early if its loss stays no better than random guessing. `channels_last`: whether the model is in
    channels_last memory format, where convolutions are faster and need no workspace to transpose tensors; leave it False for a model that
    calls `view` on feature maps.
    """

    name: str
    make_model: Callable[[int], nn.Module]
    data: Data
    steps: int = 500
    batch: int = 64
    settings: OptimizerSettings = OptimizerSettings()
    loss: Loss = token_loss
    metric: str | Loss = "error"
    autocast: torch.dtype | None = None
    stops_early: bool = True
    channels_last: bool = False

    def __post_init__(self) -> None:
        try:
            self._check()
        except TaskError as error:
            raise TaskError(f"task {self.name!r}: {error}") from None

    def _check(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip() or not self.name.isprintable():
            raise TaskError(f"the name is {self.name!r}; a task needs a name, one line of printable text.")
        if PurePath(self.name).is_absolute() or PureWindowsPath(self.name).is_absolute():
            raise TaskError("the name is written into every trial and must not be an absolute path.")
        if not isinstance(self.data, Data):
            raise TaskError(f"data is of type {type(self.data).__name__}; pass paredown.study.tasks.data.Examples or Text.")
        for what, value in (("steps", self.steps), ("batch", self.batch)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise TaskError(f"{what} is {value!r}; it must be a whole number from 1 up.")
        if self.batch > self.data.num_train:
            raise TaskError(
                f"a batch of {self.batch} is larger than the {self.data.num_train} training examples. Take a smaller batch."
            )
        self._check_functions()
        if isinstance(self.metric, str) and self.metric not in METRICS:
            raise TaskError(
                f"metric {self.metric!r} is unknown. Allowed: {', '.join(METRICS)}, or a function of output and answers."
            )
        if self.autocast is not None and not isinstance(self.autocast, torch.dtype):
            raise TaskError(f"autocast is a dtype such as torch.bfloat16, or None, not {self.autocast!r}.")

    def _check_functions(self) -> None:
        for what, value in (("make_model", self.make_model), ("loss", self.loss)):
            if (
                not callable(value)
                or (what == "loss" and isinstance(value, type))
                or (what != "loss" and isinstance(value, nn.Module))
            ):
                told = "a function of a seed that returns a new model" if what != "loss" else "a function of output and answers"
                kind = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
                raise TaskError(f"{what} is {kind}; pass {told}.")

    @property
    def judge(self) -> Loss:
        """Return the function that computes the error of a batch, (output, answers) -> mean error."""
        return (METRICS[self.metric] or self.loss) if isinstance(self.metric, str) else self.metric

    @property
    def blind_loss(self) -> float | None:
        """Return the cross entropy of random guessing, with equal odds for every answer; None for another loss."""
        return self.data.blind_loss if self.loss is token_loss else None

    def __repr__(self) -> str:
        how = f"{self.steps} steps of {self.batch}, {self.settings.optimizer} at {self.settings.lr:g}"
        return f"Task({self.name}: {how}; {repr(self.data).partition('(')[2]}"


# --- the family of a task's model --------------------------------------------------------------------------------------

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
RECURRENT = (nn.RNNBase, nn.RNNCellBase)


def model_family(model: nn.Module) -> str:
    """Return the family of a model, from the types of its modules: `cnn`, `vit`, `gpt`, `lstm` or `mlp`.

    Attention with an embedding is "gpt", attention without one "vit".

    >>> from paredown.models import MODELS
    >>> [model_family(MODELS[name]()) for name in ("resnet18", "convnext", "vit", "gpt", "lstm", "mlp")]
    ['cnn', 'cnn', 'vit', 'gpt', 'lstm', 'mlp']
    """
    modules = list(model.modules())
    if any("attention" in type(module).__name__.lower() for module in modules):
        return "gpt" if any(isinstance(module, nn.Embedding) for module in modules) else "vit"
    if any(isinstance(module, RECURRENT) for module in modules):
        return "lstm"
    return "cnn" if any(isinstance(module, CONVOLUTIONS) for module in modules) else "mlp"


def task_family(task: Task) -> str:
    """Return the family of a task's model, such as "cnn"; the model is built on the meta device if its code allows that."""
    try:
        with torch.device("meta"):
            return model_family(task.make_model(0))
    except Exception:  # the user's code may read values, which meta tensors do not have
        return model_family(task.make_model(0))
