"""Packed codes against Python's own integers: a row is one number, the first value in its lowest bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paredown.codec.reference import pack_bits, unpack_bits

WIDTHS = range(1, 33)


def packed_by_hand(row: list[int], width: int) -> list[int]:
    """The bytes of one row: all its values as one integer, least significant byte first."""
    number = sum(value << (position * width) for position, value in enumerate(row))
    return list(number.to_bytes(-(-len(row) * width // 8), "little"))


def codes(rows: int, cols: int, width: int) -> Tensor:
    return torch.randint(0, 2**width, (rows, cols), generator=torch.Generator().manual_seed(width))


@pytest.mark.parametrize("width", WIDTHS)
def test_bytes_are_those_of_one_long_integer_and_unpacking_gives_the_codes_back(width: int) -> None:
    for cols in (0, 1, 2, 3, 7, 8, 9, 40):
        values = codes(3, cols, width)
        packed = pack_bits(values, width)
        assert packed.dtype is torch.uint8
        assert packed.tolist() == [packed_by_hand(row, width) for row in values.tolist()]
        assert torch.equal(unpack_bits(packed, width, cols), values)


@pytest.mark.parametrize("width", [1, 3, 4, 6, 9, 12, 16, 20])
def test_what_is_left_of_the_last_byte_is_zero(width: int) -> None:
    """So equal tensors have equal bytes, which checksums and comparisons of files rely on."""
    for cols in (1, 3, 5):
        ones = torch.full((2, cols), 2**width - 1)
        used = cols * width % 8 or 8
        assert (pack_bits(ones, width)[:, -1] >> used == 0).all()
