"""A plan chooses the format in which each tensor of a training step is stored; footprints are the bytes that follow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paredown.lazy import loader

if TYPE_CHECKING:
    from paredown.plan.explanation import explain_slots
    from paredown.plan.footprint import Footprint
    from paredown.plan.plan import Plan

__all__ = ["Footprint", "Plan", "explain_slots"]

__getattr__ = loader(__name__, explanation="explain_slots", footprint="Footprint", plan="Plan")
