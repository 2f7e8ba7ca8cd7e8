"""Cross entropy over a large vocabulary in chunks of rows, so that all logits never exist."""

from __future__ import annotations

from paredown.loss.chunked_cross_entropy import ChunkSettings, CrossEntropy, chunked_cross_entropy
from paredown.loss.output_head import chunked_loss

__all__ = ["ChunkSettings", "CrossEntropy", "chunked_cross_entropy", "chunked_loss"]
