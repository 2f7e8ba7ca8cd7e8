"""Bytes of a shape: against a count value by value, against real storages, and by hand."""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given

from paredown.codec.packed import encode
from paredown.formats.format import Format
from paredown.formats.rounding import Seed
from tests.oracles.exact import element
from tests.support.strategies import examples, formats, shapes

BYTES_OF_SCALE = {"": 0, "fp32": 4, "bf16": 2, "e8m0": 1, "e4m3fn": 1, "e5m2": 1, "e3m4": 1}


def counted_bytes(text: str, shape: tuple[int, ...]) -> int:
    """Walk over every value: set the bits that it takes in its row, and note the block that it falls in."""
    name, _, blocked = text.partition("/")
    block, _, kinds = blocked.partition("@")
    width, block_len, total = element(name).width, int(block or 1), 4 if kinds.startswith(("e4m3fn", "e5m2", "e3m4")) else 0
    rows = shape[0] if len(shape) > 1 else 1
    row = list(product(*map(range, shape[1:] if len(shape) > 1 else shape)))
    for _ in range(rows):
        bits = {position * width + bit for position, _ in enumerate(row) for bit in range(width)}
        blocks = {position // block_len for position, _ in enumerate(row)}
        total += len({bit // 8 for bit in bits}) + len(blocks) * sum(BYTES_OF_SCALE[kind] for kind in kinds.split("+"))
    return total


@given(text=formats(blocks=(1, 2, 3, 5, 8, 16)), shape=shapes(max_side=5))
@examples(150)
def test_nbytes_is_what_a_walk_over_the_values_counts(text: str, shape: tuple[int, ...]) -> None:
    assert Format.parse(text).nbytes(shape) == counted_bytes(text, shape)


# (format, shape, bytes) worked out by hand
BY_HAND = [
    ("int4/64@bf16", (3, 100), 3 * (50 + 2 * 2)),
    ("int4", (3, 3), 3 * 2),  # rows start on a byte
    ("int4", (9,), 5),  # a vector is one row
    ("int4", (), 1),
    ("uint1", (1,), 1),
    ("uint1", (2, 9), 2 * 2),
    ("e3m2fn", (4,), 3),  # four times 6 bits
    ("e3m2fn", (2, 5), 2 * 4),
    ("e4m4f", (1, 3), 4),  # 27 bits
    ("e2m1fn/32@e8m0", (2, 33), 2 * (17 + 2)),
    ("e2m1fn/16@e4m3fn", (2, 16), 2 * (8 + 1) + 4),
    ("e2m1fn/16@e4m3fn", (0,), 4),
    ("uint4/64@bf16+fp32", (1, 65), 33 + 2 * 6),
    ("fp32", (2, 3, 5), 120),
    ("fp32", (0, 7), 0),
    ("int8/64@bf16", (7, 0), 0),
    ("int8/64@bf16", (0,), 0),
    ("int8/64@bf16", (4, 2, 3, 11), 4 * (66 + 2 * 2)),  # the dimensions behind the first are one row
]


@pytest.mark.parametrize(("text", "shape", "expected"), BY_HAND)
def test_nbytes_by_hand(text: str, shape: tuple[int, ...], expected: int) -> None:
    assert Format.parse(text).nbytes(shape) == expected
    assert counted_bytes(text, shape) == expected


@pytest.mark.parametrize(("text", "shape", "expected"), BY_HAND)
def test_nbytes_is_what_storages_hold(text: str, shape: tuple[int, ...], expected: int) -> None:
    packed = encode(torch.ones(shape), text)
    assert sum(t.untyped_storage().nbytes() for t in packed.parts.tensors()) == expected


def test_a_split_of_dimension_0_is_a_split_of_the_bytes() -> None:
    for text in ("int4/64@bf16", "e3m2fn", "uint2/5@bf16+bf16"):
        parsed = Format.parse(text)
        assert parsed.nbytes((7, 13)) == parsed.nbytes((3, 13)) + parsed.nbytes((4, 13))


def test_shapes_may_be_any_iterable() -> None:
    assert Format.parse("int4").nbytes(torch.Size([3, 3])) == Format.parse("int4").nbytes(iter([3, 3])) == 6


@pytest.mark.parametrize("shape", [(), (5,), (0,), (2, 3), (2, 3, 4), (0, 3), (3, 0)])
def test_rows_and_columns(shape: tuple[int, ...]) -> None:
    rows, cols = Format.rows_and_cols(shape)
    assert rows * cols == prod(shape)
    assert rows == (shape[0] if len(shape) > 1 else 1)


def test_numbers_of_numpy_are_whole_numbers_too() -> None:
    assert Format.parse("int4").nbytes((np.int64(3), np.int32(5))) == Format.parse("int4").nbytes((3, 5))
    assert Seed(int(np.int64(7)), step=np.int64(2)).keys() == Seed(7, step=2).keys()
