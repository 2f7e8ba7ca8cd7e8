"""Elements against the exact oracle: every code of every element up to 8 bits, samples above, and their properties."""

from __future__ import annotations

import random
from fractions import Fraction
from math import inf, isnan, nan
from struct import pack, unpack

import pytest

from paredown.errors import FormatError
from paredown.formats.element import Element
from tests.oracles.exact import Exact, element
from tests.support.values import SPREAD

SIZES = [(x, y) for x in range(1, 8) for y in range(7) if 1 + x + y <= 8]
SUFFIXES = [f"{specials}{ns}" for specials in ("", "fn", "fnuz", "f") for ns in ("", "ns")]


def is_possible(x: int, y: int, suffix: str) -> bool:
    """IEEE specials take the last exponent: they need a mantissa bit, and with one exponent bit the subnormals."""
    return suffix not in ("", "ns") or (y > 0 and (x > 1 or suffix == ""))


SMALL = [f"e{x}m{y}{suffix}" for x, y in SIZES for suffix in SUFFIXES if is_possible(x, y, suffix)]
INTEGERS = [f"{kind}{width}" for kind in ("int", "uint") for width in range(1, 9)]
BIASED = ["e4m3b11", "e4m3b11fnuz", "e2m1b0fn", "e3m2b40f", "e5m2b20ns", "e1m1b100f", "e4m3b0fns"]


def same(a: float, b: Fraction | float) -> bool:
    return a == b or (isnan(a) and isnan(b))


@pytest.mark.parametrize("text", [*SMALL, *INTEGERS, *BIASED, "nf4", "e8m0"])
def test_every_code_of_small_elements(text: str) -> None:
    tested, exact = Element.parse(text), element(text)
    assert tested.width == exact.width
    values = tested.values()
    assert len(values) == 2**exact.width
    for code, value in enumerate(values):
        assert same(value, exact.value(code)), f"code {code}: {value}, by definition {exact.value(code)}"
        assert same(tested.value(code), value)


@pytest.mark.parametrize(
    "text", ["bf16", "fp16", "fp32", "e5m10", "e6m9f", "e8m11fns", "e8m7fn", "e8m7fnuz", "e7m23", "int16", "uint13"]
)
def test_sampled_codes_of_wide_elements(text: str) -> None:
    tested, exact, rng = Element.parse(text), element(text), random.Random(text)
    edges = {0, 1, 2**exact.width - 1, 2 ** (exact.width - 1), 2 ** (exact.width - 1) - 1, tested.max_code, tested.max_code + 1}
    for code in sorted(e for e in edges if e < 2**exact.width) + [rng.randrange(2**exact.width) for _ in range(2000)]:
        assert same(tested.value(code), exact.value(code)), f"code {code}"


@pytest.mark.parametrize("text", [*SMALL, *INTEGERS, *BIASED, "bf16", "fp16", "fp32", "e8m7fn", "e6m9f", "e8m0", "nf4"])
def test_ends_and_special_codes(text: str) -> None:
    tested, exact = Element.parse(text), element(text)
    assert tested.max_value == exact.max
    assert tested.value(tested.max_code) == exact.max
    assert tested.min_value == lowest(exact)
    assert tested.signed == (lowest(exact) < 0)
    assert tested.inf_code is None or tested.value(tested.inf_code) == inf
    assert tested.nan_code is None or isnan(tested.value(tested.nan_code))
    if exact.width <= 8:
        meanings = [exact.value(code) for code in range(2**exact.width)]
        assert (tested.nan_code is not None) == any(isnan(m) for m in meanings)
        assert (tested.inf_code is not None) == (inf in meanings)
        assert tested.smallest == min(m for m in map(abs, meanings) if 0 < m < inf)


def lowest(exact: Exact) -> Fraction:
    return exact.table[0] if exact.table else -exact.rung(exact.last_rung_below())


@pytest.mark.parametrize("text", [*SMALL, *INTEGERS, *BIASED, *SPREAD])
def test_every_number_that_encoding_gives_is_a_float32(text: str) -> None:
    tested = Element.parse(text)
    codes = (
        range(tested.max_code + 1) if tested.max_code < 1000 else [0, 1, 2, 3, *range(tested.max_code - 900, tested.max_code + 1)]
    )
    values = [tested.value(code) for code in codes]
    assert [unpack("f", pack("f", value))[0] for value in values] == values


REFUSED_BIASES = ["e4m3b148", "e4m3b150", "e8m23fnuz", "e4m3b149ns", "e2m1b150fn"]


@pytest.mark.parametrize("text", REFUSED_BIASES)
def test_elements_with_values_below_float32_are_refused(text: str) -> None:
    """Their smallest steps lie below 2^-149, so some codes would not be float32 numbers."""
    exact = element(text)
    step = exact.rung(1) if not exact.hole else exact.rung(2) - exact.rung(1)
    assert step < Fraction(1, 2**149)
    with pytest.raises(FormatError, match=text):
        Element.parse(text)


ALIKE = [
    ("fp32", "e8m23"),
    ("bf16", "e8m7"),
    ("fp16", "e5m10"),
    ("e2m1fn", "e2m1f"),
    ("e4m3fn", "e4m3b7fn"),
    ("e4m3fnuz", "e4m3b8fnuz"),
    ("e5m2", "e5m2b15"),
    ("e3m0f", "e3m0fns"),  # without a mantissa nothing is subnormal
    ("e3m0fnuz", "e3m0fnuzns"),
]
UNLIKE = [
    ("e4m3", "e4m3fn"),
    ("e4m3fn", "e4m3f"),
    ("e4m3fn", "e4m3fns"),
    ("int8", "uint8"),
    ("e4m3", "e4m3b8"),
    ("nf4", "int4"),
    ("e8m0", "e8m0f"),
]


@pytest.mark.parametrize(("one", "other"), ALIKE)
def test_elements_that_read_alike_are_equal(one: str, other: str) -> None:
    a, b = Element.parse(one), Element.parse(other)
    assert all(same(a.value(code), b.value(code)) for code in range(min(2**a.width, 4096)))
    assert (a, hash(a)) == (b, hash(b))
    assert (str(a), str(b)) == (one, other)


@pytest.mark.parametrize(("one", "other"), UNLIKE)
def test_elements_that_read_otherwise_differ(one: str, other: str) -> None:
    assert Element.parse(one) != Element.parse(other)


@pytest.mark.parametrize(("text", "code"), [("e4m3fn", 256), ("int4", -1), ("nf4", 16), ("uint1", 2)])
def test_codes_out_of_range_are_refused(text: str, code: int) -> None:
    with pytest.raises(FormatError, match=rf"{text} has codes 0\.\..* not {code}"):
        Element.parse(text).value(code)


def test_a_wrong_value_would_be_seen() -> None:
    assert not same(448.0, element("e4m3").value(0x7E))
    assert not same(nan, Fraction(1)) and not same(1.0, nan)
