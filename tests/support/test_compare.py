"""The comparisons pass what they should, and fail what they should."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.compare import assert_same_bits, assert_within, steps_of

nan, inf = float("nan"), float("inf")
NAN_WITH_PAYLOAD = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64])
def test_a_tensor_has_its_own_bits(dtype: torch.dtype) -> None:
    x = torch.tensor([[0, 1], [2, 250]]).to(dtype)
    assert_same_bits(x, x.clone())
    assert_same_bits(x.T, x.T.contiguous())


def test_any_nan_is_any_nan() -> None:
    assert_same_bits(NAN_WITH_PAYLOAD, torch.tensor([nan]))


DIFFERENT = [
    (torch.tensor([0.0]), torch.tensor([-0.0]), "the first at 0: 0.0 and -0.0"),
    (torch.tensor([1.0, 1.0]), torch.tensor([1.0, 1.0 + 2**-23]), "1 of 2 values differ; the first at 1"),
    (torch.tensor([nan]), torch.tensor([1.0]), "nan and 1.0"),
    (torch.tensor([1.0]), torch.tensor([nan]), "1.0 and nan"),
    (torch.tensor([nan]), torch.tensor([inf]), "nan and inf"),
    (torch.tensor([inf]), torch.tensor([-inf]), "inf and -inf"),
    (torch.tensor([1.0]), torch.tensor([1.0, 2.0]), "shapes differ"),
    (torch.tensor([1.0]), torch.tensor([1.0]).half(), "dtypes differ"),
    (torch.tensor([3], dtype=torch.uint8), torch.tensor([131], dtype=torch.uint8), "3 and 131"),
    (torch.tensor([0.0], dtype=torch.bfloat16), torch.tensor([-0.0], dtype=torch.bfloat16), "differ"),
]


@pytest.mark.parametrize(("a", "b", "message"), DIFFERENT)
def test_assert_same_bits_fails(a: Tensor, b: Tensor, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_same_bits(a, b)


# (actual, expected, format, steps): just within, and just beyond
NEAR = [
    ([1.0], [1.25], "e2m1fn", 0.5),
    ([2.0], [1.0], "int8", 1),
    ([0.0, 0.125], [0.0624, 0.0626], "e3m1b4fns", 0.5),
    ([256.0], [272.0], "e4m3fn", 0.5),
    ([4.0], [3.0], "e8m0", 0.5),
    ([nan, inf, 1.0], [nan, inf, 1.0], "e4m3fn", 0.5),
    ([127.0, 1.0], [127.0, 1.5], "int8/64@bf16", 0.5),  # the scale is 1
    ([6.0, 1.0], [6.0, 1.25], "e2m1fn/32@e8m0", 0.5),
    ([1.0, 4.0, 2.0], [1.0, 4.0, 2.5], "uint2/64@bf16+fp32", 0.5),
    ([2688.0, 2.0], [2688.0, 130.0], "e2m1fn/16@e4m3fn", 0.6),  # the scale of this block is 448, its step near 0 is 224
]
FAR = [
    ([1.0], [1.26], "e2m1fn", 0.5),
    ([2.0], [0.99], "int8", 1),
    ([0.125], [0.0624], "e3m1b4fns", 0.5),
    ([256.0], [272.1], "e4m3fn", 0.5),
    ([4.0], [2.9], "e8m0", 0.5),
    ([1.0], [nan], "e4m3fn", 0.5),
    ([nan], [1.0], "e4m3fn", 0.5),
    ([448.0], [inf], "e4m3fn", 0.5),
    ([-inf], [inf], "e5m2", 0.5),
    ([127.0, 1.0], [127.0, 1.501], "int8/64@bf16", 0.5),
    ([6.0, 1.0], [6.0, 1.251], "e2m1fn/32@e8m0", 0.5),
    ([1.0, 4.0, 2.0], [1.0, 4.0, 2.501], "uint2/64@bf16+fp32", 0.5),
    ([2688.0, 2.0], [2688.0, 137.0], "e2m1fn/16@e4m3fn", 0.6),
]


@pytest.mark.parametrize(("actual", "expected", "fmt", "steps"), NEAR)
def test_assert_within_passes(actual: list[float], expected: list[float], fmt: str, steps: float) -> None:
    assert_within(torch.tensor(actual), torch.tensor(expected), fmt, steps)


@pytest.mark.parametrize(("actual", "expected", "fmt", "steps"), FAR)
def test_assert_within_fails(actual: list[float], expected: list[float], fmt: str, steps: float) -> None:
    with pytest.raises(AssertionError, match="steps of"):
        assert_within(torch.tensor(actual), torch.tensor(expected), fmt, steps)


def test_assert_within_sees_shapes() -> None:
    with pytest.raises(AssertionError, match="shapes differ"):
        assert_within(torch.zeros(2), torch.zeros(3), "int8")


def test_steps_follow_the_rows() -> None:
    step, _ = steps_of(torch.tensor([[127.0, 1.0, 254.0], [12.7, 0.0, 0.0]]), "int8/2@fp32")
    assert torch.equal(step[0], torch.tensor([1.0, 1.0, 2.0], dtype=torch.float64))
    assert step[1, 0].item() == pytest.approx(0.1, rel=2**-20)
    assert step[1, 2].item() == 0.0


def test_small_dtypes_get_their_own_rounding_and_no_more() -> None:
    x = torch.tensor([1.0 + 2**-9])
    assert_within(x.bfloat16(), x, "fp32", 0.0)
    with pytest.raises(AssertionError, match="0 steps of fp32"):
        assert_within(x.bfloat16() + 2**-7, x, "fp32", 0.0)
