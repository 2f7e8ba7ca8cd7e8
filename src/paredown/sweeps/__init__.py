"""Tasks x plans x seeds: the store of trials, workers and engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paredown.lazy import loader

if TYPE_CHECKING:
    from paredown.sweeps.export import rows
    from paredown.sweeps.runner import TaskFolder, make_engine, run_sweep
    from paredown.sweeps.status import count
    from paredown.sweeps.store import Store
    from paredown.sweeps.sweep import Sweep

__all__ = ["Store", "Sweep", "TaskFolder", "count", "make_engine", "rows", "run_sweep"]

__getattr__ = loader(
    __name__, export="rows", runner="TaskFolder make_engine run_sweep", status="count", store="Store", sweep="Sweep"
)
