"""A plan at work on an unmodified model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paredown.lazy import loader

if TYPE_CHECKING:
    from paredown.session.guard import Guard, Limits
    from paredown.session.session import Session, apply
    from paredown.session.verification import Verification

__all__ = ["Guard", "Limits", "Session", "Verification", "apply"]

__getattr__ = loader(__name__, guard="Guard Limits", session="Session apply", verification="Verification")
