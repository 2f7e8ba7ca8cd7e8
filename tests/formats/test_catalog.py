"""The rows of the catalog against the numbers that their sources state."""

from __future__ import annotations

import pytest
import torch

from paredown.codec.packed import round_trip
from paredown.formats.catalog import CATALOG, PEPPP_HIGH, PEPPP_LOW, ROWS

# PEPPP: (word length, mantissa bits) in the order of its configurations, low formats first
PEPPP_WORDS = {
    (3, 1): 5, (3, 2): 6, (3, 3): 7, (3, 4): 8, (4, 1): 6, (4, 2): 7, (4, 3): 8, (4, 4): 9, (5, 1): 7, (5, 2): 8, (5, 3): 9,
    (6, 7): 14, (6, 9): 16, (6, 11): 18, (7, 7): 15, (7, 9): 17, (7, 11): 19, (8, 7): 16, (8, 9): 18, (8, 11): 20,
}  # fmt: skip
# the smallest normal value: QPyTorch's exponents end at -(2^(e-1) - 1); with 8 bits ours end at float32's -126
PEPPP_SMALLEST = {3: 2.0**-3, 4: 2.0**-7, 5: 2.0**-15, 6: 2.0**-31, 7: 2.0**-63, 8: 2.0**-126}
PEPPP_TOP_BINADE = {3: 2.0**3, 4: 2.0**7, 5: 2.0**15, 6: 2.0**31, 7: 2.0**63, 8: 2.0**127}


def test_peppp_has_99_configurations_of_20_formats() -> None:
    assert (*PEPPP_LOW, *PEPPP_HIGH) == tuple(PEPPP_WORDS)
    assert len(PEPPP_LOW) * len(PEPPP_HIGH) == 99


@pytest.mark.parametrize(("size", "word"), PEPPP_WORDS.items())
def test_peppp_formats(size: tuple[int, int], word: int) -> None:
    exponent_bits, mantissa_bits = size
    element = CATALOG[f"peppp_e{exponent_bits}m{mantissa_bits}"].element
    assert element.width == word
    assert element.smallest == PEPPP_SMALLEST[exponent_bits]
    assert element.max_value == PEPPP_TOP_BINADE[exponent_bits] * (2 - 2.0**-mantissa_bits)
    assert element.inf_code is None and element.nan_code is None


@pytest.mark.parametrize("size", PEPPP_WORDS)
def test_peppp_rounds_like_its_quantizer(size: tuple[int, int]) -> None:
    """More than half of the smallest value becomes it, half or less becomes 0, and past the end is the end."""
    name = f"peppp_e{size[0]}m{size[1]}"
    smallest, top = PEPPP_SMALLEST[size[0]], PEPPP_TOP_BINADE[size[0]] * (2 - 2.0 ** -size[1])
    x = torch.tensor([smallest / 2, smallest / 2 * 1.0001, smallest * 0.49, -smallest, top, float("inf"), -float("inf")])
    expected = torch.tensor([0.0, smallest, 0.0, -smallest, top, top, -top])
    assert torch.equal(round_trip(x, CATALOG[name], overflow="saturate"), expected)


# largest, smallest normal, smallest subnormal, overflow threshold, underflow threshold
ASSIGNMENTS = {
    "mpfa_forward": (30.0, 2.0**-10, 2.0**-13, 31.0, 2.0**-14),
    "mpfa_backward": (114688.0, 2.0**-14, 2.0**-16, 122880.0, 2.0**-17),
    "mpfa_high": (8581545984.0, 2.0**-30, 2.0**-39, 2.0**32 * (2 - 2.0**-10), 2.0**-40),
}


@pytest.mark.parametrize("name", ASSIGNMENTS)
def test_formats_of_precision_assignments(name: str) -> None:
    largest, normal, subnormal, past, below = ASSIGNMENTS[name]
    element = CATALOG[name].element
    assert (element.max_value, element.smallest, 2.0**element.min_exponent) == (largest, subnormal, normal)
    assert element.inf_code is None and element.nan_code is None
    just_below = lambda v: torch.nextafter(torch.tensor(v), torch.tensor(0.0)).item()  # noqa: E731
    x = torch.tensor([past, just_below(past), below, just_below(below)])
    inf = float("inf")
    assert round_trip(x, CATALOG[name], rounding="nearest_away").tolist() == [inf, largest, subnormal, 0.0]


# OCP Microscaling 1.0, table 1, and NVFP4: (element, its largest value, block length, scale, bits per value)
BLOCKS = {
    "mxfp8_e4m3": ("e4m3fn", 448.0, 32, "e8m0", 8.25),
    "mxfp8_e5m2": ("e5m2", 57344.0, 32, "e8m0", 8.25),
    "mxfp6_e3m2": ("e3m2fn", 28.0, 32, "e8m0", 6.25),
    "mxfp6_e2m3": ("e2m3fn", 7.5, 32, "e8m0", 6.25),
    "mxfp4": ("e2m1fn", 6.0, 32, "e8m0", 4.25),
    "nvfp4": ("e2m1fn", 6.0, 16, "e4m3fn", 4.5),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_microscaling_formats(name: str) -> None:
    row = CATALOG[name]
    found = (str(row.element), row.element.max_value, row.block, str(row.scale), row.bits_per_value)
    assert found == BLOCKS[name]
    assert row.has_tensor_scale == (name == "nvfp4")


# largest value and smallest magnitude of the 8-bit floats, from the OCP 8-bit specification and ml_dtypes' description
EIGHT_BITS = {
    "e4m3fn": (448.0, 2.0**-9),
    "e5m2": (57344.0, 2.0**-16),
    "e3m4": (15.5, 2.0**-6),
    "e4m3fnuz": (240.0, 2.0**-10),
    "e5m2fnuz": (57344.0, 2.0**-17),
}


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_eight_bit_floats(name: str) -> None:
    element = CATALOG[name].element
    assert (element.max_value, element.smallest) == EIGHT_BITS[name]


def test_names_are_unique_and_the_table_is_immutable() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS) == len(CATALOG)
    assert all(row.note for row in ROWS)
    with pytest.raises(TypeError):
        CATALOG["mine"] = CATALOG["int8_block"]  # type: ignore[index]
