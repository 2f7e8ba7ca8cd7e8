"""Train in the memory you have: number formats for the tensors of a training step.

Names are loaded when first used, so that `import paredown` is quick and needs torch and numpy alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from paredown.version import __version__

if TYPE_CHECKING:
    from paredown import errors, optim
    from paredown.apply_plan import apply
    from paredown.assignment.assign import assign
    from paredown.assignment.sensitivity import Sensitivities
    from paredown.check.guard import Guard, Limits
    from paredown.check.out_of_memory import explain_oom
    from paredown.check.probe import probe
    from paredown.check.verification import Verification
    from paredown.check.verify import verify
    from paredown.codec.packed import PackedTensor, encode, round_trip
    from paredown.formats.catalog import CATALOG
    from paredown.formats.element import Element
    from paredown.formats.format import Format
    from paredown.formats.rounding import Overflow, Rounding, Seed
    from paredown.plan.calibration import Calibration
    from paredown.plan.footprint import Footprint, footprint
    from paredown.plan.plan import Plan
    from paredown.plan.trace import Trace
    from paredown.predict.device_calibration import calibrate
    from paredown.predict.trace_step import trace_step
    from paredown.roles import Role
    from paredown.session.session import Session
    from paredown.session.weights.checkpoint import load_packed, save_packed
    from paredown.study.pick.answer import Frontier, Picked
    from paredown.study.pick.pick import pick
    from paredown.study.tasks.evaluate import evaluate
    from paredown.study.tasks.task import Task
    from paredown.study.tasks.trial import Trial

__all__ = [
    "CATALOG",
    "Calibration",
    "Element",
    "Footprint",
    "Format",
    "Frontier",
    "Guard",
    "Limits",
    "Overflow",
    "PackedTensor",
    "Picked",
    "Plan",
    "Role",
    "Rounding",
    "Seed",
    "Sensitivities",
    "Session",
    "Task",
    "Trace",
    "Trial",
    "Verification",
    "__version__",
    "apply",
    "assign",
    "calibrate",
    "encode",
    "errors",
    "evaluate",
    "explain_oom",
    "footprint",
    "load_packed",
    "optim",
    "pick",
    "probe",
    "round_trip",
    "save_packed",
    "trace_step",
    "verify",
]

_NAMES_OF = {
    "paredown.assignment.assign": ("assign",),
    "paredown.assignment.sensitivity": ("Sensitivities",),
    "paredown.predict.device_calibration": ("calibrate",),
    "paredown.codec.packed": ("PackedTensor", "encode", "round_trip"),
    "paredown.formats.catalog": ("CATALOG",),
    "paredown.formats.element": ("Element",),
    "paredown.formats.format": ("Format",),
    "paredown.formats.rounding": ("Overflow", "Rounding", "Seed"),
    "paredown.study.pick.answer": ("Frontier", "Picked"),
    "paredown.study.pick.pick": ("pick",),
    "paredown.plan.calibration": ("Calibration",),
    "paredown.plan.footprint": ("Footprint", "footprint"),
    "paredown.plan.plan": ("Plan",),
    "paredown.roles": ("Role",),
    "paredown.check.guard": ("Guard", "Limits"),
    "paredown.check.out_of_memory": ("explain_oom",),
    "paredown.check.probe": ("probe",),
    "paredown.session.session": ("Session",),
    "paredown.session.weights.checkpoint": ("load_packed", "save_packed"),
    "paredown.apply_plan": ("apply",),
    "paredown.check.verification": ("Verification",),
    "paredown.check.verify": ("verify",),
    "paredown.study.tasks.evaluate": ("evaluate",),
    "paredown.study.tasks.task": ("Task",),
    "paredown.study.tasks.trial": ("Trial",),
    "paredown.plan.trace": ("Trace",),
    "paredown.predict.trace_step": ("trace_step",),
}
_HOME = {name: module for module, names in _NAMES_OF.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in ("errors", "optim"):
        return import_module(f"paredown.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'paredown' has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(_HOME[name]), name)  # the next look-up finds it
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
