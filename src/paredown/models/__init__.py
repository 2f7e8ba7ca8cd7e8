"""Small reference networks in plain torch.nn, for tests, tasks and benchmarks.

MODELS maps names to constructors: their defaults build a small network, their keywords the published sizes.

>>> sum(p.numel() for p in MODELS["resnet18"]().parameters())
176402
>>> [tuple(x.shape) for x in random_batch("gpt", 2)]
[(2, 64), (2, 64)]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paredown.models.resnet import SumLastResNet, resnet18, resnet50
from paredown.models.small_networks import MLP, ConvNeXt, MobileNet, ShuffleNet, SqueezeNet, UNet
from paredown.models.transformer import GPT, GPTConfig, LSTMModel, ViT, ViTConfig

PICTURE = 32  # height and width of inputs of the small image models in MODELS
LENGTH = 64  # tokens of inputs of the small text models
VOCABULARY = 256
NUM_CLASSES = 10

SMALL_VIT = ViTConfig(dim=64, num_layers=2, num_heads=4, picture=PICTURE, patch=4, num_classes=NUM_CLASSES)
SMALL_GPT = GPTConfig(dim=64, num_layers=2, num_heads=4, vocabulary=VOCABULARY, context=LENGTH)


def small_vit(**changes: Any) -> ViT:
    """Return a small ViT; `changes` are fields of its ViTConfig."""
    return ViT(replace(SMALL_VIT, **changes))


def small_gpt(**changes: Any) -> GPT:
    """Return a small GPT; `changes` are fields of its GPTConfig."""
    return GPT(replace(SMALL_GPT, **changes))


MODELS: dict[str, Callable[..., nn.Module]] = {
    "mlp": partial(MLP, sizes=(3 * PICTURE * PICTURE, 256, 256, NUM_CLASSES)),
    "resnet18": partial(resnet18, num_classes=NUM_CLASSES, width=8, small_input=True),
    "resnet50": partial(resnet50, num_classes=NUM_CLASSES, width=8, small_input=True),
    "sumlast18": partial(SumLastResNet, num_classes=NUM_CLASSES, width=8),
    "squeezenet": partial(SqueezeNet, num_classes=NUM_CLASSES, width=0.125),
    "shufflenet": partial(ShuffleNet, num_classes=NUM_CLASSES, width=0.125),
    "mobilenet": partial(MobileNet, num_classes=NUM_CLASSES, width=0.125),
    "convnext": partial(ConvNeXt, depths=(1, 1, 2, 1), dims=(16, 32, 64, 128), num_classes=NUM_CLASSES),
    "unet": partial(UNet, num_classes=NUM_CLASSES, width=8, depth=3),
    "vit": small_vit,
    "gpt": small_gpt,
    "lstm": partial(LSTMModel, vocabulary=VOCABULARY, dim=64),
}
OF_TEXT = frozenset({"gpt", "lstm"})  # models whose inputs are tokens
OF_PIXELS = frozenset({"unet"})  # models with a class for each pixel


def random_batch(name: str, num: int, *, picture: int = PICTURE, length: int = LENGTH, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return `num` random inputs and targets for MODELS[name]: square images with `picture` pixels a side, or `length` tokens."""
    source = torch.Generator().manual_seed(seed)
    if name in OF_TEXT:
        tokens = torch.randint(VOCABULARY, (num, length + 1), generator=source)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    target = torch.randint(NUM_CLASSES, (num, picture, picture) if name in OF_PIXELS else (num,), generator=source)
    return torch.randn(num, 3, picture, picture, generator=source), target
