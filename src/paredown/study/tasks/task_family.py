"""The family of a model: `cnn`, `vit`, `gpt`, `lstm` or `mlp`.

>>> from paredown.models import MODELS
>>> [model_family(MODELS[name]()) for name in ("resnet18", "convnext", "vit", "gpt", "lstm", "mlp")]
['cnn', 'cnn', 'vit', 'gpt', 'lstm', 'mlp']
"""

from __future__ import annotations

import torch
from torch import nn

from paredown.study.tasks.task import Task

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
RECURRENT = (nn.RNNBase, nn.RNNCellBase)


def model_family(model: nn.Module) -> str:
    """Return the family of a model, from the types of its modules.

    Attention with an embedding is "gpt", attention without one "vit".
    """
    modules = list(model.modules())
    if any("attention" in type(module).__name__.lower() for module in modules):
        return "gpt" if any(isinstance(module, nn.Embedding) for module in modules) else "vit"
    if any(isinstance(module, RECURRENT) for module in modules):
        return "lstm"
    return "cnn" if any(isinstance(module, CONVOLUTIONS) for module in modules) else "mlp"


def task_family(task: Task) -> str:
    """Return the family of a task's model, which is built on the meta device if its code allows that."""
    try:
        with torch.device("meta"):
            return model_family(task.make_model(0))
    except Exception:  # the user's code may read values, which meta tensors do not have
        return model_family(task.make_model(0))
