"""U-Net: down through halved pictures and doubled channels, up again with what the way down left on each level.

x -> down.0 -> down.1 -> ... -> bottom -> up.0 -> up.1 -> ... -> head
       |         +-----------------------------cat
       +------------------------------------------------cat
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn


def double_conv(num_in: int, num_out: int) -> nn.Sequential:
    """Twice: a convolution of 3 x 3, batch norm, ReLU."""
    return nn.Sequential(
        *(nn.Conv2d(num_in, num_out, 3, padding=1, bias=False), nn.BatchNorm2d(num_out), nn.ReLU(inplace=True)),
        *(nn.Conv2d(num_out, num_out, 3, padding=1, bias=False), nn.BatchNorm2d(num_out), nn.ReLU(inplace=True)),
    )


@final
class Up(nn.Module):
    """Doubles height and width, joins what the way down left there, and convolves both."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.grow = nn.ConvTranspose2d(num_in, num_out, 2, stride=2)
        self.convs = double_conv(2 * num_out, num_out)

    def forward(self, x: Tensor, left: Tensor) -> Tensor:
        """(num, num_in, h, w) and (num, num_out, 2h, 2w) to the latter's shape."""
        return self.convs(torch.cat([left, self.grow(x)], dim=1))


@final
class UNet(nn.Module):
    """A picture in, logits of a class for each of its pixels out; `depth` halvings, which height and width must allow."""

    def __init__(self, *, num_channels: int = 3, num_classes: int = 2, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        widths = [width << level for level in range(depth + 1)]
        self.down = nn.ModuleList(double_conv(a, b) for a, b in zip([num_channels, *widths], widths[:-1], strict=False))
        self.pool = nn.MaxPool2d(2)
        self.bottom = double_conv(widths[-2], widths[-1])
        self.up = nn.ModuleList(Up(2 * num_out, num_out) for num_out in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (num_pictures, num_classes, height, width)."""
        levels: list[Tensor] = []
        for down in self.down:
            levels.append(down(x))
            x = self.pool(levels[-1])
        x = self.bottom(x)
        for up in self.up:
            x = up(x, levels.pop())
        return self.head(x)
