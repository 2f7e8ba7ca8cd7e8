"""What a task is to a prior: the family of its model, its data, its metric, and how well a blind guess does.

>>> row_of_task("digits#model=mlp,steps=5", Path("."))
TaskRow(name='digits mlp', family='mlp', data='digits', metric='error', answers=10, blind=0.9, full_bytes=None, steps=5, source='', \
text='digits#model=mlp,steps=5')
"""

from __future__ import annotations

import math
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import nn

from paredown.errors import ParedownError
from paredown.runs.found import found_task
from paredown.runs.named import parse_options
from paredown.runs.task import Task
from paredown.runs.tasks import portable_text
from paredown.search.earlier import TaskRow

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
RECURRENT = (nn.RNNBase, nn.RNNCellBase)
# families of the models that tasks by name have, for tasks whose data is not here
FAMILIES = {"mlp": "mlp", "vit": "vit", "gpt": "gpt", "lstm": "lstm"}
OWN = "own"


def family_of(model: nn.Module) -> str:
    """ "vit", "gpt", "lstm", "cnn" or "mlp": attention over tokens of a text is gpt, over others vit.

    >>> from paredown.models import MODELS
    >>> [family_of(MODELS[name]()) for name in ("resnet18", "convnext", "vit", "gpt", "lstm", "mlp")]
    ['cnn', 'cnn', 'vit', 'gpt', 'lstm', 'mlp']
    """
    modules = list(model.modules())
    if any("attention" in type(module).__name__.lower() for module in modules):
        return "gpt" if any(isinstance(module, nn.Embedding) for module in modules) else "vit"
    if any(isinstance(module, RECURRENT) for module in modules):
        return "lstm"
    return "cnn" if any(isinstance(module, CONVOLUTIONS) for module in modules) else "mlp"


def family_of_task(task: Task) -> str:
    """The family of a task's model, which is made without memory where it can be."""
    try:
        with torch.device("meta"):
            return family_of(task.make_model(0))
    except Exception:  # code of the user's, which may not bear a model without numbers
        return family_of(task.make_model(0))


def blind_error(task: Task) -> float | None:
    """The error of a blind guess: equal odds for every answer."""
    answers = task.data.num_answers
    if answers is None:
        return None
    return {"error": 1 - 1 / answers, "loss": math.log(answers)}.get(task.metric if isinstance(task.metric, str) else "")


def row_of_task(text: str, folder: Path | None) -> TaskRow:
    """The row of a task by name; of one that cannot be found here, or is code and no folder is named, what its name says."""
    portable = portable_text(text)
    head, _, tail = portable.partition("#")
    data = PurePath(head.partition(":")[2] or head).name
    data = data.removesuffix(".gz").rpartition(".")[0] or data
    options, task = _options(tail), _task(text, folder)
    if "superclass" in options:
        data = f"{data}/{options['superclass']}"
    is_text = head.startswith("text:")
    model = options.get("model", "gpt" if is_text else "resnet18") if ".py:" not in head else ""
    name = f"{data} {model}".strip()
    if task is None:
        family = FAMILIES.get(model, "cnn" if model else OWN)
        return TaskRow(name, family, data, "loss" if is_text else "error", text=portable)
    metric = task.metric if isinstance(task.metric, str) else "own"
    return TaskRow(
        name, family_of_task(task), data, metric, task.data.num_answers, blind_error(task), steps=task.steps, text=portable
    )


def _options(text: str) -> dict[str, Any]:
    try:
        return parse_options(text)
    except ParedownError:
        return {}


def _task(text: str, folder: Path | None) -> Task | None:
    try:
        return found_task(text, folder)
    except ParedownError:
        return None
