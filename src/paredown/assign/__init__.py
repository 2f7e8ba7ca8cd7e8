"""A choice for every slot under a byte budget: keep, pack or recompute. Arithmetic alone; no model runs here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paredown.lazy import loader

if TYPE_CHECKING:
    from paredown.assign.sensitivity import Sensitivities

__all__ = ["Sensitivities"]

__getattr__ = loader(__name__, sensitivity="Sensitivities")
