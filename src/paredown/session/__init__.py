"""A plan at work on a model: a session, its changes, and the parts that pack activations and weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paredown.lazy import loader

if TYPE_CHECKING:
    from paredown.session.session import Session

__all__ = ["Session"]

__getattr__ = loader(__name__, session="Session")
