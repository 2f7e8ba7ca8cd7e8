"""What models of text answer: logits, and the loss when they are told what should have come out."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import cross_entropy


class Scored(NamedTuple):
    """Logits (num_texts, length, vocabulary) and their mean cross entropy against the targets."""

    logits: Tensor
    loss: Tensor


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of the next token: logits (..., vocabulary) against targets (...)."""
    return cross_entropy(logits.flatten(0, -2), targets.flatten())


def scored(logits: Tensor, targets: Tensor | None) -> Tensor | Scored:
    """The logits alone, or with their loss where there are targets."""
    return logits if targets is None else Scored(logits, token_loss(logits, targets))
