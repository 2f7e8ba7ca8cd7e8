"""Thin adapters for Hugging Face's Trainer, Lightning and loggers, and help when memory runs out; imported when asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paredown.lazy import loader

if TYPE_CHECKING:
    from paredown.integrations.monitor import Monitor
    from paredown.integrations.out_of_memory import explain_on_out_of_memory

__all__ = ["Monitor", "explain_on_out_of_memory"]

__getattr__ = loader(__name__, monitor="Monitor", out_of_memory="explain_on_out_of_memory")
