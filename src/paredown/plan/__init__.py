"""A plan: which format each slot of a step is stored in, and the bytes that come of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paredown.lazy import loader

if TYPE_CHECKING:
    from paredown.plan.explanation import explain_slots
    from paredown.plan.footprint import Footprint
    from paredown.plan.plan import Plan

__all__ = ["Footprint", "Plan", "explain_slots"]

__getattr__ = loader(__name__, explanation="explain_slots", footprint="Footprint", plan="Plan")
