"""Train in the memory you have: number formats for the tensors of a training step.

Names are loaded when first used, so that `import paredown` is quick and needs torch and numpy alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paredown import optim
    from paredown.codec.packed import PackedTensor, encode, round_trip
    from paredown.errors import (
        ApplyError,
        BudgetError,
        CodecError,
        FormatError,
        OptimError,
        ParedownError,
        PlanError,
        PriorError,
        ReportError,
        StoreError,
        SweepError,
        TaskError,
        TraceError,
        VerificationError,
    )
    from paredown.formats.catalog import CATALOG
    from paredown.formats.element import Element
    from paredown.formats.format import Format
    from paredown.formats.rounding import Overflow, Rounding, Seed
    from paredown.plan.footprint import Footprint, footprint
    from paredown.plan.plan import Plan
    from paredown.plan.trace import Trace, trace_step
    from paredown.plan.trial import Trial
    from paredown.roles import Role
    from paredown.runs.evaluate import evaluate
    from paredown.runs.pick import pick
    from paredown.runs.task import Task
    from paredown.search.assign import assign
    from paredown.search.picked import Frontier, Picked
    from paredown.search.sensitivity import Sensitivities
    from paredown.session.guard import Guard, Limits
    from paredown.session.probe import probe
    from paredown.session.session import Session, apply
    from paredown.session.verification import Verification
    from paredown.session.verify import verify

__version__ = "0.1.0"
__all__ = [
    "CATALOG",
    "ApplyError",
    "BudgetError",
    "CodecError",
    "Element",
    "Footprint",
    "Format",
    "FormatError",
    "Frontier",
    "Guard",
    "Limits",
    "OptimError",
    "Overflow",
    "PackedTensor",
    "ParedownError",
    "Picked",
    "Plan",
    "PlanError",
    "PriorError",
    "ReportError",
    "Role",
    "Rounding",
    "Seed",
    "Sensitivities",
    "Session",
    "StoreError",
    "SweepError",
    "Task",
    "TaskError",
    "Trace",
    "TraceError",
    "Trial",
    "Verification",
    "VerificationError",
    "__version__",
    "apply",
    "assign",
    "encode",
    "evaluate",
    "footprint",
    "optim",
    "pick",
    "probe",
    "round_trip",
    "trace_step",
    "verify",
]

_NAMES_OF = {
    "paredown.codec.packed": ("PackedTensor", "encode", "round_trip"),
    "paredown.errors": (
        "ApplyError",
        "BudgetError",
        "CodecError",
        "FormatError",
        "OptimError",
        "ParedownError",
        "PlanError",
        "PriorError",
        "ReportError",
        "StoreError",
        "SweepError",
        "TaskError",
        "TraceError",
        "VerificationError",
    ),
    "paredown.formats.catalog": ("CATALOG",),
    "paredown.formats.element": ("Element",),
    "paredown.formats.format": ("Format",),
    "paredown.formats.rounding": ("Overflow", "Rounding", "Seed"),
    "paredown.plan.footprint": ("Footprint", "footprint"),
    "paredown.plan.plan": ("Plan",),
    "paredown.plan.trace": ("Trace", "trace_step"),
    "paredown.plan.trial": ("Trial",),
    "paredown.roles": ("Role",),
    "paredown.runs.evaluate": ("evaluate",),
    "paredown.runs.pick": ("pick",),
    "paredown.runs.task": ("Task",),
    "paredown.search.assign": ("assign",),
    "paredown.search.picked": ("Frontier", "Picked"),
    "paredown.search.sensitivity": ("Sensitivities",),
    "paredown.session.guard": ("Guard", "Limits"),
    "paredown.session.probe": ("probe",),
    "paredown.session.session": ("Session", "apply"),
    "paredown.session.verification": ("Verification",),
    "paredown.session.verify": ("verify",),
}
_HOME = {name: module for module, names in _NAMES_OF.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "optim":
        return import_module("paredown.optim")
    if name not in _HOME:
        raise AttributeError(f"module 'paredown' has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(_HOME[name]), name)  # the next look-up finds it
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
