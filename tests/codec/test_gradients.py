"""Gradients pass straight through round_trip, whatever the format, the rounding and the memory order."""

from __future__ import annotations

import pytest
import torch

from paredown.codec.packed import encode, round_trip
from tests.support.compare import assert_same_bits
from tests.support.values import ROUNDINGS, normal

TEXTS = ("e4m3fn", "int4/8@bf16", "uint4/8@bf16+fp32", "e2m1fn/16@e4m3fn", "nf4/8@fp32", "e2m1fn")


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_the_gradient_is_that_of_the_identity(text: str, rounding: str) -> None:
    x = normal(5, 21).requires_grad_()
    weight = normal(5, 21, seed=1)
    y = round_trip(x, text, rounding=rounding)
    assert y.requires_grad
    (y * weight).sum().backward()
    assert x.grad is not None
    assert_same_bits(x.grad, weight)
    assert_same_bits(y.detach(), round_trip(x.detach(), text, rounding=rounding))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_keep_dtype_and_shape(dtype: torch.dtype) -> None:
    x = normal(2, 3, 4, 4, dtype=dtype).to(memory_format=torch.channels_last).requires_grad_()
    round_trip(x, "int8/64@bf16").float().sum().backward()
    assert x.grad is not None
    assert (x.grad.dtype, x.grad.shape) == (dtype, x.shape)
    assert x.grad.eq(1).all()


def test_saturated_and_broken_places_pass_gradients_too() -> None:
    x = torch.tensor([1e9, float("nan"), 1.0], requires_grad=True)
    round_trip(x, "e4m3fn", overflow="saturate")[2].backward()
    assert x.grad is not None and x.grad.tolist() == [0.0, 0.0, 1.0]


def test_given_scales_pass_gradients() -> None:
    x = normal(3, 16).requires_grad_()
    packed = encode(x.detach(), "int8/8@bf16")
    round_trip(x, "int8/8@bf16", scales=packed).sum().backward()
    assert x.grad is not None and x.grad.eq(1).all()


def test_without_gradients_there_is_no_graph() -> None:
    assert not round_trip(normal(4), "e4m3fn").requires_grad
    with torch.no_grad():
        assert not round_trip(normal(4).requires_grad_(), "e4m3fn").requires_grad
