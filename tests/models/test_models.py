"""The reference networks: shapes, published parameter counts, gradients everywhere, and what each promises."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from paredown.models import MODELS, NUM_CLASSES, OF_PIXELS, OF_TEXT, VOCABULARY, random_batch
from paredown.models.resnet import ResNet, SumLastResNet, resnet18, resnet50
from paredown.models.small_networks import ConvNeXt, MobileNet, ShuffleNet, SqueezeNet, UNet
from paredown.models.transformer import GPT, GPTConfig, LSTMModel, Scored, ViT, token_loss

PUBLISHED: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "ResNet-18": (resnet18, 11_689_512),
    "ResNet-50": (resnet50, 25_557_032),
    "ViT-B/16": (ViT, 86_567_656),
    "GPT-2 124M": (GPT, 124_439_808),
    "GPT-2 124M, own head": (lambda: GPT(GPTConfig(tied=False)), 124_439_808 + 50257 * 768),
    "ConvNeXt-T": (ConvNeXt, 28_589_128),
    "SqueezeNet, 32 x 32": (SqueezeNet, 734_986),
    "ShuffleNet-v2, 32 x 32": (ShuffleNet, 1_263_854),
    "MobileNet-v2, 32 x 32": (MobileNet, 2_296_922),
    "ResNet-18, 32 x 32": (lambda: resnet18(num_classes=10, small_input=True), 11_173_962),
    "PEPPP's ResNet-18": (lambda: SumLastResNet(num_classes=21), 11_168_832 + 513 * 21),
}


def loss_of(name: str, model: nn.Module) -> torch.Tensor:
    x, target = random_batch(name, 4)
    logits = model(x)
    return token_loss(logits, target) if name in OF_TEXT else cross_entropy(logits, target)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_the_published_ones(name: str) -> None:
    build, count = PUBLISHED[name]
    with torch.device("meta"):
        assert sum(p.numel() for p in build().parameters()) == count


@pytest.mark.parametrize("name", MODELS)
def test_shapes(name: str) -> None:
    torch.manual_seed(0)
    x, target = random_batch(name, 3)
    logits = MODELS[name]()(x)
    if name in OF_TEXT:
        assert logits.shape == (*target.shape, VOCABULARY)
    elif name in OF_PIXELS:
        assert logits.shape == (3, NUM_CLASSES, *target.shape[1:])
    else:
        assert logits.shape == (3, NUM_CLASSES)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_reach_every_parameter(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    loss_of(name, model).backward()
    dead = [key for key, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all() or not p.grad.any()]
    assert not dead


@pytest.mark.parametrize("name", MODELS)
def test_a_few_steps_lower_the_loss(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses: list[float] = []
    for _ in range(6):
        loss = loss_of(name, model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.98 * losses[0]


# --- what each promises -----------------------------------------------------------------------------------------------


def test_the_names_of_a_resnet_are_torchvisions() -> None:
    with torch.device("meta"):
        names = set(resnet50().state_dict())
        assert [name for name, _ in resnet18().named_children()] == [
            *("conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4", "avgpool", "fc"),
        ]
    there = {
        "conv1.weight",
        "bn1.running_var",
        "layer1.0.downsample.1.weight",
        "layer3.5.conv3.weight",
        "layer4.2.bn2.bias",
        "fc.bias",
    }
    assert there <= names
    assert "layer1.1.downsample.0.weight" not in names and len(names) == 320


@pytest.mark.parametrize(("small_input", "size", "expected"), [(True, 32, 4), (False, 64, 2)])
def test_a_resnet_shrinks_pictures_as_its_first_layers_say(small_input: bool, size: int, expected: int) -> None:
    model = resnet18(num_classes=2, width=4, small_input=small_input)
    seen: list[torch.Size] = []
    model.layer4.register_forward_hook(lambda _module, _args, out: seen.append(out.shape))
    model(torch.randn(2, 3, size, size))
    assert seen == [(2, 32, expected, expected)]


def test_a_resnet_keeps_channels_last() -> None:
    model = MODELS["resnet18"]().to(memory_format=torch.channels_last)
    assert isinstance(model, ResNet)
    seen: list[bool] = []
    model.layer3.register_forward_hook(
        lambda _module, _args, out: seen.append(out.is_contiguous(memory_format=torch.channels_last))
    )
    model(torch.randn(2, 3, 32, 32).to(memory_format=torch.channels_last))
    assert seen == [True]


def test_gpt_does_not_see_what_follows() -> None:
    torch.manual_seed(0)
    model = MODELS["gpt"]()
    ids, _ = random_batch("gpt", 2)
    changed = ids.clone()
    changed[:, 40:] = (changed[:, 40:] + 1) % VOCABULARY
    before, after = model(ids), model(changed)
    assert torch.equal(before[:, :40], after[:, :40])
    assert not torch.isclose(before[:, 40], after[:, 40]).all()


def test_vit_sees_everything() -> None:
    torch.manual_seed(0)
    model = MODELS["vit"]()
    x, _ = random_batch("vit", 1)
    x.requires_grad_()
    model(x).sum().backward()
    assert x.grad is not None and x.grad.flatten(2).any(dim=2).all()
    assert x.grad[..., -1, -1].any()


def test_a_tied_head_is_the_embedding() -> None:
    with torch.device("meta"):
        tied, untied = GPT(GPTConfig()), GPT(GPTConfig(tied=False))
    assert tied.head.weight is tied.tokens.weight
    assert untied.head.weight is not untied.tokens.weight


def test_the_loss_comes_with_targets() -> None:
    torch.manual_seed(0)
    ids, targets = random_batch("gpt", 2)
    for model in (MODELS["gpt"](), LSTMModel(vocabulary=VOCABULARY, dim=16)):
        answer = model(ids=ids, targets=targets)
        assert isinstance(answer, Scored)
        assert torch.equal(answer.logits, model(ids))
        assert answer.loss.item() == pytest.approx(cross_entropy(answer.logits.transpose(1, 2), targets).item(), rel=1e-5)


def test_dropout_is_for_training_alone() -> None:
    torch.manual_seed(0)
    ids, _ = random_batch("gpt", 2)
    model = MODELS["gpt"](dropout=0.1)
    assert not torch.equal(model(ids), model(ids))
    model.eval()
    assert torch.equal(model(ids), model(ids))


def test_a_unet_needs_what_the_way_down_left() -> None:
    torch.manual_seed(0)
    model = UNet(width=4, depth=2).eval()
    x = torch.randn(1, 3, 16, 16)
    before = model(x)
    model.up[1].convs[0].weight.data[:, :4] = 0.0  # the half that reads the way down
    assert not torch.allclose(before, model(x))
