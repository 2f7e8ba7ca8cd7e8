"""ShuffleNet-v2 for pictures of 32 x 32: half of the channels pass a layer by, then both halves are interleaved.

    x = (a, b) by channels -> (a, f(b)) -> channels of both in turn         f: 1 x 1, 3 x 3 each channel for itself, 1 x 1

A first layer of each group has two ways with stride 2 and no half that passes by. `width` scales the channels; 1.0 has 1,263,854
parameters with 10 classes.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from paredown.models.resnet import conv1x1, conv3x3
from paredown.models.squeezenet import scaled

DEPTHS = (4, 8, 4)


def depthwise(channels: int, stride: int) -> nn.Conv2d:
    """3 x 3, each channel for itself."""
    return nn.Conv2d(channels, channels, 3, stride, padding=1, groups=channels, bias=False)


def interleaved(x: Tensor) -> Tensor:
    """The channels of the two halves in turn.

    >>> interleaved(torch.arange(4.0).view(1, 4, 1, 1)).flatten().tolist()
    [0.0, 2.0, 1.0, 3.0]
    """
    num, channels, height, width = x.shape
    return x.view(num, 2, channels // 2, height, width).permute(0, 2, 1, 3, 4).reshape(num, channels, height, width)


def way(num_in: int, num_out: int, stride: int) -> nn.Sequential:
    """1 x 1, depthwise, 1 x 1."""
    return nn.Sequential(
        *(conv1x1(num_in, num_out), nn.BatchNorm2d(num_out), nn.ReLU()),
        *(depthwise(num_out, stride), nn.BatchNorm2d(num_out)),
        *(conv1x1(num_out, num_out), nn.BatchNorm2d(num_out), nn.ReLU()),
    )


@final
class Passing(nn.Module):
    """A layer that half of the channels pass by."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.num_passing = channels // 2
        self.way = way(channels - self.num_passing, channels - self.num_passing, 1)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        return interleaved(torch.cat([x[:, : self.num_passing], self.way(x[:, self.num_passing :])], 1))


@final
class Halving(nn.Module):
    """A layer of two ways that halves height and width."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        half = num_out // 2
        self.short = nn.Sequential(
            *(depthwise(num_in, 2), nn.BatchNorm2d(num_in)), *(conv1x1(num_in, half), nn.BatchNorm2d(half), nn.ReLU())
        )
        self.way = way(num_in, half, 2)

    def forward(self, x: Tensor) -> Tensor:
        """(num, num_in, height, width) to (num, num_out, height / 2, width / 2)."""
        return interleaved(torch.cat([self.short(x), self.way(x)], 1))


@final
class ShuffleNet(nn.Module):
    """A 3 x 3 convolution, three groups of layers, another 1 x 1 and a linear head."""

    def __init__(self, *, num_classes: int = 10, width: float = 1.0) -> None:
        super().__init__()
        before = scaled(24, width)
        self.stem = nn.Sequential(conv3x3(3, before), nn.BatchNorm2d(before), nn.ReLU())
        layers: list[nn.Module] = []
        for channels, depth in zip((scaled(n, width, 4) for n in (116, 232, 464)), DEPTHS, strict=True):
            layers += [Halving(before, channels), *(Passing(channels) for _ in range(depth - 1))]
            before = channels
        self.layers, last = nn.Sequential(*layers), scaled(1024, width)
        self.last = nn.Sequential(conv1x1(before, last), nn.BatchNorm2d(last), nn.ReLU())
        self.avgpool, self.fc = nn.AvgPool2d(4), nn.Linear(last, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (num_pictures, num_classes) of pictures (num_pictures, 3, 32, 32)."""
        return self.fc(self.avgpool(self.last(self.layers(self.stem(x)))).flatten(1))
