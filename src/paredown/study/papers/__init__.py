"""The methods of two papers as published, PEPPP and mixed-precision assignments; PEPPP's configurations are in `simulate/peppp.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paredown.lazy import loader

if TYPE_CHECKING:
    from paredown.study.papers.mixed_precision_assignments import (
        BASELINES,
        demote,
        groups_of,
        high_plan,
        low_ratio,
        memory_factor,
        plan_of,
        total_bytes,
    )
    from paredown.study.papers.peppp_cross_validation import SETTINGS, Matrices, held_out_tasks, judge
    from paredown.study.papers.peppp_experiment_design import PICKERS, Pooled

__all__ = [
    "BASELINES",
    "PICKERS",
    "SETTINGS",
    "Matrices",
    "Pooled",
    "demote",
    "groups_of",
    "held_out_tasks",
    "high_plan",
    "judge",
    "low_ratio",
    "memory_factor",
    "plan_of",
    "total_bytes",
]

__getattr__ = loader(
    __name__,
    mixed_precision_assignments="BASELINES demote groups_of high_plan low_ratio memory_factor plan_of total_bytes",
    peppp_cross_validation="Matrices SETTINGS judge held_out_tasks",
    peppp_experiment_design="PICKERS Pooled",
)
