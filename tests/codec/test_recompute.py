"""Decode, then go on: the reference against torch's own norms and activations, the kernels against the reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from paredown.codec.packed import encode
from paredown.codec.recompute import NO_BOUND, DecodeSteps, Norm, pack_mask, recompute
from tests.support.values import listed

INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
DEVICES = [pytest.param("cpu", marks=INTERPRETED), pytest.param("cuda", marks=pytest.mark.gpu)]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda x: x,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def batch_norm(x: Tensor, affine: bool) -> tuple[Norm, Tensor]:
    """The norm of (num, channels, ...) and what torch makes of x; channels_last where x is."""
    module = nn.BatchNorm2d(x.shape[1], affine=affine)
    if affine:
        nn.init.normal_(module.weight)
        nn.init.normal_(module.bias)
    y = module(x.clone().requires_grad_())
    node, inner = y.grad_fn, 1 if not x.is_contiguous() else x.shape[2:].numel()
    assert node is not None
    weight, bias = (p if p is None else p.detach() for p in (module.weight, module.bias))
    return Norm(x.shape[1], inner, weight, bias, node._saved_result1, node._saved_result2), y.detach()  # type: ignore[attr-defined]


def layer_norm(x: Tensor, affine: bool) -> tuple[Norm, Tensor]:
    module = nn.LayerNorm(x.shape[-1], elementwise_affine=affine)
    if affine:
        nn.init.normal_(module.weight)
        nn.init.normal_(module.bias)
    y = module(x.clone().requires_grad_())
    node = y.grad_fn
    assert node is not None
    weight, bias = (p if p is None else p.detach() for p in (module.weight, module.bias))
    mean, rstd = (t.view(-1) for t in (node._saved_result1, node._saved_result2))  # type: ignore[attr-defined]
    return Norm(x.shape[-1], 1, weight, bias, mean, rstd, by_row=True), y.detach()


def flat(x: Tensor) -> Tensor:
    """In the order of memory."""
    return x.as_strided((x.numel(),), (1,), 0)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_relu_of_batch_norm(affine: bool, layout: torch.memory_format) -> None:
    x = normal(3, 5, 4, 6).to(memory_format=layout)
    norm, y = batch_norm(x, affine)
    expected = flat(y.relu())
    steps = DecodeSteps(norm, "relu", pack_mask(flat(y), 0.0, NO_BOUND))
    torch.testing.assert_close(recompute(flat(x), steps, torch.float32), expected, rtol=1e-5, atol=1e-5)
    packed = encode(flat(x), "int8/64@bf16")
    torch.testing.assert_close(recompute(packed, steps, torch.float32), expected, rtol=0.05, atol=0.1)
    assert torch.equal(recompute(packed, steps, torch.float32)[expected == 0], torch.zeros(int((expected == 0).sum())))


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_layer_norm_and_activations(affine: bool, activation: str) -> None:
    x = normal(7, 3, 20)
    norm, y = layer_norm(x, affine)
    expected = ACTIVATIONS[activation](y).view(-1)
    torch.testing.assert_close(recompute(x.view(-1), DecodeSteps(norm, activation), torch.float32), expected, rtol=1e-5, atol=1e-5)
    plain = ACTIVATIONS[activation](x).view(-1)
    torch.testing.assert_close(recompute(x.view(-1), DecodeSteps(activation=activation), torch.float32), plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_result_is_rounded_once(dtype: torch.dtype) -> None:
    packed = encode(normal(500).to(dtype), "int8/64@bf16")
    expected = functional.gelu(packed.decode(torch.float32)).to(dtype)
    assert torch.equal(recompute(packed, DecodeSteps(activation="gelu"), dtype), expected)


def test_parameters_that_changed_are_refused() -> None:
    norm, _ = layer_norm(normal(4, 8), affine=True)
    assert norm.bias is not None
    norm.bias.add_(1)
    with pytest.raises(RuntimeError, match="modified in place between forward and backward"):
        recompute(normal(32), DecodeSteps(norm), torch.float32)


CASES: dict[str, tuple[tuple[int, ...], str, str]] = {  # shape, norm, layout
    "channels": ((2, 6, 5, 11), "batch", "contiguous"),
    "channels_last": ((2, 6, 5, 11), "batch", "last"),
    "64 channels_last": ((1, 64, 5, 7), "batch", "last"),
    "256 channels_last": ((1, 256, 4, 5), "batch", "last"),
    "160 channels_last": ((1, 160, 5, 7), "batch", "last"),
    "rows of 64": ((20, 64), "layer", ""),
    "rows of 96": ((22, 96), "layer", ""),
    "rows of 768": ((5, 768), "layer", ""),
    "rows of 2048": ((2, 2048), "layer", ""),
    "rows of 300": ((5, 300), "layer", ""),
    "one row": ((1, 4096), "layer", ""),
    "no norm": ((3, 1371), "", ""),
}
FORMATS = listed("int8/64@bf16 int4/64@bf16 e4m3fn/64@bf16 uint4/64@bf16+bf16 uint2/64@bf16+bf16 int8/256@fp32 int4/32@e8m0")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("affine", [True, False])
def test_kernels(device: str, case: str, affine: bool) -> None:
    """Up to the last place: a GPU fuses a product and a sum, and its erf and exp are its own."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from paredown.codec import kernels

    shape, kind, layout = CASES[case]
    x = normal(*shape).to(memory_format=torch.channels_last) if layout == "last" else normal(*shape)
    norm, y = batch_norm(x, affine) if kind == "batch" else layer_norm(x, affine) if kind == "layer" else (None, x)
    for number, format in enumerate(FORMATS if case == "rows of 96" and affine else FORMATS[:1]):
        activation = ("gelu", "gelu_tanh", "silu", "", "relu")[number % 5] if kind != "batch" else "relu"
        bits = pack_mask(flat(y), 0.0, NO_BOUND) if activation == "relu" else None
        packed = encode(flat(x), format)
        assert kernels.covers_recompute(packed.format)
        expected = recompute(packed, DecodeSteps(norm, activation, bits), torch.float32)
        there = DecodeSteps(moved(norm, device), activation, bits if bits is None else bits.to(device))
        found = kernels.recompute(packed.to(device), there, torch.empty(x.numel(), device=device))
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)
        if number == 0:
            half = kernels.recompute(packed.to(device), there, torch.empty(x.numel(), dtype=torch.bfloat16, device=device))
            torch.testing.assert_close(half.cpu().float(), expected, rtol=0.01, atol=1e-5)


def moved(norm: Norm | None, device: str) -> Norm | None:
    if norm is None:
        return None
    tensors = (t if t is None else t.to(device) for t in (norm.weight, norm.bias, norm.mean, norm.rstd))
    return Norm(norm.channels, norm.inner, *tensors, by_row=norm.by_row)


def test_what_kernels_do_not_cover() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from paredown.codec import kernels
    from paredown.formats.format import Format

    assert not any(
        kernels.covers_recompute(Format.parse(text)) for text in ("nf4/64@fp32", "bf16", "e2m1fn/16@e4m3fn", "int8/48@bf16")
    )
