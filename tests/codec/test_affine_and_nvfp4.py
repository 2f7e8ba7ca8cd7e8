"""Formats with more than a scale for each block: a minimum, or one float32 for the tensor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paredown.codec.packed import encode, round_trip
from tests.support.compare import assert_same_bits, assert_within
from tests.support.values import normal

AFFINE = ["uint4/64@bf16+fp32", "uint2/64@bf16+bf16", "uint8/16@fp32+fp32", "uint4/64@e8m0+fp32", "uint1/8@bf16+fp32"]
FLOAT32_MAX = torch.finfo(torch.float32).max


@pytest.mark.parametrize("text", AFFINE)
@pytest.mark.parametrize("offset", [0.0, 100.0, -100.0])
def test_values_on_one_side_of_zero_come_back_within_half_a_step(text: str, offset: float) -> None:
    x = normal(5, 150) + offset
    assert_within(round_trip(x, text), x, text, steps=0.5)
    for rounding in ("toward_zero", "stochastic"):
        assert_within(round_trip(x, text, rounding=rounding), x, text, steps=1)


@pytest.mark.parametrize("value", [3.14159, 0.0, -7.5, 1e-40, -3e38])
def test_a_constant_block_is_exact(value: float) -> None:
    x = torch.full((2, 70), value)
    packed = encode(x, "uint4/64@bf16+fp32")
    assert torch.equal(packed.decode(), x)
    assert packed.scales is not None and not packed.scales.any()


def test_the_ends_of_a_block_are_levels() -> None:
    x = torch.tensor([3.0, 3.4, 3.6, 6.0])
    assert round_trip(x, "uint2/4@fp32+fp32").tolist() == [3.0, 3.0, 4.0, 6.0]
    assert encode(x, "uint2/4@fp32+fp32").codes.tolist() == [[0 | 0 << 2 | 1 << 4 | 3 << 6]]


def test_minimums_are_rounded_down() -> None:
    """So no value lies below its minimum, which an unsigned code could not represent."""
    x = normal(200, 64, seed=2) * 10
    packed = encode(x, "uint4/64@bf16+bf16")
    assert packed.minimums is not None and packed.minimums.dtype is torch.bfloat16
    lowest = x.amin(1)
    minimum = packed.minimums[:, 0].float()
    assert (minimum <= lowest).all()
    bits = packed.minimums[:, 0].view(torch.int16)
    above = torch.where(minimum > 0, bits + 1, bits - 1).view(torch.bfloat16).float()
    assert (above > lowest).all()  # and the next one up would be too high


def test_zeros_of_both_signs_are_one_minimum() -> None:
    x = torch.tensor([0.0, -0.0, 1.0, 3.0])
    for order in ([0, 1, 2, 3], [1, 0, 2, 3]):
        packed = encode(x[order], "uint2/4@fp32+fp32")
        assert packed.minimums is not None
        assert_same_bits(packed.minimums, torch.zeros(1, 1))


def test_a_range_past_float32_is_nan() -> None:
    x = torch.tensor([[FLOAT32_MAX, -FLOAT32_MAX], [1.0, 16.0]])
    y = round_trip(x, "uint4/64@bf16+fp32")
    assert y[0].isnan().all()
    assert y[1].tolist() == [1.0, 16.0]


def nvfp4_by_hand(x: Tensor) -> Tensor:
    """NVFP4 in float32, a value at a time: tensor scale, block scale rounded up to e4m3fn, element to nearest even."""
    levels = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    e4m3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    tensor_scale = x.abs().max() / (448.0 * 6.0)
    out = torch.empty_like(x)
    for start in range(0, x.numel(), 16):
        block = x[start : start + 16]
        wanted = block.abs().max() / 6.0 / tensor_scale
        scale = e4m3[int((e4m3 < wanted).sum().clamp(max=126))] * tensor_scale
        y = (block * (1.0 / scale)).nan_to_num(0.0)
        distance = (y.abs()[:, None] - levels).abs()
        nearest = distance.argmin(1)
        second = (nearest + 1).clamp(max=7)
        tie_to_even = (distance.gather(1, second[:, None]) == distance.gather(1, nearest[:, None]))[:, 0] & (nearest % 2 == 1)
        out[start : start + 16] = torch.copysign(levels[torch.where(tie_to_even, second, nearest)] * scale, y)
    return out


@pytest.mark.parametrize("size", [1.0, 1e-30, 1e30])
def test_nvfp4_by_hand(size: float) -> None:
    x = normal(330) * torch.exp2(torch.linspace(-12, 0, 330)) * size
    packed = encode(x, "e2m1fn/16@e4m3fn")
    assert packed.tensor_scale is not None and packed.tensor_scale.dtype is torch.float32
    assert packed.tensor_scale.item() == (x.abs().max() / (448.0 * 6.0)).item()
    assert torch.equal(packed.decode(), nvfp4_by_hand(x))


def test_the_tensor_scale_ignores_what_is_not_finite() -> None:
    x = normal(4, 32)
    x[0, 0], x[1, 20] = float("inf"), float("nan")
    packed, clean = encode(x, "e2m1fn/16@e4m3fn"), encode(torch.where(x.isfinite(), x, 0.0), "e2m1fn/16@e4m3fn")
    assert packed.tensor_scale is not None and clean.tensor_scale is not None
    assert torch.equal(packed.tensor_scale, clean.tensor_scale)
    assert torch.equal(packed.decode()[2:], clean.decode()[2:])


@pytest.mark.parametrize("x", [torch.zeros(40), torch.zeros(0), torch.full((40,), float("nan")), torch.tensor(5.0)])
def test_tensors_without_a_largest_value(x: Tensor) -> None:
    assert_same_bits(round_trip(x, "e2m1fn/16@e4m3fn"), x)


def test_blocks_far_below_the_largest_one_keep_some_value() -> None:
    """The smallest block scale is 2^-9 of the tensor's: what is smaller than half of its first step is 0, the rest is not."""
    x = torch.zeros(2, 16)
    x[0, 0] = 448.0 * 6  # the tensor's scale is 1
    x[1, :4] = torch.tensor([2.0**-9, 2.0**-10, 2.0**-11, 2.0**-12])
    assert round_trip(x, "e2m1fn/16@e4m3fn")[1, :4].tolist() == [2.0**-9, 2.0**-10, 0.0, 0.0]
