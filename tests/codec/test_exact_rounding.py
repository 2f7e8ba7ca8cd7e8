"""The reference against exact fractions: a spread of elements, every rounding, both overflows, random bits at their turning points."""

from __future__ import annotations

from math import isfinite, isinf, isnan

import pytest
import torch
from torch import Tensor

from paredown.codec import reference
from paredown.formats.element import Element
from paredown.formats.rounding import Overflow, Rounding
from tests.oracles.exact import element
from tests.support.compare import assert_same_bits
from tests.support.values import OVERFLOWS, SPREAD, gap_probes, specials, wide_floats, words

SMALL = [f"e{x}m{y}{suffix}" for x, y in [(1, 1), (2, 2), (2, 0)] for suffix in ("fn", "fnuz", "fns", "fnuzns")]
WIDTHS = [f"{kind}{width}" for kind in ("int", "uint") for width in range(1, 17)]
ELEMENTS = sorted({*SPREAD, *SMALL, "e2m2ns", *WIDTHS})


def probes(text: str, count: int) -> Tensor:
    return torch.cat([gap_probes(text, limit=count), specials(), wide_floats(count, seed=len(text))])


def round_trip(y: Tensor, text: str, rounding: str, overflow: str, bits: Tensor | None) -> Tensor:
    """Without packing: codes, what they mean, and inf or NaN for values that have no code."""
    codes, unsaid = reference.codes_of(y, Element.parse(text), Rounding(rounding), Overflow(overflow), bits)
    values = reference.values_of(codes, Element.parse(text))
    return torch.where(unsaid, torch.where(y.isnan(), y, torch.copysign(torch.tensor(torch.inf), y)), values)


def expected(y: Tensor, text: str, rounding: str, overflow: str, bits: Tensor | None = None) -> Tensor:
    numbers = [0] * len(y) if bits is None else bits.tolist()
    exact = element(text)
    return torch.tensor([exact.rounded(v, rounding, overflow, b) for v, b in zip(y.tolist(), numbers, strict=True)])


@pytest.mark.parametrize("rounding", ["nearest_even", "toward_zero", "nearest_away"])
@pytest.mark.parametrize("text", ELEMENTS)
def test_roundings_without_chance(text: str, rounding: str) -> None:
    y = probes(text, 40)
    for overflow in OVERFLOWS:
        assert_same_bits(round_trip(y, text, rounding, overflow, None), expected(y, text, rounding, overflow))


@pytest.mark.parametrize("text", ELEMENTS)
def test_stochastic_rounding_turns_where_the_fraction_says(text: str) -> None:
    """Each value with a random number, with the smallest one that takes it up, and with the one before that."""
    y = probes(text, 30)
    finite = [v if isfinite(v) else 0.0 for v in y.tolist()]
    turns = torch.tensor([element(text).turn(v) for v in finite]).clamp(max=2**32 - 1)
    bits = torch.cat([words(len(y)), turns, (turns - 1).clamp(min=0)])
    y = y.repeat(3)
    for overflow in OVERFLOWS:
        assert_same_bits(round_trip(y, text, "stochastic", overflow, bits), expected(y, text, "stochastic", overflow, bits))


@pytest.mark.parametrize("text", ELEMENTS)
def test_numbers_get_their_one_code(text: str) -> None:
    """The code of a rounded number is the one with an empty mantissa in the hole, of two's complement, or the place in a table."""
    exact, y = element(text), probes(text, 40)
    codes, _ = reference.codes_of(y, Element.parse(text), Rounding.NEAREST_EVEN, Overflow.SATURATE, None)
    values = expected(y, text, "nearest_even", "saturate")
    for code, value in zip(codes.tolist(), values.tolist(), strict=True):
        if not isnan(value):
            assert code == exact.code_of(value), f"{value} has code {code}"


@pytest.mark.parametrize("text", ELEMENTS)
def test_special_codes_are_used_where_they_are(text: str) -> None:
    """Under NONFINITE a code means inf or NaN whenever the element has such a code; otherwise the place is marked."""
    exact, y = element(text), torch.tensor([float("inf"), -float("inf"), float("nan")])
    codes, unsaid = reference.codes_of(y, Element.parse(text), Rounding.NEAREST_EVEN, Overflow.NONFINITE, None)
    meanings = [exact.value(code) for code in codes.tolist()]
    if exact.width <= 10:
        says_nan = any(isnan(exact.value(code)) for code in range(2**exact.width))
        assert unsaid.tolist() == [not says_nan] * 3
    if not unsaid.any():
        assert isnan(meanings[2])
        assert all(isnan(m) or isinf(m) for m in meanings[:2])


@pytest.mark.parametrize(("text", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_16_bits_as_torch_casts_them(text: str, dtype: torch.dtype) -> None:
    y = torch.cat([specials(), wide_floats(20_000), gap_probes(text, limit=70_000)])
    codes, _ = reference.codes_of(y, Element.parse(text), Rounding.NEAREST_EVEN, Overflow.NONFINITE, None)
    assert_same_bits(reference.values_of(codes, Element.parse(text)), y.to(dtype).float())


def test_a_wrong_rounding_would_be_seen() -> None:
    y = probes("e4m3fn", 60)
    for wrong in ("toward_zero", "nearest_away"):
        with pytest.raises(AssertionError):
            assert_same_bits(round_trip(y, "e4m3fn", wrong, "saturate", None), expected(y, "e4m3fn", "nearest_even", "saturate"))
