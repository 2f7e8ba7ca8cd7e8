"""The reference against ml_dtypes: every code decoded, every bf16 input and every midpoint encoded, for every type that it has."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from paredown.codec import reference
from paredown.formats.element import Element
from paredown.formats.rounding import Overflow, Rounding
from tests.support.compare import assert_same_bits
from tests.support.values import gap_probes, specials, wide_floats

ml_dtypes = pytest.importorskip("ml_dtypes")

TYPES = {
    "e2m1fn": "float4_e2m1fn",
    "e2m3fn": "float6_e2m3fn",
    "e3m2fn": "float6_e3m2fn",
    "e3m4": "float8_e3m4",
    "e4m3": "float8_e4m3",
    "e4m3fn": "float8_e4m3fn",
    "e4m3fnuz": "float8_e4m3fnuz",
    "e4m3b11fnuz": "float8_e4m3b11fnuz",
    "e5m2": "float8_e5m2",
    "e5m2fnuz": "float8_e5m2fnuz",
    "e8m0": "float8_e8m0fnu",
    "bf16": "bfloat16",
}


def their_codes(y: Tensor, text: str) -> Tensor:
    """The codes that ml_dtypes gives to float32 `y`, as int64."""
    dtype = getattr(ml_dtypes, TYPES[text])
    with np.errstate(all="ignore"):
        codes = y.numpy().astype(dtype)
    return torch.from_numpy(codes.view(np.uint16 if codes.itemsize == 2 else np.uint8).astype(np.int64))


def our_codes(y: Tensor, text: str) -> Tensor:
    # ml_dtypes holds 4 and 6 bits at their largest value, and gives NaN or inf for 8
    overflow = Overflow.SATURATE if Element.parse(text).width < 8 else Overflow.NONFINITE
    return reference.codes_of(y, Element.parse(text), Rounding.NEAREST_EVEN, overflow, None)[0]


def comparable(y: Tensor, text: str) -> Tensor:
    """`y` without what ml_dtypes answers in another way for a known reason."""
    if text == "e8m0":  # it rounds float32 subnormals from 2^-127 to 1.5 * 2^-127 up to 2^-126, which is not the nearest
        return y[~((y > 2.0**-127) & (y < 1.5 * 2.0**-127))]
    if Element.parse(text).width < 8:  # these have no NaN: ml_dtypes makes it -0, and round_trip keeps it
        return y[~y.isnan()]
    return y


def check(y: Tensor, text: str) -> None:
    y = comparable(y, text)
    ours, theirs = our_codes(y, text), their_codes(y, text)
    ours_values, theirs_values = (reference.values_of(codes, Element.parse(text)) for codes in (ours, theirs))
    assert_same_bits(ours_values, theirs_values)
    numbers = ~theirs_values.isnan()
    assert torch.equal(ours[numbers], theirs[numbers])


@pytest.mark.parametrize("text", TYPES)
def test_every_bf16_input_encodes_alike(text: str) -> None:
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    check(every, text)


@pytest.mark.parametrize("text", TYPES)
def test_every_gap_its_middle_and_both_neighbours(text: str) -> None:
    probes = gap_probes(text, limit=70_000)
    assert len(probes) >= 5 * (2 ** (Element.parse(text).width - 1) - 9)  # no gap is left out
    check(probes, text)


@pytest.mark.parametrize("text", TYPES)
def test_specials_and_floats_of_every_exponent(text: str) -> None:
    check(torch.cat([specials(), wide_floats(20_000)]), text)


def test_a_wrong_bit_would_be_seen() -> None:
    y = gap_probes("e4m3fn")
    truncated, _ = reference.codes_of(y, Element.parse("e4m3fn"), Rounding.TOWARD_ZERO, Overflow.NONFINITE, None)
    assert not torch.equal(truncated, their_codes(y, "e4m3fn"))
    with pytest.raises(AssertionError):
        assert_same_bits(reference.values_of(truncated, Element.parse("e4m3fn")), y)


def test_what_is_excluded_is_really_different() -> None:
    """The exclusion for e8m0 goes when ml_dtypes rounds to the nearest."""
    y = torch.tensor([1.25 * 2.0**-127])
    assert our_codes(y, "e8m0").item() == 0
    assert their_codes(y, "e8m0").item() == 1
