"""MobileNet-v2 for pictures of 32 x 32: 1 x 1 up, 3 x 3 each channel for itself, 1 x 1 down, around a sum where nothing strides.

`width` scales the channels between the layers; 1.0 has 2,296,922 parameters with 10 classes.
"""

from __future__ import annotations

from typing import final

from torch import Tensor, nn

from paredown.models.resnet import conv1x1, conv3x3, shortcut
from paredown.models.shufflenet import depthwise
from paredown.models.squeezenet import scaled

# (expansion, channels, layers, stride of the first)
GROUPS = ((1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))


@final
class Inverted(nn.Module):
    """One layer: wide inside, narrow outside."""

    def __init__(self, num_in: int, num_out: int, expansion: int, stride: int) -> None:
        super().__init__()
        wide = num_in * expansion
        self.way = nn.Sequential(
            *(conv1x1(num_in, wide), nn.BatchNorm2d(wide), nn.ReLU()),
            *(depthwise(wide, stride), nn.BatchNorm2d(wide), nn.ReLU()),
            *(conv1x1(wide, num_out), nn.BatchNorm2d(num_out)),
        )
        self.has_sum = stride == 1
        self.downsample = shortcut(num_in, num_out, 1) if self.has_sum else None

    def forward(self, x: Tensor) -> Tensor:
        """(num, num_in, height, width) to (num, num_out, ...), height and width divided by the stride."""
        out = self.way(x)
        return out + (x if self.downsample is None else self.downsample(x)) if self.has_sum else out


@final
class MobileNet(nn.Module):
    """A 3 x 3 convolution, seventeen layers, a 1 x 1 and a linear head."""

    def __init__(self, *, num_classes: int = 10, width: float = 1.0) -> None:
        super().__init__()
        before = scaled(32, width)
        self.stem = nn.Sequential(conv3x3(3, before), nn.BatchNorm2d(before), nn.ReLU())
        layers: list[nn.Module] = []
        for expansion, channels, depth, stride in GROUPS:
            for number in range(depth):
                layers.append(Inverted(before, scaled(channels, width), expansion, stride if number == 0 else 1))
                before = scaled(channels, width)
        self.layers, last = nn.Sequential(*layers), scaled(1280, width)
        self.last = nn.Sequential(conv1x1(before, last), nn.BatchNorm2d(last), nn.ReLU())
        self.avgpool, self.fc = nn.AvgPool2d(4), nn.Linear(last, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (num_pictures, num_classes) of pictures (num_pictures, 3, 32, 32)."""
        return self.fc(self.avgpool(self.last(self.layers(self.stem(x)))).flatten(1))
