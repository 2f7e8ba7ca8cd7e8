"""PEPPP's ResNet-18 for pictures of 32 x 32 and 64 x 64: each ReLU stands before the sum, and none after it.

    x -> conv1 -> bn1 -> relu -> layers -> mean -> fc        a layer: relu2(bn2(conv2(relu1(bn1(conv1(x)))))) + x

11,168,832 + 513 for each class are its parameters at width 64. Convolutions begin normal with variance 2 / (places * channels out).
"""

from __future__ import annotations

from typing import final

from torch import Tensor, nn

from paredown.models.resnet import conv3x3, shortcut


@final
class SumLast(nn.Module):
    """Two convolutions of 3 x 3, the second ReLU before the sum."""

    def __init__(self, num_in: int, planes: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu1 = conv3x3(num_in, planes, stride), nn.BatchNorm2d(planes), nn.ReLU()
        self.conv2, self.bn2, self.relu2 = conv3x3(planes, planes), nn.BatchNorm2d(planes), nn.ReLU()
        self.downsample = shortcut(num_in, planes, stride)

    def forward(self, x: Tensor) -> Tensor:
        """f(x) + x, x through `downsample` where shapes differ."""
        out = self.relu1(self.bn1(self.conv1(x)))
        out = self.relu2(self.bn2(self.conv2(out)))
        return out + (x if self.downsample is None else self.downsample(x))


@final
class SumLastResNet(nn.Module):
    """Four groups of two layers."""

    def __init__(self, *, num_classes: int = 10, width: int = 64) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu = conv3x3(3, width), nn.BatchNorm2d(width), nn.ReLU()
        layers: list[nn.Module] = []
        for number, before in enumerate((width, width, 2 * width, 4 * width)):
            planes = width << number
            layers += [SumLast(before, planes, 1 if number == 0 else 2), SumLast(planes, planes, 1)]
        self.layers = nn.Sequential(*layers)
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(8 * width, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Logits (num_pictures, num_classes) of pictures (num_pictures, 3, height, width)."""
        return self.fc(self.avgpool(self.layers(self.relu(self.bn1(self.conv1(x))))).flatten(1))
