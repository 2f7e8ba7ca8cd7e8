"""Malformed and impossible texts: each error names what was read, what is allowed, and what to do if that is known."""

from __future__ import annotations

import pytest

from paredown.errors import FormatError, ParedownError
from paredown.formats.element import Element
from paredown.formats.format import Format

# text -> what the message has to contain besides the text itself
MALFORMED = {
    # unknown elements
    "": ["eXmY", "intN", "nf4"],
    " ": ["eXmY"],
    "e4m3 fn": ["eXmY", "fnuz"],
    " e4m3fn": ["eXmY"],
    "e4m3fn\n": ["eXmY"],
    "e4": ["eXmY"],
    "m3": ["eXmY"],
    "e4m": ["eXmY"],
    "e-4m3": ["eXmY"],
    "e4m3xyz": ["eXmY", "fn, fnuz, f"],
    "e4m3fnb11": ["eXmY", "bias (b11)"],
    "e4m3nsfn": ["eXmY", "ns"],
    "fp64": ["fp32, bf16, fp16"],
    "\u0665m2": ["eXmY"],
    "e\u0664m3": ["eXmY"],  # digits, but not ours
    "int\u0664": ["intN"],
    # elements of impossible sizes
    "e0m3": ["0 exponent", "1..8"],
    "e9m3": ["9 exponent", "1..8"],
    "e4m24": ["24 mantissa", "0..23"],
    "int0": ["0 bits", "1..16"],
    "int17": ["17 bits", "1..16"],
    "uint64": ["64 bits", "1..16"],
    "e4m0": ["mantissa bit", "e4m0fn"],
    "e1m3ns": ["no value", "fn"],
    "e4m3b151": ["bias 151", "2^-149"],
    # blocks, scales and minimums
    "int4/64": ["needs a scale", "int4/64@bf16", "fp32, bf16, e8m0, e4m3fn"],
    "int4@bf16": ["belongs to a block", "int4/64@bf16"],
    "int4+fp32": ["belongs to a block"],
    "int4/0@bf16": ["block length '0'", "1 to 65536"],
    "int4/65537@bf16": ["block length '65537'", "1 to 65536"],
    "int4/-3@bf16": ["block length '-3'", "1 to 65536"],
    "int4/\u0664@bf16": ["block length", "1 to 65536"],
    "int4/64.0@bf16": ["block length '64.0'", "1 to 65536"],
    "int4/@bf16": ["block length ''", "1 to 65536"],
    "int4/64@": ["'' is no scale", "fp32, bf16, e8m0, e4m3fn"],
    "int4/64@fp16": ["'fp16' is no scale", "fp32, bf16, e8m0, e4m3fn", "small momentum"],
    "int4/64@int8": ["'int8' is no scale", "fp32, bf16, e8m0, e4m3fn"],
    "uint4/64@bf16+": ["'' is no minimum", "fp32, bf16"],
    "uint4/64@bf16+e8m0": ["'e8m0' is no minimum", "fp32, bf16"],
    "uint4/64@bf16+fp32+fp32": ["element/block@scale+minimum"],
    "int4/64@bf16@bf16": ["element/block@scale"],
    "int4/64/64@bf16": ["element/block@scale"],
    "int4/64@bf16+fp32": ["start at 0", "uint4"],
    "e4m3fn/64@bf16+fp32": ["start at 0", "uint8"],
    "int1/64@bf16": ["no positive value", "int2"],
    "int01/64@bf16": [],  # another spelling of the same
    "e8m0/64@bf16": ["no zero"],
    # names from elsewhere
    "fp8": ["e4m3fn or e5m2"],
    "float8_e4m3fn": ["Did you mean e4m3fn"],
    "bfloat16": ["Did you mean bf16"],
    "mxfp4": ["e2m1fn/32@e8m0"],
    "half": ["Did you mean fp16"],
    "INT8": ["Did you mean int8"],
    "E4M3FN/64@bf16": ["Did you mean e4m3fn"],
}


@pytest.mark.parametrize("text", MALFORMED)
def test_malformed_texts_say_what_was_read_and_what_is_allowed(text: str) -> None:
    with pytest.raises(FormatError) as caught:
        Format.parse(text)
    message = str(caught.value)
    assert repr(text) in message
    assert [part for part in MALFORMED[text] if part not in message] == []


@pytest.mark.parametrize("text", ["", "e9m3", "int0", "fp64", "e4m3fn/64@bf16"])
def test_elements_alone_say_so_too(text: str) -> None:
    with pytest.raises(FormatError) as caught:
        Element.parse(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("thing", "name"), [(None, "NoneType"), (8, "int"), (b"int8", "bytes"), (Element.parse("int8"), "Element")]
)
def test_what_is_no_text_is_refused(thing: object, name: str) -> None:
    with pytest.raises(FormatError, match=f"not {name}"):
        Format.parse(thing)  # type: ignore[arg-type]


def test_errors_are_of_one_tree() -> None:
    assert issubclass(FormatError, ParedownError) and issubclass(FormatError, ValueError)


@pytest.mark.parametrize("text", ["e4m3fn", "uint4/64@bf16+fp32", "int8/65536@e8m0", "e1m1", "e4m3b140"])
def test_the_nearest_right_texts_pass(text: str) -> None:
    assert str(Format.parse(text)) == text
