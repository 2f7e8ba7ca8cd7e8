"""Thin adapters for Hugging Face's Trainer, Lightning and loggers; each is imported at its first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paredown.lazy import loader

if TYPE_CHECKING:
    from paredown.integrations.monitor import Monitor

__all__ = ["Monitor"]

__getattr__ = loader(__name__, monitor="Monitor")
