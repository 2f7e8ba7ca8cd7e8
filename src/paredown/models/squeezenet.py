"""SqueezeNet for pictures of 32 x 32, with batch norm: layers that squeeze the channels and expand them again.

    x -> stem -> pool -> fire2, 3, 4 -> pool -> fire5, 6, 7, 8 -> pool -> fire9 -> conv10 -> mean

`width` scales every channel count; 1.0 has 734,986 parameters with 10 classes.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn


def scaled(channels: int, width: float, unit: int = 2) -> int:
    """`channels` times `width`, a multiple of `unit` and at least one.

    >>> scaled(96, 1.0), scaled(16, 0.1), scaled(116, 0.25)
    (96, 2, 30)
    """
    return max(unit, -int(-channels * width // unit) * unit)


def conv_norm(num_in: int, num_out: int, size: int, *rest: nn.Module) -> nn.Sequential:
    """A convolution that keeps height and width, its norm, and what comes after."""
    return nn.Sequential(nn.Conv2d(num_in, num_out, size, padding=size // 2), nn.BatchNorm2d(num_out), *rest)


@final
class Fire(nn.Module):
    """1 x 1 down, then half of the outputs by 1 x 1 and half by 3 x 3."""

    def __init__(self, num_in: int, num_out: int, squeezed: int) -> None:
        super().__init__()
        self.squeeze, self.relu = conv_norm(num_in, squeezed, 1, nn.ReLU()), nn.ReLU()
        self.expand1, self.expand3 = conv_norm(squeezed, num_out // 2, 1), conv_norm(squeezed, num_out // 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        """(num, num_in, height, width) to (num, num_out, height, width)."""
        x = self.squeeze(x)
        return self.relu(torch.cat([self.expand1(x), self.expand3(x)], 1))


@final
class SqueezeNet(nn.Module):
    """Eight fire layers between two convolutions."""

    def __init__(self, *, num_classes: int = 10, width: float = 1.0) -> None:
        super().__init__()
        a, b, c, d, e = (scaled(n, width) for n in (96, 128, 256, 384, 512))
        narrow = [scaled(n, width) for n in (16, 32, 48, 64)]
        self.stem = conv_norm(3, a, 3, nn.ReLU())
        self.pool1, self.pool4, self.pool8 = (nn.MaxPool2d(2) for _ in range(3))
        self.fire2, self.fire3 = Fire(a, b, narrow[0]), Fire(b, b, narrow[0])
        self.fire4, self.fire5 = Fire(b, c, narrow[1]), Fire(c, c, narrow[1])
        self.fire6, self.fire7 = Fire(c, d, narrow[2]), Fire(d, d, narrow[2])
        self.fire8, self.fire9 = Fire(d, e, narrow[3]), Fire(e, e, narrow[3])
        self.conv10 = nn.Conv2d(e, num_classes, 1)
        self.avgpool = nn.AdaptiveAvgPool2d(1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (num_pictures, num_classes) of pictures (num_pictures, 3, 32, 32)."""
        x = self.pool4(self.fire4(self.fire3(self.fire2(self.pool1(self.stem(x))))))
        x = self.pool8(self.fire8(self.fire7(self.fire6(self.fire5(x)))))
        x = self.fire9(x)
        return self.avgpool(self.conv10(x)).flatten(1)
