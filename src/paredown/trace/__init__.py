"""What one training step keeps: `trace_step` follows it on fake tensors; slots, lifetimes and optimizer state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paredown.lazy import loader

if TYPE_CHECKING:
    from paredown.trace.trace import Trace

__all__ = ["Trace"]

__getattr__ = loader(__name__, trace="Trace")
