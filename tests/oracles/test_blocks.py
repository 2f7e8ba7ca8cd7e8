"""The oracle of blocks against numbers that a pencil finds."""

from __future__ import annotations

from fractions import Fraction

import pytest

from tests.oracles.blocks import (
    Shared,
    affine_parts,
    block_values,
    covering_scale,
    largest_at_most,
    ocp_scale,
    smallest_at_least,
    tensor_scale,
)


def fractions(*numbers: float) -> list[Fraction]:
    return [Fraction(number) for number in numbers]


@pytest.mark.parametrize(
    ("block", "element", "scale"),
    [
        ((7.0, -1.0), "e2m1fn", 1.0),  # floor(log2 7) = 2, emax of 6 is 2
        ((8.0,), "e2m1fn", 2.0),
        ((1.0,), "e4m3fn", 2.0**-8),  # emax of 448 is 8
        ((1.0,), "e5m2", 2.0**-15),
        ((1.0,), "e3m2fn", 2.0**-4),  # of 28
        ((1.0,), "e2m3fn", 2.0**-2),  # of 7.5
        ((127.9,), "int8", 1.0),  # MXINT8 writes its integers in steps of 1/64, so this is its 2^6
        ((0.0, 0.0), "e2m1fn", 2.0**-127),
        ((2.0**-149,), "e5m2", 2.0**-127),
    ],
)
def test_scales_of_ocp(block: tuple[float, ...], element: str, scale: float) -> None:
    assert ocp_scale(fractions(*block), element) == scale


@pytest.mark.parametrize(
    ("block", "element", "kind", "scale"),
    [
        ((7.0,), "e2m1fn", "e8m0", 2.0),  # 7/6 is above 1
        ((6.0,), "e2m1fn", "e8m0", 1.0),
        ((127.0, -254.0), "int8", "bf16", 2.0),
        ((128.0,), "int8", "bf16", 1 + 2.0**-6),  # 128/127 = 1.00787 is just above 1 + 2^-7 = 1.00781
        ((0.0,), "int8", "bf16", 0.0),
        ((2.0**-140,), "int8", "fp32", 2.0**-126),
        ((3.0,), "uint2", "fp32", 1.0),
    ],
)
def test_scales_that_cover(block: tuple[float, ...], element: str, kind: str, scale: float) -> None:
    assert covering_scale(fractions(*block), element, kind) == scale


def test_neighbours_in_bf16() -> None:
    x = 1 + Fraction(1, 1000)
    assert (largest_at_most(x, "bf16"), smallest_at_least(x, "bf16")) == (1, 1 + Fraction(1, 128))
    assert (largest_at_most(-x, "bf16"), largest_at_most(Fraction(2), "bf16")) == (-1 - Fraction(1, 128), 2)


def test_values_of_a_block() -> None:
    numbers = fractions(7.0, 5.0, -2.4, 0.2)
    assert block_values(numbers, Shared(Fraction(1)), "e2m1fn", "nearest_even") == fractions(6, 4, -2, 0)
    assert block_values(numbers, Shared(Fraction(2)), "e2m1fn", "nearest_even") == fractions(8, 4, -2, 0)
    assert block_values(numbers, Shared(Fraction(2)), "e2m1fn", "nearest_away") == fractions(8, 6, -2, 0)
    assert block_values(numbers, Shared(Fraction(0)), "e2m1fn", "nearest_even") == fractions(0, 0, 0, 0)


def test_affine_block() -> None:
    shared = affine_parts(fractions(1.0, 2.2, 4.0), "uint2", "bf16", "fp32")
    assert shared == Shared(Fraction(1), Fraction(1))
    assert block_values(fractions(1.0, 2.2, 4.0), shared, "uint2", "nearest_even") == fractions(1, 2, 4)


def test_scale_of_a_tensor() -> None:
    # 2688 = 448 * 6, so the scale of the tensor is 1, and a block whose largest is 3 has 0.5
    assert tensor_scale(fractions(-2688.0, 3.0), "e2m1fn") == 1
    assert covering_scale(fractions(3.0), "e2m1fn", "e4m3fn", tensor_scale=Fraction(1)) == 0.5
    assert tensor_scale(fractions(0.0), "e2m1fn") == 0


def test_another_rule_gives_another_answer() -> None:
    block = fractions(7.0, 0.9)
    assert ocp_scale(block, "e2m1fn") != covering_scale(block, "e2m1fn", "e8m0")
    assert block_values(block, Shared(Fraction(1)), "e2m1fn", "toward_zero") != block_values(
        block, Shared(Fraction(2)), "e2m1fn", "toward_zero"
    )
