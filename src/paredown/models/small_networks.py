"""Six small networks: MLP, ConvNeXt, U-Net, and SqueezeNet, ShuffleNet-v2 and MobileNet-v2 for images of 32 x 32.

MLP: linear layers with ReLU between them.

ConvNeXt: residual layers of a 7 x 7 depthwise convolution and a two-layer network on the channels of each pixel,

    x <- x + scale * shrink(gelu(expand(norm(depthwise(x)))))

after a patch embedding of 4 x 4; between the groups of layers a norm and a 2 x 2 convolution halve height and width. Defaults are those of
ConvNeXt-T; stochastic depth, which its training adds, is left out.

U-Net: an encoder that halves height and width and doubles the channels, and a decoder that concatenates the encoder's output of each level.

    x -> down.0 -> down.1 -> ... -> bottom -> up.0 -> up.1 -> ... -> head
           |         +-----------------------------cat
           +------------------------------------------------cat

SqueezeNet with batch norm: fire layers reduce the channels and expand them. 734,986 parameters at width 1.0 with 10 classes.

    x -> stem -> pool -> fire2, 3, 4 -> pool -> fire5, 6, 7, 8 -> pool -> fire9 -> conv10 -> mean

ShuffleNet-v2: a layer f (1 x 1, 3 x 3 depthwise, 1 x 1 convolution) changes half of the channels, then both halves are interleaved. The
first layer of each group has two branches of stride 2. 1,263,854 parameters at width 1.0 with 10 classes.

    x = (a, b) by channels -> (a, f(b)) -> channels of both, alternating

MobileNet-v2: inverted residual layers (1 x 1 expand, 3 x 3 depthwise, 1 x 1 project), with a residual sum where the stride is 1.
2,296,922 parameters at width 1.0 with 10 classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import final

import torch
from torch import Tensor, nn

from paredown.models.resnet import conv1x1, conv3x3, shortcut


@final
class MLP(nn.Module):
    """A network of linear layers with ReLU between them; `sizes` are those of input, hidden layers and output, in order.

    >>> [tuple(p.shape) for p in MLP(sizes=(4, 8, 2)).parameters()]
    [(8, 4), (8,), (2, 8), (2,)]
    """

    def __init__(self, *, sizes: Sequence[int] = (784, 256, 256, 10)) -> None:
        super().__init__()
        pairs = ((nn.Linear(a, b), nn.ReLU()) for a, b in pairwise(sizes))
        self.layers = nn.Sequential(*[module for pair in pairs for module in pair][:-1])

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (num, sizes[-1]) of `x`, (num, ...), whose other dimensions are flattened to sizes[0] values."""
        return self.layers(x.flatten(1))


# --- ConvNeXt --------------------------------------------------------------------------------------------------------

EPSILON = 1e-6
START_SCALE = 1e-6  # initial layer scale, so that each layer starts close to the identity


@final
class ChannelNorm(nn.Module):
    """A layer norm over the channels of each pixel of (num, channels, height, width)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim, eps=EPSILON)

    def forward(self, x: Tensor) -> Tensor:
        """Return x, (num, channels, height, width), with the channels of each pixel normalized."""
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


@final
class ConvNeXtLayer(nn.Module):
    """A residual layer of ConvNeXt: depthwise convolution, norm, linear, GELU, linear, layer scale, sum."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(dim, dim, 7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=EPSILON)
        self.expand, self.gelu, self.shrink = nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)
        self.scale = nn.Parameter(torch.full((dim,), START_SCALE))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the layer, (num, dim, height, width) as x."""
        out = self.depthwise(x).permute(0, 2, 3, 1)  # channels last, for norm and linear maps
        out = self.shrink(self.gelu(self.expand(self.norm(out))))
        return x + (self.scale * out).permute(0, 3, 1, 2)


@final
class ConvNeXt(nn.Module):
    """A ConvNeXt: groups of layers with a downsampling before each, then a mean over pixels, a norm and a head."""

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
        """Return logits (num_pictures, num_classes) of pictures (num_pictures, 3, height, width)."""
        for shrink, group in zip(self.shrinks, self.groups, strict=True):
            x = group(shrink(x))
        return self.head(self.norm(x.mean((2, 3))))


# --- U-Net -----------------------------------------------------------------------------------------------------------


def double_conv(num_in: int, num_out: int) -> nn.Sequential:
    """Return a sequence of two 3 x 3 convolutions, each with a batch norm and a ReLU behind it."""
    return nn.Sequential(
        *(nn.Conv2d(num_in, num_out, 3, padding=1, bias=False), nn.BatchNorm2d(num_out), nn.ReLU(inplace=True)),
        *(nn.Conv2d(num_out, num_out, 3, padding=1, bias=False), nn.BatchNorm2d(num_out), nn.ReLU(inplace=True)),
    )


@final
class Up(nn.Module):
    """A level of a U-Net's decoder: it doubles height and width, appends the encoder's output, and convolves both."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.grow = nn.ConvTranspose2d(num_in, num_out, 2, stride=2)
        self.convs = double_conv(2 * num_out, num_out)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        """Return a tensor of the shape of `skip`, (num, num_out, 2h, 2w), from x of shape (num, num_in, h, w)."""
        return self.convs(torch.cat([skip, self.grow(x)], dim=1))


@final
class UNet(nn.Module):
    """A U-Net, which computes logits for each pixel of a picture; height and width must be divisible by 2**depth."""

    def __init__(self, *, num_channels: int = 3, num_classes: int = 2, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        widths = [width << level for level in range(depth + 1)]
        self.down = nn.ModuleList(double_conv(a, b) for a, b in zip([num_channels, *widths], widths[:-1], strict=False))
        self.pool = nn.MaxPool2d(2)
        self.bottom = double_conv(widths[-2], widths[-1])
        self.up = nn.ModuleList(Up(2 * num_out, num_out) for num_out in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (num, num_classes, height, width) of pictures (num, num_channels, height, width)."""
        levels: list[Tensor] = []
        for down in self.down:
            levels.append(down(x))
            x = self.pool(levels[-1])
        x = self.bottom(x)
        for up in self.up:
            x = up(x, levels.pop())
        return self.head(x)


# --- SqueezeNet ------------------------------------------------------------------------------------------------------


def scaled(channels: int, width: float, unit: int = 2) -> int:
    """Return `channels` times `width`, rounded up to a multiple of `unit`.

    >>> scaled(96, 1.0), scaled(16, 0.1), scaled(116, 0.25)
    (96, 2, 30)
    """
    return max(unit, -int(-channels * width // unit) * unit)


def conv_norm(num_in: int, num_out: int, size: int, *rest: nn.Module) -> nn.Sequential:
    """Return a sequence of a convolution that keeps height and width, a batch norm, and the modules `rest`."""
    return nn.Sequential(nn.Conv2d(num_in, num_out, size, padding=size // 2), nn.BatchNorm2d(num_out), *rest)


@final
class Fire(nn.Module):
    """A SqueezeNet layer: a 1 x 1 convolution to few channels, then a 1 x 1 and a 3 x 3 one, whose outputs are concatenated."""

    def __init__(self, num_in: int, num_out: int, squeezed: int) -> None:
        super().__init__()
        self.squeeze, self.relu = conv_norm(num_in, squeezed, 1, nn.ReLU()), nn.ReLU()
        self.expand1, self.expand3 = conv_norm(squeezed, num_out // 2, 1), conv_norm(squeezed, num_out // 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor (num, num_out, height, width) from x of shape (num, num_in, height, width)."""
        x = self.squeeze(x)
        return self.relu(torch.cat([self.expand1(x), self.expand3(x)], 1))


@final
class SqueezeNet(nn.Module):
    """A SqueezeNet: eight fire layers between two convolutions."""

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
        """Return logits (num_pictures, num_classes) of pictures (num_pictures, 3, 32, 32)."""
        x = self.pool4(self.fire4(self.fire3(self.fire2(self.pool1(self.stem(x))))))
        x = self.pool8(self.fire8(self.fire7(self.fire6(self.fire5(x)))))
        x = self.fire9(x)
        return self.avgpool(self.conv10(x)).flatten(1)


# --- ShuffleNet-v2 ---------------------------------------------------------------------------------------------------

DEPTHS = (4, 8, 4)


def depthwise(channels: int, stride: int) -> nn.Conv2d:
    """Return a 3 x 3 depthwise convolution, one filter per channel; it keeps height and width if `stride` is 1."""
    return nn.Conv2d(channels, channels, 3, stride, padding=1, groups=channels, bias=False)


def interleaved(x: Tensor) -> Tensor:
    """Return `x` with the channels of its two halves in turn: 0, n/2, 1, n/2 + 1, and so on, of n channels.

    >>> interleaved(torch.arange(4.0).view(1, 4, 1, 1)).flatten().tolist()
    [0.0, 2.0, 1.0, 3.0]
    """
    num, channels, height, width = x.shape
    return x.view(num, 2, channels // 2, height, width).permute(0, 2, 1, 3, 4).reshape(num, channels, height, width)


def conv_branch(num_in: int, num_out: int, stride: int) -> nn.Sequential:
    """Return a 1 x 1, a 3 x 3 depthwise (with the stride) and a 1 x 1 convolution in sequence, with norms and ReLUs."""
    return nn.Sequential(
        *(conv1x1(num_in, num_out), nn.BatchNorm2d(num_out), nn.ReLU()),
        *(depthwise(num_out, stride), nn.BatchNorm2d(num_out)),
        *(conv1x1(num_out, num_out), nn.BatchNorm2d(num_out), nn.ReLU()),
    )


@final
class Passing(nn.Module):
    """A ShuffleNet layer that convolves half of the channels and returns the other half unmodified."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.num_passing = channels // 2
        self.way = conv_branch(channels - self.num_passing, channels - self.num_passing, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of x, (num, channels, height, width)."""
        return interleaved(torch.cat([x[:, : self.num_passing], self.way(x[:, self.num_passing :])], 1))


@final
class Halving(nn.Module):
    """A ShuffleNet layer of two branches with stride 2, which halves height and width."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        half = num_out // 2
        self.short = nn.Sequential(
            *(depthwise(num_in, 2), nn.BatchNorm2d(num_in)), *(conv1x1(num_in, half), nn.BatchNorm2d(half), nn.ReLU())
        )
        self.way = conv_branch(num_in, half, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor (num, num_out, height / 2, width / 2) from x of shape (num, num_in, height, width)."""
        return interleaved(torch.cat([self.short(x), self.way(x)], 1))


@final
class ShuffleNet(nn.Module):
    """A ShuffleNet-v2: a 3 x 3 convolution, three groups of layers, a 1 x 1 convolution and a linear head."""

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
        """Return logits (num_pictures, num_classes) of pictures (num_pictures, 3, 32, 32)."""
        return self.fc(self.avgpool(self.last(self.layers(self.stem(x)))).flatten(1))


# --- MobileNet-v2 ----------------------------------------------------------------------------------------------------

# (expansion, channels, layers, stride of the first)
GROUPS = ((1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))


@final
class Inverted(nn.Module):
    """A residual layer of MobileNet-v2: a 1 x 1 convolution to more channels, a depthwise one, and a 1 x 1 to fewer."""

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
        """Return a tensor (num, num_out, ...) from x, (num, num_in, ...), height and width divided by the stride."""
        out = self.way(x)
        return out + (x if self.downsample is None else self.downsample(x)) if self.has_sum else out


@final
class MobileNet(nn.Module):
    """A MobileNet-v2: a 3 x 3 convolution, seventeen layers, a 1 x 1 convolution and a linear head."""

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
        """Return logits (num_pictures, num_classes) of pictures (num_pictures, 3, 32, 32)."""
        return self.fc(self.avgpool(self.last(self.layers(self.stem(x)))).flatten(1))
