"""Applies a plan to a model: packs activations and weights, and reports what is stored otherwise."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paredown.lazy import loader

if TYPE_CHECKING:
    from paredown.session.session import Session

__all__ = ["Session"]

__getattr__ = loader(__name__, session="Session")
