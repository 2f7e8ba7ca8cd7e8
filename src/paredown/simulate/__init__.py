"""Simulate mode: arithmetic sees rounded values, as in the papers; no memory is saved."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paredown.lazy import loader

if TYPE_CHECKING:
    from paredown.simulate.rounded_values import Simulate

__all__ = ["Simulate"]

__getattr__ = loader(__name__, rounded_values="Simulate")
