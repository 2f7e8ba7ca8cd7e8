"""Train in the memory you have: number formats for the tensors of a training step.

Names are loaded when first used, so that `import paredown` is quick and needs torch and numpy alone.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paredown import errors, optim
    from paredown.assign.assign import assign
    from paredown.assign.sensitivity import Sensitivities
    from paredown.calibrate.device_calibration import calibrate
    from paredown.codec.packed import PackedTensor, encode, round_trip
    from paredown.formats.catalog import CATALOG
    from paredown.formats.element import Element
    from paredown.formats.format import Format
    from paredown.formats.rounding import Overflow, Rounding, Seed
    from paredown.pick.answer import Frontier, Picked
    from paredown.pick.pick import pick
    from paredown.plan.calibration import Calibration
    from paredown.plan.footprint import Footprint, footprint
    from paredown.plan.plan import Plan
    from paredown.roles import Role
    from paredown.session.guard import Guard, Limits
    from paredown.session.probe import probe
    from paredown.session.session import Session, apply
    from paredown.session.verification import Verification
    from paredown.session.verify import verify
    from paredown.tasks.evaluate import evaluate
    from paredown.tasks.task import Task
    from paredown.tasks.trial import Trial
    from paredown.trace.trace import Trace
    from paredown.trace.trace_step import trace_step

__version__ = "0.1.0"
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
    "footprint",
    "optim",
    "pick",
    "probe",
    "round_trip",
    "trace_step",
    "verify",
]

_NAMES_OF = {
    "paredown.assign.assign": ("assign",),
    "paredown.assign.sensitivity": ("Sensitivities",),
    "paredown.calibrate.device_calibration": ("calibrate",),
    "paredown.codec.packed": ("PackedTensor", "encode", "round_trip"),
    "paredown.formats.catalog": ("CATALOG",),
    "paredown.formats.element": ("Element",),
    "paredown.formats.format": ("Format",),
    "paredown.formats.rounding": ("Overflow", "Rounding", "Seed"),
    "paredown.pick.answer": ("Frontier", "Picked"),
    "paredown.pick.pick": ("pick",),
    "paredown.plan.calibration": ("Calibration",),
    "paredown.plan.footprint": ("Footprint", "footprint"),
    "paredown.plan.plan": ("Plan",),
    "paredown.roles": ("Role",),
    "paredown.session.guard": ("Guard", "Limits"),
    "paredown.session.probe": ("probe",),
    "paredown.session.session": ("Session", "apply"),
    "paredown.session.verification": ("Verification",),
    "paredown.session.verify": ("verify",),
    "paredown.tasks.evaluate": ("evaluate",),
    "paredown.tasks.task": ("Task",),
    "paredown.tasks.trial": ("Trial",),
    "paredown.trace.trace": ("Trace",),
    "paredown.trace.trace_step": ("trace_step",),
}
_HOME = {name: module for module, names in _NAMES_OF.items() for name in names}


class _Package(ModuleType):
    """This package: `paredown.assign`, `calibrate` and `pick` stay the functions once the packages of the same names are imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):  # importing a submodule sets it on its parent
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name in ("errors", "optim"):
        return import_module(f"paredown.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'paredown' has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(_HOME[name]), name)  # the next look-up finds it
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
