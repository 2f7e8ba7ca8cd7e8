"""A network of linear layers with ReLU between them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import final

from torch import Tensor, nn


@final
class MLP(nn.Module):
    """Linear layers from each of `sizes` to the next, ReLU between them.

    >>> [tuple(p.shape) for p in MLP(sizes=(4, 8, 2)).parameters()]
    [(8, 4), (8,), (2, 8), (2,)]
    """

    def __init__(self, *, sizes: Sequence[int] = (784, 256, 256, 10)) -> None:
        super().__init__()
        pairs = ((nn.Linear(a, b), nn.ReLU()) for a, b in pairwise(sizes))
        self.layers = nn.Sequential(*[module for pair in pairs for module in pair][:-1])

    def forward(self, x: Tensor) -> Tensor:
        """Logits (num, sizes[-1]) of inputs (num, ...) that flatten to sizes[0] values each."""
        return self.layers(x.flatten(1))
