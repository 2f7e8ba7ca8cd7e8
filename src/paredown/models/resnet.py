"""ResNet-18 and ResNet-50 that can load torchvision's weights, and the ResNet-18 of the paper PEPPP.

    ResNet          x -> conv1 -> bn1 -> relu -> maxpool -> layer1 -> layer2 -> layer3 -> layer4 -> avgpool -> fc
    SumLastResNet   x -> conv1 -> bn1 -> relu -> layers -> mean -> fc        a layer: relu2(bn2(conv2(relu1(bn1(conv1(x)))))) + x

`width` is the number of channels of the first layer, which scales all others (64 as published). `small_input` is for images of 32 x 32:
a first convolution of 3 x 3 without stride, and no pooling after it.

SumLastResNet is PEPPP's network for images of 32 x 32 and 64 x 64: ReLUs are before the residual sum. At width 64 it
has 11,168,832 parameters and 513 per class. Initial weights of convolutions are normal with variance 2 / (kernel size * output channels).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from torch import Tensor, nn


def conv3x3(num_in: int, num_out: int, stride: int = 1) -> nn.Conv2d:
    """Return a 3 x 3 convolution, padded so that `stride` alone changes height and width."""
    return nn.Conv2d(num_in, num_out, 3, stride, padding=1, bias=False)


def conv1x1(num_in: int, num_out: int, stride: int = 1) -> nn.Conv2d:
    """Return a 1 x 1 convolution, a linear map of the channels at each pixel."""
    return nn.Conv2d(num_in, num_out, 1, stride, bias=False)


def shortcut(num_in: int, num_out: int, stride: int) -> nn.Sequential | None:
    """Return the projection that a residual layer needs if input and output differ in shape; None if they do not."""
    if stride == 1 and num_in == num_out:
        return None
    return nn.Sequential(conv1x1(num_in, num_out, stride), nn.BatchNorm2d(num_out))


@final
class Basic(nn.Module):
    """The residual layer of ResNet-18 and ResNet-34, which has two 3 x 3 convolutions."""

    expansion = 1

    def __init__(self, num_in: int, planes: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv3x3(num_in, planes, stride), nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2, self.bn2 = conv3x3(planes, planes), nn.BatchNorm2d(planes)
        self.downsample = shortcut(num_in, planes, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return relu(x + f(x)), with `downsample(x)` in place of x in the sum if shapes differ."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


@final
class Bottleneck(nn.Module):
    """The residual layer of ResNet-50 and larger: convolutions of 1 x 1, 3 x 3 (with the stride) and 1 x 1."""

    expansion = 4

    def __init__(self, num_in: int, planes: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv1x1(num_in, planes), nn.BatchNorm2d(planes)
        self.conv2, self.bn2 = conv3x3(planes, planes, stride), nn.BatchNorm2d(planes)
        self.conv3, self.bn3 = conv1x1(planes, planes * self.expansion), nn.BatchNorm2d(planes * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = shortcut(num_in, planes * self.expansion, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return relu(x + f(x)), with `downsample(x)` in place of x in the sum if shapes differ."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


@final
class ResNet(nn.Module):
    """A ResNet of four groups of residual layers; the last three groups halve height and width and double the channels."""

    def __init__(
        self, layer: type[Basic | Bottleneck], depths: Sequence[int], *, num_classes: int, width: int, small_input: bool
    ) -> None:
        super().__init__()
        self.conv1 = conv3x3(3, width) if small_input else nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.Identity() if small_input else nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = _group(layer, width, width, depths[0], stride=1)
        self.layer2 = _group(layer, width * layer.expansion, 2 * width, depths[1], stride=2)
        self.layer3 = _group(layer, 2 * width * layer.expansion, 4 * width, depths[2], stride=2)
        self.layer4 = _group(layer, 4 * width * layer.expansion, 8 * width, depths[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(8 * width * layer.expansion, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (num_pictures, num_classes) of pictures (num_pictures, 3, height, width)."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer1(x)  # one statement each: in a nested call, an argument stays alive until the call returns
        x = self.layer2(x)
        x = self.layer3(x)
        x = self.layer4(x)
        return self.fc(self.avgpool(x).flatten(1))


def _group(layer: type[Basic | Bottleneck], num_in: int, planes: int, depth: int, *, stride: int) -> nn.Sequential:
    """Return `depth` residual layers one after the other, of which the first has the `stride`, the others stride 1."""
    rest = (layer(planes * layer.expansion, planes, 1) for _ in range(depth - 1))
    return nn.Sequential(layer(num_in, planes, stride), *rest)


def resnet18(*, num_classes: int = 1000, width: int = 64, small_input: bool = False) -> ResNet:
    """Return a ResNet-18, which has 11,689,512 parameters by default, as published."""
    return ResNet(Basic, (2, 2, 2, 2), num_classes=num_classes, width=width, small_input=small_input)


def resnet50(*, num_classes: int = 1000, width: int = 64, small_input: bool = False) -> ResNet:
    """Return a ResNet-50, which has 25,557,032 parameters by default, as published."""
    return ResNet(Bottleneck, (3, 4, 6, 3), num_classes=num_classes, width=width, small_input=small_input)


# --- PEPPP's ResNet-18 -----------------------------------------------------------------------------------------------


@final
class SumLast(nn.Module):
    """A residual layer of two 3 x 3 convolutions, with the second ReLU before the sum."""

    def __init__(self, num_in: int, planes: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu1 = conv3x3(num_in, planes, stride), nn.BatchNorm2d(planes), nn.ReLU()
        self.conv2, self.bn2, self.relu2 = conv3x3(planes, planes), nn.BatchNorm2d(planes), nn.ReLU()
        self.downsample = shortcut(num_in, planes, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return f(x) + x, with `downsample(x)` in place of x in the sum if shapes differ."""
        out = self.relu1(self.bn1(self.conv1(x)))
        out = self.relu2(self.bn2(self.conv2(out)))
        return out + (x if self.downsample is None else self.downsample(x))


@final
class SumLastResNet(nn.Module):
    """PEPPP's ResNet with four groups of two SumLast layers; the last three groups halve height and width."""

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
        """Return logits (num_pictures, num_classes) of pictures (num_pictures, 3, height, width)."""
        return self.fc(self.avgpool(self.layers(self.relu(self.bn1(self.conv1(x))))).flatten(1))
