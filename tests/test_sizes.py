"""Sizes: what texts mean, how byte counts read, and that a bad size gets a sentence."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paredown.errors import BudgetError
from paredown.sizes import parse_bytes, say_bytes
from tests.support.strategies import examples

BYTES_OF = {
    "0": 0,
    "17": 17,
    "17B": 17,
    "8GiB": 8 * 2**30,
    "8 GiB": 8 * 2**30,
    " 8gib ": 8 * 2**30,
    "8GB": 8_000_000_000,
    "1.5KiB": 1536,
    "1.5KB": 1500,
    "0.1KB": 100,
    ".5MiB": 2**19,
    "2.0001KB": 2000,  # what is left of a byte is dropped
    "3TiB": 3 * 2**40,
    "3TB": 3 * 10**12,
    "1PiB": 2**50,
    "9007199254740993": 2**53 + 1,  # not through a float
}


@pytest.mark.parametrize(("text", "count"), BYTES_OF.items())
def test_texts_mean_bytes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


def test_whole_numbers_are_bytes() -> None:
    assert parse_bytes(0) == 0 and parse_bytes(2**60 + 1) == 2**60 + 1
    assert parse_bytes(np.int64(7)) == 7 and type(parse_bytes(np.int64(7))) is int  # type: ignore[arg-type]


@given(percent=st.decimals(0, 300, places=3, allow_nan=False, allow_infinity=False), whole=st.integers(0, 2**50))
@examples(200)
def test_a_share_is_never_more_than_its_part_of_the_whole(percent: object, whole: int) -> None:
    exact = Fraction(str(percent)) * whole / 100
    assert exact - 1 < parse_bytes(f"{percent}%", whole=whole) <= exact


# size -> what the message has to say
BAD = {
    "": "'8GiB'",
    "GiB": "'8GiB'",
    "-8GiB": "'-8GiB'",
    "8,5GiB": "'8,5GiB'",
    "1e9": "cannot be read",
    "8 G": "write 8GiB or 8GB",
    "8m": "write 8MiB or 8MB",
    "8Gbit": "unit 'Gbit' is unknown",
    "8 parsecs": "unit 'parsecs' is unknown",
    "\u0668GiB": "cannot be read",
    "60%": "no size is known here that it is relative to",
    -1: "below 0",
    True: "type bool",
    0.6: "type float",
    8e9: "type float",
    None: "type NoneType",
}


@pytest.mark.parametrize("size", BAD)
def test_bad_sizes_get_a_sentence(size: object) -> None:
    with pytest.raises(BudgetError) as caught:
        parse_bytes(size)  # type: ignore[arg-type]
    assert str(size) in str(caught.value) and BAD[size] in str(caught.value)  # type: ignore[index]


SAID = {
    0: "0 B",
    1: "1 B",
    1023: "1023 B",
    1024: "1.00 KiB",
    1536: "1.50 KiB",
    2**20 - 1: "1.00 MiB",  # not 1024.00 KiB
    2**20: "1.00 MiB",
    8 * 2**30: "8.00 GiB",
    1_739_461_755: "1.62 GiB",
    1000 * 2**30: "1000.00 GiB",
    5 * 2**60: "5120.00 PiB",
    -1536: "-1.50 KiB",
}


@pytest.mark.parametrize(("count", "text"), SAID.items())
def test_counts_read_well(count: int, text: str) -> None:
    assert say_bytes(count) == text


@given(count=st.integers(0, 2**60))
@examples(300)
def test_what_is_said_is_what_was_meant(count: int) -> None:
    said = say_bytes(count)
    number, unit = said.split()
    half_a_digit = 0 if unit == "B" else parse_bytes(f"0.005{unit}") + 1
    assert abs(parse_bytes(said) - count) <= half_a_digit
    assert float(number) < 1024 or unit == "PiB"
