"""Tasks: a model, data and steps; training one under a plan gives a Trial."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paredown.lazy import loader

if TYPE_CHECKING:
    from paredown.tasks.data import Examples
    from paredown.tasks.lookup import find_task
    from paredown.tasks.task import OptimizerSettings, Task
    from paredown.tasks.trial import Trial

__all__ = ["Examples", "OptimizerSettings", "Task", "Trial", "find_task"]

__getattr__ = loader(__name__, data="Examples", lookup="find_task", task="OptimizerSettings Task", trial="Trial")
