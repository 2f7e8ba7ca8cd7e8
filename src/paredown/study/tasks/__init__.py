"""Tasks: a model, data and steps; training one under a plan gives a Trial."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paredown.lazy import loader

if TYPE_CHECKING:
    from paredown.study.tasks.data import Examples
    from paredown.study.tasks.lookup import find_task
    from paredown.study.tasks.task import OptimizerSettings, Task
    from paredown.study.tasks.trial import Trial

__all__ = ["Examples", "OptimizerSettings", "Task", "Trial", "find_task"]

__getattr__ = loader(__name__, data="Examples", lookup="find_task", task="OptimizerSettings Task", trial="Trial")
