"""Optimizers that store parameters, moments and gradient accumulators in low-bit formats; imported when first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paredown.lazy import loader

if TYPE_CHECKING:
    from paredown.optim.muon import Muon, embeddings_and_head
    from paredown.optim.optimizers import SGD, AdamW, Lion
    from paredown.optim.sharded.reduction import reduce_in_8_bits

__all__ = ["SGD", "AdamW", "Lion", "Muon", "embeddings_and_head", "reduce_in_8_bits"]

__getattr__ = loader(
    __name__, optimizers="SGD AdamW Lion", muon="Muon embeddings_and_head", **{"sharded.reduction": "reduce_in_8_bits"}
)
