"""Optimizers that store parameters, moments and gradient accumulators in low-bit formats; imported when first used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paredown.optim.optimizers import SGD, AdamW, Lion

__all__ = ["SGD", "AdamW", "Lion"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'paredown.optim' has no attribute {name!r}: it has {', '.join(__all__)}")
    from paredown.optim import optimizers

    globals()[name] = value = getattr(optimizers, name)  # the next look-up finds it
    return value
