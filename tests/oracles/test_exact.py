"""The oracle against numbers that a pencil finds, and against mistakes planted in it."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import copysign, inf, isnan, nan

import pytest

from tests.oracles.exact import element, float32, floor_log2, goes_up

# (element, code, value): each one worked out by hand from the bit fields
CODES = [
    ("e4m3fn", 0b0_1000_101, 3.25),
    ("e4m3fn", 0b0_1111_110, 448),
    ("e4m3fn", 0b0_0000_001, Fraction(1, 512)),
    ("e4m3", 0b0_1110_111, 240),
    ("e4m3fnuz", 0b0_0111_000, Fraction(1, 2)),
    ("e4m3b11", 0b1_1011_100, Fraction(-3, 2)),
    ("e5m2", 0b1_00000_11, Fraction(-3, 65536)),
    ("e2m1fn", 0b0_11_1, 6),
    ("e3m1b4fns", 0b0_000_1, 0),
    ("e3m1b4fns", 0b0_001_0, Fraction(1, 8)),
    ("e1m3", 0b0_0_111, Fraction(7, 4)),
    ("int8", 0x80, -128),
    ("int2", 0b11, -1),
    ("int1", 1, -1),
    ("uint4", 15, 15),
    ("e8m0", 0, Fraction(1, 2**127)),
    ("e8m0", 130, 8),
    ("nf4", 15, 1),
    ("nf4", 7, 0),
    ("bf16", 0x3F80, 1),
    ("fp16", 0x7BFF, 65504),
]


@pytest.mark.parametrize(("text", "code", "value"), CODES)
def test_codes_that_a_pencil_finds(text: str, code: int, value: Fraction) -> None:
    assert element(text).value(code) == value


@pytest.mark.parametrize(
    ("text", "code", "special"),
    [
        ("e5m2", 0x7C, inf),
        ("e5m2", 0xFC, -inf),
        ("e5m2", 0x7D, nan),
        ("e4m3fn", 0xFF, nan),
        ("e4m3fnuz", 0x80, nan),
        ("e8m0", 255, nan),
    ],
)
def test_special_codes(text: str, code: int, special: float) -> None:
    value = element(text).value(code)
    assert isnan(value) if isnan(special) else value == special


LISTS = [
    ("int2", [-1, 0, 1]),
    ("int1", [-1, 0]),
    ("uint2", [0, 1, 2, 3]),
    ("e2m1fn", [-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6]),
    ("e2m0fns", [-4, -2, -1, 0, 1, 2, 4]),
    ("e1m1", [-1, 0, 1]),
    ("e2m1ns", [-3, -2, -1.5, -1, 0, 1, 1.5, 2, 3]),
]


@pytest.mark.parametrize(("text", "numbers"), LISTS)
def test_all_numbers(text: str, numbers: list[float]) -> None:
    assert element(text).numbers() == numbers


# (element, y, nearest_even, nearest_away, toward_zero); without a code for it, what is past the end is inf
ROUNDED = [
    ("e2m1fn", 2.5, 2, 3, 2),
    ("e2m1fn", -2.5, -2, -3, -2),
    ("e2m1fn", 3.5, 4, 4, 3),
    ("e2m1fn", 0.25, 0, 0.5, 0),
    ("e2m1fn", 7.0, inf, inf, 6),
    ("e2m1fn", 6.9, 6, 6, 6),
    ("e4m3fn", 464.0, 448, nan, 448),
    ("e4m3", -248.0, -inf, -inf, -240),
    ("int4", 7.5, inf, inf, 7),
    ("int4", -6.5, -6, -7, -6),
    ("uint4", -0.5, 0, -inf, 0),
    ("int1", -0.75, -1, -1, 0),
    ("e3m1b4fns", 0.0625, 0, 0.125, 0),
    ("e3m1b4fns", 0.0626, 0.125, 0.125, 0),
    ("e8m0", 3.0, 4, 4, 2),
    ("e8m0", 0.0, nan, nan, nan),
    ("nf4", 0.9, 1, 1, 0.7229568362236023),
    ("nf4", -0.9, -1, -1, -0.6961928009986877),
]


@pytest.mark.parametrize(("text", "y", "even", "away", "zero"), ROUNDED)
def test_rounding_that_a_pencil_finds(text: str, y: float, even: float, away: float, zero: float) -> None:
    results = [element(text).rounded(y, rounding) for rounding in ("nearest_even", "nearest_away", "toward_zero")]
    for result, expected in zip(results, (even, away, zero), strict=True):
        assert result == expected or (isnan(result) and isnan(expected))


@pytest.mark.parametrize(
    ("text", "y", "end"),
    [("e4m3fn", inf, 448), ("e5m2", -inf, -57344), ("uint3", -9.0, 0), ("int3", -9.0, -3), ("nf4", 2.0, 1), ("int1", 4.0, 0)],
)
def test_saturation_ends_at_the_last_number(text: str, y: float, end: float) -> None:
    assert element(text).rounded(y, "nearest_even", "saturate") == end


def test_stochastic_rounding_turns_at_one_random_number() -> None:
    # 1.3125 lies 5/8 of the way from 1 to 1.5 in e2m1fn: the 29 top bits need to reach 2^29 * 3/8
    turn = element("e2m1fn").turn(1.3125)
    assert turn == 3 * 2**29
    assert element("e2m1fn").rounded(1.3125, "stochastic", bits=turn) == 1.5
    assert element("e2m1fn").rounded(1.3125, "stochastic", bits=turn - 1) == 1.0
    # in the hole of e3m1b4fns, from 0 to 1/8, all 30 bits count: 1/32 is a quarter of the way
    assert element("e3m1b4fns").rounded(1 / 32, "stochastic", bits=3 * 2**30) == 0.125
    assert element("e3m1b4fns").rounded(1 / 32, "stochastic", bits=3 * 2**30 - 1) == 0.0
    assert (element("int4").turn(2.0), element("e8m0").turn(3.0), element("e8m0").turn(2.0)) == (2**32, 2**31, 2**32)


def test_zeros_keep_their_sign_where_there_are_two() -> None:
    signs = {text: copysign(1.0, element(text).rounded(-0.0, "nearest_even")) for text in ("e4m3fn", "e4m3fnuz", "int8", "nf4")}
    assert signs == {"e4m3fn": -1.0, "e4m3fnuz": 1.0, "int8": 1.0, "nf4": 1.0}


def test_code_of_is_the_other_way_round() -> None:
    for text in ("e4m3fn", "e3m2ns", "int5", "uint5", "nf4", "int1"):
        exact = element(text)
        assert [exact.value(exact.code_of(float(number))) for number in exact.numbers()] == exact.numbers()


@pytest.mark.parametrize(("x", "exponent"), [(1, 0), (1.5, 0), (2, 1), (0.75, -1), (448, 8), (127, 6), (2.0**-149, -149)])
def test_floor_log2(x: float, exponent: int) -> None:
    assert floor_log2(Fraction(x)) == exponent


def test_float32_is_the_rounding_of_float32() -> None:
    assert float32(Fraction(1, 10)) == Fraction(13421773, 2**27)
    assert float32(1 + Fraction(1, 2**24)) == 1
    assert float32(1 + Fraction(3, 2**24)) == 1 + Fraction(1, 2**22)
    thirds = [sign * Fraction(2) ** k / 3 for k in range(-151, 129) for sign in (1, -1)]
    assert [float(float32(x)) for x in thirds] == [element("fp32").rounded(x, "nearest_even") for x in thirds]


def test_planted_mistakes_are_seen() -> None:
    right = element("e4m3fn")
    for wrong in (replace(right, bias=8), replace(right, specials=""), replace(right, hole=True), replace(right, mantissa_bits=2)):
        assert [wrong.value(code) for code in range(128)] != [right.value(code) for code in range(128)]
    half = Fraction(1, 2)
    assert goes_up(half, True, "nearest_even", 0, 0) != goes_up(half, False, "nearest_even", 0, 0)
    assert goes_up(half, False, "nearest_away", 0, 0) != goes_up(half, False, "nearest_even", 0, 0)
