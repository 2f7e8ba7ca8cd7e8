"""One exact bit a value: against a list comprehension, and the kernels against the reference."""

from __future__ import annotations

from math import inf, nan

import pytest
import torch
from torch import Tensor

from paredown.codec.recompute import NO_BOUND, PIECE, apply_mask, pack_mask, unpack_mask

INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
DEVICES = [pytest.param("cpu", marks=INTERPRETED), pytest.param("cuda", marks=pytest.mark.gpu)]
BOUNDS = ((0.0, NO_BOUND), (0.0, 6.0), (-1.0, 1.0), (-inf, 0.5), (0.5, inf), (0.25, 0.25))
SIZES = (1, 7, 8, 9, 63, 4096, 4097, 5003)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def values(numel: int, dtype: torch.dtype) -> Tensor:
    """Normal ones, those at and beside the bounds, and special ones."""
    x = 3 * torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    special = torch.tensor([0.0, -0.0, 6.0, 1.0, -1.0, 0.5, 0.25, nan, inf, -inf, 1e-30, -1e-30, 5.96875, 6.03125])
    x[: min(numel, len(special))] = special[: min(numel, len(special))]
    return x.to(dtype)


def by_definition(x: Tensor, low: float, high: float) -> list[bool]:
    return [not (v <= low or v >= high) for v in x.tolist()]


def read(bits: Tensor, numel: int) -> list[bool]:
    return [bool(bits[i // 8].item() >> (i % 8) & 1) for i in range(numel)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bounds", BOUNDS)
def test_bits_are_the_definition(dtype: torch.dtype, bounds: tuple[float, float]) -> None:
    for numel in SIZES:
        x = values(numel, dtype)
        bits = pack_mask(x, *bounds)
        assert (bits.dtype, bits.numel()) == (torch.uint8, -(-numel // 8))
        assert read(bits, numel) == by_definition(x, *bounds)
        assert read(bits, 8 * bits.numel())[numel:] == [False] * (8 * bits.numel() - numel)
        out = unpack_mask(bits, torch.empty(numel, dtype=dtype), inside=2.5, outside=-1.0)
        assert out.tolist() == [2.5 if bit else -1.0 for bit in by_definition(x, *bounds)]


def test_booleans() -> None:
    x = values(1003, torch.float32) > 0
    bits = pack_mask(x, 0.0, NO_BOUND)
    assert torch.equal(unpack_mask(bits, torch.empty_like(x), inside=1.0, outside=0.0), x)


def test_pieces_join() -> None:
    """More values than are packed at a time."""
    x = torch.randn(PIECE + 77, generator=torch.Generator().manual_seed(0))
    bits = pack_mask(x, 0.0, NO_BOUND)
    assert torch.equal(unpack_mask(bits, torch.empty_like(x), inside=1.0, outside=0.0), (x > 0).float())


def test_a_relu_of_torch_keeps_what_is_inside() -> None:
    x = values(64, torch.float32).requires_grad_()
    torch.relu(x).sum().backward()
    assert x.grad is not None
    assert x.grad.bool().tolist() == by_definition(x, 0.0, NO_BOUND)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool])
def test_kernels(device: str, dtype: torch.dtype) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from paredown.codec import kernels

    for numel in SIZES:
        x = values(numel, torch.float32) > 0 if dtype is torch.bool else values(numel, dtype)
        for low, high in BOUNDS[:1] if dtype is torch.bool else BOUNDS:
            expected = pack_mask(x, low, high)
            there = x.to(device)
            bits = kernels.pack_mask(there, low, high, torch.full_like(expected, 255, device=device))
            assert torch.equal(bits.cpu(), expected)
            again = kernels.unpack_mask(bits, torch.empty_like(there), 1.0, 0.0)
            assert torch.equal(again.cpu(), unpack_mask(expected, torch.empty_like(x), inside=1.0, outside=0.0))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gradient_is_zeroed_as_the_backward_of_relu_does(device: str, dtype: torch.dtype) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from paredown.codec import kernels

    for numel in SIZES:
        x, grad = values(numel, dtype), values(numel, dtype).flip(0)
        expected = torch.ops.aten.threshold_backward(grad, x, 0)
        bits = pack_mask(x, 0.0, NO_BOUND)
        assert torch.equal(apply_mask(grad, bits).view(torch.uint8), expected.view(torch.uint8)), "NaN and -0.0 included"
        found = kernels.apply_mask(grad.to(device), bits.to(device), torch.empty_like(grad, device=device))
        assert torch.equal(found.cpu().view(torch.uint8), expected.view(torch.uint8))


def test_a_gradient_is_zeroed_in_its_memory_order() -> None:
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    grad = torch.randn_like(x)
    bits = pack_mask(x.permute(0, 2, 3, 1).reshape(-1), 0.0, NO_BOUND)
    assert torch.equal(apply_mask(grad, bits), grad * (x > 0)) and apply_mask(grad, bits).stride() == x.stride()
