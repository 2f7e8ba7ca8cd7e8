"""Scales that cover: the smallest one that leaves nothing past the end, for every kind, against exact fractions."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import Tensor

from paredown.codec.packed import PackedTensor, encode
from paredown.codec.reference import Encoding, PackedParts, decode_rows, encode_rows, random_bits, scale_values, tensor_scale_of
from paredown.formats.format import Format
from paredown.formats.rounding import Overflow, Rounding, Seed
from tests.oracles.blocks import Shared, affine_parts, block_values, covering_scale, tensor_scale
from tests.support.compare import assert_same_bits
from tests.support.values import ROUNDINGS, normal

BLOCK = 5
PLAIN = [
    f"{element}/{BLOCK}@{scale}"
    for element in ("int8", "int4", "int2", "uint8", "uint1", "int16", "e4m3fn", "e2m1fn", "nf4", "e3m1b4fns", "e4m3fnuz")
    for scale in ("fp32", "bf16", "e8m0", "e4m3fn")
]
AFFINE = [
    f"{element}/{BLOCK}@{kinds}"
    for element in ("uint4", "uint2", "uint8")
    for kinds in ("bf16+fp32", "fp32+fp32", "bf16+bf16", "e8m0+bf16")
]


def sizes(text: str) -> Tensor:
    """Rows of 13 values, the last block short; every row of another size; zeros and tiny ones too."""
    x = normal(12, 13, seed=3) * torch.exp2(torch.linspace(-30, 30, 12).round())[:, None]
    x[3], x[4, :7] = 0.0, 0.0
    x[5] = normal(13, seed=4) * 2.0**-135
    return x.abs() if one_sided(text) else x


def by_definition(x: Tensor, text: str, rounding: str, bits: Tensor) -> tuple[list[float], Tensor]:
    name, _, kinds = text.partition(f"/{BLOCK}@")
    scale_kind, _, minimum_kind = kinds.partition("+")
    whole = tensor_scale([Fraction(v) for v in x.flatten().tolist()], name) if scale_kind == "e4m3fn" else None
    scales, values = [], []
    for row, row_bits in zip(x.tolist(), bits.tolist(), strict=True):
        for start in range(0, len(row), BLOCK):
            block = [Fraction(v) for v in row[start : start + BLOCK]]
            if minimum_kind:
                shared = affine_parts(block, name, scale_kind, minimum_kind)
            else:
                shared = Shared(covering_scale(block, name, scale_kind, tensor_scale=whole))
            scales.append(float(shared.scale))
            values += [float(v) for v in block_values(block, shared, name, rounding, row_bits[start : start + BLOCK])]
    return scales, torch.tensor(values).view_as(x)


@pytest.mark.parametrize("text", [*PLAIN, *AFFINE])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_scales_and_values_are_those_of_the_definition(text: str, rounding: str) -> None:
    x, seed = sizes(text), Seed(11)
    packed = encode(x, text, rounding=rounding, seed=seed)
    bits = random_bits(seed, 0, x.numel(), x.device).view_as(x)
    scales, values = by_definition(x, text, rounding, bits)
    assert scale_values(packed.parts, packed.format).flatten().tolist() == scales
    assert_same_bits(packed.decode() + 0.0, values + 0.0)  # the oracle of blocks has one zero


COVERING = [*PLAIN, *AFFINE, *(f"uint4/{BLOCK}@e4m3fn+{kind}" for kind in ("fp32", "bf16"))]


def one_sided(text: str) -> bool:
    return text.startswith("uint") and "+" not in text


@pytest.mark.parametrize("text", COVERING)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_nothing_lies_past_the_end(text: str, rounding: str) -> None:
    """Under NONFINITE a value past the end would make its block NaN; the largest random number takes every fraction up."""
    x = normal(400, 20, seed=5)
    x, format = x.abs() if one_sided(text) else x, Format.parse(text)
    encoding = Encoding(format, Rounding(rounding), Overflow.NONFINITE)
    given = PackedParts(tensor_scale=tensor_scale_of(x.abs().max(), format)) if format.has_tensor_scale else None
    parts = encode_rows(x, encoding, given, torch.full(x.shape, 2**32 - 1))
    assert decode_rows(parts, format, 20, torch.float32).isfinite().all()


@pytest.mark.parametrize("text", COVERING)
def test_the_largest_value_is_met_within_a_step(text: str) -> None:
    """If scales fell short of the range, the ends of a block would come back too small by many steps."""
    x = torch.tensor([[5.0 if one_sided(text) else -5.0, 2.0, 0.0, 3.0, 5.0]])
    ends = encode(x, text).decode()[0, [0, 4]]
    levels = {"uint1": 1, "int2": 1, "uint2": 3, "e3m1b4fns": 1.5, "e2m1fn": 3, "nf4": 3}.get(text.split("/")[0], 5)
    span = 10.0 if "+" in text else 5.0
    assert ((ends - x[0, [0, 4]]).abs() <= span / levels).all()


@pytest.mark.parametrize("text", [*PLAIN, *AFFINE])
def test_blocks_with_nan_or_inf_decode_to_nan_and_others_are_untouched(text: str) -> None:
    x = sizes(text)
    broken = torch.zeros_like(x, dtype=torch.bool)
    for row, col, value in ((0, 1, float("nan")), (1, 7, float("inf")), (2, 12, -float("inf"))):
        start = col // BLOCK * BLOCK
        broken[row, start : start + BLOCK] = True
        x[row, col] = value
    clean, packed = encode(torch.where(x.isfinite(), x, 0.0), text), encode(x, text)
    assert torch.equal(packed.decode().isnan(), broken)
    assert torch.equal(packed.decode()[~broken], clean.decode()[~broken])
    assert_says_nan(packed, broken[:, ::BLOCK])


def assert_says_nan(packed: PackedTensor, broken: Tensor) -> None:
    """The scale of the block itself is NaN, as stored."""
    scales = packed.scales
    assert scales is not None
    nan_code = {"e8m0": 255, "e4m3fn": 127}.get(str(packed.format.scale))
    assert torch.equal(scales.isnan() if nan_code is None else scales == nan_code, broken)
