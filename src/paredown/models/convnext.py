"""ConvNeXt: a depthwise convolution of 7 x 7 and a two-layer network on the channels of each place, around a sum.

    x <- x + scale * shrink(gelu(expand(norm(depthwise(x)))))

A patch embedding of 4 x 4 comes first; between the groups of layers a norm and a convolution of 2 x 2 halve height and width. Defaults
are ConvNeXt-T's, with its arithmetic; random depth, which its training adds, is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import final

import torch
from torch import Tensor, nn

EPSILON = 1e-6
START_SCALE = 1e-6  # of the layer scale: each layer starts as nearly the identity


@final
class ChannelNorm(nn.Module):
    """Layer norm over the channels of (num, channels, height, width)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim, eps=EPSILON)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape, each place normalised by itself."""
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


@final
class ConvNeXtLayer(nn.Module):
    """Depthwise convolution, norm, linear, GELU, linear, layer scale, sum."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(dim, dim, 7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=EPSILON)
        self.expand, self.gelu, self.shrink = nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)
        self.scale = nn.Parameter(torch.full((dim,), START_SCALE))

    def forward(self, x: Tensor) -> Tensor:
        """(num, dim, height, width) to the same."""
        out = self.depthwise(x).permute(0, 2, 3, 1)  # channels last, for norm and linear maps
        out = self.shrink(self.gelu(self.expand(self.norm(out))))
        return x + (self.scale * out).permute(0, 3, 1, 2)


@final
class ConvNeXt(nn.Module):
    """Groups of layers with a halving before each but the first, then the mean over places, a norm and a linear head."""

    def __init__(
        self, *, depths: Sequence[int] = (3, 3, 9, 3), dims: Sequence[int] = (96, 192, 384, 768), num_classes: int = 1000
    ) -> None:
        super().__init__()
        stem = nn.Sequential(nn.Conv2d(3, dims[0], 4, stride=4), ChannelNorm(dims[0]))
        halvings = (nn.Sequential(ChannelNorm(a), nn.Conv2d(a, b, 2, stride=2)) for a, b in pairwise(dims))
        self.shrinks = nn.ModuleList([stem, *halvings])
        self.groups = nn.ModuleList(
            nn.Sequential(*(ConvNeXtLayer(dim) for _ in range(depth))) for depth, dim in zip(depths, dims, strict=True)
        )
        self.norm = nn.LayerNorm(dims[-1], eps=EPSILON)
        self.head = nn.Linear(dims[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (num_pictures, num_classes) of pictures (num_pictures, 3, height, width)."""
        for shrink, group in zip(self.shrinks, self.groups, strict=True):
            x = group(shrink(x))
        return self.head(self.norm(x.mean((2, 3))))
