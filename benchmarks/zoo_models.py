"""Networks of the zoo that no package on every machine has: convolutional, diffusion, expert, point cloud and tabular ones."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from networks import Answer, PixelAttention, answer, answer_of_layers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, layer_norm, mse_loss, scaled_dot_product_attention, silu


class Loss(NamedTuple):
    """What a network returns that computes its own loss and has no logits."""

    loss: Tensor


class Classifier(nn.Module):
    """A network that returns logits, with its cross entropy."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor, labels: Tensor) -> Answer:
        """The loss of `labels`, and the logits."""
        return answer(self.network(x), labels)


# --- convolutions ---------------------------------------------------------------------------------------------------------------------


class DenseLayer(nn.Module):
    """Norm, ReLU and a convolution, twice; the result is concatenated behind the input."""

    def __init__(self, width: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(width), nn.Conv2d(width, 4 * growth, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(4 * growth), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width, height, columns) -> (batch, width + growth, height, columns)."""
        h = self.conv1(torch.relu(self.norm1(x)))
        return torch.cat([x, self.conv2(torch.relu(self.norm2(h)))], 1)


class DenseNet(nn.Module):
    """Groups of dense layers with transitions that halve width and size."""

    def __init__(self, depths: Sequence[int] = (6, 12, 24, 16), growth: int = 32, num_classes: int = 1000) -> None:
        super().__init__()
        width = 2 * growth
        parts: list[nn.Module] = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        for i, depth in enumerate(depths):
            parts += [DenseLayer(width + j * growth, growth) for j in range(depth)]
            width += depth * growth
            if i + 1 < len(depths):
                parts += [nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width // 2, 1, bias=False), nn.AvgPool2d(2)]
                width //= 2
        self.features = nn.Sequential(*parts, nn.BatchNorm2d(width), nn.ReLU())
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of pictures."""
        return self.head(self.features(x).mean((2, 3)))


class StandardizedConv(nn.Conv2d):
    """A convolution whose weight has mean 0 and variance 1 / fan-in in each output channel, as normalizer-free networks have it."""

    def forward(self, x: Tensor) -> Tensor:
        """The convolution with the standardized weight."""
        fan_in = self.weight[0].numel()
        weight = layer_norm(self.weight, self.weight.shape[1:], eps=1e-4) * fan_in**-0.5
        return nn.functional.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class NormFreeLayer(nn.Module):
    """A residual layer without norms: x + alpha f(x / beta), with a gate from the mean of each channel."""

    def __init__(self, num_in: int, num_out: int, stride: int, beta: float, alpha: float = 0.2) -> None:
        super().__init__()
        inner, self.beta, self.alpha = num_out // 2, beta, alpha
        self.first, self.last = StandardizedConv(num_in, inner, 1), StandardizedConv(inner, num_out, 1)
        self.middle = StandardizedConv(inner, inner, 3, stride, 1, groups=max(inner // 64, 1))
        self.gate = nn.Sequential(nn.Linear(num_out, num_out // 4), nn.ReLU(), nn.Linear(num_out // 4, num_out))
        changes = stride > 1 or num_in != num_out
        self.shortcut = nn.Sequential(nn.AvgPool2d(stride), StandardizedConv(num_in, num_out, 1)) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        """The next activations."""
        h = gelu(x) * 1.7 / self.beta
        rest = x if self.shortcut is None else self.shortcut(h)
        h = self.last(gelu(self.middle(gelu(self.first(h)) * 1.7)) * 1.7)
        gate = 2 * torch.sigmoid(self.gate(h.mean((2, 3))))
        return rest + self.alpha * h * gate[:, :, None, None]


class NormFreeNet(nn.Module):
    """A convolutional network without normalization."""

    def __init__(
        self, widths: Sequence[int] = (256, 512, 1536), depths: Sequence[int] = (1, 2, 6), num_classes: int = 1000
    ) -> None:
        super().__init__()
        layers, width = list[nn.Module](), widths[0] // 2
        self.stem = StandardizedConv(3, width, 7, 4, 3)
        for num_out, depth in zip(widths, depths, strict=True):
            for j in range(depth):
                layers.append(NormFreeLayer(width, num_out, 2 if j == 0 else 1, (1 + 0.04 * j) ** 0.5))
                width = num_out
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of pictures."""
        return self.head(gelu(self.layers(self.stem(x))).mean((2, 3)))


def volume_layers(num_in: int, num_out: int) -> nn.Sequential:
    """Two 3-D convolutions, each with an instance norm and a leaky ReLU in place."""
    widths = (num_in, num_out)
    parts = [
        (nn.Conv3d(n, num_out, 3, padding=1, bias=False), nn.InstanceNorm3d(num_out, affine=True), nn.LeakyReLU(0.01, inplace=True))
        for n in widths
    ]
    return nn.Sequential(*[module for part in parts for module in part])


class VolumeUNet(nn.Module):
    """A 3-D U-Net as medical segmentation has it; a class for each voxel."""

    def __init__(self, widths: Sequence[int] = (32, 64, 128, 256), num_classes: int = 3) -> None:
        super().__init__()
        pairs = list(pairwise(widths))
        self.first, self.last = volume_layers(1, widths[0]), nn.Conv3d(widths[0], num_classes, 1)
        self.down = nn.ModuleList(nn.Conv3d(a, a, 2, 2) for a, _ in pairs)
        self.layers = nn.ModuleList(volume_layers(a, b) for a, b in pairs)
        self.enlarge = nn.ModuleList(nn.ConvTranspose3d(b, a, 2, 2) for a, b in reversed(pairs))
        self.join = nn.ModuleList(volume_layers(2 * a, a) for a, _ in reversed(pairs))

    def forward(self, x: Tensor, labels: Tensor) -> Answer:
        """The mean cross entropy of all voxels, and their logits."""
        h, skipped = self.first(x), list[Tensor]()
        for down, layers in zip(self.down, self.layers, strict=True):
            skipped.append(h)
            h = layers(down(h))
        for enlarge, join in zip(self.enlarge, self.join, strict=True):
            h = join(torch.cat([enlarge(h), skipped.pop()], 1))
        logits = self.last(h)
        return Answer(cross_entropy(logits, labels), logits)


# --- diffusion ------------------------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Attention of tokens to themselves or to a context."""

    def __init__(self, width: int, num_heads: int, context: int | None = None) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query, self.pairs = nn.Linear(width, width), nn.Linear(context or width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """x (batch, time, width) -> the same shape."""
        parts = (self.query(x), *self.pairs(x if context is None else context).chunk(2, -1))
        query, key, value = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        return self.out(scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


class Conditioned(nn.Module):
    """A layer norm without weights, x (1 + scale) + shift with scale, shift and a gate from the condition."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.modulation = nn.LayerNorm(width, elementwise_affine=False), nn.Linear(width, 3 * width)

    def forward(self, x: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        """The conditioned x and the gate."""
        shift, scale, gate = self.modulation(silu(condition))[:, None].chunk(3, -1)
        return self.norm(x) * (1 + scale) + shift, gate


def mlp(width: int, inner: int) -> nn.Sequential:
    """Two linear layers with GELU between them."""
    return nn.Sequential(nn.Linear(width, inner), nn.GELU(approximate="tanh"), nn.Linear(inner, width))


class ConditionedLayer(nn.Module):
    """Attention and an MLP, each behind an adaptive norm and before a gate."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(Conditioned(width) for _ in range(2))
        self.parts = nn.ModuleList([Attention(width, num_heads), mlp(width, 4 * width)])

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """The next tokens."""
        for norm, part in zip(self.norms, self.parts, strict=True):
            h, gate = norm(x, condition)
            x = x + gate * part(h)
        return x


class DiffusionTransformer(nn.Module):
    """Patches of noisy pictures, adaptive layer norms on a time and a class; the loss is a mean square."""

    def __init__(self, width: int = 768, num_layers: int = 12, num_heads: int = 12, side: int = 32, channels: int = 4) -> None:
        super().__init__()
        self.patches, self.places = nn.Conv2d(channels, width, 2, 2), nn.Parameter(0.02 * torch.randn(1, (side // 2) ** 2, width))
        self.classes, self.times = (
            nn.Embedding(1000, width),
            nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width)),
        )
        self.layers = nn.ModuleList(ConditionedLayer(width, num_heads) for _ in range(num_layers))
        self.norm, self.last = Conditioned(width), nn.Linear(width, 4 * channels)

    def forward(self, x: Tensor, times: Tensor, classes: Tensor, noise: Tensor) -> Loss:
        """x and noise (batch, channels, side, side), times (batch, 256), classes (batch,) -> the loss."""
        condition = self.times(times) + self.classes(classes)
        h = self.patches(x).flatten(2).transpose(1, 2) + self.places
        for layer in self.layers:
            h = layer(h, condition)
        target = nn.functional.pixel_unshuffle(noise, 2).flatten(2).transpose(1, 2)
        return Loss(mse_loss(self.last(self.norm(h, condition)[0]).float(), target))


class TwoStreamLayer(nn.Module):
    """Pictures and texts with weights of their own and one attention over both, as MM-DiT has it."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norms = nn.ModuleList(Conditioned(width) for _ in range(4))
        self.qkv, self.out = (nn.ModuleList(nn.Linear(width, n * width) for _ in range(2)) for n in (3, 1))
        self.mlps = nn.ModuleList(mlp(width, 4 * width) for _ in range(2))

    def forward(self, streams: tuple[Tensor, Tensor], condition: Tensor) -> tuple[Tensor, Tensor]:
        """The next tokens of both streams."""
        pairs = [norm(x, condition) for norm, x in zip(self.norms[:2], streams, strict=True)]
        joined = torch.cat([layer(h) for layer, (h, _) in zip(self.qkv, pairs, strict=True)], 1)
        heads = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in joined.chunk(3, -1))
        mixed = scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2).split([x.shape[1] for x in streams], 1)
        found: list[Tensor] = []
        for i, x in enumerate(streams):
            x = x + pairs[i][1] * self.out[i](mixed[i])
            h, gate = self.norms[2 + i](x, condition)
            found.append(x + gate * self.mlps[i](h))
        return found[0], found[1]


class TwoStreamDiffusion(nn.Module):
    """Layers of two streams between patches and noise; the loss is a mean square."""

    def __init__(self, width: int = 768, num_layers: int = 8, num_heads: int = 12, channels: int = 16, text: int = 1024) -> None:
        super().__init__()
        self.patches, self.texts, self.times = nn.Conv2d(channels, width, 2, 2), nn.Linear(text, width), nn.Linear(256, width)
        self.layers = nn.ModuleList(TwoStreamLayer(width, num_heads) for _ in range(num_layers))
        self.norm, self.last = Conditioned(width), nn.Linear(width, 4 * channels)

    def forward(self, x: Tensor, texts: Tensor, times: Tensor, noise: Tensor) -> Loss:
        """x and noise (batch, channels, side, side), texts (batch, time, text), times (batch, 256) -> the loss."""
        streams, condition = (self.patches(x).flatten(2).transpose(1, 2), self.texts(texts)), self.times(times)
        for layer in self.layers:
            streams = layer(streams, condition)
        target = nn.functional.pixel_unshuffle(noise, 2).flatten(2).transpose(1, 2)
        return Loss(mse_loss(self.last(self.norm(streams[0], condition)[0]).float(), target))


class TimedResidual(nn.Module):
    """Two convolutions behind group norms, with a time added between them, and a shortcut."""

    def __init__(self, num_in: int, num_out: int, times: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, num_in), nn.Conv2d(num_in, num_out, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(8, num_out), nn.Conv2d(num_out, num_out, 3, padding=1)
        self.time, self.shortcut = nn.Linear(times, num_out), nn.Conv2d(num_in, num_out, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """The sum of the shortcut and the convolutions."""
        h = self.conv1(silu(self.norm1(x))) + self.time(silu(time))[:, :, None, None]
        return self.shortcut(x) + self.conv2(silu(self.norm2(h)))


class CrossAttentionUNet(nn.Module):
    """A U-Net whose smallest pictures attend to themselves and to a text; the loss is a mean square."""

    def __init__(self, widths: Sequence[int] = (128, 256, 512), text: int = 768, channels: int = 4) -> None:
        super().__init__()
        times, last, pairs = 4 * widths[0], widths[-1], list(pairwise(widths))
        self.first, self.last = nn.Conv2d(channels, widths[0], 3, padding=1), nn.Conv2d(widths[0], channels, 3, padding=1)
        self.times = nn.Linear(256, times)
        self.down = nn.ModuleList(TimedResidual(a, b, times) for a, b in pairs)
        self.middle, self.attend = TimedResidual(last, last, times), PixelAttention(last)
        self.cross, self.norm = Attention(last, 8, text), nn.LayerNorm(last)
        self.up = nn.ModuleList(TimedResidual(2 * b, a, times) for a, b in reversed(pairs))

    def forward(self, x: Tensor, texts: Tensor, times: Tensor, noise: Tensor) -> Loss:
        """x and noise (batch, channels, side, side), texts (batch, time, text), times (batch, 256) -> the loss."""
        time, h, skipped = self.times(times), self.first(x), list[Tensor]()
        for layer in self.down:
            h = layer(h, time)
            skipped.append(h)
            h = nn.functional.avg_pool2d(h, 2)
        h = self.attend(self.middle(h, time))
        tokens = h.flatten(2).transpose(1, 2)
        tokens = tokens + self.cross(self.norm(tokens), texts)
        h = tokens.transpose(1, 2).unflatten(2, h.shape[2:])
        for layer in self.up:
            h = layer(torch.cat([nn.functional.interpolate(h, scale_factor=2.0), skipped.pop()], 1), time)
        return Loss(mse_loss(self.last(h).float(), noise))


# --- experts, point clouds, tables ------------------------------------------------------------------------------------------------------


class SelectedExperts(nn.Module):
    """Two experts for each token, which each expert selects by torch.where: sizes depend on values."""

    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, num_experts, bias=False)
        self.experts = nn.ModuleList(mlp(width, 2 * width) for _ in range(num_experts))

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, time, width) -> the same shape."""
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).float().softmax(-1).topk(2)
        found = torch.zeros_like(tokens)
        for i, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == i)
            out = expert(tokens[rows]) * weights[rows, place, None]
            found = found.index_add(0, rows, out.to(found.dtype))
        return found.view(x.shape)


class ExpertLayer(nn.Module):
    """Attention and experts, each behind a norm and added to its input."""

    def __init__(self, width: int, num_heads: int, num_experts: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention, self.experts = Attention(width, num_heads), SelectedExperts(width, num_experts)

    def forward(self, x: Tensor) -> Tensor:
        """The next tokens."""
        x = x + self.attention(self.norms[0](x))
        return x + self.experts(self.norms[1](x))


class ExpertLanguageModel(nn.Module):
    """A language model with a mixture of experts in each layer."""

    def __init__(
        self, width: int = 512, num_layers: int = 6, num_heads: int = 8, num_experts: int = 8, vocabulary: int = 16384
    ) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(vocabulary, width), nn.LayerNorm(width)
        self.layers = nn.ModuleList(ExpertLayer(width, num_heads, num_experts) for _ in range(num_layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Answer:
        """The loss of `labels`, and the logits."""
        return answer_of_layers(self, input_ids, labels)


class PointNet(nn.Module):
    """The same layers on each point of a cloud, the maximum over all points, and a class."""

    def __init__(self, widths: Sequence[int] = (64, 128, 1024), num_classes: int = 40) -> None:
        super().__init__()
        pairs = pairwise((3, *widths))
        self.layers = nn.Sequential(*[part for a, b in pairs for part in (nn.Conv1d(a, b, 1), nn.BatchNorm1d(b), nn.ReLU())])
        self.head = nn.Sequential(
            nn.Linear(widths[-1], 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.3), nn.Linear(256, num_classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Logits (batch, classes) of points (batch, 3, count)."""
        return self.head(self.layers(x).amax(2))


class TabularNet(nn.Module):
    """Numbers and categories, embedded, through residual linear layers."""

    def __init__(self, num_numbers: int = 64, num_categories: int = 16, width: int = 512, num_layers: int = 6) -> None:
        super().__init__()
        self.categories = nn.ModuleList(nn.Embedding(100, 16) for _ in range(num_categories))
        self.first, self.last = nn.Linear(num_numbers + 16 * num_categories, width), nn.Linear(width, 1)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm1d(width), nn.Linear(width, 2 * width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(2 * width, width)
            )
            for _ in range(num_layers)
        )

    def forward(self, x: Tensor, categories: Tensor, labels: Tensor) -> Loss:
        """x (batch, numbers), categories (batch, categories), labels (batch,) -> a mean square."""
        embedded = [layer(column) for layer, column in zip(self.categories, categories.unbind(1), strict=True)]
        h = self.first(torch.cat([x, *embedded], 1))
        for layer in self.layers:
            h = h + layer(h)
        return Loss(mse_loss(self.last(h)[:, 0].float(), labels))
