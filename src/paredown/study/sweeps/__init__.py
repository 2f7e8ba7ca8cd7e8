"""Sweeps run trials of tasks x plans x seeds: the store of trials, workers, and the engines that train."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paredown.lazy import loader

if TYPE_CHECKING:
    from paredown.study.sweeps.export import rows
    from paredown.study.sweeps.runner import TaskFolder, make_engine, run_sweep
    from paredown.study.sweeps.status import count
    from paredown.study.sweeps.store import Store
    from paredown.study.sweeps.sweep import Sweep

__all__ = ["Store", "Sweep", "TaskFolder", "count", "make_engine", "rows", "run_sweep"]

__getattr__ = loader(
    __name__, export="rows", runner="TaskFolder make_engine run_sweep", status="count", store="Store", sweep="Sweep"
)
