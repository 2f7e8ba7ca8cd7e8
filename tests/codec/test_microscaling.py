"""Microscaling from OCP's definition: the shared exponent, and each element rounded to nearest even and saturated."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import Tensor

from paredown.codec.packed import encode, round_trip
from paredown.codec.reference import scale_values
from paredown.formats.catalog import CATALOG
from tests.oracles.blocks import Shared, block_values, covering_scale, ocp_scale
from tests.support.values import normal, specials

BLOCK = 32
MX = ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4"]
TEXTS = [*(str(CATALOG[name]) for name in MX), "int8/32@e8m0"]


def rows_of_many_sizes() -> Tensor:
    """Rows of 70 values, so that the last block is short: each row another power of two, then special rows."""
    x = normal(24, 70, seed=1) * torch.exp2(torch.linspace(-140, 120, 24).round())[:, None]
    rows = torch.zeros(6, 70)
    rows[1, 5] = 2.0**-149
    rows[2] = normal(70, seed=2) * 2.0**-140
    rows[3] = torch.linspace(-7.999, 7.999, 70)
    rows[4] = torch.tensor([1.0, 2.0, 4.0, 8.0, 1.75, 1.875, 1.9375]).repeat(10)
    finite = specials()
    rows[5, : len(finite)] = torch.where(finite.isfinite(), finite, 0.0)
    return torch.cat([x, rows])


def by_definition(x: Tensor, text: str, rule: str) -> tuple[Tensor, Tensor]:
    """The scale of each block and every value, in exact fractions."""
    name = text.split("/")[0]
    scales, values = [], []
    for row in x.tolist():
        for start in range(0, len(row), BLOCK):
            block = [Fraction(v) for v in row[start : start + BLOCK]]
            scale = ocp_scale(block, name) if rule == "ocp" else covering_scale(block, name, "e8m0")
            scales.append(float(scale))
            values += [float(v) for v in block_values(block, Shared(scale), name, "nearest_even")]
    return torch.tensor(scales).view(len(x), -1), torch.tensor(values).view_as(x)


@pytest.mark.parametrize("rule", ["ocp", "cover"])
@pytest.mark.parametrize("text", TEXTS)
def test_scales_and_values_are_those_of_the_definition(text: str, rule: str) -> None:
    x = rows_of_many_sizes()
    x = x.clamp(-(2.0**126), 2.0**126)  # above, a rounded value may lie past float32's end
    packed = encode(x, text, scales=rule)
    scales, values = by_definition(x, text, rule)
    assert torch.equal(scale_values(packed.parts, packed.format), scales)
    assert torch.equal(packed.decode(), values)
    assert torch.equal(round_trip(x, text, scales=rule), values)


@pytest.mark.parametrize("text", TEXTS)
def test_stored_scale_is_the_exponent_plus_127(text: str) -> None:
    x = torch.tensor([[1.0], [8.0], [2.0**-100], [0.0]])
    emax = {"e4m3fn": 8, "e5m2": 15, "e3m2fn": 4, "e2m3fn": 2, "e2m1fn": 2, "int8": 6}[text.split("/")[0]]
    codes = encode(x, text, scales="ocp").scales
    assert codes is not None and codes.dtype is torch.uint8
    assert codes.flatten().tolist() == [127 - emax, 130 - emax, 27 - emax, 0]


def test_ocp_saturates_where_cover_does_not() -> None:
    x = torch.tensor([7.9, 1.0])
    assert round_trip(x, "e2m1fn/32@e8m0", scales="ocp").tolist() == [6.0, 1.0]
    assert round_trip(x, "e2m1fn/32@e8m0").tolist() == [8.0, 1.0]


@pytest.mark.parametrize("text", TEXTS)
def test_a_block_with_nan_or_inf_says_so_in_its_scale(text: str) -> None:
    x = normal(3, 64)
    x[0, 3], x[1, 40], x[2, 0] = float("nan"), float("inf"), -float("inf")
    packed = encode(x, text, scales="ocp")
    assert packed.scales is not None
    assert (packed.scales == 255).tolist() == [[True, False], [False, True], [True, False]]
    values = packed.decode()
    broken = torch.zeros(3, 64, dtype=torch.bool)
    broken[0, :32] = broken[1, 32:] = broken[2, :32] = True
    assert torch.equal(values.isnan(), broken)
    clean = torch.where(broken, 0.0, x)
    assert torch.equal(values[~broken], round_trip(clean, text, scales="ocp")[~broken])


@pytest.mark.parametrize("text", TEXTS)
def test_finite_tensors_stay_finite(text: str) -> None:
    """Up to half of float32's largest value; above that, what rounds up may be past it."""
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.full((BLOCK,), torch.finfo(dtype).max / 2, dtype=dtype)
        for rule in ("ocp", "cover"):
            assert round_trip(x, text, scales=rule).isfinite().all(), f"{dtype}, {rule}"
