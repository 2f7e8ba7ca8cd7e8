"""Formats: their text there and back, equality, JSON, and what each part of the text means."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paredown.formats.catalog import CATALOG
from paredown.formats.element import Element
from paredown.formats.format import Format
from tests.support.strategies import BLOCK_LENGTHS, elements, examples, formats


@given(text=formats())
@examples(300)
def test_text_there_and_back(text: str) -> None:
    parsed = Format.parse(text)
    assert str(parsed) == text
    assert Format.parse(str(parsed)) == parsed
    assert Format.parse(parsed) is parsed


@given(text=formats())
@examples(200)
def test_json_there_and_back(text: str) -> None:
    parsed = Format.parse(text)
    again = Format.from_json(json.loads(json.dumps(parsed.to_json())))
    assert (again, hash(again), str(again)) == (parsed, hash(parsed), text)


@given(element=elements(), block=st.sampled_from(BLOCK_LENGTHS))
@examples(100)
def test_the_parts_of_the_text_are_the_parts_of_the_format(element: str, block: int) -> None:
    assert Format.parse(element) == Format(Element.parse(element))
    if element in ("e8m0", "int1"):
        return
    parsed = Format.parse(f"{element}/{block}@bf16")
    assert parsed == Format(Element.parse(element), block, Element.parse("bf16"))


@given(one=formats(), other=formats())
@examples(200)
def test_formats_are_equal_when_all_their_parts_are(one: str, other: str) -> None:
    a, b = Format.parse(one), Format.parse(other)
    parts = [(f.element, f.block, f.scale, f.minimum) for f in (a, b)]
    assert (a == b) == (parts[0] == parts[1])
    assert len({a, b}) == (1 if a == b else 2)


DIFFERENT = ["int4", "int4/64@bf16", "int4/32@bf16", "int4/64@fp32", "uint4/64@bf16", "uint4/64@bf16+bf16", "uint4/64@bf16+fp32"]


def test_each_part_makes_a_difference() -> None:
    assert len({Format.parse(text) for text in DIFFERENT}) == len(DIFFERENT)


@pytest.mark.parametrize(("one", "other"), [("fp32", "e8m23"), ("e2m1fn/32@e8m0", "e2m1f/32@e8m0")])
def test_spellings_of_one_format_are_equal(one: str, other: str) -> None:
    assert Format.parse(one) == Format.parse(other)
    assert hash(Format.parse(one)) == hash(Format.parse(other))


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("e4m3fn", 8),
        ("e2m1fn/32@e8m0", 4.25),
        ("e2m1fn/16@e4m3fn", 4.5),
        ("int4/64@bf16", 4.25),
        ("int8/256@fp32", 8.125),
        ("uint4/64@bf16+fp32", 4.75),
        ("fp32", 32),
    ],
)
def test_bits_per_value(text: str, bits: float) -> None:
    assert Format.parse(text).bits_per_value == bits


@given(text=formats())
@examples(100)
def test_bits_per_value_is_the_limit_of_nbytes(text: str) -> None:
    parsed = Format.parse(text)
    rows, cols = 1000, 8 * (parsed.block or 1)
    without_tensor = parsed.nbytes((rows, cols)) - 4 * parsed.has_tensor_scale
    assert abs(without_tensor - parsed.bits_per_value * rows * cols / 8) < 1e-3  # of a byte: thirds are no float64


@pytest.mark.parametrize("name", CATALOG)
def test_only_scales_in_e4m3fn_bring_one_for_the_tensor(name: str) -> None:
    assert CATALOG[name].has_tensor_scale == ("@e4m3fn" in str(CATALOG[name]))


def test_a_format_is_frozen() -> None:
    with pytest.raises(AttributeError):
        Format.parse("int8").block = 3  # type: ignore[misc]
